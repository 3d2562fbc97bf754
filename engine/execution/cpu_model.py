"""A decoder's parts on a CPU, over parameters that are loaded: memory, KV pools, runner, and what is said of them."""

import os
from collections.abc import Callable
from typing import Final

import psutil
import torch

from engine.execution.cpu_memory import CpuMemory
from engine.execution.cpu_runner import CpuRunner
from engine.execution.dtype_select import dtype_note
from engine.execution.kv_groups import CpuKVGroup, all_memories, open_tier
from engine.execution.memory_plan import host_tier_bytes, initial_extents, kv_blocks, paged_layout
from engine.images.cpu_images import CpuImageEncoder
from engine.kvcache.layer_pools import LayerPools, group_shapes
from engine.kvcache.tensors import KVPool
from engine.models.config import ModelConfig
from engine.models.decoders import DecoderParameters
from engine.models.llama import kv_shape
from engine.protocol.reports import MemoryReport
from engine.protocol.specs import ModelSpec
from engine.step.limits import ExecutorLimits

STEP_TOKENS: Final = 512
SEQUENCES: Final = 64
_KV_SHARE: Final = 0.25  # of the memory that is available after the weights are loaded


class CpuModel:
    """A decoder's parts over parameters that are loaded; its pools have no memory yet.

    memory  what closes it.
    """

    def __init__(
        self, model: ModelSpec, config: ModelConfig, parameters: DecoderParameters,
        load: Callable[[], DecoderParameters], blocks: list[int], dtype: torch.dtype, context_tokens: int,
        images: CpuImageEncoder | None = None, extents: list[int] | None = None,
    ) -> None:  # fmt: skip
        """`load` reads the parameters again at each wake; `blocks` are those of each group's pool, `extents` how many
        of them each extent has, where another rank decides that."""
        groups = config.kv_groups
        shapes = group_shapes(kv_shape(config, model.block_tokens, dtype), groups)
        self._model, self._config, self._context_tokens = model, config, context_tokens
        self._sequences = model.sequences or SEQUENCES
        self._note = dtype_note(model, dtype)
        at_once = extents or [0] * len(blocks)
        self.pools = [
            KVPool(shape, count, extents=0, blocks_at_once=at_once[group])
            for group, (shape, count) in enumerate(zip(shapes, blocks, strict=True))
        ]
        self.groups = [CpuKVGroup(pool, paged_layout(model, pool, context_tokens)) for pool in self.pools]
        self.memory = CpuMemory(
            config, parameters, load, LayerPools(groups, self.pools), self.groups,
            all_memories(self.groups, context_tokens, self._sequences),
            sum(host_tier_bytes(model, self.pools, context_tokens)),
            open_tier(model, self.pools[0]), images,
        )  # fmt: skip

    def initial_extents(self, device_bytes: int | None, free_bytes: int) -> list[int]:
        """How many extents of each group get memory at first, where it may take so much in all, and free_bytes are.
        Raises DoesNotFit."""
        room_bytes = free_bytes if device_bytes is None else device_bytes - self.memory.weights_bytes
        return initial_extents(self._model, self.pools, self._context_tokens, room_bytes, free_bytes)

    def runner(self, beat: Callable[[], None]) -> CpuRunner:
        step_tokens = self._model.step_tokens or STEP_TOKENS
        limits = ExecutorLimits(
            self._context_tokens, self._config.vocabulary, tuple(pool.blocks for pool in self.pools), step_tokens,
            prompt_step_tokens=step_tokens, sequences=self._sequences, depth=1,
            embedding_rows=0 if self.memory.images is None else len(self.memory.images.rows_EH),
        )  # fmt: skip
        return CpuRunner(self._config, self.memory, limits, beat)

    def report(self, free_bytes: int) -> MemoryReport:
        """Where the memory went, of which free_bytes were free after the weights."""
        kv_bytes = max(pool.bytes for pool in self.pools)
        return MemoryReport(
            model=self._model.name, pid=os.getpid(), device="cpu", device_bytes=int(psutil.virtual_memory().total),
            weights_bytes=self.memory.weights_bytes, kv_blocks=self.pools[0].blocks,
            kv_block_tokens=self._model.block_tokens, kv_bytes=kv_bytes, free_bytes=max(0, free_bytes - kv_bytes),
            note=self._note,
        )  # fmt: skip


def plan_blocks(
    model: ModelSpec, config: ModelConfig, dtype: torch.dtype, context_tokens: int, free_bytes: int
) -> list[int]:
    """How many blocks each group's pool has, where free_bytes are. Raises DoesNotFit."""
    shapes = group_shapes(kv_shape(config, model.block_tokens, dtype), config.kv_groups)
    sequences = model.sequences or SEQUENCES
    return kv_blocks(model, shapes, context_tokens, sequences, int(free_bytes * _KV_SHARE), free_bytes)
