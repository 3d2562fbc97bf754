"""Connections to machines and replicas: who can serve, and each request's own stream of steps.

It knows frames and asyncio, and nothing of HTTP, text or tenants. Reading is done by protocols, not by tasks: a
Progress costs one callback, and each token event a deque append and at most one wake-up.
"""

import asyncio
import contextlib
import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self, TypeVar, cast

import msgspec

from engine import wire
from gateway import route
from gateway.tally import Tally

WRITE_BYTES_MAX = 32 << 20
STEPS_MAX = 256
CONNECT_S = 2.0
BACKOFF_S = (0.05, 2.0)


class ReplicaLost(Exception):
    """The replica's connection ended while this request ran. What was received until then stays valid."""


class Rejected(Exception):
    """The replica did not accept the request; nothing of it runs."""

    def __init__(self, reason: wire.RejectReason, message: str, retry_after_ms: int) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after_ms = retry_after_ms


class Unavailable(Exception):
    """No replica could serve the model before the deadline. `loading`: one is on its way, or all are draining."""

    def __init__(self, message: str, loading: bool) -> None:
        super().__init__(message)
        self.message = message
        self.loading = loading


class Step(msgspec.Struct, frozen=True):
    """What one choice of a request gained in one step. `logprobs`: one per token where asked for, else empty."""

    index_in_n: int
    tokens: list[int]
    started: wire.Started | None = None
    finish: wire.Finish | None = None
    logprobs: list[wire.TokenLogprobs] = []
    vector: bytes | None = None  # what a prompt with `pooling` became; its only step has it


