"""The loop of a replica: polls its sockets, lets the scheduler choose, launches, commits, reports. One thread runs it,
beside those that compile grammars.

It never waits for a peer: a connection that does not read is dropped, one that sends rubbish is closed, and one that
ends takes its sequences with it. It knows nothing of kernels, shapes, tenants or HTTP, and logs no prompts.
"""

import math
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from engine.log import log
from engine.memory import scrub
from engine.process import allocator
from engine.process.heartbeat import Heartbeat, ReplicaPhase
from engine.protocol.cache_frames import HandOver, HeldPrefixes, RaiseEpochs, RouteKey
from engine.protocol.connection import PeerChannel
from engine.protocol.frames import (
    Cancel,
    Frame,
    FrameError,
    PlacementStatus,
    PollLoad,
    Reject,
    ReplicaLoad,
    SetPlacement,
    Submit,
    encode_frame,
)
from engine.protocol.specs import ReplicaSpec
from engine.protocol.types import PrefixTier, RejectReason, Residency
from engine.replica.grammars import compile_grammar
from engine.replica.served_model import open_served_model
from engine.sequences.validation import SubmitRejected
from engine.step.executor import LoadedModel
from engine.structured_output.manager import StructuredOutputManager

if TYPE_CHECKING:
    from engine.replica.tracing import ReplicaTracer

_TICK_S: Final = 0.5
_OVERWRITE_S: Final = 1.0  # at most so often
# Kernels for each count of rows, half a megabyte each, come and go between what stays: the heap is left with holes.
_TRIM_S: Final = 60.0
_FAILURES_MAX: Final = 2  # in a row; then the process ends and its machine starts another
_BELL_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """Limits of a replica that no spec sets."""

    connections: int = 256
    received_bytes: int = 4 << 20  # taken from one connection between two steps
    unsent_bytes: int = 4 << 20  # a connection with more than this to read is dropped
    drain_s: float = 25.0  # for what runs or waits when the process is told to end
    flush_s: float = 1.0  # for the last frames


