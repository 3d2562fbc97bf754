"""Usage: one record per request however it ends, and a day's sums. It does not know who stores them."""

from datetime import UTC, datetime
from typing import Final

import msgspec

MICRO: Final = 1_000_000
DAY_US: Final = 86_400 * MICRO
EXPIRED: Final = "expired"  # the outcome that a store writes for a hold whose gateway went silent


class UsageRecord(msgspec.Struct, frozen=True, array_like=True):
    """Usage of one request. `day` is days since 1970 in UTC, the window that paid; times are microseconds since 1970.

    The fields' order is read by the Redis scripts; new ones go to the end. A record whose outcome is EXPIRED holds
    the last checkpoint and is replaced, once, when the settlement still comes; every other record is final.

    `subjects` own the limits that the request counts against beside its account's, a line each: tenants/limits/caps.py.
    `tags` and `metadata` are the caller's labels: a line each, and a JSON object. Under zero retention they are empty.
    """

    account_id: str
    request_id: str
    day: int
    micro_neurons: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    outcome: str
    token_id: str
    model: str
    started_us: int
    total_ms: float
    first_token_ms: float | None = None
    subjects: str = ""
    tags: str = ""
    metadata: str = ""

    @property
    def neurons(self) -> float:
        return self.micro_neurons / MICRO

    @property
    def subjects_counted(self) -> tuple[str, ...]:
        """All subjects that count it, the account's, "", first."""
        return ("", *self.subjects.split("\n")) if self.subjects else ("",)


class Totals(msgspec.Struct, frozen=True):
    """Sums over one account's day. `held` micro-neurons are reserved and not yet settled, by `open` requests."""

    requests: int = 0
    micro_neurons: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    held: int = 0
    open: int = 0


class Balance(msgspec.Struct, frozen=True):
    """The counters of one account's day beside the same sums recomputed from its records and holds."""

    counted: Totals
    recorded: Totals

    def check(self) -> None:
        """Raises AssertionError where counters and records disagree."""
        assert self.counted == self.recorded, f"counters {self.counted} but records {self.recorded}"


def day_of(time_us: int) -> int:
    return time_us // DAY_US


def first_of_month(day: int) -> int:
    """The first day, since 1970, of the month in UTC that this one is in."""
    return day - datetime.fromtimestamp(day * 86_400, UTC).day + 1


def first_of_next_month(day: int) -> int:
    return first_of_month(first_of_month(day) + 31)


class UsageRow(msgspec.Struct, frozen=True, gc=False):
    """Sums over one account's day, one of its tokens, one model and one set of tags, a line each; "" for what was not
    told apart."""

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
