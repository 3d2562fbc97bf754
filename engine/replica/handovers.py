"""What a replica's loop does for sequences that move, between two steps: some depart, and what was received for those
that come is found. It knows no sockets of gateways and no steps.
"""

import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from engine.handover.receiver import BlockFormat, HandoverReceiver
from engine.handover.staging import StagedPrefix, StagingArea
from engine.log import log
from engine.protocol.address import HANDOVER_SOCKET
from engine.protocol.connection import listen, remove_socket
from engine.protocol.frames import Submit
from engine.protocol.specs import ReplicaSpec
from engine.protocol.types import Scope
from engine.replica.departures import Departures
from engine.scheduling.intake import Intake
from engine.sequences.sequence import Sequence, SequenceState
from engine.sequences.validation import RequestValidator
from engine.step.executor import LoadedModel
from prefixcache.namespace import Namespace
from prefixcache.tree import EPOCHS_MAX


def handover_address(address: str) -> str:
    """Where a replica at this address takes in handovers: a socket beside its own. Empty for one that has no folder."""
    if not address.startswith("unix:"):
        return ""
    return f"{address.removesuffix('.sock')}{HANDOVER_SOCKET}.sock"


@dataclass
class Handovers:
    """The handovers of one replica, in and out. `bell` is readable whenever a thread has news.

    address      where others push to; empty: nothing moves here.
    fabric       the one that this host declares; empty: none.
    departures   the sequences that move away.
    """

    model: LoadedModel
    format: BlockFormat
    area: StagingArea
    intake: Intake
    unshared: Namespace  # of sequences that share with nobody: their keys are theirs alone
    address: str
    fabric: str = ""

    def __post_init__(self) -> None:
        self.departures = Departures(
            self.model.exchange, self.format, self.intake, self.unshared, self.address, on_news=self._ring,
            fabric_name=self.fabric,
        )  # fmt: skip
        self._epochs: dict[bytes, int] = {}
        self._claimed: list[tuple[Sequence, StagedPrefix]] = []
        self._resources = ExitStack()
        self.bell, self._clapper = socket.socketpair()
        for end in (self.bell, self._clapper):
            end.setblocking(False)
            self._resources.callback(end.close)
        if self.address:
            receiver = HandoverReceiver(
                listen(self.address), self.area, self.format, on_sealed=self._ring, fabric=self.departures.fabric
            )
            self._resources.callback(remove_socket, self.address)
            self._resources.callback(receiver.close)

    # From gateways

    def claim(self, submit: Submit, sequences: list[Sequence]) -> None:
        """Finds what was handed over of these sequences, which wait for their turn."""
        for given, sequence in zip(submit.given, sequences, strict=False):
            if given.handover and self.address:
                namespace = sequence.namespace or self.unshared
                sequence.staged = self.area.claim(given.handover, namespace, sequence.tokens)
                if sequence.staged is not None:
                    self._claimed.append((sequence, sequence.staged))

    def raise_epochs(self, epochs: dict[bytes, int]) -> None:
        """Lets go of what waits here, where one of these accounts or scopes had a lower epoch, or none that is
        known."""
        if any(epoch > self._epochs.get(id, 0) for id, epoch in epochs.items()):
            self.area.purge()
            self.sweep()
        if len(self._epochs) + len(epochs) > EPOCHS_MAX:
            self._epochs.clear()
        self._epochs |= epochs

    # Between steps

    def release_ended(self) -> None:
        """Releases what was claimed for sequences that ended before they started."""
        for sequence, staged in self._claimed:
            if sequence.state == SequenceState.ENDED:
                sequence.staged = None
                staged.release()
        self._claimed = [(sequence, staged) for sequence, staged in self._claimed if sequence.staged is not None]

    def sweep(self) -> None:
        """Lets go of what was not claimed in time."""
        for id in self.area.sweep():
            log("handover_lapsed", level="warning", id=id.hex())

    def leave_device(self) -> None:
        """Gives the device the memory back that handovers have there: the model sleeps."""
        self.area.release_windows()

    def load_counters(self) -> dict[str, int]:
        """What ReplicaLoad says of handovers: the counters of the staging area and of the departures, each as
        handover_…, which only grow; and how many are held now, on either side. And how long its steps took, steps_ms,
        and prompts in them, prompts_ms."""
        if not self.address:
            return {}
        held, costs = self.area.held + self.departures.held, self.intake.step_costs
        counts = {"held": held, **self.departures.counters, **self.area.counters}
        times = {"prompts_ms": int(costs.prompts_us / 1e3), "steps_ms": int(costs.steps_us / 1e3)}
        return {**times, **{f"handover_{name}": count for name, count in counts.items()}}

    def close(self) -> None:
        """Ends all handovers, and gives back what is held."""
        self.departures.close()
        self._resources.close()
        self.area.close()

    # Inside

    def _ring(self) -> None:
        """Wakes the loop; a bell that was not heard yet needs no second ring."""
        try:
            self._clapper.send(b"\0")
        except OSError:
            return


def open_handovers(
    model: LoadedModel, spec: ReplicaSpec, intake: Intake, validator: RequestValidator, clock: Callable[[], float]
) -> Handovers:
    """What a replica needs to hand over sequences, and to take them in where its spec gives that memory."""
    paged = model.paged
    exchange = model.exchange
    works = spec.model.handover_bytes and exchange is not None
    if spec.model.handover_bytes and exchange is None:
        log("handovers_unavailable", level="warning", model=spec.model.name, problem=_problem(model, spec))
    if works and model.devices > 1:
        log("handovers_by_host_memory", model=spec.model.name, reason="each GPU has a part of every block")
    format = BlockFormat(
        boot=str(spec.boot),
        model=spec.model.name,
        revision=model.revision,
        layout=validator.kv_layout,
        block_bytes=paged.layout.block_bytes * model.devices if paged is not None else 0,  # each has a part
        region=spec.region,
    )
    return Handovers(
        model=model,
        format=format,
        area=StagingArea(spec.model.handover_bytes, clock, windows=None if exchange is None else exchange.windows),
        intake=intake,
        unshared=validator.namespace(Scope()),
        address=handover_address(spec.address) if works else "",
        fabric=spec.fabric,
    )


def _problem(model: LoadedModel, spec: ReplicaSpec) -> str:
    """Why a model hands over no KV, and takes none in."""
    if spec.model.stages > 1:
        return f"stages = {spec.model.stages}: each has the KV of some layers, and calls move by their tokens alone"
    if not model.memories:
        return "it keeps no KV"
    return "its layers do not all see everything, and keep unlike blocks: calls move by their tokens alone"