class Replica:
    """Serves a model. `drain` may be called at any time, also from a signal handler; `run` returns the exit status."""

    def __init__(
        self, spec: ReplicaSpec, model: LoadedModel, grammars: StructuredOutputManager, heartbeat: Heartbeat,
        listener: socket.socket, bounds: ReplicaLimits, orphaned: Callable[[], bool], clock: Callable[[], float],
    ) -> None:  # fmt: skip
        """The caller closes the model."""
        served = open_served_model(model, spec, grammars, clock)
        self._rank_loads = model.rank_loads
        self._executor = model.executor
        self._grammars = grammars
        self._heartbeat = heartbeat
        self._listener = listener
        self._bounds = bounds
        self._orphaned = orphaned
        self._clock = clock
        self._validator = served.validator
        self._scheduler = served.scheduler
        self._images = served.images
        self._loop = served.loop
        self._sleep = served.sleep
        self._tier = model.tier
        self._files = None if model.tier is None else model.tier.files
        self._handovers = served.handovers
        self._placing: set[int] = set()  # the connections that sent a SetPlacement
        self._named: set[int] = set()  # those that sent a RouteKey
        self._placed: PlacementStatus | None = None  # to be reported to them
        self._reports = served.reports
        self._sweeping = False
        self._resting = True  # the last turn found nothing to do, though something may wait for its grammar
        self._hello = served.hello
        self._region = spec.region
        self._tracer = _open_tracer(spec)
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, PeerChannel] = {}
        self._connected = 0
        self._tick_at = clock()
        self._overwrite_at = clock()
        self._trim_at = clock() + _TRIM_S if model.report.device == "cpu" else math.inf
        self._drain_wanted = False
        self._drain_until: float | None = None

    def drain(self) -> None:
        """Refuses new work from the next turn on, and ends `run` when the old is done or out of time."""
        self._drain_wanted = True

    def run(self) -> int:
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        for bell in [each.bell for each in (self._grammars, self._handovers, self._images) if each is not None]:
            self._selector.register(bell, selectors.EVENT_READ, partial(bell.recv, _BELL_BYTES))
        if self._files is not None:
            self._selector.register(self._files, selectors.EVENT_READ, lambda: None)  # a sweep takes what is done
        try:
            while self._loop.failures < _FAILURES_MAX and not self._drained() and not self._orphaned():
                self._poll()
                self._step()
                self._report()
            self._leave()
            return int(self._loop.failures >= _FAILURES_MAX)
        finally:
            self._handovers.close()
            for connection in list(self._connections.values()):
                connection.lose("the replica ends")
            self._selector.close()
            if self._images is not None:
                self._images.close()
            if self._tracer is not None:
                self._heartbeat.enter(ReplicaPhase.STOPPING)
                self._tracer.close()

    # One turn

    def _poll(self) -> None:
        """Takes what the sockets have; waits for them only when there is nothing to compute."""
        wait_s = 0.0
        if self._loop.idle or self._resting:
            self._heartbeat.enter(ReplicaPhase.IDLE)
            if not (self._sleep.settled and self._executor.warm_up()) and not self._sweeping:
                until = min(self._tick_at, self._handovers.departures.resumes_s)
                wait_s = self._sleep.pause_s(max(0.0, until - self._clock()))
        for key, _ in self._selector.select(wait_s):
            key.data()
        if self._drain_wanted and self._drain_until is None:
            self._drain_until = self._clock() + self._bounds.drain_s
            self._tick_at = self._clock()
            self._sleep.stay()
            log("draining", running_for_at_most_s=self._bounds.drain_s)

    def _step(self) -> None:
        """Carries out placements first: what waits for a wake is launched at once."""
        self._placed = self._sleep.step(self._resting or self._loop.idle)
        if not self._loop.idle:
            self._heartbeat.enter(ReplicaPhase.STEP)
            self._resting = not self._loop.turn()
        for number, failed in self._handovers.departures.turn():
            if number in self._connections:
                self._connections[number].send(failed)
        self._handovers.release_ended()
        self._sweeping = self._loop.sweep()
        now = self._clock()
        if now >= self._overwrite_at and self._scheduler.intake.waiting.take_secret_ended():
            self._overwrite_at = now + _OVERWRITE_S
            scrub.overwrite_freed_objects()

    def _report(self) -> None:
        """Sends each connection its outputs, rejects, and how a placement ended; and the load to whoever places it and
        to those whose sequences came or went, and to all when half a second is over."""
        changed = self._reports.take_polled()
        for owner, outputs in self._scheduler.intake.take_outputs().items():
            if outputs.started or outputs.finished:
                changed |= {owner, *self._placing}
            if self._tracer is not None:
                self._tracer.observe(owner, outputs)
            if owner in self._connections:
                self._connections[owner].send(outputs)
        for sequence, reject in self._scheduler.intake.waiting.take_rejects():
            if self._tracer is not None:
                self._tracer.rejected(sequence.owner, sequence.first_id, sequence.choices)
            if sequence.owner in self._connections:
                self._connections[sequence.owner].send(reject)
        placed, self._placed = self._placed, None
        if placed is not None:
            changed |= self._placing
            for number in list(self._placing):
                self._connections[number].send(placed)
        now = self._clock()
        if now >= self._tick_at:
            self._tick_at = now + _TICK_S
            self._handovers.sweep()
            if now >= self._trim_at:
                self._trim_at = now + _TRIM_S
                allocator.trim_heap()
            changed.update(self._connections)
            if self._named and self._scheduler.kv is not None:
                self._send_held(self._named, self._scheduler.kv.published.take_changed())
        if changed:
            load = encode_frame(self._load())
            idle = self._scheduler.intake.idle
            for number in self._reports.choose(changed.intersection(self._connections), load, idle=idle):
                self._connections[number].send_encoded(load)

    def _drained(self) -> bool:
        """Whether the drain is over. What waits while the model sleeps ends at once: nothing is going to wake it."""
        if self._drain_until is None:
            return False
        asleep = self._sleep.residency == Residency.MEMORY
        return asleep or self._scheduler.intake.idle or self._clock() >= self._drain_until

    # Connections

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError as error:  # the peer has left already, or we are out of file descriptors
            log("accept_failed", level="warning", error=str(error))
            return
        if len(self._connections) >= self._bounds.connections:
            log("connection_refused", connections=len(self._connections))
            peer.close()
            return
        self._connected += 1
        number = self._connected
        connection = PeerChannel(
            self._selector, peer, self._bounds.received_bytes, self._bounds.unsent_bytes,
            partial(self._on_frame, number), partial(self._on_disconnect, number),
        )  # fmt: skip
        self._connections[number] = connection
        log("connected", connection=number)
        connection.send(self._hello)
        connection.send(self._load())

    def _on_frame(self, number: int, frame: Frame) -> None:
        self._reports.hear(number)
        if isinstance(frame, Cancel):
            self._scheduler.intake.cancel(number, frame.ids)
        elif isinstance(frame, SetPlacement):
            self._place(number, frame)
        elif isinstance(frame, HandOver):
            self._handovers.departures.begin(number, frame)
        elif isinstance(frame, RouteKey) and self._scheduler.kv is not None:
            self._named.add(number)
            self._send_held({number}, self._scheduler.kv.published.use_key(frame.key))
        elif isinstance(frame, PollLoad):
            self._reports.poll(number)
        elif isinstance(frame, RaiseEpochs):
            self._raise_epochs(dict(zip(frame.ids, frame.epochs, strict=False)))
        elif not isinstance(frame, Submit):
            raise FrameError(f"a {type(frame).__name__} is not for a replica")
        elif self._drain_wanted:
            self._connections[number].send(Reject(frame.id, RejectReason.DRAINING, "the replica is shutting down"))
        else:
            self._submit(number, frame)

    def _submit(self, number: int, submit: Submit) -> None:
        try:
            if submit.regions and self._region not in submit.regions:
                where = ", ".join(submit.regions)
                message = f"this host is in {self._region or 'no region'}, and the request is for {where} alone"
                raise SubmitRejected(RejectReason.REGION, message)
            sequences = self._validator.sequences(submit, number, self._clock())
            compile_grammar(self._grammars, submit, sequences)
            self._scheduler.intake.add(sequences)
            self._handovers.claim(submit, sequences)
        except SubmitRejected as rejected:
            reject = Reject(submit.id, rejected.reason, rejected.message, rejected.retry_after_ms)
            self._connections[number].send(reject)
            return
        if self._tracer is not None:
            self._tracer.accepted(number, submit)

    def _place(self, number: int, target: SetPlacement) -> None:
        """Answers the first order of a connection at once, and each order where it ends. A first one that asks for
        nothing is not answered twice: the machine would take that for the end of what it ordered meanwhile."""
        if target.residency == Residency.DISK:
            raise FrameError("a replica is ended, not sent to disk")
        if number not in self._placing:
            self._placing.add(number)
            self._connections[number].send(self._sleep.status())
            if self._sleep.obeyed(target):
                return
        if not self._drain_wanted:
            self._sleep.order(target)

    def _send_held(self, numbers: set[int], held: dict[bytes, PrefixTier]) -> None:
        """Tells these connections where prefixes are."""
        for number in numbers.intersection(self._connections) if held else ():
            self._connections[number].send(HeldPrefixes(b"".join(held), bytes(held.values())))

    def _raise_epochs(self, epochs: dict[bytes, int]) -> None:
        """Wipes what may be found no more; the sweeps that follow erase it."""
        kv = self._scheduler.kv
        if kv is not None:
            kv.tree.raise_epochs(epochs)
        if kv is not None and kv.host is not None:
            kv.host.raise_epochs(epochs)
        self._handovers.raise_epochs(epochs)

    def _on_disconnect(self, number: int, reason: str) -> None:
        """Ends everything that runs for the connection."""
        del self._connections[number]
        self._placing.discard(number)
        self._named.discard(number)
        self._reports.drop(number)
        self._scheduler.intake.drop(number)
        if self._tracer is not None:
            self._tracer.dropped(number)
        log("disconnected", connection=number, reason=reason)

    def _leave(self) -> None:
        """Says to all that it goes. What still runs or waits is for gateways to take elsewhere: it does not end, its
        connection does."""
        self._drain_until = self._tick_at = self._clock()
        self._report()
        self._flush()

    def _flush(self) -> None:
        """Gives the peers a last moment to read what was sent; nobody new may come, and nothing new begins."""
        self._drain_wanted = True
        self._selector.unregister(self._listener)
        until = self._clock() + self._bounds.flush_s
        while self._clock() < until and any(connection.unsent for connection in self._connections.values()):
            for key, _ in self._selector.select(until - self._clock()):
                key.data()

    def _load(self) -> ReplicaLoad:
        load = self._scheduler.load(draining=self._drain_until is not None)
        counters = {**load.counters, **self._handovers.load_counters()}
        prefill = self._handovers.departures.prefill_load()
        load = msgspec.structs.replace(load, counters=counters, ranks=self._rank_loads(), prefill=prefill)
        kv = self._scheduler.kv
        if kv is None or kv.host is None or self._tier is None:
            return load
        in_host, on_disk = kv.host.loads(self._tier)
        return msgspec.structs.replace(load, host_tier=in_host, disk_tier=on_disk)


def _open_tracer(spec: ReplicaSpec) -> "ReplicaTracer | None":
    if spec.telemetry is None:
        return None
    from engine.replica.tracing import open_tracer  # only here: a replica that is not traced needs no opentelemetry

    return open_tracer(spec)
