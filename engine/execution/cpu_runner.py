"""A model on a CPU: where its KV pool's memory comes from, steps that are computed as they are launched, and what is
left of it while it sleeps."""

import ctypes
import logging
import os
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
import psutil
import torch
from torch import Tensor

from engine.execution.memory_plan import host_tier_bytes, initial_extents, kv_blocks, min_extents
from engine.hostinfo.memory import available_memory_bytes
from engine.kvcache.layout import KVShape
from engine.kvcache.tensors import KVPool
from engine.layers.linear_cpu import CpuLinear, is_batch_invariant
from engine.memory.errors import OutOfDeviceMemory, OutOfHostMemory
from engine.models.config import ModelConfig
from engine.models.cpu_step import CpuStep
from engine.models.decoder_layer import rope_tables
from engine.models.llama import LlamaDecoder
from engine.protocol.reports import MemoryReport
from engine.protocol.specs import ModelSpec
from engine.step.cost_model import CostModel
from engine.step.executor import InflightStep, MemoryUsage, RunnerOutput
from engine.step.layout import Int32s, StepBatch
from engine.step.sampling import sample_batch
from engine.weights.assembly import weights_bytes
from engine.weights.load import ModelFiles
from engine.weights.source import WeightSource

log = logging.getLogger(__name__)

_STEP_TOKENS: Final = 512
_SEQUENCES: Final = 64
_KV_SHARE: Final = 0.25  # of the memory that is available after the weights are loaded
_CPU: Final = torch.device("cpu")


@dataclass(slots=True)
class CompletedStep:
    """A flight whose step is already done, since launching computes; or all but its sampling, until there are masks."""

    outcome: RunnerOutput | tuple[Tensor, StepBatch]

    def wait(self) -> RunnerOutput:
        assert isinstance(self.outcome, RunnerOutput), "masked rows without their masks"
        return self.outcome


class CpuRunner:
    """Attributes as in batch.Runs. A KV pool here takes its share of `memory` as it fills.

    Asleep it holds no parameters: the page cache has the files that they are read from again.
    """

    depth = 1
    costs: CostModel | None = None

    def __init__(
        self, model: ModelSpec, config: ModelConfig, source: WeightSource, files: ModelFiles, context_tokens: int,
        beat: Callable[[], None], device_bytes: int | None,
    ) -> None:  # fmt: skip
        """The parameters are made now and at each wake. Raises DoesNotFit."""
        parameters = source.load(beat)
        shape = KVShape.of(config, model.block_tokens, source.dtype)
        free = available_memory_bytes()
        sequences = model.sequences or _SEQUENCES
        blocks = kv_blocks(model, shape, context_tokens, sequences, int(free * _KV_SHARE), free)
        self.pool = KVPool(shape, blocks, extents=0)
        self.step_tokens = self.prompt_step_tokens = model.step_tokens or _STEP_TOKENS
        self.sequences = sequences
        self._config = config
        self._source = source
        self._files = files
        self._decoder: LlamaDecoder | None = LlamaDecoder(parameters)
        self._weights_bytes = weights_bytes(parameters)
        self._extents_least = min_extents(model, self.pool, context_tokens)
        self._rotary = rope_tables(config.rope, config.head_dim, context_tokens)
        self._beat = beat
        self._kept_blocks: list[int] = []
        self._kept_LBW = torch.empty(0, dtype=torch.uint8)
        self._kept_most_bytes = host_tier_bytes(model, self.pool, context_tokens)
        room = free if device_bytes is None else device_bytes - self._weights_bytes
        self.pool.map(range(initial_extents(model, self.pool, context_tokens, room, free)))
        self.memory = MemoryReport(
            model=model.name, pid=os.getpid(), device="cpu", device_bytes=int(psutil.virtual_memory().total),
            weights_bytes=self._weights_bytes, kv_blocks=blocks, kv_block_tokens=shape.block_tokens,
            kv_bytes=self.pool.bytes, free_bytes=max(0, free - self.pool.bytes),
        )  # fmt: skip

    def idle(self) -> bool:
        """There is nothing to prepare."""
        return False

    def launch(self, packed: Int32s, batch: StepBatch) -> InflightStep:
        assert batch.tokens_T.min() >= 0, "a token that is not known yet, though every flight has landed"
        logits_RV = self.logits(batch)
        if logits_RV is None:
            return CompletedStep(RunnerOutput(np.empty(0, np.int32), {}))
        if batch.masked:
            return CompletedStep((logits_RV, batch))
        return CompletedStep(pooling_output(logits_RV) if self._config.vectors else sample_batch(logits_RV, batch))

    def sample(self, flight: InflightStep, masks_MW: Int32s) -> None:
        assert isinstance(flight, CompletedStep)
        assert isinstance(flight.outcome, tuple)
        flight.outcome = sample_batch(*flight.outcome, masks_MW)

    def erase(self, blocks: Items[int]) -> None:
        if self._decoder is not None:
            self.pool.erase(torch.tensor(blocks, dtype=torch.int64))
            return
        for block in blocks:
            self._kept_LBW[:, self._kept_blocks.index(block)] = 0

    def copy(self, sources: Items[int], targets: Items[int]) -> None:
        self.pool.copy(*(torch.tensor(blocks, dtype=torch.int64) for blocks in (sources, targets)))

    def map(self, extents: Items[int]) -> None:
        self.pool.map(extents)

    def unmap(self, extents: Items[int]) -> None:
        self.pool.unmap(extents)

    def prepare(self) -> int:
        """Weights come from their files again."""
        return 0

    def sleep(self, kept: Items[int]) -> int:
        """Lets the parameters go, and of the pool all but these blocks; gives their bytes. Raises OutOfHostMemory."""
        assert self._decoder is not None, "asleep already"
        shape, count = self.pool.shape, len(kept)
        if count * shape.block_bytes > available_memory_bytes():
            raise OutOfHostMemory(f"{count * shape.block_bytes / 1e6:.0f} MB of KV to keep are more than what is free")
        kept_LBW = torch.empty(shape.layers, count, shape.layer_block_bytes, dtype=torch.uint8)
        for layer in range(shape.layers if kept else 0):
            self.pool.take(layer, torch.tensor(kept), kept_LBW[layer])
        self._kept_blocks, self._kept_LBW = list(kept), kept_LBW
        self._decoder = None
        self.pool.unmap(self.pool.mapped)
        trim_memory(_CPU)
        return kept_LBW.nbytes

    def wake(self, extents: Items[int], restored: Items[int]) -> int:
        """Reads the parameters again; gives their bytes and those restored. Raises CheckpointError where the folder is
        not what it was, OutOfDeviceMemory where memory is short."""
        assert self._decoder is None, "awake already"
        free = available_memory_bytes()
        if self._weights_bytes > free:
            raise OutOfDeviceMemory(
                f"{self._weights_bytes / 1e6:.0f} MB of weights are more than the {free / 1e6:.0f} free"
            )
        decoder = LlamaDecoder(self._files.reread(lambda: self._source.load(self._beat)))
        self.pool.map(extents)
        kept_LBW = self._kept_LBW
        for layer in range(len(kept_LBW) if restored else 0):
            self.pool.put(layer, torch.tensor(restored), kept_LBW[layer])
        kept_LBW.zero_()  # what was restored may be erased from now on
        self._decoder, self._kept_blocks, self._kept_LBW = decoder, [], kept_LBW.new_empty(0)
        return self._weights_bytes + kept_LBW.nbytes

    def arrived(self) -> bool:
        """`wake` returns when all is there."""
        return True

    def close(self) -> None:
        """Gives everything back. It may be called again."""
        self._decoder, self._kept_blocks, self._kept_LBW = None, [], self._kept_LBW.new_empty(0)
        self.pool.unmap(self.pool.mapped)
        trim_memory(_CPU)

    def sizes(self) -> MemoryUsage:
        """`device_bytes` is what steps read and write here. Where it sleeps the page cache, which the system takes back
        as it likes, is nobody's."""
        pool, weights, awake = self.pool, self._weights_bytes, self._decoder is not None
        kv_bytes = len(pool.mapped) * pool.extent_bytes
        return MemoryUsage(
            device_bytes=weights + kv_bytes if awake else 0,
            asleep_bytes=0,
            least_bytes=weights + self._extents_least * pool.extent_bytes,
            most_bytes=weights + pool.extents * pool.extent_bytes,
            memory_bytes=self._kept_LBW.nbytes,
            weights_bytes=weights,
            kv_bytes=kv_bytes,
            kept_bytes=self._kept_LBW.nbytes,
            standby_bytes=self._kept_most_bytes,
            extent_bytes=pool.extent_bytes,
            extents_least=self._extents_least,
        )

    def logits(self, batch: StepBatch) -> Tensor | None:
        """Runs the step: float32 [R, V], or [R, H] of a model that gives vectors; None where no row is wanted."""
        assert self._decoder is not None, "asleep"
        step = CpuStep(batch, self._config, self._rotary, self.pool)
        self._decoder.body(step, self._beat)
        return self._decoder.head(step) if len(batch.rows_R) else None


