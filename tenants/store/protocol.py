"""What every store of tenants can do, by subject, and how long it keeps things. It knows neither SQLite nor Redis.

Every method raises StoreUnavailable when the store cannot answer, and then it may or may not have acted. All writes are
idempotent, so that a caller who does not know may repeat them. Two implementations have one contract test:
tests/tenants/store/test_contract.py.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Protocol

from tenants.records.account_search import AccountSearch
from tenants.records.accounts import Account, AuditEntry, Notice, Plan
from tenants.records.batches import BatchItemResult, BatchJob, BatchJobItem, BatchStatus, QueueDepth
from tenants.records.catalogue import ClusterCatalogue, HostCatalogue
from tenants.records.cluster import ClusterAuthority, ClusterMember, JoinOutcome, JoinToken
from tenants.records.holds import Cap, Denied, Granted, Hold
from tenants.records.leases import QuotaLease
from tenants.records.tokens import ApiToken, TokenDigest
from tenants.records.usage import Balance, Totals, UsageRecord, UsageRow

Clock = Callable[[], float]  # seconds since 1970

RETENTION_DAYS: Final = 400  # sweep() removes records and sums of older days
TAGGED_MAX: Final = 10_000  # rows of one account's day; from there on, new sets of tags are summed as OTHER_TAGS
OTHER_TAGS: Final = "*"
USAGE_COLUMNS: Final = ("token_id", "model", "tags")  # that usage is told apart by, beside the day
LEASE_KEPT_S: Final = 86_400  # after its return, for settlements that come late out of an outbox
USAGE_ACCOUNTS: Final = 100  # that usage() is asked for at once where there are many


class StoreUnavailable(Exception):
    """The store cannot answer now. The message tells an operator what to do; clients get 503 and `retry_after_s`.

    `unsure`: the request was sent, and the store may have acted or act yet.
    """

    retry_after_s: Final = 1

    def __init__(self, message: str, *, unsure: bool = False) -> None:
        super().__init__(message)
        self.unsure = unsure


class NameTaken(Exception):
    """Another account, `account_id`, has this name. Nothing was changed."""

    def __init__(self, account_id: str) -> None:
        super().__init__("another account has this name")
        self.account_id = account_id


class AccountStore(Protocol):
    """Accounts, their plans and their tokens. No two accounts get the same name, by `name_key`, in one moment; stores
    that were written before that held may have some, and keep them until they are renamed."""

    async def add(self, account: Account, *, shared_name: bool = False) -> None:
        """Raises NameTaken, unless its name may be shared, as that of a record may that moves from another store."""

    async def get(self, account_id: str) -> Account | None: ...

    async def list(self) -> Sequence[Account]:
        """All accounts, oldest first."""

    async def of_ids(self, ids: Sequence[str]) -> Sequence[Account]:
        """The accounts of these ids that there are, in any order."""

    async def named(self, name: str) -> Sequence[Account]:
        """The accounts of this name, by `name_key`, oldest first; O(their number)."""

    async def search(self, search: AccountSearch) -> tuple[Sequence[Account], int]:
        """The accounts that are wanted, and how many match; reads of all others only what they are searched by."""

    async def update(self, account: Account) -> bool:
        """Stores it if the stored one has the revision before it. `suspended_at` is in force for the next reserve.
        Raises NameTaken where its name is a new one."""

    async def due_deletions(self, now_s: int) -> Sequence[Account]:
        """The accounts whose deletion is due."""

    async def remove(self, account_id: str) -> None:
        """Removes an account, its tokens and its name. Its audit log stays."""

    async def plans(self) -> Sequence[Plan]:
        """The stored plans, by name."""

    async def put_plan(self, plan: Plan) -> bool:
        """Stores it if the stored one has the revision before it; a missing one counts as 0."""

    async def remove_plan(self, name: str) -> bool:
        """False: there is none. Accounts that still name it have the default one."""

    async def add_token(self, token: ApiToken, digest: TokenDigest) -> bool:
        """False: there is no such account."""

    async def token(self, token_id: str) -> tuple[ApiToken, Sequence[TokenDigest], Account] | None:
        """The token, the digests of its live secrets, the newest first, and its account."""

    async def update_token(self, token: ApiToken, digests: Sequence[TokenDigest]) -> bool:
        """Replaces name, expiry, grant, limits and digests; a revocation stays. False: there is no such token."""

    async def tokens(self, account_id: str) -> Sequence[ApiToken]:
        """All tokens of one account, revoked ones too, oldest first."""

    async def revoke(self, token_id: str, revoked_at: int) -> bool:
        """Ends a token for good; a second call keeps the first time. False: there is no such token."""


class QuotaStore(Protocol):
    """Holds of running requests, the ledger of finished ones, and the counters of both."""

    async def reserve(self, hold: Hold) -> Granted | Denied:
        """Makes one decision: everything is compared before anything is added, by the store's own clock.

        Expired holds of the account are charged first, at their checkpoints. A request id that is held already is
        granted again and counted once; one whose hold expired may ask anew, and what it uses replaces that charge.
        """

    async def count(self, account_id: str, caps: Sequence[Cap]) -> Denied | None:
        """Counts a request that holds nothing for all of these caps, of requests per minute alone, or for none."""

    async def remaining(self, account_id: str, caps: Sequence[Cap]) -> Sequence[int]:
        """What each cap has left now, as in Granted; negative where more was used than it allows. Counts nothing."""

    async def checkpoint(self, records: Sequence[UsageRecord], lifetime_us: int) -> None:
        """Extends the holds of these requests, and notes what they used so far. Ids that are not held are ignored."""

    async def settle(self, records: Sequence[UsageRecord]) -> None:
        """Charges final usage once, to the day that the hold was taken from, and gives the hold back to it.

        The first settlement of an id wins. One that comes after its hold expired replaces the checkpoint's charge;
        one whose hold is unknown to this store is charged to `record.day`.
        """

    async def sweep(self) -> int:
        """Charges all expired holds at their checkpoints, and removes days older than RETENTION_DAYS. Returns how many
        holds, without those of a call whose answer came too late and that was made again."""

    async def totals(self, account_id: str, day: int) -> Totals:
        """The counters; O(1)."""

    async def records(
        self, account_id: str, day: int, request_ids: Sequence[str] | None = None
    ) -> Sequence[UsageRecord]:
        """All records that were charged to the day, or those of these requests, by request id; O(their number)."""

    async def usage(
        self, account_ids: Sequence[str], first_day: int, last_day: int, by: Collection[str] = USAGE_COLUMNS
    ) -> Mapping[str, Sequence[UsageRow]]:
        """Sums of final and expired records, by day and these columns, in that order, of each account that has any;
        O(the number of the sums by all columns), not that of the records.

        Callers choose tags: where a day has TAGGED_MAX rows, new sets of tags are summed as OTHER_TAGS.
        """

    async def remove(self, account_id: str, *, keep_usage: bool) -> None:
        """Removes the holds and rates of an account that makes no calls any more; without `keep_usage` its ledger and
        counters too."""

    async def reconcile(self, account_id: str, day: int, subject: str = "") -> Balance:
        """The counters beside the same sums recomputed from records and holds; O(their number)."""


class LeaseStore(Protocol):
    """Leases of this cell: slices of budgets of accounts that have their home in another one.

    A hold whose record has a lease among its subjects counts against it, in the decision of `reserve` under a cap LEASE
    and in all that ends a hold, by the store's own clock. Each of these methods does nothing where the lease's state is
    further on already.
    """

    async def begin(self, lease: QuotaLease, lifetime_us: int) -> QuotaLease:
        """Stores a lease that is to be asked for. Returns it with its times."""

    async def open(self, account_id: str, lease_id: str, amount: int, day: int) -> bool:
        """Lets calls begin on a lease that was asked for, and granted. False: it is not ASKED."""

    async def close(self, account_id: str, lease_id: str) -> None:
        """From now on no call begins on it, and it is not opened any more."""

    async def note_returned(self, account_id: str, lease_id: str, used: int) -> None:
        """The home cell has settled so much of a lease that is closed. It is kept for LEASE_KEPT_S from now, and one
        that was never opened is removed."""

    async def list(self, account_id: str = "") -> Sequence[QuotaLease]:
        """All leases, or an account's, by the time at which they were asked for. The ones whose time is over are closed
        first."""


class BatchStore(Protocol):
    """The part of a store that keeps batches. Its methods raise StoreUnavailable, and calls may be repeated."""

    async def begin(self, batch: BatchJob) -> bool:
        """Stores a batch that is ARRIVING. False: the account has as many open as it may."""

    async def add_items(self, account_id: str, batch_id: str, first: int, bodies: Sequence[bytes]) -> None:
        """Stores items from place `first` on."""

    async def open(self, account_id: str, batch_id: str) -> None:
        """Makes a batch QUEUED, now that all its items are stored."""

    async def get(self, account_id: str, batch_id: str) -> BatchJob | None: ...

    async def of_account(self, account_id: str) -> Sequence[BatchJob]:
        """The newest LISTED_MAX, the newest first."""

    async def results(self, account_id: str, batch_id: str, first: int, limit: int) -> Sequence[BatchItemResult]:
        """Results of ended items from place `first` to `first + limit − 1`, in their order."""

    async def claim(self, model: str, lease_s: float, limit: int) -> Sequence[BatchJobItem]:
        """Leases items of one account, which comes after the others then; the oldest first. Nobody else gets them
        before the lease is over."""

    async def renew(self, items: Sequence[BatchJobItem], lease_s: float) -> Sequence[BatchJobItem]:
        """Starts a new lease for each item. Returns the items that must not run any more."""

    async def put_back(self, items: Sequence[BatchJobItem], delay_s: float) -> None:
        """Returns untried items to the queue. Their accounts have their next turns for these models after `delay_s`."""

    async def end(self, item: BatchJobItem, succeeded: bool, result: bytes, record: UsageRecord | None) -> bool:
        """Stores an item's result and, in the same moment, what it used, which settles its hold. False: the item or its
        batch had ended, and the result is thrown away; what it used is charged all the same, once."""

    async def close(self, account_id: str, batch_id: str, status: BatchStatus) -> bool:
        """Ends an open batch: ended items stay, and no other item runs. False: there is no open one."""

    async def discard(self, account_id: str) -> None:
        """Deletes everything of the account's batches."""

    async def sweep(self) -> None:
        """Deletes what has expired."""

    async def waiting(self, models: Sequence[str]) -> Mapping[str, QueueDepth]:
        """The queue depth of each model that has open batches."""


