"""Keeps a model's device at work: plans, launches, waits for the oldest in-flight step, commits. It knows no sockets.

With two steps in flight the host plans and packs a step while the device computes the one before it; only landing a
step waits for the device. What a masked row may become depends on the token before it: masks of such a step are begun
when the one before it has landed, while the device computes its layers and the host plans the next one.
"""

import traceback
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import suppress
from typing import Final, Protocol

from engine.kv_blocks.block_pool import ShrinkPlan, blocks_of
from engine.kv_blocks.kv_extents import KVExtents
from engine.kv_blocks.kv_manager import KVManager
from engine.log import log
from engine.memory.errors import OutOfDeviceMemory
from engine.scheduling.intake import Intake
from engine.scheduling.step_plan import INFLIGHT_STEPS_MAX, PlacedRows, StepPlan
from engine.sequences.prompt_images import NOT_ENCODED
from engine.sequences.sequence import GrammarMatcher, PromptImage, Sequence
from engine.step.exchange import BlockExchange
from engine.step.executor import (
    Arrival,
    BlockTier,
    ExecutorLost,
    InflightStep,
    PagedMemory,
    RunnerOutput,
    StepExecutor,
)
from engine.tiers.host_blocks import BlockLoad

_HOST_SWEEP_MAX: Final = 32  # slots given back beside one step: the host zeroes them itself
_FREE_SLOTS_MIN: Final = 64

SampleMasked = Callable[[InflightStep, list[GrammarMatcher | None]], Callable[[], None]]
"""Begins the masks of a step's masked rows, from their matchers; None for a row that is not wanted any more. What it
returns waits for them and gives them to the step."""


