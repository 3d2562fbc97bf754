"""What a connection asks of a scheduler and what it is sent: requests come, are cancelled, and end. It does not know
what a sequence needs in order to run.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.protocol.frames import (
    PoolingOutput,
    ReplicaLoad,
    SequenceFinished,
    SequenceStarted,
    StepOutputs,
    TokenLogprobs,
)
from engine.protocol.types import FinishReason
from engine.scheduling.step_costs import StepCosts
from engine.scheduling.waiting import WaitingQueue
from engine.sequences.sequence import Sequence, SequenceState


class EndSequence(Protocol):
    """How a scheduler ends a sequence that waits or runs: it calls `Intake.report_end` among other things."""

    def __call__(self, sequence: Sequence, reason: FinishReason, message: str = "") -> None: ...


@dataclass(slots=True)
class PendingOutputs:
    """What one owner has not been sent yet: a StepOutputs in the making."""

    ids: list[int] = field(default_factory=list)  # one for each sampled token
    forced: dict[int, int] = field(default_factory=dict)  # how many tokens more came with that of an index
    tokens: "array[int]" = field(default_factory=lambda: array("I"))
    started: list[SequenceStarted] = field(default_factory=list)
    finished: list[SequenceFinished] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    vectors: list[PoolingOutput] = field(default_factory=list)

    def add_forced(self, tokens: "array[int]") -> None:
        """Adds tokens behind the newest one, of its sequence."""
        self.tokens.extend(tokens)
        self.forced[len(self.ids) - 1] = len(tokens)

    def build(self) -> StepOutputs:
        counts, tokens = [1] * len(self.ids), self.tokens.tobytes()
        for index, forced in self.forced.items():
            counts[index] += forced
        return StepOutputs(self.ids, counts, tokens, self.started, self.finished, self.logprobs, self.vectors)


class Intake:
    """The side of a scheduler that faces connections; both schedulers have one.

    admitting  whether waiting sequences may start.
    waiting    the queues, and all sequences that have not ended.
    outputs    what each owner is sent next, to be added to until it is taken, beside the rejects of `waiting`.
    counters   those of `waiting` too; they only grow.
    step_costs  what steps take, where the scheduler has that learned.
    """

    def __init__(
        self,
        max_waiting: int,
        work: Callable[[Sequence], float],
        clock: Callable[[], float],
        end: EndSequence,
        refuse: Callable[[Sequence], None] | None = None,
    ) -> None:
        """`refuse` raises SubmitRejected for a sequence that can never run here; max_waiting and work as in
        WaitingQueue."""
        self.admitting = True
        self.waiting = WaitingQueue(max_waiting, work, clock)
        self.outputs: defaultdict[int, PendingOutputs] = defaultdict(PendingOutputs)
        self.counters: Counter[str] = self.waiting.counters
        self.step_costs = StepCosts()
        self._end = end
        self._refuse = refuse

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not self.waiting.sequences

    # From connections

    def add(self, sequences: Items[Sequence]) -> None:
        """Queues the choices of one request, all or none. Raises SubmitRejected: the queue is full, an id is in use,
        the request can never run, or it would wait for longer than it may. A full queue drops requests of the account
        that has most in it for its weight."""
        for sequence in sequences:
            self.waiting.refuse_known_id(sequence)
            if self._refuse is not None:
                self._refuse(sequence)
        self.waiting.add(sequences)

    def cancel(self, owner: int, ids: Items[int]) -> None:
        """Ends these sequences. Ids that are unknown or have ended are ignored."""
        for id in ids:
            sequence = self.waiting.sequences.get((owner, id))
            if sequence is not None:
                self._end(sequence, FinishReason.CANCELLED)

    def move(self, sequence: Sequence) -> None:
        """Ends a sequence here: it goes on at another replica, which has its KV."""
        self._end(sequence, FinishReason.MOVED)

    def drop(self, owner: int) -> None:
        """Ends all sequences of an owner that has left, and discards its outputs."""
        self.cancel(owner, [id for other, id in self.waiting.sequences if other == owner])
        self.outputs.pop(owner, None)

    def fail(self, sequences: Iterable[Sequence], message: str) -> None:
        """Ends these sequences with an error, except those that have ended."""
        for sequence in sequences:
            if sequence.state != SequenceState.ENDED:
                self._end(sequence, FinishReason.ERROR, message)

    def end_all(self, message: str) -> None:
        """Ends every sequence with an error."""
        self.fail(list(self.waiting.sequences.values()), message)

    # To connections

    def report_first_start(self, sequence: Sequence) -> None:
        """Counts and reports that a sequence runs for the first time."""
        waited_ms = self.waiting.first_start(sequence)
        self.outputs[sequence.owner].started.append(SequenceStarted(sequence.id, sequence.cached_tokens, waited_ms))

    def report_end(self, sequence: Sequence, reason: FinishReason, message: str) -> None:
        """Counts and reports the end of a sequence."""
        self.counters[f"finished_{reason}"] += 1
        finished = SequenceFinished(sequence.id, reason, sequence.emitted, message)
        self.outputs[sequence.owner].finished.append(finished)

    def end_with_vector(self, sequence: Sequence, vector_H: NDArray[np.float32]) -> None:
        """Reports the vector of a sequence's prompt, which is all that was requested, and ends it."""
        vector = PoolingOutput(sequence.id, vector_H.astype("<f4").tobytes())
        self.outputs[sequence.owner].vectors.append(vector)
        self._end(sequence, FinishReason.STOP)

    def take_outputs(self) -> dict[int, StepOutputs]:
        """All outputs by owner. Each is returned once."""
        outputs = {owner: pending.build() for owner, pending in self.outputs.items()}
        self.outputs.clear()
        return outputs

    def queue_load(self, steps: int, draining: bool) -> ReplicaLoad:
        """How full the queues are. A scheduler with a KV pool adds its blocks."""
        live = sum(account.running for account in self.waiting.live.running_accounts)
        best_effort = sum(account.running for account in self.waiting.best_effort.running_accounts)
        return ReplicaLoad(
            running=live,
            waiting=len(self.waiting.live),
            waiting_tokens=self.waiting.live_tokens,
            free_blocks=0,
            cached_blocks=0,
            steps=steps,
            draining=draining,
            counters=dict(self.counters),
            background=best_effort + len(self.waiting.best_effort),
        )
