"""One loaded model as a process: polls its sockets, lets the scheduler choose, launches, commits, tells. One thread,
beside those that compile grammars.

It never waits for a peer: a connection that does not read is dropped, one that sends rubbish is closed, and one that
ends takes its sequences with it. It knows nothing of kernels, shapes, tenants or HTTP, and logs no prompts.

    python -m engine.replica.server '<ReplicaSpec JSON>'
"""

import contextlib
import gc
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from engine.execution.step_loop import StepLoop, min_mapped_blocks, open_scheduler, publish_prefixes
from engine.hostinfo import gpus
from engine.log import log
from engine.memory import scrub
from engine.process.death_signal import die_with_parent
from engine.process.heartbeat import Heartbeat, ReplicaPhase
from engine.protocol.connection import FrameConnection, PeerGone, listen
from engine.protocol.frames import (
    PROTOCOL_VERSION,
    Cancel,
    Frame,
    FrameError,
    Hello,
    PlacementStatus,
    Reject,
    SetPlacement,
    Submit,
    encode_frame,
)
from engine.protocol.reports import MemoryReport, memory_report_path
from engine.protocol.specs import ReplicaSpec
from engine.protocol.types import Grammar, Pooling, RejectReason, Residency, ScopeKind
from engine.replica.sleep_wake import SleepController
from engine.scheduling.public_prefixes import whole_blocks
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.validation import RequestValidator, SubmitRejected
from engine.step.executor import SleepableExecutor
from engine.structured_output.manager import StructuredOutputManager
from prefixcache.namespace import CacheShare

if TYPE_CHECKING:
    from engine.replica.tracing import ReplicaTracer

_TICK_S: Final = 0.5
_OVERWRITE_S: Final = 1.0  # at most so often
_FAILURES_MAX: Final = 2  # in a row; then the process ends and its machine starts another
_BELL_BYTES: Final = 4096


class ModelRunner(SleepableExecutor, Protocol):
    """What a replica asks of a runner: what its loop and its moves ask, and what a model tells about itself."""

    revision: str
    kv_layout: str
    context_tokens: int
    vocabulary: int
    stop_ids: list[int]
    poolings: frozenset[Pooling]

    def idle(self) -> bool:
        """Called while there is nothing to compute: prepares a little. False when nothing is left to prepare."""
        ...

    def close(self) -> None:
        """Gives back all memory, of the device and of the host, when what was launched is done. Nothing else may be
        asked of it afterwards; it may be called again."""
        ...


OpenRunner = Callable[[ReplicaSpec, Callable[[], None]], ModelRunner]


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """The limits of a replica that no spec sets."""

    connections: int = 256
    received_bytes: int = 4 << 20  # taken from one connection between two steps
    unsent_bytes: int = 4 << 20  # a connection with more than this to read is dropped
    drain_s: float = 25.0  # for what runs or waits when the process is told to end
    flush_s: float = 1.0  # for the last frames


