"""What an account may use, and how it wants to be served: limits, plans, settings. It does not know who counts.

A limit that is None is not set. What holds for an account: its plan's limits, where the operator gave it a ceiling of
its own that one, and below both what its own administrators lowered (`tighter`).
"""

import re
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, structs

from tenants.records.usage import MICRO

CLASSES_MAX: Final = 16
CLASS_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")
PLAN_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")
SHARING_MAX: Final = 16  # accounts of one sharing group
REGIONS_MAX: Final = 16
MINUTE_US: Final = 60 * MICRO


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one account, ApiToken, or either's calls of one class of models may use; None sets no limit.

    `burst` is how many requests may come at once; None is a full minute's worth. `classes` are limits of a class's
    calls alone, beside the others. Raises ValueError in words for people.
    """

    requests_per_minute: int | None = None
    neurons_per_day: float | None = None
    concurrent_requests: int | None = None
    burst: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    neurons_per_month: float | None = None
    classes: dict[str, "Limits"] = {}

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name} is {value}; it must be between {low:,} and {high:,}")
        if self.burst is not None and self.requests_per_minute is None:
            raise ValueError("burst needs requests_per_minute beside it")
        if len(self.classes) > CLASSES_MAX:
            raise ValueError(f"classes has {len(self.classes)} entries; the most is {CLASSES_MAX}")
        for name, limits in self.classes.items():
            if not CLASS_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no class of models; a name is like small or large-2")
            if limits.classes:
                raise ValueError("a class's limits have no classes of their own")

    @property
    def at_once(self) -> int | None:
        return self.requests_per_minute if self.burst is None else self.burst

    @property
    def empty(self) -> bool:
        return self == NO_LIMITS


# Each limit's least and greatest value.
RANGES: Final[dict[str, tuple[float, float]]] = {
    "requests_per_minute": (1, 6_000_000),
    "neurons_per_day": (0, 1e9),
    "concurrent_requests": (1, 1_000_000),
    "burst": (1, 6_000_000),
    "input_tokens_per_minute": (1, 1e12),
    "output_tokens_per_minute": (1, 1e12),
    "neurons_per_month": (0, 1e10),
}
NO_LIMITS: Final = Limits()


def overlay(limits: Limits, over: Limits) -> Limits:
    """`limits` with what `over` sets in place of its own."""
    given = {name: value for name in RANGES if (value := getattr(over, name)) is not None}
    if over.requests_per_minute is not None and over.burst is None:
        given["burst"] = None  # the burst belongs to the rate
    names = limits.classes.keys() | over.classes.keys()
    classes = {name: overlay(limits.classes.get(name, NO_LIMITS), over.classes.get(name, NO_LIMITS)) for name in names}
    return structs.replace(limits, classes=classes, **given)


def tighter(limits: Limits, own: Limits) -> Limits:
    """`limits`, or what `own` sets where that is less."""
    least: dict[str, Any] = {}
    for name in RANGES:
        values = [value for value in (getattr(limits, name), getattr(own, name)) if value is not None]
        least[name] = min(values, default=None)
    if own.requests_per_minute is not None and limits.requests_per_minute is not None:
        bursts = [burst for burst in (limits.at_once, own.at_once) if burst is not None]
        least["burst"] = None if limits.burst is None and own.burst is None else min(bursts)
    names = limits.classes.keys() | own.classes.keys()
    classes = {name: tighter(limits.classes.get(name, NO_LIMITS), own.classes.get(name, NO_LIMITS)) for name in names}
    return Limits(**least, classes=classes)


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator sells: limits, and the treatment beside others (engine.protocol.frames.Terms says what each
    does there).

    `wait_s` is how long a request may wait for its turn before it is refused, None: as long as it lives.
    `revision` grows with every change.
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


ZERO_RETENTION_KEEP_S: Final = 300.0


def kept_s(settings: Settings) -> float | None:
    """How long its cached prefixes are found after their last use; under zero retention at most 5 minutes."""
    if not settings.zero_retention:
        return settings.cache_keep_s
    return min(settings.cache_keep_s or ZERO_RETENTION_KEEP_S, ZERO_RETENTION_KEEP_S)
