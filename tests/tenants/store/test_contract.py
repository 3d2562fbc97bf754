"""The contract of Store, run on SQLite and on a real Redis."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec import structs

from tenants.limits.caps import RequestSize, caps_of
from tenants.open import open_store
from tenants.records.accounts import Account, Notices, Settings
from tenants.records.grants import Grant, Permission
from tenants.records.holds import DenialReason, Denied, Granted, Hold
from tenants.records.limits import NO_LIMITS, Limits
from tenants.records.tokens import ApiToken, TokenDigest
from tenants.records.usage import DAY_US, EXPIRED, MICRO, Totals, UsageRecord
from tenants.store.protocol import Store, StoreUnavailable
from tests.support.waiting import turns

pytestmark = pytest.mark.anyio
LIFE_US = 60 * MICRO
ANN, BOB = "a" * 32, "b" * 32
LIMITS: dict[str, Limits] = {}


@pytest.fixture(autouse=True)
def forgotten() -> None:
    LIMITS.clear()


def record(request_id: str, day: int, cost: int = 0, outcome: str = "done", account_id: str = ANN) -> UsageRecord:
    """A record whose token counts follow from its cost."""
    return UsageRecord(
        account_id, request_id, day, cost, cost * 3, cost * 2, cost * 5, outcome, "key", "@cf/a/b", 7, 1.5
    )


def hold(request_id: str, day: int, held: int = 100, account_id: str = ANN) -> Hold:
    """One that is measured against the limits that the account has by now."""
    measured = caps_of([("", LIMITS.get(account_id, NO_LIMITS))], RequestSize(held, held))
    return Hold(record(request_id, day, 0, EXPIRED, account_id), held, LIFE_US, measured)


async def open_account(store: Store, account_id: str = ANN, **limits: Any) -> None:
    LIMITS[account_id] = Limits(**limits)
    await store.accounts.add(Account(account_id, f"ann {account_id}", LIMITS[account_id], 1))
    await store.accounts.add_token(ApiToken("key", account_id, "laptop", 1), TokenDigest(b"digest", 1))


def plain(decision: Granted | Denied) -> Granted | Denied:
    """Without what is held and left."""
    return Granted(decision.day) if isinstance(decision, Granted) else decision


async def balanced(store: Store, day: int, account_id: str = ANN) -> Totals:
    """The counters, which are those that the records give."""
    balance = await store.quotas.reconcile(account_id, day)
    balance.check()
    assert await store.quotas.totals(account_id, day) == balance.counted
    return balance.counted


async def test_an_account_comes_back_as_it_was_kept(store: Store) -> None:
    settings = Settings(zero_retention=True, sharing=(ANN, BOB), notices=Notices("https://ann.example/n", (0.5,)))
    ann = Account(ANN, "Änn & Söhne", Limits(7, 0.25, 3, 2), 11, Limits(burst=1, requests_per_minute=1), epoch=3)
    ann = structs.replace(ann, settings=settings, suspended_at=12, revision=4)
    bob = Account(BOB, "bob", Limits(), 10)
    await store.accounts.add(ann)
    await store.accounts.add(bob)
    assert await store.accounts.get(ANN) == ann
    assert await store.accounts.list() == [bob, ann]
    assert await store.accounts.get("c" * 32) is None
    both = await store.accounts.of_ids([ANN, "c" * 32, BOB])
    assert sorted(both, key=lambda account: account.id) == [ann, bob]
    assert [*await store.accounts.of_ids([])] == []


async def test_a_token_comes_back_as_it_was_kept(store: Store) -> None:
    await open_account(store)
    token, seal = ApiToken("key2", ANN, "phone", 5, expires_at=9), TokenDigest(bytes(range(32)), 1)
    assert await store.accounts.add_token(token, seal)
    assert await store.accounts.token("key2") == (token, [seal], await store.accounts.get(ANN))
    assert [one.id for one in await store.accounts.tokens(ANN)] == ["key", "key2"]
    assert await store.accounts.token("key3") is None
    assert not await store.accounts.add_token(ApiToken("key3", BOB, "lost", 5), seal)


async def test_a_token_is_changed_with_its_seals_and_stays_revoked(store: Store) -> None:
    await store.accounts.add(Account(ANN, "Ann", Limits(), 1))
    grant = Grant((Permission.USAGE_READ,), ("@cf/*",), ("10.0.0.0/8",))
    token = ApiToken("key4", ANN, "ci", 5, grant=grant)
    assert await store.accounts.add_token(token, TokenDigest(b"first", 1))
    changed = structs.replace(token, name="ci 2", expires_at=99, grant=Grant())
    seals = [TokenDigest(b"second", 1), TokenDigest(b"first", 1, until=70)]
    assert await store.accounts.update_token(changed, seals)
    assert await store.accounts.token("key4") == (changed, seals, await store.accounts.get(ANN))
    await store.accounts.revoke("key4", 60)
    assert await store.accounts.update_token(changed, seals[:1])
    found = await store.accounts.token("key4")
    assert found is not None
    assert found[0] == structs.replace(changed, revoked_at=60)
    assert found[1] == seals[:1]
    assert not await store.accounts.update_token(structs.replace(token, id="nobody"), seals)


async def test_the_first_revocation_of_a_token_stays(store: Store) -> None:
    await open_account(store)
    assert await store.accounts.revoke("key", 50)
    assert await store.accounts.revoke("key", 60)
    found = await store.accounts.token("key")
    assert found is not None
    assert found[0].revoked_at == 50
    assert (await store.accounts.tokens(ANN))[0].revoked_at == 50
    assert not await store.accounts.revoke("key3", 50)


async def test_a_hold_is_counted_and_a_settlement_replaces_it_by_what_was_used(store: Store, clock: Any) -> None:
    await open_account(store)
    assert plain(await store.quotas.reserve(hold("r", clock.day, 100))) == Granted(clock.day)
    assert await balanced(store, clock.day) == Totals(held=100, open=1)
    used = record("r", clock.day, 30)
    await store.quotas.settle([used])
    assert await balanced(store, clock.day) == Totals(1, 30, 90, 60, 150)
    assert await store.quotas.records(ANN, clock.day) == [used]


async def test_a_rejection_leaves_nothing_behind(store: Store, clock: Any) -> None:
    await open_account(store, neurons_per_day=100 / MICRO, requests_per_minute=60, burst=1, concurrent_requests=1)
    refused = await store.quotas.reserve(hold("big", clock.day, 101))
    assert refused == Denied(DenialReason.NEURONS_PER_DAY, DAY_US // 2, 100, 0)
    assert await balanced(store, clock.day) == Totals()
    assert plain(await store.quotas.reserve(hold("a", clock.day, 60))) == Granted(clock.day), (
        "the refused one was counted by the rate"
    )
    for n in range(20):
        assert isinstance(await store.quotas.reserve(hold(f"b{n}", clock.day, 10)), Denied)
    clock.now_s += 1
    await store.quotas.settle([record("a", clock.day, 60)])
    assert plain(await store.quotas.reserve(hold("c", clock.day, 40))) == Granted(clock.day), (
        "refused ones were counted by the rate"
    )
    assert await balanced(store, clock.day) == Totals(1, 60, 180, 120, 300, held=40, open=1)


async def test_the_rate_lets_a_burst_through_and_then_one_per_interval(store: Store, clock: Any) -> None:
    await open_account(store, requests_per_minute=30, burst=3)
    decisions = [await store.quotas.reserve(hold(f"a{n}", clock.day)) for n in range(4)]
    assert [plain(one) for one in decisions[:3]] == [Granted(clock.day)] * 3
    assert decisions[3] == Denied(DenialReason.REQUESTS_PER_MINUTE, 2 * MICRO, 30)
    clock.now_s += 1.5
    assert await store.quotas.reserve(hold("b", clock.day)) == Denied(DenialReason.REQUESTS_PER_MINUTE, MICRO // 2, 30)
    clock.now_s += 0.5
    assert plain(await store.quotas.reserve(hold("b", clock.day))) == Granted(clock.day)
    assert isinstance(await store.quotas.reserve(hold("c", clock.day)), Denied)


async def test_a_request_that_holds_nothing_counts_for_all_of_its_rates_or_for_none(store: Store, clock: Any) -> None:
    await open_account(store, requests_per_minute=30, burst=3)
    (account_cap,) = (cap for cap in hold("x", clock.day).caps if cap.measure is DenialReason.REQUESTS_PER_MINUTE)
    token_cap = structs.replace(account_cap, subject="token:key", room_us=2 * account_cap.cost_us)
    both = [account_cap, token_cap]
    assert [await store.quotas.count(ANN, both) for _ in range(2)] == [None, None]
    assert await store.quotas.count(ANN, both) == Denied(
        DenialReason.REQUESTS_PER_MINUTE, 2 * MICRO, 30, subject="token:key"
    )
    assert await store.quotas.remaining(ANN, both) == [account_cap.cost_us, 0], "the refused one took nothing"
    assert plain(await store.quotas.reserve(hold("a", clock.day))) == Granted(clock.day)
    assert await store.quotas.count(ANN, [account_cap]) == Denied(DenialReason.REQUESTS_PER_MINUTE, 2 * MICRO, 30)
    clock.now_s += 2
    assert await store.quotas.count(ANN, [account_cap]) is None
    await store.quotas.settle([record("a", clock.day)])
    assert await balanced(store, clock.day) == await store.quotas.totals(ANN, clock.day), "nothing else has changed"


async def test_a_minute_of_asking_all_the_time_grants_burst_and_rate(store: Store, clock: Any) -> None:
    await open_account(store, requests_per_minute=7, burst=2)
    granted = 0
    for n in range(601):
        granted += isinstance(await store.quotas.reserve(hold(f"r{n}", clock.day)), Granted)
        clock.now_s += 0.1
    assert granted == 2 + 7 - 1, "one is due every 8.571429 s; the seventh after 60.000003 s"


async def test_requests_at_once_are_limited_and_ending_one_makes_room(store: Store, clock: Any) -> None:
    await open_account(store, concurrent_requests=2)
    assert isinstance(await store.quotas.reserve(hold("a", clock.day)), Granted)
    assert isinstance(await store.quotas.reserve(hold("b", clock.day)), Granted)
    assert await store.quotas.reserve(hold("c", clock.day)) == Denied(DenialReason.CONCURRENT_REQUESTS, MICRO, 2, 2)
    await store.quotas.settle([record("a", clock.day)])
    assert isinstance(await store.quotas.reserve(hold("c", clock.day)), Granted)


async def test_requests_that_began_yesterday_count_as_running(store: Store, clock: Any) -> None:
    await open_account(store, concurrent_requests=1)
    clock.now_s += 43_200 - 1
    await store.quotas.reserve(hold("a", clock.day))
    clock.now_s += 2
    assert isinstance(await store.quotas.reserve(hold("b", clock.day)), Denied)


async def test_new_limits_are_in_force_for_the_next_request(store: Store, clock: Any) -> None:
    await open_account(store, neurons_per_day=1.0)
    assert isinstance(await store.quotas.reserve(hold("a", clock.day, 2 * MICRO)), Denied)
    LIMITS[ANN] = Limits(neurons_per_day=2.0)
    assert isinstance(await store.quotas.reserve(hold("a", clock.day, 2 * MICRO)), Granted)


async def test_new_limits_keep_what_is_counted(store: Store, clock: Any) -> None:
    await open_account(store, requests_per_minute=60, burst=1)
    await store.quotas.reserve(hold("a", clock.day, 40))
    LIMITS[ANN] = Limits(requests_per_minute=60, burst=1, neurons_per_day=100 / MICRO)
    assert isinstance(await store.quotas.reserve(hold("b", clock.day, 40)), Denied), "the rate was forgotten"
    assert await balanced(store, clock.day) == Totals(held=40, open=1)


async def test_the_decision_sees_a_revocation(store: Store, clock: Any) -> None:
    await open_account(store)
    await store.accounts.revoke("key", 1)
    assert await store.quotas.reserve(hold("a", clock.day)) == Denied(DenialReason.REVOKED)
    assert await store.quotas.reserve(hold("a", clock.day, account_id=BOB)) == Denied(DenialReason.NO_ACCOUNT)
    assert await balanced(store, clock.day) == Totals()


async def test_a_retried_reservation_is_counted_once(store: Store, clock: Any) -> None:
    """Bug elsewhere: an increment that is retried after a timeout counts twice."""
    await open_account(store, requests_per_minute=60, burst=2, concurrent_requests=2, neurons_per_day=150 / MICRO)
    for _ in range(5):
        assert plain(await store.quotas.reserve(hold("a", clock.day))) == Granted(clock.day)
    assert await balanced(store, clock.day) == Totals(held=100, open=1)
    assert plain(await store.quotas.reserve(hold("b", clock.day, 50))) == Granted(clock.day), (
        "a retry was counted by the rate"
    )


async def test_a_settled_request_id_is_not_granted_again(store: Store, clock: Any) -> None:
    await open_account(store)
    await store.quotas.reserve(hold("a", clock.day))
    await store.quotas.settle([record("a", clock.day, 10)])
    assert await store.quotas.reserve(hold("a", clock.day)) == Denied(DenialReason.RECORDED)
    assert (await balanced(store, clock.day)).held == 0


async def test_a_settlement_counts_once_and_the_first_one_wins(store: Store, clock: Any) -> None:
    await open_account(store)
    await store.quotas.reserve(hold("a", clock.day))
    for cost in (30, 30, 99):
        await store.quotas.settle([record("a", clock.day, cost)])
    await store.quotas.settle([record("a", clock.day, 98), record("a", clock.day, 97)])
    assert await balanced(store, clock.day) == Totals(1, 30, 90, 60, 150)


async def test_more_than_was_held_is_charged_in_full(store: Store, clock: Any) -> None:
    await open_account(store, neurons_per_day=200 / MICRO)
    await store.quotas.reserve(hold("a", clock.day, 100))
    await store.quotas.settle([record("a", clock.day, 250)])
    assert (await balanced(store, clock.day)).micro_neurons == 250
    assert await store.quotas.reserve(hold("b", clock.day, 0)) == Denied(
        DenialReason.NEURONS_PER_DAY, DAY_US // 2, 200, 250
    )


async def test_a_refund_goes_to_the_day_that_it_was_reserved_from(store: Store, clock: Any) -> None:
    """Bug elsewhere: the last writer resets the window, or a refund lands in a new one."""
    await open_account(store, neurons_per_day=100 / MICRO)
    clock.now_s += 43_200 - 1
    yesterday = clock.day
    await store.quotas.reserve(hold("a", yesterday, 100))
    clock.now_s += 2
    assert plain(await store.quotas.reserve(hold("b", clock.day, 100))) == Granted(yesterday + 1)
    await store.quotas.settle([record("a", yesterday, 30)])
    assert await balanced(store, yesterday) == Totals(1, 30, 90, 60, 150)
    assert await balanced(store, yesterday + 1) == Totals(held=100, open=1)
    assert isinstance(await store.quotas.reserve(hold("c", clock.day, 1)), Denied), (
        "the refund made room on another day"
    )


async def test_a_wrong_guess_of_the_day_is_corrected_by_the_store(store: Store, clock: Any) -> None:
    await open_account(store)
    assert plain(await store.quotas.reserve(hold("a", clock.day + 1))) == Granted(clock.day)
    assert plain(await store.quotas.reserve(hold("b", clock.day + 1))) == Granted(clock.day)
    await store.quotas.settle([record("a", clock.day + 1, 5)])
    clock.now_s += 61
    await store.quotas.sweep()
    assert [(one.request_id, one.day) for one in await store.quotas.records(ANN, clock.day)] == [
        ("a", clock.day),
        ("b", clock.day),
    ]
    assert await balanced(store, clock.day + 1) == Totals()


async def test_an_expired_hold_is_charged_at_its_checkpoint_by_the_sweep(store: Store, clock: Any) -> None:
    await open_account(store)
    await store.quotas.reserve(hold("a", clock.day))
    await store.quotas.reserve(hold("b", clock.day))
    await store.quotas.checkpoint([record("b", clock.day, 20, EXPIRED)], LIFE_US)
    clock.now_s += 59.9
    assert await store.quotas.sweep() == 0
    clock.now_s += 0.1
    assert await store.quotas.sweep() == 2
    assert await store.quotas.sweep() == 0
    assert await balanced(store, clock.day) == Totals(2, 20, 60, 40, 100)
    records = await store.quotas.records(ANN, clock.day)
    assert [(one.micro_neurons, one.outcome) for one in records] == [(0, EXPIRED), (20, EXPIRED)]


async def test_an_expired_hold_makes_room_for_the_next_request_without_a_sweep(store: Store, clock: Any) -> None:
    await open_account(store, neurons_per_day=100 / MICRO, concurrent_requests=1)
    await store.quotas.reserve(hold("a", clock.day, 100))
    await store.quotas.checkpoint([record("a", clock.day, 20, EXPIRED)], LIFE_US)
    assert isinstance(await store.quotas.reserve(hold("b", clock.day, 80)), Denied)
    clock.now_s += 60
    assert isinstance(await store.quotas.reserve(hold("b", clock.day, 81)), Denied)
    assert isinstance(await store.quotas.reserve(hold("b", clock.day, 80)), Granted)
    assert await balanced(store, clock.day) == Totals(1, 20, 60, 40, 100, held=80, open=1)


async def test_a_checkpoint_lets_the_hold_last(store: Store, clock: Any) -> None:
    await open_account(store)
    await store.quotas.reserve(hold("a", clock.day))
    for cost in range(10):
        clock.now_s += 40
        await store.quotas.checkpoint([record("a", clock.day, cost, EXPIRED)], LIFE_US)
        assert await store.quotas.sweep() == 0
    assert (await balanced(store, clock.day)).open == 1


async def test_a_checkpoint_of_an_unknown_or_settled_request_does_nothing(store: Store, clock: Any) -> None:
    await open_account(store)
    await store.quotas.reserve(hold("a", clock.day))
    await store.quotas.settle([record("a", clock.day, 10)])
    await store.quotas.checkpoint([record("a", clock.day, 50, EXPIRED), record("x", clock.day, 50, EXPIRED)], LIFE_US)
    await store.quotas.checkpoint([], LIFE_US)
    assert await balanced(store, clock.day) == Totals(1, 10, 30, 20, 50)


async def test_a_settlement_after_the_sweep_replaces_the_checkpoint_charge_once(store: Store, clock: Any) -> None:
    await open_account(store)
    await store.quotas.reserve(hold("a", clock.day))
    await store.quotas.checkpoint([record("a", clock.day, 20, EXPIRED)], LIFE_US)
    clock.now_s += 61
    assert await store.quotas.sweep() == 1
    for cost in (35, 99):
        await store.quotas.settle([record("a", clock.day, cost)])
    assert await balanced(store, clock.day) == Totals(1, 35, 105, 70, 175)
    assert [one.outcome for one in await store.quotas.records(ANN, clock.day)] == ["done"]


async def test_a_settlement_whose_hold_is_unknown_is_charged_to_its_day(store: Store, clock: Any) -> None:
    await open_account(store)
    for _ in range(2):
        await store.quotas.settle([record("a", clock.day - 1, 30)])
    assert await balanced(store, clock.day - 1) == Totals(1, 30, 90, 60, 150)


async def test_a_request_settled_before_its_reservation_arrives_is_not_granted(store: Store, clock: Any) -> None:
    """A caller left while the reservation was on its way: the two may reach the store in either order."""
    await open_account(store)
    await store.quotas.settle([record("a", clock.day, 0, "cancelled")])
    assert await store.quotas.reserve(hold("a", clock.day)) == Denied(DenialReason.RECORDED)
    assert await balanced(store, clock.day) == Totals(requests=1)


async def test_settlements_of_many_accounts_go_in_one_call(store: Store, clock: Any) -> None:
    await open_account(store, ANN)
    await store.accounts.add(Account(BOB, "bob", Limits(), 1))
    batch = [record(f"r{n}", clock.day, n, account_id=(ANN, BOB)[n % 2]) for n in range(600)]
    await store.quotas.settle(batch)
    await store.quotas.settle([])
    assert (await balanced(store, clock.day, ANN)).micro_neurons == sum(range(0, 600, 2))
    assert (await balanced(store, clock.day, BOB)).micro_neurons == sum(range(1, 600, 2))


async def test_a_sweep_ends_thousands_of_holds(store: Store, clock: Any) -> None:
    await open_account(store, concurrent_requests=10_000, requests_per_minute=6_000_000)
    for n in range(1_200):
        await store.quotas.reserve(hold(f"r{n}", clock.day, 1))
    clock.now_s += 61
    assert await store.quotas.sweep() <= 1_200
    assert await balanced(store, clock.day) == Totals(requests=1_200)


async def test_a_store_that_takes_writes_answers_a_ping(store: Store) -> None:
    await store.ping()
    assert isinstance(await store.advice(), list)


async def test_the_largest_numbers_are_counted_exactly(store: Store, clock: Any) -> None:
    await open_account(store, neurons_per_day=1e9)
    most = 10**15
    await store.quotas.reserve(hold("a", clock.day, most - 1))
    assert await store.quotas.reserve(hold("b", clock.day, 2)) == Denied(
        DenialReason.NEURONS_PER_DAY, DAY_US // 2, most, most - 1
    )
    await store.quotas.settle([structs.replace(record("a", clock.day), micro_neurons=most - 1)])
    assert (await balanced(store, clock.day)).micro_neurons == most - 1


# ---- races


async def race(reserve: Callable[[int], Awaitable[Granted | Denied]], clients: int = 200) -> int:
    """All clients ask at once; how many were let in."""
    decisions = await asyncio.gather(*(reserve(n) for n in range(clients)))
    return sum(isinstance(decision, Granted) for decision in decisions)


async def test_200_clients_of_four_gateways_race_for_one_budget_and_none_overspends(
    store: Store, store_url: str, clock: Any
) -> None:
    """Bugs elsewhere: check, then add; and limits multiplied by the number of gateways."""
    await open_account(store, neurons_per_day=3_700 / MICRO)
    gateways = [store, *(open_store(store_url, clock) for _ in range(3))]
    admitted = await race(lambda n: gateways[n % 4].quotas.reserve(hold(f"r{n}", clock.day, 100)))
    assert admitted == 37
    assert (await balanced(store, clock.day)).held == 3_700
    for gateway in gateways[1:]:
        await gateway.close()


async def test_200_clients_of_four_gateways_share_one_rate(store: Store, store_url: str, clock: Any) -> None:
    await open_account(store, requests_per_minute=60, burst=23)
    gateways = [store, *(open_store(store_url, clock) for _ in range(3))]
    assert await race(lambda n: gateways[n % 4].quotas.reserve(hold(f"r{n}", clock.day, 1))) == 23
    assert (await balanced(store, clock.day)).open == 23
    for gateway in gateways[1:]:
        await gateway.close()


async def test_a_race_for_a_store_that_checks_and_then_adds_would_be_noticed() -> None:
    """The control of the two tests above: this is the bug that they look for."""
    spent = 0

    async def reserve(_: int) -> Granted | Denied:
        nonlocal spent
        seen = spent
        await turns()
        if seen + 100 > 3_700:
            return Denied(DenialReason.NEURONS_PER_DAY)
        spent = seen + 100
        return Granted(0)

    assert await race(reserve) > 37


async def test_settling_and_sweeping_the_same_hold_at_once_charges_it_once(
    store: Store, store_url: str, clock: Any
) -> None:
    await open_account(store)
    other = open_store(store_url, clock)
    for n in range(50):
        await store.quotas.reserve(hold(f"r{n}", clock.day, 100))
    await store.quotas.checkpoint([record(f"r{n}", clock.day, 10, EXPIRED) for n in range(50)], LIFE_US)
    clock.now_s += 61
    settles = [store.quotas.settle([record(f"r{n}", clock.day, 30)]) for n in range(50)]
    await asyncio.gather(*settles[:25], other.quotas.sweep(), *settles[25:], store.quotas.sweep())
    assert await balanced(store, clock.day) == Totals(50, 1_500, 4_500, 3_000, 7_500)
    await other.close()


# ---- simulation


class Oracle:
    """One account by brute force: lists that are added up whenever a sum is needed, and a bucket that leaks."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.revoked = False
        self.level_us, self.filled_at_us = 0, 0
        self.holds: dict[str, tuple[int, int, int, UsageRecord]] = {}  # request: day, held, expires_us, checkpoint
        self.ledger: dict[tuple[int, str], UsageRecord] = {}

    def expire(self, now_us: int) -> int:
        expired = [request for request, held in self.holds.items() if held[2] <= now_us]
        for request in expired:
            day, _, _, checkpoint = self.holds.pop(request)
            self.ledger[day, request] = checkpoint
        return len(expired)

    def reserve(self, ask: Hold, now_us: int) -> Granted | Denied:
        self.expire(now_us)
        request, day = ask.record.request_id, now_us // DAY_US
        if self.revoked:
            return Denied(DenialReason.REVOKED)
        if request in self.holds:
            return Granted(self.holds[request][0])
        if (day, request) in self.ledger and self.ledger[day, request].outcome != EXPIRED:
            return Denied(DenialReason.RECORDED)
        totals = self.totals(day)
        allowed, used = round(self.limits.neurons_per_day * MICRO), totals.micro_neurons + totals.held
        if used + ask.held > allowed:
            return Denied(DenialReason.NEURONS_PER_DAY, (day + 1) * DAY_US - now_us, allowed, used)
        interval_us = -(-60 * MICRO // self.limits.requests_per_minute)
        room_us = interval_us * (self.limits.burst or self.limits.requests_per_minute)
        level_us = max(0, self.level_us - (now_us - self.filled_at_us))
        if level_us + interval_us > room_us:
            wait_us = level_us + interval_us - room_us
            return Denied(DenialReason.REQUESTS_PER_MINUTE, wait_us, self.limits.requests_per_minute)
        if len(self.holds) >= self.limits.concurrent_requests:
            concurrent = self.limits.concurrent_requests
            return Denied(DenialReason.CONCURRENT_REQUESTS, MICRO, concurrent, len(self.holds))
        self.level_us, self.filled_at_us = level_us + interval_us, now_us
        self.holds[request] = (day, ask.held, now_us + ask.lifetime_us, structs.replace(ask.record, day=day))
        return Granted(day)

    def checkpoint(self, used: UsageRecord, now_us: int) -> None:
        if used.request_id in self.holds:
            day, held, _, _ = self.holds[used.request_id]
            self.holds[used.request_id] = (day, held, now_us + LIFE_US, structs.replace(used, day=day))

    def settle(self, used: UsageRecord) -> None:
        day = self.holds.pop(used.request_id, (used.day,))[0]
        before = self.ledger.get((day, used.request_id))
        if before is None or before.outcome == EXPIRED:
            self.ledger[day, used.request_id] = structs.replace(used, day=day)

    def totals(self, day: int) -> Totals:
        used = [one for (of_day, _), one in self.ledger.items() if of_day == day]
        held = [amount for of_day, amount, _, _ in self.holds.values() if of_day == day]
        cost = sum(one.micro_neurons for one in used)
        return Totals(len(used), cost, 3 * cost, 2 * cost, 5 * cost, sum(held), len(held))


def any_limits(dice: random.Random) -> Limits:
    return Limits(
        requests_per_minute=dice.choice([7, 60, 1_000]),
        neurons_per_day=dice.choice([300, 1_000, 10_000]) / MICRO,
        concurrent_requests=dice.choice([2, 5, 50]),
        burst=dice.choice([None, 1, 4, 30]),
    )


@pytest.mark.parametrize("seed", range(16))
async def test_counters_equal_records_after_every_step_and_decisions_equal_the_oracle(
    store: Store, clock: Any, seed: int
) -> None:
    print(f"seed {seed}")
    dice = random.Random(seed)
    oracles = {account_id: Oracle(any_limits(dice)) for account_id in (ANN, BOB)}
    for account_id, oracle in oracles.items():
        LIMITS[account_id] = oracle.limits
        await store.accounts.add(Account(account_id, account_id, oracle.limits, 1))
        await store.accounts.add_token(
            ApiToken("key" if account_id == ANN else "bobs", account_id, "n", 1), TokenDigest(b"", 1)
        )
    asked: list[tuple[str, int]] = [("never", clock.day)]
    granted = 0
    for step in range(220):
        account_id = dice.choice([ANN, BOB])
        oracle, now_us = oracles[account_id], int(clock() * MICRO)
        kind = dice.choices(
            ["reserve", "settle", "checkpoint", "pass", "sweep", "limits", "midnight", "revoke"],
            [100, 60, 30, 50, 8, 3, 1, 0.3],
        )[0]
        request, day = dice.choice(asked[-30:])
        if kind == "reserve":
            request = f"r{step}" if dice.random() < 0.9 else request
            ask = hold(request, clock.day, dice.choice([0, 1, 40, 90, 400]), account_id)
            if account_id == BOB:
                ask = structs.replace(ask, record=structs.replace(ask.record, token_id="bobs"))
            decision = await store.quotas.reserve(ask)
            assert plain(decision) == oracle.reserve(ask, now_us), f"step {step}"
            if isinstance(decision, Granted):
                asked.append((request, decision.day))
                granted += 1
        elif kind == "settle":
            used = record(request, day, dice.randrange(120), account_id=account_id)
            await store.quotas.settle([used])
            oracle.settle(used)
        elif kind == "checkpoint":
            used = record(request, day, dice.randrange(60), EXPIRED, account_id)
            await store.quotas.checkpoint([used], LIFE_US)
            oracle.checkpoint(used, now_us)
        elif kind == "pass":
            clock.now_s += dice.choice([0.001, 0.5, 3, 20, 61])
        elif kind == "midnight":
            clock.now_s = (clock.day + 1) * 86_400 - dice.choice([0, 1, 30])
        elif kind == "sweep":
            assert await store.quotas.sweep() == sum(one.expire(now_us) for one in oracles.values())
        elif kind == "limits":
            oracle.limits = LIMITS[account_id] = any_limits(dice)
        else:
            oracle.revoked = True
            await store.accounts.revoke("key" if account_id == ANN else "bobs", 5)
        for one, model in oracles.items():
            for day in (clock.day, clock.day - 1):
                assert await balanced(store, day, one) == model.totals(day), f"step {step}: {kind}"
    assert granted > 10, "the simulation granted next to nothing"


async def test_a_url_that_names_no_store_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="sqlite:PATH"):
        open_store("postgres://x")


