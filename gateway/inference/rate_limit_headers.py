"""What a caller's limits have left, as headers and as a part of an answer. It does not know who counts.

The headers are those of the IETF's draft-ietf-httpapi-ratelimit-headers.
"""

from collections.abc import Iterable
from typing import Any, Final

from gateway.http.exchange import Header
from tenants.limits.caps import LimitStatus
from tenants.records.holds import BUDGETS, RATES, DenialReason

DAY_S: Final = 86_400


def headers(found: Iterable[LimitStatus]) -> list[Header]:
    """RateLimit-Policy, each limit and its window, and RateLimit, what is left of it and when it is whole again."""
    policies, states = [], []
    for left in found:
        name = title(left)
        policies.append(f'"{name}";q={int(left.allowed)}{_window(left.measure)}')
        reset = f";t={left.reset_s}" if left.measure in RATES or left.measure in BUDGETS else ""
        states.append(f'"{name}";r={int(left.remaining)}{reset}')
    if not policies:
        return []
    return [
        (b"ratelimit-policy", ", ".join(policies).encode()),
        (b"ratelimit", ", ".join(states).encode()),
    ]


def fields(found: Iterable[LimitStatus]) -> dict[str, Any]:
    """The neurons that are left, by the limit's name."""
    return {title(left): round(left.remaining, 6) for left in found if left.measure in BUDGETS}


def title(left: LimitStatus) -> str:
    """`neurons-per-day`, `token-requests-per-minute`, `large-requests-per-minute`, …"""
    whose = ["token"] if left.subject.startswith("token:") else []
    of_class = left.subject.partition("class:")[2]
    return "-".join([*whose, *([of_class] if of_class else []), left.measure.value.replace("_", "-")])


def _window(measure: DenialReason) -> str:
    if measure in RATES:
        return ";w=60"
    if measure is DenialReason.NEURONS_PER_DAY:
        return f";w={DAY_S}"
    return f";w={31 * DAY_S}" if measure is DenialReason.NEURONS_PER_MONTH else ""