class ImageQueue(Protocol):
    """Encodes images beside the loop, whose thread calls it."""

    def order(self, images: Items[PromptImage]) -> None:
        """Has images encoded, in this order: each gets its rows when they are there."""

    def take_failed(self) -> set[PromptImage]:
        """The images that could not be encoded; each is returned once."""

    def place(self, rows: Items[PlacedRows]) -> None:
        """Puts rows where the next launch finds them."""


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
    extents     what of the scheduler's blocks has memory; None where it has no blocks.
    """

    def __init__(
        self, executor: StepExecutor, scheduler: StepScheduler, memories: Items[PagedMemory] = (),
        sample_masked: SampleMasked | None = None, tier: BlockTier | None = None,
        exchange: BlockExchange | None = None, images: ImageQueue | None = None,
    ) -> None:  # fmt: skip
        """`memories` are where the scheduler's blocks are, one for each group of its `kv`; without `sample_masked` no
        row may be masked. `tier` is where its evicted blocks are, if its `kv` has a host; `exchange` takes in blocks
        of other replicas; `images` encodes those of prompts, which have none without it."""
        assert 1 <= executor.limits.depth <= INFLIGHT_STEPS_MAX
        self.failures = 0
        self._executor = executor
        self._depth = executor.limits.depth
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._memories = memories
        kv = scheduler.kv
        self.extents = None if kv is None else KVExtents(kv, [memory.layout for memory in memories])
        self._sample_masked = sample_masked
        self._tier = tier
        self._exchange = exchange
        self._images = images
        self._host = None if kv is None or tier is None else kv.host
        self._loads: deque[tuple[BlockLoad[Sequence], Arrival]] = deque()
        self._inflight: deque[tuple[StepPlan, InflightStep]] = deque()
        self._unmasked: StepPlan | None = None  # the newest step's, before its masks are begun
        self._finish_masks: Callable[[], None] | None = None  # gives the only step in flight those that are begun

    @property
    def idle(self) -> bool:
        """Whether a turn would do nothing."""
        return self._scheduler.intake.idle and not self._inflight and not self._loads

    def turn(self) -> bool:
        """Launches until as many steps are in flight as the executor takes, then lands the oldest of them.

        Where a launch fails all of them land: what comes next must not build on it. Returns False when there was
        nothing to do. Raises ExecutorLost.
        """
        traded = self._trade()
        self._turn_disk()
        self._arrive(wait=False)
        self._take_images()
        while len(self._inflight) < self._depth and (plan := self._next_batch()) is not None:
            self.zero_freed()
            step = self._launch(plan) if self._give_masks() else self._inflight[0][1]
            self._inflight.append((plan, step))
            if isinstance(step, FailedLaunch):
                while self._inflight:
                    self._land()
                return True
            self._unmasked = plan if plan.masked_sequences else None
            self._begin_masks()
        if not self._inflight:
            return traded
        self._land()
        self._begin_masks()
        return True

    def sweep(self) -> bool:
        """Frees cached blocks that can be found no more, also in the host, and zeroes all freed secret blocks. To be
        called between turns, and where there is nothing to turn for, again and again while it returns True."""
        self.zero_freed()
        swept = self._host is not None and self._host.sweep(_HOST_SWEEP_MAX)
        more = self._kv is not None and self._kv.expired.sweep()
        self.zero_freed()
        waits = self._turn_disk()
        return self._grow_tier() or more or swept or waits

    def land_all(self) -> None:
        """Lands what is in flight, loads too, and launches nothing: all tokens are known then."""
        while self._inflight:
            self._land()
            self._begin_masks()
        while self._arrive(wait=True):
            pass

    def zero_freed(self) -> None:
        """Zeroes blocks before the next launch may write them, once those are stored that go to the host. No step in
        flight reads any of them."""
        if self._host is not None and self._tier is not None:
            if slots := self._host.index.take_unerased():
                self._tier.zero(slots)
            pages, slots = self._host.take_stores()
            if slots:
                self._tier.store(blocks_of(pages), slots)
        for group in range(0 if self._kv is None else len(self._kv.pools)):
            if self._kv is not None and (blocks := self._kv.take_unerased(group)):
                self._memories[group].zero(blocks)

    def shrink(self, count: int, group: int = 0) -> ShrinkPlan:
        """Takes memory off up to so many extents of a group, with nothing in flight: what is held in them moves."""
        assert self.extents is not None, "a model without blocks"
        self.land_all()
        plan, memory = self.extents.shrink(count, group), self._memories[group]
        self.zero_freed()
        if plan.sources:
            memory.copy(plan.sources, plan.targets)
            memory.zero(plan.secret)
        if plan.extents:
            memory.unmap(plan.extents)
        return plan

    def grow(self, extents: Items[int], group: int = 0) -> None:
        """Gives extents of a group memory. Raises OutOfDeviceMemory, and then none of them has any."""
        assert self.extents is not None, "a model without blocks"
        self._memories[group].map(extents)
        self.extents.grow(extents, group)

    def _turn_disk(self) -> bool:
        """Gives the disk its work, once all stores are queued, and zeroes what it leaves; as DiskBlocks.turn."""
        if self._host is None or self._host.disk is None:
            return False
        self.zero_freed()
        waits = self._host.disk.turn()
        self.zero_freed()
        return waits

    def _grow_tier(self) -> bool:
        """Makes more host memory ready for blocks: where nothing is to be done, or little of it is free. Returns
        whether it did."""
        if self._host is None or self._tier is None:
            return False
        index, grew = self._host.index, False
        if self.idle or index.slots - index.cached < _FREE_SLOTS_MIN:
            grew = self._tier.grow()
        index.add_slots(self._tier.slots - index.slots)
        return grew

    def _trade(self) -> bool:
        """Moves memory from one group of layers to another, where that is worth it. Where the device has none for what
        the one grows by, the other one gets its own back. Returns whether there was a trade."""
        if self.extents is None or (trade := self.extents.next_trade()) is None:
            return False
        plan = self.shrink(trade.count, trade.giver)
        try:
            self.grow(self.extents.extents_to_take(trade, len(plan.extents)), trade.taker)
        except OutOfDeviceMemory as error:
            log("trade_failed", level="warning", error=repr(error)[:200])
            self.grow(plan.extents, trade.giver)
        return True

    def _next_batch(self) -> StepPlan | None:
        """The next step's work; where nothing can run before blocks come back from the host, after that; for want of
        memory that another group has, after a trade."""
        plan = self._scheduler.next_batch()
        self._order_images()
        self._begin_loads()
        while plan is None and not self._inflight and (self._arrived() or self._arrive(wait=True) or self._trade()):
            plan = self._scheduler.next_batch()
            self._begin_loads()
        return plan

    def _begin_loads(self) -> None:
        """Begins to copy what sequences start with that were just admitted, back from the host or from where other
        replicas' blocks lie."""
        self._load_staged()
        if self._host is None or self._tier is None:
            return
        self.zero_freed()
        for load in self._host.take_loads():
            self._loads.append((load, self._tier.load(load.slots, load.blocks)))

    def _arrived(self) -> bool:
        """Whether blocks of another replica came that the scheduler has not heard of."""
        return self._kv is not None and bool(self._kv.staged.arrived)

    def _load_staged(self) -> None:
        """Copies blocks of other replicas, in the order of the launches: they are there for the next step."""
        if self._kv is None or self._exchange is None:
            return
        for load in self._kv.staged.take_loads():
            self.zero_freed()
            load.staged.memory.scatter(self._exchange, load.first, load.blocks)
            load.staged.release()
            self._kv.staged.arrived.append(load.reader)

    def _arrive(self, wait: bool) -> bool:
        """Tells the scheduler of loads that are done; with `wait` the oldest is waited for. Returns whether there was
        one."""
        arrived = False
        while self._loads and ((wait and not arrived) or self._loads[0][1].passed()):
            load, arrival = self._loads.popleft()
            arrival.wait()
            assert self._host is not None
            self._host.arrived.append(load.reader)
            arrived = True
        return arrived

    def _order_images(self) -> None:
        """Has images encoded that sequences need which were just admitted."""
        if self._images is not None and (images := self._scheduler.intake.waiting.images.take()):
            self._images.order(images)

    def _take_images(self) -> None:
        """Ends the sequences whose images could not be encoded."""
        if self._images is not None and (failed := self._images.take_failed()):
            sequences = self._scheduler.intake.waiting.sequences.values()
            self._scheduler.intake.fail([each for each in sequences if not failed.isdisjoint(each.images)], NOT_ENCODED)

    def _launch(self, plan: StepPlan) -> InflightStep:
        try:
            if self._images is not None:
                self._images.place(plan.embeddings)
            return self._executor.launch(plan.packed)
        except ExecutorLost:
            raise
        except Exception as error:
            return FailedLaunch(error)

    def _begin_masks(self) -> None:
        """Begins the masks of the only step in flight, if it waits for them: all tokens before its own are known."""
        if self._unmasked is None or len(self._inflight) != 1:
            return
        plan, step = self._inflight[0]
        assert plan is self._unmasked
        assert self._sample_masked is not None
        self._unmasked = None
        try:
            self._finish_masks = self._sample_masked(step, plan.matchers)
        except Exception as error:
            self._inflight[0] = (plan, FailedLaunch(error))

    def _give_masks(self) -> bool:
        """Gives the only step in flight the masks that are begun: before the next launch, and before it lands. Returns
        whether the step in flight, if there is one, is none that failed."""
        if self._finish_masks is not None:
            finish, self._finish_masks = self._finish_masks, None
            try:
                finish()
            except Exception as error:
                self._inflight[0] = (self._inflight[0][0], FailedLaunch(error))
        return not (self._inflight and isinstance(self._inflight[0][1], FailedLaunch))

    def _land(self) -> None:
        self._give_masks()
        plan, step = self._inflight.popleft()
        try:
            output = step.wait()
        except ExecutorLost:
            raise
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
        log(
            "step_out_of_memory",
            level="warning",
            sequences=len(plan.sequences),
            rows=rows,
            next_rows_at_most=rows_max,
            error=reason,
        )

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        self.failures += 1
        where = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        sequences, reason = len(plan.sequences), repr(error)[:200]
        log("step_failed", level="error", sequences=sequences, failures=self.failures, error=reason, where=where)
        self._scheduler.fail(plan, "the model failed in this step; send the request again")