async def test_every_method_says_store_unavailable_during_an_outage(store: Store, clock: Any, outage: Any) -> None:
    await open_account(store)
    asks = [
        lambda: store.ping(),
        lambda: store.accounts.add(Account(BOB, "bob", Limits(), 1)),
        lambda: store.accounts.update(Account(ANN, "ann", Limits(), 1)),
        lambda: store.accounts.add_token(ApiToken("k", ANN, "n", 1), TokenDigest(b"", 1)),
        lambda: store.accounts.revoke("key", 1),
        lambda: store.quotas.reserve(hold("a", clock.day)),
        lambda: store.quotas.count(ANN, hold("a", clock.day).caps),
        lambda: store.quotas.checkpoint([record("a", clock.day)], LIFE_US),
        lambda: store.quotas.settle([record("a", clock.day)]),
    ]
    with outage():
        for ask in asks:
            with pytest.raises(StoreUnavailable):
                await ask()


async def test_whoever_comes_last_does_not_begin_the_window_anew(store: Store, clock: Any) -> None:
    """Refused and granted requests alike leave its end where it was."""
    await open_account(store, requests_per_minute=60, burst=2, neurons_per_day=1.0)
    assert [plain(await store.quotas.reserve(hold(f"r{n}", clock.day))) for n in range(2)] == [Granted(clock.day)] * 2
    waits = []
    for n in range(4):
        refused = await store.quotas.reserve(hold(f"over{n}", clock.day))
        assert isinstance(refused, Denied)
        waits.append(refused.retry_after_us)
        clock.now_s += 0.25
    assert waits == [MICRO - n * MICRO // 4 for n in range(4)]
    assert plain(await store.quotas.reserve(hold("next", clock.day))) == Granted(clock.day)
    day_ends = []
    for n in range(3):
        refused = await store.quotas.reserve(hold(f"large{n}", clock.day, MICRO))
        assert isinstance(refused, Denied)
        assert refused.reason is DenialReason.NEURONS_PER_DAY
        day_ends.append(int(clock.now_s * MICRO) + refused.retry_after_us)
        await store.quotas.settle([record("r0", clock.day, 1)])
        clock.now_s += 60
    assert day_ends == [(clock.day + 1) * DAY_US] * 3
