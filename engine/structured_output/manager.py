"""A model's grammars: compiled beside the replica's loop, and cached per account.

Two threads compile, each after a trial in a process of its own. Accounts take turns, and each has a cache of its own:
what a grammar costs tells nobody whether somebody else has it. The manager knows no sequences and no tensors.
"""

import contextlib
import socket
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Final

import llguidance

from engine.log import log
from engine.protocol.types import Grammar, RejectReason
from engine.sequences.sequence import GrammarMatcher
from engine.sequences.validation import SubmitRejected
from engine.step.layout import Int32s
from engine.structured_output.lark_grammar import LarkCompilation
from engine.structured_output.llguidance_backend import GrammarTokenizerError, open_tokenizer
from engine.structured_output.mask_writer import MaskWriter
from engine.structured_output.sandbox import GrammarSandbox, SandboxGone

COMPILER_THREADS: Final = 2
PENDING_PER_ACCOUNT_MAX: Final = 64  # of one account
CACHED_PER_ACCOUNT_MAX: Final = 16
CACHED_BYTES_MAX: Final = 128 << 20  # of all accounts' grammars, as far as their bytes can be told
RECOMPILE_TOKENS: Final = 50_000  # a grammar's memory grows with its texts: after so many tokens it is compiled anew
_BUSY: Final = "too many grammars of this account are being compiled; try again later"
_UNAVAILABLE: Final = "the grammar could not be compiled; send the request again"


class StructuredOutputManager:
    """Compiles grammars and has their masks written, for the loop's thread. `bell` is readable when a compilation is
    done."""

    def __init__(self, folder: Path, threads: int | None) -> None:
        """Starts to read the folder's tokenizer, see `wait_ready`. `threads` write masks; None: one for each core."""
        self.bell, self._bell_writer = socket.socketpair()
        self.bell.setblocking(False)
        self._bell_writer.setblocking(False)
        self.writer = MaskWriter(threads)
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

    def begin_masks(self, matchers: Items[GrammarMatcher | None]) -> Callable[[], Int32s]:
        """As MaskWriter.begin: what is returned waits for them."""
        return self.writer.begin(matchers, self._words)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for sandbox in self._sandboxes:
            sandbox.end()
        for thread in self._threads:
            thread.join()
        self.writer.close()
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
