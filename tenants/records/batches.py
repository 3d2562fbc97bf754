"""Batches: requests that wait in the store for capacity that nobody else wants, and their results until these expire.

It knows no texts: bodies and results are sealed by whoever calls. Items are claimed for a lease, so that of many
gateways each takes some, and what a killed one had is taken up again: an item may run twice. It ends once, and its
charge is written with its result.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from tenants.records.usage import UsageRecord

BATCH_ITEMS_MAX: Final = 10_000
BATCH_BYTES_MAX: Final = 10_000_000  # of all bodies of one batch
OPEN_BATCHES_MAX: Final = 32  # of one account, not ended
OPEN_ITEMS_MAX: Final = 50_000  # in them
LISTED_MAX: Final = 1_000
ARRIVING_S: Final = 3_600  # one whose items never all came is deleted after so long,
WAITING_S: Final = 31 * 86_400  # and one that never ends: a month, after which every budget is a new one


class BatchStatus(enum.StrEnum):
    ARRIVING = "arriving"  # its items are being written; nobody is told of it yet
    QUEUED = "queued"
    RUNNING = "running"  # an item of it was claimed
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"  # it may not run any more

    @property
    def open(self) -> bool:
        return self in (BatchStatus.QUEUED, BatchStatus.RUNNING)


class BatchJob(msgspec.Struct, frozen=True):
    """Times are seconds since 1970. `succeeded` and `failed` are of its `items`; the others wait, run, or never will.
    At `expires_at` nothing is left of it: while it is open that is far away, then `keep_s` after its end."""

    id: str
    account_id: str
    token_id: str
    model: str
    items: int
    keep_s: int
    created_at: int
    expires_at: int
    status: BatchStatus = BatchStatus.QUEUED
    ended_at: int | None = None
    succeeded: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class BatchJobItem(msgspec.Struct, frozen=True):
    """One that was claimed, for the `tries`th time."""

    account_id: str
    batch_id: str
    place: int
    token_id: str
    model: str
    body: bytes
    tries: int

    @property
    def request_id(self) -> str:
        """The same in every try, so that the ledger has one record of it."""
        return f"{self.batch_id}-{self.place}"


class BatchItemResult(NamedTuple):
    place: int
    succeeded: bool
    result: bytes


class QueueDepth(NamedTuple):
    """What one model's open batches have left, and when the oldest of them was submitted."""

    items: int
    oldest_at: float


class BatchStore(Protocol):
    """The part of a store that keeps them. Like all of it, it raises StoreUnavailable, and calls may be repeated."""

    async def begin(self, batch: BatchJob) -> bool:
        """A place for one that is ARRIVING. False: the account has as many open as it may."""
        ...

    async def add_items(self, account_id: str, batch_id: str, first: int, bodies: Sequence[bytes]) -> None:
        """Its items from place `first` on."""
        ...

    async def open(self, account_id: str, batch_id: str) -> None:
        """All of it is there: it is QUEUED."""
        ...

    async def get(self, account_id: str, batch_id: str) -> BatchJob | None: ...

    async def of_account(self, account_id: str) -> Sequence[BatchJob]:
        """The newest LISTED_MAX, the newest first."""
        ...

    async def results(self, account_id: str, batch_id: str, first: int, most: int) -> Sequence[BatchItemResult]:
        """Of those from place `first` to `first + most − 1` that ended, in their order."""
        ...

    async def claim(self, model: str, lease_s: float, most: int) -> Sequence[BatchJobItem]:
        """Items of one account, which comes after the others then; the oldest first. Nobody else gets them before the
        lease is over."""
        ...

    async def renew(self, items: Sequence[BatchJobItem], lease_s: float) -> Sequence[BatchJobItem]:
        """A lease from now on for each. Returns those that must not run any more."""
        ...

    async def put_back(self, items: Sequence[BatchJobItem], delay_s: float) -> None:
        """They were not tried. Their accounts have their next turns for these models after so long."""
        ...

    async def end(self, item: BatchJobItem, succeeded: bool, result: bytes, record: UsageRecord | None) -> bool:
        """Its result, and in the same moment what it used, which settles its hold. False: it had ended, or its batch,
        and the result is thrown away; what it used is charged all the same, once."""
        ...

    async def close(self, account_id: str, batch_id: str, status: BatchStatus) -> bool:
        """Ends an open one: what ended of it stays, nothing else of it will run. False: there is no open one."""
        ...

    async def drop(self, account_id: str) -> None:
        """Deletes all that is kept of the account's batches."""
        ...

    async def sweep(self) -> None:
        """Deletes what has expired."""
        ...

    async def waiting(self, models: Sequence[str]) -> Mapping[str, QueueDepth]:
        """Of the models that have any."""
        ...
