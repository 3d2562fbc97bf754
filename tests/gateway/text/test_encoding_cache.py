"""Encoded runs of an account's earlier requests: always the ids of the whole text, and found by nobody else."""

import gc
import json
import tracemalloc
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from gateway.text.control_tokens import encode_ids
from gateway.text.encoding_cache import KEEP_S_MAX, RUNS_MAX, EncodingCache, ScopedEncodings
from gateway.text.tokenizer import ModelTokenizer
from tests.support.model_folders import CHATML, CORPUS, LLAMA3, shapes, special, unigram, write

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
NAMES = [
    *("chatml", "llama3", "phi3", "mistral-first", "mistral-always", "mistral-never", "mistral-normalizer", "ember"),
    *("split", "unigram", "unigram-bytes", "plain"),
]


def _split() -> Tokenizer:
    """Like Llama 3's: a pattern splits, after a normalizer that composes characters."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _unigram(*, byte_fallback: bool) -> Tokenizer:
    """Without the control tokens among its pieces that these few lines of training leave without an alternative."""
    document = json.loads(unigram(byte_fallback=byte_fallback).to_str())
    document["added_tokens"] = document["added_tokens"][:1]
    document["model"]["vocab"] = [piece for piece in document["model"]["vocab"] if piece[0] not in ("<s>", "</s>")]
    return Tokenizer.from_str(json.dumps(document))


def _folders(root: Path) -> Iterator[tuple[str, Path]]:
    yield from shapes(root)
    llama = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    chat = ["<|im_start|>", "<|im_end|>"]
    tokenizers = {
        "split": (_split(), llama, LLAMA3, {"bos_token": "<|begin_of_text|>"}),
        "unigram": (_unigram(byte_fallback=False), chat, CHATML, {}),
        "unigram-bytes": (_unigram(byte_fallback=True), chat, CHATML, {}),
        "plain": (_split(), [], PLAIN, {}),
    }
    for name, (tokenizer, tokens, template, more) in tokenizers.items():
        tokenizer.add_special_tokens([special(token) for token in tokens])
        yield name, write(root / name, tokenizer, template, **more)


@cache
def _text(name: str) -> ModelTokenizer:
    return ModelTokenizer(_paths()[name])


@cache
def _paths() -> dict[str, Path]:
    return dict(_folders(Path(mkdtemp())))


_WORDS = [
    "the",
    " fox",
    "dog's",
    "  ",
    "\n",
    "\n\n",
    " \n ",
    "\t",
    "12345",
    "é",
    "e\u0301",
    "東京",
    "😀",
    "ﬁ",
    "x",
    "▁",
]
_EDGES = ["<", "|>", "<|im_end|>", "</s>", "[INST]", "<|eot_id|>", "im_end", "\U000f0000"]
_LINES = st.lists(st.sampled_from(_WORDS), max_size=8).map("".join)
_ANY_LINES = st.lists(st.sampled_from([*_WORDS, *_EDGES]), max_size=8).map("".join)


def _talk(lines: Sequence[str]) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[place % 2], "content": line} for place, line in enumerate(lines)]


def _whole(text: ModelTokenizer, talk: list[dict[str, Any]]) -> list[int]:
    """The ids that the model's own tokenizer gives all that the template writes, at once."""
    variables = {**text._special, "messages": talk, "tools": None, "add_generation_prompt": True}
    return encode_ids(text._tokenizer, text._templates["default"].render(variables))


def _turns(lines: list[str]) -> Iterator[list[dict[str, Any]]]:
    """A conversation as its client sends it, turn by turn."""
    return (_talk(lines[:turn]) for turn in range(1, len(lines) + 1, 2))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(lines=st.lists(_LINES, min_size=1, max_size=7))
def test_every_turn_has_the_ids_of_its_whole_text(name: str, lines: list[str]) -> None:
    text, encodings = _text(name), EncodingCache()
    for talk in _turns(lines):
        whole = _whole(text, talk)
        for spread in (False, True):
            assert text.encode_chat(talk, spread=spread, known=_scope(encodings)) == whole
    encodings.check()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(talks=st.lists(st.lists(_ANY_LINES, min_size=1, max_size=5), min_size=1, max_size=4))
def test_texts_that_spell_control_tokens_have_the_ids_that_they_have_alone(name: str, talks: list[list[str]]) -> None:
    """Conversations share one cache, in which each finds what the others left."""
    text, encodings = _text(name), EncodingCache()
    for lines in talks:
        for talk in _turns(lines):
            assert text.encode_chat(talk, known=_scope(encodings)) == text.encode_chat(talk)


def test_an_earlier_turn_is_not_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []

    def spy(tokenizer: Tokenizer, run: str) -> list[int]:
        encoded.append(run)
        return encode_ids(tokenizer, run)

    monkeypatch.setattr("gateway.text.control_tokens.encode_ids", spy)
    text, encodings = _text("chatml"), EncodingCache()
    lines = [f"line {place} of the talk" for place in range(9)]
    for talk in _turns(lines):
        text.encode_chat(talk, known=_scope(encodings))
    for line in lines:
        assert [line in run for run in encoded].count(True) == 1, line