class Replica:
    """The loop. `drain` may be called at any time, also from a signal handler; `run` returns the exit status."""

    def __init__(
        self,
        spec: ReplicaSpec,
        runner: ModelRunner,
        grammars: StructuredOutputManager,
        pulse: Heartbeat,
        listener: socket.socket,
        bounds: ReplicaLimits,
        orphaned: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        model = spec.model
        prefixes = whole_blocks(model.public_prefixes, runner.blocks, runner.block_tokens, runner.vocabulary)
        tokens_max = _max_sequence_tokens(runner, sum(map(len, prefixes)))
        self._runner = runner
        self._grammars = grammars
        self._pulse = pulse
        self._listener = listener
        self._bounds = bounds
        self._orphaned = orphaned
        self._clock = clock
        self._door = RequestValidator(
            model_revision=runner.revision,
            kv_layout=runner.kv_layout,
            block_tokens=runner.block_tokens,
            max_total_tokens=tokens_max,
            vocabulary=runner.vocabulary,
            stop_ids=frozenset(runner.stop_ids),
            share=CacheShare(model.scope_floor_blocks, model.scope_cap_blocks),
            poolings=runner.poolings,
        )
        self._scheduler = open_scheduler(runner, model, clock)
        self._loop = StepLoop(runner, self._scheduler, grammars.masks)
        if isinstance(self._scheduler, Scheduler):
            publish_prefixes(self._loop, self._scheduler, [self._door.public_sequence(prefix) for prefix in prefixes])
        self._standby = SleepController(runner, self._scheduler, self._loop, model.kept_kv_bytes, clock)
        self._placing: set[int] = set()  # the connections that sent a Place
        self._placed: PlacementStatus | None = None  # to be told to them
        self._sweeping = False
        self._resting = True  # the last turn found nothing to do, though something may wait for its grammar
        self._hello = Hello(
            protocol=PROTOCOL_VERSION,
            model=model.name,
            revision=runner.revision,
            boot=str(spec.boot),
            pid=os.getpid(),
            context_tokens=tokens_max,
            vocabulary=runner.vocabulary,
            block_tokens=runner.block_tokens,
            blocks=runner.blocks,
        )
        self._traces = _traces(spec)
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, FrameConnection] = {}
        self._connected = 0
        self._tick_at = clock()
        self._overwrite_at = clock()
        self._drain_wanted = False
        self._drain_until: float | None = None

    def drain(self) -> None:
        """New work is refused from the next turn on, and `run` ends when the old is done or out of time."""
        self._drain_wanted = True

    def run(self) -> int:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._grammars.bell, selectors.EVENT_READ)
        try:
            while self._loop.failures < _FAILURES_MAX and not self._drained() and not self._orphaned():
                self._poll()
                self._step()
                self._tell()
            failed = self._loop.failures >= _FAILURES_MAX
            self._scheduler.intake.end_all(
                f"the replica {'failed' if failed else 'is shutting down'}; send the request again"
            )
            self._tell()
            self._flush()
            return int(failed)
        finally:
            for connection in list(self._connections.values()):
                self._close(connection, "the replica ends")
            self._selector.close()
            if self._traces is not None:
                self._pulse.enter(ReplicaPhase.STOPPING)
                self._traces.close()

    # One turn

    def _poll(self) -> None:
        """Takes what the sockets have; waits for them only when there is nothing to compute."""
        wait_s = 0.0
        if self._loop.idle or self._resting:
            self._pulse.enter(ReplicaPhase.IDLE)
            if not (self._standby.settled and self._runner.idle()) and not self._sweeping:
                wait_s = self._standby.pause_s(max(0.0, self._tick_at - self._clock()))
        for key, events in self._selector.select(wait_s):
            if key.fileobj is self._listener:
                self._accept()
                continue
            if key.fileobj is self._grammars.bell:
                self._grammars.bell.recv(_BELL_BYTES)
                continue
            if events & selectors.EVENT_READ:
                self._receive(key.data)
            if events & selectors.EVENT_WRITE:
                self._send(key.data, b"")
        if self._drain_wanted and self._drain_until is None:
            self._drain_until = self._clock() + self._bounds.drain_s
            self._tick_at = self._clock()
            self._standby.stay()
            log("draining", running_for_at_most_s=self._bounds.drain_s)

    def _step(self) -> None:
        """Moves first: what waits for a wake is launched at once."""
        self._placed = self._standby.step(self._resting or self._loop.idle)
        if not self._loop.idle:
            self._pulse.enter(ReplicaPhase.STEP)
            self._resting = not self._loop.turn()
        self._sweeping = self._loop.sweep()
        now = self._clock()
        if now >= self._overwrite_at and self._scheduler.intake.waiting.take_secret_ended():
            self._overwrite_at = now + _OVERWRITE_S
            scrub.overwrite_freed_objects()

    def _tell(self) -> None:
        """One Progress per connection that has news, what will not run after all, how a move ended, and Load when it
        did, when sequences came or went, or half a second is over."""
        moved = False
        for owner, progress in self._scheduler.intake.outputs.take().items():
            moved = moved or bool(progress.started or progress.finished)
            if self._traces is not None:
                self._traces.told(owner, progress)
            if owner in self._connections:
                self._send(self._connections[owner], encode_frame(progress))
        for sequence, reject in self._scheduler.intake.waiting.take_rejects():
            if self._traces is not None:
                self._traces.rejected(sequence.owner, sequence.first_id, sequence.choices)
            if sequence.owner in self._connections:
                self._send(self._connections[sequence.owner], encode_frame(reject))
        placed, self._placed = self._placed, None
        if placed is not None:
            moved = True
            for number in list(self._placing):
                self._send(self._connections[number], encode_frame(placed))
        now = self._clock()
        if moved or now >= self._tick_at:
            self._tick_at = now + _TICK_S
            load = encode_frame(self._scheduler.load(draining=self._drain_until is not None))
            for connection in list(self._connections.values()):
                self._send(connection, load)

    def _drained(self) -> bool:
        """What waits while it sleeps is told at once: nobody is going to wake it."""
        if self._drain_until is None:
            return False
        asleep = self._standby.residency == Residency.MEMORY
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
        connection = FrameConnection(self._connected, peer, self._bounds.received_bytes, self._bounds.unsent_bytes)
        self._connections[connection.number] = connection
        self._selector.register(peer, selectors.EVENT_READ, connection)
        log("connected", connection=connection.number)
        self._send(connection, encode_frame(self._hello))
        self._send(connection, encode_frame(self._scheduler.load(draining=self._drain_until is not None)))

    def _receive(self, connection: FrameConnection) -> None:
        try:
            for frame in connection.frames():
                self._take(connection, frame)
                if connection.number not in self._connections:
                    return  # it left while it was answered: nothing more of it may run
        except (PeerGone, FrameError) as error:
            self._close(connection, str(error))

    def _take(self, connection: FrameConnection, frame: Frame) -> None:
        if isinstance(frame, Cancel):
            self._scheduler.intake.cancel(connection.number, frame.ids)
        elif isinstance(frame, SetPlacement):
            self._place(connection, frame)
        elif not isinstance(frame, Submit):
            raise FrameError(f"a {type(frame).__name__} is not for a replica")
        elif self._drain_wanted:
            self._send(
                connection, encode_frame(Reject(frame.id, RejectReason.DRAINING, "the replica is shutting down"))
            )
        else:
            try:
                sequences = self._door.sequences(frame, connection.number, self._clock())
                if frame.grammar is not None:
                    self._compile(frame.grammar, frame, sequences)
                self._scheduler.intake.add(sequences)
            except SubmitRejected as refused:
                reject = Reject(frame.id, refused.reason, refused.message, refused.retry_after_ms)
                self._send(connection, encode_frame(reject))
                return
            if self._traces is not None:
                self._traces.accepted(connection.number, frame)

    def _place(self, connection: FrameConnection, place: SetPlacement) -> None:
        """The first one of a connection is answered at once, and each one where it ends. A first one that asks for
        nothing is not answered twice: the machine would take that for the end of what it ordered meanwhile."""
        if place.residency == Residency.DISK:
            raise FrameError("a replica is ended, not sent to disk")
        if connection.number not in self._placing:
            self._placing.add(connection.number)
            self._send(connection, encode_frame(self._standby.placed()))
            if self._standby.obeyed(place):
                return
        if not self._drain_wanted:
            self._standby.order(place)

    def _compile(self, grammar: Grammar, submit: Submit, sequences: list[Sequence]) -> None:
        """Nothing of a grammar outlives a request that shares nothing or keeps nothing."""
        keep = submit.scope.kind != ScopeKind.REQUEST and not submit.terms.erase
        compilation = self._grammars.compile(grammar, sequences[0].account, keep)
        for sequence in sequences:
            sequence.compilation = compilation

    def _send(self, connection: FrameConnection, encoded: bytes) -> None:
        if connection.number not in self._connections:
            return
        try:
            connection.send(encoded)
        except PeerGone as gone:
            self._close(connection, str(gone))
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if self._selector.get_key(connection.socket).events != wanted:
            self._selector.modify(connection.socket, wanted, connection)

    def _close(self, connection: FrameConnection, reason: str) -> None:
        """Ends the connection and everything that runs for it. Does nothing the second time."""
        if self._connections.pop(connection.number, None) is None:
            return
        self._placing.discard(connection.number)
        self._scheduler.intake.drop(connection.number)
        if self._traces is not None:
            self._traces.dropped(connection.number)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        log("disconnected", connection=connection.number, reason=reason)

    def _flush(self) -> None:
        """Gives the peers a last moment to read what they were told."""
        until = self._clock() + self._bounds.flush_s
        while self._clock() < until and any(connection.unsent for connection in self._connections.values()):
            for key, events in self._selector.select(until - self._clock()):
                if events & selectors.EVENT_WRITE:
                    self._send(key.data, b"")


