"""One grammar that is compiled, and the texts that are kept to it.

It knows neither who asked for it nor which threads compile it and write its masks.
"""

import re
import time
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Final
from weakref import WeakSet

import llguidance
import numpy as np
from numpy.typing import NDArray

from engine.protocol.types import Grammar, GrammarKind, RejectReason
from engine.sequences.sequence import FORCED_MAX
from engine.sequences.validation import SubmitRejected
from engine.step.layout import Int32s
from engine.structured_output.lark_source import to_lark
from engine.structured_output.llguidance_backend import open_matcher
from engine.structured_output.sandbox import GrammarSandbox

PARSERS_MAX: Final = 4  # of one grammar; matchers of one parser share what it learns, behind a lock
PARSERS_S: Final = 0.02  # how long the parsers after the first one may take together
_PARSER_BYTES, _SOURCE_BYTES = 150_000, 40  # a parser has so many, and for each byte of its source,
_TOKEN_BYTES, _LEARNED_BYTES_MAX = 200, 2 << 20  # and a grammar learns so many with a token, most no more than that
_DETAIL_MAX: Final = 300  # characters
_FORCED_BYTES: Final = 4 * FORCED_MAX  # of what is forced: the library encodes them in some 15 us
_RECENT_TOKENS: Final = 4  # with which the text may form one word
TOKEN_MS_MAX: Final = 5.0  # of a processor, for a token's mask and for taking the token in: the mean of
_MEAN_TOKENS: Final = 8  # about so many
_SIMPLER: Final = "; make it simpler"
_COSTLY: Final = (
    "its masks take {:.1f} ms of a processor for each token, and at most {:g} are taken; make it less ambiguous"
)
_UNFINISHED: Final = "the grammar goes on behind a token that ends the text; let it end there"


class LarkMatcher:
    """A GrammarMatcher of one text."""

    def __init__(self, compilation: "LarkCompilation", inner: llguidance.LLMatcher, stop_ids: frozenset[int]) -> None:
        self.inner = inner
        self.finished = False
        self.mask_us = 0.0
        self._timed = False  # its last mask was timed by itself
        self._mean_us = 0.0  # what its last tokens took, as far as they were timed
        self._compilation = compilation
        self._stop_ids = stop_ids
        tokenizer = compilation.tokenizer
        self._extra_stops = stop_ids.difference(tokenizer.eos_tokens)  # the library ends texts at the others
        self._extra_bits = _bits(self._extra_stops)
        self._plain_bits = _bits(token for token in self._extra_stops if not tokenizer.is_special_token(token))

    def accept(self, token: int) -> str:
        if not self._timed:
            return self._take(token)
        began = time.thread_time()
        problem = self._take(token)
        self._note_time(began)
        if not problem and not self.finished and self._mean_us > 1e3 * TOKEN_MS_MAX:
            problem = _COSTLY.format(self._mean_us / 1e3, TOKEN_MS_MAX)
        return problem

    def replay(self, given: Items[int]) -> str:
        """Takes the tokens of a text that was begun elsewhere, some µs each, and returns what is wrong with them."""
        for token in given:
            if problem := self._take(token):
                return problem
        return "it has ended" if self.finished else ""

    def forced(self, tokens: "array[int]") -> list[int]:
        began, ids = time.thread_time(), list[int]()
        if text := self.inner.compute_ff_bytes()[:_FORCED_BYTES]:
            ids, _ = self._compilation.tokenizer.tokenize_partial(text, recent_tokens=tokens[-_RECENT_TOKENS:].tolist())
        self._note_time(began)
        return ids[:FORCED_MAX]

    def _note_time(self, began: float) -> None:
        """Adds this thread's time since then to that of the last mask."""
        took_us = 1e6 * (time.thread_time() - began)
        self.mask_us += took_us
        if self._timed:
            self._mean_us += took_us / _MEAN_TOKENS

    def write_mask(self, address: int, size: int) -> float:
        """Writes its mask, in any thread. Returns what it takes of this thread's time, in µs."""
        began = time.thread_time()
        self.inner.unsafe_compute_mask_ptr(address, size)
        return 1e6 * (time.thread_time() - began)

    def note_mask_time(self, took_us: float, share_us: float) -> None:
        """Notes what its last mask took of a thread, and its share of what all took together."""
        self.mask_us, self._timed = share_us, True
        self._mean_us += (took_us - self._mean_us) / _MEAN_TOKENS

    def share_mask_time(self, took_us: float) -> None:
        """Notes what each mask took on average that was written with this one."""
        self.mask_us, self._timed = took_us, False

    def _take(self, token: int) -> str:
        inner = self.inner
        ends = token in self._stop_ids
        if ends and token in self._extra_stops and not inner.is_error() and inner.is_accepting():
            return ""
        if inner.is_error() or not inner.consume_token(token):  # a failed one would take a token at an end
            self._compilation.needs_recompile = True  # its matchers learn together: the next one would fail as well
            return _detail(inner.get_error()) + _SIMPLER
        self._compilation.tokens += 1
        if ends and not inner.is_accepting():
            return _UNFINISHED
        self.finished = inner.is_stopped()
        return ""

    def fix_mask(self, mask_W: Int32s) -> None:
        """Allows the request's own stop tokens where the text is complete; elsewhere forbids those that are text."""
        if not self._extra_stops:
            return
        if self.inner.is_accepting():
            words, bits = self._extra_bits
            np.bitwise_or.at(mask_W, words, bits)
        else:
            words, bits = self._plain_bits
            np.bitwise_and.at(mask_W, words, ~bits)


