"""Keeps the connections to replicas, and notices those and machines that have gone silent. It chooses nothing.

A machine that was lost LOSSES times within FLAP_S gets calls only where no other serves, until that is FLAP_S ago: what
comes and goes would else take calls each time, and make them begin again elsewhere.

A machine says something twice a second, and speaks so for its replicas, which are quiet while nothing is new. Where it
has not for LATE_S, they are asked. Where neither it nor a replica of it has said anything for QUIET_S, no new call goes
there, and other replicas begin with those that it has; after LOST_S both are given up. A replica that speaks is never
given up, and one that does not is its machine's to judge, which sees whether it computes. A gateway that itself stood
still judges nobody by that time.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from engine.process.supervised import Backoff
from engine.protocol.types import Residency
from gateway.cluster.client import ReplicaConnection
from gateway.cluster.connection import UNREACHABLE, Connector, error_text
from gateway.cluster.machine_links import BACKOFF_S, LOSSES, jittered
from gateway.cluster.replica_entry import MachineEntry, ReplicaEntry

WATCH_S: Final = 0.2
LATE_S: Final = 0.75
QUIET_S: Final = 1.25  # of silence, which is looked at each WATCH_S: 1.5 s at most
LOST_S: Final = 2.5  # so: 3 s at most, also where this process is late
FROZEN_S: Final = 1.0  # a look that late tells that this process stood still
FLAP_S: Final = 30.0
CAUSE_S: Final = 1.0  # a machine that lives so long after a replica's end has lost only that


log = logging.getLogger(__name__)


class ReplicaLinks:
    """`machines` are those that have reported; `on_change` gets each replica of which the connection, or what is known
    by it, has changed; `open_connection` makes one, which `connect` connects."""

    def __init__(
        self,
        machines: Mapping[str, MachineEntry],
        connect: Connector,
        on_change: Callable[[ReplicaEntry], None],
        open_connection: Callable[[ReplicaEntry], ReplicaConnection],
    ) -> None:
        self._machines = machines
        self._connect = connect
        self._on_change = on_change
        self._open_connection = open_connection
        self._group = asyncio.TaskGroup()
        self._looked_s = self._forgiven_s = time.monotonic()

    async def run(self) -> None:
        """Until cancelled."""
        async with self._group:
            while True:
                self.look(time.monotonic())
                await asyncio.sleep(WATCH_S)

    def keep(self, entry: ReplicaEntry) -> None:
        """Keeps the connection to a replica from now on, once its process is about to start."""
        if entry.task is None and entry.reachable:
            entry.task = self._group.create_task(self._keep_replica(entry))

    def look(self, now: float) -> None:
        """Notices who has gone silent."""
        if now - self._looked_s > FROZEN_S:
            self._forgiven_s = now
        self._looked_s = now
        for machine in self._machines.values():
            if now < machine.fresh_s:
                continue  # of thousands, most looks end here
            if (connection := machine.connection) is not None:
                machine.heard_s = connection.received_s
            unsteady = len(machine.lost_s) == LOSSES and now - machine.lost_s[0] < FLAP_S
            if unsteady is not machine.unsteady:
                self._mark(machine, unsteady)
            heard_s = machine.heard_s if machine.heard_s > self._forgiven_s else self._forgiven_s
            machine.fresh_s, silent_s = 0.0 if machine.lost_s else heard_s + LATE_S, now - heard_s
            if (silent_s > LATE_S or machine.silent) and machine.beats:
                self._judge(machine, silent_s, now)

    def _mark(self, machine: MachineEntry, unsteady: bool) -> None:
        machine.unsteady = unsteady
        log.warning("machine_flaps" if unsteady else "machine_steady", extra={"fields": {"machine": machine.name}})
        for entry in [*machine.replicas.values()]:
            self._on_change(entry)

    def _judge(self, machine: MachineEntry, silent_s: float, now: float) -> None:
        machine.silent = silent_s > QUIET_S
        for entry in machine.replicas.values():
            heard_s = 0.0 if entry.connection is None else entry.connection.received_s
            if entry.connection is not None and now - heard_s > LATE_S:
                entry.connection.poll()
            silent = machine.silent and now - max(heard_s, self._forgiven_s) > QUIET_S
            if silent is not entry.silent:
                entry.silent = silent
                self._on_change(entry)
                if silent and entry.connection is not None:
                    entry.connection.doubt()
        if silent_s > LOST_S:
            reason = f"nothing came from its machine for {silent_s:.1f} s"
            if machine.connection is not None:
                machine.connection.close(reason)
            for entry in machine.replicas.values():
                if entry.connection and now - max(entry.connection.received_s, self._forgiven_s) > LOST_S:
                    entry.connection.close(reason)

    async def _keep_replica(self, entry: ReplicaEntry) -> None:
        address = entry.state.address
        backoff = Backoff(*BACKOFF_S)
        while True:
            entry.changed.clear()
            if entry.reachable:
                try:
                    entry.connection = await self._connect(address, lambda: self._open_connection(entry))
                except UNREACHABLE as error:
                    entry.problem = f"the replica at {address} cannot be reached: {error_text(error)}"
                else:
                    entry.problem = ""
                    lost = entry.connection
                    if await self._use_until_closed(entry, lost):
                        backoff.reset()
                    self._group.create_task(self._tell_cause(entry, lost))
            wait_s = BACKOFF_S[0] if entry.starting else jittered(backoff.fail()) if entry.reachable else None
            with contextlib.suppress(TimeoutError):  # a machine's new report ends the wait at once
                async with asyncio.timeout(wait_s):
                    await entry.changed.wait()

    async def _use_until_closed(self, entry: ReplicaEntry, connection: ReplicaConnection) -> bool:
        """Waits until the connection ends; returns whether anything could be submitted on it."""
        self._on_change(entry)  # its hello may have come with the connection
        try:
            await connection.wait_closed()
        except asyncio.CancelledError:  # its machine reports it no more: it was to end
            connection.crashed.set_result(False)
            raise
        finally:
            entry.connection = None
            entry.problem = f"the replica at {connection.address} was lost: {connection.close_reason}"
            self._on_change(entry)
        return connection.hello is not None

    async def _tell_cause(self, entry: ReplicaEntry, lost: ReplicaConnection) -> None:
        """Tells the calls of a lost replica whether it died by itself: it was not to end, and its machine lives on."""
        machine = entry.machine.connection
        crashed = machine is not None and not lost.draining and entry.state.toward is not Residency.DISK
        if machine is not None and crashed:
            heard_s = machine.received_s
            await asyncio.wait([machine.closed], timeout=CAUSE_S)
            crashed = not machine.closed.done() and (machine.received_s > heard_s or not entry.machine.beats)
        lost.crashed.set_result(crashed)
