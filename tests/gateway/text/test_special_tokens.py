"""What stands around texts is found for every kind of post-processor, and text never becomes a part of it."""

import json
import string
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from gateway.text.special_tokens import SpecialTokens
from gateway.text.tokenizer import ModelTokenizer
from tests.support import minilm

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
WORDS = [*string.ascii_letters, "<", ">", "/", "[", "]"]
TEXTS = ["a", "a b", "bad cab", "<s> a </s>", "<mask>", "[SEP]"]


def unigram() -> Tokenizer:
    """As XLM-RoBERTa's."""
    pieces = [*((token, 0.0) for token in SPECIAL), *((word, -1.0) for word in WORDS), ("▁", -1.0), ("▁a", -0.5)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer


def byte_level() -> Tokenizer:
    """As RoBERTa's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id for id, token in enumerate([*SPECIAL, *alphabet, "Ġa"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT's; this one is real."""
    tokenizer = Tokenizer.from_file(str(minilm.folder() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def last_token() -> Tokenizer:
    """As that of a decoder whose last token's state is its vector."""
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return tokenizer


@pytest.mark.parametrize("make", [unigram, byte_level, word_piece, last_token])
def test_a_framed_text_is_what_the_tokenizer_makes_of_it(make: object, tmp_path: Path) -> None:
    assert callable(make)
    tokenizer = make()
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    text = ModelTokenizer(tmp_path)
    control = {entry["id"] for entry in json.loads(tokenizer.to_str())["added_tokens"]}
    for first in TEXTS:
        ids = text.encode_text(first)
        if control.isdisjoint(tokenizer.encode(first, add_special_tokens=False).ids):
            assert text.special_tokens.single(ids) == tokenizer.encode(first).ids
        assert control.isdisjoint(ids), "text became a control token"


@pytest.mark.parametrize("make", [unigram, byte_level, word_piece])
def test_a_framed_pair_is_what_the_tokenizer_makes_of_it(make: object, tmp_path: Path) -> None:
    assert callable(make)
    tokenizer = make()
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    text = ModelTokenizer(tmp_path)
    for first, second in (("a", "a"), ("a b", "bad cab"), ("cab", "a")):
        framed = text.special_tokens.pair(text.encode_text(first), text.encode_text(second))
        assert framed == tokenizer.encode(first, second).ids
        assert len(framed) - len(text.encode_text(first) + text.encode_text(second)) == text.special_tokens.pair_count


def test_a_tokenizer_that_frames_nothing_has_an_empty_frame() -> None:
    tokenizer = byte_level()
    tokenizer.post_processor = processors.ByteLevel()
    frame = SpecialTokens.from_tokenizer(tokenizer)
    assert frame.single([7]) == [7]
    assert frame.count == 0
