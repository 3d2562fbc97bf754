"""Leases in both stores: the states that they go through, and what calls take of them in the store's own decision."""

import random
from collections import Counter

import pytest

from tenants.records.accounts import Account
from tenants.records.holds import Cap, DenialReason, Denied, Granted, Hold
from tenants.records.leases import LeaseState, QuotaLease
from tenants.records.limits import Limits
from tenants.records.tokens import ApiToken, TokenDigest
from tenants.records.usage import EXPIRED, MICRO, UsageRecord
from tenants.store.protocol import LEASE_KEPT_S, Store
from tests.tenants.conftest import DayClock

pytestmark = pytest.mark.anyio
LIFE_US = 60 * MICRO
ANN, BOB = "a" * 32, "b" * 32


@pytest.fixture(autouse=True)
async def borrowers(store: Store) -> None:
    for account_id, name in ((ANN, "ann"), (BOB, "bob")):
        await store.accounts.add(Account(account_id, name, Limits(), 1, home="eu"))
        await store.accounts.add_token(ApiToken(f"key{name}", account_id, "laptop", 1), TokenDigest(b"digest", 1))


def record(request_id: str, day: int, lease: str, cost: int = 0, outcome: str = EXPIRED) -> UsageRecord:
    subjects = f"token:keyann\nlease:{lease}"
    counts = (cost, cost * 3, cost * 2, cost * 5)
    return UsageRecord(ANN, request_id, day, *counts, outcome, "keyann", "m", 7, 1.5, subjects=subjects)


def hold(request_id: str, day: int, lease: str, held: int, enough: int | None = None) -> Hold:
    cap = Cap(f"lease:{lease}", DenialReason.LEASE, held, 100, held if enough is None else enough)
    return Hold(record(request_id, day, lease), held, LIFE_US, (cap,))


async def opened(store: Store, lease_id: str = "us.1", amount: int = 100, day: int = 5) -> QuotaLease:
    await store.leases.begin(QuotaLease(ANN, lease_id, "eu", "keyann", "token:keyann"), LIFE_US)
    assert await store.leases.open(ANN, lease_id, amount, day)
    return await lease_now(store, lease_id)


async def lease_now(store: Store, lease_id: str = "us.1") -> QuotaLease:
    (lease,) = [lease for lease in await store.leases.list() if lease.id == lease_id]
    return lease


async def test_a_lease_goes_through_its_states_and_never_back(store: Store, clock: DayClock) -> None:
    begun = await store.leases.begin(QuotaLease(ANN, "us.1", "eu", "keyann", "token:keyann"), LIFE_US)
    now_us = int(clock.now_s * MICRO)
    assert (begun.begun_us, begun.until_us) == (now_us, now_us + LIFE_US)
    assert await store.leases.list() == [begun]
    assert await store.leases.open(ANN, "us.1", 100, 5)
    lease = await lease_now(store)
    assert (lease.state, lease.amount, lease.day, lease.home) == (LeaseState.OPEN, 100, 5, "eu")
    assert not await store.leases.open(ANN, "us.1", 200, 6), "it was opened"
    await store.leases.begin(QuotaLease(ANN, "us.1", "eu"), LIFE_US)
    await store.leases.note_returned(ANN, "us.1", 50)
    assert await lease_now(store) == lease, "an open lease takes calls, and cannot be returned"
    await store.leases.close(ANN, "us.1")
    assert (await lease_now(store)).state is LeaseState.CLOSED
    assert not await store.leases.open(ANN, "us.1", 200, 6)
    await store.leases.note_returned(ANN, "us.1", 50)
    await store.leases.close(ANN, "us.1")
    lease = await lease_now(store)
    assert (lease.state, lease.returned) == (LeaseState.RETURNED, 50)


async def test_a_lease_that_was_closed_while_it_was_asked_for_is_not_opened(store: Store) -> None:
    await store.leases.begin(QuotaLease(ANN, "us.1", "eu"), LIFE_US)
    await store.leases.close(ANN, "us.1")
    assert not await store.leases.open(ANN, "us.1", 100, 5)
    await store.leases.note_returned(ANN, "us.1", 0)
    assert not await store.leases.list(), "it was never opened, and nothing can come of it"


async def test_leases_of_one_account_are_listed_alone_in_the_order_of_their_questions(
    store: Store, clock: DayClock
) -> None:
    for number, account_id in enumerate((BOB, ANN, ANN)):
        clock.now_s += 1
        await store.leases.begin(QuotaLease(account_id, f"us.{9 - number}", "eu"), LIFE_US)
    assert [lease.id for lease in await store.leases.list()] == ["us.9", "us.8", "us.7"]
    assert [lease.id for lease in await store.leases.list(ANN)] == ["us.8", "us.7"]


async def test_calls_take_no_more_than_a_lease_has(store: Store, clock: DayClock) -> None:
    await opened(store)
    granted = await store.quotas.reserve(hold("r1", clock.day, "us.1", 70))
    assert granted == Granted(clock.day, 70, (30,))
    assert await store.quotas.reserve(hold("r1", clock.day, "us.1", 70)) == Granted(clock.day, 70, (30,)), "once"
    denied = await store.quotas.reserve(hold("r2", clock.day, "us.1", 40))
    assert denied == Denied(DenialReason.LEASE, MICRO, 100, 70, "lease:us.1")
    assert await store.quotas.reserve(hold("r3", clock.day, "us.1", 40, enough=10)) == Granted(clock.day, 30, (0,))
    lease = await lease_now(store)
    assert (lease.used, lease.open) == (100, 2)