def _max_sequence_tokens(runner: ModelRunner, published_tokens: int) -> int:
    """Of the longest sequence that there is room for whenever the replica is on its device."""
    if not runner.blocks:
        return runner.context_tokens
    return min(runner.context_tokens, min_mapped_blocks(runner) * runner.block_tokens - published_tokens)


def _traces(spec: ReplicaSpec) -> "ReplicaTracer | None":
    if spec.telemetry is None:
        return None
    from engine.replica.tracing import open_tracer  # only here: a replica that is not traced needs no opentelemetry

    return open_tracer(spec)


class _EventHandler(logging.Handler):
    """Sends what other modules log the same way."""

    def emit(self, record: logging.LogRecord) -> None:
        log("note", logger=record.name, message=record.getMessage())


def parse_spec(document: str) -> ReplicaSpec:
    """Raises msgspec.ValidationError where the document is no ReplicaSpec."""
    return msgspec.json.decode(document, type=ReplicaSpec)


def run(spec: ReplicaSpec, open_runner: OpenRunner, bounds: ReplicaLimits | None = None) -> int:
    """Loads the model, then serves until told to end or until the parent process is gone. Returns the exit status."""
    parent = os.getppid()
    die_with_parent(parent)()
    pulse = Heartbeat.create(spec.pulse)
    pulse.enter(ReplicaPhase.LOADING)
    began = time.monotonic()
    with contextlib.closing(StructuredOutputManager(Path(spec.model.folder), spec.threads)) as grammars:
        runner = open_runner(spec, pulse.beat)
        grammars.wait_ready()
        gc.collect()
        gc.freeze()  # what loading made stays: collections during steps need not walk it
        log("loaded", model=spec.model.name, seconds=round(time.monotonic() - began, 3), blocks=runner.blocks)
        try:
            status = serve(
                spec, runner, grammars, pulse, bounds or ReplicaLimits(), orphaned=lambda: os.getppid() != parent
            )
        finally:
            pulse.enter(ReplicaPhase.STOPPING)
        if status == 0:  # a device that fails may not answer; the process's end gives back what it holds
            runner.close()
        return status


