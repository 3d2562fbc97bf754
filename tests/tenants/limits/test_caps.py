"""Limits of every kind, of accounts, tokens and classes of models, on both stores and against a slow oracle."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import structs

from tenants.limits.caps import RequestSize, caps_of, limit_status, limited_subjects
from tenants.records.accounts import Account, Plan
from tenants.records.holds import Cap, DenialReason, Denied, Granted, Hold
from tenants.records.limits import NO_LIMITS, Limits, overlay, tighter
from tenants.records.tokens import ApiToken, TokenDigest
from tenants.records.usage import DAY_US, EXPIRED, MICRO, UsageRecord, day_of, first_of_month, first_of_next_month
from tenants.store.protocol import Store

pytestmark = pytest.mark.anyio
ANN = "a" * 32
LIFE_US = 60 * MICRO
NOON_US = 1_772_280_000 * MICRO  # of 28 February 2026


# ---- which limits hold


def test_a_ceiling_stands_in_for_its_plans_limits_and_own_ones_only_lower() -> None:
    plan = Plan("team", Limits(requests_per_minute=600, burst=10, neurons_per_day=100.0, concurrent_requests=5))
    account = Account(ANN, "ann", Limits(neurons_per_day=500.0, neurons_per_month=9_000.0), 1, plan=plan)
    assert account.limits == Limits(600, 500.0, 5, 10, neurons_per_month=9_000.0)
    lowered = structs.replace(account, own=Limits(neurons_per_day=50.0, concurrent_requests=900))
    assert lowered.limits == Limits(600, 50.0, 5, 10, neurons_per_month=9_000.0)
    assert lowered.ceiling_limits == account.limits


def test_a_rate_that_is_replaced_takes_its_burst_along() -> None:
    assert overlay(Limits(requests_per_minute=600, burst=10), Limits(requests_per_minute=60)).at_once == 60
    assert tighter(Limits(requests_per_minute=600), Limits(requests_per_minute=60)).at_once == 60
    assert tighter(Limits(requests_per_minute=600, burst=10), Limits(requests_per_minute=60)).at_once == 10
    assert tighter(Limits(requests_per_minute=60), Limits(requests_per_minute=600, burst=5)).at_once == 5


def test_classes_are_laid_over_and_lowered_one_by_one() -> None:
    plan = Limits(classes={"large": Limits(requests_per_minute=10), "small": Limits(concurrent_requests=3)})
    over = Limits(classes={"large": Limits(requests_per_minute=20, neurons_per_day=5.0)})
    both = overlay(plan, over)
    assert both.classes == {
        "large": Limits(requests_per_minute=20, neurons_per_day=5.0),
        "small": Limits(concurrent_requests=3),
    }
    assert tighter(both, Limits(classes={"large": Limits(neurons_per_day=9.0)})).classes["large"].neurons_per_day == 5.0


def test_a_call_is_counted_for_all_subjects_that_have_limits() -> None:
    account = Limits(requests_per_minute=9, classes={"large": Limits(requests_per_minute=1)})
    token = Limits(neurons_per_day=1.0, classes={"large": Limits(concurrent_requests=1)})
    assert [subject for subject, _ in limited_subjects(account, "k", token, "large")] == [
        "",
        "class:large",
        "token:k",
        "token:k class:large",
    ]
    assert [subject for subject, _ in limited_subjects(account, "k", NO_LIMITS, "small")] == [""]


@pytest.mark.parametrize(
    "wrong",
    [
        {"requests_per_minute": 0},
        {"neurons_per_month": -1.0},
        {"neurons_per_day": float("nan")},
        {"neurons_per_day": float("inf")},
        {"burst": 3},
        {"input_tokens_per_minute": 10**13},
        {"classes": {"Large": Limits()}},
        {"classes": {"a": Limits(classes={"b": Limits()})}},
        {"classes": {str(n): Limits() for n in range(17)}},
    ],
)
def test_limits_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Limits(**wrong)


def test_months_begin_on_their_first_day() -> None:
    days = [day_of(us) for us in (1_772_236_800 * MICRO, 1_772_323_200 * MICRO)]  # 28 February and 1 March 2026
    assert [first_of_month(day) - days[0] for day in days] == [-27, 1]
    assert [first_of_next_month(day) - days[0] for day in days] == [1, 32]


# ---- decisions


async def opened(store: Store) -> None:
    await store.accounts.add(Account(ANN, "ann", Limits(), 1))
    await store.accounts.add_token(ApiToken("key", ANN, "laptop", 1), TokenDigest(b"", 1))


def hold(request_id: str, day: int, limits: list[tuple[str, Limits]], size: RequestSize) -> Hold:
    subjects = "\n".join(subject for subject, _ in limits if subject)
    record = UsageRecord(ANN, request_id, day, 0, 0, 0, 0, EXPIRED, "key", "m", 7, 0.0, None, subjects)
    return Hold(record, size.micro_neurons, LIFE_US, caps_of(limits, size), size.output_tokens)


def used(ask: Hold, cost: int, output: int, outcome: str = "done") -> UsageRecord:
    return structs.replace(ask.record, micro_neurons=cost, completion_tokens=output, outcome=outcome)


async def test_input_tokens_are_a_rate_over_a_minute(store: Store, clock: Any) -> None:
    await opened(store)
    limits = [("", Limits(input_tokens_per_minute=600))]
    assert isinstance(await store.quotas.reserve(hold("a", clock.day, limits, RequestSize(input_tokens=500))), Granted)
    refused = await store.quotas.reserve(hold("b", clock.day, limits, RequestSize(input_tokens=200)))
    assert refused == Denied(DenialReason.INPUT_TOKENS_PER_MINUTE, 10 * MICRO, 600)
    clock.now_s += 10
    assert isinstance(await store.quotas.reserve(hold("b", clock.day, limits, RequestSize(input_tokens=200))), Granted)


async def test_output_tokens_are_held_and_then_count_as_they_were_used(store: Store, clock: Any) -> None:
    await opened(store)
    limits = [("", Limits(output_tokens_per_minute=600))]
    first = hold("a", clock.day, limits, RequestSize(output_tokens=500))
    assert isinstance(await store.quotas.reserve(first), Granted)
    clock.now_s += 30
    await store.quotas.checkpoint([used(first, 0, 0, EXPIRED)], LIFE_US)
    second = hold("b", clock.day, limits, RequestSize(output_tokens=101))
    assert isinstance(await store.quotas.reserve(second), Denied), "what is held does not flow off"
    await store.quotas.settle([used(first, 0, 300)])
    assert await store.quotas.remaining(ANN, second.caps) == [30 * MICRO]
    assert isinstance(await store.quotas.reserve(second), Granted)
    third = hold("c", clock.day, limits, RequestSize(output_tokens=200))
    refused = await store.quotas.reserve(third)
    assert refused == Denied(DenialReason.OUTPUT_TOKENS_PER_MINUTE, 100_000, 600)
    clock.now_s += 0.1
    assert isinstance(await store.quotas.reserve(third), Granted)


async def test_a_month_is_summed_over_its_days_and_ends(store: Store, clock: Any) -> None:
    await opened(store)
    day = first_of_next_month(clock.day)
    clock.now_s = day * 86_400.0 + 5
    limits = [("", Limits(neurons_per_month=100 / MICRO))]
    for n in range(3):
        ask = hold(f"r{n}", clock.day, limits, RequestSize(30, 30))
        assert isinstance(await store.quotas.reserve(ask), Granted)
        await store.quotas.settle([used(ask, 30, 0)])
        clock.now_s += 86_400 * 2
    big = hold("big", clock.day, limits, RequestSize(30, 30))
    until_us = first_of_next_month(day) * DAY_US - int(clock() * MICRO)
    assert await store.quotas.reserve(big) == Denied(DenialReason.NEURONS_PER_MONTH, until_us, 100, 90)
    clock.now_s = first_of_next_month(day) * 86_400.0
    assert isinstance(await store.quotas.reserve(hold("big", clock.day, limits, RequestSize(30, 30))), Granted)


async def test_what_is_left_is_granted_to_a_request_that_is_content_with_less(store: Store, clock: Any) -> None:
    await opened(store)
    limits = [("", Limits(neurons_per_day=100 / MICRO, neurons_per_month=70 / MICRO))]
    ask = hold("a", clock.day, limits, RequestSize(90, 20))
    assert await store.quotas.reserve(ask) == Granted(clock.day, 70, (0, 30))
    assert (await store.quotas.totals(ANN, clock.day)).held == 70
    assert await store.quotas.reserve(ask) == Granted(clock.day, 70, (0, 30)), "a repeated call gets the same"
    assert isinstance(await store.quotas.reserve(hold("b", clock.day, limits, RequestSize(90, 1))), Denied)
    await store.quotas.settle([used(ask, 55, 0)])
    assert await store.quotas.reserve(hold("b", clock.day, limits, RequestSize(90, 15))) == Granted(
        clock.day, 15, (0, 30)
    )


async def test_a_tokens_and_a_classes_limits_count_their_own_calls_alone(store: Store, clock: Any) -> None:
    await opened(store)
    account = ("", Limits(concurrent_requests=10))
    token, large = ("token:key", Limits(concurrent_requests=1)), ("class:large", Limits(neurons_per_day=50 / MICRO))
    first = hold("a", clock.day, [account, large, token], RequestSize(50, 50))
    assert isinstance(await store.quotas.reserve(first), Granted)
    refused = await store.quotas.reserve(hold("b", clock.day, [account, token], RequestSize(5, 5)))
    assert refused == Denied(DenialReason.CONCURRENT_REQUESTS, MICRO, 1, 1, "token:key")
    refused = await store.quotas.reserve(hold("b", clock.day, [account, large], RequestSize(1, 1)))
    assert refused == Denied(DenialReason.NEURONS_PER_DAY, DAY_US // 2, 50, 50, "class:large")
    assert isinstance(await store.quotas.reserve(hold("b", clock.day, [account], RequestSize(5, 5))), Granted)
    await store.quotas.settle([used(first, 20, 0)])
    assert isinstance(
        await store.quotas.reserve(hold("c", clock.day, [account, large, token], RequestSize(30, 30))), Granted
    )
    for subject in ("", "class:large", "token:key"):
        (await store.quotas.reconcile(ANN, clock.day, subject)).check()
    assert (await store.quotas.reconcile(ANN, clock.day, "class:large")).counted.micro_neurons == 20


async def test_a_suspended_account_starts_nothing(store: Store, clock: Any) -> None:
    await opened(store)
    account = await store.accounts.get(ANN)
    assert account is not None
    assert await store.accounts.update(structs.replace(account, suspended_at=5, revision=2))
    assert await store.quotas.reserve(hold("a", clock.day, [], RequestSize())) == Denied(DenialReason.SUSPENDED)


def test_what_is_left_is_told_in_the_limits_own_unit() -> None:
    (requests,) = caps_of([("", Limits(requests_per_minute=60, burst=10))], RequestSize())
    left = limit_status(requests, 7_500_000, NOON_US)
    assert (left.remaining, left.reset_s, left.allowed) == (7, 3, 60)
    (month,) = caps_of([("", Limits(neurons_per_month=2.0))], RequestSize())
    assert limit_status(month, 1_500_000, NOON_US)[2:] == (2.0, 1.5, 43_200)
    assert limit_status(month, -3, NOON_US).remaining == 0


# ---- simulation


@dataclass
class Slow:
    """Everything by brute force: every event since the beginning is gone through whenever a number is needed."""

    begun: list[tuple[int, Hold, Granted]] = field(default_factory=list)
    ended: dict[str, tuple[int, UsageRecord]] = field(default_factory=dict)  # request: when, what it used

    def open(self, subject: str) -> list[tuple[Hold, Granted]]:
        return [
            (ask, granted)
            for _, ask, granted in self.begun
            if ask.record.request_id not in self.ended and subject in ask.record.subjects_counted
        ]

    def neurons(self, subject: str, first: int, last: int) -> int:
        settled = [
            record.micro_neurons
            for _, record in self.ended.values()
            if subject in record.subjects_counted and first <= record.day <= last
        ]
        return sum(settled) + sum(one.held for _, one in self.open(subject) if first <= one.day <= last)

    def behind_us(self, events: list[tuple[int, int]], now_us: int) -> int:
        """How far a bucket is behind that each (when, µs) filled."""
        due_us = 0
        for when_us, cost_us in sorted(events):
            due_us = max(due_us, when_us) + cost_us
        return max(due_us - now_us, 0)

    def left(self, cap: Cap, now_us: int) -> int:
        today, subject = day_of(now_us), cap.subject
        if cap.measure is DenialReason.NEURONS_PER_DAY:
            return cap.allowed - self.neurons(subject, today, today)
        if cap.measure is DenialReason.NEURONS_PER_MONTH:
            return cap.allowed - self.neurons(subject, first_of_month(today), today)
        if cap.measure is DenialReason.CONCURRENT_REQUESTS:
            return cap.allowed - len(self.open(subject))
        if cap.measure is DenialReason.OUTPUT_TOKENS_PER_MINUTE:
            settled = [
                (when_us, -(-record.completion_tokens * 60 * MICRO // cap.allowed))
                for when_us, record in self.ended.values()
                if subject in record.subjects_counted and record.completion_tokens
            ]
            held = sum(ask.output for ask, _ in self.open(subject))
            return cap.room_us - self.behind_us(settled, now_us) - -(-held * 60 * MICRO // cap.allowed)
        costs = [
            (when_us, one.cost_us)
            for when_us, ask, _ in self.begun
            for one in ask.caps
            if (one.subject, one.measure) == (subject, cap.measure)
        ]
        return cap.room_us - self.behind_us(costs, now_us)

    def reserve(self, ask: Hold, now_us: int) -> Granted | DenialReason:
        granted = ask.held
        for cap in ask.caps:
            room = self.left(cap, now_us)
            if cap.measure in (DenialReason.NEURONS_PER_DAY, DenialReason.NEURONS_PER_MONTH):
                if room < cap.min_amount:
                    return cap.measure
                granted = min(granted, room)
            elif room < (1 if cap.measure is DenialReason.CONCURRENT_REQUESTS else cap.cost_us):
                return cap.measure
        kept = Granted(day_of(now_us), granted)
        self.begun.append((now_us, ask, kept))
        return kept


def any_limits(dice: random.Random) -> list[tuple[str, Limits]]:
    def some(**choices: list[Any]) -> dict[str, Any]:
        return {name: dice.choice(values) for name, values in choices.items() if dice.random() < 0.5}

    found = []
    for subject in ("", "class:large", "token:key", "token:key class:large"):
        limits = Limits(
            **some(
                requests_per_minute=[20, 60, 600],
                neurons_per_day=[400 / MICRO, 2_000 / MICRO],
                neurons_per_month=[900 / MICRO, 5_000 / MICRO],
                concurrent_requests=[2, 5],
                input_tokens_per_minute=[200, 3_000],
                output_tokens_per_minute=[200, 3_000],
            )
        )
        found.append((subject, limits))
    return found


@pytest.mark.parametrize("seed", range(12))
async def test_every_limit_of_every_subject_decides_as_the_slow_oracle_does(
    store: Store, clock: Any, seed: int
) -> None:
    print(f"seed {seed}")
    dice, oracle = random.Random(seed), Slow()
    await opened(store)
    every = any_limits(dice)
    refusals: set[DenialReason] = set()
    for step in range(150):
        now_us = int(clock() * MICRO)
        kind = dice.choices(["reserve", "settle", "pass", "midnight"], [100, 70, 40, 2])[0]
        if kind == "reserve":
            held = dice.choice([0, 30, 100])
            size = RequestSize(
                held, dice.choice([held, held // 3]), dice.choice([1, 40, 150]), dice.choice([1, 40, 150])
            )
            # The same limits at all times: what a rate held under another one would last otherwise.
            subjects = [pair for pair in every if "large" not in pair[0] or dice.random() < 0.6]
            ask = hold(f"r{step}", clock.day, subjects, size)
            decision, expected = await store.quotas.reserve(ask), oracle.reserve(ask, now_us)
            if isinstance(decision, Granted):
                assert isinstance(expected, Granted), f"step {step}: {expected}"
                assert (decision.day, decision.held) == (expected.day, expected.held)
                assert list(decision.remaining) == [oracle.left(cap, now_us) for cap in ask.caps], f"step {step}"
            else:
                assert decision.reason == expected, f"step {step}"
                refusals.add(decision.reason)
        elif kind == "settle" and (running := oracle.open("")):
            ask, granted = dice.choice(running)
            final = used(ask, dice.randint(0, granted.held), dice.randint(0, ask.output))
            final = structs.replace(final, day=granted.day)
            await store.quotas.settle([final])
            oracle.ended[ask.record.request_id] = (now_us, final)
        elif kind == "pass":
            clock.now_s += dice.choice([0.25, 1, 5])
        elif kind == "midnight":
            clock.now_s = (clock.day + 1) * 86_400 - 0.5
        alive = [used(ask, 0, 0, EXPIRED) for ask, _ in oracle.open("")]
        await store.quotas.checkpoint(alive, 200_000 * MICRO)
        for subject, _ in every:
            (await store.quotas.reconcile(ANN, clock.day, subject)).check()
    assert len(refusals) >= 2
