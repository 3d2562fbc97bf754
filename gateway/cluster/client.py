"""The connection to one replica, which spreads the steps it receives over its requests' streams.

It does not know which replica a request should go to. A StepOutputs frame costs one callback, and each token event a
deque append and at most one wake-up.
"""

import asyncio
import secrets
import sys
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import msgspec

from engine.protocol import frames
from engine.protocol.address import parse_tls_address
from engine.protocol.cache_frames import HandOver, HandOverFailed, HeldPrefixes
from engine.protocol.types import KEY_BYTES, FinishReason, RejectReason
from gateway.cluster.connection import FrameProtocol
from gateway.cluster.replica_counters import RecentLoad, ReplicaCounters
from gateway.cluster.stream import (
    Departure,
    Outlook,
    OutputDelta,
    ReplicaLeaving,
    ReplicaLost,
    ReplicaMoved,
    ReplicaRejected,
    ReplicaStream,
)

_RESUME_KEPT: Final = 0.75  # of what resuming took before
_TOKEN_BYTES: Final = 4
_FAILED_MAX: Final = 1024  # places that are remembered
_QUIET_S: Final = 15  # before the kernel asks a quiet replica's host: its machine's silence tells far sooner


def kv_model(model: str) -> str:
    """What KV means at replicas that compute with `model`: where it is equal, another number of GPUs rounds sums
    otherwise, and nothing else differs."""
    return model.partition("/")[0]


