"""A replica with the built-in model as a real process: constrained requests over a socket, alone and in company."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer

from engine.protocol.specs import ModelSpec, ReplicaSpec
from engine.protocol.types import (
    FinishReason,
    Grammar,
    GrammarKind,
    RejectReason,
    SamplingParams,
    SchedulingTerms,
    Scope,
    ScopeKind,
)
from tests.engine.replica.test_server import Peer, finished
from tests.engine.structured_output.test_sandbox import ENDLESS
from tests.engine.structured_output.texts import EMBER

LIMIT_S = 60.0
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["new", "late"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
VOWELS = Grammar(GrammarKind.REGEX, "[aeiou]{3,9}!")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    model = ModelSpec(name="ember", folder=str(EMBER), kv_bytes=64 << 20, dtype="float32")
    spec = ReplicaSpec(
        model=model, address=f"unix:{folder}/r", pulse=f"{folder}/pulse", boot=1, device="cpu", threads=1
    )
    command = [sys.executable, "-m", "engine.replica.server", msgspec.json.encode(spec).decode()]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stderr=log, cwd=Path(__file__).parents[3])
    yield spec.address
    process.terminate()
    assert process.wait(20) == 0, (folder / "log").read_text()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(EMBER / "tokenizer.json"))


@pytest.fixture
def peer(address: str) -> Peer:
    return Peer(address, LIMIT_S)


def prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    tokens: list[int] = tokenizer.encode(f"<|user|>{text}<|end|><|assistant|>").ids
    return tokens


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    decoded: str = tokenizer.decode(tokens)
    return decoded


def test_constrained_texts_do_not_depend_on_company(peer: Peer, tokenizer: Tokenizer) -> None:
    """The same requests one after the other, then all at once with others that nothing constrains."""
    asks = [(prompt(tokenizer, f"Tell me about customer {number}."), (JSON, VOWELS)[number % 2]) for number in range(4)]
    for id, (tokens, grammar) in enumerate(asks):
        peer.submit(id, tokens, max_tokens=60, grammar=grammar)
        peer.until(finished(id), LIMIT_S)
    for id, (tokens, grammar) in enumerate(asks, 100):
        peer.submit(id, tokens, max_tokens=60, grammar=grammar)
        peer.submit(id + 100, tokens, max_tokens=20)
    peer.until(finished(*range(100, 104), *range(200, 204)), LIMIT_S)
    for id in range(4):
        assert peer.finished[id].reason == peer.finished[100 + id].reason
        assert peer.tokens[id] == peer.tokens[100 + id]
    for id in (1, 3):
        assert peer.finished[id].reason == FinishReason.STOP
        assert re.fullmatch("[aeiou]{3,9}!", text_of(tokenizer, peer.tokens[id]))


def test_sampled_choices_match_their_schema(peer: Peer, tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=7, logprobs=1)
    peer.submit(1, prompt(tokenizer, "Make up a person."), max_tokens=120, grammar=JSON, n=4, sampling=sampling)
    peer.until(finished(1, 2, 3, 4), LIMIT_S)
    ended = [id for id in (1, 2, 3, 4) if peer.finished[id].reason == FinishReason.STOP]
    assert len(ended) > 1
    for id in ended:
        Draft202012Validator(SCHEMA).validate(json.loads(text_of(tokenizer, peer.tokens[id])))
    assert len({tuple(peer.tokens[id]) for id in (1, 2, 3, 4)}) == 4


def test_a_grammar_that_cannot_be_used_is_rejected_before_anything_starts(peer: Peer, tokenizer: Tokenizer) -> None:
    tokens = prompt(tokenizer, "Hello.")
    peer.submit(1, tokens, grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"not": {}}'), n=2)
    peer.submit(3, tokens, grammar=Grammar(GrammarKind.LARK, ENDLESS))
    peer.submit(4, tokens, max_tokens=20, grammar=VOWELS, terms=SchedulingTerms(erase=True), scope=Scope())
    peer.until(finished(1, 3, 4), LIMIT_S)
    for id, named in ((1, '"not"'), (3, "0.5 s")):
        assert peer.rejected[id].reason == RejectReason.GRAMMAR
        assert named in peer.rejected[id].message
    assert peer.started.keys() == {4}
    assert peer.finished[4].reason == FinishReason.STOP


def test_one_whose_grammar_takes_its_time_is_overtaken_and_may_leave(peer: Peer, tokenizer: Tokenizer) -> None:
    tokens = prompt(tokenizer, "Hello.")
    scope = Scope(ScopeKind.TENANT, b"o" * 16)
    for id in range(8):
        peer.submit(id, tokens, grammar=Grammar(GrammarKind.LARK, f"{ENDLESS}\n// {id}"), scope=scope)
    peer.submit(10, tokens, scope=scope)
    peer.until(finished(10), LIMIT_S)
    assert not peer.rejected.keys() >= set(range(8)), "they were overtaken"
    peer.cancel(*range(8))
    peer.until(finished(*range(8)), LIMIT_S)
    assert {peer.finished[id].reason for id in range(8) if id in peer.finished} == {FinishReason.CANCELLED}
    peer.until(lambda peer: peer.load.running == peer.load.waiting == 0, LIMIT_S)
