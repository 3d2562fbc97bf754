"""The connections to all machines that there are: opened as machines come, again and again while one does not answer,
and ended as machines go. It knows no replicas."""

import asyncio
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Final

from engine.process.supervised import Backoff
from engine.protocol import frames
from gateway.cluster.connection import UNREACHABLE, Connector, MachineConnection, error_text
from gateway.members.protocol import Membership

BACKOFF_S: Final = (0.05, 2.0)
STEADY_S: Final = 1.0  # a connection that ends sooner is as one that was not made: the next one waits longer
LOSSES: Final = 3  # of one machine that are remembered, and that make it unsteady

OnReport = Callable[[str, MachineConnection, frames.MachineState], None]


class MachineLinks:
    """`connections` are the open ones by address, `problems` say of the others why not, and `lost_s` when a machine's
    were lost, the last few times. `on_report` gets what machines
    report; `on_gone` the address of a machine that is none of the cluster's any more."""

    def __init__(self, connect: Connector, on_report: OnReport, on_gone: Callable[[str], None]) -> None:
        self.connections: dict[str, MachineConnection] = {}
        self.problems: dict[str, str] = {}
        self.lost_s: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=LOSSES))
        self._connect = connect
        self._on_report = on_report
        self._on_gone = on_gone
        self._told: dict[object, frozenset[str]] = {}
        self._kept: dict[str, asyncio.Task[None] | None] = {}
        self._group: asyncio.TaskGroup | None = None

    @property
    def addresses(self) -> list[str]:
        """All machines, in the order in which they came."""
        return list(self._kept)

    async def run(self) -> None:
        """Keeps the connections until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._keep(list(self._kept))
            await asyncio.get_running_loop().create_future()

    def cut(self, removed: frozenset[str]) -> None:
        """Ends the connections of machines that an operator removed, at whatever address."""
        names = {address.partition("@")[0] for address in removed}
        for address in list(self._kept):
            if address.partition("@")[0] in names:
                self._drop(address)

    def follow(self, source: object, membership: Membership) -> None:
        """Takes what one source says of its machines; there are those of all sources. One that was removed is cut at
        once; one that is only gone is kept for as long as it answers. What is no address is a machine that cannot be
        reached, and stops nothing else."""
        self._told[source] = membership.machines
        wanted: frozenset[str] = frozenset().union(*self._told.values())
        self.cut(membership.removed)
        for address in self._kept.keys() - wanted - self.connections.keys():
            self._drop(address)
        self._keep(sorted(wanted))

    def _keep(self, addresses: Iterable[str]) -> None:
        for address in addresses:
            if self._group is None:
                self._kept.setdefault(address, None)
            elif self._kept.get(address) is None:
                self._kept[address] = self._group.create_task(self._keep_machine(address))

    def _drop(self, address: str) -> None:
        """Forgets a machine, and ends its connection."""
        task = self._kept.pop(address)
        if task is not None:
            task.cancel()
        self.connections.pop(address, None)
        self.problems.pop(address, None)
        self.lost_s.pop(address, None)
        self._on_gone(address)

    def _wanted(self, address: str) -> bool:
        return any(address in machines for machines in self._told.values())

    async def _keep_machine(self, address: str) -> None:
        def on_report(machine: MachineConnection, report: frames.MachineState) -> None:
            if address not in self._kept:
                return  # it was dropped while this was on its way
            self.connections[address] = machine
            self._on_report(address, machine, report)

        backoff = Backoff(*BACKOFF_S)
        while True:
            try:
                machine = await self._connect(address, lambda: MachineConnection(on_report))
            except UNREACHABLE as error:
                self.problems[address] = f"the machine at {address} cannot be reached: {error_text(error)}"
            else:
                self.problems.pop(address, None)
                opened_s = time.monotonic()
                await machine.wait_closed()
                self.connections.pop(address, None)
                self.problems[address] = f"the machine at {address} was lost: {machine.close_reason}"
                self.lost_s[address].append(time.monotonic())
                if time.monotonic() - opened_s >= STEADY_S:
                    backoff.reset()
            if not self._wanted(address):
                self._kept[address] = None
                self._drop(address)
                return
            await asyncio.sleep(jittered(backoff.fail()))


def jittered(pause_s: float) -> float:
    """Part of the pause by chance, so that gateways do not all come back at once."""
    return pause_s * random.uniform(0.5, 1.0)
