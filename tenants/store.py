"""What is kept about tenants, and the one protocol for keeping it. It does not know how; store_*.py do."""

import enum
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from tenants.grants import Grant
from tenants.usage import MICRO, Balance, Totals, UsageRecord

Clock = Callable[[], float]  # seconds since 1970
KEPT_DAYS: Final = 400  # records and sums of older days are removed by sweep()


class StoreUnavailable(Exception):
    """The store cannot answer now. The message tells an operator what to do; clients get 503 and `retry_after_s`."""

    retry_after_s: Final = 1


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one account may use. The defaults below are the ones of every new account and stand nowhere else.

    They let a laptop work all day and still stop a runaway loop: 20 requests a second on average, a minute's worth
    at once, and about 50 million output tokens of a 1 B model a day.
    `burst` is how many requests may come at once; None is a full minute's worth.
    """

    requests_per_minute: int = 1_200
    neurons_per_day: float = 1_000_000.0
    concurrent_requests: int = 1_000
    burst: int | None = None

    def __post_init__(self) -> None:
        _in_range("requests_per_minute", self.requests_per_minute, 1, 6_000_000)
        _in_range("neurons_per_day", self.neurons_per_day, 0, 1e9)
        _in_range("concurrent_requests", self.concurrent_requests, 1, 1_000_000)
        _in_range("burst", self.at_once, 1, 6_000_000)

    @property
    def at_once(self) -> int:
        return self.requests_per_minute if self.burst is None else self.burst

    @property
    def interval_us(self) -> int:
        """The steady distance of requests, rounded up so that the rate is never above the limit."""
        return -(-60 * MICRO // self.requests_per_minute)

    @property
    def micro_neurons_per_day(self) -> int:
        return round(self.neurons_per_day * MICRO)


class Account(msgspec.Struct, frozen=True):
    """A tenant. `id` is 32 hex characters, `created_at` seconds since 1970."""

    id: str
    name: str
    limits: Limits
    created_at: int


class ApiToken(msgspec.Struct, frozen=True):
    """A credential without its secret. Times are seconds since 1970."""

    id: str
    account_id: str
    name: str
    created_at: int
    expires_at: int | None = None
    revoked_at: int | None = None
    grant: Grant = Grant()


class Seal(msgspec.Struct, frozen=True):
    """What is kept of a secret: its HMAC-SHA256, which pepper made it, and until when it opens if it was rolled."""

    digest: bytes
    pepper: int
    until: int | None = None


class Hold(msgspec.Struct, frozen=True):
    """A request that asks to start. `record` is what it is charged if nobody is ever heard of it again: nothing yet.

    `held` micro-neurons are the most that it can cost; `lifetime_us` is how long the hold lasts without a checkpoint.
    """

    record: UsageRecord
    held: int
    lifetime_us: int


class Refusal(enum.StrEnum):
    REQUESTS_PER_MINUTE = "requests_per_minute"
    CONCURRENT_REQUESTS = "concurrent_requests"
    NEURONS_PER_DAY = "neurons_per_day"
    REVOKED = "revoked"  # the token, since it was verified
    NO_ACCOUNT = "no_account"
    RECORDED = "recorded"  # this request id has its usage record already


class Granted(msgspec.Struct, frozen=True):
    """The hold is kept and charged to `day`."""

    day: int


class Refused(msgspec.Struct, frozen=True):
    """Nothing was kept or counted. `allowed` and `used` are in the unit of the limit (micro-neurons for the day)."""

    reason: Refusal
    retry_after_us: int = 0
    allowed: int = 0
    used: int = 0


class Store(Protocol):
    """Every method raises StoreUnavailable when the store cannot answer, and then it may or may not have acted.

    All writes are idempotent, so that a caller who does not know may repeat them. Two implementations, one contract
    test: tests/tenants/test_store.py.
    """

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

    async def set_limits(self, account_id: str, limits: Limits) -> bool:
        """In force for the next reserve on every gateway. False: there is no such account."""
        ...

    async def add_token(self, token: ApiToken, seal: Seal) -> bool:
        """False: there is no such account."""
        ...

    async def token(self, token_id: str) -> tuple[ApiToken, Sequence[Seal], Account] | None:
        """With the seals of its live secrets, the newest first."""
        ...

    async def change_token(self, token: ApiToken, seals: Sequence[Seal]) -> bool:
        """Its name, expiry, grant and seals from now on; a revocation stays as it is. False: there is no such token."""
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
        granted again and counted once.
        """
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

    async def reconcile(self, account_id: str, day: int) -> Balance:
        """The counters beside the same sums recomputed from records and holds; O(their number)."""
        ...


def open_store(url: str, clock: Clock | None = None) -> Store:
    """`sqlite:PATH` (created when missing) or `redis://HOST:PORT/DB`. Without a clock SQLite reads the machine's, Redis
    its own. Raises StoreUnavailable when the file cannot be used, ValueError for another url."""
    if url.startswith("sqlite:"):
        from tenants.store_sqlite import SqliteStore

        return SqliteStore(url.removeprefix("sqlite:"), clock)
    if url.startswith(("redis://", "rediss://", "unix://")):
        from tenants.store_redis import RedisStore

        return RedisStore(url, clock)
    raise ValueError(f"store url {url!r} is neither sqlite:PATH nor redis://HOST:PORT/DB")


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must be between {low:,} and {high:,}")
