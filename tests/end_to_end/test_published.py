"""An operator's published system prompt: every tenant's first call reads it, and nobody's own words go with it."""

from pathlib import Path
from typing import Any

from tests.end_to_end.conftest import EMBER, Hearth, serving

SYSTEM = "You are the assistant of a library. Answer in one sentence, and name the shelf where it stands. " * 4
BLOCK_TOKENS = 16


def cached(hearth: Hearth, token: str, system: str, said: str, **more: Any) -> tuple[int, int]:
    """How many of the prompt's tokens were cached, and how many it has."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": said}]
    with hearth.client(token) as client:
        answer = client.post(f"/ai/run/{EMBER}", json={"messages": messages, "max_tokens": 4, **more})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["result"]["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


def test_a_published_prompt_is_cached_for_every_tenant_and_their_own_words_for_none_else(tmp_path: Path) -> None:
    (tmp_path / "library.txt").write_text(SYSTEM)
    settings = f'\n[[models]]\nname = "{EMBER}"\nblock_tokens = {BLOCK_TOKENS}\npublic_prefixes = ["library.txt"]\n'
    with serving(tmp_path, settings) as hearth:
        _, ann = hearth.account("ann")
        _, bob = hearth.account("bob")
        question = "Where do I find the history of lighthouses on the northern coast, and who wrote it down first?"
        first, tokens = cached(hearth, ann, SYSTEM, question)
        assert first > 0, "nobody has asked before, and the prompt is there"
        assert first % BLOCK_TOKENS == 0
        assert tokens - first > 2 * BLOCK_TOKENS, "the question has blocks of its own"
        again, _ = cached(hearth, ann, SYSTEM, question)
        assert again == (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS, "her own words are cached for her"
        assert cached(hearth, bob, SYSTEM, question) == (first, tokens), "and not for him"
        assert cached(hearth, bob, SYSTEM[:-9] + "elsewhere.", question)[0] < first, (
            "another prompt, from where it differs"
        )
