"""Whether a request may start: its caps against what their subjects have used. It does not know where that is kept.

The Lua of redis/scripts.py takes the same steps in the same order.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tenants.records.holds import BUDGETS, NEURONS, Cap, DenialReason, Denied, Granted, Hold, window_us_left
from tenants.records.limits import lasts_us
from tenants.records.usage import MICRO, day_of


class SubjectUsage(NamedTuple):
    """Usage of one subject. The times are when it is in step with its rate again, counting settled requests; `output`
    tokens are held beside that. `day` and `month` are micro-neurons, held ones among them; `lease` is what a lease has
    left, below 0 where no call may begin on it."""

    requests_us: int = 0
    input_us: int = 0
    output_us: int = 0
    output: int = 0
    open: int = 0
    day: int = 0
    month: int = 0
    lease: int = -1


def decide(hold: Hold, used: Mapping[str, SubjectUsage], now_us: int) -> Granted | Denied:
    """Compares everything, adds nothing. `used` has all subjects of the hold's caps."""
    granted = hold.held
    for cap in hold.caps:
        denied = _refused(cap, used[cap.subject], now_us)
        if denied is not None:
            return denied
        if cap.measure in NEURONS:
            granted = min(granted, remaining(cap, used[cap.subject], now_us))
    after = tuple(remaining(cap, used[cap.subject], now_us) - _taken(cap, granted) for cap in hold.caps)
    return Granted(day_of(now_us), granted, after)


def first_denial(caps: Sequence[Cap], used: Mapping[str, SubjectUsage], now_us: int) -> Denied | None:
    """Compares what is counted without a hold; adds nothing."""
    return next((denied for cap in caps if (denied := _refused(cap, used[cap.subject], now_us)) is not None), None)


def remaining(cap: Cap, used: SubjectUsage, now_us: int) -> int:
    """The rest of a cap before the request: micro-neurons, requests, or microseconds of a rate."""
    match cap.measure:
        case DenialReason.NEURONS_PER_DAY:
            return cap.allowed - used.day
        case DenialReason.NEURONS_PER_MONTH:
            return cap.allowed - used.month
        case DenialReason.REQUESTS_PER_MINUTE:
            return cap.room_us - max(used.requests_us - now_us, 0)
        case DenialReason.INPUT_TOKENS_PER_MINUTE:
            return cap.room_us - max(used.input_us - now_us, 0)
        case DenialReason.OUTPUT_TOKENS_PER_MINUTE:
            return cap.room_us - max(used.output_us - now_us, 0) - lasts_us(used.output, cap.allowed)
        case DenialReason.CONCURRENT_REQUESTS:
            return cap.allowed - used.open
        case DenialReason.LEASE:
            return used.lease
        case _:
            raise AssertionError(f"{cap.measure} is no limit")


def _refused(cap: Cap, used: SubjectUsage, now_us: int) -> Denied | None:
    room = remaining(cap, used, now_us)
    in_use = cap.allowed - room
    if cap.measure in NEURONS:
        if room < cap.min_amount:
            wait_us = window_us_left(cap.measure, now_us) if cap.measure in BUDGETS else MICRO
            return Denied(cap.measure, wait_us, cap.allowed, in_use, cap.subject)
    elif cap.measure is DenialReason.CONCURRENT_REQUESTS:
        if room <= 0:
            return Denied(cap.measure, MICRO, cap.allowed, in_use, cap.subject)
    elif cap.cost_us > room:
        return Denied(cap.measure, cap.cost_us - room, cap.allowed, 0, cap.subject)
    return None


def _taken(cap: Cap, granted: int) -> int:
    if cap.measure in NEURONS:
        return granted
    return 1 if cap.measure is DenialReason.CONCURRENT_REQUESTS else cap.cost_us
