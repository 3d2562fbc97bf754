"""The replicas that can serve: what machines report, the connections to both, and requests that wait for a model.

It knows asyncio, and nothing of HTTP, text or tenants. Requests for a model that is not on a device wait here; machines
are told how many there are, and all go on once a replica moves toward the device.
"""

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from engine.process.supervised import Backoff
from engine.protocol import frames
from engine.protocol.address import parse_address
from engine.protocol.types import Residency
from gateway.cluster import route
from gateway.cluster.client import ReplicaClient, ReplicaConnection
from gateway.cluster.connection import MachineConnection, connect, error_text
from gateway.cluster.replica_counters import RecentLoad, ReplicaCounters
from gateway.cluster.wake_queue import WakeQueue

BACKOFF_S: Final = (0.05, 2.0)
LEAVING_MS: Final = 1000  # the estimate for a replica that leaves the device to be back
RETRY_SOON_S: Final = 5  # where no machine can tell when the model is ready
RETRY_LATER_S: Final = 30  # where no machine can serve it

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
    """A replica that a machine reported, and the task that keeps the connection to it."""

    state: frames.ReplicaState
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    connection: ReplicaConnection | None = None
    problem: str = ""

    @property
    def present(self) -> bool:
        """Whether it is on the device and stays there."""
        return self.state.residency is self.state.toward is Residency.DEVICE

    @property
    def coming(self) -> bool:
        """Whether it moves toward the device."""
        return self.state.residency < self.state.toward is Residency.DEVICE

    @property
    def at_rest(self) -> bool:
        """Whether it is where its machine wants it, and not on the device."""
        return self.state.residency is self.state.toward is not Residency.DEVICE

    @property
    def hopeless(self) -> bool:
        """Whether waiting is in vain: it cannot run, or died so often that it is not started for a while."""
        return self.state.ready_ms < 0 or self.state.quarantined

    @property
    def expected_ms(self) -> int | None:
        """Time until it could serve, as far as its machine can tell. A replica that leaves may soon be back."""
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
        """Whether its process exists or is about to start."""
        return self.state.residency is not Residency.DISK or self.starting

    @property
    def ready(self) -> bool:
        """Whether requests can be sent to it, wherever it is."""
        return self.connection is not None and self.connection.ready


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica as this gateway sees it, for readiness, metrics and operators.

    machine     the address of its machine.
    ready       whether it serves.
    expected_s  the time until it could serve a request of now; None: it cannot, or no machine can tell.
    load        None while there is no connection.
    """

    machine: str
    state: frames.ReplicaState
    ready: bool
    expected_s: float | None
    problem: str
    load: frames.ReplicaLoad | None
    recent_load: RecentLoad

    @property
    def model(self) -> str:
        return self.state.model


@dataclass(frozen=True, slots=True)
class MachineView:
    """A machine's last report, and why there is no connection to it, if there is none."""

    address: str
    report: frames.MachineState
    problem: str
    replicas: list[ReplicaView]


