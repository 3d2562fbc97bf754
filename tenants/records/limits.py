"""Limits of accounts, tokens and classes of models: plain numbers, and how two sets of them combine."""

import re
from typing import Any, Final

import msgspec
from msgspec import structs

from tenants.records.usage import MICRO

CLASSES_MAX: Final = 16
CLASS_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")
MINUTE_US: Final = 60 * MICRO

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


NO_LIMITS: Final = Limits()


def lasts_us(amount: int, per_minute: int) -> int:
    """The microseconds of a rate that so many requests or tokens take, rounded up, so that none exceeds its limit."""
    return -(-amount * MINUTE_US // per_minute)


def overlay(limits: Limits, over: Limits) -> Limits:
    """`limits` with what `over` sets in place of its own."""
    replaced = {name: value for name in RANGES if (value := getattr(over, name)) is not None}
    if over.requests_per_minute is not None and over.burst is None:
        replaced["burst"] = None  # the burst belongs to the rate
    names = limits.classes.keys() | over.classes.keys()
    classes = {name: overlay(limits.classes.get(name, NO_LIMITS), over.classes.get(name, NO_LIMITS)) for name in names}
    return structs.replace(limits, classes=classes, **replaced)


def tighter(limits: Limits, own: Limits) -> Limits:
    """`limits`, or what `own` sets where that is less."""
    limits_min: dict[str, Any] = {}
    for name in RANGES:
        values = [value for value in (getattr(limits, name), getattr(own, name)) if value is not None]
        limits_min[name] = min(values, default=None)
    if own.requests_per_minute is not None and limits.requests_per_minute is not None:
        bursts = [burst for burst in (limits.at_once, own.at_once) if burst is not None]
        limits_min["burst"] = None if limits.burst is None and own.burst is None else min(bursts)
    names = limits.classes.keys() | own.classes.keys()
    classes = {name: tighter(limits.classes.get(name, NO_LIMITS), own.classes.get(name, NO_LIMITS)) for name in names}
    return Limits(**limits_min, classes=classes)
