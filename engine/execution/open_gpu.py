"""Opens a decoder on a GPU: loads its weights, compiles or loads its kernels, takes the rest of the memory for KV."""

import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final
from weakref import proxy

import torch

from engine.execution.artifacts import GpuArtifact, gpu_artifacts
from engine.execution.device_select import device_facts
from engine.execution.gpu_memory import GpuMemory
from engine.execution.gpu_model import DecoderRunner, GpuModel, RankPart
from engine.execution.gpu_runner import GRAPH_ROWS_MAX
from engine.execution.memory_plan import GRAPH_BYTES, initial_extents
from engine.kernels.ranks import block_copies
from engine.kvcache.device_exchange import DeviceBlockExchange
from engine.memory.symmetric import window_driver
from engine.models.config import ModelConfig
from engine.protocol.reports import MemoryReport
from engine.protocol.specs import ModelSpec
from engine.step.executor import DecoderMemory
from engine.weights.source import WeightSource

log = logging.getLogger(__name__)

_SPARE_BYTES: Final = 1 << 30  # for what fragments, and what others take of the device meanwhile


def open_gpu(
    model: ModelSpec, config: ModelConfig, source: WeightSource, context_tokens: int, beat: Callable[[], None],
    device_bytes: int | None, standby: bool, resources: ExitStack, part: RankPart | None = None,
) -> tuple[DecoderRunner, DecoderMemory, MemoryReport]:  # fmt: skip
    """Loads the weights, compiles what is not compiled yet, measures what a step needs, takes the rest for KV, or what
    device_bytes leave, and captures hot graphs. Takes over what an earlier start measured, and then captures the first
    graphs only. `resources` closes everything, in the order graphs, memory, weights. With a `part` it does so for rank
    0 of several, which begin to follow once their weights are there.

    Raises DoesNotFit or OutOfDeviceMemory.
    """
    opened = GpuModel(model, config, source, context_tokens, beat, part, resources)
    memory = opened.memory
    artifacts = gpu_artifacts(
        opened.model, opened.config, context_tokens, str(source.dtype), source.bf12_parameters,
        torch.cuda.get_device_name(source.device),
    )  # fmt: skip
    earlier, first_segments = artifacts.read(), len(memory.workspace.segments)
    segments = [] if earlier is None else earlier.segments
    all_memory: DecoderMemory = memory if part is None else part.begin(memory, segments)
    with memory.stream.entered():
        memory.workspace.grow(segments)
    first = opened.trial(opened.decoder_runner(0))
    if earlier is None:
        first.compile(beat)
    else:
        first.load()
    segments = memory.workspace.segments[first_segments:]
    runner = opened.decoder_runner(GRAPH_ROWS_MAX)
    resources.callback(runner.close)
    memory.standby = standby
    _map_extents(opened, runner, all_memory, device_bytes, part)
    mapped_blocks = min(
        min(len(group.mapped) * group.layout.extent_blocks, group.layout.blocks) for group in memory.groups
    )
    trial = opened.trial(runner)
    limits = trial.profiling_limits(mapped_blocks)
    if earlier is not None and earlier.blocks >= limits.used_blocks:
        runner.costs = earlier.costs
        runner.capture_first()
    else:
        runner.capture_hot(beat)
        runner.costs = trial.profile(limits)
        artifacts.write(GpuArtifact(segments, limits.used_blocks, runner.costs))
    report = _report(opened.model, memory, source, mapped_blocks, None if part is None else part.source.bytes)
    log.info("%s", describe_memory(report))
    return runner, all_memory, report


def _map_extents(
    opened: GpuModel, runner: DecoderRunner, all_memory: DecoderMemory, device_bytes: int | None, part: RankPart | None
) -> None:
    """Maps the extents that there is room for. Raises DoesNotFit."""
    model, memory = opened.model, opened.memory
    pools = memory.pools.pools
    free = torch.cuda.mem_get_info(memory.stream.device)[0] + memory.kv_bytes - runner.max_graphs * GRAPH_BYTES
    free -= memory.unmapped_bytes
    allowed = sys.maxsize if device_bytes is None else device_bytes - memory.fixed_bytes(runner.max_graphs)
    if part is not None:
        allowed, free = part.kv_room(allowed, free)
    kv_room_bytes = min(free - (_SPARE_BYTES if model.kv_bytes is None else 0), allowed)
    counts = initial_extents(model, pools, opened.context_tokens, kv_room_bytes, free)
    for pool, paged, count in zip(pools, all_memory.memories[-len(pools) :], counts, strict=True):
        paged.map(range(len(pool.mapped), count))


def open_exchange(memory: DecoderMemory, resources: ExitStack) -> DeviceBlockExchange | None:
    """How blocks of a model in one process go to other replicas and come from them, where the spec gives that memory
    and all layers keep the same ones. `resources` closes it before the memory."""
    if not isinstance(memory, GpuMemory) or not memory.handover_bytes:
        return None
    return device_exchange(memory, resources)


def device_exchange(memory: GpuMemory, resources: ExitStack) -> DeviceBlockExchange:
    """How blocks of a model, or of its part on one rank, leave the device and come to it, where all layers keep the
    same ones."""
    (group,), stream = memory.groups, memory.stream
    weak = proxy(memory)  # as in the memory itself
    exchange = DeviceBlockExchange(
        group.pool, stream, block_copies, window_driver(stream.device), memory.handover_bytes,
        lambda: weak.awake, group.settle,
    )  # fmt: skip
    resources.callback(exchange.close)
    exchange.compile()
    return exchange


def _report(
    model: ModelSpec, memory: GpuMemory, source: WeightSource, mapped_blocks: int, part_bytes: int | None
) -> MemoryReport:
    """Where the device's memory went; of several ranks that of the first, which has part_bytes of weights."""
    name, free_bytes, total_bytes = device_facts(source.device)
    return MemoryReport(
        model=model.name, pid=os.getpid(), device=name, device_bytes=total_bytes,
        weights_bytes=(source.bytes if part_bytes is None else part_bytes) + source.vision_bytes,
        coded_bytes=source.bf12_bytes, bf16_bytes=source.bf16_bytes,
        kv_blocks=mapped_blocks, kv_block_tokens=model.block_tokens, kv_bytes=memory.kv_bytes,
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
