"""A model's grammars: compiled beside the replica's loop, cached per account, and turned into masks of a step's rows.

Two threads compile, each after a trial in a process of its own. Accounts take turns, and each has a cache of its own:
what a grammar costs tells nobody whether somebody else has it. The manager knows no sequences and no tensors.

M masked rows, W words of a bit mask.
"""

import contextlib
import os
import re
import socket
import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import llguidance
import numpy as np
from numpy.typing import NDArray

from engine.log import log
from engine.protocol.types import Grammar, GrammarKind, RejectReason
from engine.sequences.sequence import FORCED_MAX, GrammarMatcher
from engine.sequences.validation import SubmitRejected
from engine.step.layout import Int32s
from engine.structured_output.lark_source import to_lark
from engine.structured_output.llguidance_backend import GrammarTokenizerError, open_matcher, open_tokenizer
from engine.structured_output.sandbox import GrammarSandbox, SandboxGone

COMPILER_THREADS: Final = 2
PENDING_PER_ACCOUNT_MAX: Final = 64  # of one account
CACHED_PER_ACCOUNT_MAX: Final = 16
CACHED_BYTES_MAX: Final = 128 << 20  # of all accounts' grammars, as far as their bytes can be told:
_PARSER_BYTES, _SOURCE_BYTES = 150_000, 40  # a parser has so many, and for each byte of its source,
_TOKEN_BYTES, _LEARNED_BYTES_MAX = 200, 2 << 20  # and a grammar learns so many with a token, most no more than that
RECOMPILE_TOKENS: Final = 50_000  # a grammar's memory grows with its texts: after so many tokens it is compiled anew
PARSERS_MAX: Final = 4  # of one grammar; matchers of one parser share what it learns, behind a lock
PARSERS_S: Final = 0.02  # how long the parsers after the first one may take together
_FILLERS_MAX: Final = 8  # threads that write the masks of one step
_DETAIL_MAX: Final = 300  # characters
_FORCED_BYTES: Final = 4 * FORCED_MAX  # of what is forced: the library encodes them in some 15 us
_RECENT_TOKENS: Final = 4  # with which the text may form one word
TOKEN_MS_MAX: Final = 5.0  # of a processor, for a token's mask and for taking the token in: the mean of
_MEAN_TOKENS: Final = 8  # about so many
_SLOW_MASKS_S: Final = 0.004  # after masks of a step that took longer those of the next step are timed one by one
_BUSY: Final = "too many grammars of this account are being compiled; try again later"
_UNAVAILABLE: Final = "the grammar could not be compiled; send the request again"
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

    def write_mask(self, address: int, size: int) -> None:
        """Writes its mask, in any thread, and notes what it takes of this thread's time."""
        began = time.thread_time()
        self.inner.unsafe_compute_mask_ptr(address, size)
        self.mask_us, self._timed = 1e6 * (time.thread_time() - began), True
        self._mean_us += (self.mask_us - self._mean_us) / _MEAN_TOKENS

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
    """A GrammarCompilation. Once it is done its matchers are copies of a few parsers' in turn.

    The copies of one parser learn together, and one after the other: masks of several rows are computed at once only
    where there are several parsers.
    """

    def __init__(self, tokenizer: llguidance.LLTokenizer | None, grammar: Grammar, account: bytes) -> None:
        self.account = account
        self.grammar = grammar
        self.done = False
        self.needs_recompile = False
        self.tokens = 0  # that its matchers have accepted
        self._tokenizer = tokenizer
        self._refusal: tuple[RejectReason, str] | None = None
        self._parsers: deque[llguidance.LLMatcher] = deque()

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
        self._parsers.rotate()
        matcher = LarkMatcher(self, self._parsers[0].deep_copy(), stop_ids)
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
        self._parsers.append(first)
        end = time.monotonic() + PARSERS_S
        while len(self._parsers) < PARSERS_MAX and time.monotonic() < end:
            self._parsers.append(open_matcher(self.tokenizer, lark))
        self.done = True


