"""What is kept about tenants, and the one protocol for keeping it. It does not know how; store_*.py do."""

import enum
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from tenants.records.batches import Batches
from tenants.records.grants import Grant
from tenants.records.terms import DEFAULT_PLAN, NO_LIMITS, Limits, Plan, Settings, overlay, tighter
from tenants.records.usage import Balance, Totals, UsageRecord

Clock = Callable[[], float]  # seconds since 1970
KEPT_DAYS: Final = 400  # records and sums of older days are removed by sweep()
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


class Account(msgspec.Struct, frozen=True):
    """A tenant. `id` is 32 hex characters, times are seconds since 1970.

    ceiling     what the operator gave this account in place of its plan's limits.
    own         what its administrators lowered.
    epoch       of its prefix caches; raising it makes what they hold unfindable.
    revision    grows with every change, and lets a change that is based on an older one be refused.
    """

    id: str
    name: str
    ceiling: Limits
    created_at: int
    own: Limits = NO_LIMITS
    plan: Plan = DEFAULT_PLAN
    settings: Settings = Settings()
    epoch: int = 0
    suspended_at: int | None = None
    revision: int = 1

    @property
    def most(self) -> Limits:
        """What its administrators may lower, and never raise."""
        return overlay(self.plan.limits, self.ceiling)

    @property
    def limits(self) -> Limits:
        """What holds."""
        return tighter(self.most, self.own)


class ApiToken(msgspec.Struct, frozen=True):
    """A credential without its secret. Times are seconds since 1970."""

    id: str
    account_id: str
    name: str
    created_at: int
    expires_at: int | None = None
    revoked_at: int | None = None
    grant: Grant = Grant()
    limits: Limits = NO_LIMITS


class Seal(msgspec.Struct, frozen=True):
    """What is kept of a secret: its HMAC-SHA256, which pepper made it, and until when it opens if it was rolled."""

    digest: bytes
    pepper: int
    until: int | None = None


class Refusal(enum.StrEnum):
    """Why a request may not start. The first ones are limits, each measured by a Cap."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    CONCURRENT_REQUESTS = "concurrent_requests"
    NEURONS_PER_DAY = "neurons_per_day"
    INPUT_TOKENS_PER_MINUTE = "input_tokens_per_minute"
    OUTPUT_TOKENS_PER_MINUTE = "output_tokens_per_minute"
    NEURONS_PER_MONTH = "neurons_per_month"
    REVOKED = "revoked"  # the token, since it was verified
    NO_ACCOUNT = "no_account"
    SUSPENDED = "suspended"  # the account, by its operator
    RECORDED = "recorded"  # this request id has its final usage record already


BUDGETS: Final = (Refusal.NEURONS_PER_MONTH, Refusal.NEURONS_PER_DAY)
RATES: Final = (Refusal.REQUESTS_PER_MINUTE, Refusal.INPUT_TOKENS_PER_MINUTE, Refusal.OUTPUT_TOKENS_PER_MINUTE)


class Cap(msgspec.Struct, frozen=True, array_like=True):
    """One limit, and what a request takes of it: 1, tokens, or micro-neurons.

    subject     "" for the account, else one that the hold's record names.
    least       the request is content with so little where there is less than `amount`; of neurons alone.
    cost_us     of a rate: for how long `amount` takes it up.
    room_us     of a rate: how far ahead of its time it may be.
    """

    subject: str
    measure: Refusal
    amount: int
    allowed: int
    least: int = 0
    cost_us: int = 0
    room_us: int = 0


class Hold(msgspec.Struct, frozen=True):
    """A request that asks to start. `record` is what it is charged if nobody is ever heard of it again: nothing yet.

    `held` micro-neurons and `output` tokens are the most that it can use; `lifetime_us` is how long the hold lasts
    without a checkpoint. All `caps` must have room. A later cap of the same neurons may hold less than an earlier one.
    """

    record: UsageRecord
    held: int
    lifetime_us: int
    caps: tuple[Cap, ...] = ()
    output: int = 0


class Granted(msgspec.Struct, frozen=True):
    """`held` micro-neurons are kept and charged to `day`. `left` is what each cap has left now, in its order:
    micro-neurons, requests at once, and for rates the microseconds that they may still run ahead."""

    day: int
    held: int = 0
    left: tuple[int, ...] = ()


class Refused(msgspec.Struct, frozen=True):
    """Nothing was kept or counted. `allowed` and `used` are in the unit of the limit of `subject`."""

    reason: Refusal
    retry_after_us: int = 0
    allowed: int = 0
    used: int = 0
    subject: str = ""


class AuditEntry(msgspec.Struct, frozen=True):
    """One thing that somebody did. `at` is seconds since 1970; `account_id` is "" for what concerns no one account.

    `seal` is made of all else and of the seal before it: tenants/audit.py.
    """

    account_id: str
    seq: int
    at: int
    actor: str
    action: str
    target: str
    detail: str  # JSON
    seal: str


class Notice(msgspec.Struct, frozen=True):
    """Something to be told to an account's own address, until it was taken or too many tries failed."""

    id: str
    account_id: str
    url: str
    body: bytes
    due_at: float
    tries: int = 0


class UsageRow(msgspec.Struct, frozen=True):
    """Sums over one account's day, one of its tokens, one model and one set of tags, a line each."""

    day: int
    token_id: str
    model: str
    requests: int
    micro_neurons: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    tags: str = ""

    @property
    def each_tag(self) -> list[str]:
        """The one "" where there is none."""
        return self.tags.split("\n")


class Store(Protocol):
    """Every method raises StoreUnavailable when the store cannot answer, and then it may or may not have acted.

    All writes are idempotent, so that a caller who does not know may repeat them. Two implementations, one contract
    test: tests/tenants/store/test_contract.py.
    """

    batches: Batches

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

    async def add_token(self, token: ApiToken, seal: Seal) -> bool:
        """False: there is no such account."""
        ...

    async def token(self, token_id: str) -> tuple[ApiToken, Sequence[Seal], Account] | None:
        """With the seals of its live secrets, the newest first."""
        ...

    async def change_token(self, token: ApiToken, seals: Sequence[Seal]) -> bool:
        """Its name, expiry, grant, limits and seals from now on; a revocation stays. False: there is no such token."""
        ...

    async def tokens(self, account_id: str) -> Sequence[ApiToken]:
        """All of one account, revoked ones too, oldest first."""
        ...

    async def revoke(self, token_id: str, revoked_at: int) -> bool:
        """For good; a second call keeps the first time. False: there is no such token."""
        ...

    async def reserve(self, hold: Hold) -> Granted | Refused:
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


def open_store(url: str, clock: Clock | None = None) -> Store:
    """`sqlite:PATH` (created when missing) or `redis://HOST:PORT/DB`. Without a clock SQLite reads the machine's, Redis
    its own. Raises StoreUnavailable when the file cannot be used, ValueError for another url."""
    if url.startswith("sqlite:"):
        from tenants.store.sqlite.store import SqliteStore

        return SqliteStore(url.removeprefix("sqlite:"), clock)
    if url.startswith(("redis://", "rediss://", "unix://")):
        from tenants.store.redis.store import RedisStore

        return RedisStore(url, clock)
    raise ValueError(f"store url {url!r} is neither sqlite:PATH nor redis://HOST:PORT/DB")
