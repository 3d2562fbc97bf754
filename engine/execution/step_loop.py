"""Keeps a model's device at work: plans, launches, waits for the oldest in-flight step, commits. It knows no sockets.

With two steps in flight the host plans and packs a step while the device computes the one before it; only landing a
step waits for the device. What a masked row may become depends on the token before it: such a step gets its masks when
the one before it has landed, while the device computes its layers.
"""

import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from engine.log import log
from engine.memory.errors import OutOfDeviceMemory
from engine.scheduling.intake import Intake
from engine.scheduling.kv_manager import KVManager
from engine.scheduling.sequence import GrammarMatcher
from engine.scheduling.step_plan import INFLIGHT_STEPS_MAX, StepPlan
from engine.step.executor import InflightStep, PagedMemory, RunnerOutput, StepExecutor

SampleMasked = Callable[[InflightStep, list[GrammarMatcher | None]], None]
"""Gives a step the masks of its masked rows, from their matchers; None for a row that is not wanted any more."""


class FailedLaunch:
    """A step that was not launched."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> RunnerOutput:
        raise self._error


class StepScheduler(Protocol):
    """What the loop calls of a scheduler; the docstrings of Scheduler say what each means."""

    intake: Intake

    @property
    def kv(self) -> KVManager | None: ...

    def next_batch(self) -> StepPlan | None: ...

    def commit(self, plan: StepPlan, sampled: RunnerOutput) -> None: ...

    def fail(self, plan: StepPlan, message: str) -> None: ...

    def retry_smaller(self, plan: StepPlan) -> int: ...


class StepLoop:
    """Runs `turn` after turn; between two turns sequences may come and go.

    failures    how many steps failed in a row, those that found too little memory not counted.
    """

    def __init__(
        self, executor: StepExecutor, scheduler: StepScheduler, paged: PagedMemory | None = None,
        sample_masked: SampleMasked | None = None,
    ) -> None:  # fmt: skip
        """`paged` is where the scheduler's blocks are; without `sample_masked` no row may be masked."""
        assert 1 <= executor.limits.depth <= INFLIGHT_STEPS_MAX
        self.failures = 0
        self._executor = executor
        self._depth = executor.limits.depth
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._paged = paged
        self._sample_masked = sample_masked
        self._inflight: deque[tuple[StepPlan, InflightStep]] = deque()
        self._unmasked: StepPlan | None = None  # the newest step's, while it waits for its masks

    @property
    def idle(self) -> bool:
        """Whether a turn would do nothing."""
        return self._scheduler.intake.idle and not self._inflight

    def turn(self) -> bool:
        """Launches until as many steps are in flight as the executor takes, then lands the oldest of them.

        Where a launch fails all of them land: what comes next must not build on it. Returns False when there was
        nothing to do.
        """
        while len(self._inflight) < self._depth and (plan := self._scheduler.next_batch()) is not None:
            self.zero_freed()
            step = self._launch(plan)
            self._inflight.append((plan, step))
            if isinstance(step, FailedLaunch):
                while self._inflight:
                    self._land()
                return True
            self._unmasked = plan if plan.masked_sequences else None
            self._give_masks()
            if not self._inflight:
                return True
        if not self._inflight:
            return False
        self._land()
        self._give_masks()
        return True

    def sweep(self) -> bool:
        """Frees cached blocks that can be found no more, and zeroes all freed secret blocks. To be called between
        turns, and where there is nothing to turn for, again and again while it returns True."""
        more = self._kv is not None and self._kv.sweep()
        self.zero_freed()
        return more

    def land_all(self) -> None:
        """Lands what is in flight and launches nothing: all tokens are known then."""
        while self._inflight:
            self._land()
            self._give_masks()

    def zero_freed(self) -> None:
        """Zeroes blocks before the next launch may write them. No step in flight reads any of them."""
        if self._kv is not None and (blocks := self._kv.take_unerased()):
            assert self._paged is not None, "blocks without paged memory"
            self._paged.zero(blocks)

    def _launch(self, plan: StepPlan) -> InflightStep:
        try:
            return self._executor.launch(plan.packed)
        except Exception as error:
            return FailedLaunch(error)

    def _give_masks(self) -> None:
        """Gives the only step in flight its masks, if it waits for them: all tokens before its own are known."""
        if self._unmasked is None or len(self._inflight) != 1:
            return
        plan, step = self._inflight[0]
        assert plan is self._unmasked
        assert self._sample_masked is not None
        self._unmasked = None
        try:
            self._sample_masked(step, plan.matchers)
        except Exception as error:
            self._inflight[0] = (plan, FailedLaunch(error))
            self._land()

    def _land(self) -> None:
        plan, step = self._inflight.popleft()
        try:
            output = step.wait()
        except OutOfDeviceMemory as error:
            self._retry_smaller(plan, error)
        except Exception as error:
            self._fail(plan, error)
        else:
            self.failures = 0
            self._scheduler.commit(plan, output)

    def _retry_smaller(self, plan: StepPlan, error: OutOfDeviceMemory) -> None:
        """Takes back the step and those launched behind it, which computed with what it did not: they land unused."""
        for _, younger in self._inflight:
            with suppress(Exception):
                younger.wait()
        self._inflight.clear()
        self._unmasked = None
        rows_max = self._scheduler.retry_smaller(plan)
        rows, reason = sum(plan.chunks), repr(error)[:200]
        log("step_out_of_memory", sequences=len(plan.sequences), rows=rows, next_rows_at_most=rows_max, error=reason)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        self.failures += 1
        where = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        sequences, reason = len(plan.sequences), repr(error)[:200]
        log("step_failed", sequences=sequences, failures=self.failures, error=reason, where=where)
        self._scheduler.fail(plan, "the model failed in this step; send the request again")