class LarkCompilation:
    """A GrammarCompilation. Once it is done its matchers are copies of a few parsers.

    The copies of one parser learn together, and one after the other: masks of several rows are computed at once only
    where there are several parsers. So each copy is one of the parser that has the fewest copies by then; of equal
    ones that is the first, which has learned most.
    """

    def __init__(self, tokenizer: llguidance.LLTokenizer | None, grammar: Grammar, account: bytes) -> None:
        self.account = account
        self.grammar = grammar
        self.done = False
        self.needs_recompile = False
        self.tokens = 0  # that its matchers have accepted
        self._tokenizer = tokenizer
        self._refusal: tuple[RejectReason, str] | None = None
        self._parsers: list[tuple[llguidance.LLMatcher, WeakSet[LarkMatcher]]] = []  # each with its copies

    @property
    def bytes(self) -> int:
        """About how much memory it takes: the library does not tell."""
        source = len(self.grammar.source)
        parsers = len(self._parsers) * (_PARSER_BYTES + _SOURCE_BYTES * source)
        return source + parsers + min(self.tokens * _TOKEN_BYTES, _LEARNED_BYTES_MAX)

    @property
    def tokenizer(self) -> llguidance.LLTokenizer:
        assert self._tokenizer is not None
        return self._tokenizer

    def new_matcher(self, stop_ids: frozenset[int], given: Items[int] = ()) -> LarkMatcher:
        assert self.done
        if self._refusal is not None:
            raise SubmitRejected(*self._refusal)
        parser, copies = min(self._parsers, key=lambda parser: len(parser[1]))
        matcher = LarkMatcher(self, parser.deep_copy(), stop_ids)
        copies.add(matcher)
        if given and (problem := matcher.replay(given)):
            raise SubmitRejected(RejectReason.INVALID, f"the tokens given are no beginning of such a text: {problem}")
        return matcher

    def refuse(self, reason: RejectReason, message: str) -> None:
        self._refusal, self.done = (reason, message), True

    def compile(self, sandbox: GrammarSandbox) -> None:
        """Runs in any thread, mostly without the interpreter's lock. Raises SubmitRejected and SandboxGone."""
        lark = to_lark(self.grammar)
        problem = sandbox.check(lark)
        if not problem:
            first = open_matcher(self.tokenizer, lark)
            problem = first.get_error()
        if problem:
            raise SubmitRejected(RejectReason.GRAMMAR, _detail(problem, placed=self.grammar.kind is GrammarKind.LARK))
        self._parsers.append((first, WeakSet()))
        end = time.monotonic() + PARSERS_S
        while len(self._parsers) < PARSERS_MAX and time.monotonic() < end:
            self._parsers.append((open_matcher(self.tokenizer, lark), WeakSet()))
        self.done = True


def _bits(tokens: Iterable[int]) -> tuple[NDArray[np.int64], Int32s]:
    """The words of a mask and the bits in them that stand for these tokens."""
    words, bits = np.divmod(np.array(sorted(tokens), np.int64), 32)
    return words, np.left_shift(np.uint32(1), bits.astype(np.uint32)).view(np.int32)


def _detail(problem: str, *, placed: bool = False) -> str:
    """The library's message without its own options; `placed`: with the line in the caller's text, before which one of
    ours was put."""
    regex_error = re.search(r"^error: (.*)$", problem, re.MULTILINE)
    line = regex_error[1] if regex_error else re.sub(r"^at \d+\(\d+\): ", "", problem.partition("\n")[0])
    line = line.partition("failed to compile JSON schema: ")[2] or line
    line = re.sub(r"^Unimplemented keys: \[(.*)\]$", r"these keywords are not supported: \1", line)
    line = re.sub(r"^oneOf constraints are.*", "oneOf is supported only where its schemas exclude each other", line)
    if placed and (place := re.match(r"at (\d+)(\(\d+\)): ", problem)):
        line = f"at {int(place[1]) - 1}{place[2]}: {line}"
    return line[:_DETAIL_MAX]
