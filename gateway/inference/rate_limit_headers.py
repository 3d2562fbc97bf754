"""What a caller's limits have left, as headers and as a part of an answer. It counts nothing.

The headers are those of the IETF's draft-ietf-httpapi-ratelimit-headers.
"""

from collections.abc import Iterable
from typing import Any, Final

from gateway.http.exchange import Header
from tenants.limits.caps import LimitStatus
from tenants.records.holds import BUDGETS, RATES, DenialReason

DAY_S: Final = 86_400


def headers(limits: Iterable[LimitStatus]) -> list[Header]:
    """RateLimit-Policy with each limit and its window, and RateLimit with what is left and when all is left again."""
    policies, states = [], []
    for left in limits:
        name = title(left)
        policies.append(f'"{name}";q={int(left.allowed)}{_window(left.measure)}')
        reset = f";t={left.reset_s}" if left.measure in RATES or left.measure in BUDGETS else ""
        states.append(f'"{name}";r={int(left.remaining)}{reset}')
    if not policies:
        return []
    return [(b"ratelimit-policy", ", ".join(policies).encode()), (b"ratelimit", ", ".join(states).encode())]


def fields(limits: Iterable[LimitStatus]) -> dict[str, Any]:
    """The neurons that are left, by the limit's name."""
    return {title(left): round(left.remaining, 6) for left in limits if left.measure in BUDGETS}


def title(left: LimitStatus) -> str:
    """`neurons-per-day`, `token-requests-per-minute`, `large-requests-per-minute`, …"""
    prefix = ["token"] if left.subject.startswith("token:") else []
    model_class = left.subject.partition("class:")[2]
    return "-".join([*prefix, *([model_class] if model_class else []), left.measure.value.replace("_", "-")])


def _window(measure: DenialReason) -> str:
    if measure in RATES:
        return ";w=60"
    if measure is DenialReason.NEURONS_PER_DAY:
        return f";w={DAY_S}"
    return f";w={31 * DAY_S}" if measure is DenialReason.NEURONS_PER_MONTH else ""
