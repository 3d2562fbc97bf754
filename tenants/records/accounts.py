"""Records of accounts: their plans, their own settings, notices that wait for them, entries of their audit logs."""

import re
import unicodedata
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from tenants.records.limits import NO_LIMITS, Limits, overlay, tighter

PLAN_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")
SHARING_MAX: Final = 16  # accounts of one sharing group
REGIONS_MAX: Final = 16
ZERO_RETENTION_KEEP_S: Final = 300.0


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits and scheduling of many accounts; engine.protocol.types.SchedulingTerms has the scheduling fields.

    `wait_s` is how long a request may wait for its turn before it is refused, None: as long as it lives.
    `revision` grows with every change. What a `strict` plan grants, all replicas of a store have first: no failover
    passes its limits, and while a replica is away nothing is granted.
    """

    name: str
    limits: Limits = NO_LIMITS
    weight: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    sequences: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    kv_blocks: Annotated[int, Meta(ge=1, le=100_000_000)] | None = None
    floor_blocks: Annotated[int, Meta(ge=0, le=100_000_000)] | None = None
    cap_blocks: Annotated[int, Meta(ge=0, le=100_000_000)] | None = None
    wait_s: Annotated[float, Meta(gt=0, le=3600)] | None = None
    revision: int = 0
    strict: bool = False

    def __post_init__(self) -> None:
        if not PLAN_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is no name of a plan; one is like free or team-2")
        if self.floor_blocks is not None and self.cap_blocks is not None and self.floor_blocks > self.cap_blocks:
            raise ValueError(f"floor_blocks {self.floor_blocks} is above cap_blocks {self.cap_blocks}")


# What every account has that was given no other plan, until the operator changes the plan of this name. It lets a
# laptop work all day and still stops a runaway loop: 20 requests a second on average, a minute's worth at once, and
# about 50 million output tokens of a 1 B model a day.
DEFAULT_PLAN: Final = Plan(
    "default", Limits(requests_per_minute=1_200, neurons_per_day=1_000_000.0, concurrent_requests=1_000)
)


class Notices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Soft caps: that a part of a neuron limit is used is told to `url`, once a window for each of `at`.

    http:// is for where the operator allows private addresses (gateway/webhook.py).
    """

    url: Annotated[str, Meta(max_length=500, pattern="^[!-~]+$")]
    at: Annotated[tuple[float, ...], Meta(min_length=1, max_length=10)] = (0.8, 1.0)

    def __post_init__(self) -> None:
        if any(not 0 < part <= 1 for part in self.at):
            raise ValueError("'at' has parts of a limit, above 0 and at most 1")
        parts = urlsplit(self.url)
        if not parts.hostname or parts.scheme not in ("https", "http"):
            raise ValueError(f"{self.url!r} is no https:// address")
        if parts.username is not None or parts.fragment:
            raise ValueError("the address of notices has no user and no fragment in it; they are signed instead")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An account's own wishes.

    zero_retention   no byte of its prompts and completions outlives its request, but for KV, for at most cache_keep_s.
    cache_scope      who shares cached prefixes: all its callers, those of one `user`, or nobody but the request itself.
    cache_keep_s     how long a cached prefix is found after its last use; None: until it is evicted.
    sharing          ids of the accounts, its own among them, that share cached prefixes; it takes effect once the
                     settings of all of them name the very same.
    regions          where its calls may be served; empty: everywhere.
    """

    zero_retention: bool = False
    cache_scope: Literal["tenant", "user", "request"] = "tenant"
    cache_keep_s: Annotated[float, Meta(ge=1, le=604_800)] | None = None
    sharing: Annotated[tuple[str, ...], Meta(max_length=SHARING_MAX)] = ()
    regions: Annotated[tuple[Annotated[str, Meta(pattern="^[a-z0-9-]{1,32}$")], ...], Meta(max_length=REGIONS_MAX)] = ()
    notices: Notices | None = None

    def __post_init__(self) -> None:
        for name in ("sharing", "regions"):
            if len(set(getattr(self, name))) != len(getattr(self, name)):
                raise ValueError(f"{name} has an entry twice")
        if any(not re.fullmatch(r"[0-9a-f]{32}", one) for one in self.sharing):
            raise ValueError("sharing has account ids: 32 hex characters each")


def cache_retention_s(settings: Settings) -> float | None:
    """How long its cached prefixes are found after their last use; under zero retention at most 5 minutes."""
    if not settings.zero_retention:
        return settings.cache_keep_s
    return min(settings.cache_keep_s or ZERO_RETENTION_KEEP_S, ZERO_RETENTION_KEEP_S)


class Deletion(msgspec.Struct, frozen=True, omit_defaults=True):
    """That an account is to be removed at `due_at` unless it is restored before. With `keep_usage` its ledger stays for
    as long as any does, to be billed; else it goes too."""

    asked_at: int
    due_at: int
    keep_usage: bool = True


def name_key(name: str) -> str:
    """What two names have in common that people would take for the same one: case, width and spaces do not count."""
    return " ".join(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold()).split())


class Account(msgspec.Struct, frozen=True):
    """A tenant. `id` is 32 hex characters, times are seconds since 1970.

    `name` is its own among all accounts, but in stores that were written before names were: see `name_key`.

    ceiling     the operator's limits for this account in place of its plan's.
    own         limits that its administrators lowered.
    epoch       of its prefix caches; raising it hides all that they hold.
    revision    grows with every change, and lets a change that is based on an older one be refused.
    home        the cell that it is kept in where that is not this one: then this is a copy, for calls that come here.
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
    deletion: Deletion | None = None
    home: str = ""

    @property
    def ceiling_limits(self) -> Limits:
        """The limits that its administrators may lower, and never raise."""
        return overlay(self.plan.limits, self.ceiling)

    @property
    def limits(self) -> Limits:
        """The limits in force."""
        return tighter(self.ceiling_limits, self.own)


class Notice(msgspec.Struct, frozen=True):
    """A message to an account's own address, until it was delivered or too many tries failed."""

    id: str
    account_id: str
    url: str
    body: bytes
    due_at: float
    tries: int = 0


class AuditEntry(msgspec.Struct, frozen=True):
    """One action of one actor. `at` is seconds since 1970; `account_id` is "" for what concerns no one account.

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
