"""Steps of a model in stages on GPUs as rank 0 launches them: cut into micro-batches, of which each stage computes
another one, without waiting for any of them.

The first stage's stream has both what it does with a micro-batch: the layers, and later the head of rows that came back
from the last stage. Heads are launched as late as may be: before layers whose tokens they sample, before there is no
room for more rows on their way, or when their step is waited for. So the layers of a step's micro-batches follow the
heads of the step before one by one, and no stage waits between steps. It does not know how tensors travel.
"""

import statistics
from collections import deque
from collections.abc import Callable
from typing import Final

from engine.execution.cuda_graphs import GraphPreparation
from engine.execution.gpu_memory import GpuMemory, StepLimits
from engine.execution.gpu_runner import PIPELINE_DEPTH
from engine.execution.gpu_sampler import TEMPERATURE_ONLY, MaskUpload, SamplingFeatures, StagedStep
from engine.memory.errors import OutOfDeviceMemory
from engine.models.config import ModelConfig
from engine.pipeline.stage_runner import StageRunner
from engine.pipeline.word_slots import WordSlot
from engine.step.attention_plan import plan_attention
from engine.step.cost_model import CostModel
from engine.step.executor import InflightStep, RunnerOutput
from engine.step.layout import Int32s, unpack_step
from engine.step.limits import ExecutorLimits, check_step
from engine.step.order import StepAnnouncer, StepOrder
from engine.step.split import split_step

KEPT_STEPS: Final = 2  # whose tokens the buffer has: those that the next step names, and those that come meanwhile
PARTS_MAX: Final = 8  # micro-batches of a step
ROWS_MIN: Final = 16  # of a micro-batch, where there are no more of them than stages
FULL_ROWS: Final = 256  # of one where there are more: computing takes longer then than reading weights once more


