"""Batches: requests that wait in the store for capacity that nobody else wants, and their results until these expire.

It knows no texts: callers encrypt bodies and results. Items are claimed for a lease, so that many gateways share them
and the items of a killed gateway are claimed again: an item may run twice. It ends once, and its charge is written with
its result.
"""

import enum
from typing import Final, NamedTuple

import msgspec

BATCH_ITEMS_MAX: Final = 10_000
BATCH_BYTES_MAX: Final = 10_000_000  # of all bodies of one batch
ITEM_BYTES_MAX: Final = 1 << 20  # of one of them: the store reads and writes it in one piece
OPEN_BATCHES_MAX: Final = 32  # of one account, not ended
OPEN_ITEMS_MAX: Final = 50_000  # in them
LISTED_MAX: Final = 1_000
ARRIVING_S: Final = 3_600  # a batch whose items never all came is deleted after so long
WAITING_S: Final = 31 * 86_400  # and a batch that never ends after a month, when every budget is a new one


class BatchStatus(enum.StrEnum):
    ARRIVING = "arriving"  # its items are being written; it is not listed yet
    QUEUED = "queued"
    RUNNING = "running"  # an item of it was claimed
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"  # it may not run any more

    @property
    def open(self) -> bool:
        return self in (BatchStatus.QUEUED, BatchStatus.RUNNING)


class BatchJob(msgspec.Struct, frozen=True):
    """A batch. Times are seconds since 1970. `succeeded` and `failed` count `items`; the others wait, run, or never
    will. At `expires_at` all of it is deleted: while it is open that is far away, then `keep_s` after its end."""

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
    """An item that was claimed, for the `tries`th time."""

    account_id: str
    batch_id: str
    place: int
    token_id: str
    model: str
    body: bytes
    tries: int

    @property
    def request_id(self) -> str:
        """One id for all tries, so that the ledger has one record."""
        return f"{self.batch_id}-{self.place}"


class BatchItemResult(NamedTuple):
    place: int
    succeeded: bool
    result: bytes


class QueueDepth(NamedTuple):
    """Items that one model's open batches have left, and when the oldest batch was submitted."""

    items: int
    oldest_at: float
