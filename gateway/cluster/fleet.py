"""Who can serve: what machines say of their replicas, the connections to both, and requests that wait for a model.

It knows asyncio, and nothing of HTTP, text or tenants. A model that is not on a device is asked for: its requests wait
here, their machines are told how many there are, and all go on once a replica moves toward the device.
"""

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from engine.protocol import frames
from engine.protocol.address import parse_address
from engine.protocol.types import Residency
from gateway.cluster import route
from gateway.cluster.client import MachineConnection, ReplicaClient, ReplicaConnection, connect, error_text
from gateway.cluster.replica_counters import RecentLoad, ReplicaCounters
from gateway.cluster.wake_queue import WakeQueue

BACKOFF_S: Final = (0.05, 2.0)
LEAVING_MS: Final = 1000  # what leaves the device is reckoned to be back in
RETRY_SOON_S: Final = 5  # where no machine can tell when it serves
RETRY_LATER_S: Final = 30  # where none can serve it

log = logging.getLogger(__name__)


class NoReplicaAvailable(Exception):
    """No replica could serve the model before the deadline. `loading`: one may come, in `retry_after_s` as far as that
    can be told; else the model cannot be served here."""

    def __init__(self, message: str, loading: bool, retry_after_s: int = RETRY_SOON_S) -> None:
        super().__init__(message)
        self.message = message
        self.loading = loading
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class _ReplicaEntry:
    """A replica that a machine told of, and the task that keeps the connection to it."""

    state: frames.ReplicaState
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    connection: ReplicaConnection | None = None
    problem: str = ""

    @property
    def present(self) -> bool:
        """Whether it is on the device, to stay."""
        return self.state.residency is self.state.toward is Residency.DEVICE

    @property
    def coming(self) -> bool:
        """Whether it moves toward the device."""
        return self.state.residency < self.state.toward is Residency.DEVICE

    @property
    def resting(self) -> bool:
        """Whether it is where it is to be, and not on the device."""
        return self.state.residency is self.state.toward is not Residency.DEVICE

    @property
    def hopeless(self) -> bool:
        """Whether nobody needs to wait for it: it cannot be, or died so often that it is not started for a while."""
        return self.state.ready_ms < 0 or self.state.quarantined

    @property
    def expected_ms(self) -> int | None:
        """Until it could serve, as far as its machine can tell. One that is about to leave may soon be back."""
        if self.hopeless:
            return None
        leaves = self.state.toward < self.state.residency is Residency.DEVICE
        return self.state.ready_ms or (LEAVING_MS if leaves else None)

    @property
    def starting(self) -> bool:
        """Whether its process is about to listen."""
        return self.state.residency is Residency.DISK and self.state.toward is not Residency.DISK

    @property
    def reachable(self) -> bool:
        """Whether there is a process, or is to be."""
        return self.state.residency is not Residency.DISK or self.starting

    @property
    def ready(self) -> bool:
        """Whether requests can be sent to it, wherever it is."""
        return self.connection is not None and self.connection.ready


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica as this gateway sees it, for readiness, metrics and operators.

    machine     the address of its own.
    ready       it serves.
    expected_s  until it could serve if it were asked for now; None: it cannot, or nobody can tell.
    load        None while there is no connection.
    """

    machine: str
    state: frames.ReplicaState
    ready: bool
    expected_s: float | None
    problem: str
    load: frames.ReplicaLoad | None
    lately: RecentLoad

    @property
    def model(self) -> str:
        return self.state.model


@dataclass(frozen=True, slots=True)
class MachineView:
    """What a machine said last, and why there is no connection to it, where there is none."""

    address: str
    said: frames.MachineState
    problem: str
    replicas: list[ReplicaView]


class ReplicaFleet:
    """All machines' replicas. `run` keeps the connections; `link` chooses among those that can serve. `waited` is told
    of each request that found its model asleep for how long it waited: until a replica began with it, or it gave up.
    """

    def __init__(
        self,
        machine_addresses: Sequence[str],
        *,
        waited: Callable[[str, float], None] = lambda model, seconds: None,
        rng: random.Random | None = None,
    ) -> None:
        for address in machine_addresses:
            parse_address(address)  # a wrong one is an error at the start, not a retry for ever
        self._addresses = list(dict.fromkeys(machine_addresses))
        self._rng = rng or random.Random()
        self.tally = ReplicaCounters()
        self._waited = waited
        self._waiters = WakeQueue(self._tell)
        self._known: dict[tuple[str, str], _ReplicaEntry] = {}
        self._machines: dict[str, MachineConnection] = {}
        self._said: dict[str, frames.MachineState] = {}
        self._problems: dict[str, str] = {}

    async def run(self) -> None:
        """Connects to the machines and to what they tell of, again and again, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._waiters.run())
            for address in self._addresses:
                group.create_task(self._keep_machine(address, group))

    # What is known

    def replicas(self) -> list[ReplicaView]:
        """What is known now, in the order in which it became known."""
        return [self._seen(machine, known) for (machine, _), known in self._known.items()]

    def _seen(self, machine: str, known: _ReplicaEntry) -> ReplicaView:
        state, connection = known.state, known.connection
        serves = known.ready and known.present
        expected_ms = known.expected_ms if machine in self._machines else None
        return ReplicaView(
            machine=machine,
            state=state,
            ready=serves,
            expected_s=0.0 if serves else None if expected_ms is None else expected_ms / 1000,
            problem="" if serves else state.problem or (known.problem if known.reachable else ""),
            load=connection.load if connection else None,
            lately=connection.lately if connection else RecentLoad(),
        )

    def machines(self) -> list[MachineView]:
        """All of the configuration, in its order."""
        seen = self.replicas()
        return [
            MachineView(
                address,
                self._said.get(address, frames.MachineState("", [])),
                self._problems.get(address, ""),
                [replica for replica in seen if replica.machine == address],
            )
            for address in self._addresses
        ]

    def problems(self) -> dict[str, str]:
        """Machines that cannot be reached, by address, in words."""
        return dict(self._problems)

    def waiting(self, model: str) -> int:
        """Requests that wait here for the model to come."""
        return self._waiters.count(model)

    def hello(self, model: str) -> frames.Hello | None:
        """What a replica of this model said of itself, on the device or asleep; None while none is connected."""
        of = [known for known in self._of(model) if known.ready]
        first = min(of, key=lambda known: not known.present, default=None)
        return first.connection.hello if first and first.connection else None

    def serves(self, model: str) -> bool:
        """Whether a replica of the model is on a device, and connected."""
        return bool(self._present(model))

    def busy(self, model: str) -> int | None:
        """In how many seconds one more request could begin, where it would have to wait for others or for the model
        itself. None where it would not, and where nobody can say that it ever could."""
        present = self._present(model)
        if present:
            waits = all(replica.load is not None and replica.load.waiting > 0 for replica in present)
            return 1 if waits else None
        return self.expected_s(model)

    def expected_s(self, model: str) -> int | None:
        """In how many whole seconds a model that sleeps could serve. None where it does, and where nobody can tell."""
        waits_ms = [known.expected_ms for known in self._of(model) if known.expected_ms is not None]
        return math.ceil(min(waits_ms) / 1000) if waits_ms and not self.serves(model) else None

    def spare(self, model: str, most: int) -> int:
        """How many more sequences may go into the background, where each replica of this model on the device without
        live ones that wait has so many."""
        calm = [each for each in self._present(model) if not (each.load and each.load.waiting)]
        return sum(max(0, most - each.background) for each in calm)

    def queue(self, model: str, requests: int, weight: float) -> None:
        """So many requests of batches wait for a model that sleeps, until it is said otherwise: machines hear of them
        while nobody else waits for it."""
        self._waiters.queue(model, requests, weight)

    # Choosing

    async def link(
        self,
        model: str,
        scope: bytes,
        tokens: bytes,
        deadline: float,
        session: bytes = b"",
        *,
        weight: float = 1.0,
        background: bool = False,
    ) -> ReplicaClient:
        """A replica for this prompt (packed u32), waiting until the loop's clock shows `deadline` at the latest. The
        same one for all calls of a scope's session, as long as it lives and has no more than its share of the load. For
        live calls what is in the background there is no load, and what is in the background waits for no model: it
        would wake it. Those of more `weight` go on first.

        Raises Unavailable.
        """
        began_s, waited = time.monotonic(), False
        late = background or asyncio.get_running_loop().time() >= deadline
        while not (able := self._able(model)):
            if late or self._hopeless(model):
                if waited:
                    self._waited(model, time.monotonic() - began_s)
                raise self._unavailable(model)
            waited = True
            try:
                await self._waiters.wait(model, weight, deadline)
            except TimeoutError:
                late = True
        candidates = [
            route.Candidate(replica.address, replica.sequences + (replica.background if background else 0))
            for replica in able
        ]
        chosen = able[route.pick(candidates, scope, tokens, session)]
        asleep = waited or not self._present(model)
        return ReplicaClient(chosen, time.monotonic() - began_s if waited else 0.0, began_s if asleep else None)

    def _of(self, model: str) -> list[_ReplicaEntry]:
        return [known for known in self._known.values() if known.state.model == model]

    def _present(self, model: str) -> list[ReplicaConnection]:
        """Those that serve it."""
        return [known.connection for known in self._of(model) if known.connection and known.ready and known.present]

    def _able(self, model: str) -> list[ReplicaConnection]:
        """Those that serve it; where there are none, those that will in a moment: what they are sent waits there."""
        return self._present(model) or [
            known.connection for known in self._of(model) if known.connection and known.ready and known.coming
        ]

    def _away(self, model: str) -> list[str]:
        """Machines that may have the model, and cannot be asked now: those that had it, or were never heard."""
        return [
            address
            for address in self._addresses
            if address not in self._machines
            and (address not in self._said or model in {state.model for state in self._said[address].replicas})
        ]

    def _hopeless(self, model: str) -> bool:
        """Whether its machines say that it cannot be served, now or ever. One that comes back may say otherwise."""
        of = self._of(model)
        return bool(of) and not self._away(model) and all(known.hopeless for known in of)

    def _unavailable(self, model: str) -> NoReplicaAvailable:
        of = self._of(model)
        if not of:
            why = "; ".join(self._problems.values()) or "no machine serves it"
            return NoReplicaAvailable(f"nothing serves {model} now: {why}", False, RETRY_LATER_S)
        why = self._why(model)
        if self._hopeless(model):
            pauses_ms = [known.state.ready_ms for known in of if known.state.ready_ms > 0]
            retry_after_s = math.ceil(min(pauses_ms) / 1000) if pauses_ms else RETRY_LATER_S
            return NoReplicaAvailable(f"{model} cannot be served: {why}", False, retry_after_s)
        return NoReplicaAvailable(f"{model} is not ready: {why}", True, self.expected_s(model) or RETRY_SOON_S)

    def _why(self, model: str) -> str:
        """What its machines say, and of those that are away that they are."""
        away = self._away(model)
        told = {
            known.state.problem or known.problem or ("asleep" if known.resting else "loading")
            for (machine, _), known in self._known.items()
            if known.state.model == model and machine not in away
        }
        return "; ".join(sorted(told.union(self._problems.get(address, "loading") for address in away)))

    def _changed(self) -> None:
        """Something can serve now, or not any more."""
        for model in self._waiters.models:
            if self._able(model) or self._hopeless(model):
                self._waiters.release(model)

    def _tell(self, wake: frames.ModelDemand) -> None:
        for machine in self._machines.values():
            if wake.model in machine.models:
                machine.tell(wake)

    # Connections

    async def _keep_machine(self, address: str, group: asyncio.TaskGroup) -> None:
        def told(machine: MachineConnection, fleet: frames.MachineState) -> None:
            self._machines[address] = machine
            self._told(address, machine, fleet, group)

        waits = self._waits()
        while True:
            try:
                machine = await connect(address, lambda: MachineConnection(told))
            except (OSError, TimeoutError) as error:
                self._problems[address] = f"the machine at {address} cannot be reached: {error_text(error)}"
            else:
                self._problems.pop(address, None)
                await machine.until_lost()
                self._machines.pop(address, None)
                self._problems[address] = f"the machine at {address} was lost: {machine.why}"
                waits = self._waits()
            await asyncio.sleep(next(waits))

    def _told(
        self, address: str, machine: MachineConnection, fleet: frames.MachineState, group: asyncio.TaskGroup
    ) -> None:
        """A machine's new word replaces its old one. Connections stay: they end by themselves when a replica does."""
        self._said[address] = fleet
        told = {state.address: state for state in fleet.replicas}
        for key in [key for key in self._known if key[0] == address and key[1] not in told]:
            known = self._known.pop(key)
            self.tally.forget(known.state.address)
            if known.task is not None:
                known.task.cancel()
        for replica, state in told.items():
            before = self._known.get((address, replica))
            hopeless = before is not None and before.hopeless
            known = self._known.setdefault((address, replica), _ReplicaEntry(state))
            known.state = state
            if known.hopeless and not hopeless:
                _tell_operators(fleet.machine, state)
            self._follow(known, group)
        models = frozenset(state.model for state in fleet.replicas)
        unheard, machine.models = models - machine.models, models
        for model in unheard.intersection(self._waiters.models):
            machine.tell(self._waiters.wake(model))
        self._changed()

    def _follow(self, known: _ReplicaEntry, group: asyncio.TaskGroup) -> None:
        """What a machine's new word of a replica means for the connection to it."""
        known.changed.set()
        if known.task is None and known.reachable:
            known.task = group.create_task(self._keep_replica(known))
        if known.connection is not None and not (known.present or known.coming):
            known.connection.take_back()

    async def _keep_replica(self, known: _ReplicaEntry) -> None:
        address, model = known.state.address, known.state.model
        waits = self._waits()

        def make() -> ReplicaConnection:
            return ReplicaConnection(address, self._changed, self.tally, lambda seconds: self._waited(model, seconds))

        while True:
            known.changed.clear()
            if known.reachable:
                try:
                    known.connection = await connect(address, make)
                except (OSError, TimeoutError) as error:
                    known.problem = f"the replica at {address} cannot be reached: {error_text(error)}"
                else:
                    known.problem = ""
                    if await self._use(known, known.connection):
                        waits = self._waits()
            wait_s = BACKOFF_S[0] if known.starting else next(waits) if known.reachable else None
            with contextlib.suppress(TimeoutError):  # a machine's new word ends the wait at once
                async with asyncio.timeout(wait_s):
                    await known.changed.wait()

    async def _use(self, known: _ReplicaEntry, replica: ReplicaConnection) -> bool:
        """Until the connection ends; whether anything could be submitted on it."""
        self._changed()  # what it says of itself may have come with the connection
        try:
            await replica.until_lost()
        finally:
            known.connection = None
            known.problem = f"the replica at {replica.address} was lost: {replica.why}"
        return replica.hello is not None

    def _waits(self) -> Iterator[float]:
        """Back-off without end: doubling, jittered, bounded."""
        wait, most = BACKOFF_S
        while True:
            yield wait * self._rng.uniform(0.5, 1.0)
            wait = min(2 * wait, most)


def _tell_operators(machine: str, state: frames.ReplicaState) -> None:
    """Why calls of the model are refused; its callers are told only that they are."""
    fields = {"machine": machine, "model": state.model, "problem": state.problem, "quarantined": state.quarantined}
    log.error("replica_cannot_serve", extra={"fields": fields})