class AuditStore(Protocol):
    """Chains of audit entries, one for each account, kept for good."""

    async def append(self, entry: AuditEntry) -> bool:
        """False: its place is taken, or the entry before it is missing."""

    async def entries(self, account_id: str, first_seq: int, limit: int) -> Sequence[AuditEntry]:
        """At most `limit` entries from `first_seq` on, in their order."""

    async def head(self, account_id: str) -> AuditEntry | None:
        """The last entry."""


class ClaimStore(Protocol):
    """Keys of an account that one caller takes for some time, with a value."""

    async def claim(self, account_id: str, key: str, value: bytes, lifetime_s: int) -> bytes | None:
        """Stores the value under a free key for so long, and returns None; else returns the value that it has."""

    async def replace(self, account_id: str, key: str, value: bytes | None, lifetime_s: int) -> None:
        """Stores another value under the key; None frees it."""


class NoticeStore(Protocol):
    """Notices that wait for delivery."""

    async def add(self, notice: Notice) -> None:
        """Stores each id once, also after it was closed, for RETENTION_DAYS."""

    async def claim(self, now: float, lease_s: float, limit: int) -> Sequence[Notice]:
        """Notices that are due, the first due first; they are due again after `lease_s`, with one try more."""

    async def postpone(self, notice_id: str, due_at: float) -> None: ...

    async def close(self, notice_id: str) -> None: ...


