"""Where a model's memory went as it was opened, for operators. It gives nothing and takes nothing."""

import os

from engine.execution.device_select import device_facts
from engine.execution.gpu_memory import GpuMemory
from engine.execution.memory_plan import GRAPH_BYTES
from engine.protocol.reports import MemoryReport
from engine.protocol.specs import ModelSpec
from engine.weights.source import WeightSource


def gpu_report(model: ModelSpec, memory: GpuMemory, source: WeightSource, weights_bytes: int) -> MemoryReport:
    """The report of a decoder on a GPU."""
    name, free_bytes, total_bytes = device_facts(source.device)
    layout = memory.layout
    return MemoryReport(
        model=model.name, pid=os.getpid(), device=name, device_bytes=total_bytes, weights_bytes=weights_bytes,
        coded_bytes=source.bf12_bytes, bf16_bytes=source.bf16_bytes,
        kv_blocks=min(len(memory.mapped) * layout.extent_blocks, layout.blocks), kv_block_tokens=layout.block_tokens,
        kv_bytes=memory.pool.mapped_bytes, workspace_bytes=memory.workspace.bytes,
        graphs_bytes=memory.workspace.graphs * GRAPH_BYTES, free_bytes=free_bytes,
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
