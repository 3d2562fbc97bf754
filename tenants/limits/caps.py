"""Limits that a request is measured against, and what it takes of each. It does not know how stores count.

A subject is the owner of a limit: the account (""), one of its tokens ("token:ID"), a class of models ("class:NAME"),
or a token's calls of a class ("token:ID class:NAME"). Usage of a subject is counted from when it has a limit.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tenants.records.holds import BUDGETS, RATES, Cap, DenialReason, window_us_left
from tenants.records.limits import MINUTE_US, Limits, lasts_us
from tenants.records.usage import MICRO


class RequestSize(NamedTuple):
    """The most that a request can use. `min_micro_neurons` are enough for it to run."""

    micro_neurons: int = 0
    min_micro_neurons: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class LimitStatus(NamedTuple):
    """The rest of a cap, in the unit of its limit, and in how many seconds it is whole again."""

    subject: str
    measure: DenialReason
    allowed: float
    remaining: float
    reset_s: int


def limited_subjects(account: Limits, token_id: str, token: Limits, model_class: str) -> list[tuple[str, Limits]]:
    """The subjects that this call is counted for, the account first, and the limits of each."""
    of_token = f"token:{token_id}"
    candidates = (
        (f"class:{model_class}", account.classes.get(model_class)),
        (of_token, token),
        (f"{of_token} class:{model_class}", token.classes.get(model_class)),
    )
    return [("", account)] + [(subject, limits) for subject, limits in candidates if limits and not limits.empty]


def caps_of(subjects: Sequence[tuple[str, Limits]], size: RequestSize) -> tuple[Cap, ...]:
    """The caps in the order of decisions: the limit that lasts longest comes first."""
    return tuple(cap for subject, limits in subjects for cap in _caps(subject, limits, size))


def _caps(subject: str, limits: Limits, size: RequestSize) -> Iterator[Cap]:
    for measure, neurons in zip(BUDGETS, (limits.neurons_per_month, limits.neurons_per_day), strict=True):
        if neurons is not None:
            yield Cap(subject, measure, size.micro_neurons, round(neurons * MICRO), size.min_micro_neurons)
    if (per_minute := limits.requests_per_minute) is not None:
        interval_us = lasts_us(1, per_minute)
        room_us = (limits.at_once or 1) * interval_us
        yield Cap(subject, DenialReason.REQUESTS_PER_MINUTE, 1, per_minute, cost_us=interval_us, room_us=room_us)
    for measure, tokens, allowed in (
        (DenialReason.INPUT_TOKENS_PER_MINUTE, size.input_tokens, limits.input_tokens_per_minute),
        (DenialReason.OUTPUT_TOKENS_PER_MINUTE, size.output_tokens, limits.output_tokens_per_minute),
    ):
        if allowed is not None:
            yield Cap(subject, measure, tokens, allowed, cost_us=lasts_us(tokens, allowed), room_us=MINUTE_US)
    if limits.concurrent_requests is not None:
        yield Cap(subject, DenialReason.CONCURRENT_REQUESTS, 1, limits.concurrent_requests)


def unattainable(cap: Cap) -> bool:
    """Whether the request takes more of the cap than there ever is, however long it waits."""
    return cap.min_amount > cap.allowed if cap.measure in BUDGETS else cap.cost_us > cap.room_us


def limit_status(cap: Cap, left: int, now_us: int) -> LimitStatus:
    """`left` is the store's answer for the cap."""
    if cap.measure in RATES:
        behind_us = max(cap.room_us - left, 0)
        one_us = MINUTE_US / cap.allowed
        return LimitStatus(cap.subject, cap.measure, cap.allowed, max(0, int(left / one_us)), -(-behind_us // MICRO))
    if cap.measure is DenialReason.CONCURRENT_REQUESTS:
        return LimitStatus(cap.subject, cap.measure, cap.allowed, max(0, left), 0)
    reset_s = -(-window_us_left(cap.measure, now_us) // MICRO)
    return LimitStatus(cap.subject, cap.measure, cap.allowed / MICRO, max(0, left) / MICRO, reset_s)


def limits_status(measured: Sequence[Cap], left: Sequence[int], now_us: int) -> tuple[LimitStatus, ...]:
    """The statuses of all caps but a lease's, which is no limit of the account."""
    rests = zip(measured, left, strict=True)
    return tuple(limit_status(cap, amount, now_us) for cap, amount in rests if cap.measure is not DenialReason.LEASE)