class ClusterStore(Protocol):
    """The hosts that share this store."""

    async def found(self, authority: ClusterAuthority) -> bool:
        """Stores the cluster's authority, for good; False: it has one."""

    async def authority(self) -> ClusterAuthority | None: ...

    async def add_token(self, token: JoinToken) -> None: ...

    async def token(self, token_id: str) -> JoinToken | None: ...

    async def admit(self, token_id: str, member: ClusterMember, now_s: int) -> JoinOutcome:
        """Takes one use of the token and stores the member, or does neither. A member that asks again, with the key
        that it has, takes no further use."""

    async def renew(self, member: ClusterMember) -> bool:
        """Stores a member of the same id and key anew; False: there is none."""

    async def restore(self, member: ClusterMember, now_s: int) -> bool:
        """Stores a member that has shown its certificate, and that this store has lost. False: it is there, its key was
        removed, its name is another's by now, or this store has no cluster."""

    async def remove(self, member_id: str) -> bool:
        """Removes a member; its key joins no more for as long as its certificate holds. False: there is none."""

    async def members(self) -> Sequence[ClusterMember]:
        """All members, by their ids."""

    async def removed_keys(self, now_s: int) -> Sequence[str]:
        """The keys of removed members whose certificates still hold."""

    async def catalogue(self, known: str = "") -> ClusterCatalogue | None:
        """The models of all hosts; None where its revision is still the `known` one. Empty before the first change."""

    async def put_catalogue(self, catalogue: ClusterCatalogue, before: str) -> bool:
        """Stores a catalogue in place of the one with revision `before`; False: that is another one by now. Raises
        CatalogueTooLarge."""

    async def report_catalogue(self, report: HostCatalogue) -> None:
        """Stores what a host has of the catalogue, until the host is removed; of one that is no member, nothing."""

    async def catalogue_reports(self) -> Sequence[HostCatalogue]:
        """What each member said last, by their ids."""


class Store(Protocol):
    """One database's parts, and what concerns all of them."""

    accounts: AccountStore
    quotas: QuotaStore
    leases: LeaseStore
    batches: BatchStore
    audit: AuditStore
    claims: ClaimStore
    notices: NoticeStore
    cluster: ClusterStore

    async def ping(self) -> None:
        """Returns when the store can take a write."""

    async def advice(self) -> Sequence[str]:
        """What an operator should change about how this store is set up; empty when all is well."""

    async def close(self) -> None: ...