class Stream:
    """One request's steps, in order. It ends after the last choice's finish.

    Bounded: once STEPS_MAX steps wait for a slow reader, further tokens join the last waiting step of their choice,
    so that what is held never passes the request's own max_tokens. The replica is never held up.
    """

    __slots__ = (
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

    def __init__(self, connection: "_Replica", first: int, n: int) -> None:
        self._connection = connection
        self._first = first
        self._n = n
        self._open = n
        self._steps: deque[Step] = deque()
        self._loop = connection.loop
        self._waiter: asyncio.Future[None] | None = None
        self._lost: Exception | None = None
        self._submitted_s = time.monotonic()
        self.started: wire.Started | None = None  # of the choice that started last, whoever took that step
        self.taken_s: float | None = None  # from the order's writing to the arrival of its first token

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Step:
        """Raises ReplicaLost or Rejected, after the steps that came before."""
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

    def _push(self, step: Step) -> None:
        if self.taken_s is None and step.tokens:
            self.taken_s = self._connection.received_s - self._submitted_s
        self.started = step.started or self.started
        steps = self._steps
        if len(steps) >= STEPS_MAX and self._join(step):
            return
        steps.append(step)
        self._wake()

    def _join(self, step: Step) -> bool:
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


class Link:
    """A replica chosen for one request."""

    __slots__ = ("_replica",)

    def __init__(self, replica: "_Replica") -> None:
        self._replica = replica

    @property
    def hello(self) -> wire.Hello:
        """What the replica said of itself: context, vocabulary, blocks."""
        assert self._replica.hello is not None
        return self._replica.hello

    def submit(
        self,
        *,
        tokens: bytes,
        scope: wire.Scope,
        sampling: wire.Sampling,
        max_tokens: int,
        stop_ids: list[int] | None = None,
        n: int = 1,
        traceparent: str = "",
        terms: wire.Terms = wire.Terms(),  # noqa: B008 frozen
        deadline_ms: int = 0,
        grammar: wire.Grammar | None = None,
        pooling: wire.Pooling | None = None,
    ) -> Stream:
        """Writes one frame. Raises ReplicaLost where the connection ended meanwhile, Rejected where it is congested."""
        return self._replica.submit(
            lambda id: wire.Submit(
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
        )


class _Connection(asyncio.Protocol):
    """One socket that speaks frames. `lost` is set once it is closed, with the reason in `why`."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self.loop.create_future()
        self.why = "the connection was closed"
        self.received_s = 0.0  # when the last bytes came
        self._frames = wire.FrameReader()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's says so only by its methods

    def data_received(self, received: bytes) -> None:
        self.received_s = time.monotonic()
        try:
            for frame in self._frames.feed(received):
                self.receive(frame)
        except wire.FrameError as error:
            self.close(f"it sent {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if not self.lost.done():
            self.lost.set_result(None)

    def receive(self, frame: wire.Frame) -> None:
        raise NotImplementedError

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


class _Machine(_Connection):
    def __init__(self, changed: Callable[[wire.Fleet], None]) -> None:
        super().__init__()
        self._changed = changed

    def receive(self, frame: wire.Frame) -> None:
        if isinstance(frame, wire.Fleet):
            self._changed(frame)


class _Replica(_Connection):
    """The connection to one replica, and the streams on it."""

    def __init__(self, address: str, changed: Callable[[], None], tally: Tally) -> None:
        super().__init__()
        self._tally = tally
        self.address = address
        self.hello: wire.Hello | None = None
        self.load: wire.Load | None = None
        self._changed = changed
        self._streams: dict[int, Stream] = {}
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

    def submit(self, frame_for: Callable[[int], wire.Submit], n: int, *, background: bool) -> Stream:
        transport = self._transport
        if transport is None:
            raise ReplicaLost(f"the replica at {self.address} was lost: {self.why}")
        if transport.get_write_buffer_size() > WRITE_BYTES_MAX:
            raise Rejected(wire.RejectReason.BUSY, "the replica reads too slowly, try again", 1000)
        first, self._next = self._next, self._next + n
        transport.write(wire.encode(frame_for(first)))
        stream = Stream(self, first, n)
        for id in range(first, first + n):
            self._streams[id] = stream
        self._since_load[background] += n
        return stream

    def forget(self, stream: Stream, *, cancel: bool) -> None:
        ids = [id for id in range(stream._first, stream._first + stream._n) if self._streams.pop(id, None)]
        if cancel and ids and self._transport is not None:
            self._transport.write(wire.encode(wire.Cancel(ids)))

    def forget_one(self, id: int) -> bool:
        """False where that sequence has ended already."""
        if self._streams.pop(id, None) is None:
            return False
        if self._transport is not None:
            self._transport.write(wire.encode(wire.Cancel([id])))
        return True

    def receive(self, frame: wire.Frame) -> None:
        if isinstance(frame, wire.Progress):
            self._progress(frame)
        elif isinstance(frame, wire.Load):
            was = self.ready
            self.load, self._since_load = frame, [0, 0]
            if self.hello is not None:
                self._tally.take(self.address, self.hello, frame)
            if was != self.ready:
                self._changed()
        elif isinstance(frame, wire.Reject):
            stream = self._streams.get(frame.id)
            if stream is not None:
                self.forget(stream, cancel=False)
                stream._fail(Rejected(frame.reason, frame.message, frame.retry_after_ms))
        elif isinstance(frame, wire.Hello):
            if frame.protocol != wire.PROTOCOL:
                self.close(
                    f"it speaks protocol {frame.protocol}, this gateway {wire.PROTOCOL}: install the same hearth"
                )
                return
            self.hello = frame
            self._changed()

    def _progress(self, frame: wire.Progress) -> None:
        """What begins or ends goes first: a first token is written before the others' next ones."""
        tokens = memoryview(frame.tokens).cast("I").tolist()
        special = {item.id for column in (frame.started, frame.finished, frame.logprobs) for item in column}
        if special:
            self._progress_in_full(frame, tokens, special)
        streams, start = self._streams, 0
        for id, count in zip(frame.ids, frame.counts, strict=True):
            if id not in special and (stream := streams.get(id)) is not None:
                stream._push(Step(id - stream._first, tokens[start : start + count]))
            start += count

    def _progress_in_full(self, frame: wire.Progress, tokens: list[int], special: set[int]) -> None:
        """Of the sequences of which the frame says more than their tokens, in the order started, going on, ended."""
        gained, start = {item.id: list[int]() for item in frame.started}, 0
        for id, count in zip(frame.ids, frame.counts, strict=True):
            if id in special:
                gained[id] = tokens[start : start + count]
            start += count
        started = {item.id: item for item in frame.started}
        finished = {item.id: item for item in frame.finished}
        vectors = {item.id: item.values for item in frame.vectors}
        logprobs: dict[int, list[wire.TokenLogprobs]] = {}
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
            stream._push(Step(id - stream._first, new, *more))

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        streams, self._streams = set(self._streams.values()), {}
        for stream in streams:
            stream._fail(ReplicaLost(f"the replica at {self.address} was lost: {self.why}"))
        self._tally.lost(self.address)
        self._changed()


@dataclass(slots=True)
class _Known:
    """A replica that a machine told of, and the task that keeps the connection to it."""

    state: wire.ReplicaState
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    connection: _Replica | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """One replica as this gateway sees it, for readiness, metrics and `hearth doctor`."""

    machine: str
    model: str
    address: str
    residency: wire.Residency
    ready: bool
    problem: str
    load: wire.Load | None


class Fleet:
    """All machines' replicas. `run` keeps the connections; `link` chooses among those that can serve."""

    def __init__(self, machine_addresses: Sequence[str], *, rng: random.Random | None = None) -> None:
        for address in machine_addresses:
            wire.parse_address(address)  # a wrong one is an error at the start, not a retry for ever
        self._machines = list(machine_addresses)
        self._rng = rng or random.Random()
        self.tally = Tally()
        self._known: dict[tuple[str, str], _Known] = {}
        self._problems: dict[str, str] = {}
        self._waiters: set[asyncio.Future[None]] = set()

    async def run(self) -> None:
        """Connects to the machines and to what they tell of, again and again, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for address in self._machines:
                group.create_task(self._keep_machine(address, group))

    def replicas(self) -> list[Seen]:
        """What is known now, in the order in which it became known."""
        return [
            Seen(
                machine,
                known.state.model,
                known.state.address,
                known.state.residency,
                known.connection is not None and known.connection.ready,
                "" if known.connection and known.connection.ready else known.state.problem or known.problem,
                known.connection.load if known.connection else None,
            )
            for (machine, _), known in self._known.items()
        ]

    def problems(self) -> dict[str, str]:
        """Machines that cannot be reached, by address, in words."""
        return dict(self._problems)

    def busy(self, model: str) -> bool:
        """Whether every replica of this model that can serve has sequences waiting already."""
        ready = self._ready(model)
        return bool(ready) and all(replica.load is not None and replica.load.waiting > 0 for replica in ready)

    def spare(self, model: str, most: int) -> int:
        """How many more sequences may go into the background, where each replica of this model without live ones that
        wait has so many."""
        calm = [each for each in self._ready(model) if not (each.load and each.load.waiting)]
        return sum(max(0, most - each.background) for each in calm)

    def hello(self, model: str) -> wire.Hello | None:
        """What a replica of this model that can serve said of itself; None while there is none."""
        ready = self._ready(model)
        return ready[0].hello if ready else None

    async def link(
        self,
        model: str,
        scope: bytes,
        tokens: bytes,
        deadline: float,
        session: bytes = b"",
        *,
        background: bool = False,
    ) -> Link:
        """A replica for this prompt (packed u32), waiting until the loop's clock shows `deadline` at the latest. The
        same one for all calls of a scope's session, as long as it lives and has no more than its share of the load. For
        live calls what is in the background there is no load.

        Raises Unavailable.
        """
        loop = asyncio.get_running_loop()
        while not (ready := self._ready(model)):
            remaining = deadline - loop.time()
            if remaining <= 0:
                raise self._unavailable(model)
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait([waiter], timeout=remaining)
            finally:
                self._waiters.discard(waiter)
        candidates = [
            route.Candidate(replica.address, replica.sequences + (replica.background if background else 0))
            for replica in ready
        ]
        return Link(ready[route.pick(candidates, scope, tokens, session)])

    def _ready(self, model: str) -> list[_Replica]:
        return [
            known.connection
            for known in self._known.values()
            if known.connection is not None and known.state.model == model and known.connection.ready
        ]

    def _unavailable(self, model: str) -> Unavailable:
        states = [known for known in self._known.values() if known.state.model == model]
        if not states:
            said = "; ".join(self._problems.values()) or "no machine serves it"
            return Unavailable(f"nothing serves {model} now: {said}", loading=False)
        said = "; ".join(sorted({known.state.problem or known.problem or "loading" for known in states}))
        return Unavailable(f"{model} is not ready: {said}", loading=True)

    def _changed(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _keep_machine(self, address: str, group: asyncio.TaskGroup) -> None:
        def told(fleet: wire.Fleet) -> None:
            self._told(address, fleet, group)

        waits = self._waits()
        while True:
            try:
                machine = await _open(address, lambda: _Machine(told))
            except (OSError, TimeoutError) as error:
                self._problems[address] = f"the machine at {address} cannot be reached: {_said(error)}"
            else:
                self._problems.pop(address, None)
                await machine.until_lost()
                self._problems[address] = f"the machine at {address} was lost: {machine.why}"
                waits = self._waits()
            await asyncio.sleep(next(waits))

    def _told(self, machine: str, fleet: wire.Fleet, group: asyncio.TaskGroup) -> None:
        """A machine's new word replaces its old one. Connections stay: they end by themselves when a replica does."""
        told = {state.address: state for state in fleet.replicas}
        for key in [key for key in self._known if key[0] == machine and key[1] not in told]:
            known = self._known.pop(key)
            self.tally.forget(known.state.address)
            if known.task is not None:
                known.task.cancel()
        for address, state in told.items():
            known = self._known.setdefault((machine, address), _Known(state))
            known.state = state
            known.changed.set()
            if known.task is None and state.residency is wire.Residency.DEVICE:
                known.task = group.create_task(self._keep_replica(known))
        self._changed()

    async def _keep_replica(self, known: _Known) -> None:
        address = known.state.address
        waits = self._waits()
        while True:
            known.changed.clear()
            try:
                known.connection = await _open(address, lambda: _Replica(address, self._changed, self.tally))
            except (OSError, TimeoutError) as error:
                known.problem = f"the replica at {address} cannot be reached: {_said(error)}"
            else:
                if await self._use(known, known.connection):
                    waits = self._waits()
            with contextlib.suppress(TimeoutError):  # a machine's new word ends the wait at once
                async with asyncio.timeout(next(waits)):
                    await known.changed.wait()

    async def _use(self, known: _Known, replica: _Replica) -> bool:
        """Until the connection ends; whether anything could be submitted on it."""
        try:
            await replica.until_lost()
        finally:
            known.connection = None
            known.problem = f"the replica at {replica.address} was lost: {replica.why}"
        return replica.hello is not None

    def _waits(self) -> Iterator[float]:
        """Back-off without end: doubling, jittered, bounded."""
        wait, most = BACKOFF_S
        while True:
            yield wait * self._rng.uniform(0.5, 1.0)
            wait = min(2 * wait, most)


_C = TypeVar("_C", bound=_Connection)


async def _open(address: str, make: Callable[[], _C]) -> _C:
    """Raises OSError or TimeoutError."""
    loop = asyncio.get_running_loop()
    target = wire.parse_address(address)
    async with asyncio.timeout(CONNECT_S):
        if isinstance(target, str):
            return (await loop.create_unix_connection(make, target))[1]
        return (await loop.create_connection(make, *target))[1]


def _said(error: Exception) -> str:
    return str(error) or f"no answer within {CONNECT_S:g} s"


def pack(tokens: Iterable[int]) -> bytes:
    """Token ids as the frames carry them: u32 little-endian."""
    return array("I", tokens).tobytes()
