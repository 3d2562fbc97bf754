"""Cells that lend each other slices of one account's budget, in simulated time: real quotas and stores, a network that
delays, cuts, doubles and reorders, gateways that are killed, clocks that differ. One seed is one run.

The oracle knows no leases' amounts and no counters: it adds up what calls were granted and what they used, by the day
of the budget that they are charged to.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest import mock

from tenants.auth.caller import Caller
from tenants.auth.errors import HomeUnavailable
from tenants.limits.borrowing import QuotaBorrower
from tenants.limits.denials import QuotaExceeded
from tenants.limits.lending import LeaseRequest, LeaseReturn, QuotaLender
from tenants.limits.quota import Quota
from tenants.limits.reservation import CallUsage, NeuronPrice, QuotaRequest
from tenants.records.accounts import Account
from tenants.records.grants import Grant
from tenants.records.holds import Denied, Granted
from tenants.records.limits import Limits
from tenants.records.tokens import ApiToken, TokenDigest
from tenants.records.usage import MICRO, day_of
from tenants.store.sqlite.store import SqliteStore
from tests.support.waiting import FakeTimeLoop

T = TypeVar("T")
pause = asyncio.sleep  # of simulated time, which takes none

ANN: Final = "a" * 32
HOME: Final = "home"
NOON_S: Final = 20_000 * 86_400 + 43_200
PRICE: Final = NeuronPrice(input=1.0, cached_input=1.0, output=1.0)  # a token is a micro-neuron
ANSWER_S: Final = 2.0
GATEWAYS: Final = 2  # of each cell
QUIET_S: Final = 170.0  # after the last call: leases and holds end, and are settled


@dataclass(frozen=True, slots=True)
class Scenario:
    """`calls_s` are the calls that begin in a second, in all cells together; they take up to `tokens` each. Clocks are
    off from home's by up to `skew_s`. A run begins at `start_s` since 1970."""

    seed: int
    cells: int = 5
    seconds: float = 600.0
    budget: int = 40_000_000
    tokens: int = 20_000
    calls_s: float = 20.0
    cuts: int = 6
    cut_s: float = 60.0
    crashes: int = 6
    skew_s: float = 3600.0
    start_s: float = NOON_S


@dataclass(slots=True)
class Outcome:
    """Counts of one run; micro-neurons. `stranded` is the most that lay in leases unused while a call was refused for
    want of it; `waits_ms` how long calls waited for their reservation."""

    granted: int = 0
    refused: int = 0
    unreachable: int = 0  # calls in a cell that could not ask the home cell
    overspent: int = 0
    stranded: int = 0
    spent: int = 0
    waits_ms: list[float] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


