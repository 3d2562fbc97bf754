"""Opens a decoder on a GPU: loads its weights, compiles or loads its kernels, takes the rest of the memory for KV."""

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final

import torch

from engine.execution.artifacts import GpuArtifact, gpu_artifacts
from engine.execution.device_select import device_facts
from engine.execution.gpu_memory import GpuMemory, StepLimits, open_gpu_memory
from engine.execution.gpu_runner import GRAPH_ROWS_MAX, GpuRunner
from engine.execution.gpu_trial import TrialSteps
from engine.execution.memory_plan import GRAPH_BYTES, DoesNotFit, initial_extents
from engine.kernels.compile_cache import name_kernels, share_kernel_cache
from engine.memory.virtual_memory import Arena
from engine.models.config import ModelConfig
from engine.protocol.reports import MemoryReport
from engine.protocol.specs import ModelSpec
from engine.weights.device_buffer import WeightBuffer
from engine.weights.source import WeightSource

log = logging.getLogger(__name__)

_SPARE_BYTES: Final = 1 << 30  # for what fragments, and what others take of the device meanwhile


def open_gpu(
    model: ModelSpec, config: ModelConfig, source: WeightSource, context_tokens: int, beat: Callable[[], None],
    device_bytes: int | None, standby: bool, resources: ExitStack,
) -> tuple[GpuRunner, GpuMemory, MemoryReport]:  # fmt: skip
    """Loads the weights, compiles what is not compiled yet, measures what a step needs, takes the rest for KV, or what
    device_bytes leave, and captures hot graphs. Takes over what an earlier start measured, and then captures the first
    graphs only. `resources` closes everything, in the order graphs, memory, weights.

    Raises DoesNotFit or OutOfDeviceMemory.
    """
    _require_weights_fit(source)
    device = source.device
    weights = WeightBuffer(Arena.of(device), source.shapes)
    resources.callback(weights.close)
    with ThreadPoolExecutor(1) as beside:  # one thread waits for files and copies, while the other computes
        named = beside.submit(name_kernels)
        parameters = source.load(beat, dict(weights.tensors))
        named.result()
    step_limits = StepLimits.of(model.sequences, model.step_tokens, context_tokens, model.block_tokens)
    memory = open_gpu_memory(model, config, source.dtype, weights, step_limits, context_tokens, device)
    resources.callback(memory.close)
    artifacts = gpu_artifacts(
        model, config, context_tokens, str(source.dtype), source.bf12_parameters, torch.cuda.get_device_name(device)
    )
    share_kernel_cache(artifacts.kernels_folder)
    earlier, first_segments = artifacts.read(), len(memory.workspace.segments)
    runner = GpuRunner(config, parameters, memory, step_limits, context_tokens, graph_rows=0)
    trial = TrialSteps(runner, step_limits.rows, model.block_tokens, config.vectors)
    if earlier is None:
        trial.compile(beat)
    else:
        with memory.stream.entered():
            memory.workspace.grow(earlier.segments)
        trial.load()
    segments = memory.workspace.segments[first_segments:]
    runner = GpuRunner(config, parameters, memory, step_limits, context_tokens, GRAPH_ROWS_MAX)
    resources.callback(runner.close)
    memory.standby = standby
    _map_extents(model, runner, memory, context_tokens, device_bytes)
    mapped_blocks = min(len(memory.mapped) * memory.layout.extent_blocks, memory.layout.blocks)
    trial = TrialSteps(runner, step_limits.rows, model.block_tokens, config.vectors)
    limits = trial.profiling_limits(mapped_blocks)
    if earlier is not None and earlier.blocks >= limits.used_blocks:
        runner.costs = earlier.costs
        runner.capture_first()
    else:
        runner.capture_hot(beat)
        runner.costs = trial.profile(limits)
        artifacts.write(GpuArtifact(segments, limits.used_blocks, runner.costs))
    report = _report(model, memory, source, mapped_blocks)
    log.info("%s", describe_memory(report))
    return runner, memory, report


def _map_extents(
    model: ModelSpec, runner: GpuRunner, memory: GpuMemory, context_tokens: int, device_bytes: int | None
) -> None:
    """Maps the extents that there is room for. Raises DoesNotFit."""
    pool = memory.pool
    free = torch.cuda.mem_get_info(memory.stream.device)[0] + pool.mapped_bytes - runner.max_graphs * GRAPH_BYTES
    kv_room_bytes = free - (_SPARE_BYTES if model.kv_bytes is None else 0)
    if device_bytes is not None:
        kv_room_bytes = min(kv_room_bytes, device_bytes - memory.fixed_bytes(runner.max_graphs))
    count = initial_extents(model, pool, context_tokens, kv_room_bytes, free)
    pool.map(range(len(pool.mapped), count))


def _require_weights_fit(source: WeightSource) -> None:
    """Raises DoesNotFit where the weights alone are more than what is free."""
    needed, (free, total) = source.bytes, torch.cuda.mem_get_info(source.device)
    if needed > free:
        fits = "other processes hold the rest: end them, or use" if needed <= total else "use"
        raise DoesNotFit(
            f"the weights take {needed / 1e9:.1f} GB, {free / 1e9:.1f} of {total / 1e9:.1f} GB are free; {fits} "
            f"another device or a smaller model"
        )


def _report(model: ModelSpec, memory: GpuMemory, source: WeightSource, mapped_blocks: int) -> MemoryReport:
    name, free_bytes, total_bytes = device_facts(source.device)
    return MemoryReport(
        model=model.name, pid=os.getpid(), device=name, device_bytes=total_bytes, weights_bytes=source.bytes,
        coded_bytes=source.bf12_bytes, bf16_bytes=source.bf16_bytes,
        kv_blocks=mapped_blocks, kv_block_tokens=model.block_tokens, kv_bytes=memory.pool.mapped_bytes,
        workspace_bytes=memory.workspace.bytes, graphs_bytes=memory.workspace.graphs * GRAPH_BYTES,
        free_bytes=free_bytes,
    )  # fmt: skip


def describe_memory(report: MemoryReport) -> str:
    """One line with every GiB of a device."""
    model_bytes = report.weights_bytes + report.kv_bytes + report.workspace_bytes + report.graphs_bytes
    coded = f" ({report.coded_bytes / (1 << 30):.2f} of it in 12 bits a number)" if report.coded_bytes else ""
    parts = {
        f"weights{coded}": report.weights_bytes,
        f"KV ({report.kv_blocks} blocks of {report.kv_block_tokens} tokens)": report.kv_bytes,
        "workspace": report.workspace_bytes,
        "graphs": report.graphs_bytes,
        "CUDA and other processes": report.device_bytes - report.free_bytes - model_bytes,
        "free": report.free_bytes,
    }
    listed = ", ".join(f"{name} {count / (1 << 30):.2f}" for name, count in parts.items())
    return f"{report.model} on {report.device}, {report.device_bytes / (1 << 30):.2f} GiB: {listed}"
