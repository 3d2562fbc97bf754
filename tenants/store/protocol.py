"""What every store of tenants can do, and how long it keeps things. It does not know how; sqlite and redis do."""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from tenants.records.accounts import Account
from tenants.records.audit_entry import AuditEntry
from tenants.records.batches import BatchStore
from tenants.records.holds import Cap, Denied, Granted, Hold
from tenants.records.notices import Notice
from tenants.records.plans import Plan
from tenants.records.tokens import ApiToken, TokenDigest
from tenants.records.usage import Balance, Totals, UsageRecord, UsageRow

Clock = Callable[[], float]  # seconds since 1970


RETENTION_DAYS: Final = 400  # records and sums of older days are removed by sweep()
TAGGED_MAX: Final = 10_000  # rows of one account's day from which on no more sets of tags are told apart
OTHER_TAGS: Final = "*"


class StoreUnavailable(Exception):
    """The store cannot answer now. The message tells an operator what to do; clients get 503 and `retry_after_s`.

    `unsure`: it was asked, and may have acted or act yet.
    """

    retry_after_s: Final = 1

    def __init__(self, message: str, *, unsure: bool = False) -> None:
        super().__init__(message)
        self.unsure = unsure


class Store(Protocol):
    """Every method raises StoreUnavailable when the store cannot answer, and then it may or may not have acted.

    All writes are idempotent, so that a caller who does not know may repeat them. Two implementations, one contract
    test: tests/tenants/store/test_contract.py.
    """

    batches: BatchStore

    async def ping(self) -> None:
        """Returns when the store can take a write."""
        ...

    async def advice(self) -> Sequence[str]:
        """What an operator should change about how this store is set up; empty when all is well."""
        ...

    async def close(self) -> None: ...

    async def add_account(self, account: Account) -> None: ...

    async def account(self, account_id: str) -> Account | None: ...

    async def accounts(self) -> Sequence[Account]:
        """All of them, oldest first."""
        ...

    async def change_account(self, account: Account) -> bool:
        """Keeps it if the one kept has the revision before it. `suspended_at` is in force for the next reserve."""
        ...

    async def plans(self) -> Sequence[Plan]:
        """Those that were kept, by name."""
        ...

    async def keep_plan(self, plan: Plan) -> bool:
        """Keeps it if the one kept has the revision before it; where there is none, that is 0."""
        ...

    async def remove_plan(self, name: str) -> bool:
        """False: there is none. Accounts that still name it have the default one."""
        ...

    async def add_token(self, token: ApiToken, seal: TokenDigest) -> bool:
        """False: there is no such account."""
        ...

    async def token(self, token_id: str) -> tuple[ApiToken, Sequence[TokenDigest], Account] | None:
        """With the seals of its live secrets, the newest first."""
        ...

    async def change_token(self, token: ApiToken, seals: Sequence[TokenDigest]) -> bool:
        """Its name, expiry, grant, limits and seals from now on; a revocation stays. False: there is no such token."""
        ...

    async def tokens(self, account_id: str) -> Sequence[ApiToken]:
        """All of one account, revoked ones too, oldest first."""
        ...

    async def revoke(self, token_id: str, revoked_at: int) -> bool:
        """For good; a second call keeps the first time. False: there is no such token."""
        ...

    async def reserve(self, hold: Hold) -> Granted | Denied:
        """One decision: everything is compared before anything is added, by the store's own clock.

        Expired holds of the account are charged first, at their checkpoints. A request id that is held already is
        granted again and counted once; one whose hold expired may ask anew, and what it uses replaces that charge.
        """
        ...

    async def left(self, account_id: str, caps: Sequence[Cap]) -> Sequence[int]:
        """What each has left now, as in Granted; negative where more was used than it allows. Counts nothing."""
        ...

    async def checkpoint(self, records: Sequence[UsageRecord], lifetime_us: int) -> None:
        """These requests are alive and have used this much so far. Ids that are not held are ignored."""
        ...

    async def settle(self, records: Sequence[UsageRecord]) -> None:
        """Final usage: the hold goes back to the day that it was taken from, the cost is charged there, once.

        The first settlement of an id wins. One that comes after its hold expired replaces the checkpoint's charge;
        one whose hold is unknown to this store is charged to `record.day`.
        """
        ...

    async def sweep(self) -> int:
        """Charges all expired holds at their checkpoints, removes days older than KEPT_DAYS; returns how many holds."""
        ...

    async def totals(self, account_id: str, day: int) -> Totals:
        """The counters; O(1)."""
        ...

    async def records(self, account_id: str, day: int) -> Sequence[UsageRecord]:
        """All records that were charged to the day, by request id; O(their number)."""
        ...

    async def usage(self, account_id: str, first_day: int, last_day: int) -> Sequence[UsageRow]:
        """Sums of final and expired records, by day, token, model and tags, in that order.

        Callers choose tags: where a day has TAGGED_MAX rows, the tags of others that come then are OTHER_TAGS.
        """
        ...

    async def reconcile(self, account_id: str, day: int, subject: str = "") -> Balance:
        """The counters beside the same sums recomputed from records and holds; O(their number)."""
        ...

    async def append_audit(self, entry: AuditEntry) -> bool:
        """False: its place is taken, or the one before it is not. Kept for good."""
        ...

    async def audit(self, account_id: str, first_seq: int, most: int) -> Sequence[AuditEntry]:
        """At most so many from `first_seq` on, in their order."""
        ...

    async def audit_head(self, account_id: str) -> AuditEntry | None:
        """The last one."""
        ...

    async def claim(self, account_id: str, key: str, value: bytes, lifetime_s: int) -> bytes | None:
        """Keeps the value under a key that is free, for so long. What is there already is returned instead."""
        ...

    async def reclaim(self, account_id: str, key: str, value: bytes | None, lifetime_s: int) -> None:
        """Another value under the key, or none."""
        ...

    async def add_notice(self, notice: Notice) -> None:
        """Once for each id, also after it was closed, for KEPT_DAYS."""
        ...

    async def take_notices(self, now: float, lease_s: float, most: int) -> Sequence[Notice]:
        """Those that are due, the first due first; they are due again after `lease_s`, with one try more."""
        ...

    async def postpone_notice(self, notice_id: str, due_at: float) -> None: ...

    async def close_notice(self, notice_id: str) -> None: ...
