"""Opens a decoder on a CPU: loads its weights, and shares out the memory that is free."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import ExitStack

from engine.execution.cpu_memory import CpuMemory
from engine.execution.cpu_model import STEP_TOKENS, CpuModel, plan_blocks
from engine.execution.cpu_runner import CpuRunner
from engine.execution.kv_groups import CpuKVGroup
from engine.hostinfo.memory import available_memory_bytes
from engine.images.cpu_images import CpuImageEncoder
from engine.process.allocator import large_blocks_in_heap
from engine.protocol.reports import MemoryReport
from engine.protocol.specs import ModelSpec
from engine.step.exchange import BlockExchange
from engine.step.executor import PagedMemory
from engine.weights.load import ModelFiles
from engine.weights.source import WeightSource


def _open_images(
    model: ModelSpec, source: WeightSource, files: ModelFiles, beat: Callable[[], None]
) -> CpuImageEncoder:
    """What encodes images, with room for those of one step: what it shares out, and one image more than that."""
    vision = source.config.vision
    assert vision is not None
    rows = (model.step_tokens or STEP_TOKENS) + vision.tokens
    return CpuImageEncoder(vision, lambda: files.reread(lambda: source.load_vision(beat)), rows, source.config.hidden)


def open_cpu(
    model: ModelSpec, source: WeightSource, files: ModelFiles, context_tokens: int, beat: Callable[[], None],
    device_bytes: int | None, resources: ExitStack,
) -> tuple[CpuRunner, CpuMemory, MemoryReport]:  # fmt: skip
    """Loads the parameters now and at each wake. `resources` closes the memory. Large blocks that this process
    allocates later are mapped (engine/process/allocator.py). Raises DoesNotFit."""
    with large_blocks_in_heap():
        config, parameters = source.config, source.load(beat)
        images = None if config.vision is None else _open_images(model, source, files, beat)
        free_bytes = available_memory_bytes()
        blocks = plan_blocks(model, config, source.dtype, context_tokens, free_bytes)
        opened = CpuModel(
            model, config, parameters, lambda: files.reread(lambda: source.load(beat)), blocks, source.dtype,
            context_tokens, images,
        )  # fmt: skip
    resources.callback(opened.memory.close)
    for pool, count in zip(opened.pools, opened.initial_extents(device_bytes, free_bytes), strict=True):
        pool.map(range(count))
    return opened.runner(beat), opened.memory, opened.report(free_bytes)


def block_exchange(memories: Items[PagedMemory]) -> BlockExchange | None:
    """How a model's blocks go to other replicas: where all layers keep the same ones."""
    return memories[0] if len(memories) == 1 and isinstance(memories[0], CpuKVGroup) else None