def trim_memory(device: torch.device) -> None:
    """Memory that was freed, and that torch or the C library keep for the next who wants some, goes to the system."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
    elif sys.platform == "linux":
        with suppress(AttributeError):  # of another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)


def pooling_output(vectors_RH: Tensor) -> RunnerOutput:
    """What rows became in a model that gives vectors."""
    vectors = vectors_RH.numpy()
    return RunnerOutput(np.where(np.isfinite(vectors).all(1), 0, -1).astype(np.int32), {}, vectors)


def fastest_dtype(config: ModelConfig) -> torch.dtype:
    """Measures one layer's widest matmul in both: which is faster differs between processors. One in which this
    processor lets a row depend on its company is left out, as newer ones' bfloat16 may."""
    both = (torch.bfloat16, torch.float32)
    took = {dtype: _matmul_seconds(config, dtype) for dtype in both if is_batch_invariant(_matmuls(config), dtype)}
    if not took:
        return torch.float32  # which says what is wrong when it is loaded
    fastest = min(took, key=lambda dtype: took[dtype])
    log.info("dtype auto: %s (%s)", fastest, ", ".join(f"{dtype} {1e6 * s:.0f} µs" for dtype, s in took.items()))
    return fastest


def _matmuls(config: ModelConfig) -> list[tuple[int, int]]:
    """The inputs and outputs of a layer's matmuls and the head's."""
    queries = config.heads * config.head_dim
    return [
        (config.hidden, queries + 2 * config.kv_heads * config.head_dim),
        (queries, config.hidden),
        (config.hidden, 2 * config.intermediate),
        (config.intermediate, config.hidden),
        (config.hidden, config.vocabulary),
    ]


def _matmul_seconds(config: ModelConfig, dtype: torch.dtype) -> float:
    """The fastest of a few rounds of one row and of 64 rows, as decoding and prefill have them."""
    inputs, outputs = min(config.hidden, 2048), min(config.intermediate, 8192)
    linear = CpuLinear(torch.zeros(outputs, inputs, dtype=dtype))
    rows = [torch.zeros(count, inputs, dtype=dtype) for count in (1, 64)]
    fastest = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        for x_TK in rows:
            linear(x_TK)
        fastest = min(fastest, time.perf_counter() - started)
    return fastest
