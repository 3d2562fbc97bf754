"""What one rank of a model in stages launches of a micro-batch: its stage's layers, mostly by CUDA graphs. It decides
nothing: not what is in a micro-batch, nor when it begins.

    first stage    embedding, layers, and hands on │ later the head and the sampling of rows that came back
    others         take over, layers, and hand on
    last stage     take over, layers, what is behind its attention for the wanted rows alone, and hands these back

Between the two parts of the first stage others of its micro-batches come; so their words are uploaded once more.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from weakref import proxy

from torch import Tensor

from engine.execution.cuda_graphs import CudaGraphs, capture_sizes
from engine.execution.gpu_memory import GpuMemory, StepLimits
from engine.execution.gpu_sampler import TEMPERATURE_ONLY, LogprobTensors, SamplingFeatures, StagedStep, sample_tokens
from engine.kernels.host_copy import copy_words
from engine.kernels.ranks.handover import StageWindows
from engine.memory.streams import StreamEvent
from engine.models.config import ModelConfig
from engine.models.decoders import DecoderParameters, make_decoder
from engine.models.gpu_step import GpuStep
from engine.pipeline.word_slots import WordSlot, WordSlots
from engine.step.layout import Int32s
from engine.step.order import StepAnnouncer, StepOrder


class StageRunner:
    """One rank's part of the micro-batches, in the order in which rank 0 says them.

    is_first, is_last  which stage it is of.
    sampled            rows of the buffer of sampled tokens before those that later steps may name.
    """

    def __init__(
        self, config: ModelConfig, parameters: DecoderParameters, memory: GpuMemory, step_limits: StepLimits,
        graph_rows: int, windows: StageWindows, place: tuple[bool, bool], announcer: StepAnnouncer | None = None,
    ) -> None:  # fmt: skip
        """`step_limits` are those of a micro-batch, of which up to graph_rows rows may be captured; `place` is whether
        the stage is the first, and the last. Rank 0 has an `announcer`, by which all capture a size."""
        self.is_first, self.is_last = place
        self.sampled = max(step_limits.sequences, *capture_sizes(step_limits.sequences))
        self.slots = WordSlots(memory.stream)
        self._config = config
        self._parameters = parameters
        self._decoder = make_decoder(config, parameters)
        self._memory = memory
        self._buffers = memory.buffers
        self._stream = memory.stream
        self._windows = windows
        self._awaited: deque[tuple[StepOrder, WordSlot]] = deque()  # a follower's, whose rows come back
        sizes, end_sizes = (
            capture_sizes(min(graph_rows, count)) for count in (step_limits.rows, step_limits.sequences)
        )
        if not (self.is_first or self.is_last):
            end_sizes = []
        weak = proxy(self)  # a circle would keep pinned memory until the collector comes, in a capture perhaps
        together = [None if announcer is None else partial(_capture_together, weak, announcer, i) for i in range(3)]
        workspace = memory.workspace
        self.bodies = CudaGraphs(lambda rows: weak._body(rows, wide=False), sizes, workspace, together[0])
        self.ends = CudaGraphs(lambda rows: weak._end(rows), end_sizes, workspace, together[1])
        self.wide_bodies = CudaGraphs(lambda rows: weak._body(rows, wide=True), sizes, workspace, together[2])
        self.graphs = (self.bodies, self.ends, self.wide_bodies)

    def launch(self, order: StepOrder, words: Tensor) -> None:
        """Queues the upload and the stage's layers; in the last stage all that there is to do."""
        copy_words(words, self._buffers.words[: len(words)])
        if order.shared and self._memory.windows is not None and self.is_first:
            self._buffers.share_sampled(self._memory.windows)
        arrivals = self._memory.arrivals()
        if arrivals and order.body_size == 0:
            self._run_behind(arrivals, order.rows, order.wide)
        else:
            if arrivals:  # of this rank alone: rank 0 has all of its weights
                self._stream.follow(arrivals[-1])
            (self.wide_bodies if order.wide else self.bodies).launch(order.rows, order.body_size)
        if self.is_last and order.sampled_rows:
            self.ends.launch(order.sampled_rows, order.head_size)

    def launch_head(
        self, order: StepOrder, words: Tensor, features: SamplingFeatures, landing: StagedStep, first_row: int,
        kept: int,
    ) -> None:  # fmt: skip
        """Queues, on rank 0, head and sampling of the rows that came back, and the download to the landing's rows from
        first_row on. Later steps find the tokens behind `kept` others of the buffer."""
        rows = slice(first_row, first_row + order.sampled_rows)
        sampled_R = self._buffers.sampled_R[: order.sampled_rows]
        copy_words(words, self._buffers.words[: len(words)])
        self._follow_head_weights()
        if self._config.vectors:
            self.ends.launch(order.sampled_rows, order.head_size)
            landing.vectors_RH[rows].copy_(self._buffers.vectors_RH[: order.sampled_rows], non_blocking=True)
            return
        if features == TEMPERATURE_ONLY:
            self.ends.launch(order.sampled_rows, order.head_size)
        else:
            with self._memory.workspace.entered():
                logits_RV = self._head(order.sampled_rows, features)
                if features.logprobs:
                    reports = landing.reports
                    host = LogprobTensors(reports.chosen_R[rows], reports.ids_RK[rows], reports.best_RK[rows])
                    LogprobTensors.of(logits_RV, sampled_R).copy_to(host)
        copy_words(sampled_R, self._buffers.sampled_R[kept : kept + order.sampled_rows])
        copy_words(sampled_R, landing.tokens_R[rows])

    def follow(self, order: StepOrder, words: Int32s) -> None:
        """Launches this rank's part of a micro-batch that rank 0 begins."""
        slot = self.slots.take(len(words))
        slot.used.numpy()[:] = words
        with self._stream.entered():
            self.launch(order, slot.used)
            if self.is_first and order.sampled_rows:
                self._awaited.append((order, slot))
            else:
                self.slots.release(slot)

    def follow_head(self) -> None:
        """Launches this rank's part of the head for the oldest micro-batch whose rows were to come back."""
        if not self.is_first:
            return
        order, slot = self._awaited.popleft()
        with self._stream.entered():
            copy_words(slot.used, self._buffers.words[: len(slot.used)])
            self._follow_head_weights()
            self.ends.launch(order.sampled_rows, order.head_size)
            self.slots.release(slot)

    def capture(self, graphs: int, size: int) -> None:
        """Captures a size of the graphs of this number, where the stage has such. Raises OutOfDeviceMemory and
        CaptureFailed."""
        if self.graphs[graphs].sizes:
            with self._stream.entered():
                self.graphs[graphs].capture(size)

    def drop(self, graphs: int, size: int) -> None:
        """Takes back what `capture` did."""
        if self.graphs[graphs].sizes:
            self.graphs[graphs].drop(size)

    def close(self) -> None:
        """Gives the graphs back when what was launched is done. It may be called again."""
        self._stream.wait()
        for graphs in self.graphs:
            graphs.close()

    def _body(self, rows: int, wide: bool, beat: Callable[[], None] = lambda: None) -> None:
        step = self._step(rows, wide)
        if self.is_first:
            step.embed(self._parameters.embedding)
        else:
            step.resume()
        if self.is_last:
            self._decoder.through(step, beat)
        else:
            self._decoder.stage(step, beat, narrow=False)

    def _end(self, rows: int) -> None:
        """In the first stage the head, with what all rows have in common of sampling."""
        if self.is_first:
            self._head(rows, TEMPERATURE_ONLY)
        else:
            step = self._step(rows)
            self._decoder.complete(step, step.narrow())

    def _head(self, rows: int, features: SamplingFeatures) -> Tensor:
        step, buffers = self._step(rows), self._buffers
        step.resume_rows()
        logits_RV = self._decoder.outputs(step)
        if self._memory.windows is not None and self._memory.windows.rank:
            return logits_RV  # rank 0 has all of them
        if self._config.vectors:
            return buffers.vectors_RH[:rows].copy_(logits_RV)
        sample_tokens(buffers.words, logits_RV, buffers.sampled_R[:rows], buffers.masks_RW, features)
        return logits_RV

    def _run_behind(self, arrivals: Items[StreamEvent], rows: int, wide: bool) -> None:
        """Runs the layers without a graph, each behind the mark of its weights, which are on their way."""
        marks = iter(arrivals)

        def next_layer() -> None:
            if (mark := next(marks, None)) is not None:
                self._stream.follow(mark)

        if self.is_first:
            next_layer()  # the embedding
        next_layer()
        with self._memory.workspace.entered():
            self._body(rows, wide, next_layer)

    def _follow_head_weights(self) -> None:
        if arrivals := self._memory.arrivals():
            self._stream.follow(arrivals[-1])

    def _step(self, rows: int, wide: bool = False) -> GpuStep:
        memory = self._memory
        return GpuStep(self._config, self._buffers, memory.pools, rows, wide, memory.windows, self._windows)


def _capture_together(stage: StageRunner, announcer: StepAnnouncer, graphs: int, size: int) -> None:
    """Captures a size on all ranks."""
    announcer.capture(graphs, size, partial(stage.capture, graphs, size), partial(stage.drop, graphs, size))