def serve(
    spec: ReplicaSpec,
    runner: ModelRunner,
    grammars: StructuredOutputManager,
    pulse: Heartbeat,
    bounds: ReplicaLimits,
    orphaned: Callable[[], bool],
) -> int:
    """Serves an open runner on the spec's address. SIGTERM and SIGINT drain. Call it from the main thread."""
    listener = listen(spec.address)
    try:
        replica = Replica(spec, runner, grammars, pulse, listener, bounds, orphaned, time.monotonic)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: replica.drain())
        log("serving", model=spec.model.name, address=spec.address)
        status = replica.run()
        log("ended", status=status)
        return status
    finally:
        listener.close()
        if spec.address.startswith("unix:"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(spec.address.removeprefix("unix:"))


def _write_memory_report(pulse: str, memory: MemoryReport) -> None:
    """Writes it beside the pulse, at once or not at all; whoever looks there while we run finds it."""
    path = memory_report_path(pulse)
    unfinished = path.with_suffix(".new")
    try:
        unfinished.write_bytes(msgspec.json.encode(memory))
        unfinished.replace(path)
    except OSError as error:
        log("memory_not_told", error=str(error))


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m engine.replica.server '<ReplicaSpec JSON>'", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, handlers=[_EventHandler()])
    spec = parse_spec(argv[0])
    if spec.device != "cpu" and "torch" not in sys.modules and gpus.visible_gpus(os.environ):
        gpus.prewarm_driver()
    from engine.execution.open import open_model  # only here: a replica of another runner needs no torch

    def open_runner(spec: ReplicaSpec, beat: Callable[[], None]) -> ModelRunner:
        runner = open_model(spec.model, spec.device, spec.threads, beat, spec.device_bytes, spec.standby)
        _write_memory_report(spec.pulse, runner.memory)
        return runner

    return run(spec, open_runner)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
