"""Opens a decoder on a CPU: loads its weights, and shares out the memory that is free."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

import psutil

from engine.execution.cpu_runner import CpuMemory, CpuRunner
from engine.execution.memory_plan import host_tier_bytes, initial_extents, kv_blocks, paged_layout
from engine.hostinfo.memory import available_memory_bytes
from engine.kvcache.tensors import KVPool
from engine.models.config import ModelConfig
from engine.models.llama import kv_shape
from engine.protocol.reports import MemoryReport
from engine.protocol.specs import ModelSpec
from engine.step.layout import ExecutorLimits
from engine.weights.load import ModelFiles
from engine.weights.source import WeightSource

_STEP_TOKENS: Final = 512
_SEQUENCES: Final = 64
_KV_SHARE: Final = 0.25  # of the memory that is available after the weights are loaded


def open_cpu(
    model: ModelSpec, config: ModelConfig, source: WeightSource, files: ModelFiles, context_tokens: int,
    beat: Callable[[], None], device_bytes: int | None, resources: ExitStack,
) -> tuple[CpuRunner, CpuMemory, MemoryReport]:  # fmt: skip
    """Loads the parameters now and at each wake. `resources` closes the memory. Raises DoesNotFit."""
    parameters = source.load(beat)
    shape = kv_shape(config, model.block_tokens, source.dtype)
    free = available_memory_bytes()
    sequences = model.sequences or _SEQUENCES
    blocks = kv_blocks(model, shape, context_tokens, sequences, int(free * _KV_SHARE), free)
    pool = KVPool(shape, blocks, extents=0)
    memory = CpuMemory(
        parameters, lambda: files.reread(lambda: source.load(beat)), pool, paged_layout(model, pool, context_tokens),
        host_tier_bytes(model, pool, context_tokens),
    )  # fmt: skip
    resources.callback(memory.close)
    kv_room_bytes = free if device_bytes is None else device_bytes - memory.weights_bytes
    pool.map(range(initial_extents(model, pool, context_tokens, kv_room_bytes, free)))
    step_tokens = model.step_tokens or _STEP_TOKENS
    limits = ExecutorLimits(
        context_tokens, config.vocabulary, blocks, step_tokens, prompt_step_tokens=step_tokens, sequences=sequences,
        depth=1,
    )  # fmt: skip
    report = MemoryReport(
        model=model.name, pid=os.getpid(), device="cpu", device_bytes=int(psutil.virtual_memory().total),
        weights_bytes=memory.weights_bytes, kv_blocks=blocks, kv_block_tokens=shape.block_tokens,
        kv_bytes=pool.bytes, free_bytes=max(0, free - pool.bytes),
    )  # fmt: skip
    return CpuRunner(config, memory, limits, beat), memory, report