async def test_what_a_call_did_not_use_is_the_leases_again(store: Store, clock: DayClock) -> None:
    await opened(store)
    await store.quotas.reserve(hold("r1", clock.day, "us.1", 70))
    for _ in range(2):
        await store.quotas.settle([record("r1", clock.day, "us.1", 20, "done")])
    lease = await lease_now(store)
    counts = (lease.used, lease.open, lease.prompt_tokens, lease.cached_tokens, lease.completion_tokens)
    assert counts == (20, 0, 60, 40, 100)
    assert await store.quotas.reserve(hold("r2", clock.day, "us.1", 80)) == Granted(clock.day, 80, (0,))
    for subject in ("", "token:keyann"):
        (await store.quotas.reconcile(ANN, clock.day, subject)).check()


async def test_no_call_begins_on_a_lease_that_is_asked_for_closed_over_or_unknown(
    store: Store, clock: DayClock
) -> None:
    await store.leases.begin(QuotaLease(ANN, "us.1", "eu"), LIFE_US)
    for lease_id in ("us.1", "us.2"):
        answer = await store.quotas.reserve(hold("r0", clock.day, lease_id, 0))
        assert isinstance(answer, Denied)
        assert answer.reason is DenialReason.LEASE
    await store.leases.open(ANN, "us.1", 100, 5)
    clock.now_s += 59.9
    assert isinstance(await store.quotas.reserve(hold("r1", clock.day, "us.1", 10)), Granted)
    clock.now_s += 0.2
    assert isinstance(await store.quotas.reserve(hold("r2", clock.day, "us.1", 0)), Denied)
    clock.now_s -= 3600  # a clock that is set back opens none that was closed
    await store.leases.close(ANN, "us.1")
    assert isinstance(await store.quotas.reserve(hold("r3", clock.day, "us.1", 0)), Denied)


async def test_leases_whose_time_is_over_are_closed_by_whoever_looks(store: Store, clock: DayClock) -> None:
    await opened(store, "us.1")
    await store.leases.begin(QuotaLease(ANN, "us.2", "eu"), LIFE_US)
    clock.now_s += 61
    assert [lease.state for lease in await store.leases.list()] == [LeaseState.CLOSED] * 2


async def test_a_call_whose_gateway_died_is_given_back_to_its_lease_and_charged_when_it_is_settled_late(
    store: Store, clock: DayClock
) -> None:
    await opened(store)
    await store.quotas.reserve(hold("r1", clock.day, "us.1", 70))
    await store.quotas.checkpoint([record("r1", clock.day, "us.1", 10)], LIFE_US)
    clock.now_s += 61
    await store.quotas.sweep()
    lease = await lease_now(store)
    assert (lease.used, lease.open) == (10, 0)
    await store.leases.note_returned(ANN, "us.1", 10)
    await store.quotas.settle([record("r1", clock.day, "us.1", 60, "done")])
    lease = await lease_now(store)
    assert (lease.used, lease.returned, lease.state) == (60, 10, LeaseState.RETURNED)


async def test_a_lease_is_counted_over_midnight_as_one(store: Store, clock: DayClock) -> None:
    clock.now_s = (clock.day + 1) * 86_400 - 5.0
    await opened(store)
    await store.quotas.reserve(hold("r1", clock.day, "us.1", 60))
    clock.now_s += 10
    assert isinstance(await store.quotas.reserve(hold("r2", clock.day, "us.1", 60)), Denied)
    assert isinstance(await store.quotas.reserve(hold("r3", clock.day, "us.1", 40)), Granted)


async def test_returned_leases_are_kept_for_late_settlements_and_then_removed(store: Store, clock: DayClock) -> None:
    await opened(store, "us.1")
    await store.leases.close(ANN, "us.1")
    await store.leases.note_returned(ANN, "us.1", 0)
    assert len(await store.leases.list()) == 1
    if type(store).__name__ == "SqliteStore":  # Redis expires it by its own clock
        clock.now_s += LEASE_KEPT_S + 1
        await opened(store, "us.2")
        await store.leases.close(ANN, "us.2")
        await store.leases.note_returned(ANN, "us.2", 0)
        assert [lease.id for lease in await store.leases.list()] == ["us.2"]


async def test_leases_hold_what_a_model_of_them_holds(store: Store, clock: DayClock) -> None:
    chance, used, held = random.Random(7), Counter[str](), dict[str, tuple[str, int]]()
    for name in ("us.1", "us.2"):
        await opened(store, name, 100)
    for number in range(120):
        lease = chance.choice(("us.1", "us.2"))
        if held and chance.random() < 0.5:
            request, (lease, amount) = held.popitem()
            cost = chance.randint(0, amount)
            await store.quotas.settle([record(request, clock.day, lease, cost, "done")])
            used[lease] += cost - amount
        else:
            amount = chance.randint(0, 30)
            answer = await store.quotas.reserve(hold(f"r{number}", clock.day, lease, amount))
            assert isinstance(answer, Granted) == (used[lease] + amount <= 100)
            if isinstance(answer, Granted):
                held[f"r{number}"] = (lease, amount)
                used[lease] += amount
        for row in await store.leases.list():
            assert (row.used, row.open) == (used[row.id], sum(name == row.id for name, _ in held.values()))
