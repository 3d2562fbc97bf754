"""The loop of a replica: polls its sockets, lets the scheduler choose, launches, commits, reports. One thread runs it,
beside those that compile grammars.

It never waits for a peer: a connection that does not read is dropped, one that sends rubbish is closed, and one that
ends takes its sequences with it. It knows nothing of kernels, shapes, tenants or HTTP, and logs no prompts.
"""

import os
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from engine.execution.step_loop import StepLoop
from engine.log import log
from engine.memory import scrub
from engine.process.heartbeat import Heartbeat, ReplicaPhase
from engine.protocol.connection import PeerChannel
from engine.protocol.frames import (
    PROTOCOL_VERSION,
    Cancel,
    Frame,
    FrameError,
    Hello,
    PlacementStatus,
    Reject,
    ReplicaLoad,
    SetPlacement,
    Submit,
    encode_frame,
)
from engine.protocol.specs import ReplicaSpec
from engine.protocol.types import Grammar, RejectReason, Residency, ScopeKind
from engine.replica.open_scheduler import (
    masked_sampler,
    max_sequence_tokens,
    open_scheduler,
    open_validator,
    public_prefixes,
    publish_prefixes,
)
from engine.replica.sleep_wake import SleepController
from engine.scheduling.sequence import Sequence
from engine.scheduling.validation import SubmitRejected
from engine.step.executor import LoadedModel
from engine.structured_output.manager import StructuredOutputManager

if TYPE_CHECKING:
    from engine.replica.tracing import ReplicaTracer

_TICK_S: Final = 0.5
_OVERWRITE_S: Final = 1.0  # at most so often
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
        limits, paged = model.executor.limits, model.paged
        prefixes = public_prefixes(model, spec.model)
        tokens_max = max_sequence_tokens(model, sum(map(len, prefixes)))
        self._executor = model.executor
        self._grammars = grammars
        self._heartbeat = heartbeat
        self._listener = listener
        self._bounds = bounds
        self._orphaned = orphaned
        self._clock = clock
        self._validator = open_validator(model, spec.model, tokens_max)
        self._scheduler = open_scheduler(model, spec.model, clock)
        self._loop = StepLoop(model.executor, self._scheduler, paged, masked_sampler(model, grammars.masks))
        publish_prefixes(self._loop, self._scheduler, [self._validator.public_sequence(prefix) for prefix in prefixes])
        self._sleep = SleepController(
            model.sleeper, paged, self._scheduler, self._loop, spec.model.kept_kv_bytes, clock
        )
        self._placing: set[int] = set()  # the connections that sent a SetPlacement
        self._placed: PlacementStatus | None = None  # to be reported to them
        self._sweeping = False
        self._resting = True  # the last turn found nothing to do, though something may wait for its grammar
        self._hello = Hello(
            protocol=PROTOCOL_VERSION,
            model=spec.model.name,
            revision=model.revision,
            boot=str(spec.boot),
            pid=os.getpid(),
            context_tokens=tokens_max,
            vocabulary=limits.vocabulary,
            block_tokens=paged.layout.block_tokens if paged is not None else 1,
            blocks=limits.blocks,
        )
        self._tracer = _open_tracer(spec)
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, PeerChannel] = {}
        self._connected = 0
        self._tick_at = clock()
        self._overwrite_at = clock()
        self._drain_wanted = False
        self._drain_until: float | None = None

    def drain(self) -> None:
        """Refuses new work from the next turn on, and ends `run` when the old is done or out of time."""
        self._drain_wanted = True

    def run(self) -> int:
        bell = self._grammars.bell
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(bell, selectors.EVENT_READ, lambda: bell.recv(_BELL_BYTES))
        try:
            while self._loop.failures < _FAILURES_MAX and not self._drained() and not self._orphaned():
                self._poll()
                self._step()
                self._report()
            failed = self._loop.failures >= _FAILURES_MAX
            self._scheduler.intake.end_all(
                f"the replica {'failed' if failed else 'is shutting down'}; send the request again"
            )
            self._report()
            self._flush()
            return int(failed)
        finally:
            for connection in list(self._connections.values()):
                connection.lose("the replica ends")
            self._selector.close()
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
                wait_s = self._sleep.pause_s(max(0.0, self._tick_at - self._clock()))
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
        self._sweeping = self._loop.sweep()
        now = self._clock()
        if now >= self._overwrite_at and self._scheduler.intake.waiting.take_secret_ended():
            self._overwrite_at = now + _OVERWRITE_S
            scrub.overwrite_freed_objects()

    def _report(self) -> None:
        """Sends each connection its outputs, rejects, and how a placement ended; and the load at such an end, when
        sequences came or went, or when half a second is over."""
        changed = False
        for owner, outputs in self._scheduler.intake.take_outputs().items():
            changed = changed or bool(outputs.started or outputs.finished)
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
            changed = True
            for number in list(self._placing):
                self._connections[number].send(placed)
        now = self._clock()
        if changed or now >= self._tick_at:
            self._tick_at = now + _TICK_S
            load = encode_frame(self._load())
            for connection in list(self._connections.values()):
                connection.send_encoded(load)

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
            log("accept_failed", error=str(error))
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
        if isinstance(frame, Cancel):
            self._scheduler.intake.cancel(number, frame.ids)
        elif isinstance(frame, SetPlacement):
            self._place(number, frame)
        elif not isinstance(frame, Submit):
            raise FrameError(f"a {type(frame).__name__} is not for a replica")
        elif self._drain_wanted:
            self._connections[number].send(Reject(frame.id, RejectReason.DRAINING, "the replica is shutting down"))
        else:
            self._submit(number, frame)

    def _submit(self, number: int, submit: Submit) -> None:
        try:
            sequences = self._validator.sequences(submit, number, self._clock())
            if submit.grammar is not None:
                self._compile(submit.grammar, submit, sequences)
            self._scheduler.intake.add(sequences)
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

    def _compile(self, grammar: Grammar, submit: Submit, sequences: list[Sequence]) -> None:
        """Compiles a grammar. It outlives only requests that share something and keep something."""
        keep = submit.scope.kind != ScopeKind.REQUEST and not submit.terms.erase
        compilation = self._grammars.compile(grammar, sequences[0].account, keep)
        for sequence in sequences:
            sequence.compilation = compilation

    def _on_disconnect(self, number: int, reason: str) -> None:
        """Ends everything that runs for the connection."""
        del self._connections[number]
        self._placing.discard(number)
        self._scheduler.intake.drop(number)
        if self._tracer is not None:
            self._tracer.dropped(number)
        log("disconnected", connection=number, reason=reason)

    def _flush(self) -> None:
        """Gives the peers a last moment to read what was sent; nobody new may come, and nothing new begins."""
        self._drain_wanted = True
        self._selector.unregister(self._listener)
        until = self._clock() + self._bounds.flush_s
        while self._clock() < until and any(connection.unsent for connection in self._connections.values()):
            for key, _ in self._selector.select(until - self._clock()):
                key.data()

    def _load(self) -> ReplicaLoad:
        return self._scheduler.load(draining=self._drain_until is not None)


def _open_tracer(spec: ReplicaSpec) -> "ReplicaTracer | None":
    if spec.telemetry is None:
        return None
    from engine.replica.tracing import open_tracer  # only here: a replica that is not traced needs no opentelemetry

    return open_tracer(spec)
