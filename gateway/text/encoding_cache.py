"""Token ids of texts that were encoded before, so that the earlier turns of a conversation are not encoded again.

What is kept is a run: the text between two control tokens, over which no tokenizer merges, so that its ids depend on
nothing else. An account's runs are found by its own requests of the same scope, epoch and tokenizer alone.
It does not know requests, templates or why a request may not use it.
"""

import asyncio
import sys
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

TOTAL_BYTES_MAX: Final = 64 << 20
ACCOUNT_BYTES_MAX: Final = 8 << 20  # so that one account takes at most an eighth of it from others
KEEP_S_MAX: Final = 300.0  # a run is found for so long after its last use, or as long as its account's prefixes
RUNS_MAX: Final = 4096  # of one request: a lock is held for as long as they take
SWEEP_S: Final = 1.0
_SWEPT_AT_ONCE: Final = 256
_RUN_BYTES: Final = 400  # Python's objects around a text and its ids
_ACCOUNT_BYTES: Final = 1000

_RunKey = tuple[bytes, Hashable, str]


@dataclass(slots=True)
class _EncodedRun:
    ids: Sequence[int]
    bytes: int
    used_at: float


@dataclass(slots=True)
class _AccountRuns:
    """One account's runs of one epoch, the least recently used first."""

    epoch: int
    keep_s: float
    used_at: float
    bytes: int = _ACCOUNT_BYTES
    runs: OrderedDict[_RunKey, _EncodedRun] = field(default_factory=OrderedDict)


class EncodingCache:
    """All accounts' runs in this process. Bounded by bytes, for each account and in all: then the account that asked
    least recently gives first, its least recently used run first. May be used in any thread."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        bytes_max: int = TOTAL_BYTES_MAX,
        account_bytes_max: int = ACCOUNT_BYTES_MAX,
    ) -> None:
        self._clock = clock
        self._bytes_max = bytes_max
        self._account_bytes_max = account_bytes_max
        self._accounts: OrderedDict[str, _AccountRuns] = OrderedDict()  # the least recently used first
        self._lock = threading.Lock()
        self.bytes = 0

    def of_scope(self, account_id: str, scope_id: bytes, epoch: int, keep_s: float | None) -> "ScopedEncodings":
        """What requests of this scope share. `keep_s` is how long a run is found after its last use, at most
        KEEP_S_MAX."""
        keep_s = KEEP_S_MAX if keep_s is None else min(keep_s, KEEP_S_MAX)
        return ScopedEncodings(self, account_id, scope_id, epoch, keep_s)

    def reach_epoch(self, account_id: str, epoch: int) -> None:
        """Frees what the account left in earlier epochs."""
        with self._lock:
            self._of_epoch(account_id, epoch)

    def find(self, scope: "ScopedEncodings", tokenizer: Hashable, texts: Iterable[str]) -> dict[str, Sequence[int]]:
        """The ids of those texts that are there."""
        found: dict[str, Sequence[int]] = {}
        with self._lock:
            account, now = self._of_epoch(scope.account_id, scope.epoch), self._clock()
            if account is None:
                return found
            account.used_at, account.keep_s = now, scope.keep_s
            self._accounts.move_to_end(scope.account_id)
            self._expire(account, now)
            for text in islice(texts, RUNS_MAX):
                key = (scope.scope_id, tokenizer, text)
                run = account.runs.get(key)
                if run is not None:
                    run.used_at = now
                    account.runs.move_to_end(key)
                    found[text] = run.ids
        return found

    def add(self, scope: "ScopedEncodings", tokenizer: Hashable, encoded: Mapping[str, Sequence[int]]) -> None:
        """Keeps texts and their ids; a scope of an earlier epoch leaves nothing."""
        runs = [(text, array("I", ids)) for text, ids in islice(encoded.items(), RUNS_MAX)]
        with self._lock:
            account, now = self._of_epoch(scope.account_id, scope.epoch), self._clock()
            if account is None:
                if scope.account_id in self._accounts:
                    return
                account = self._accounts[scope.account_id] = _AccountRuns(scope.epoch, scope.keep_s, now)
                self.bytes += account.bytes
            for text, ids in runs:
                key = (scope.scope_id, tokenizer, text)
                size = _RUN_BYTES + sys.getsizeof(text) + ids.itemsize * len(ids)
                if key not in account.runs and size <= self._account_bytes_max - _ACCOUNT_BYTES:
                    account.runs[key] = _EncodedRun(ids, size, now)
                    self._count(account, size)
            while account.bytes > self._account_bytes_max:
                self._drop_oldest(account)
            self._make_room()

    async def run(self) -> None:
        """Frees, for ever, what is found no more, some accounts at a time."""
        while True:
            await asyncio.sleep(SWEEP_S)
            with self._lock:
                names = list(self._accounts)
            for first in range(0, len(names), _SWEPT_AT_ONCE):
                self.sweep(names[first : first + _SWEPT_AT_ONCE])
                await asyncio.sleep(0)

    def sweep(self, account_ids: Iterable[str]) -> None:
        """Frees what is found no more of these accounts."""
        with self._lock:
            now = self._clock()
            for account_id in account_ids:
                account = self._accounts.get(account_id)
                if account is None:
                    continue
                self._expire(account, now)
                if not account.runs and account.used_at + KEEP_S_MAX <= now:
                    self._forget(account_id)

    def check(self) -> None:
        """Raises AssertionError where sums and limits do not hold."""
        with self._lock:
            accounts = list(self._accounts.values())
            for account in accounts:
                assert account.bytes == _ACCOUNT_BYTES + sum(run.bytes for run in account.runs.values())
                assert account.bytes <= self._account_bytes_max
                used_at = [run.used_at for run in account.runs.values()]
                assert used_at == sorted(used_at)
            assert self.bytes == sum(account.bytes for account in accounts) <= self._bytes_max

    def _of_epoch(self, account_id: str, epoch: int) -> _AccountRuns | None:
        """The account's runs; None where it has none, or where its epoch is a later one. A later epoch ends the one
        before."""
        account = self._accounts.get(account_id)
        if account is None or account.epoch > epoch:
            return None
        if account.epoch < epoch:
            account.epoch = epoch
            account.runs.clear()
            self._count(account, _ACCOUNT_BYTES - account.bytes)
        return account

    def _expire(self, account: _AccountRuns, now: float) -> None:
        while account.runs and next(iter(account.runs.values())).used_at + account.keep_s <= now:
            self._drop_oldest(account)

    def _make_room(self) -> None:
        while self.bytes > self._bytes_max:
            account_id, account = next(iter(self._accounts.items()))
            if account.runs:
                self._drop_oldest(account)
            else:
                self._forget(account_id)

    def _drop_oldest(self, account: _AccountRuns) -> None:
        _, run = account.runs.popitem(last=False)
        self._count(account, -run.bytes)

    def _forget(self, account_id: str) -> None:
        self.bytes -= self._accounts.pop(account_id).bytes

    def _count(self, account: _AccountRuns, change: int) -> None:
        account.bytes += change
        self.bytes += change


@dataclass(frozen=True, slots=True)
class ScopedEncodings:
    """The runs that one request may find and add to. `scope_id` separates users of an account."""

    cache: EncodingCache
    account_id: str
    scope_id: bytes
    epoch: int
    keep_s: float
