"""Holds of requests on their limits before they run, and the decisions on them."""

import enum
from typing import Final

import msgspec

from tenants.records.usage import DAY_US, UsageRecord, day_of, first_of_next_month


class DenialReason(enum.StrEnum):
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
    LEASE = "lease"  # a limit as well: what the home cell of the account lent this cell


class Cap(msgspec.Struct, frozen=True, array_like=True):
    """One limit, and what a request takes of it: 1, tokens, or micro-neurons.

    subject     "" for the account, else one that the hold's record names.
    min_amount  the request is content with so little where there is less than `amount`; of neurons alone.
    cost_us     of a rate: for how long `amount` takes it up.
    room_us     of a rate: how far ahead of its time it may be.
    """

    subject: str
    measure: DenialReason
    amount: int
    allowed: int
    min_amount: int = 0
    cost_us: int = 0
    room_us: int = 0


class Hold(msgspec.Struct, frozen=True):
    """A request that asks to start. `record` is what it is charged if nobody is ever heard of it again: nothing yet.

    `held` micro-neurons and `output` tokens are the most that it can use; `lifetime_us` is how long the hold lasts
    without a checkpoint. All `caps` must have room. A later cap of the same neurons may hold less than an earlier one.
    A `strict` one is granted once all copies of the store have it, and by none while one is away.
    """

    record: UsageRecord
    held: int
    lifetime_us: int
    caps: tuple[Cap, ...] = ()
    output: int = 0
    strict: bool = False


class Granted(msgspec.Struct, frozen=True):
    """`held` micro-neurons are kept and charged to `day`. `remaining` is what each cap has left now, in its order:
    micro-neurons, requests at once, and for rates the microseconds that they may still run ahead."""

    day: int
    held: int = 0
    remaining: tuple[int, ...] = ()


class Denied(msgspec.Struct, frozen=True):
    """Nothing was kept or counted. `allowed` and `used` are in the unit of the limit of `subject`."""

    reason: DenialReason
    retry_after_us: int = 0
    allowed: int = 0
    used: int = 0
    subject: str = ""


BUDGETS: Final = (DenialReason.NEURONS_PER_MONTH, DenialReason.NEURONS_PER_DAY)
NEURONS: Final = (*BUDGETS, DenialReason.LEASE)  # measured in micro-neurons
RATES: Final = (
    DenialReason.REQUESTS_PER_MINUTE,
    DenialReason.INPUT_TOKENS_PER_MINUTE,
    DenialReason.OUTPUT_TOKENS_PER_MINUTE,
)


def window_us_left(budget: DenialReason, time_us: int) -> int:
    """Microseconds until the budget's next day or month begins in UTC."""
    day = day_of(time_us)
    next_day = day + 1 if budget is DenialReason.NEURONS_PER_DAY else first_of_next_month(day)
    return next_day * DAY_US - time_us