class ReplicaConnection(FrameProtocol):
    """`on_waited` gets the seconds that a request waited which found its model asleep. Whoever knows the replica's
    machine sets `crashed`, once the connection has ended.

    load_s            when its last load came; prompts were sent since, queued_prompts, of so many queued_tokens, with
                      the queued_keys that those see.
    resume_s          from the moment that a request comes with its KV to its next token, of late.
    failed_handovers  when the last one from here to a place failed.
    """

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
        self.crashed: asyncio.Future[bool] = self.closed.get_loop().create_future()
        self.on_held: Callable[[HeldPrefixes], None] = lambda held: None
        self.draining = False  # it takes nothing new for as long as it lives
        self.hello: frames.Hello | None = None
        self.load: frames.ReplicaLoad | None = None
        self.load_s = 0.0
        self.queued_prompts, self.queued_tokens, self.queued_keys = 0, 0, 0.0
        self.resume_s = 0.0
        self._coming: list[tuple[ReplicaStream, float]] = []
        self.failed_handovers: dict[str, float] = {}
        self._counters = counters
        self._on_change = on_change
        self._on_waited = on_waited
        self._streams: dict[int, ReplicaStream] = {}
        self._background: set[int] = set()  # of the streams' sequences
        self._waiting: set[int] = set()  # of the others of them, those that are not known to have started
        self._next_id = 1
        self.max_sequences = sys.maxsize  # it runs at once
        self.sequences = 0  # live ones that run or wait there, or are on their way: of all gateways, as far as known
        self.background = 0  # the same for sequences in the background

    @property
    def ready(self) -> bool:
        return self.hello is not None and not self.draining and self._transport is not None

    @property
    def region(self) -> str:
        """Where its host is, as far as it says so and its certificate does not say otherwise."""
        return "" if self.hello is None else self.region_of(self.hello.region)

    @property
    def regions(self) -> set[tuple[str, ...]]:
        """Where the requests that run or wait there may be served: what their orders say."""
        return {stream.regions for stream in self._streams.values()}

    @property
    def resumes(self) -> bool:
        """Whether it can go on with what another replica began."""
        return self.hello is not None and self.hello.resumes

    @property
    def model(self) -> str:
        """What it computes with: replicas of which this differs give other tokens. One of the protocol before names its
        weights alone."""
        if self.hello is None:
            return ""
        return f"{self.hello.revision}:{self.hello.digest}" if self.hello.digest else self.hello.revision

    def coming_s(self, now: float) -> tuple[float, ...]:
        """In how many seconds sequences are expected that go on here once others have computed their prompts."""
        return tuple(max(0.0, at - now) for stream, at in self._coming for _ in range(stream.leaves))

    @property
    def expected(self) -> int:
        """Live sequences that run or wait there, and those that others are to hand over to it."""
        return self.sequences + (sum(stream.leaves for stream, _ in self._coming) if self._coming else 0)

    @property
    def pending_tokens(self) -> int:
        """Tokens of prompts that it has to compute, as far as known here."""
        prefill = None if self.load is None else self.load.prefill
        return self.queued_tokens + (0 if prefill is None else prefill.pending_tokens)

    def open_stream(
        self, order: frames.Submit, deadline_ms: int, wake_requested_s: float | None,
        answers: "ReplicaConnection | None" = None, arrives_s: float = 0.0,
    ) -> ReplicaStream:  # fmt: skip
        """Where another replica `answers`, this one computes the prompt alone, and hands the request over, which is
        expected there at arrives_s."""
        if self._transport is None:
            raise ReplicaLost(f"the replica at {self.address} was lost: {self.close_reason}")
        if self.congested:
            raise ReplicaRejected(RejectReason.BUSY, "the replica reads too slowly, try again", 1000)
        first_id, self._next_id = self._next_id, self._next_id + order.n
        self.send(msgspec.structs.replace(order, id=first_id, deadline_ms=deadline_ms))
        given = {each.choice: len(each.tokens) // _TOKEN_BYTES for each in order.given}
        stream = ReplicaStream(
            first_id, [*given] or range(order.n), self._drop, self._on_waited, wake_requested_s, self.model,
            replica=self, given=given, regions=tuple(order.regions), replaceable=order.pooling is None,
        )  # fmt: skip
        for id in stream.ids:
            self._streams[id] = stream
        if any(each.handover for each in order.given):
            stream.on_first_token = self._note_resumed
        else:
            tokens = len(order.tokens) // _TOKEN_BYTES
            self.queued_prompts += order.n
            self.queued_tokens += tokens
            self.queued_keys += tokens * (tokens + 1) / 2
        if answers is not None:
            self._ask_move(stream, answers, arrives_s, may_stay=True)
        if order.terms.background:
            self._background.update(stream.ids)
            self.background += len(stream.ids)
        else:
            self._waiting.update(stream.ids)
            self.sequences += len(stream.ids)
        return stream

    def doubt(self) -> None:
        """Has other replicas begin with what this one may be lost with: it has been silent for a while."""
        for stream in set(self._streams.values()):
            stream.want_successor(Outlook.DOUBTED)

    def want_successors(self, regions: tuple[str, ...] = ()) -> None:
        """Has other replicas go on with what it has begun with of the requests that have these regions; it answers
        until they do."""
        for stream in self._staying(regions):
            stream.want_successor(Outlook.LEAVES)

    def release(self, regions: tuple[str, ...] = (), *, started: bool) -> None:
        """Ends with ReplicaLeaving what the replica has not begun with of the requests that have these regions; with
        `started` the rest too."""
        for stream in set(self._streams.values()):
            if stream.regions == regions and (stream.started is None or (started and stream.departure is None)):
                self._drop(stream.ids)
                stream.fail(ReplicaLeaving())

    def handover_from(self, other: "ReplicaConnection") -> str:
        """Where another replica hands over requests to this one, as that one's host calls it; empty where it cannot, or
        its KV means something else. A replica of this gateway's own host has no name for others'."""
        alike = kv_model(self.model) == kv_model(other.model)
        if self.hello is None or other.hello is None or not alike or not self.ready:
            return ""
        own, its = parse_tls_address(self.address), parse_tls_address(other.address)
        if not self.hello.handover or not other.hello.handover:
            return ""
        if (own and own[:3]) == (its and its[:3]):
            return self.hello.handover
        return own.beside(self.hello.handover) if own is not None else ""

    def hand_over(self, others: Iterable["ReplicaConnection"], regions: tuple[str, ...] = ()) -> None:
        """Has the replica move what it has begun with of the requests that have these regions to others that take from
        it: first to those with room, of these to its own host's, of these to the one with the least to do. What cannot
        be moved ends with ReplicaLeaving."""
        places = [(other.handover_from(self), other) for other in others if other is not self]
        targets = [(parse_tls_address(place) is not None, other) for place, other in places if place]
        for stream in self._staying(regions) if targets else ():
            if not stream.succeeding:
                room = [(target.expected >= target.max_sequences, far, target.expected) for far, target in targets]
                self._ask_move(stream, targets[room.index(min(room))][1], self.received_s)

    def _staying(self, regions: tuple[str, ...]) -> list[ReplicaStream]:
        """What it has begun with of the requests that have these regions, and does not hand over."""
        streams = set(self._streams.values())
        return [each for each in streams if each.regions == regions and each.started and each.departure is None]

    def _ask_move(
        self, stream: ReplicaStream, target: "ReplicaConnection", at_s: float, *, may_stay: bool = False
    ) -> None:
        """Has what runs or waits of a request move once its prompt is computed."""
        assert target.hello is not None
        address = target.handover_from(self)
        pairs = [pair for pair in zip(stream.ids, stream.choices, strict=True) if pair[0] in self._streams]
        keys = {choice: secrets.token_bytes(KEY_BYTES) for _, choice in pairs}
        stream.departure = Departure(target, keys, may_stay=may_stay)
        target._coming = [*(each for each in target._coming if each[0].leaves), (stream, at_s)]
        for id, choice in pairs:
            self.send(HandOver(id, address, target.hello.boot, keys[choice]))

    def _stay(self, id: int) -> None:
        """A sequence was not moved. If its request has no other choice it is answered here, until another replica
        can where it is to leave; else its request goes on elsewhere, with the KV of those choices that were."""
        stream = self._streams.get(id)
        if stream is not None and (departure := stream.departure) is not None:
            self._note_failed(departure)
            if len(stream.choices) == 1:
                stream.departure = None
                if not (departure.may_stay and self.ready):
                    stream.want_successor(Outlook.LEAVES)
                return
            self._drop(stream.ids)
            keys = {choice: departure.keys[choice] for choice in departure.moved}
            stream.fail(ReplicaMoved(departure.target, keys) if keys else ReplicaLeaving())

    def _note_failed(self, departure: Departure) -> None:
        if isinstance(departure.target, ReplicaConnection) and (place := departure.target.handover_from(self)):
            if len(self.failed_handovers) >= _FAILED_MAX:
                self.failed_handovers.clear()
            self.failed_handovers[place] = self.received_s

    def _note_resumed(self, seconds: float) -> None:
        before = self.resume_s or seconds
        self.resume_s = _RESUME_KEPT * before + (1 - _RESUME_KEPT) * seconds

    def _drop(self, ids: Iterable[int]) -> int:
        """Forgets these sequences and cancels those that still run, whose number it returns."""
        running = [id for id in ids if self._forget(id)]
        if running:
            self.send(frames.Cancel(running))
        return len(running)

    def _forget(self, id: int) -> ReplicaStream | None:
        """Forgets a sequence that has ended. Returns its stream."""
        if (stream := self._streams.pop(id, None)) is not None:
            if id in self._background:
                self._background.remove(id)
                self.background -= 1
            else:
                self._waiting.discard(id)
                self.sequences -= 1
        return stream

    def receive(self, frame: frames.Frame) -> None:
        if isinstance(frame, frames.StepOutputs):
            self._step(frame)
        elif isinstance(frame, frames.ReplicaLoad):
            self._take_load(frame)
        elif isinstance(frame, HeldPrefixes):
            self.on_held(frame)
        elif isinstance(frame, frames.Reject):
            stream = self._streams.get(frame.id)
            if stream is not None:
                for id in stream.ids:
                    self._forget(id)
                if stream.departure is not None and frame.reason is RejectReason.BUSY:
                    self._note_failed(stream.departure)  # whoever answers may have room for its prompt too
                    stream.fail(ReplicaLeaving())
                else:
                    stream.fail(ReplicaRejected(frame.reason, frame.message, frame.retry_after_ms))
            if frame.reason is RejectReason.DRAINING and not self.draining:
                self.draining = True  # before its load says so: nobody is sent there twice
                self._on_change()
        elif isinstance(frame, HandOverFailed):
            self._stay(frame.id)
        elif isinstance(frame, frames.Hello):
            self.hello, self.max_sequences = frame, frame.max_sequences or sys.maxsize
            if frame.polled:
                self.watch_peer(_QUIET_S)
                self.poll()
            self._on_change()

    def poll(self) -> None:
        """Has the replica say its load now, and from now on what is news alone. One that is too old is never quiet."""
        if self.hello is not None and self.hello.polled:
            self.send(frames.PollLoad())

    def _take_load(self, load: frames.ReplicaLoad) -> None:
        """What of ours has started runs in its load too; what has not waits in it, or is on its way. A load that was
        said before counts nothing."""
        was_ready = self.ready
        if load is not self.load and self.hello is not None:
            self._counters.update(self.address, self.hello, load)
            self.recent_load.append(self.received_s, load)
        self.load, self.draining, self.load_s = load, load.draining, self.received_s
        self.queued_prompts, self.queued_tokens, self.queued_keys = 0, 0, 0.0
        waiting, background = len(self._waiting), len(self._background)
        started = len(self._streams) - waiting - background
        self.sequences = max(started, load.running) + max(waiting, load.waiting)
        self.background = max(background, load.background)
        if was_ready != self.ready:
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
                choice = stream.choices[id - stream.first_id]
                stream.push(OutputDelta(choice, tokens[start : start + count]), received_s)
            start += count

    def _step_in_full(self, frame: frames.StepOutputs, tokens: list[int], special: set[int]) -> None:
        """Sequences about which the frame says more than their tokens, in the order started, going on, ended."""
        gained, start = {item.id: list[int]() for item in frame.started}, 0
        for id, count in zip(frame.ids, frame.counts, strict=True):
            if id in special:
                gained.setdefault(id, []).extend(tokens[start : start + count])
            start += count
        started = {item.id: item for item in frame.started}
        self._waiting.difference_update(started)
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
                self._forget(id)
            choice, finish = stream.choices[id - stream.first_id], finished.get(id)
            has_moved = finish is not None and finish.reason is FinishReason.MOVED
            extras = started.get(id), None if has_moved else finish, logprobs.get(id, []), vectors.get(id)
            stream.push(OutputDelta(choice, gained.get(id, []), *extras), self.received_s)
            if has_moved:
                stream.note_moved(choice)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        streams, self._streams = set(self._streams.values()), {}
        for stream in streams:
            stream.fail(ReplicaLost(f"the replica at {self.address} was lost: {self.close_reason}", self.crashed))
        self._counters.disconnected(self.address)
        self._on_change()


class PrefillPlace(NamedTuple):
    """A replica that computes a prompt for another one, which is expected to have it at arrives_s."""

    site: ReplicaConnection
    arrives_s: float


class ReplicaClient(NamedTuple):
    """A replica chosen for one request, which has waited `waited_s` for it. `wake_requested_s`: as in ReplicaStream.
    `prefill` computes its prompt, where that is another one."""

    replica: ReplicaConnection
    waited_s: float
    wake_requested_s: float | None
    prefill: PrefillPlace | None = None

    def submit(self, order: frames.Submit, deadline_ms: int = 0) -> ReplicaStream:
        """Writes the order under an id of this connection. Raises ReplicaLost where the connection has ended,
        ReplicaRejected where it is congested."""
        if self.prefill is not None:
            site, arrives_s = self.prefill
            return site.open_stream(order, deadline_ms, self.wake_requested_s, self.replica, arrives_s)
        return self.replica.open_stream(order, deadline_ms, self.wake_requested_s)
