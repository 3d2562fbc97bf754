"""Which texts an encoder reads in the next step, and what their vectors mean. It knows neither torch nor sockets.

A text is read whole, in one step, and nothing of it stays: there are no blocks, no preemption and no order among what
runs. Accounts take turns as in fair_queue.py; a step takes texts in that order as long as they fit into its rows, and a
text that is longer than that runs alone. Background texts run in steps of their own, while no other text waits.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from engine.log import log
from engine.protocol.frames import ReplicaLoad
from engine.protocol.types import FinishReason
from engine.scheduling.intake import Intake
from engine.scheduling.scheduler import NOT_FINITE, OUT_OF_MEMORY
from engine.scheduling.step_plan import INFLIGHT_STEPS_MAX, StepPlan
from engine.scheduling.token_budget import SchedulerConfig
from engine.sequences.fair_queue import PROMPT_TOKEN, AccountQueue, FairQueue
from engine.sequences.sequence import Sequence, SequenceState
from engine.step.encoder_layout import pack_texts
from engine.step.executor import RunnerOutput

BEST_EFFORT_DIVISOR: Final = 8  # of a step's rows, one in so many: a text that arrives meanwhile waits for its end


class EncoderScheduler:
    """Used by a loop like Scheduler: `next_batch`, launch, `commit` (or `fail`, or `retry_smaller`). One more step may
    be planned before the one before it has landed; steps land in the order of their launch."""

    kv: Final = None  # an encoder keeps nothing between steps

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        self.intake = Intake(config.max_waiting, _work, clock, self._end)
        self._config = config
        self._max_rows = config.step_tokens
        self._clock = clock
        self._waiting = self.intake.waiting
        self._inflight: deque[StepPlan] = deque()
        self._landed_s = -math.inf
        self._steps = 0

    def next_batch(self) -> StepPlan | None:
        """The next step's texts, or None where none waits that may run."""
        assert len(self._inflight) < INFLIGHT_STEPS_MAX
        self._waiting.expire()
        if not self.intake.admitting:
            return None
        texts = self._start_from(self._waiting.live, self._max_rows)
        if not texts:
            texts = self._start_from(self._waiting.best_effort, max(1, self._max_rows // BEST_EFFORT_DIVISOR))
        if not texts:
            return None
        texts.sort(key=lambda text: text.prompt_tokens)  # texts of one length are read together
        poolings = [text.pooling for text in texts if text.pooling is not None]
        lengths = [text.prompt_tokens for text in texts]
        packed = pack_texts([np.frombuffer(text.tokens, np.int32) for text in texts], poolings)
        plan = StepPlan(packed, texts, lengths, list(range(len(texts))), 0.0, self._clock())
        self._inflight.append(plan)
        return plan

    def commit(self, plan: StepPlan, sampled: RunnerOutput) -> None:
        """Takes in what a step computed: a vector for each of its texts."""
        self._land(plan)
        vectors_RH, now = sampled.vectors_RH, self._clock()
        assert vectors_RH is not None
        assert len(vectors_RH) == len(plan.sequences)
        served, took_s, self._landed_s = 0, now - self._landed_s, now
        for text, token, vector in zip(plan.sequences, sampled.tokens_R.tolist(), vectors_RH, strict=True):
            account, tokens = text.account_queue, text.prompt_tokens
            account.level += tokens * account.prompt_cost
            self.intake.counters["computed_tokens"] += tokens
            served += 0 if text.background else PROMPT_TOKEN * tokens
            if text.state == SequenceState.ENDED:
                continue
            if token < 0:
                self.intake.counters["not_finite"] += 1
                log("not_finite", level="warning", computed=tokens)
                self._end(text, FinishReason.ERROR, NOT_FINITE)
                continue
            self.intake.end_with_vector(text, vector)
        self._waiting.observe(served, took_s)
        self._steps += 1
        self._max_rows = min(self._config.step_tokens, self._max_rows + max(1, self._max_rows // 16))

    def fail(self, plan: StepPlan, message: str) -> None:
        """Ends the texts of a step that was lost with an error. Everything else goes on."""
        self._land(plan)
        self._landed_s = -math.inf
        self.intake.fail(plan.sequences, message)

    def retry_smaller(self, plan: StepPlan) -> int:
        """Takes back a step that found too little memory, and the one launched behind it: their texts wait again,
        before all others of their accounts. The next step has at most half as many rows, which is returned; the later
        ones grow again. A text that was alone in its step ends with an error."""
        alone, rows = len(plan.sequences) == 1, sum(plan.chunks)
        plans = list(self._inflight)
        assert plans[0] is plan
        self._inflight.clear()
        self._landed_s = -math.inf
        self._max_rows = max(1, min(self._max_rows, rows) // 2)
        self.intake.counters["steps_out_of_memory"] += 1
        for launched in plans:
            for text in launched.sequences:
                self._stop(text)
                if text.state == SequenceState.ENDED:
                    continue
                if alone and launched is plan:
                    self._end(text, FinishReason.ERROR, OUT_OF_MEMORY)
                else:
                    self._waiting.resume(text)
        return self._max_rows

    def preempt_all(self) -> None:
        """As Scheduler's, before a sleep. Texts run only while they are in flight, so there are none."""
        assert not self._inflight
        self._landed_s = -math.inf

    def load(self, draining: bool) -> ReplicaLoad:
        """How full the replica is; counters as in Scheduler.load."""
        return self.intake.queue_load(self._steps, draining)

    # Inside

    def _start_from(self, queue: FairQueue[Sequence], rows: int) -> list[Sequence]:
        """Starts texts in the turns of their accounts, as long as they fit; the first one fits in any case."""
        texts: list[Sequence] = []
        left = rows

        def fitting(account: AccountQueue[Sequence]) -> Sequence | None:
            first = next(iter(account.resuming or account.waiting))
            return first if first.prompt_tokens <= left or not texts else None

        while len(texts) < self._config.max_sequences and (text := queue.peek(fitting)) is not None:
            self._waiting.start(text)
            text.inflight_steps = 1
            queue.add_pending(text.account_queue, text.prompt_tokens)
            if text.start_order < 0:
                self.intake.report_first_start(text)
            texts.append(text)
            left -= text.prompt_tokens
        return texts

    def _land(self, plan: StepPlan) -> None:
        """Takes the oldest step in flight off."""
        assert self._inflight.popleft() is plan, "steps land in the order of their launch"
        for text in plan.sequences:
            self._stop(text)

    def _stop(self, text: Sequence) -> None:
        """Takes a text out of flight, and what it had pending off its account."""
        text.inflight_steps = 0
        queue = self._waiting.queue_of(text)
        queue.add_pending(text.account_queue, -text.prompt_tokens)
        queue.stop(text.account_queue)

    def _end(self, sequence: Sequence, reason: FinishReason, message: str = "") -> None:
        """The one end of every text; its owner is sent the reason. What is in flight of it is thrown away."""
        self._waiting.remove(sequence)
        self.intake.report_end(sequence, reason, message)

    def check(self) -> None:
        """Every text is in one place, and accounts count what is in flight of theirs."""
        inflight = [text for plan in self._inflight for text in plan.sequences]
        assert len(set(inflight)) == len(inflight), "a text is in flight twice"
        assert all(text.inflight_steps == 1 for text in inflight)
        self._waiting.check()
        for queue, background in ((self._waiting.live, False), (self._waiting.best_effort, True)):
            texts = [text for text in inflight if text.background == background]
            for account in {text.account_queue for text in texts} | set(queue.running_accounts):
                own = [text for text in texts if text.account_queue is account]
                assert account.running == len(own)
                assert account.pending_tokens == sum(text.prompt_tokens for text in own)
        running = {text for text in self._waiting.sequences.values() if text.state == SequenceState.RUNNING}
        unended = {text for text in inflight if text.state == SequenceState.RUNNING}
        assert running == unended, "a text runs and is not in flight"


def _work(text: Sequence) -> int:
    return PROMPT_TOKEN * text.prompt_tokens
