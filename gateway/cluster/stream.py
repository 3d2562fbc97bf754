"""One request's steps from a replica, in order, between the connection that receives them and their only reader.

Where it is not certain that a replica will go on with a stream, another one begins an heir beside it, and one of the
two goes on: where the replica is in doubt, the first that speaks; where it leaves, the heir with its first token, until
which the replica answers. This module does not choose where heirs begin.
"""

import asyncio
import enum
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, Self

import msgspec

from engine.protocol import frames
from engine.protocol.types import FinishReason, RejectReason

STEPS_MAX: Final = 256
HEIR_PAUSE_S: Final = 0.25  # before another heir is asked for where there was none, or it was refused
LAG_S: Final = 0.1  # an heir that took longer to its first token is as far behind a replica that answers meanwhile


class ReplicaLost(Exception):
    """The replica's connection ended while this request ran. What was received until then stays valid.

    `crashed` tells, a moment later, whether the replica died by itself: not where its host went, or where it was told
    to end. None: the request was not there yet.
    """

    def __init__(self, message: str, crashed: asyncio.Future[bool] | None = None) -> None:
        super().__init__(message)
        self.crashed = crashed


class ReplicaRejected(Exception):
    """The replica did not accept the request; nothing of it runs."""

    def __init__(self, reason: RejectReason, message: str, retry_after_ms: int) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after_ms = retry_after_ms


class ReplicaLeaving(Exception):
    """The replica ends, or leaves the device. What the request has not received it gets elsewhere, or there later."""


class SuccessorWanted(Exception):
    """An heir is to begin elsewhere behind what was read, and be given to `prepare`; the stream itself goes on. `lost`:
    how the heir before was lost."""

    def __init__(self, lost: ReplicaLost | None) -> None:
        super().__init__("another replica is to begin beside this one")
        self.lost = lost


class ReplicaSucceeded(Exception):
    """The heir goes on, behind what it was given; the steps of this stream that were not read came before."""


class Outlook(enum.IntEnum):
    """What is expected of a stream's replica."""

    STAYS = 0
    DOUBTED = 1  # it has been silent for a while
    LEAVES = 2  # it answers until another one does


class StreamTarget(Protocol):
    """A replica that a request may go on at."""

    @property
    def ready(self) -> bool: ...

    def open_stream(
        self, order: frames.Submit, deadline_ms: int, wake_requested_s: float | None
    ) -> "ReplicaStream": ...


class ReplicaMoved(Exception):
    """The choices that have not ended go on at `target`, where the KV of those with a key is already."""

    def __init__(self, target: StreamTarget, keys: dict[int, bytes]) -> None:
        super().__init__("its replica handed it over")
        self.target = target
        self.keys = keys


@dataclass(slots=True)
class Departure:
    """A request's move to another replica: a key for each choice that was asked to, and which have moved. `may_stay`:
    nothing but speed is lost where it is answered by the replica that it is at."""

    target: StreamTarget
    keys: dict[int, bytes]
    moved: set[int] = field(default_factory=set)
    may_stay: bool = False


class OutputDelta(msgspec.Struct, frozen=True):
    """What one choice of a request gained in one step. `logprobs`: one per token where asked for, else empty."""

    index_in_n: int
    tokens: list[int]
    started: frames.SequenceStarted | None = None
    finish: frames.SequenceFinished | None = None
    logprobs: list[frames.TokenLogprobs] = []
    vector: bytes | None = None  # of a prompt with `pooling`, in its only step


