"""Keeps a runner's device at work: plans, launches, waits for the oldest flight, commits. It knows no sockets.

With two flights in the air the host plans and packs a step while the device computes the one before it; the only thing
that waits for the device is the landing of a flight. What a masked row may become depends on the token before it: such
a flight gets its masks when the one before it has landed, while the device computes its layers.
"""

import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from engine.log import log
from engine.memory.errors import OutOfDeviceMemory
from engine.protocol.specs import ModelSpec
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.encoder_scheduler import EncoderScheduler
from engine.scheduling.intake import Intake
from engine.scheduling.kv_manager import KVManager
from engine.scheduling.public_prefixes import InvalidPublicPrefix
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import GrammarMatcher, Sequence, SequenceState
from engine.scheduling.step_plan import INFLIGHT_STEPS_MAX, StepPlan
from engine.scheduling.token_budget import SchedulerConfig
from engine.step.executor import InflightStep, RunnerOutput, SleepableExecutor, StepExecutor
from engine.step.layout import Int32s
from prefixcache.tree import PrefixTree

MaskWriter = Callable[[list[GrammarMatcher | None]], Int32s]


class FailedLaunch:
    """A flight that did not take off."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> RunnerOutput:
        raise self._error


class StepScheduler(Protocol):
    """What the loop asks of a scheduler; those of Scheduler say what each means."""

    intake: Intake

    @property
    def kv(self) -> KVManager | None: ...

    def next_batch(self) -> StepPlan | None: ...

    def commit(self, plan: StepPlan, sampled: RunnerOutput) -> None: ...

    def fail(self, plan: StepPlan, message: str) -> None: ...

    def retry_smaller(self, plan: StepPlan) -> int: ...


class StepLoop:
    """`turn` after turn; between two of them sequences may come and go. `failures` is how many steps failed in a row,
    those that found too little memory not counted."""

    def __init__(self, runner: StepExecutor, scheduler: StepScheduler, masks: MaskWriter | None = None) -> None:
        """`masks` makes those of masked rows, whose sequences have matchers; without it there may be none."""
        assert 1 <= runner.depth <= INFLIGHT_STEPS_MAX
        self.failures = 0
        self._runner = runner
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._masks = masks
        self._flights: deque[tuple[StepPlan, InflightStep]] = deque()
        self._unmasked: StepPlan | None = None  # the newest flight's, while it waits for its masks

    @property
    def idle(self) -> bool:
        """Whether a turn would do nothing."""
        return self._scheduler.intake.idle and not self._flights

    def turn(self) -> bool:
        """Launches until as many flights are in the air as the runner takes, then lands the oldest of them.

        Where a launch fails all of them land: what comes next must not build on it. False when there was nothing to do.
        """
        while len(self._flights) < self._runner.depth and (plan := self._scheduler.next_batch()) is not None:
            self.erase()
            flight = self._launch(plan)
            self._flights.append((plan, flight))
            if isinstance(flight, FailedLaunch):
                while self._flights:
                    self._land()
                return True
            self._unmasked = plan if plan.masked_sequences else None
            self._give_masks()
            if not self._flights:
                return True
        if not self._flights:
            return False
        self._land()
        self._give_masks()
        return True

    def sweep(self) -> bool:
        """Gives back what is cached and found no more, and erases all that waits for it. To be called between turns,
        and where there is nothing to turn for, again and again while it is True."""
        more = self._kv is not None and self._kv.sweep()
        self.erase()
        return more

    def land_all(self) -> None:
        """Lands what is in the air and launches nothing: all tokens are known then."""
        while self._flights:
            self._land()
            self._give_masks()

    def erase(self) -> None:
        """Before the next launch: what erases is not seen by flights in the air, which read none of these blocks."""
        if self._kv is not None and (blocks := self._kv.take_unerased()):
            self._runner.erase(blocks)

    def _launch(self, plan: StepPlan) -> InflightStep:
        try:
            return self._runner.launch(plan.packed)
        except Exception as error:
            return FailedLaunch(error)

    def _give_masks(self) -> None:
        """To the only flight in the air, if it waits for them: all tokens before its own are known."""
        if self._unmasked is None or len(self._flights) != 1:
            return
        plan, flight = self._flights[0]
        assert plan is self._unmasked
        assert self._masks is not None
        self._unmasked = None
        ended = SequenceState.ENDED
        matchers = [None if sequence.state == ended else sequence.matcher for sequence in plan.masked_sequences]
        try:
            self._runner.sample(flight, self._masks(matchers))
        except Exception as error:
            self._flights[0] = (plan, FailedLaunch(error))
            self._land()

    def _land(self) -> None:
        plan, flight = self._flights.popleft()
        try:
            sampled = flight.wait()
        except OutOfDeviceMemory as error:
            self._retry_smaller(plan, error)
        except Exception as error:
            self._fail(plan, error)
        else:
            self.failures = 0
            self._scheduler.commit(plan, sampled)

    def _retry_smaller(self, plan: StepPlan, error: OutOfDeviceMemory) -> None:
        """What was launched behind it computed with what it did not: that lands for nothing."""
        for _, younger in self._flights:
            with suppress(Exception):
                younger.wait()
        self._flights.clear()
        self._unmasked = None
        rows_max = self._scheduler.retry_smaller(plan)
        log(
            "step_out_of_memory",
            sequences=len(plan.sequences),
            rows=sum(plan.chunks),
            next_rows_at_most=rows_max,
            error=repr(error)[:200],
        )

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        self.failures += 1
        where = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        log(
            "step_failed",
            sequences=len(plan.sequences),
            failures=self.failures,
            error=repr(error)[:200],
            where=where,
        )
        self._scheduler.fail(plan, "the model failed in this step; send the request again")


def publish_prefixes(loop: StepLoop, scheduler: Scheduler, sequences: list[Sequence]) -> None:
    """Computes prompts whose KV stays, for everybody to read; before anything else. Raises Unpublishable."""
    for sequence in sequences:
        scheduler.intake.add([sequence])
        while loop.turn():
            pass
    scheduler.intake.outputs.take()
    for number, sequence in enumerate(sequences):
        if not scheduler.kv.publish(sequence):
            raise InvalidPublicPrefix(f"public_prefixes[{number}] could not be computed by this model: change it")


def open_scheduler(
    runner: SleepableExecutor, model: ModelSpec, clock: Callable[[], float]
) -> Scheduler | EncoderScheduler:
    """A scheduler for all of a runner's blocks, or of texts where it has none, within what the runner and the model's
    settings allow."""
    config = SchedulerConfig(
        step_tokens=runner.step_tokens,
        prompt_step_tokens=runner.prompt_step_tokens,
        max_sequences=runner.sequences,
        max_waiting=model.waiting,
        gap_ms=model.gap_ms,
        costs=runner.costs,
    )
    if not runner.blocks:
        return EncoderScheduler(config, clock)
    pool = BlockPool(runner.blocks, runner.extent_blocks, runner.mapped, min_mapped_blocks(runner))
    return Scheduler(KVManager(PrefixTree(runner.blocks, runner.block_tokens, clock), pool), config, clock)


def min_mapped_blocks(runner: SleepableExecutor) -> int:
    """How many blocks have memory whenever the runner is awake."""
    return min(runner.sizes().extents_least * runner.extent_blocks, runner.blocks)
