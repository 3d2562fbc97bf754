"""What each account used at this gateway in its last minutes, for the operator. It knows ids alone, and keeps nothing
that is older."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from tenants.limits.reservation import CallUsage

BUCKET_S: Final = 5
KEPT_S: Final = 300
ACCOUNTS_MAX: Final = 10_000  # of one bucket; what others use meanwhile is summed under OTHERS
OTHERS: Final = ""


@dataclass(slots=True)
class RecentAccountUsage:
    """Sums over some seconds. `refused` counts calls over a limit."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    neurons: float = 0.0
    refused: int = 0

    def add(self, other: "RecentAccountUsage") -> None:
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.completion_tokens += other.completion_tokens
        self.neurons += other.neurons
        self.refused += other.refused


@dataclass(slots=True)
class _Bucket:
    number: int
    accounts: dict[str, RecentAccountUsage] = field(default_factory=dict)


class RecentUsage:
    """Buckets of BUCKET_S; the running one counts with the others. A call counts when it ends. Adding costs a
    microsecond."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: deque[_Bucket] = deque(maxlen=KEPT_S // BUCKET_S + 1)

    def finished(self, account_id: str, spent: CallUsage, neurons: float) -> None:
        row = self._row(account_id)
        row.requests += 1
        row.prompt_tokens += spent.prompt_tokens
        row.cached_tokens += spent.cached_tokens
        row.completion_tokens += spent.completion_tokens
        row.neurons += neurons

    def refused(self, account_id: str) -> None:
        self._row(account_id).refused += 1

    def sums(self, window_s: int) -> dict[str, RecentAccountUsage]:
        """By account, over the last `window_s` seconds, to a bucket more."""
        first = int(self._clock() - window_s) // BUCKET_S
        sums: dict[str, RecentAccountUsage] = {}
        for account_id, row in self._rows_since(first):
            sums.setdefault(account_id, RecentAccountUsage()).add(row)
        return sums

    def _rows_since(self, first: int) -> Iterable[tuple[str, RecentAccountUsage]]:
        for bucket in self._buckets:
            if bucket.number >= first:
                yield from bucket.accounts.items()

    def _row(self, account_id: str) -> RecentAccountUsage:
        number = int(self._clock()) // BUCKET_S
        if not self._buckets or self._buckets[-1].number != number:
            self._buckets.append(_Bucket(number))
        accounts = self._buckets[-1].accounts
        key = account_id if account_id in accounts or len(accounts) < ACCOUNTS_MAX else OTHERS
        return accounts.setdefault(key, RecentAccountUsage())