class ReplicaStream:
    """The steps of `choices` of a request, which are the sequences from `first_id` on. It ends after the last one's
    finish. `model` names what the `replica` computes with; others gave as many tokens of each choice as `given` says;
    it may be served in `regions` alone, where there are any. With a `departure` it ends with ReplicaMoved once no
    choice is left here, if one has moved; it has no heir then, nor where it is not `replaceable`. The replica `warmed`
    has computed most of what the next heir needs.

    Bounded: once STEPS_MAX steps wait for a slow reader, further tokens join the last waiting step of their choice,
    so that memory never passes the request's own max_tokens. The replica is never held up.
    """

    __slots__ = (
        *("_drop", "_error", "_loop", "_on_waited", "_open", "_steps", "_submitted_s", "_wake_requested_s", "_waiter"),
        *("_elder", "_lost", "_outlook", "_wanted", "heir", "replaceable", "replica", "warmed"),
        *("choices", "departure", "first_id", "first_token_s", "given", "model", "on_first_token", "regions"),
        "started",
    )

    def __init__(
        self,
        first_id: int,
        choices: Sequence[int],
        drop: Callable[[Iterable[int]], int],
        on_waited: Callable[[float], None],
        wake_requested_s: float | None,
        model: str,
        *,
        replica: StreamTarget,
        given: Mapping[int, int],
        regions: tuple[str, ...],
        replaceable: bool,
    ) -> None:
        """`drop` forgets sequences, cancels them at the replica and returns how many still ran. The request found its
        model asleep at `wake_requested_s`, if at all; `on_waited` gets the seconds from then to its start."""
        self.first_id = first_id
        self.choices = choices
        self.model = model
        self.replica = replica
        self.given = given
        self.regions = regions
        self.replaceable = replaceable
        self.heir: ReplicaStream | None = None
        self.warmed: StreamTarget | None = None
        self._elder: ReplicaStream | None = None  # whose heir this is, while either may go on
        self._outlook = Outlook.STAYS
        self._wanted = False  # its reader is to begin an heir
        self._lost: ReplicaLost | None = None
        self.departure: Departure | None = None
        self.on_first_token: Callable[[float], None] | None = None  # gets first_token_s
        self._open = len(choices)
        self._drop = drop
        self._on_waited = on_waited
        self._wake_requested_s = wake_requested_s
        self._steps: deque[OutputDelta] = deque()
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._submitted_s = time.monotonic()
        self.started: frames.SequenceStarted | None = None  # the last choice that started, also before it is read
        self.first_token_s: float | None = None  # from the submission to the arrival of the first token

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> OutputDelta:
        """Raises ReplicaLost, ReplicaLeaving, ReplicaMoved, ReplicaSucceeded or ReplicaRejected, after the steps that
        came before; and SuccessorWanted between two steps."""
        while not self._steps:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            if self._wanted:
                self._wanted, lost, self._lost = False, self._lost, None
                raise SuccessorWanted(lost)
            assert self._waiter is None, "a stream has one reader"
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._steps.popleft()

    @property
    def ids(self) -> range:
        return range(self.first_id, self.first_id + len(self.choices))

    @property
    def resumed(self) -> bool:
        """Whether another replica gave the first tokens."""
        return bool(self.given)

    @property
    def ready(self) -> int:
        """How many steps can be taken without waiting."""
        return len(self._steps)

    @property
    def leaves(self) -> int:
        """How many choices are to go on elsewhere."""
        return 0 if self.departure is None else self._open

    @property
    def left(self) -> bool:
        """Whether the stream ended with ReplicaLeaving."""
        return isinstance(self._error, ReplicaLeaving)

    def stop(self, index_in_n: int) -> None:
        """Ends one choice early: the replica is told, nothing more of it is received. Idempotent."""
        self._open -= self._drop((self.first_id + self.choices.index(index_in_n),))
        self._end_departure()

    def cancel(self) -> None:
        """Ends the stream and its heir: replicas are told, nothing more is received. Idempotent, also after the end."""
        self._drop_heir()
        if self._open:
            self._drop(self.ids)
            self._open = 0
            self._steps.clear()
            self._wake()

    def push(self, step: OutputDelta, received_s: float) -> None:
        """Adds a step that arrived at `received_s`; the last one of a choice has its `finish`."""
        if self.first_token_s is None and step.tokens:
            self.first_token_s = received_s - self._submitted_s
            if self.on_first_token is not None:
                self.on_first_token(self.first_token_s)
        if step.started is not None:
            self.started = step.started
            if self._wake_requested_s is not None:
                self._on_waited(received_s - self._wake_requested_s)
                self._wake_requested_s = None
        if step.finish is not None:
            self._open -= 1
            self._end_departure()
        steps = self._steps
        if len(steps) < STEPS_MAX or not self._join(step):
            steps.append(step)
            self._wake()
        if self._outlook:
            self._reconsider()
        if self._elder is not None:
            self._elder._hear_heir(self, step)

    def note_moved(self, choice: int) -> None:
        """A choice goes on elsewhere; its tokens from here were pushed before."""
        if self.departure is not None:
            self.departure.moved.add(choice)
            self._open -= 1
            self._end_departure()

    def _end_departure(self) -> None:
        departure = self.departure
        if departure is not None and departure.moved and not self._open and self._error is None:
            self._error = ReplicaMoved(departure.target, departure.keys)
            self._wake()

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error; the connection has forgotten its sequences. An heir goes on."""
        self._open = 0
        self._error = ReplicaSucceeded() if self.heir is not None and isinstance(error, ReplicaRejected) else error
        self._wake()
        if self._elder is not None:
            self._elder._lose_heir(error)

    # Its heir

    @property
    def succeeding(self) -> bool:
        """Whether another replica is to go on with it by its tokens."""
        return bool(self._outlook)

    def want_successor(self, outlook: Outlook) -> None:
        """Asks the reader for an heir, again and again where none can begin."""
        self._outlook = max(self._outlook, outlook)
        self._ask()

    def prepare(self, heir: "ReplicaStream | None") -> None:
        """Takes the heir that its reader has begun behind all that it read; None: no other replica could."""
        if heir is None:
            self._loop.call_later(HEIR_PAUSE_S, self._ask)
        elif self._open and self._outlook and self.departure is None:
            self.heir, heir._elder, self._wanted = heir, self, False
        else:
            heir.cancel()

    def take_heir(self) -> "ReplicaStream | None":
        """The heir, which from now on stands for itself."""
        heir, self.heir = self.heir, None
        if heir is not None:
            heir._elder = None
        return heir

    def _ask(self) -> None:
        if self.replaceable and self._open and self._outlook and self.departure is None:
            self._wanted = self.heir is None
            self._wake()

    def _reconsider(self) -> None:
        """Its replica has spoken."""
        if self._outlook is Outlook.DOUBTED:
            self._outlook, self._wanted = Outlook.STAYS, False
        if not (self._outlook and self._open):
            self._drop_heir()

    def _hear_heir(self, heir: "ReplicaStream", step: OutputDelta) -> None:
        """Gives way to its heir with that one's first token. Where that took long while this replica answered, another
        heir goes first behind what came meanwhile, and finds the rest computed."""
        if self._error is not None:
            return
        if step.finish is not None and step.finish.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            self._drop_heir()
            self._lose_heir(None)
        elif step.tokens:
            assert heir.first_token_s is not None
            if self._outlook is Outlook.LEAVES and self.warmed is None and heir.first_token_s > LAG_S:
                self.warmed = heir.replica
                self._drop_heir()
                self._ask()
            else:
                self._drop(self.ids)
                self.fail(ReplicaSucceeded())

    def _lose_heir(self, error: Exception | None) -> None:
        """An heir was refused or lost: this stream goes on as before, if it does, and asks again in a while."""
        if self._error is None:
            self.heir = None
            self._lost = error if isinstance(error, ReplicaLost) else self._lost
            self._loop.call_later(HEIR_PAUSE_S, self._ask)

    def _drop_heir(self) -> None:
        if (heir := self.take_heir()) is not None:
            heir.cancel()

    def _join(self, step: OutputDelta) -> bool:
        """Adds the step's tokens to the last waiting step of its choice; false where there is none."""
        for back in range(len(self._steps) - 1, max(-1, len(self._steps) - 1 - len(self.choices)), -1):
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

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def pack_token_ids(tokens: Iterable[int]) -> bytes:
    """Token ids as the frames carry them: u32 little-endian."""
    return array("I", tokens).tobytes()
