"""Sockets to machines and replicas, and each request's own stream of steps.

It knows frames and asyncio, and not which replica a request should go to. Reading is done by protocols, not by tasks: a
Progress costs one callback, and each token event a deque append and at most one wake-up.
"""

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from typing import Self, TypeVar, cast

import msgspec

from engine.protocol import frames
from engine.protocol.address import parse_address
from engine.protocol.types import Grammar, Pooling, RejectReason, SamplingParams, SchedulingTerms, Scope
from gateway.cluster.replica_counters import RecentLoad, ReplicaCounters

WRITE_BYTES_MAX = 32 << 20
STEPS_MAX = 256
CONNECT_S = 2.0


class ReplicaLost(Exception):
    """The replica's connection ended while this request ran. What was received until then stays valid."""


class ReplicaRejected(Exception):
    """The replica did not accept the request; nothing of it runs."""

    def __init__(self, reason: RejectReason, message: str, retry_after_ms: int) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after_ms = retry_after_ms


class ReplicaAsleep(Exception):
    """The replica leaves the device, and had not begun with the request: it is taken back, to ask for one anew."""


class OutputDelta(msgspec.Struct, frozen=True):
    """What one choice of a request gained in one step. `logprobs`: one per token where asked for, else empty."""

    index_in_n: int
    tokens: list[int]
    started: frames.SequenceStarted | None = None
    finish: frames.SequenceFinished | None = None
    logprobs: list[frames.TokenLogprobs] = []
    vector: bytes | None = None  # what a prompt with `pooling` became; its only step has it


class ReplicaStream:
    """One request's steps, in order. It ends after the last choice's finish.

    Bounded: once STEPS_MAX steps wait for a slow reader, further tokens join the last waiting step of their choice,
    so that what is held never passes the request's own max_tokens. The replica is never held up.
    """

    __slots__ = (
        "_asked_s",
        "_connection",
        "_first",
        "_loop",
        "_lost",
        "_n",
        "_open",
        "_steps",
        "_submitted_s",
        "_waiter",
        "started",
        "taken_s",
    )

    def __init__(self, connection: "ReplicaConnection", first: int, n: int, asked_s: float | None) -> None:
        self._connection = connection
        self._asked_s = asked_s  # since when it waits, where its model was not on the device; None: it does not
        self._first = first
        self._n = n
        self._open = n
        self._steps: deque[OutputDelta] = deque()
        self._loop = connection.loop
        self._waiter: asyncio.Future[None] | None = None
        self._lost: Exception | None = None
        self._submitted_s = time.monotonic()
        self.started: frames.SequenceStarted | None = None  # of the choice that started last, whoever took that step
        self.taken_s: float | None = None  # from the order's writing to the arrival of its first token

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> OutputDelta:
        """Raises ReplicaLost, Asleep or Rejected, after the steps that came before."""
        while not self._steps:
            if self._lost is not None:
                raise self._lost
            if not self._open:
                raise StopAsyncIteration
            assert self._waiter is None, "a stream has one reader"
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._steps.popleft()

    @property
    def ready(self) -> int:
        """How many steps can be taken without waiting."""
        return len(self._steps)

    @property
    def asleep(self) -> bool:
        """Whether it ended with Asleep."""
        return isinstance(self._lost, ReplicaAsleep)

    def stop(self, index_in_n: int) -> None:
        """Ends one choice early: the replica is told, nothing more of it is received. Idempotent."""
        if self._connection.forget_one(self._first + index_in_n):
            self._open -= 1

    def cancel(self) -> None:
        """The caller is gone: the replica is told, nothing more is received. Idempotent, also after the end."""
        if self._open:
            self._connection.forget(self, cancel=True)
            self._open = 0
            self._steps.clear()
            self._wake()

    def _push(self, step: OutputDelta) -> None:
        if self.taken_s is None and step.tokens:
            self.taken_s = self._connection.received_s - self._submitted_s
        if step.started is not None:
            self._begin(step.started)
        steps = self._steps
        if len(steps) >= STEPS_MAX and self._join(step):
            return
        steps.append(step)
        self._wake()

    def _begin(self, started: frames.SequenceStarted) -> None:
        self.started = started
        if self._asked_s is not None:
            self._connection.waited(self._connection.received_s - self._asked_s)
            self._asked_s = None

    def _join(self, step: OutputDelta) -> bool:
        """Adds the step's tokens to the last waiting one of its choice; false where there is none."""
        for back in range(len(self._steps) - 1, max(-1, len(self._steps) - 1 - self._n), -1):
            last = self._steps[back]
            if last.index_in_n == step.index_in_n and last.finish is None:
                self._steps[back] = msgspec.structs.replace(
                    last,
                    tokens=last.tokens + step.tokens,
                    started=last.started or step.started,
                    finish=step.finish,
                    logprobs=last.logprobs + step.logprobs,
                )
                return True
        return False

    def _fail(self, error: Exception) -> None:
        self._open = 0
        self._lost = error
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class ReplicaClient:
    """A replica chosen for one request, which has waited `held_s` for it. `asked_s`: as in Stream."""

    __slots__ = ("_asked_s", "_replica", "held_s")

    def __init__(self, replica: "ReplicaConnection", held_s: float = 0.0, asked_s: float | None = None) -> None:
        self._replica = replica
        self._asked_s = asked_s
        self.held_s = held_s

    @property
    def hello(self) -> frames.Hello:
        """What the replica said of itself: context, vocabulary, blocks."""
        assert self._replica.hello is not None
        return self._replica.hello

    def submit(
        self,
        *,
        tokens: bytes,
        scope: Scope,
        sampling: SamplingParams,
        max_tokens: int,
        stop_ids: list[int] | None = None,
        n: int = 1,
        traceparent: str = "",
        terms: SchedulingTerms = SchedulingTerms(),  # noqa: B008 frozen
        deadline_ms: int = 0,
        grammar: Grammar | None = None,
        pooling: Pooling | None = None,
    ) -> ReplicaStream:
        """Writes one frame. Raises ReplicaLost where the connection ended meanwhile, Rejected where it is congested."""
        return self._replica.submit(
            lambda id: frames.Submit(
                id=id,
                tokens=tokens,
                scope=scope,
                sampling=sampling,
                max_tokens=max_tokens,
                stop_ids=stop_ids or [],
                n=n,
                traceparent=traceparent,
                terms=terms,
                deadline_ms=deadline_ms,
                grammar=grammar,
                pooling=pooling,
            ),
            n,
            background=terms.background,
            asked_s=self._asked_s,
        )


