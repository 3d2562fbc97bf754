"""The connection to one replica, which spreads the steps it receives over its requests' streams.

It does not know which replica a request should go to. A StepOutputs frame costs one callback, and each token event a
deque append and at most one wake-up.
"""

from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from engine.protocol import frames
from engine.protocol.types import RejectReason
from gateway.cluster.connection import FrameProtocol
from gateway.cluster.replica_counters import RecentLoad, ReplicaCounters
from gateway.cluster.stream import OutputDelta, ReplicaAsleep, ReplicaLost, ReplicaRejected, ReplicaStream


class ReplicaConnection(FrameProtocol):
    """`on_waited` gets the seconds that a request waited which found its model asleep."""

    def __init__(
        self,
        address: str,
        on_change: Callable[[], None],
        counters: ReplicaCounters,
        on_waited: Callable[[float], None],
    ) -> None:
        super().__init__()
        self.address = address
        self.recent_load = RecentLoad()
        self.hello: frames.Hello | None = None
        self.load: frames.ReplicaLoad | None = None
        self._counters = counters
        self._on_change = on_change
        self._on_waited = on_waited
        self._streams: dict[int, ReplicaStream] = {}
        self._next_id = 1
        self._since_load = [0, 0]  # submitted since the last load: live sequences, and background sequences

    @property
    def ready(self) -> bool:
        return self.hello is not None and not (self.load and self.load.draining) and self._transport is not None

    @property
    def sequences(self) -> int:
        """Live sequences that run or wait there, as far as known here: the last load and what was submitted since."""
        load = self.load
        return self._since_load[False] + (load.running + load.waiting if load else 0)

    @property
    def background(self) -> int:
        """The same for sequences in the background."""
        return self._since_load[True] + (self.load.background if self.load else 0)

    def open_stream(self, order: frames.Submit, deadline_ms: int, wake_requested_s: float | None) -> ReplicaStream:
        if self._transport is None:
            raise ReplicaLost(f"the replica at {self.address} was lost: {self.close_reason}")
        if self.congested:
            raise ReplicaRejected(RejectReason.BUSY, "the replica reads too slowly, try again", 1000)
        first_id, self._next_id = self._next_id, self._next_id + order.n
        self.send(msgspec.structs.replace(order, id=first_id, deadline_ms=deadline_ms))
        stream = ReplicaStream(first_id, order.n, self._drop, self._on_waited, wake_requested_s)
        for id in stream.ids:
            self._streams[id] = stream
        self._since_load[order.terms.background] += order.n
        return stream

    def abort_unstarted(self) -> None:
        """Ends with ReplicaAsleep what the replica has not begun with."""
        for stream in set(self._streams.values()):
            if stream.started is None:
                self._drop(stream.ids)
                stream.fail(ReplicaAsleep())

    def _drop(self, ids: Iterable[int]) -> int:
        """Forgets these sequences and cancels those that still run, whose number it returns."""
        running = [id for id in ids if self._streams.pop(id, None)]
        if running:
            self.send(frames.Cancel(running))
        return len(running)

    def receive(self, frame: frames.Frame) -> None:
        if isinstance(frame, frames.StepOutputs):
            self._step(frame)
        elif isinstance(frame, frames.ReplicaLoad):
            was_ready = self.ready
            self.load, self._since_load = frame, [0, 0]
            if self.hello is not None:
                self._counters.update(self.address, self.hello, frame)
                self.recent_load.append(self.received_s, frame)
            if was_ready != self.ready:
                self._on_change()
        elif isinstance(frame, frames.Reject):
            stream = self._streams.get(frame.id)
            if stream is not None:
                for id in stream.ids:
                    self._streams.pop(id, None)
                stream.fail(ReplicaRejected(frame.reason, frame.message, frame.retry_after_ms))
        elif isinstance(frame, frames.Hello):
            self.hello = frame
            self._on_change()

    def _step(self, frame: frames.StepOutputs) -> None:
        """Sequences that begin or end go first: a first token is written before the others' next ones."""
        tokens = memoryview(frame.tokens).cast("I").tolist()
        special = {item.id for column in (frame.started, frame.finished, frame.logprobs) for item in column}
        if special:
            self._step_in_full(frame, tokens, special)
        streams, start, received_s = self._streams, 0, self.received_s
        for id, count in zip(frame.ids, frame.counts, strict=True):
            if id not in special and (stream := streams.get(id)) is not None:
                stream.push(OutputDelta(id - stream.first_id, tokens[start : start + count]), received_s)
            start += count

    def _step_in_full(self, frame: frames.StepOutputs, tokens: list[int], special: set[int]) -> None:
        """Sequences about which the frame says more than their tokens, in the order started, going on, ended."""
        gained, start = {item.id: list[int]() for item in frame.started}, 0
        for id, count in zip(frame.ids, frame.counts, strict=True):
            if id in special:
                gained.setdefault(id, []).extend(tokens[start : start + count])
            start += count
        started = {item.id: item for item in frame.started}
        finished = {item.id: item for item in frame.finished}
        vectors = {item.id: item.values for item in frame.vectors}
        logprobs: dict[int, list[frames.TokenLogprobs]] = {}
        for item in frame.logprobs:
            logprobs.setdefault(item.id, []).append(item)
        for id in {**gained, **finished}:
            stream = self._streams.get(id)
            if stream is None:
                continue
            if id in finished:
                del self._streams[id]
            extras = started.get(id), finished.get(id), logprobs.get(id, []), vectors.get(id)
            stream.push(OutputDelta(id - stream.first_id, gained.get(id, []), *extras), self.received_s)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        streams, self._streams = set(self._streams.values()), {}
        for stream in streams:
            stream.fail(ReplicaLost(f"the replica at {self.address} was lost: {self.close_reason}"))
        self._counters.disconnected(self.address)
        self._on_change()


class ReplicaClient(NamedTuple):
    """A replica chosen for one request, which has waited `waited_s` for it. `wake_requested_s`: as in ReplicaStream."""

    replica: ReplicaConnection
    waited_s: float
    wake_requested_s: float | None

    def submit(self, order: frames.Submit, deadline_ms: int = 0) -> ReplicaStream:
        """Writes the order under an id of this connection. Raises ReplicaLost where the connection has ended,
        ReplicaRejected where it is congested."""
        return self.replica.open_stream(order, deadline_ms, self.wake_requested_s)


def pack_token_ids(tokens: Iterable[int]) -> bytes:
    """Token ids as the frames carry them: u32 little-endian."""
    return array("I", tokens).tobytes()
