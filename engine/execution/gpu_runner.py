"""A model on a GPU: launches steps without waiting for them, mostly by CUDA graphs. It does not know why these steps.

A launch copies the packed step and its tiles into pinned memory, queues one upload into memory that stays in its
place, the layers, the head and the sampling, and the download of the tokens. Nothing waits but a flight that lands.
The next step's tokens may be those that this one samples: they are read where they were written.
"""

import logging
import os
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self
from weakref import proxy

import numpy as np
import torch
from torch import Tensor

from engine.execution.artifact_keys import GpuArtifact, gpu_artifacts
from engine.execution.artifacts import KERNELS_FOLDER
from engine.execution.cuda_graphs import HOT_SIZES, CudaGraphs, capture_sizes
from engine.execution.gpu_sampler import TEMPERATURE_ONLY, LogprobTensors, SamplingFeatures, sample_tokens
from engine.execution.memory_plan import DoesNotFit, host_tier_bytes, initial_extents, kv_blocks, min_extents
from engine.execution.profiling import ProfilingLimits, profile_costs
from engine.execution.sleep import GRAPH_BYTES, DeviceMemory
from engine.execution.staging import StagedStep, StepLimits
from engine.kernels.compile_cache import name_kernels, share_kernel_cache
from engine.kernels.tuning import BF12_ROW_BUCKETS
from engine.kvcache.host_tier import HostKVTier
from engine.kvcache.layout import KVShape
from engine.kvcache.tensors import KVPool
from engine.memory.errors import OutOfDeviceMemory, OutOfHostMemory
from engine.memory.streams import DeviceStream, StreamEvent
from engine.memory.virtual_memory import Arena
from engine.memory.workspace import Workspace
from engine.models.config import ModelConfig
from engine.models.decoder_layer import DecoderParameters
from engine.models.gpu_step import GpuStep, StepBuffers
from engine.models.llama import LlamaDecoder
from engine.protocol.reports import MemoryReport
from engine.protocol.specs import ModelSpec
from engine.protocol.types import SamplingParams
from engine.step.attention_plan import plan_attention
from engine.step.cost_model import CostModel
from engine.step.executor import InflightStep, MemoryUsage
from engine.step.layout import Int32s, SequenceSlice, StepBatch, pack_step, unpack_step
from engine.weights.assembly import weights_bytes
from engine.weights.device_buffer import WeightBuffer
from engine.weights.source import WeightSource

log = logging.getLogger(__name__)

PIPELINE_DEPTH: Final = 2
GRAPH_ROWS_MAX: Final = 1024  # steps of more rows take so long that launching their kernels one by one costs nothing
_PREPARE_EVERY_S: Final = 0.25
_PRELOADED_ROWS: Final = (
    64,
    128,
    1024,
)  # rows of steps whose kernels are loaded before it serves: decodes, and a prompt
_PROFILED_ROWS: Final = (1, 16, 64, 128, 256, 512, 2048)
_SPARE_BYTES: Final = 1 << 30  # for what fragments, and what others take of the device meanwhile

_GREEDY: Final = SamplingParams()
_ALL_FEATURES: Final = SamplingParams(
    temperature=1.0, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logit_bias={0: 1.0}, logprobs=1
)