def micro_batch_limits(limits: StepLimits, context_tokens: int, block_tokens: int, groups: int) -> StepLimits:
    """The largest micro-batch of steps of these limits."""
    rows = min(limits.rows, max(4 * FULL_ROWS, limits.sequences, -(-limits.rows // PARTS_MAX)))
    return StepLimits.of(min(limits.sequences, rows), rows, context_tokens, block_tokens, groups)


class GpuMicroBatch:
    """Some rows of a step, as a step of their own with its attention plan in a slot. `first_row` is the number of its
    first sampled row in the step; it names the first `needs` tokens of the step before at most."""

    def __init__(self, step: "GpuPipelinedStep", slot: WordSlot, first_row: int, *, wide: bool, last: bool) -> None:
        self.step, self.slot, self.first_row, self.wide, self.last = step, slot, first_row, wide, last
        self.words: Int32s = slot.used.numpy()
        self.batch = unpack_step(self.words)
        self.needs = 0
        self.order: StepOrder | None = None  # once it has begun

    @property
    def rows(self) -> int:
        """How many of its rows are sampled."""
        return len(self.batch.rows_R)

    @property
    def waits(self) -> bool:
        """Whether a token that it names is not sampled yet, as far as launches go."""
        before = self.step.before
        return before is not None and before.sampled < self.needs


class GpuPipelinedStep:
    """A step in flight.

    before   the step whose tokens it may name.
    kept     behind how many of the buffer's sampled tokens its own come.
    left     how many micro-batches are not launched as a whole.
    sampled  of how many rows the head is launched.
    masked   it waits for its masks.
    """

    def __init__(
        self, before: "GpuPipelinedStep | None", kept: int, rows: int, landing: StagedStep,
        finish: Callable[["GpuPipelinedStep"], None],
    ) -> None:  # fmt: skip
        self.before, self.kept, self.rows, self.landing, self._finish = before, kept, rows, landing, finish
        self.left = self.sampled = 0
        self.masked = False

    def wait(self) -> RunnerOutput:
        """As in InflightStep. Launches what is left of it."""
        self._finish(self)
        return self.landing.wait()


class PipelineRunner:
    """A decoder's StepExecutor and MaskedSampler on GPUs in stages, as rank 0 of the first of them. Whoever changes
    memory that steps read calls `begin_all` before."""

    def __init__(
        self, config: ModelConfig, stage: StageRunner, memory: GpuMemory, limits: tuple[StepLimits, StepLimits],
        context_tokens: int, stages: int, mails: tuple[int, int], announcer: StepAnnouncer, *, whole: bool = False,
    ) -> None:  # fmt: skip
        """`limits` are those of steps and of micro-batches; `mails` is how many of so many rows each may be on their
        way back. With `whole`, steps are cut no more than they must be: for trials of each size."""
        step_limits, micro_limits = limits
        self.limits = ExecutorLimits(
            context_tokens, config.vocabulary, tuple(pool.blocks for pool in memory.pools.pools),
            step_limits.step_tokens, step_limits.prompt_step_tokens, step_limits.sequences, PIPELINE_DEPTH,
            embedding_rows=len(memory.buffers.embeddings_EH),
        )  # fmt: skip
        self.costs: CostModel | None = None
        self.close = stage.close
        self._stage, self._memory, self._stages, self._whole = stage, memory, stages, whole
        self._part_rows = micro_limits.rows
        self._mails, self._mail_rows = mails
        self._announcer = announcer
        self._vectors = config.vectors
        self._buffers, self._stream = memory.buffers, memory.stream
        self._masks = MaskUpload(self._stream, memory.buffers.masks_RW)
        self._landings = [
            StagedStep(self._stream, 0, step_limits.sequences, config.hidden if config.vectors else 0)
            for _ in range(PIPELINE_DEPTH + 1)
        ]
        self._queued: deque[GpuMicroBatch] = deque()
        self._running: deque[GpuMicroBatch] = deque()  # whose rows come back
        self._before: GpuPipelinedStep | None = None  # the step launched last
        self._launched = 0
        self._alike_decodes = False
        self._preparation = preparation = GraphPreparation(memory, stage.graphs, stage.graphs[:2], announcer)
        self.max_graphs = preparation.max_graphs
        self.capture_hot, self.capture_first = preparation.capture_hot, preparation.capture_first
        self.warm_up = preparation.warm_up

    def launch(self, packed: Int32s) -> GpuPipelinedStep:
        """As in StepExecutor. Queues what can be queued now."""
        batch = unpack_step(packed)
        check_step(batch, self.limits)
        assert batch.tokens_T.min() >= -self._memory.sampled_rows, "a row that the step before did not sample"
        parts = self._parts(len(batch.tokens_T))
        if not self._memory.arrivals():
            rows = -(-len(batch.tokens_T) // parts)
            self._preparation.now_and_then((self._stage.bodies, rows), (self._stage.wide_bodies, rows))
        landing = self._landings[self._launched % len(self._landings)]
        kept = self._stage.sampled * (1 + self._launched % KEPT_STEPS)
        step = GpuPipelinedStep(self._before, kept, len(batch.rows_R), landing, self.finish)
        micros = self._cut(step, packed, parts)
        # Nothing was changed until here.
        if self._before is not None:
            self._before.before = None  # nobody asks for it any more
        landing.begin(batch)
        step.left, step.masked = len(micros), batch.masked
        self._memory.sampled_rows = step.rows
        self._launched += 1
        self._before = step
        self._queued.extend(micros)
        self._advance()
        return step

    def sample(self, step: InflightStep, masks_MW: Int32s) -> None:
        """As in MaskedSampler. The step before has landed, so nothing reads its masks any more."""
        assert isinstance(step, GpuPipelinedStep)
        assert step.masked, "a step without masked rows, or with its masks already"
        step.masked = False
        self._masks.upload(masks_MW)
        self._advance()

    def finish(self, step: GpuPipelinedStep) -> None:
        """Launches what is left of a step. One that has no masks yet is sampled without: nobody wants its result."""
        while step.left:
            self._advance()
            if step.left:
                self._launch_head()

    def begin_all(self) -> None:
        """Begins the layers of all that was launched: what is queued or said next comes behind them."""
        self._advance()
        assert not self._queued, "layers that wait for masks"

    def launch_ms(self, packed: Int32s, launches: int) -> float:
        """Returns the median of so many launches, one behind the other, after one that does not count: each
        micro-batch begins behind the head of the one before it, as those that decode do."""
        self._alike_decodes, took_ms = True, []
        steps = [self.launch(packed), self.launch(packed)]
        for _ in range(launches):
            steps.append(self.launch(packed))
            before, after = steps.pop(0), steps[0]
            before.wait()
            after.wait()
            took_ms.append(after.landing.mark.ms_since(before.landing.mark))
        steps[-1].wait()
        self._alike_decodes = False
        return statistics.median(took_ms)

    def _parts(self, rows: int) -> int:
        """How many micro-batches a step of so many rows is cut into."""
        least = -(-rows // self._part_rows)
        if self._whole:
            return least
        most = max(1, min(self._stages, rows // ROWS_MIN), min(2 * self._stages, rows // FULL_ROWS))
        return max(least, min(most, PARTS_MAX))

    def _cut(self, step: GpuPipelinedStep, packed: Int32s, parts: int) -> list[GpuMicroBatch]:
        """The step's micro-batches, planned. Raises OutOfDeviceMemory, and then there is none."""
        micros: list[GpuMicroBatch] = []
        try:
            for number, part in enumerate(split_step(packed, parts) if parts > 1 else [packed.copy()], 1):
                first_row = micros[-1].first_row + micros[-1].rows if micros else 0
                micros.append(self._planned(step, part, first_row, last=number == parts))
                if self._alike_decodes and step.before is not None:
                    micros[-1].needs = step.before.rows * number // parts
        except BaseException:
            for micro in micros:
                self._stage.slots.release(micro.slot)
            raise
        return micros

    def _planned(self, step: GpuPipelinedStep, packed: Int32s, first_row: int, *, last: bool) -> GpuMicroBatch:
        """A micro-batch in a slot. Tokens of the step before are named by where that one keeps them."""
        batch = unpack_step(packed)
        needs = max(0, -int(batch.tokens_T.min()))
        if step.before is not None:
            for ids in (batch.tokens_T, batch.history_H):
                ids[ids < 0] -= step.before.kept
        plan = plan_attention(packed, batch, self._buffers.layout)
        count = len(packed) + len(plan.words)
        if count > len(self._buffers.words):
            raise OutOfDeviceMemory(f"{count} words of rows, where there is room for {len(self._buffers.words)}")
        slot = self._stage.slots.take(count)
        words = slot.used.numpy()
        words[: len(packed)], words[len(packed) :] = packed, plan.words
        micro = GpuMicroBatch(step, slot, first_row, wide=plan.wide, last=last)
        micro.needs = needs
        return micro

    def _advance(self) -> None:
        """Begins as many micro-batches as can be, with the heads that they wait for."""
        while self._queued:
            micro = self._queued[0]
            while self._waits(micro):
                if self._running[0].step.masked:
                    return
                self._launch_head()
            self._begin(self._queued.popleft())

    def _waits(self, micro: GpuMicroBatch) -> bool:
        """Whether a head is to be launched before the micro-batch begins: one that samples its tokens, or whose rows
        take the room for its own."""
        if not self._running:
            return False
        return micro.waits or sum(self._mails_of(each.rows) for each in (*self._running, micro)) > self._mails

    def _mails_of(self, rows: int) -> int:
        """At most: a graph has more rows than are wanted."""
        size = self._stage.ends.captured_size(rows) if rows else 0
        return -(-max(rows, size) // self._mail_rows)

    def _begin(self, micro: GpuMicroBatch) -> None:
        micro.order = order = self._order(micro)
        self._announcer.launch(order, micro.words, more=not micro.last)
        with self._stream.entered():
            self._stage.launch(order, micro.slot.used)
            if micro.rows:
                self._running.append(micro)
            else:
                self._stage.slots.release(micro.slot)
                self._count_down(micro.step)

    def _launch_head(self) -> None:
        """Launches the head for the oldest of the micro-batches whose rows come back."""
        micro = self._running.popleft()
        step, order, slot = micro.step, micro.order, micro.slot
        assert order is not None
        if self._memory.windows is not None:
            self._announcer.head()
        features = SamplingFeatures.of(micro.batch)
        with self._stream.entered():
            self._stage.launch_head(
                order, slot.used, features, step.landing, micro.first_row, step.kept + micro.first_row
            )
            step.sampled += micro.rows
            self._stage.slots.release(slot)
            self._count_down(step)

    def _count_down(self, step: GpuPipelinedStep) -> None:
        step.left -= 1
        if not step.left:
            step.landing.mark.set()

    def _order(self, micro: GpuMicroBatch) -> StepOrder:
        """How a micro-batch is launched: while weights are on their way without a graph."""
        stage, batch, rows = self._stage, micro.batch, len(micro.batch.tokens_T)
        bodies = stage.wide_bodies if micro.wide else stage.bodies
        body_size = 0 if self._memory.arrivals() else bodies.captured_size(rows)
        plain = self._vectors or (SamplingFeatures.of(batch) == TEMPERATURE_ONLY and not batch.masked)
        head_size = stage.ends.captured_size(micro.rows) if plain and micro.rows else 0
        shared = self._memory.windows is not None and bool(batch.tokens_T.min() < 0)
        return StepOrder(rows, body_size, micro.rows, head_size, micro.wide, shared, True)