# ---- who finds what ---------------------------------------------------------------------------------------------


class _Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def _scope(
    encodings: EncodingCache, account: str = "ann", scope: bytes = b"x", epoch: int = 0, keep_s: float | None = None
) -> ScopedEncodings:
    return encodings.of_scope(account, scope, epoch, keep_s)


def _add(encodings: EncodingCache, texts: Sequence[str], tokenizer: str = "t", **scope: Any) -> None:
    encodings.add(_scope(encodings, **scope), tokenizer, {text: [len(text)] for text in texts})
    encodings.check()


def _found(encodings: EncodingCache, texts: Sequence[str], tokenizer: str = "t", **scope: Any) -> list[str]:
    found = encodings.find(_scope(encodings, **scope), tokenizer, texts)
    encodings.check()
    assert all(list(ids) == [len(text)] for text, ids in found.items())
    return list(found)


def test_only_the_same_account_scope_epoch_and_tokenizer_find_a_run() -> None:
    encodings = EncodingCache()
    _add(encodings, ["a"])
    assert _found(encodings, ["a", "b"]) == ["a"]
    assert _found(encodings, ["a"], account="bob") == []
    assert _found(encodings, ["a"], scope=b"other user") == []
    assert _found(encodings, ["a"], tokenizer="another") == []
    assert _found(encodings, ["a"], epoch=1) == []
    assert _found(encodings, ["a"]) == [], "a later epoch ended it"


def test_a_later_epoch_frees_what_was_there_and_a_late_request_leaves_nothing() -> None:
    encodings = EncodingCache()
    _add(encodings, ["a" * 10_000])
    encodings.reach_epoch("ann", 3)
    assert encodings.bytes < 2_000
    _add(encodings, ["late"], epoch=2)
    assert _found(encodings, ["late"], epoch=2) == []
    assert _found(encodings, ["late"], epoch=3) == []
    _add(encodings, ["new"], epoch=3)
    assert _found(encodings, ["new"], epoch=3) == ["new"]


@pytest.mark.parametrize(("keep_s", "lasts_s"), [(None, KEEP_S_MAX), (5.0, 5.0), (1e6, KEEP_S_MAX)])
def test_a_run_is_found_for_so_long_after_its_last_use_and_freed_then(keep_s: float | None, lasts_s: float) -> None:
    clock = _Clock()
    encodings = EncodingCache(clock)
    _add(encodings, ["used", "idle"], keep_s=keep_s)
    clock.now += lasts_s - 1
    assert _found(encodings, ["used"], keep_s=keep_s) == ["used"]
    clock.now += 1
    assert _found(encodings, ["used", "idle"], keep_s=keep_s) == ["used"]
    clock.now += lasts_s
    encodings.sweep(["ann", "nobody"])
    encodings.check()
    assert encodings.bytes < 2_000, "freed without a request"
    clock.now += KEEP_S_MAX
    encodings.sweep(["ann"])
    assert encodings.bytes == 0


def test_an_account_gives_its_least_recently_used_run_first() -> None:
    encodings = EncodingCache(account_bytes_max=4_000)
    _add(encodings, ["a", "b", "c"])
    assert _found(encodings, ["a"]) == ["a"]
    _add(encodings, [f"more {place}" for place in range(5)])
    assert _found(encodings, ["a", "b", "c"]) == ["a"]


def test_an_account_that_floods_takes_its_own_share_from_others_and_no_more() -> None:
    encodings = EncodingCache(bytes_max=40_000, account_bytes_max=10_000)
    accounts = ["ann", "bob", "cyd"]
    for account in accounts:
        _add(encodings, [f"{account} {place}" for place in range(10)], account=account)
    for place in range(1_000):
        _add(encodings, [f"flood {place}"], account="mallory")
    for account in accounts:
        texts = [f"{account} {place}" for place in range(10)]
        assert _found(encodings, texts, account=account) == texts
    for place in range(1_000):
        _add(encodings, [f"flood {place}"], account=f"mallory {place}")
    assert _found(encodings, ["ann 1"]) == [], "all together are bounded as well"


def test_what_is_too_large_for_the_cache_is_not_kept() -> None:
    encodings = EncodingCache(account_bytes_max=10_000)
    _add(encodings, ["a", "b" * 20_000])
    assert _found(encodings, ["a", "b" * 20_000]) == ["a"]
    many = [str(place) for place in range(RUNS_MAX + 5)]
    whole = EncodingCache()
    _add(whole, many)
    assert _found(whole, many[-6:]) == many[-6:-5]


def test_counted_bytes_are_at_least_those_that_python_takes() -> None:
    encodings = EncodingCache(bytes_max=1 << 24, account_bytes_max=1 << 22)
    tracemalloc.start()
    try:
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        for account in range(200):
            for place in range(20):
                text = f"{account} {place} " * 5
                encodings.add(_scope(encodings, str(account)), "t", {text: list(range(1000, 1020))})
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.5 * encodings.bytes < taken <= encodings.bytes