class FrameProtocol(asyncio.Protocol):
    """One socket that speaks frames. `lost` is set once it is closed, with the reason in `why`."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self.loop.create_future()
        self.why = "the connection was closed"
        self.received_s = 0.0  # when the last bytes came
        self._frames = frames.FrameReader()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's says so only by its methods

    def data_received(self, received: bytes) -> None:
        self.received_s = time.monotonic()
        try:
            for frame in self._frames.feed(received):
                self.receive(frame)
        except frames.FrameError as error:
            self.close(f"it sent {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if not self.lost.done():
            self.lost.set_result(None)

    def receive(self, frame: frames.Frame) -> None:
        raise NotImplementedError

    def send(self, frame: frames.Frame) -> None:
        """Nothing is sent on a connection that has ended."""
        if self._transport is not None:
            self._transport.write(frames.encode_frame(frame))

    def close(self, why: str) -> None:
        self.why = why
        if self._transport is not None:
            self._transport.abort()

    async def until_lost(self) -> None:
        """Closes the connection when its task is cancelled."""
        try:
            await self.lost
        finally:
            if self._transport is not None:
                self.close("the gateway closed it")


class MachineConnection(FrameProtocol):
    """The connection to one machine. `models` are those that it said last it has replicas of."""

    def __init__(self, changed: Callable[["MachineConnection", frames.MachineState], None]) -> None:
        super().__init__()
        self.models: frozenset[str] = frozenset()
        self._changed = changed

    def receive(self, frame: frames.Frame) -> None:
        if isinstance(frame, frames.MachineState):
            self._changed(self, frame)

    def tell(self, wake: frames.ModelDemand) -> None:
        """Left out where the machine does not read: it is told again."""
        if self._transport is not None and self._transport.get_write_buffer_size() <= WRITE_BYTES_MAX:
            self.send(wake)


class ReplicaConnection(FrameProtocol):
    """The connection to one replica, and the streams on it. `waited` is told for how long a request did that found its
    model asleep."""

    def __init__(
        self, address: str, changed: Callable[[], None], tally: ReplicaCounters, waited: Callable[[float], None]
    ) -> None:
        super().__init__()
        self._tally = tally
        self.address = address
        self.waited = waited
        self.lately = RecentLoad()
        self.hello: frames.Hello | None = None
        self.load: frames.ReplicaLoad | None = None
        self._changed = changed
        self._streams: dict[int, ReplicaStream] = {}
        self._next = 1
        self._since_load = [0, 0]  # of live sequences, and of those in the background

    @property
    def ready(self) -> bool:
        return self.hello is not None and not (self.load and self.load.draining) and self._transport is not None

    @property
    def sequences(self) -> int:
        """Live ones, running and waiting there, as far as known here: the last Load and what was submitted since."""
        load = self.load
        return self._since_load[False] + (load.running + load.waiting if load else 0)

    @property
    def background(self) -> int:
        """The same of those in the background."""
        return self._since_load[True] + (self.load.background if self.load else 0)

    def submit(
        self, frame_for: Callable[[int], frames.Submit], n: int, *, background: bool, asked_s: float | None
    ) -> ReplicaStream:
        transport = self._transport
        if transport is None:
            raise ReplicaLost(f"the replica at {self.address} was lost: {self.why}")
        if transport.get_write_buffer_size() > WRITE_BYTES_MAX:
            raise ReplicaRejected(RejectReason.BUSY, "the replica reads too slowly, try again", 1000)
        first, self._next = self._next, self._next + n
        transport.write(frames.encode_frame(frame_for(first)))
        stream = ReplicaStream(self, first, n, asked_s)
        for id in range(first, first + n):
            self._streams[id] = stream
        self._since_load[background] += n
        return stream

    def forget(self, stream: ReplicaStream, *, cancel: bool) -> None:
        ids = [id for id in range(stream._first, stream._first + stream._n) if self._streams.pop(id, None)]
        if cancel and ids:
            self.send(frames.Cancel(ids))

    def take_back(self) -> None:
        """Ends with Asleep what the replica has not begun with."""
        for stream in set(self._streams.values()):
            if stream.started is None:
                self.forget(stream, cancel=True)
                stream._fail(ReplicaAsleep())

    def forget_one(self, id: int) -> bool:
        """False where that sequence has ended already."""
        if self._streams.pop(id, None) is None:
            return False
        self.send(frames.Cancel([id]))
        return True

    def receive(self, frame: frames.Frame) -> None:
        if isinstance(frame, frames.StepOutputs):
            self._progress(frame)
        elif isinstance(frame, frames.ReplicaLoad):
            was = self.ready
            self.load, self._since_load = frame, [0, 0]
            if self.hello is not None:
                self._tally.take(self.address, self.hello, frame)
                self.lately.take(self.received_s, frame)
            if was != self.ready:
                self._changed()
        elif isinstance(frame, frames.Reject):
            stream = self._streams.get(frame.id)
            if stream is not None:
                self.forget(stream, cancel=False)
                stream._fail(ReplicaRejected(frame.reason, frame.message, frame.retry_after_ms))
        elif isinstance(frame, frames.Hello):
            self.hello = frame
            self._changed()

    def _progress(self, frame: frames.StepOutputs) -> None:
        """What begins or ends goes first: a first token is written before the others' next ones."""
        tokens = memoryview(frame.tokens).cast("I").tolist()
        special = {item.id for column in (frame.started, frame.finished, frame.logprobs) for item in column}
        if special:
            self._progress_in_full(frame, tokens, special)
        streams, start = self._streams, 0
        for id, count in zip(frame.ids, frame.counts, strict=True):
            if id not in special and (stream := streams.get(id)) is not None:
                stream._push(OutputDelta(id - stream._first, tokens[start : start + count]))
            start += count

    def _progress_in_full(self, frame: frames.StepOutputs, tokens: list[int], special: set[int]) -> None:
        """Of the sequences of which the frame says more than their tokens, in the order started, going on, ended."""
        gained, start = {item.id: list[int]() for item in frame.started}, 0
        for id, count in zip(frame.ids, frame.counts, strict=True):
            if id in special:
                gained[id] = tokens[start : start + count]
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
                stream._open -= 1
            new = gained.get(id, [])
            more = started.get(id), finished.get(id), logprobs.get(id, []), vectors.get(id)
            stream._push(OutputDelta(id - stream._first, new, *more))

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        streams, self._streams = set(self._streams.values()), {}
        for stream in streams:
            stream._fail(ReplicaLost(f"the replica at {self.address} was lost: {self.why}"))
        self._tally.lost(self.address)
        self._changed()


_C = TypeVar("_C", bound=FrameProtocol)


async def connect(address: str, make: Callable[[], _C]) -> _C:
    """Raises OSError or TimeoutError."""
    loop = asyncio.get_running_loop()
    target = parse_address(address)
    async with asyncio.timeout(CONNECT_S):
        if isinstance(target, str):
            return (await loop.create_unix_connection(make, target))[1]
        return (await loop.create_connection(make, *target))[1]


def error_text(error: Exception) -> str:
    return str(error) or f"no answer within {CONNECT_S:g} s"


def pack_token_ids(tokens: Iterable[int]) -> bytes:
    """Token ids as the frames carry them: u32 little-endian."""
    return array("I", tokens).tobytes()
