"""The checker of histories finds each fault in a history that is right but for it."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from tenants.records.usage import Balance, Totals, UsageRecord
from tests.support.store_history import Event, FinalState, Slack, Verdict, judge

ANN = "a" * 32
LEDGER = [UsageRecord(ANN, f"r{n}", 0, 10, 0, 0, 1, "done", "key", "m", 7, 1.0) for n in range(3)]
SUMS = Totals(requests=3, micro_neurons=30, completion_tokens=3)


def event(kind: Any, request_id: str, began_s: float, ended_s: float = 0.0, gateway: str = "near") -> Event:
    return Event(gateway, kind, ANN, request_id, began_s, ended_s or began_s + 0.1, 10)


EVENTS = [
    *(event("granted", f"r{n}", n) for n in range(3)),
    *(event("settled", f"r{n}", n + 5) for n in range(3)),
    event("refused", "r3", 4),
]


def verdict(
    events: Sequence[Event] = EVENTS,
    ledger: Sequence[UsageRecord] = LEDGER,
    counted: Totals = SUMS,
    slack: Slack | None = None,
    **limits: Any,
) -> Verdict:
    state = FinalState(ledger, Balance(counted, SUMS), **{"allowed": 30, **limits})
    return judge(events, {ANN: state}, {} if slack is None else {ANN: slack})


def test_a_right_history_is_no_cause_for_complaint() -> None:
    assert verdict() == Verdict([], 0, {ANN: 0})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ledger": LEDGER[:2]}, "r2 was settled and is in no ledger"),
        ({"ledger": [*LEDGER[:2], structs.replace(LEDGER[2], micro_neurons=9)]}, "used 10 and was charged 9"),
        ({"ledger": [*LEDGER, LEDGER[0]]}, "r0 is 2 times in the ledger"),
        ({"ledger": [*LEDGER, structs.replace(LEDGER[0], request_id="r9")]}, "r9 was charged and never granted"),
        ({"counted": structs.replace(SUMS, micro_neurons=40)}, "counters say"),
        ({"counted": structs.replace(SUMS, open=1, held=10)}, "counters say"),
        ({"allowed": 20}, "10 micro-neurons beyond the limit, and 0 are excused"),
        ({"allowed": 40}, "r3 was refused, with at most 30 of 40 taken"),
        ({"at_once": 2}, "3 ran at once, 2 may"),
    ],
)
def test_each_fault_is_found(changes: dict[str, Any], says: str) -> None:
    assert any(says in text for text in verdict(**changes).complaints)


def test_what_is_lost_and_passed_is_counted() -> None:
    assert verdict(ledger=LEDGER[:1]).lost == 20
    assert verdict(allowed=5).passed == {ANN: 25}


def test_grants_of_the_cut_off_side_are_excused_and_no_others() -> None:
    assert verdict(allowed=20, slack=Slack("near", 1.5, 2.5)).complaints == []
    assert verdict(allowed=20, slack=Slack("far", 1.5, 2.5)).complaints != []
    assert verdict(allowed=20, slack=Slack("near", 2.5, 3.5)).complaints != []


def test_what_was_not_answered_may_have_been_held_and_excuses_a_refusal() -> None:
    assert verdict([*EVENTS, event("unknown", "r4", 3)], allowed=40).complaints == []