class GpuRunner:
    """Attributes as in batch.Runs."""

    depth = PIPELINE_DEPTH

    def __init__(
        self, config: ModelConfig, parameters: DecoderParameters, held: DeviceMemory, stream: DeviceStream,
        most: StepLimits,
        graph_rows: int, standby: bool,
    ) -> None:  # fmt: skip
        """Steps of up to graph_rows rows may be captured, none where it is 0. `standby`: it makes ready to sleep."""
        self.pool = held.pool
        self.costs: CostModel | None = None
        self.step_tokens = most.step_tokens
        self.prompt_step_tokens = most.prompt_step_tokens
        self.sequences = most.sequences
        self._config = config
        self._most = most
        self._decoder = LlamaDecoder(parameters)
        self._dtype = held.space.dtype
        self._held = held
        self._space = held.space
        self._stream = stream
        self._standby = standby
        vector_width = config.hidden if config.vectors else 0
        self._masks_RW = stream.staging(*held.space.masks_RW.shape, dtype=torch.int32)
        self._landings = [StagedStep(stream, most, vector_width) for _ in range(PIPELINE_DEPTH + 1)]
        self._launches = 0
        self._rows_before = 0
        self._prepared_at = 0.0
        sizes = capture_sizes(min(graph_rows, most.rows))
        weak = proxy(self)  # a circle would keep pinned memory until the collector comes, in a capture perhaps
        self._bodies = CudaGraphs(lambda rows: weak._body(rows, wide=False), sizes, held.workspace)
        self._wide_bodies = CudaGraphs(lambda rows: weak._body(rows, wide=True), sizes, held.workspace)
        self._heads = CudaGraphs(
            lambda rows: weak._head(rows), capture_sizes(min(graph_rows, most.sequences)), held.workspace
        )
        self._graphs = (self._bodies, self._heads, self._wide_bodies)
        self.memory: MemoryReport

    @classmethod
    def open(
        cls, model: ModelSpec, config: ModelConfig, source: WeightSource, context_tokens: int, beat: Callable[[], None],
        device_bytes: int | None, standby: bool,
    ) -> Self:  # fmt: skip
        """Loads the weights, compiles what is not compiled yet, measures what a step needs, takes the rest for KV, or
        what device_bytes leave, and captures hot graphs. What an earlier start has measured it takes over, and captures
        but the first graphs. The caller closes it.

        Raises DoesNotFit.
        """
        try:
            with ExitStack() as undoing:
                opened = cls._open(model, config, source, context_tokens, beat, device_bytes, standby, undoing)
                undoing.pop_all()
                return opened
        except OutOfDeviceMemory as error:
            raise DoesNotFit(f"{model.name}: {error}") from error

    @classmethod
    def _open(
        cls, model: ModelSpec, config: ModelConfig, source: WeightSource, context_tokens: int, beat: Callable[[], None],
        device_bytes: int | None, standby: bool, undoing: ExitStack,
    ) -> Self:  # fmt: skip
        device = source.device
        arena = Arena.of(device)
        weights = WeightBuffer(arena, source.shapes)
        undoing.callback(weights.close)
        with ThreadPoolExecutor(1) as beside:  # the one waits for files and copies, while the other computes
            named = beside.submit(name_kernels)
            parameters = source.load(beat, dict(weights.tensors))
            named.result()
        stream = DeviceStream(device)
        most = StepLimits.of(model.sequences, model.step_tokens, context_tokens, model.block_tokens)
        kv_dtype = torch.float8_e4m3fn if model.kv_dtype == "fp8" else source.dtype
        shape = KVShape.of(config, model.block_tokens, kv_dtype)
        most_bytes = arena.most_bytes - weights.bytes
        pool = KVPool(
            shape, kv_blocks(model, shape, context_tokens, most.sequences, most_bytes, most_bytes), arena, extents=1
        )
        held = _open_memory(model, config, source.dtype, weights, pool, most, context_tokens, stream)
        undoing.callback(held.close)
        share_kernel_cache(Path(model.folder) / KERNELS_FOLDER)
        kept = gpu_artifacts(
            model, config, context_tokens, str(source.dtype), source.bf12_parameters, torch.cuda.get_device_name(device)
        )
        found, space_segments = kept.read(), len(held.workspace.segments)
        trial = cls(config, parameters, held, stream, most, graph_rows=0, standby=False)
        if found is None:
            trial.compile(context_tokens, beat)
        else:
            with stream.entered():
                held.workspace.grow(found.segments)
            trial.load(context_tokens)
        segments = held.workspace.segments[space_segments:]
        opened = cls(config, parameters, held, stream, most, GRAPH_ROWS_MAX, standby)
        undoing.callback(opened.close)
        opened._take_kv(model, context_tokens, device_bytes)
        mapped_blocks = min(len(pool.mapped) * pool.extent_blocks, pool.blocks)
        room_of_steps = ProfilingLimits(mapped_blocks, shape.block_tokens, context_tokens, most.sequences)
        if found is not None and found.blocks >= room_of_steps.used_blocks:
            opened.costs = found.costs
            opened.capture_first()
        else:
            opened.capture(beat)
            rows = [rows for rows in _PROFILED_ROWS if rows <= most.rows]
            opened.costs = profile_costs(opened.launch_ms, rows, room_of_steps)
            kept.write(GpuArtifact(segments, room_of_steps.used_blocks, opened.costs))
        left, total = torch.cuda.mem_get_info(device)
        opened.memory = MemoryReport(
            model=model.name, pid=os.getpid(), device=torch.cuda.get_device_name(device), device_bytes=total,
            weights_bytes=weights_bytes(parameters), coded_bytes=source.bf12_bytes, bf16_bytes=source.bf16_bytes,
            kv_blocks=mapped_blocks, kv_block_tokens=shape.block_tokens,
            kv_bytes=pool.mapped_bytes, workspace_bytes=held.workspace.bytes,
            graphs_bytes=opened.captured * GRAPH_BYTES, free_bytes=left,
        )  # fmt: skip
        log.info("%s", _describe_memory(opened.memory))
        return opened

    def _take_kv(self, model: ModelSpec, context_tokens: int, device_bytes: int | None) -> None:
        """Maps the extents that there is room for. Raises DoesNotFit."""
        pool, graphs = self.pool, sum(graphs.wanted for graphs in self._graphs)
        free = torch.cuda.mem_get_info(self._stream.device)[0] + pool.mapped_bytes - graphs * GRAPH_BYTES
        room = free - (_SPARE_BYTES if model.kv_bytes is None else 0)
        if device_bytes is not None:
            fixed_bytes = self._held.sizes(graphs, self._standby).device_bytes - pool.mapped_bytes
            room = min(room, device_bytes - fixed_bytes)
        count = initial_extents(model, pool, context_tokens, room, free)
        pool.map(range(len(pool.mapped), count))

    @property
    def captured(self) -> int:
        """How many graphs there are."""
        return sum(len(graphs) for graphs in self._graphs)

    def compile(self, context_tokens: int, beat: Callable[[], None]) -> None:
        """Runs a step of each hot size, of larger ones that may have other kernels, the largest that has a graph, and
        the largest there is, in the first block: the workspace has what steps need then."""
        for rows in sorted({size for size in (*HOT_SIZES, *BF12_ROW_BUCKETS) if size <= self._most.rows}):
            self._try(rows, context_tokens)
            beat()
        for rows in (self.sequences, min(GRAPH_ROWS_MAX, self._most.rows), self._most.rows):
            self._try(rows, context_tokens)
        self._try(self.sequences, context_tokens, _ALL_FEATURES)

    def load(self, context_tokens: int) -> None:
        """Runs a step of one row, whose kernels cannot be loaded while its graph is captured, and steps whose kernels a
        first prompt would wait for, or the first wake."""
        for rows in (1, *[rows for rows in _PRELOADED_ROWS if rows <= self._most.rows]):
            self._try(rows, context_tokens)

    def _try(self, rows: int, context_tokens: int, sampling: SamplingParams = _GREEDY) -> None:
        block_tokens = self.pool.shape.block_tokens
        length = 1 if rows <= self.sequences else context_tokens
        table = [0] * -(-length // block_tokens)
        lengths = [min(length, rows - start) for start in range(0, rows, length)]
        history, masked = (([0], 1), not self._config.vectors) if sampling is _ALL_FEATURES else (None, False)
        packed = pack_step(
            [SequenceSlice([0] * count, 0, table, sampling, history, masked) for count in lengths], block_tokens
        )
        flight = self.launch(packed, unpack_step(packed))
        if masked:
            self.sample(flight, np.full((len(lengths), self._masks_RW.shape[1]), -1, np.int32))
        flight.wait()

    def capture(self, beat: Callable[[], None]) -> None:
        """The graphs of the hot sizes."""
        with self._stream.entered():
            for graphs in self._graphs:
                while graphs.hot:
                    graphs.capture_next()
                    beat()

    def capture_first(self) -> None:
        """The graphs of a single sequence that decodes."""
        with self._stream.entered():
            for graphs in (self._bodies, self._heads):
                graphs.capture_for(1)

    def idle(self) -> bool:
        """Captures a graph, which takes some 10 ms, or copies a little of the weights to the host, which it sleeps on;
        False when there is nothing left."""
        if not self._held.awake:
            return False
        return self._capture_one(hot=True) or self._prepare_sleep() or self._capture_one(hot=False)

    def _capture_one(self, hot: bool) -> bool:
        with self._stream.entered():
            return any(graphs.capture_next() for graphs in self._graphs if graphs.hot or not hot)

    def _prepare_sleep(self) -> bool:
        try:
            return self._standby and self._held.prepare() > 0
        except OutOfHostMemory:
            return False  # the machine hears of it when it sends this to sleep

    def launch(self, packed: Int32s, batch: StepBatch) -> StagedStep:
        """May raise OutOfDeviceMemory. Writes the spare words of the packed step's header. The host works out masks
        while the device computes what does not need them."""
        rows, wanted = len(batch.tokens_T), len(batch.rows_R)
        assert batch.tokens_T.min() >= -self._rows_before, "a token of a row that the flight before did not sample"
        landing = self._landings[self._launches % len(self._landings)]
        self._launches += 1
        landing.begin(batch)
        self._rows_before = wanted
        try:
            with self._stream.entered():
                wide = self._upload(packed, batch, landing)
                bodies = self._wide_bodies if wide else self._bodies
                if coming := self._held.coming():
                    self._follow(coming, rows, wide)
                else:
                    self._prepare_now_and_then(bodies, rows)
                    bodies.launch(rows)
                landing.batch = batch if batch.masked else None
                if wanted and landing.batch is None:
                    self._sample(batch, landing)
                landing.mark.set()
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(str(error)) from error
        return landing

    def sample(self, flight: InflightStep, masks_MW: Int32s) -> None:
        """May raise OutOfDeviceMemory. The step before has landed, so that nobody reads the masks of that one."""
        assert isinstance(flight, StagedStep)
        assert flight.batch is not None, "a step without masked rows, or with its masks already"
        batch, flight.batch, count = flight.batch, None, len(masks_MW)
        self._masks_RW.numpy()[:count] = masks_MW
        try:
            with self._stream.entered():
                self._space.masks_RW[:count].copy_(self._masks_RW[:count], non_blocking=True)
                self._sample(batch, flight)
                flight.mark.set()
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(str(error)) from error

    def erase(self, blocks: Items[int]) -> None:
        """Queued behind the steps launched before; it does not wait for them, as a copy from other memory would."""
        self._held.erase(blocks)

    def copy(self, sources: Items[int], targets: Items[int]) -> None:
        self._held.copy(sources, targets)

    def map(self, extents: Items[int]) -> None:
        self.pool.map(extents)

    def unmap(self, extents: Items[int]) -> None:
        self._held.unmap(extents)

    def prepare(self) -> int:
        return self._held.prepare()

    def sleep(self, kept: Items[int]) -> int:
        return self._held.sleep(kept)

    def wake(self, extents: Items[int], restored: Items[int]) -> int:
        self._rows_before = 0  # what was sampled before is gone
        return self._held.wake(extents, restored)

    def arrived(self) -> bool:
        return self._held.arrived()

    def close(self) -> None:
        """Gives everything back in an order of its own: graphs, then what they and steps compute in, then the rest.

        Nothing else may be asked of it afterwards. No other device of the process captures or computes meanwhile.
        """
        self._stream.wait()
        for graphs in self._graphs:
            graphs.close()
        self._held.close()

    def sizes(self) -> MemoryUsage:
        return self._held.sizes(self.captured, self._standby)

    def _prepare_now_and_then(self, bodies: CudaGraphs, rows: int) -> None:
        """Under steady load there are no idle moments: a size that is wanted is captured while a step is in the air, or
        a little copied to the host."""
        now = time.monotonic()
        if now - self._prepared_at > _PREPARE_EVERY_S and (bodies.capture_for(rows) or self._prepare_sleep()):
            self._prepared_at = now

    def launch_ms(self, packed: Int32s, launches: int) -> float:
        """The median of so many launches, one behind the other, after one that does not count."""
        batch = unpack_step(packed)
        flights, took = [self.launch(packed, batch), self.launch(packed, batch)], []
        for _ in range(launches):
            flights.append(self.launch(packed, batch))
            before, after = flights.pop(0), flights[0]
            before.wait()
            after.wait()
            took.append(after.mark.ms_since(before.mark))
        flights[-1].wait()
        return statistics.median(took)

    def _upload(self, packed: Int32s, batch: StepBatch, landing: StagedStep) -> bool:
        """Queues the step and its tiles; gives whether there are wide ones."""
        tiles = plan_attention(packed, batch, self._space.layout)
        count = len(packed) + len(tiles.words)
        if count > len(self._space.words):
            raise OutOfDeviceMemory(f"a step of {count} words, where there is room for {len(self._space.words)}")
        words = landing.words.numpy()
        words[: len(packed)], words[len(packed) : count] = packed, tiles.words
        self._space.words[:count].copy_(landing.words[:count], non_blocking=True)
        return tiles.wide

    def _body(self, rows: int, wide: bool) -> None:
        self._decoder.body(self._step(rows, wide), _no_beat)

    def _follow(self, coming: Items[StreamEvent], rows: int, wide: bool) -> None:
        """The body without a graph, each layer behind the mark of its weights, which are on their way."""
        marks = iter(coming)

        def next_stage() -> None:
            self._stream.follow(next(marks))

        next_stage()  # the embedding; the layers follow it, and each waits behind the one before
        next_stage()
        with self._held.workspace.entered():
            self._decoder.body(self._step(rows, wide), next_stage)

    def _sample(self, batch: StepBatch, landing: StagedStep) -> None:
        """Queues head, sampling and the way back. Only what all rows have in common is worth graphs."""
        rows, wants = landing.rows, SamplingFeatures.of(batch)
        if coming := self._held.coming():
            self._stream.follow(coming[-1])
        if self._config.vectors:
            self._heads.launch(rows)
            landing.vectors_RH[:rows].copy_(self._space.vectors_RH[:rows], non_blocking=True)
            return
        if wants.plain:
            self._heads.launch(rows)
        else:
            with self._held.workspace.entered():
                logits_RV = self._head(rows, wants)
                if wants.logprobs:
                    LogprobTensors.of(logits_RV, self._space.sampled_R[:rows]).copy_to(landing.reports)
        landing.tokens_R[:rows].copy_(self._space.sampled_R[:rows], non_blocking=True)

    def _head(self, rows: int, wants: SamplingFeatures = TEMPERATURE_ONLY) -> Tensor:
        logits_RV = self._decoder.head(self._step(rows))
        if self._config.vectors:
            return self._space.vectors_RH[:rows].copy_(logits_RV)
        sample_tokens(self._space.words, logits_RV, self._space.sampled_R[:rows], self._space.masks_RW, wants)
        return logits_RV

    def _step(self, rows: int, wide: bool = False) -> GpuStep:
        return GpuStep(self._config, self._space, self.pool, rows, self._dtype, wide)


def _open_memory(
    model: ModelSpec, config: ModelConfig, dtype: torch.dtype, weights: WeightBuffer, pool: KVPool, most: StepLimits,
    context_tokens: int, stream: DeviceStream,
) -> DeviceMemory:  # fmt: skip
    """With a workspace for steps of the most rows."""
    device = stream.device
    workspace = Workspace(weights.arena, device)
    rows, wanted = max(most.rows, *capture_sizes(most.rows)), capture_sizes(most.sequences)[-1]
    with stream.entered(), workspace.entered():
        space = StepBuffers.make(config, dtype, device, most.words, rows, wanted, context_tokens)
        kept = HostKVTier(pool, weights.arena.driver, host_tier_bytes(model, pool, context_tokens), device)
    return DeviceMemory(weights, pool, space, workspace, kept, stream, min_extents(model, pool, context_tokens))


def _no_beat() -> None:
    """A launch is too short to tell of each layer."""


def _describe_memory(memory: MemoryReport) -> str:
    """Where every GiB is."""
    ours = memory.weights_bytes + memory.kv_bytes + memory.workspace_bytes + memory.graphs_bytes
    coded = f" ({memory.coded_bytes / (1 << 30):.2f} of it in 12 bits a number)" if memory.coded_bytes else ""
    parts = {
        f"weights{coded}": memory.weights_bytes,
        f"KV ({memory.kv_blocks} blocks of {memory.kv_block_tokens} tokens)": memory.kv_bytes,
        "workspace": memory.workspace_bytes,
        "graphs": memory.graphs_bytes,
        "CUDA and other processes": memory.device_bytes - memory.free_bytes - ours,
        "free": memory.free_bytes,
    }
    told = ", ".join(f"{name} {count / (1 << 30):.2f}" for name, count in parts.items())
    return f"{memory.model} on {memory.device}, {memory.device_bytes / (1 << 30):.2f} GiB: {told}"


def require_weights_fit(source: WeightSource) -> None:
    """Raises DoesNotFit where the weights alone are more than what is free."""
    needed, (free, total) = source.bytes, torch.cuda.mem_get_info(source.device)
    if needed > free:
        fits = "other processes hold the rest: end them, or use" if needed <= total else "use"
        raise DoesNotFit(
            f"the weights take {needed / 1e9:.1f} GB, {free / 1e9:.1f} of {total / 1e9:.1f} GB are free; {fits} "
            f"another device or a smaller model"
        )
