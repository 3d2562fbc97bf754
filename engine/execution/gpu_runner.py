"""Runs steps on a GPU: launches them without waiting, mostly by CUDA graphs. It does not know why these steps.

A launch copies the packed step and its attention plan into pinned memory, queues one upload into memory that stays in
its place, the layers, the head and the sampling, and the download of the tokens. Only an in-flight step that is waited
for waits. The next step's tokens may be those that this one samples: they are read where they were written.
"""

import statistics
from collections.abc import Sequence as Items
from functools import partial
from typing import Final
from weakref import proxy

from torch import Tensor

from engine.execution.cuda_graphs import HOT_SIZES, CudaGraphs, GraphPreparation, capture_sizes
from engine.execution.gpu_memory import GpuMemory, StepLimits
from engine.execution.gpu_sampler import (
    MASKS_ONLY,
    TEMPERATURE_ONLY,
    LogprobTensors,
    MaskUpload,
    SamplingFeatures,
    StagedStep,
    sample_tokens,
    vocabulary_ranks,
)
from engine.kernels.host_copy import copy_words
from engine.memory.errors import OutOfDeviceMemory
from engine.memory.streams import StreamEvent
from engine.models.config import ModelConfig
from engine.models.decoders import DecoderParameters, make_decoder
from engine.models.gpu_step import GpuStep
from engine.step.attention_plan import plan_attention
from engine.step.cost_model import CostModel
from engine.step.executor import InflightStep
from engine.step.layout import Int32s, StepBatch, unpack_step
from engine.step.limits import ExecutorLimits, check_step
from engine.step.order import StepAnnouncer, StepOrder

PIPELINE_DEPTH: Final = 2
GRAPH_ROWS_MAX: Final = 1024  # steps of more rows take so long that launching their kernels one by one costs nothing


