"""Machines and replicas as a gateway knows them: what was reported, the connections, and whether calls may go there. It
decides nothing, and awaits nothing."""

import asyncio
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from engine.protocol import frames
from engine.protocol.types import ReplicaRole, Residency
from gateway.cluster.client import ReplicaConnection
from gateway.cluster.connection import MachineConnection

LEAVING_MS: Final = 1000  # the estimate for a replica that leaves the device to be back


class Standing(enum.IntEnum):
    """Whether calls go to a replica; to one of a lower standing only where there is none of a higher one."""

    CLOSED = 0  # to none
    COMING = 1  # it moves toward the device: calls queue there
    LEAVING = 2  # it serves, and is to go, or its machine comes and goes
    PREFILLING = 3  # it serves, and is to compute prompts for others
    SERVING = 4


@dataclass(slots=True, eq=False)
class MachineEntry:
    """A machine that has reported. `connections` are the open ones of all machines, by address; it was `heard_s` last,
    so that it is not late before `fresh_s`. `silent`: it is to speak twice a second, and has not for a while. `region`
    is where it is by its last word and its certificate; empty where they differ, or it is too old to say. `lost_s` is
    when it was lost, the last few times; `unsteady`: too often of late."""

    address: str
    connections: Mapping[str, MachineConnection]
    report: frames.MachineState
    heard_s: float = 0.0
    fresh_s: float = 0.0
    silent: bool = False
    region: str = ""
    lost_s: Sequence[float] = ()
    unsteady: bool = False
    replicas: dict[str, "ReplicaEntry"] = field(default_factory=dict)

    @property
    def connection(self) -> MachineConnection | None:
        return self.connections.get(self.address)

    def may_serve(self, regions: tuple[str, ...]) -> bool:
        """Whether calls that have these regions may be served here; without any they may be anywhere."""
        return not regions or self.region in regions

    @property
    def name(self) -> str:
        """What it calls itself: the same to all gateways."""
        return self.report.machine or self.address

    @property
    def weight(self) -> float:
        """How much it can hold beside others."""
        return float(sum(device.budget_bytes for device in self.report.devices) or 1)

    @property
    def beats(self) -> bool:
        """Whether it says something twice a second."""
        return self.report.protocol >= 3

    @property
    def open(self) -> bool:
        """Whether it can be asked for more."""
        return self.connection is not None and not self.report.draining and not self.silent


@dataclass(slots=True, eq=False)
class ReplicaEntry:
    """A replica that a machine reported, and the task that keeps the connection to it. `differs`: other replicas of its
    model, the most, compute with something else. `silent`: neither it nor its machine has said anything for a while."""

    machine: MachineEntry
    state: frames.ReplicaState
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    connection: ReplicaConnection | None = None
    problem: str = ""
    differs: bool = False
    silent: bool = False

    @property
    def region(self) -> str:
        """Where it is; empty where that is not certain."""
        connection, region = self.connection, self.machine.region
        return region if connection is None or connection.hello is None or connection.region == region else ""

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
        """Whether waiting is in vain: it cannot run, or died so often that it is not started for a while, or its
        machine takes nothing."""
        return self.state.ready_ms < 0 or self.state.quarantined or self.machine.report.draining

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

    @property
    def model(self) -> str | None:
        """What it computes with; None while that is not known, or soon of no account."""
        return self.connection.model if self.connection is not None and self.ready else None

    @property
    def standing(self) -> Standing:
        """Whether calls go there now."""
        if not self.ready or self.differs or self.machine.report.draining or self.silent:
            return Standing.CLOSED
        if self.present:
            if self.state.leaving or self.machine.unsteady:
                return Standing.LEAVING
            return Standing.PREFILLING if self.state.role is ReplicaRole.PREFILL else Standing.SERVING
        return Standing.COMING if self.coming else Standing.CLOSED

    @property
    def evacuated(self) -> bool:
        """Whether its calls are to go on elsewhere, where that is possible."""
        leaves = not (self.present or self.coming) or self.machine.report.draining
        return self.connection is not None and (leaves or self.connection.draining)

    @property
    def why_not(self) -> str:
        """Why it does not serve, in words; empty where there is nothing to say."""
        if self.differs:
            return "its weights, tokenizer, template, KV layout or GPUs are not those of most replicas of its name"
        if self.machine.report.draining:
            return "its machine is drained"
        return self.state.problem or (self.problem if self.reachable else "")
