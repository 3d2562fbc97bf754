"""Which texts an encoder reads in the next step, and what their vectors mean. It knows neither torch nor sockets.

A text is read whole, in one step, and nothing of it stays: there are no blocks, no preemption and no order among what
runs. Accounts take turns as in fairness.py; a step takes texts in that order as long as they fit into its rows, and a
text that is longer than that runs alone. Texts in the background run in steps of their own, while no other one waits.
"""

import math
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Final

import numpy as np

from engine.log import log
from engine.protocol.frames import PoolingOutput, Reject, ReplicaLoad, SequenceFinished, SequenceStarted, StepOutputs
from engine.protocol.types import FinishReason
from engine.scheduling.block_pool import ShrinkPlan, WakeExtents
from engine.scheduling.fair_queue import PROMPT_TOKEN, AccountQueue, FairQueue
from engine.scheduling.outputs import OutputCollector
from engine.scheduling.scheduler import NOT_FINITE, OUT_OF_MEMORY
from engine.scheduling.sequence import Sequence, SequenceState
from engine.scheduling.step_plan import INFLIGHT_STEPS_MAX, StepPlan
from engine.scheduling.token_budget import SchedulerConfig
from engine.scheduling.waiting import WaitingQueue
from engine.step.encoder_layout import pack_texts
from engine.step.executor import RunnerOutput

BEST_EFFORT_DIVISOR: Final = 8  # of a step's rows, one in so many: a text that comes meanwhile waits for its end