class GpuRunner:
    """A decoder's StepExecutor and MaskedSampler on a GPU."""

    def __init__(
        self, config: ModelConfig, parameters: DecoderParameters, memory: GpuMemory, step_limits: StepLimits,
        context_tokens: int, graph_rows: int, announcer: StepAnnouncer | None = None,
    ) -> None:  # fmt: skip
        """Steps of up to graph_rows rows may be captured, none where it is 0. The first of
        several ranks draws, and has an `announcer`, who says what the others are to `follow`."""
        self.limits = ExecutorLimits(
            context_tokens, config.vocabulary, tuple(pool.blocks for pool in memory.pools.pools),
            step_limits.step_tokens, step_limits.prompt_step_tokens, step_limits.sequences, PIPELINE_DEPTH,
            embedding_rows=len(memory.buffers.embeddings_EH),
        )  # fmt: skip
        self.costs: CostModel | None = None
        self._config = config
        self._decoder = make_decoder(config, parameters)
        self._memory = memory
        self._buffers = memory.buffers
        self._stream = memory.stream
        vector_width = config.hidden if config.vectors else 0
        self._masks = MaskUpload(self._stream, memory.buffers.masks_RW)
        self._staged = [
            StagedStep(self._stream, step_limits.words, step_limits.sequences, vector_width)
            for _ in range(PIPELINE_DEPTH + 1)
        ]
        self._windows = memory.windows
        self._shards = None if config.vectors else vocabulary_ranks(memory.windows, config.vocabulary)
        self._announcer = announcer
        self._launches = 0
        sizes, head_sizes = (
            capture_sizes(min(graph_rows, count)) for count in (step_limits.rows, step_limits.sequences)
        )
        weak = proxy(self)  # a circle would keep pinned memory until the collector comes, in a capture perhaps
        together = [None if self._announcer is None else partial(_capture_together, weak, index) for index in range(3)]
        workspace = memory.workspace
        self._bodies = CudaGraphs(lambda rows: weak._body(rows, wide=False), sizes, workspace, together[0])
        self._heads = CudaGraphs(lambda rows: weak._head(rows), head_sizes, workspace, together[1])
        self._wide_bodies = CudaGraphs(lambda rows: weak._body(rows, wide=True), sizes, workspace, together[2])
        masked_sizes = {*head_sizes[-1:], *HOT_SIZES}.intersection(head_sizes) if self._windows is None else ()
        self._masked_heads = CudaGraphs(lambda rows: weak._head(rows, MASKS_ONLY), masked_sizes, workspace)
        self._graphs = (self._bodies, self._heads, self._wide_bodies, self._masked_heads)
        self._preparation = preparation = GraphPreparation(
            memory, self._graphs[:3], self._graphs[:2], announcer, self._graphs[3:]
        )
        self.max_graphs = preparation.max_graphs
        self.capture_hot, self.capture_first = preparation.capture_hot, preparation.capture_first
        self.warm_up = preparation.warm_up

    def launch(self, packed: Int32s) -> StagedStep:
        """As in StepExecutor. Writes into the packed step's header where its plans begin. The host works out masks
        while the device computes the layers."""
        batch = unpack_step(packed)
        check_step(batch, self.limits)
        sampled_rows = len(batch.rows_R)
        assert batch.tokens_T.min() >= -self._memory.sampled_rows, "a row that the step before did not sample"
        staged = self._staged[self._launches % len(self._staged)]
        self._launches += 1
        staged.begin(batch)
        self._memory.sampled_rows = sampled_rows
        with self._stream.entered():
            wide, words = self._plan(packed, batch, staged)
            order = self._order(batch, wide)
            if self._announcer is not None:
                self._announcer.launch(order, words.numpy())
            self._launch_body(order, words)
            if self._memory.images is not None:
                self._memory.images.clear()
            if batch.masked:
                self._begin_masked(batch, staged)
            elif sampled_rows:
                self._sample(batch, staged, order.head_size)
            staged.mark.set()
        return staged

    def follow(self, order: StepOrder, words: Int32s) -> None:
        """Launches this rank's part of a step that rank 0 launches."""
        staged = self._staged[self._launches % len(self._staged)]
        self._launches += 1
        staged.mark.wait()  # nobody else waits for the step that was uploaded from there
        staged.words.numpy()[: len(words)] = words
        with self._stream.entered():
            self._launch_body(order, staged.words[: len(words)])
            if order.sampled_rows and order.whole:
                self._logits(order.sampled_rows)
            elif order.sampled_rows:
                self._follow_head_weights()
                self._heads.launch(order.sampled_rows, order.head_size)
            staged.mark.set()

    def capture(self, graphs: int, size: int) -> None:
        """Captures a size of the graphs of this number. Raises OutOfDeviceMemory and CaptureFailed."""
        with self._stream.entered():
            self._graphs[graphs].capture(size)

    def drop(self, graphs: int, size: int) -> None:
        """Takes back what `capture` did."""
        self._graphs[graphs].drop(size)

    def sample(self, step: InflightStep, masks_MW: Int32s) -> None:
        """As in MaskedSampler. The step before has landed, so nothing reads its masks any more."""
        assert isinstance(step, StagedStep)
        assert step.batch is not None, "a step without masked rows, or with its masks already"
        batch, step.batch = step.batch, None
        self._masks.upload(masks_MW)
        with self._stream.entered():
            self._sample(batch, step)
            step.mark.set()

    def close(self) -> None:
        """Gives the graphs back when the launched steps are done. It may be called again. No other GpuRunner of the
        process captures or computes meanwhile."""
        self._stream.wait()
        for graphs in self._graphs:
            graphs.close()

    def launch_ms(self, packed: Int32s, launches: int) -> float:
        """Returns the median of so many launches, one behind the other, after one that does not count."""
        steps, took_ms = [self.launch(packed), self.launch(packed)], []
        for _ in range(launches):
            steps.append(self.launch(packed))
            before, after = steps.pop(0), steps[0]
            before.wait()
            after.wait()
            took_ms.append(after.mark.ms_since(before.mark))
        steps[-1].wait()
        return statistics.median(took_ms)

    def _plan(self, packed: Int32s, batch: StepBatch, staged: StagedStep) -> tuple[bool, Tensor]:
        """Puts the step and its attention plan into pinned memory. Returns whether the plan has wide tiles, and the
        words."""
        plan = plan_attention(packed, batch, self._buffers.layout)
        count = len(packed) + len(plan.words)
        if count > len(self._buffers.words):
            raise OutOfDeviceMemory(f"a step of {count} words, where there is room for {len(self._buffers.words)}")
        words = staged.words.numpy()
        words[: len(packed)], words[len(packed) : count] = packed, plan.words
        return plan.wide, staged.words[:count]

    def _order(self, batch: StepBatch, wide: bool) -> StepOrder:
        """How a step is launched: while weights are on their way without a graph."""
        rows, bodies = len(batch.tokens_T), self._wide_bodies if wide else self._bodies
        if arriving := bool(self._memory.arrivals()):
            body_size = 0
        else:
            self._preparation.now_and_then((bodies, rows), (self._masked_heads, len(batch.rows_R) * batch.masked))
            body_size = bodies.captured_size(rows)
        plain = self._config.vectors or SamplingFeatures.of(batch) == TEMPERATURE_ONLY
        head_size = self._heads.captured_size(len(batch.rows_R)) if plain else 0
        shared = self._windows is not None and bool(batch.tokens_T.min() < 0)
        assert not (arriving and body_size)
        return StepOrder(rows, body_size, len(batch.rows_R), head_size, wide, shared, not plain)

    def _launch_body(self, order: StepOrder, words: Tensor) -> None:
        """Queues the upload and the layers."""
        copy_words(words, self._buffers.words[: len(words)])
        if order.shared and self._windows is not None:
            self._buffers.share_sampled(self._windows)
        arrivals = self._memory.arrivals()
        if arrivals and order.body_size == 0:
            self._run_behind(arrivals, order.rows, order.wide)
            return
        if arrivals:  # of this rank alone: rank 0 has all of its weights
            self._stream.follow(arrivals[-1])
        (self._wide_bodies if order.wide else self._bodies).launch(order.rows, order.body_size)

    def _body(self, rows: int, wide: bool) -> None:
        self._decoder.body(self._step(rows, wide), lambda: None)  # a launch is too short to report each layer

    def _run_behind(self, arrivals: Items[StreamEvent], rows: int, wide: bool) -> None:
        """Runs the body without a graph, each layer behind the mark of its weights, which are on their way."""
        marks = iter(arrivals)

        def next_stage() -> None:
            self._stream.follow(next(marks))

        next_stage()  # the embedding; the layers follow it, and each waits behind the one before
        next_stage()
        with self._memory.workspace.entered():
            self._decoder.body(self._step(rows, wide), next_stage)

    def _sample(self, batch: StepBatch, staged: StagedStep, head_size: int = 0) -> None:
        """Queues the head, the sampling and the download. Only what all rows have in common is worth graphs."""
        rows, features = staged.rows, SamplingFeatures.of(batch)
        self._follow_head_weights()
        if self._config.vectors:
            self._heads.launch(rows, head_size)
            staged.vectors_RH[:rows].copy_(self._buffers.vectors_RH[:rows], non_blocking=True)
            return
        if features == TEMPERATURE_ONLY:
            self._heads.launch(rows, head_size)
        elif staged.masked_size:
            self._masked_heads.launch(rows, staged.masked_size)
        else:
            logits_RV, staged.logits_RV = staged.logits_RV, None
            with self._memory.workspace.entered():
                logits_RV = self._head(rows, features, logits_RV)
                if features.logprobs:
                    LogprobTensors.of(logits_RV, self._buffers.sampled_R[:rows]).copy_to(staged.reports)
        copy_words(self._buffers.sampled_R[:rows], staged.tokens_R[:rows])

    def _begin_masked(self, batch: StepBatch, staged: StagedStep) -> None:
        """Queues the head while the host works out masks, unless a graph has it together with the sampling: launching
        kernels one by one costs the host more than the device waits for the head."""
        staged.batch, rows = batch, staged.rows
        if SamplingFeatures.of(batch) == MASKS_ONLY:
            staged.masked_size = self._masked_heads.captured_size(rows)
        if not staged.masked_size:
            staged.logits_RV = self._logits(rows)

    def _logits(self, rows: int) -> Tensor:
        """Queues the head alone. Nothing else computes in the workspace until these logits are sampled."""
        self._follow_head_weights()
        with self._memory.workspace.entered():
            return self._decoder.head(self._step(rows))

    def _follow_head_weights(self) -> None:
        if arrivals := self._memory.arrivals():
            self._stream.follow(arrivals[-1])

    def _head(
        self, rows: int, features: SamplingFeatures = TEMPERATURE_ONLY, logits_RV: Tensor | None = None
    ) -> Tensor:
        """Queues the head, where `logits_RV` is not there yet, and the sampling."""
        if self._shards is not None and features == TEMPERATURE_ONLY:
            own_RV = self._decoder.head(self._step(rows), own=True)
            self._shards.draw(self._buffers.words, own_RV, self._buffers.sampled_R[:rows])
            return own_RV
        if logits_RV is None:
            logits_RV = self._decoder.head(self._step(rows))
        if self._config.vectors:
            return self._buffers.vectors_RH[:rows].copy_(logits_RV)
        sample_tokens(self._buffers.words, logits_RV, self._buffers.sampled_R[:rows], self._buffers.masks_RW, features)
        return logits_RV

    def _step(self, rows: int, wide: bool = False) -> GpuStep:
        return GpuStep(self._config, self._buffers, self._memory.pools, rows, wide, self._windows)


def _capture_together(runner: "GpuRunner", graphs: int, size: int) -> None:
    """Captures a size on all ranks."""
    announcer = runner._announcer
    assert announcer is not None
    announcer.capture(graphs, size, partial(runner.capture, graphs, size), partial(runner.drop, graphs, size))