class StructuredOutputManager:
    """Compiles grammars and writes masks, for the loop's thread. `bell` is readable when a compilation is done."""

    def __init__(self, folder: Path, threads: int | None) -> None:
        """Starts to read the folder's tokenizer, see `wait_ready`. `threads` write masks; None: one for each core."""
        self.bell, self._bell_writer = socket.socketpair()
        self.bell.setblocking(False)
        self._bell_writer.setblocking(False)
        self._fillers = min(threads or os.cpu_count() or 1, _FILLERS_MAX)
        self._executor = llguidance.LLExecutor(self._fillers)
        self._timers = ThreadPoolExecutor(self._fillers)  # its threads start where masks are slow
        self._timing = False  # the masks of the next step are timed one by one
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._words = 0
        self._problem = ""
        self._cache: OrderedDict[bytes, OrderedDict[Grammar, LarkCompilation]] = OrderedDict()  # the last used last
        self._pending: OrderedDict[bytes, deque[LarkCompilation]] = OrderedDict()  # by account, the next in turn first
        self._compiling: set[bytes] = set()  # accounts
        self._changed = threading.Condition()
        self._closed = False
        self._sandboxes: list[GrammarSandbox] = []
        self._opened = threading.Event()
        self._threads: list[threading.Thread] = []
        if (folder / "tokenizer.json").exists():
            targets = [self._open, *[self._work] * COMPILER_THREADS]
            self._threads = [threading.Thread(target=target, args=[folder]) for target in targets]
            for thread in self._threads:
                thread.start()
        else:
            self._open(folder)

    def wait_ready(self) -> None:
        """Blocks until the tokenizer is read; the library lets no other thread run meanwhile."""
        self._opened.wait()

    def compile(self, grammar: Grammar, account: bytes, cache: bool) -> LarkCompilation:
        """A compilation that is done, if it is cached, or will be. Without `cache` nothing of it is found later."""
        self.wait_ready()
        cached: OrderedDict[Grammar, LarkCompilation] = OrderedDict()
        if cache and account:
            cached = self._cache.setdefault(account, cached)
            self._cache.move_to_end(account)
        compilation = cached.get(grammar)
        if compilation is not None and not compilation.needs_recompile and compilation.tokens < RECOMPILE_TOKENS:
            cached.move_to_end(grammar)
            self._evict(compilation)
            return compilation
        compilation = cached[grammar] = LarkCompilation(self._tokenizer, grammar, account)
        cached.move_to_end(grammar)
        if len(cached) > CACHED_PER_ACCOUNT_MAX:
            cached.popitem(last=False)
        self._evict(compilation)
        if self._problem:
            compilation.refuse(RejectReason.GRAMMAR, self._problem)
        else:
            self._queue(compilation)
        return compilation

    def masks(self, matchers: Items[GrammarMatcher | None]) -> Int32s:
        """[M, W]: bit (id % 32) of word (id ÷ 32) says whether a token may be next; all may where there is no matcher.

        Some 40 µs per row at 128,256 tokens, rows of several parsers at a time. Each matcher then has its `mask_us`.
        """
        masks_MW = np.empty((len(matchers), self._words), np.int32)
        rows = []
        for row, matcher in enumerate(matchers):
            if matcher is None:
                masks_MW[row] = -1
            else:
                assert isinstance(matcher, LarkMatcher)
                rows.append((matcher, row))
        if rows:
            took_s = (self._write_timed if self._timing else self._write)(rows, masks_MW)
            self._timing = took_s > _SLOW_MASKS_S
        for matcher, row in rows:
            matcher.fix_mask(masks_MW[row])
        return masks_MW

    def _write(self, rows: list[tuple[LarkMatcher, int]], masks_MW: Int32s) -> float:
        """Writes the masks of these rows at once. Returns how long that took, in s."""
        inner = [(matcher.inner, row) for matcher, row in rows]
        began = time.perf_counter()
        self._executor.unsafe_compute_mask_ptr(inner, masks_MW.ctypes.data, 4 * self._words, len(masks_MW))
        took_s = time.perf_counter() - began
        each_us = 1e6 * took_s / len(rows)
        for matcher, _ in rows:
            matcher.share_mask_time(each_us)
        return took_s

    def _write_timed(self, rows: list[tuple[LarkMatcher, int]], masks_MW: Int32s) -> float:
        """Writes the masks of these rows in several threads, each timed by itself; by that it shares out what they
        took together. Returns what a thread took of its own time, in s."""
        address, size = masks_MW.ctypes.data, 4 * self._words
        threads = min(self._fillers, len(rows))

        def write(part: list[tuple[LarkMatcher, int]]) -> None:
            for matcher, row in part:
                matcher.write_mask(address + row * size, size)

        began = time.perf_counter()
        if threads == 1:
            write(rows)
        else:
            list(self._timers.map(write, [rows[first::threads] for first in range(threads)]))
        took_s = time.perf_counter() - began
        processor_s = 1e-6 * sum(matcher.mask_us for matcher, _ in rows)
        for matcher, _ in rows:
            matcher.mask_us *= took_s / processor_s
        return processor_s / threads

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for sandbox in self._sandboxes:
            sandbox.end()
        for thread in self._threads:
            thread.join()
        self._timers.shutdown()
        self.bell.close()
        self._bell_writer.close()

    def _evict(self, asked: LarkCompilation) -> None:
        """Evicts grammars until the bytes of all are within their limit, but never what is asked for: of the accounts
        that have more than their equal part those of the least recently used. What was learned meanwhile counts."""
        sizes = {account: sum(each.bytes for each in cached.values()) for account, cached in self._cache.items()}
        total = sum(sizes.values())
        for equal in (True, False):  # then of any account, where what is asked for is most of all
            for account in [*self._cache]:
                cached = self._cache[account]
                while cached and total > CACHED_BYTES_MAX and (not equal or sizes[account] * len(self._cache) >= total):
                    grammar, oldest = next(iter(cached.items()))
                    if oldest is asked:
                        break
                    del cached[grammar]
                    total -= oldest.bytes
                    sizes[account] -= oldest.bytes
                if not cached:
                    del self._cache[account]

    def _queue(self, compilation: LarkCompilation) -> None:
        with self._changed:
            pending = self._pending.setdefault(compilation.account, deque())
            if len(pending) >= PENDING_PER_ACCOUNT_MAX:
                compilation.needs_recompile = True
                compilation.refuse(RejectReason.BUSY, _BUSY)
            else:
                pending.append(compilation)
                self._changed.notify()

    def _open(self, folder: Path) -> None:
        try:
            self._tokenizer = open_tokenizer(folder)
            self._words = -(-self._tokenizer.vocab_size // 32)
        except GrammarTokenizerError as error:
            self._problem = str(error)
        finally:
            self._opened.set()

    def _work(self, folder: Path) -> None:
        self._opened.wait()
        if self._problem:
            return
        sandbox: GrammarSandbox | None = None
        with contextlib.suppress(SandboxGone):
            sandbox = self._open_sandbox(folder)
        while (compilation := self._next()) is not None:
            for tries_left in (1, 0):  # the grammar before may have ended the process
                try:
                    sandbox = sandbox or self._open_sandbox(folder)
                    compilation.compile(sandbox)
                except SubmitRejected as refused:
                    compilation.refuse(refused.reason, refused.message)
                except SandboxGone as error:
                    log("grammar_trial_ended", error=str(error))
                    if sandbox is not None:
                        sandbox.end()
                        self._sandboxes.remove(sandbox)
                        sandbox = None
                    if tries_left:
                        continue
                    compilation.needs_recompile = True
                    compilation.refuse(RejectReason.BUSY, _UNAVAILABLE)
                except BaseException as error:  # a bug, or the library's panic, which is no Exception
                    log("grammar_not_compiled", level="error", error=repr(error)[:200])
                    compilation.needs_recompile = True
                    compilation.refuse(RejectReason.BUSY, _UNAVAILABLE)
                break
            with self._changed:
                self._compiling.discard(compilation.account)
                self._changed.notify()
            with contextlib.suppress(BlockingIOError):  # it is full: it is readable already
                self._bell_writer.send(b"!")
        if sandbox is not None:
            sandbox.end()

    def _open_sandbox(self, folder: Path) -> GrammarSandbox:
        """Raises SandboxGone where the host has no room for it."""
        try:
            sandbox = GrammarSandbox(folder)
        except OSError as error:
            raise SandboxGone(str(error)) from error
        self._sandboxes.append(sandbox)
        return sandbox

    def _next(self) -> LarkCompilation | None:
        """Waits for the next compilation in turn, one at a time for each account. None when there will be no more."""
        with self._changed:
            while not self._closed:
                account = next((each for each in self._pending if each not in self._compiling), None)
                if account is None:
                    self._changed.wait()
                    continue
                pending = self._pending[account]
                compilation = pending.popleft()
                if pending:
                    self._pending.move_to_end(account)
                else:
                    del self._pending[account]
                self._compiling.add(account)
                return compilation
            return None


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
