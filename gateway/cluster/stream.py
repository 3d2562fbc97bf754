"""One request's steps from a replica, in order, between the connection that receives them and their only reader."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Self

import msgspec

from engine.protocol import frames
from engine.protocol.types import RejectReason

STEPS_MAX: Final = 256


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
    """The replica leaves the device, and had not begun with the request, which may be sent anew."""


class OutputDelta(msgspec.Struct, frozen=True):
    """What one choice of a request gained in one step. `logprobs`: one per token where asked for, else empty."""

    index_in_n: int
    tokens: list[int]
    started: frames.SequenceStarted | None = None
    finish: frames.SequenceFinished | None = None
    logprobs: list[frames.TokenLogprobs] = []
    vector: bytes | None = None  # of a prompt with `pooling`, in its only step


class ReplicaStream:
    """The steps of the sequences `first_id` … `first_id` + n − 1. It ends after the last one's finish.

    Bounded: once STEPS_MAX steps wait for a slow reader, further tokens join the last waiting step of their choice,
    so that memory never passes the request's own max_tokens. The replica is never held up.
    """

    __slots__ = (
        *("_drop", "_error", "_loop", "_n", "_on_waited", "_open", "_steps", "_submitted_s", "_wake_requested_s"),
        *("_waiter", "first_id", "first_token_s", "started"),
    )

    def __init__(
        self,
        first_id: int,
        n: int,
        drop: Callable[[Iterable[int]], int],
        on_waited: Callable[[float], None],
        wake_requested_s: float | None,
    ) -> None:
        """`drop` forgets sequences, cancels them at the replica and returns how many still ran. The request found its
        model asleep at `wake_requested_s`, if at all; `on_waited` gets the seconds from then to its start."""
        self.first_id = first_id
        self._n = n
        self._open = n
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
        """Raises ReplicaLost, ReplicaAsleep or ReplicaRejected, after the steps that came before."""
        while not self._steps:
            if self._error is not None:
                raise self._error
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
    def ids(self) -> range:
        return range(self.first_id, self.first_id + self._n)

    @property
    def ready(self) -> int:
        """How many steps can be taken without waiting."""
        return len(self._steps)

    @property
    def asleep(self) -> bool:
        """Whether the stream ended with ReplicaAsleep."""
        return isinstance(self._error, ReplicaAsleep)

    def stop(self, index_in_n: int) -> None:
        """Ends one choice early: the replica is told, nothing more of it is received. Idempotent."""
        self._open -= self._drop((self.first_id + index_in_n,))

    def cancel(self) -> None:
        """Ends the stream: the replica is told, nothing more is received. Idempotent, also after the end."""
        if self._open:
            self._drop(self.ids)
            self._open = 0
            self._steps.clear()
            self._wake()

    def push(self, step: OutputDelta, received_s: float) -> None:
        """Adds a step that arrived at `received_s`; the last one of a choice has its `finish`."""
        if self.first_token_s is None and step.tokens:
            self.first_token_s = received_s - self._submitted_s
        if step.started is not None:
            self.started = step.started
            if self._wake_requested_s is not None:
                self._on_waited(received_s - self._wake_requested_s)
                self._wake_requested_s = None
        if step.finish is not None:
            self._open -= 1
        steps = self._steps
        if len(steps) >= STEPS_MAX and self._join(step):
            return
        steps.append(step)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error; the connection has forgotten its sequences."""
        self._open = 0
        self._error = error
        self._wake()

    def _join(self, step: OutputDelta) -> bool:
        """Adds the step's tokens to the last waiting step of its choice; false where there is none."""
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

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