class _Network:
    """Links between the home cell and each other one."""

    def __init__(self, scenario: Scenario, chance: random.Random) -> None:
        self._chance = chance
        self._one_way_s = [chance.uniform(0.010, 0.060) for _ in range(scenario.cells)]
        self.cut: set[int] = set()
        self.late: set[asyncio.Task[Any]] = set()

    async def ask(self, cell: int, act: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """One question and its answer. What is lost is waited for in vain; what is late may still be done."""
        if self._chance.random() < 0.03:
            self._spawn(self._deliver(cell, act, self._chance.uniform(0.0, 5.0)))  # the same again, at any later time
        spike_s = self._chance.uniform(1.0, 6.0) if self._chance.random() < 0.02 else 0.0
        task = self._spawn(self._deliver(cell, act, spike_s))
        await asyncio.wait([task], timeout=ANSWER_S)
        if not task.done():
            raise HomeUnavailable("no answer")
        return task.result()

    async def _deliver(self, cell: int, act: Callable[[], Coroutine[Any, Any, T]], extra_s: float) -> T:
        await self._travel(cell, extra_s)
        answer = await act()
        await self._travel(cell, 0.0)
        return answer

    async def _travel(self, cell: int, extra_s: float) -> None:
        if cell in self.cut or self._chance.random() < 0.005:
            await pause(3600.0)
        await pause(self._one_way_s[cell] * self._chance.uniform(1.0, 1.3) + extra_s)
        if cell in self.cut:
            await pause(3600.0)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self.late.add(task)
        task.add_done_callback(self.late.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task


@dataclass(eq=False, slots=True)
class _Gateway:
    """One gateway's life, between two kills."""

    quota: Quota
    life: asyncio.Task[None]
    calls: set[asyncio.Task[None]] = field(default_factory=set)

    async def kill(self) -> None:
        """Ends it as SIGKILL would: what it had in memory is gone."""
        tasks = [self.life, *self.calls]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Cell:
    """One cell: its store for the whole run, and the gateways that there are now. The first one is the home."""

    def __init__(self, simulation: "CellSimulation", number: int, folder: Path, skew_s: float) -> None:
        self._simulation = simulation
        self.number = number
        self.name = HOME if number == 0 else f"c{number}"
        self._folder = folder
        self._loop = asyncio.get_running_loop()
        self._offset_s = simulation.scenario.start_s + skew_s
        self.store = SqliteStore(str(folder / f"{self.name}.db"), self.clock)
        self.gateways: list[_Gateway] = []

    def clock(self) -> float:
        return self._loop.time() + self._offset_s

    async def open_account(self) -> None:
        limits = Limits(neurons_per_day=self._simulation.scenario.budget / MICRO)
        home = "" if self.number == 0 else HOME
        await self.store.accounts.add(Account(ANN, "ann", limits, 1, home=home))
        await self.store.accounts.add_token(ApiToken("key", ANN, "laptop", 1), TokenDigest(b"digest", 1))
        account = await self.store.accounts.get(ANN)
        assert account is not None
        self.caller = Caller(account, "key", Grant(), limits=account.limits)

    def start(self) -> None:
        """A new gateway, which knows nothing of the one before but the store."""
        borrower = None
        if self.number:
            ids = partial(self._simulation.chance.randbytes, 8)
            borrower = QuotaBorrower(
                self.store.leases, self._simulation, self.name, self._loop.time, lambda: ids().hex()
            )
        quota = Quota(self.store.quotas, self._folder / f"{self.name}-outbox", self.clock, borrower)
        self.gateways.append(_Gateway(quota, self._loop.create_task(self._live(quota, borrower))))

    async def _live(self, quota: Quota, borrower: QuotaBorrower | None) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(quota.run())
            if borrower is not None:
                tasks.create_task(borrower.run())


class CellSimulation:
    """One run. It is the other cells to each of its borrowers."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        self.chance = random.Random(scenario.seed)
        self.outcome = Outcome()
        self._folder = folder
        self._network = _Network(scenario, self.chance)
        self._lease_days: dict[str, int] = {}
        self._held: Counter[int] = Counter()  # by the budget's day
        self._spent: Counter[int] = Counter()

    async def lend(self, home: str, request: LeaseRequest) -> Granted | Denied:
        number = int(request.lease_id.partition(".")[0].removeprefix("c"))

        async def act() -> Granted | Denied:
            granted = await self._lender.lend(f"c{number}", request)
            if isinstance(granted, Granted):
                self._lease_days[request.lease_id] = granted.day
            return granted

        return await self._network.ask(number, act)

    async def settle(self, home: str, returned: LeaseReturn) -> None:
        number = int(returned.lease_id.partition(".")[0].removeprefix("c"))
        await self._network.ask(number, partial(self._lender.settle, f"c{number}", returned))

    async def run(self) -> Outcome:
        """Returns what came of it, once all calls have ended, all leases are returned, and the ledger is compared."""
        scenario, chance = self.scenario, self.chance
        self._cells = [
            _Cell(self, number, self._folder, number and chance.uniform(-scenario.skew_s, scenario.skew_s))
            for number in range(scenario.cells)
        ]
        self._lender = QuotaLender(self._cells[0].store, scenario.cells - 1, self._cells[0].clock)
        for cell in self._cells:
            await cell.open_account()
            for _ in range(GATEWAYS):
                cell.start()
        faults = [asyncio.create_task(self._cut_once()) for _ in range(scenario.cuts)]
        faults += [asyncio.create_task(self._crash_once()) for _ in range(scenario.crashes)]
        await asyncio.gather(*(self._traffic(cell) for cell in self._cells), *faults)
        await pause(QUIET_S)
        await self._judge()
        for cell in self._cells:
            for gateway in cell.gateways:
                await gateway.kill()
            await cell.store.close()
        for task in list(self._network.late):
            task.cancel()
        return self.outcome

    async def _cut_once(self) -> None:
        scenario = self.scenario
        await pause(self.chance.uniform(0.0, max(scenario.seconds - scenario.cut_s, 0.0)))
        cell = self.chance.randrange(1, scenario.cells)
        self._network.cut.add(cell)
        await pause(scenario.cut_s)
        self._network.cut.discard(cell)

    async def _crash_once(self) -> None:
        await pause(self.chance.uniform(0.0, self.scenario.seconds * 0.9))
        cell = self.chance.choice(self._cells)
        await cell.gateways.pop(self.chance.randrange(GATEWAYS)).kill()
        cell.start()

    async def _traffic(self, cell: _Cell) -> None:
        """Calls of one cell: more in some half minutes than in others."""
        loop, scenario, chance = asyncio.get_running_loop(), self.scenario, self.chance
        ends_s, share = loop.time() + scenario.seconds, 1.0
        change_s = loop.time()
        while loop.time() < ends_s:
            if loop.time() >= change_s:
                share, change_s = chance.choice((0.1, 0.5, 1.0, 2.5)), loop.time() + 30.0
            await pause(chance.expovariate(scenario.calls_s / scenario.cells * share))
            gateway = chance.choice(cell.gateways)
            task = loop.create_task(self._call(cell, gateway.quota))
            gateway.calls.add(task)
            task.add_done_callback(gateway.calls.discard)

    async def _call(self, cell: _Cell, quota: Quota) -> None:
        loop, tokens = asyncio.get_running_loop(), self.chance.randint(1, self.scenario.tokens)
        began_s = loop.time()
        demand = QuotaRequest("m", PRICE, 0, tokens, min_output_tokens=tokens)
        try:
            reservation = await quota.reserve(cell.caller, self.chance.randbytes(8).hex(), demand)
        except QuotaExceeded:
            self.outcome.refused += 1
            day = day_of(int(self._cells[0].clock() * MICRO))
            idle = self.scenario.budget - self._held[day] - self._spent[day]
            self.outcome.stranded = max(self.outcome.stranded, idle - tokens)
            return
        except HomeUnavailable:
            self.outcome.unreachable += 1
            return
        self.outcome.granted += 1
        self.outcome.waits_ms.append((loop.time() - began_s) * 1000)
        lease = reservation.unused.subjects.rpartition("lease:")[2]
        day = self._lease_days[lease] if lease else reservation.unused.day
        self._step(day, reservation.held, 0)
        used = 0
        try:
            await pause(self.chance.uniform(0.1, 8.0))
            used = self.chance.randint(0, reservation.held)
            quota.settle(reservation, CallUsage(completion_tokens=used, outcome="done"))
            await quota.flush()
        finally:  # a killed gateway's call is charged as checkpointed, with nothing
            self._step(day, -reservation.held, used)

    def _step(self, day: int, held: int, spent: int) -> None:
        self._held[day] += held
        self._spent[day] += spent
        self.outcome.overspent = max(self.outcome.overspent, self._held[day] + self._spent[day] - self.scenario.budget)

    async def _judge(self) -> None:
        """Holds counters and ledgers of all cells against what calls used."""
        complain, days = self.outcome.complaints.append, set(self._spent)
        self.outcome.spent = sum(self._spent.values())
        for cell in self._cells:
            for gateway in cell.gateways:
                gateway.quota.check()
            for day in {day_of(int(cell.clock() * MICRO)) - back for back in range(2)} | days:
                balance = await cell.store.quotas.reconcile(ANN, day)
                if balance.counted != balance.recorded:
                    complain(f"{cell.name}, day {day}: counted {balance.counted}, recorded {balance.recorded}")
            if left := [lease for lease in await cell.store.leases.list() if lease.returned != lease.used]:
                complain(f"{cell.name} has not returned {left}")
        for day in days:
            home = await self._cells[0].store.quotas.totals(ANN, day)
            if home.held or home.micro_neurons != self._spent[day]:
                complain(f"day {day}: calls used {self._spent[day]}, and home charged {home}")


def simulate(scenario: Scenario, folder: Path) -> Outcome:
    """One run of its own, in time that does not pass."""

    async def inline(work: Callable[..., Any], *arguments: Any) -> Any:
        return work(*arguments)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(asyncio, "to_thread", inline))  # no thread is waited for in fake time
        runner = stack.enter_context(asyncio.Runner(loop_factory=FakeTimeLoop))
        return runner.run(_run(scenario, folder))


async def _run(scenario: Scenario, folder: Path) -> Outcome:
    return await CellSimulation(scenario, folder).run()
