"""A cell borrows and spends, on both stores; its account's home is another cell, with a store of its own."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tenants.auth.caller import Caller
from tenants.auth.errors import AccountSuspended, HomeUnavailable
from tenants.limits import borrowing
from tenants.limits.borrowing import QuotaBorrower
from tenants.limits.denials import QuotaExceeded
from tenants.limits.lending import LEASE_S, LeaseRequest, LeaseReturn, QuotaLender
from tenants.limits.quota import LEASE_TRIES, Quota
from tenants.limits.reservation import CallUsage, NeuronPrice, QuotaRequest, Reservation
from tenants.records.accounts import Account
from tenants.records.grants import Grant
from tenants.records.holds import Denied, Granted
from tenants.records.leases import LeaseState, QuotaLease
from tenants.records.limits import Limits
from tenants.records.tokens import ApiToken, TokenDigest
from tenants.records.usage import Totals
from tenants.store.protocol import Store
from tenants.store.sqlite.store import SqliteStore
from tests.support.waiting import turns
from tests.tenants.conftest import DayClock

pytestmark = pytest.mark.anyio
ANN = "a" * 32
PRICE = NeuronPrice(input=1.0, cached_input=1.0, output=1.0)


class Homes:
    """The home cell; `away` is how it is lost: "" not at all, or before or after it has acted."""

    def __init__(self, lender: QuotaLender) -> None:
        self.lender = lender
        self.away = ""
        self.asked: list[LeaseRequest] = []

    async def lend(self, home: str, request: LeaseRequest) -> Granted | Denied:
        assert home == "eu"
        self.asked.append(request)
        return await self._act(self.lender.lend("us", request))  # type: ignore[no-any-return]

    async def settle(self, home: str, returned: LeaseReturn) -> None:
        await self._act(self.lender.settle("us", returned))

    async def _act(self, work: Any) -> Any:
        if self.away == "before":
            work.close()
            raise HomeUnavailable("cut off")
        answer = await work
        await turns(1)
        if self.away == "after":
            raise HomeUnavailable("no answer came")
        return answer


class Cells:
    """The home cell eu, the borrower us, and a caller there."""

    def __init__(self, home: Store, store: Store, folder: Path, clock: DayClock) -> None:
        self.home, self.store, self.clock, self.folder = home, store, clock, folder
        self._ids = itertools.count()
        self.homes = Homes(QuotaLender(home, 1, clock))
        self.quota, self.borrower = self.gateway()
        self.caller: Caller

    def gateway(self) -> tuple[Quota, QuotaBorrower]:
        borrower = QuotaBorrower(self.store.leases, self.homes, "us", self.clock, lambda: f"{next(self._ids):04}")
        return Quota(self.store.quotas, self.folder / "outbox", self.clock, borrower), borrower

    async def open(self, limits: Limits) -> None:
        for store, home in ((self.home, ""), (self.store, "eu")):
            account = Account(ANN, "ann", limits, 1, home=home)
            await store.accounts.add(account)
            await store.accounts.add_token(ApiToken("key", ANN, "laptop", 1), TokenDigest(b"digest", 1))
        self.caller = Caller(account, "key", Grant(), limits=limits)

    async def call(self, name: str, tokens: int = 10, enough: int | None = None) -> Reservation:
        return await self.quota.reserve(self.caller, name, QuotaRequest("m", PRICE, 0, tokens, enough))

    async def end(self, reservation: Reservation, used: int) -> None:
        self.quota.settle(reservation, CallUsage(completion_tokens=used, outcome="done"))
        await self.quota.flush()

    async def leases(self) -> list[tuple[LeaseState, int, int]]:
        return [(lease.state, lease.amount, lease.used) for lease in await self.store.leases.list()]

    async def at_home(self) -> Totals:
        balance = await self.home.quotas.reconcile(ANN, self.clock.day)
        balance.check()
        return balance.counted


@pytest.fixture
async def cells(store: Store, clock: DayClock, tmp_path: Path) -> AsyncIterator[Cells]:
    home = SqliteStore(str(tmp_path / "home.db"), clock)
    cells = Cells(home, store, tmp_path, clock)
    await cells.open(Limits(neurons_per_day=0.002))
    yield cells
    await home.close()


async def test_calls_are_served_from_a_lease_without_asking_home_for_each(cells: Cells) -> None:
    one, two = await cells.call("r1"), await cells.call("r2")
    assert len(cells.homes.asked) == 1
    assert await cells.leases() == [(LeaseState.OPEN, 40, 20)], "four calls' worth"
    assert (await cells.at_home()).held == 40
    assert not one.limits_left, "what is left of the budget is known at home"
    await cells.end(one, 3)
    await cells.end(two, 4)
    assert await cells.leases() == [(LeaseState.OPEN, 40, 7)]


async def test_a_lease_is_returned_when_its_time_is_over_and_its_calls_have_ended(cells: Cells) -> None:
    call = await cells.call("r1")
    cells.clock.now_s += LEASE_S - 30
    await cells.quota.renew()
    cells.clock.now_s += 31
    await cells.borrower.tick()
    assert await cells.leases() == [(LeaseState.CLOSED, 40, 10)], "a call runs on it"
    await cells.end(call, 6)
    await cells.borrower.tick()
    assert [state for state, _, _ in await cells.leases()] == [LeaseState.RETURNED]
    assert await cells.at_home() == Totals(1, 6, completion_tokens=6)
    await cells.call("r2")
    assert len(cells.homes.asked) == 2


async def test_many_calls_that_wait_ask_home_once(cells: Cells) -> None:
    calls = await asyncio.gather(*(cells.call(f"r{n}") for n in range(4)))
    assert len(calls) == 4
    assert len(cells.homes.asked) == 1


async def test_another_gateway_of_the_cell_takes_the_lease_that_there_is(cells: Cells) -> None:
    await cells.call("r1")
    cells.quota, cells.borrower = cells.gateway()
    await cells.call("r2")
    assert len(cells.homes.asked) == 1
    assert await cells.leases() == [(LeaseState.OPEN, 40, 20)]


async def test_a_call_that_the_lease_has_no_room_for_gets_another_lease_and_the_old_one_goes_back(cells: Cells) -> None:
    first = await cells.call("r1")
    await cells.call("r2", tokens=100)
    assert [state for state, _, _ in await cells.leases()] == [LeaseState.OPEN] * 2
    await cells.end(first, 10)
    for _ in range(2):
        await cells.borrower.tick()
    states = [(state, used) for state, _, used in await cells.leases()]
    assert states == [(LeaseState.RETURNED, 10), (LeaseState.OPEN, 100)]


async def test_the_next_lease_is_asked_for_before_a_call_has_to_wait(cells: Cells) -> None:
    task = asyncio.create_task(cells.borrower.run())
    for number in range(4):  # the fourth leaves less than a quarter
        await cells.call(f"r{number}")
    while len(cells.homes.asked) < 2 or len(await cells.leases()) < 2:
        await turns(1)
    while (await cells.leases())[1][0] is not LeaseState.OPEN:
        await turns(1)
    cells.homes.away = "before"
    await cells.call("r5")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_cell_that_is_cut_off_spends_what_it_holds_and_no_more(cells: Cells) -> None:
    await cells.call("r1")
    cells.homes.away = "before"
    for number in range(2, 5):
        await cells.call(f"r{number}")
    with pytest.raises(HomeUnavailable):
        await cells.call("r5")
    asked = len(cells.homes.asked)
    with pytest.raises(HomeUnavailable, match="just now"):
        await cells.call("r6")
    assert len(cells.homes.asked) == asked, "it is not asked at each call"
    await cells.borrower.tick()
    cells.homes.away = ""
    cells.clock.now_s += borrowing.AWAY_S
    await cells.call("r7")
    assert (await cells.at_home()).held <= 2_000


@pytest.mark.parametrize("lost", ["before", "after"])
async def test_a_question_that_is_lost_either_way_leaves_nothing_lent(cells: Cells, lost: str) -> None:
    cells.homes.away = lost
    with pytest.raises(HomeUnavailable):
        await cells.call("r1")
    assert (await cells.at_home()).held == (40 if lost == "after" else 0)
    await cells.borrower.tick()
    cells.homes.away = ""
    await cells.borrower.tick()
    total = await cells.at_home()
    assert (total.held, total.micro_neurons) == (0, 0)
    assert not await cells.leases()


async def test_a_gateway_that_dies_leaves_its_leases_to_the_others(cells: Cells) -> None:
    await cells.call("r1")
    await cells.store.leases.begin(QuotaLease(ANN, "us.lost", "eu", "key"), int(LEASE_S * 1e6))
    _, other = cells.gateway()
    cells.clock.now_s += LEASE_S + 1
    await cells.store.quotas.sweep()
    await other.tick()
    assert [state for state, _, _ in await cells.leases()] == [LeaseState.RETURNED], "the other one was for nothing"
    total = await cells.at_home()
    assert (total.held, total.micro_neurons) == (0, 0)


async def test_usage_that_comes_after_a_lease_was_returned_is_charged_at_home_as_well(cells: Cells) -> None:
    call = await cells.call("r1")
    cells.clock.now_s += LEASE_S + 1
    await cells.store.quotas.sweep()
    await cells.borrower.tick()
    assert (await cells.at_home()).micro_neurons == 0
    for used, total in ((7, 7), (7, 7)):
        await cells.end(call, used)
        await cells.borrower.tick()
        assert (await cells.at_home()).micro_neurons == total


async def test_a_budget_that_is_used_up_at_home_is_refused_here_in_its_words(cells: Cells) -> None:
    await cells.call("r1", tokens=2_000)
    with pytest.raises(
        QuotaExceeded, match=r"neurons, and 0\.002 of today's 0\.002 of account ann are used or reserved"
    ) as over:
        await cells.call("r2")
    assert over.value.limit == "neurons_per_day"
    assert over.value.retry_after_s > 60
    assert [state for state, _, _ in await cells.leases()] == [LeaseState.OPEN]
    asked = len(cells.homes.asked)
    with pytest.raises(QuotaExceeded):
        await cells.call("r3")
    assert len(cells.homes.asked) == asked, "home is not asked at each call"


async def test_an_account_that_home_always_denies_is_forgotten_between_its_calls(cells: Cells) -> None:
    with pytest.raises(QuotaExceeded):
        await cells.call("r1", tokens=2_001)
    await cells.borrower.tick()
    assert len(cells.borrower._lines) == 1, "home is not asked again at once"
    cells.clock.now_s += borrowing.DENIED_S
    await cells.borrower.tick()
    assert not cells.borrower._lines
    await cells.call("r2")


async def test_a_call_is_content_with_what_there_is_where_home_has_no_more(cells: Cells) -> None:
    await cells.call("r1", tokens=1_995)
    call = await cells.call("r2", tokens=10, enough=2)
    assert (call.held, call.output_tokens) == (5, 5)


async def test_a_suspension_at_home_is_heard_with_the_next_lease(cells: Cells) -> None:
    ann = await cells.home.accounts.get(ANN)
    assert ann is not None
    await cells.home.accounts.update(structs.replace(ann, suspended_at=1, revision=2))
    with pytest.raises(AccountSuspended):
        await cells.call("r1")


async def test_leases_that_others_use_up_as_they_come_end_in_an_answer(cells: Cells) -> None:
    real = cells.borrower.borrow

    async def spent_at_once(*arguments: Any) -> Any:
        borrowed = await real(*arguments)
        await cells.store.leases.close(ANN, borrowed.lease.id)
        return borrowed

    cells.borrower.borrow = spent_at_once  # type: ignore[method-assign]
    with pytest.raises(HomeUnavailable, match="use leases of the cell eu up"):
        await cells.call("r1")
    assert len(cells.homes.asked) == LEASE_TRIES


async def test_a_gateway_that_knows_no_other_cell_says_so(cells: Cells) -> None:
    quota = Quota(cells.store.quotas, cells.folder / "outbox", cells.clock)
    with pytest.raises(HomeUnavailable, match="knows no cell eu"):
        await quota.reserve(cells.caller, "r1", QuotaRequest("m", PRICE, 0, 10))


async def test_a_call_that_is_cancelled_gives_its_part_of_the_lease_back(cells: Cells) -> None:
    await cells.call("r1")
    real, entered = cells.store.quotas.reserve, asyncio.Event()

    async def slow(hold: Any) -> Any:
        answer = await real(hold)
        entered.set()
        await asyncio.get_running_loop().create_future()
        return answer

    cells.store.quotas.reserve = slow  # type: ignore[method-assign]
    task = asyncio.create_task(cells.call("r2"))
    await entered.wait()
    assert await cells.leases() == [(LeaseState.OPEN, 40, 20)]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await cells.quota.flush()
    assert await cells.leases() == [(LeaseState.OPEN, 40, 10)]
