"""Texts as a model without any sense would write them: random logits, and what the grammar's masks leave of them."""

import enum
import json
import select
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from numpy.typing import NDArray

from engine.protocol.types import Grammar, GrammarKind, SamplingParams
from engine.sequences.sequence import GrammarCompilation, GrammarMatcher
from engine.sequences.validation import SubmitRejected
from engine.step.layout import Int32s, SequenceSlice, pack_step, unpack_step
from engine.step.sampling import sample_batch
from engine.structured_output.lark_grammar import LarkCompilation
from engine.structured_output.llguidance_backend import open_tokenizer
from engine.structured_output.manager import StructuredOutputManager

EMBER = Path(__file__).parents[3] / "engine" / "builtin_model"
ACCOUNT = b"a" * 16
CLOSING = (b'"', b"}", b"]", b'"}', b'"]', b"}}", b'":', b":", b",", b"0", b"1")
LONGEST = 400  # tokens


def compiled(
    grammars: StructuredOutputManager, source: str, kind: GrammarKind = GrammarKind.JSON_SCHEMA,
    account: bytes = ACCOUNT,
    cache: bool = True, limit_s: float = 30.0,
) -> LarkCompilation:  # fmt: skip
    """Its compilation, once it is done."""
    compilation = grammars.compile(Grammar(kind, source), account, cache)
    deadline = time.monotonic() + limit_s
    while not compilation.done:
        left = deadline - time.monotonic()
        assert left > 0, "never compiled, or nobody was told"
        if select.select([grammars.bell], [], [], left)[0]:
            grammars.bell.recv(4096)
    return compilation


class Masking(Protocol):
    """What makes masks: ours, or another library's."""

    def masks(self, matchers: Items[GrammarMatcher | None]) -> Int32s: ...


class Scribe:
    """Writes texts under grammars with the sampler of a CPU; what closes a text grows likelier from token to token."""

    def __init__(self, grammars: Masking, stop_id: int) -> None:
        self.grammars = grammars
        self.stop_id = stop_id
        self._tokenizer = open_tokenizer(EMBER)
        self.vocabulary = self._tokenizer.vocab_size
        self.bytes = [self._tokenizer.decode_bytes([token]) for token in range(self.vocabulary)]
        self._closing_V = np.array([spelled in CLOSING for spelled in self.bytes], np.float32)
        self._closing_V[stop_id] = 4.0
        self._noise = np.random.default_rng(0).normal(0, 2, 1 << 20).astype(np.float32)

    def logits(self, rng: np.random.Generator, step: int) -> NDArray[np.float32]:
        start = int(rng.integers(0, len(self._noise) - self.vocabulary))
        return self._noise[start : start + self.vocabulary] + self._closing_V * min(step, 60) * 0.25

    def write(
        self, matchers: list[GrammarMatcher | None], seed: int, temperature: float = 0.0
    ) -> list[tuple[str, str]]:
        """Each row's text and why it ended; they share steps, as in a batch."""
        rng = [np.random.default_rng([seed, row]) for row in range(len(matchers))]
        written: list[list[int]] = [[] for _ in matchers]
        ends = [""] * len(matchers)
        for step in range(LONGEST):
            rows = [row for row, end in enumerate(ends) if not end]
            if not rows:
                break
            tokens = self._step([matchers[row] for row in rows], [rng[row] for row in rows], step, seed, temperature)
            for row, token in zip(rows, tokens, strict=True):
                matcher = matchers[row]
                problem = matcher.accept(token) if matcher else ""
                if token != self.stop_id:
                    written[row].append(token)
                if problem:
                    ends[row] = problem
                elif token == self.stop_id or (matcher is not None and matcher.finished):
                    ends[row] = "stop"
        texts = [b"".join(self.bytes[token] for token in tokens).decode("utf-8", "replace") for tokens in written]
        return [(text, end or "length") for text, end in zip(texts, ends, strict=True)]

    def _step(
        self,
        matchers: list[GrammarMatcher | None],
        rngs: list[np.random.Generator],
        step: int,
        seed: int,
        temperature: float,
    ) -> list[int]:
        logits_RV = torch.from_numpy(np.stack([self.logits(rng, step) for rng in rngs]))
        sampling = SamplingParams(temperature=temperature, seed=seed)
        slices = [
            SequenceSlice([0], step, [[0] * (1 + step // 16)], sampling, masked=matcher is not None)
            for matcher in matchers
        ]
        masks_MW = self.grammars.begin_masks([matcher for matcher in matchers if matcher is not None])()
        tokens: list[int] = sample_batch(logits_RV, unpack_step(pack_step(slices, 16)), masks_MW).tokens_R.tolist()
        return tokens


class Judgement(enum.StrEnum):
    """The verdict about texts written under a schema. CUT: no text came to its end."""

    ACCEPTED = "accepted"
    WRONG = "wrong"
    CUT = "cut"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Judged:
    judgement: Judgement
    told: str


def judge(scribe: Scribe, schema: Any, compilation: GrammarCompilation, seeds: int) -> Judged:
    """What jsonschema says of so many texts under a schema that was compiled."""
    try:
        texts = scribe.write([compilation.new_matcher(frozenset({scribe.stop_id})) for _ in range(seeds)], seed=1)
    except SubmitRejected as refused:
        return Judged(Judgement.REFUSED, refused.message)
    validator = validator_for(schema, Draft202012Validator)(schema)
    whole = [text for text, end in texts if end == "stop"]
    for _, end in texts:
        if end not in ("stop", "length"):
            return Judged(Judgement.WRONG, end)
    for text in whole:
        try:
            problem = next((error.message for error in validator.iter_errors(json.loads(text))), None)
        except Exception as error:  # no JSON, or a pattern that the validator cannot read
            problem = repr(error)
        if problem is not None:
            return Judged(Judgement.WRONG, f"{text}: {problem}")
    return Judged(Judgement.ACCEPTED if whole else Judgement.CUT, "")
