"""Draws completions that a grammar allows, as replicas hold them to it, from tokenizers of many kinds."""

import json
import random
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import numpy as np
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.protocol.types import Grammar
from engine.structured_output.lark_source import to_lark
from engine.structured_output.llguidance_backend import open_matcher

EMBER = Path(__file__).parents[2] / "engine" / "builtin_model" / "tokenizer.json"
END = "<|end|>"


class Vocabulary:
    """A tokenizer as a replica has it: its text, and the added tokens that a format is made from."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        document = json.loads(tokenizer.to_str())
        self.added: Mapping[str, int] = {entry["content"]: entry["id"] for entry in document["added_tokens"]}
        self.end = self.added[END]
        self.library = LLTokenizer(tokenizer.to_str(), eos_token=self.end)
        self._spelled = {id: text.encode() for text, id in self.added.items()}
        self._close_tag = self.library.tokenize_str("</parameter>")
        self._closing = np.zeros(self.library.vocab_size + 64, dtype=bool)
        for char in '"}],)>Ċ':  # Ċ is how byte-level tokenizers spell a line break
            if (id := tokenizer.token_to_id(char)) is not None:
                self._closing[id] = True

    def text(self, ids: list[int]) -> str:
        return b"".join(self._spelled.get(id) or self.library.decode_bytes([id]) for id in ids).decode()

    def fits(self, grammar: Grammar, text: str) -> bool:
        """Whether the text may be a whole completion."""
        matcher = open_matcher(self.library, to_lark(grammar))
        assert not matcher.is_error(), matcher.get_error()
        ids = list(self._parts(text))
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def draw(self, grammar: Grammar, draw: random.Random, begun: str = "", tokens_max: int = 600) -> str | None:
        """A completion that begins with `begun`; None where it got too long. What closes something is drawn more often
        than chance would have it, or few would ever end."""
        matcher = open_matcher(self.library, to_lark(grammar))
        ids = list(self._parts(begun))
        assert not matcher.is_error(), matcher.get_error()
        assert matcher.consume_tokens(ids), matcher.get_error()
        while len(ids) < tokens_max:
            packed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            mask = np.unpackbits(packed, bitorder="little").astype(bool)
            assert mask.any(), matcher.get_error()
            if mask[self.end] and (mask.sum() == 1 or draw.random() < 0.5):
                return self.text(ids)
            mask[self.end] = False
            closing = mask & self._closing[: len(mask)]
            some = np.flatnonzero(closing if closing.any() and draw.random() < 0.4 else mask)
            drawn = [int(some[draw.randrange(len(some))])]
            if draw.random() < 0.1 and matcher.validate_tokens(self._close_tag) == len(self._close_tag):
                drawn = self._close_tag
            assert matcher.consume_tokens(drawn), matcher.get_error()
            ids += drawn
        return None

    def _parts(self, text: str) -> Iterator[int]:
        """The ids of a text that may spell added tokens."""
        spelled = next((added for added in self.added if added in text), None)
        if spelled is None:
            yield from self.library.tokenize_str(text)
        else:
            before, _, after = text.partition(spelled)
            yield from self._parts(before)
            yield self.added[spelled]
            yield from self._parts(after)


@cache
def built_in() -> Vocabulary:
    """Ember's own, without any marker: formats spell them out."""
    return Vocabulary(Tokenizer.from_file(str(EMBER)))


@cache
def trained(markers: frozenset[str], special: bool) -> Vocabulary:
    """A small byte-level tokenizer that has the markers as tokens, control tokens or not."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[END]
    )
    tokenizer.train_from_iterator(Path(__file__).read_text().splitlines(), trainer)
    tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text in sorted(markers)])
    return Vocabulary(tokenizer)
