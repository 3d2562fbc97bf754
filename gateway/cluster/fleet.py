"""The replicas that can serve: what machines report, and requests that wait for a model.

It knows asyncio, and nothing of HTTP, text or tenants. Requests for a model that is not on a device wait here; the
machines that should hold it are told how many there are, and all go on once a replica moves toward the device.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from msgspec import structs

from engine.protocol import frames
from engine.protocol.address import parse_tls_address
from gateway.cluster import route
from gateway.cluster.client import ReplicaClient, ReplicaConnection
from gateway.cluster.connection import Connector, MachineConnection, connect
from gateway.cluster.machine_links import MachineLinks
from gateway.cluster.model_pool import ModelPool
from gateway.cluster.move_log import MoveLog
from gateway.cluster.raised_epochs import RaisedEpochs
from gateway.cluster.replica_counters import RecentLoad, ReplicaCounters
from gateway.cluster.replica_entry import MachineEntry, ReplicaEntry, Standing
from gateway.cluster.replica_links import ReplicaLinks
from gateway.cluster.route import ReplicaRing
from gateway.cluster.wake_queue import AwaitedModel, WakeQueue
from gateway.cluster.wake_targets import WakeTargets
from gateway.members.protocol import Membership

RETRY_SOON_S: Final = 5  # where no machine can tell when the model is ready
RETRY_LATER_S: Final = 30  # where no machine can serve it

log = logging.getLogger(__name__)


class NoReplicaAvailable(Exception):
    """No replica could serve the model before the deadline. `loading`: one may come, in `retry_after_s` as far as that
    can be told; else the model cannot be served here. `outside`: it can, but not where the call may be."""

    def __init__(self, message: str, loading: bool, retry_after_s: int = RETRY_SOON_S, outside: bool = False) -> None:
        super().__init__(message)
        self.message, self.loading, self.retry_after_s, self.outside = message, loading, retry_after_s, outside


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica as this gateway sees it, for readiness, metrics and operators.

    machine     the address of its machine.
    ready       whether it serves.
    expected_s  the time until it could serve a request of now; None: it cannot, or no machine can tell.
    load        None while there is no connection.
    differs     it gets no calls, since most replicas of its name compute with something else.
    """

    machine: str
    state: frames.ReplicaState
    ready: bool
    expected_s: float | None
    problem: str
    load: frames.ReplicaLoad | None
    recent_load: RecentLoad
    differs: bool = False

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
        clock: Callable[[], float] = time.time,
        connector: Connector = connect,
    ) -> None:
        """`machine_addresses` are there from the start; `links` takes others."""
        self.links = MachineLinks(connector, self._on_report, self._on_gone)
        self.links.follow(self, Membership(frozenset(machine_addresses)))
        self.counters = ReplicaCounters()
        self.moves = MoveLog(clock)
        self.epochs = RaisedEpochs()
        self.route_key = b""  # of the names by which replicas tell what they have cached; set before it runs
        self._on_waited = on_waited
        self._wake_queue = WakeQueue(self._send_demand)
        self._wake_targets = WakeTargets()
        self._machines: dict[str, MachineEntry] = {}
        self._pools: dict[str, ModelPool] = {}
        self._evacuated: dict[ReplicaEntry, None] = {}
        self._replica_links = ReplicaLinks(self._machines, connector, self._on_change, self._open_connection)

    async def run(self) -> None:
        """Connects to the machines and to the replicas they report, again and again, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._wake_queue.run())
            group.create_task(self._replica_links.run())
            group.create_task(self.links.run())

    # What is known

    def replicas(self) -> list[ReplicaView]:
        """All known replicas, machine by machine, in the order in which they were reported first."""
        return [self._view(entry) for machine in self._machines.values() for entry in machine.replicas.values()]

    def _view(self, entry: ReplicaEntry) -> ReplicaView:
        state, connection = entry.state, entry.connection
        serves = entry.standing >= Standing.LEAVING
        expected_ms = None if entry.machine.connection is None else entry.expected_ms
        return ReplicaView(
            machine=entry.machine.address,
            state=state,
            ready=serves,
            expected_s=0.0 if serves else None if expected_ms is None else expected_ms / 1000,
            problem="" if serves else entry.why_not,
            load=connection.load if connection else None,
            recent_load=connection.recent_load if connection else RecentLoad(),
            differs=entry.differs,
        )

    def machines(self) -> list[MachineView]:
        """All machines that there are, in the order in which they came."""
        return [self._machine_view(address) for address in self.links.addresses]

    def _machine_view(self, address: str) -> MachineView:
        machine, problem = self._machines.get(address), self.links.problems.get(address, "")
        if machine is None:
            return MachineView(address, frames.MachineState("", []), problem, [])
        return MachineView(address, machine.report, problem, [*map(self._view, machine.replicas.values())])

    def problems(self) -> dict[str, str]:
        """Machines that cannot be reached, by address, in words."""
        return dict(self.links.problems)

    def waiting(self, model: str) -> int:
        """How many requests wait here for the model."""
        return self._wake_queue.count(model)

    def hello(self, model: str) -> frames.Hello | None:
        """What a replica of this model reported about itself, on the device or asleep; None while none is connected."""
        known = self._pool(model).known
        return known.connection.hello if known is not None and known.connection is not None else None

    def context_tokens(self, model: str, default: int) -> int:
        """The context of the model's replicas; `default` while none is connected."""
        hello = self.hello(model)
        return default if hello is None else hello.context_tokens

    def takes_images(self, model: str, default: bool) -> bool:
        """Whether the model's replicas take images; `default` while none is connected."""
        hello = self.hello(model)
        return default if hello is None else hello.image_tokens > 0

    def serves(self, model: str, regions: tuple[str, ...] = ()) -> bool:
        """Whether a replica of the model is on a device, and connected; in these regions, where there are any."""
        return bool(self._pool(model).within(regions).serving)

    def busy(self, model: str, regions: tuple[str, ...] = ()) -> int | None:
        """Seconds until one more request could begin, if it had to wait for others or for the model itself. None if it
        had not, and if no machine can tell."""
        if serving := self._pool(model).within(regions).serving:
            loads = (entry.connection.load for entry in serving if entry.connection is not None)
            return 1 if all(load is not None and load.waiting > 0 for load in loads) else None
        return self.expected_s(model, regions)

    def expected_s(self, model: str, regions: tuple[str, ...] = ()) -> int | None:
        """Whole seconds until a model that sleeps could serve. None if it serves now, and if no machine can tell."""
        if self.serves(model, regions):
            return None
        entries = [entry for entry in self._pool(model).entries if entry.machine.may_serve(regions)]
        waits_ms = [entry.expected_ms for entry in entries if entry.expected_ms is not None]
        return math.ceil(min(waits_ms) / 1000) if waits_ms else None

    def spare(self, model: str, limit: int) -> int:
        """How many more background sequences this model's replicas may get: each of them `limit` in all, while no live
        sequence waits there."""
        replicas = [entry.connection for entry in self._pool(model).serving if entry.connection is not None]
        idle = [replica for replica in replicas if not (replica.load and replica.load.waiting)]
        return sum(max(0, limit - replica.background) for replica in idle)

    def set_batch_demand(self, model: str, requests: int, weight: float, regions: tuple[str, ...] = ()) -> None:
        """Sets how many requests of batches wait for a model that sleeps where they may be served: machines hear of
        them while no live request waits for it."""
        self._wake_queue.set_batches(AwaitedModel(model, regions), requests, weight)

    def drain(self, name: str, *, drained: bool) -> MachineView | None:
        """Tells the machine of this name, or at this address, to take nothing more, or to take work again. Returns what
        is known of it; None: there is no connection to such a machine."""
        for machine in self._machines.values():
            if name in (machine.name, machine.address) and machine.connection is not None:
                machine.connection.send(frames.DrainMachine(drained))
                return self._machine_view(machine.address)
        return None

    # Choosing

    async def acquire(
        self, model: str, scope: bytes, tokens: bytes, deadline: float, session: bytes = b"", *, weight: float = 1.0,
        background: bool = False, began_as: str | None = None, shared: tuple[int, bytes, int] | None = None,
        regions: tuple[str, ...] = (), movable: int = 0, besides: object = None,
    ) -> ReplicaClient:  # fmt: skip
        """A replica for this prompt (packed u32), waiting until the loop's clock shows `deadline` at the latest.

        All calls of a scope's session get the same replica, while it lives and has no more than its share of the load.
        Background sequences are no load for live calls. A call in the background never waits for a model: that would
        wake it. Waiting calls of more `weight` go on first. What another replica of the model `began_as` began goes on
        at one of the same, over another connection than `besides`. Replicas that have more of its prefix, as it is
        `shared` in a scope of this kind, id and epoch, go first. Where there are `regions`, nobody else's replicas and
        machines are chosen or woken. Another one may compute the prompt of `movable` completions. Costs the same with
        any number of replicas. Raises NoReplicaAvailable.
        """
        began_s, waited = time.monotonic(), False
        late = background or asyncio.get_running_loop().time() >= deadline
        pool, wanted = self._pool(model), AwaitedModel(model, regions)
        while not (ring := self._able(pool, began_as, regions, besides)):
            if late or self._hopeless(wanted):
                if waited:
                    self._on_waited(model, time.monotonic() - began_s)
                raise self._unavailable(wanted)
            waited = True
            try:
                await self._wake_queue.wait(wanted, weight, deadline)
            except TimeoutError:
                late = True
            pool = self._pool(model)
        load = _background_load if background else _load
        view = pool.within(regions)
        held = [] if began_as or shared is None else pool.holders(shared, tokens, regions)
        answering = [] if session else [each for each in held if pool.entries[each[0]][0] is Standing.SERVING]
        chosen = route.pick(ring, load, scope, tokens, session, answering, _capacity).connection
        assert chosen is not None, "who has no connection is in no ring"
        prefill = pool.prefill.site(view.prefillers, chosen, dict(held), tokens, movable) if movable else None
        asleep, waited_s = waited or not view.serving, time.monotonic() - began_s if waited else 0.0
        return ReplicaClient(chosen, waited_s, began_s if asleep else None, prefill)

    def _pool(self, model: str) -> ModelPool:
        return self._pools.get(model) or ModelPool()

    def _able(
        self, pool: ModelPool, began_as: str | None, regions: tuple[str, ...], besides: object
    ) -> ReplicaRing[ReplicaEntry]:
        """The replicas that can run a call. Raises NoReplicaAvailable where none of several can go on with it."""
        able = pool.within(regions).able
        if began_as is None or (not able and besides is None):
            return able
        ring = pool.able_as(began_as, regions, besides)
        if not ring:
            raise NoReplicaAvailable("its replicas have other weights, or are too old to go on with a stream", False)
        return ring

    def _unreachable(self, wanted: AwaitedModel) -> list[str]:
        """Machines without a connection that may have the model: they had it, or never sent a report."""
        return [
            address
            for address in self.links.addresses
            if address not in self.links.connections
            and (
                (machine := self._machines.get(address)) is None
                or any(entry.state.model == wanted.model for entry in machine.replicas.values())
            )
            and (machine is None or machine.may_serve(wanted.regions))
        ]

    def _within(self, wanted: AwaitedModel) -> list[ReplicaEntry]:
        return [entry for entry in self._pool(wanted.model).entries if entry.machine.may_serve(wanted.regions)]

    def _hopeless(self, wanted: AwaitedModel) -> bool:
        """Whether all machines report that it cannot be served there. One that comes back may report otherwise."""
        known = bool(self._pool(wanted.model).entries)
        return known and all(entry.hopeless for entry in self._within(wanted)) and not self._unreachable(wanted)

    def _unavailable(self, wanted: AwaitedModel) -> NoReplicaAvailable:
        model, entries = wanted.model, self._within(wanted)
        if not entries and self._pool(model).entries:
            where = ", ".join(wanted.regions)
            return NoReplicaAvailable(f"no machine in {where} has {model}", False, RETRY_LATER_S, True)
        if not entries:
            reason = "; ".join(self.links.problems.values()) or "no machine serves it"
            return NoReplicaAvailable(f"nothing serves {model} now: {reason}", False, RETRY_LATER_S)
        reason = self._unavailable_reason(wanted)
        if self._hopeless(wanted):
            pauses_ms = [entry.state.ready_ms for entry in entries if entry.state.ready_ms > 0]
            retry_after_s = math.ceil(min(pauses_ms) / 1000) if pauses_ms else RETRY_LATER_S
            return NoReplicaAvailable(f"{model} cannot be served: {reason}", False, retry_after_s)
        return NoReplicaAvailable(f"{model} is not ready: {reason}", True, self.expected_s(*wanted) or RETRY_SOON_S)

    def _unavailable_reason(self, wanted: AwaitedModel) -> str:
        """What its connected machines report, and which machines have no connection."""
        unreachable = self._unreachable(wanted)
        problems = {
            entry.why_not or entry.problem or ("asleep" if entry.at_rest else "loading")
            for entry in self._within(wanted)
            if entry.machine.address not in unreachable
        }
        return "; ".join(sorted(problems.union(self.links.problems.get(address, "loading") for address in unreachable)))

    def _send_demand(self, wanted: AwaitedModel) -> None:
        """Tells the machines that should wake the model, and those that are not to any more."""
        targets, model = self._wake_targets, wanted.model
        told = targets.told(model)
        targets.choose(self._wake_queue.demand(wanted), self._machines, time.monotonic(), wanted.regions)
        for machine in dict.fromkeys([*targets.told(model), *told]):
            if machine.connection is not None:
                machine.connection.send_demand(targets.demand_at(machine, model))

    # What changes

    def _open_connection(self, entry: ReplicaEntry) -> ReplicaConnection:
        on_waited = partial(self._on_waited, entry.state.model)
        return ReplicaConnection(entry.state.address, partial(self._on_change, entry), self.counters, on_waited)

    def _on_change(self, entry: ReplicaEntry) -> None:
        """Takes in that a replica can serve, or cannot any more. Calls that wait go on; those that it has, where it is
        to leave and another one serves, go on there."""
        model = entry.state.model
        if entry.machine.replicas.get(entry.state.address) is not entry:
            return  # its machine reports it no more
        if entry.connection is not None:
            self.epochs.connected(entry.connection)
        self._pools.setdefault(model, ModelPool(self.route_key, self.counters.prefills[model])).place(entry)
        if entry.evacuated:
            self._evacuated[entry] = None
        else:
            self._evacuated.pop(entry, None)
        for other in [other for other in self._evacuated if other.state.model == model]:
            self._evacuate(other)
        self._release(model)

    def _release(self, model: str) -> None:
        """Lets calls go on that need not wait, or wait in vain."""
        for wanted in self._wake_queue.wanted:
            if wanted.model == model and (self._pool(model).within(wanted.regions).able or self._hopeless(wanted)):
                self._wake_queue.release(wanted)

    def _evacuate(self, entry: ReplicaEntry) -> None:
        """Lets the calls of a replica that is to leave go on elsewhere in their regions: once another one that serves
        can; at once where one only could, and this one's machine takes nothing more. Else they end there, but for
        those that it has not begun with."""
        connection, pool = entry.connection, self._pool(entry.state.model)
        if connection is None:
            return
        for regions in connection.regions:
            able = pool.within(regions).able
            beside = any(
                other is not entry and other.connection is not None and other.connection.resumes for other in able
            )
            drained = entry.machine.report.draining and not beside
            wakes = drained and any(
                other.machine is not entry.machine and not other.hopeless and other.machine.may_serve(regions)
                for other in pool.entries
            )
            if beside:
                others = [other.connection for other in pool.within(regions).serving if other.connection is not None]
                connection.hand_over(others, regions)
                connection.want_successors(regions)
            if beside or wakes or not (entry.present or entry.coming):
                connection.release(regions, started=wakes)

    def _on_report(self, address: str, connection: MachineConnection, report: frames.MachineState) -> None:
        """Replaces a machine's last report. Connections stay: they end by themselves when a replica does."""
        if (host := parse_tls_address(address)) is not None:
            reached = [structs.replace(state, address=host.beside(state.address)) for state in report.replicas]
            report = structs.replace(report, replicas=reached)
        fresh = MachineEntry(address, self.links.connections, frames.MachineState("", []))
        machine = self._machines.setdefault(address, fresh)
        before, machine.report, machine.region = machine.report, report, connection.region_of(report.region)
        machine.lost_s, machine.fresh_s = self.links.lost_s[address], 0.0
        if report.region not in (machine.region, before.region):
            fields = {"machine": report.machine, "region": report.region}
            log.error("machine_in_another_region_than_certified", extra={"fields": fields})
        states = {state.address: state for state in report.replicas}
        for replica in [replica for replica in machine.replicas if replica not in states]:
            self._forget(machine.replicas[replica])
        for replica, state in states.items():
            known = machine.replicas.get(replica)
            self.moves.saw(address, machine.name, known.state if known else None, state)
            if known is not None and known.state.model != state.model:
                self._forget(known)
                known = None
            hopeless = known is not None and known.hopeless
            entry = machine.replicas.setdefault(replica, ReplicaEntry(machine, state))
            entry.state = state
            if entry.hopeless and not hopeless:  # operators learn why its calls are refused, callers only that they are
                fields = {"machine": report.machine, "model": state.model, "problem": entry.why_not}
                log.error("replica_cannot_serve", extra={"fields": {**fields, "quarantined": state.quarantined}})
            entry.changed.set()
            self._replica_links.keep(entry)
            self._on_change(entry)
        reported = {state.model for state in report.replicas}
        for wanted in self._wake_queue.wanted:
            if wanted.model in reported and (
                not connection.asked or machine not in self._wake_targets.told(wanted.model)
            ):
                self._send_demand(wanted)

    def _on_gone(self, address: str) -> None:
        """A machine is none of the cluster's any more: its replicas' connections end."""
        if (machine := self._machines.pop(address, None)) is not None:
            for entry in [*machine.replicas.values()]:
                self._forget(entry)

    def _forget(self, entry: ReplicaEntry) -> None:
        """Its machine reports it no more."""
        del entry.machine.replicas[entry.state.address]
        self._evacuated.pop(entry, None)
        self._pools[entry.state.model].remove(entry)
        if not self._pools[entry.state.model].entries:
            del self._pools[entry.state.model]
        self.moves.gone(entry.machine.address, entry.state)
        self.counters.remove(entry.state.address)
        if entry.task is not None:
            entry.task.cancel()
        self._release(entry.state.model)


def _load(entry: ReplicaEntry) -> int:
    return entry.connection.expected if entry.connection is not None else 0


def _background_load(entry: ReplicaEntry) -> int:
    return entry.connection.expected + entry.connection.background if entry.connection is not None else 0


def _capacity(entry: ReplicaEntry) -> int:
    return entry.connection.max_sequences if entry.connection is not None else 0