class ReplicaFleet:
    """All machines' replicas. `run` keeps the connections; `acquire` chooses among those that can serve. `on_waited`
    gets, for each request that found its model asleep, how long it waited until a replica began with it or it gave up.
    """

    def __init__(
        self,
        machine_addresses: Sequence[str],
        *,
        on_waited: Callable[[str, float], None] = lambda model, seconds: None,
    ) -> None:
        for address in machine_addresses:
            parse_address(address)  # a wrong address is an error at the start, not a retry for ever
        self._addresses = list(dict.fromkeys(machine_addresses))
        self.counters = ReplicaCounters()
        self._on_waited = on_waited
        self._wake_queue = WakeQueue(self._send_demand)
        self._replicas: dict[tuple[str, str], _ReplicaEntry] = {}
        self._machines: dict[str, MachineConnection] = {}
        self._reports: dict[str, frames.MachineState] = {}
        self._problems: dict[str, str] = {}

    async def run(self) -> None:
        """Connects to the machines and to the replicas they report, again and again, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._wake_queue.run())
            for address in self._addresses:
                group.create_task(self._keep_machine(address, group))

    # What is known

    def replicas(self) -> list[ReplicaView]:
        """All known replicas, in the order in which they were reported first."""
        return [self._view(machine, entry) for (machine, _), entry in self._replicas.items()]

    def _view(self, machine: str, entry: _ReplicaEntry) -> ReplicaView:
        state, connection = entry.state, entry.connection
        serves = entry.ready and entry.present
        expected_ms = entry.expected_ms if machine in self._machines else None
        return ReplicaView(
            machine=machine,
            state=state,
            ready=serves,
            expected_s=0.0 if serves else None if expected_ms is None else expected_ms / 1000,
            problem="" if serves else state.problem or (entry.problem if entry.reachable else ""),
            load=connection.load if connection else None,
            recent_load=connection.recent_load if connection else RecentLoad(),
        )

    def machines(self) -> list[MachineView]:
        """All machines of the configuration, in its order."""
        views = self.replicas()
        return [
            MachineView(
                address,
                self._reports.get(address, frames.MachineState("", [])),
                self._problems.get(address, ""),
                [view for view in views if view.machine == address],
            )
            for address in self._addresses
        ]

    def problems(self) -> dict[str, str]:
        """Machines that cannot be reached, by address, in words."""
        return dict(self._problems)

    def waiting(self, model: str) -> int:
        """How many requests wait here for the model."""
        return self._wake_queue.count(model)

    def hello(self, model: str) -> frames.Hello | None:
        """What a replica of this model reported about itself, on the device or asleep; None while none is connected."""
        ready = [entry for entry in self._entries(model) if entry.ready]
        first = min(ready, key=lambda entry: not entry.present, default=None)
        return first.connection.hello if first and first.connection else None

    def context_tokens(self, model: str, default: int) -> int:
        """The context of the model's replicas; `default` while none is connected."""
        hello = self.hello(model)
        return default if hello is None else hello.context_tokens

    def serves(self, model: str) -> bool:
        """Whether a replica of the model is on a device, and connected."""
        return bool(self._serving(model))

    def busy(self, model: str) -> int | None:
        """Seconds until one more request could begin, if it had to wait for others or for the model itself. None if it
        had not, and if no machine can tell."""
        serving = self._serving(model)
        if serving:
            waits = all(replica.load is not None and replica.load.waiting > 0 for replica in serving)
            return 1 if waits else None
        return self.expected_s(model)

    def expected_s(self, model: str) -> int | None:
        """Whole seconds until a model that sleeps could serve. None if it serves now, and if no machine can tell."""
        waits_ms = [entry.expected_ms for entry in self._entries(model) if entry.expected_ms is not None]
        return math.ceil(min(waits_ms) / 1000) if waits_ms and not self.serves(model) else None

    def spare(self, model: str, limit: int) -> int:
        """How many more background sequences this model's replicas may get: each of them `limit` in all, while no live
        sequence waits there."""
        idle = [replica for replica in self._serving(model) if not (replica.load and replica.load.waiting)]
        return sum(max(0, limit - replica.background) for replica in idle)

    def set_batch_demand(self, model: str, requests: int, weight: float) -> None:
        """Sets how many requests of batches wait for a model that sleeps: machines hear of them while no live request
        waits for it."""
        self._wake_queue.set_batches(model, requests, weight)

    # Choosing

    async def acquire(
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
        """A replica for this prompt (packed u32), waiting until the loop's clock shows `deadline` at the latest.

        All calls of a scope's session get the same replica, while it lives and has no more than its share of the load.
        Background sequences are no load for live calls. A call in the background never waits for a model: that would
        wake it. Waiting calls of more `weight` go on first. Raises NoReplicaAvailable.
        """
        began_s, waited = time.monotonic(), False
        late = background or asyncio.get_running_loop().time() >= deadline
        while not (replicas := self._serving_or_starting(model)):
            if late or self._hopeless(model):
                if waited:
                    self._on_waited(model, time.monotonic() - began_s)
                raise self._unavailable(model)
            waited = True
            try:
                await self._wake_queue.wait(model, weight, deadline)
            except TimeoutError:
                late = True
        candidates = [
            route.Candidate(replica.address, replica.sequences + (replica.background if background else 0))
            for replica in replicas
        ]
        chosen = replicas[route.pick(candidates, scope, tokens, session)]
        asleep = waited or not self._serving(model)
        return ReplicaClient(chosen, time.monotonic() - began_s if waited else 0.0, began_s if asleep else None)

    def _entries(self, model: str) -> list[_ReplicaEntry]:
        return [entry for entry in self._replicas.values() if entry.state.model == model]

    def _serving(self, model: str) -> list[ReplicaConnection]:
        """Replicas that serve `model` now."""
        ready = [entry for entry in self._entries(model) if entry.ready and entry.present]
        return [entry.connection for entry in ready if entry.connection]

    def _serving_or_starting(self, model: str) -> list[ReplicaConnection]:
        """Replicas that serve `model` now; if none, those about to, where requests queue."""
        return self._serving(model) or [
            entry.connection for entry in self._entries(model) if entry.connection and entry.ready and entry.coming
        ]

    def _unreachable(self, model: str) -> list[str]:
        """Machines without a connection that may have the model: they had it, or never sent a report."""
        return [
            address
            for address in self._addresses
            if address not in self._machines
            and (address not in self._reports or model in {state.model for state in self._reports[address].replicas})
        ]

    def _hopeless(self, model: str) -> bool:
        """Whether all its machines report that it cannot be served. A machine that comes back may report otherwise."""
        entries = self._entries(model)
        return bool(entries) and not self._unreachable(model) and all(entry.hopeless for entry in entries)

    def _unavailable(self, model: str) -> NoReplicaAvailable:
        entries = self._entries(model)
        if not entries:
            reason = "; ".join(self._problems.values()) or "no machine serves it"
            return NoReplicaAvailable(f"nothing serves {model} now: {reason}", False, RETRY_LATER_S)
        reason = self._unavailable_reason(model)
        if self._hopeless(model):
            pauses_ms = [entry.state.ready_ms for entry in entries if entry.state.ready_ms > 0]
            retry_after_s = math.ceil(min(pauses_ms) / 1000) if pauses_ms else RETRY_LATER_S
            return NoReplicaAvailable(f"{model} cannot be served: {reason}", False, retry_after_s)
        return NoReplicaAvailable(f"{model} is not ready: {reason}", True, self.expected_s(model) or RETRY_SOON_S)

    def _unavailable_reason(self, model: str) -> str:
        """What its connected machines report, and which machines have no connection."""
        unreachable = self._unreachable(model)
        problems = {
            entry.state.problem or entry.problem or ("asleep" if entry.at_rest else "loading")
            for (machine, _), entry in self._replicas.items()
            if entry.state.model == model and machine not in unreachable
        }
        return "; ".join(sorted(problems.union(self._problems.get(address, "loading") for address in unreachable)))

    def _on_change(self) -> None:
        """Releases the requests of models that can be served now, or not any more."""
        for model in self._wake_queue.models:
            if self._serving_or_starting(model) or self._hopeless(model):
                self._wake_queue.release(model)

    def _send_demand(self, demand: frames.ModelDemand) -> None:
        for machine in self._machines.values():
            if demand.model in machine.models:
                machine.send_demand(demand)

    # Connections

    async def _keep_machine(self, address: str, group: asyncio.TaskGroup) -> None:
        def on_report(machine: MachineConnection, report: frames.MachineState) -> None:
            self._machines[address] = machine
            self._on_report(address, machine, report, group)

        backoff = Backoff(*BACKOFF_S)
        while True:
            try:
                machine = await connect(address, lambda: MachineConnection(on_report))
            except (OSError, TimeoutError) as error:
                self._problems[address] = f"the machine at {address} cannot be reached: {error_text(error)}"
            else:
                self._problems.pop(address, None)
                await machine.wait_closed()
                self._machines.pop(address, None)
                self._problems[address] = f"the machine at {address} was lost: {machine.close_reason}"
                backoff.reset()
            await asyncio.sleep(_jittered(backoff.fail()))

    def _on_report(
        self, address: str, machine: MachineConnection, report: frames.MachineState, group: asyncio.TaskGroup
    ) -> None:
        """Replaces a machine's last report. Connections stay: they end by themselves when a replica does."""
        self._reports[address] = report
        states = {state.address: state for state in report.replicas}
        for key in [key for key in self._replicas if key[0] == address and key[1] not in states]:
            entry = self._replicas.pop(key)
            self.counters.remove(entry.state.address)
            if entry.task is not None:
                entry.task.cancel()
        for replica, state in states.items():
            before = self._replicas.get((address, replica))
            hopeless = before is not None and before.hopeless
            entry = self._replicas.setdefault((address, replica), _ReplicaEntry(state))
            entry.state = state
            if entry.hopeless and not hopeless:  # operators learn why its calls are refused, callers only that they are
                fields = {"machine": report.machine, "model": state.model, "problem": state.problem}
                log.error("replica_cannot_serve", extra={"fields": {**fields, "quarantined": state.quarantined}})
            entry.changed.set()
            if entry.task is None and entry.reachable:
                entry.task = group.create_task(self._keep_replica(entry))
            if entry.connection is not None and not (entry.present or entry.coming):
                entry.connection.abort_unstarted()
        models = frozenset(state.model for state in report.replicas)
        added, machine.models = models - machine.models, models
        for model in added.intersection(self._wake_queue.models):
            machine.send_demand(self._wake_queue.demand(model))
        self._on_change()

    async def _keep_replica(self, entry: _ReplicaEntry) -> None:
        address, model = entry.state.address, entry.state.model
        backoff = Backoff(*BACKOFF_S)

        def make() -> ReplicaConnection:
            return ReplicaConnection(address, self._on_change, self.counters, partial(self._on_waited, model))

        while True:
            entry.changed.clear()
            if entry.reachable:
                try:
                    entry.connection = await connect(address, make)
                except (OSError, TimeoutError) as error:
                    entry.problem = f"the replica at {address} cannot be reached: {error_text(error)}"
                else:
                    entry.problem = ""
                    if await self._use_until_closed(entry, entry.connection):
                        backoff.reset()
            wait_s = BACKOFF_S[0] if entry.starting else _jittered(backoff.fail()) if entry.reachable else None
            with contextlib.suppress(TimeoutError):  # a machine's new report ends the wait at once
                async with asyncio.timeout(wait_s):
                    await entry.changed.wait()

    async def _use_until_closed(self, entry: _ReplicaEntry, replica: ReplicaConnection) -> bool:
        """Waits until the connection ends; returns whether anything could be submitted on it."""
        self._on_change()  # its hello may have come with the connection
        try:
            await replica.wait_closed()
        finally:
            entry.connection = None
            entry.problem = f"the replica at {replica.address} was lost: {replica.close_reason}"
        return replica.hello is not None


def _jittered(pause_s: float) -> float:
    """Part of the pause by chance, so that gateways do not all come back at once."""
    return pause_s * random.uniform(0.5, 1.0)