class EncoderScheduler:
    """The loop is as Scheduler's: `next_batch`, launch, `commit` (or `fail`, or `retry_smaller`), `news`. One more step
    may be planned before the one before it has landed; flights land in the order of their launch."""

    def __init__(self, limits: SchedulerConfig, clock: Callable[[], float]) -> None:
        self.admitting = True  # what waits may start
        self._asleep = False
        self._limits = limits
        self._rows_max = limits.step_tokens
        self._clock = clock
        self._waiting = WaitingQueue(limits.waiting, _work, clock)
        self._flights: deque[StepPlan] = deque()
        self._landed_s = -math.inf
        self._steps = 0
        self._counters: Counter[str] = Counter()
        self._news = OutputCollector()

    # Coming and going

    def add(self, sequences: Items[Sequence]) -> None:
        """Queues a text. Raises Refused: queue full, an id in use, or it would wait for longer than it may. Where the
        queue is full, who has most in it for its weight makes room."""
        (sequence,) = sequences
        self._waiting.examine(sequence)
        self._waiting.add(sequences)

    def cancel(self, owner: int, ids: Items[int]) -> None:
        """Ends these texts. Ids that are unknown or have ended are ignored."""
        for id in ids:
            sequence = self._waiting.sequences.get((owner, id))
            if sequence is not None:
                self._end(sequence, FinishReason.CANCELLED)

    def drop(self, owner: int) -> None:
        """Ends all texts of an owner that is gone; there is nobody to tell."""
        self.cancel(owner, [id for other, id in self._waiting.sequences if other == owner])
        self._news.forget(owner)

    def end_all(self, message: str) -> None:
        """Ends every text with an error."""
        for sequence in list(self._waiting.sequences.values()):
            self._end(sequence, FinishReason.ERROR, message)

    # One step

    def next_batch(self) -> StepPlan | None:
        """The next step's texts, or None where nothing waits that may run."""
        assert len(self._flights) < INFLIGHT_STEPS_MAX
        self._waiting.expire()
        if not self.admitting or self._asleep:
            return None
        chosen = self._choose(self._waiting.queue, self._rows_max)
        if not chosen:
            chosen = self._choose(self._waiting.behind, max(1, self._rows_max // BEST_EFFORT_DIVISOR))
        if not chosen:
            return None
        chosen.sort(key=lambda sequence: sequence.prompt_tokens)  # those of one length are read together
        poolings = [sequence.pooling for sequence in chosen if sequence.pooling is not None]
        lengths = [sequence.prompt_tokens for sequence in chosen]
        packed = pack_texts([np.frombuffer(sequence.tokens, np.int32) for sequence in chosen], poolings)
        plan = StepPlan(packed, chosen, lengths, list(range(len(chosen))), 0.0, self._clock())
        self._flights.append(plan)
        return plan

    def commit(self, plan: StepPlan, sampled: RunnerOutput) -> None:
        """Takes in what a step computed: a vector for each of its texts."""
        self._land(plan)
        vectors_RH, now = sampled.vectors_RH, self._clock()
        assert vectors_RH is not None
        assert len(vectors_RH) == len(plan.sequences)
        served, took_s, self._landed_s = 0, now - self._landed_s, now
        for sequence, token, vector in zip(plan.sequences, sampled.tokens_R.tolist(), vectors_RH, strict=True):
            standing, tokens = sequence.standing, sequence.prompt_tokens
            standing.level += tokens * standing.prompt_cost
            self._counters["computed_tokens"] += tokens
            served += 0 if sequence.background else PROMPT_TOKEN * tokens
            if sequence.stage == SequenceState.ENDED:
                continue
            if token < 0:
                self._counters["not_finite"] += 1
                log("not_finite", computed=tokens)
                self._end(sequence, FinishReason.ERROR, NOT_FINITE)
                continue
            self._news.of(sequence.owner).vectors.append(PoolingOutput(sequence.id, vector.astype("<f4").tobytes()))
            self._end(sequence, FinishReason.STOP)
        self._waiting.observe(served, took_s)
        self._steps += 1
        self._rows_max = min(self._limits.step_tokens, self._rows_max + max(1, self._rows_max // 16))

    def fail(self, plan: StepPlan, message: str) -> None:
        """The step was lost: its texts end with an error, everything else goes on."""
        self._land(plan)
        self._landed_s = -math.inf
        for sequence in plan.sequences:
            if sequence.stage != SequenceState.ENDED:
                self._end(sequence, FinishReason.ERROR, message)

    def retry_smaller(self, plan: StepPlan) -> int:
        """The step found too little memory: its texts and those launched behind it wait again, before all others of
        their accounts. The next step has at most half as many rows, which is returned; the later ones grow again. A
        text that was alone in it ends with an error."""
        alone, rows = len(plan.sequences) == 1, sum(plan.chunks)
        assert self._flights[0] is plan
        taken_back = list(self._flights)
        self._flights.clear()
        self._landed_s = -math.inf
        self._rows_max = max(1, min(self._rows_max, rows) // 2)
        self._counters["steps_out_of_memory"] += 1
        for taken in taken_back:
            for sequence in taken.sequences:
                self._stop(sequence)
                if sequence.stage == SequenceState.ENDED:
                    continue
                if alone and taken is plan:
                    self._end(sequence, FinishReason.ERROR, OUT_OF_MEMORY)
                else:
                    self._waiting.resume(sequence)
        return self._rows_max

    # The pool's memory: none

    def preempt_all(self) -> None:
        """Texts run only while they fly."""
        assert not self._flights

    def growing(self, count: int) -> list[int]:
        return []

    def grow(self, extents: Items[int]) -> None:
        assert not extents

    def shrink(self, count: int) -> ShrinkPlan:
        return ShrinkPlan([], [], [], [])

    def sleep(self, kept_most: int) -> list[int]:
        assert not self._flights
        self._asleep, self._landed_s = True, -math.inf
        return []

    def waking(self, extents: int) -> WakeExtents:
        return WakeExtents([], [])

    def woken(self, waking: WakeExtents) -> None:
        assert not waking.extents
        self._asleep = False

    # What is kept: nothing

    def sweep(self) -> bool:
        return False

    def unerased(self) -> list[int]:
        return []

    def secret_left(self) -> bool:
        """Whether a text of which nothing may be kept has ended since this was asked last."""
        return self._waiting.secret_left()

    # What to tell

    def news(self) -> dict[int, StepOutputs]:
        """What each owner has not been told yet; it counts as told now."""
        return self._news.take()

    def rejects(self) -> list[tuple[Sequence, Reject]]:
        """The texts that were taken in and will not run after all; they count as told now."""
        return self._waiting.rejects()

    def load(self, draining: bool) -> ReplicaLoad:
        """How full it is; counters as in Scheduler.load."""
        live = sum(standing.running for standing in self._waiting.queue.running)
        behind = sum(standing.running for standing in self._waiting.behind.running)
        return ReplicaLoad(
            running=live,
            waiting=len(self._waiting.queue),
            waiting_tokens=self._waiting.tokens,
            free_blocks=0,
            cached_blocks=0,
            steps=self._steps,
            draining=draining,
            counters={**self._waiting.counters, **self._counters},
            background=behind + len(self._waiting.behind),
        )

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not self._waiting.sequences

    # Inside

    def _choose(self, queue: FairQueue[Sequence], rows: int) -> list[Sequence]:
        """Starts texts, whose accounts' turn it is, as long as they fit; the first one fits in any case."""
        chosen: list[Sequence] = []
        left = rows

        def fitting(standing: AccountQueue[Sequence]) -> Sequence | None:
            first = next(iter(standing.resuming or standing.waiting))
            return first if first.prompt_tokens <= left or not chosen else None

        while len(chosen) < self._limits.sequences and (sequence := queue.first(fitting)) is not None:
            self._start(queue, sequence)
            chosen.append(sequence)
            left -= sequence.prompt_tokens
        return chosen

    def _start(self, queue: FairQueue[Sequence], sequence: Sequence) -> None:
        self._waiting.start(sequence)
        sequence.flying = 1
        queue.promise(sequence.standing, sequence.prompt_tokens)
        if sequence.ticket >= 0:
            return
        waited_ms = self._waiting.first_start(sequence)
        self._news.of(sequence.owner).started.append(SequenceStarted(sequence.id, 0, waited_ms))

    def _land(self, plan: StepPlan) -> None:
        """The oldest flight is over."""
        assert self._flights.popleft() is plan, "flights land in the order of their launch"
        for sequence in plan.sequences:
            self._stop(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """It flies no longer, and what it was promised is no longer due."""
        sequence.flying = 0
        queue = self._waiting.queue_of(sequence)
        queue.promise(sequence.standing, -sequence.prompt_tokens)
        queue.stop(sequence.standing)

    def _end(self, sequence: Sequence, reason: FinishReason, message: str = "") -> None:
        """The one end of every text, and tells its owner. What flies of it lands for nothing."""
        self._waiting.leave(sequence)
        self._counters[f"finished_{reason}"] += 1
        self._news.of(sequence.owner).finished.append(SequenceFinished(sequence.id, reason, 0, message))

    def check(self) -> None:
        """Every text is in one place, and accounts have running and promised what flies of theirs."""
        flying = [sequence for plan in self._flights for sequence in plan.sequences]
        assert len(set(flying)) == len(flying), "a text flies twice"
        assert all(sequence.flying == 1 for sequence in flying)
        self._waiting.check()
        for queue, background in ((self._waiting.queue, False), (self._waiting.behind, True)):
            ours = [each for each in flying if each.background == background]
            for standing in {each.standing for each in ours} | set(queue.running):
                own = [each for each in ours if each.standing is standing]
                assert standing.running == len(own)
                assert standing.promised == sum(each.prompt_tokens for each in own)
        running = [each for each in self._waiting.sequences.values() if each.stage == SequenceState.RUNNING]
        assert set(running) == {each for each in flying if each.stage == SequenceState.RUNNING}, (
            "a text runs and does not fly"
        )


def _work(sequence: Sequence) -> int:
    return PROMPT_TOKEN * sequence.prompt_tokens
