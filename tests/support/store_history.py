"""What gateways were told by a store, with when, held against the ledger and counters that are there in the end.

It is offline: it sees events and the final state alone, and knows neither Redis nor how a store follows a failover.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from tenants.records.usage import Balance, UsageRecord


class Event(msgspec.Struct, frozen=True):
    """One call of a store by a gateway, from `began_s` to `ended_s` of a clock that all share.

    `refused` was said to have no room; `unknown` was not answered, and may have been granted. A settlement is an event
    once the gateway answers for it, which is before the store has it.
    """

    gateway: str
    kind: Literal["granted", "refused", "unknown", "checkpoint", "settled"]
    account_id: str
    request_id: str
    began_s: float
    ended_s: float
    micro_neurons: int = 0  # held, or used


@dataclass(frozen=True)
class FinalState:
    """Of one account: its ledger, its counters beside their sums, and what it may use."""

    ledger: Sequence[UsageRecord]
    balance: Balance
    allowed: int | None = None  # micro-neurons of the day
    at_once: int | None = None


@dataclass(frozen=True)
class Slack:
    """What may pass a limit: grants of one gateway in an interval in which its primary was cut off."""

    gateway: str
    since_s: float
    until_s: float


@dataclass(frozen=True)
class Verdict:
    """`lost` are micro-neurons that were settled and are in no ledger; `passed` those beyond its limit, by account."""

    complaints: list[str]
    lost: int
    passed: dict[str, int]


def judge(events: Sequence[Event], states: Mapping[str, FinalState], slack: Mapping[str, Slack]) -> Verdict:
    """`slack` is by account; an account without one may pass nothing."""
    complaints: list[str] = []
    lost, passed = 0, {}
    by_account: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_account[event.account_id].append(event)
    for account_id, state in states.items():
        own = by_account[account_id]
        complaints += [f"{account_id[:4]}: {text}" for text in _complaints(own, state, slack.get(account_id))]
        recorded = {record.request_id: record.micro_neurons for record in state.ledger}
        settled = {event.request_id: event.micro_neurons for event in own if event.kind == "settled"}
        lost += sum(max(0, amount - recorded.get(request_id, 0)) for request_id, amount in settled.items())
        if state.allowed is not None:
            passed[account_id] = max(0, sum(recorded.values()) - state.allowed)
    return Verdict(complaints, lost, passed)


def _complaints(events: Sequence[Event], state: FinalState, slack: Slack | None) -> Iterator[str]:
    granted = {event.request_id: event for event in events if event.kind == "granted"}
    unknown = {event.request_id for event in events if event.kind == "unknown"}
    settled = {event.request_id: event for event in events if event.kind == "settled"}
    recorded = {record.request_id: record for record in state.ledger}
    for request_id, count in Counter(record.request_id for record in state.ledger).items():
        if count > 1:
            yield f"{request_id} is {count} times in the ledger"
    for request_id, event in settled.items():
        record = recorded.get(request_id)
        if record is None:
            yield f"{request_id} was settled and is in no ledger"
        elif record.micro_neurons != event.micro_neurons:
            yield f"{request_id} used {event.micro_neurons} and was charged {record.micro_neurons}"
    for request_id, record in recorded.items():
        if request_id not in granted and request_id not in unknown:
            yield f"{request_id} was charged and never granted"
        elif request_id not in settled and record.micro_neurons > _granted_most(granted, request_id):
            yield f"{request_id} was charged more than it held"
    if state.balance.counted != state.balance.recorded:
        yield f"counters say {state.balance.counted}, the ledger {state.balance.recorded}"
    yield from _passed(events, state, granted, settled, slack)


def _granted_most(granted: Mapping[str, Event], request_id: str) -> int:
    return granted[request_id].micro_neurons if request_id in granted else 0


def _passed(
    events: Sequence[Event],
    state: FinalState,
    granted: Mapping[str, Event],
    settled: Mapping[str, Event],
    slack: Slack | None,
) -> Iterator[str]:
    """What was granted beyond the limits, or refused below them."""
    excused = [event for event in granted.values() if slack is not None and _within(event, slack)]
    if state.allowed is not None:
        used = sum(record.micro_neurons for record in state.ledger)
        excuse = sum(event.micro_neurons for event in excused)
        if used > state.allowed + excuse:
            yield f"{used - state.allowed} micro-neurons beyond the limit, and {excuse} are excused"
        yield from _refused_below(events, state.allowed, granted)
    if state.at_once is not None:
        most = _surely_at_once([(each, settled.get(each.request_id)) for each in granted.values()])
        if most > state.at_once + len(excused):
            yield f"{most} ran at once, {state.at_once} may, and {len(excused)} are excused"


def _within(event: Event, slack: Slack) -> bool:
    return event.gateway == slack.gateway and slack.since_s <= event.ended_s and event.began_s <= slack.until_s


def _refused_below(events: Sequence[Event], allowed: int, granted: Mapping[str, Event]) -> Iterator[str]:
    """Refusals at a moment at which all that may have been held or used left room. What was not answered may have been
    held as well."""
    taking = sorted((event for event in events if event.kind in ("granted", "unknown")), key=lambda one: one.began_s)
    most = max((event.micro_neurons for event in granted.values()), default=0)
    taken, at = 0, 0
    for refusal in sorted((event for event in events if event.kind == "refused"), key=lambda one: one.ended_s):
        while at < len(taking) and taking[at].began_s <= refusal.ended_s:
            taken += taking[at].micro_neurons or most
            at += 1
        if taken + refusal.micro_neurons <= allowed:
            yield f"{refusal.request_id} was refused, with at most {taken} of {allowed} taken"


def _surely_at_once(pairs: Sequence[tuple[Event, Event | None]]) -> int:
    """The most that ran at one moment, whatever happened inside of calls: from a grant's answer to its settlement."""
    moments = [(granted.ended_s, 1) for granted, _ in pairs]
    moments += [(settled.began_s, -1) for granted, settled in pairs if settled is not None]
    running = most = 0
    for _, change in sorted(moments):
        running += change
        most = max(most, running)
    return most
