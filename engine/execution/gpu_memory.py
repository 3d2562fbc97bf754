"""All the memory of a model on a GPU: what is given back when the model sleeps, and in which order it comes again.

    sleep   copies what the host has no copy of, zeroes what steps wrote, unmaps everything
    wake    maps memory where it was; the kept blocks come back first, then the weights, stage by stage
    close   gives everything back for good: the workspace, the host's copies, then what else is mapped

Steps may be launched as soon as `wake` returns: each layer waits on the device until its weights are there. It knows
how large steps may be, not what they compute, and not when a model is to sleep, or why.
"""

from collections.abc import Sequence as Items
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Self

import torch

from engine.execution.cuda_graphs import capture_sizes
from engine.execution.memory_plan import CONTEXT_BYTES, GRAPH_BYTES, host_tier_bytes, kv_blocks, paged_layout
from engine.kvcache.host_tier import HostKVTier
from engine.kvcache.tensors import KVPool
from engine.memory.streams import DeviceStream, StreamEvent
from engine.memory.workspace import Workspace
from engine.models.config import ModelConfig
from engine.models.gpu_step import StepBuffers
from engine.models.llama import kv_shape
from engine.protocol.specs import ModelSpec
from engine.step.executor import MemoryUsage
from engine.step.layout import HEADER_WORDS
from engine.weights.device_buffer import WeightBuffer

_STEP_TOKENS: Final = 2048
_PROMPT_STEP_TOKENS: Final = 8192
_SEQUENCES: Final = 512
_ROW_WORDS: Final = 48  # what a step has per row, tiles included
_MORE_WORDS: Final = 1 << 20  # histories, and tiles that are divided


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step; memory of fixed size is made for it."""

    rows: int
    sequences: int
    words: int
    step_tokens: int
    prompt_step_tokens: int

    @classmethod
    def of(cls, sequences: int | None, step_tokens: int | None, context_tokens: int, block_tokens: int) -> Self:
        """`sequences` and `step_tokens` as a spec asks for them, or None."""
        sequences = sequences or _SEQUENCES
        prompt_step_tokens = step_tokens or _PROMPT_STEP_TOKENS
        rows = min(max(prompt_step_tokens, sequences), sequences * context_tokens)
        tables = sequences * -(-context_tokens // block_tokens)
        words = HEADER_WORDS + rows * _ROW_WORDS + tables + _MORE_WORDS
        return cls(rows, sequences, words, step_tokens or _STEP_TOKENS, prompt_step_tokens)


class GpuMemory:
    """A model's PagedMemory and Sleeper on a GPU. It is awake when it is made, with everything mapped but extents of
    the pool.

    standby         the host's copy of the weights is made ahead, while nothing else is to be done.
    sampled_rows    how many tokens the last launched step sampled, to which the next may point; 0 after a wake.
    """

    def __init__(
        self, model: ModelSpec, config: ModelConfig, dtype: torch.dtype, weights: WeightBuffer, pool: KVPool,
        step_limits: StepLimits, context_tokens: int, stream: DeviceStream,
    ) -> None:  # fmt: skip
        """Adds a workspace for steps of the most rows, and a host tier, to weights and a pool. Steps are launched into
        `stream`. Raises OutOfDeviceMemory, and then the workspace is closed."""
        self.awake = True
        self.standby = False
        self.sampled_rows = 0
        self.pool = pool
        self.layout = paged_layout(model, pool, context_tokens)
        self.workspace = Workspace(weights.arena, stream.device)
        self.stream = stream
        self.map = pool.map
        self._weights = weights
        self._copies = DeviceStream(stream.device)
        self._arrivals: list[StreamEvent] = []
        rows = max(step_limits.rows, *capture_sizes(step_limits.rows))
        sampled_rows = capture_sizes(step_limits.sequences)[-1]
        with ExitStack() as undoing:
            undoing.callback(self.workspace.close)  # nothing else ever gives its memory back
            undoing.callback(stream.wait)
            with stream.entered(), self.workspace.entered():
                self.buffers = StepBuffers.make(
                    config, dtype, stream.device, step_limits.words, rows, sampled_rows, context_tokens
                )
                kept_bytes = host_tier_bytes(model, pool, context_tokens)
                self._host_tier = HostKVTier(pool, weights.arena.driver, kept_bytes, stream.device)
            undoing.pop_all()

    @property
    def mapped(self) -> list[int]:
        return self.pool.mapped

    def prepare(self) -> int:
        """As in Sleeper: copies a little of the weights to the host."""
        return self._weights.prepare(self._copies)

    def sleep(self, keep: Items[int]) -> int:
        """As in Sleeper: gives everything back, in the order that the module describes."""
        assert self.awake, "asleep already"
        self.stream.wait()
        self._copies.wait()
        self.arrived()
        copied = 0
        while count := self._weights.prepare(self._copies):
            copied += count
        copied += self._host_tier.save(keep, self.stream)
        with self.stream.entered():
            self.pool.clear(self.pool.mapped)
            self.workspace.clear()
        self._copies.wait()
        self._weights.unmap()  # while the rest is zeroed
        self.stream.wait()
        self.pool.unmap(self.pool.mapped)
        self.workspace.unmap()
        if self.stream.queues:
            torch.cuda.empty_cache()
        self.awake = False
        return copied

    def wake(self, extents: Items[int], restore: Items[int]) -> int:
        """As in Sleeper: maps everything with these extents, and queues what comes back from the host."""
        assert not self.awake, "awake already"
        needed = sorted({block // self.pool.extent_blocks for block in restore})
        with ExitStack() as undoing:
            self._weights.map()
            undoing.callback(self._weights.unmap)
            self.workspace.map()
            undoing.callback(self.workspace.unmap)
            self.pool.map(needed)
            undoing.callback(self._zero_and_unmap, needed)
            undoing.callback(self._copies.wait)
            with self.stream.entered():
                self.buffers.renew()
            copied = self._host_tier.restore(restore, self._copies)
            arrivals = self._weights.send(self._copies)
            self.pool.map([extent for extent in extents if extent not in needed])  # while copies are under way
            undoing.pop_all()
        self.awake, self.sampled_rows, self._arrivals = True, 0, arrivals
        return copied + self._weights.bytes

    def close(self) -> None:
        """Gives everything back, on the host too. Graphs in the workspace are closed. It may be called again."""
        self.stream.wait()
        self._copies.wait()
        self.awake, self._arrivals = False, []
        self.workspace.close()
        self._host_tier.close()
        self._weights.close()
        self.pool.unmap(self.pool.mapped)

    def arrived(self) -> bool:
        """Whether everything is there. The host forgets the kept blocks then."""
        if self._arrivals and self._arrivals[-1].passed():
            self._arrivals = []
            self._host_tier.forget()
        return not self._arrivals

    def arrivals(self) -> list[StreamEvent]:
        """The marks of the stages that are on their way, in the order of their use; none where all have arrived."""
        return [] if self.arrived() else self._arrivals

    def zero(self, blocks: Items[int]) -> None:
        """Zeroes blocks in the order of the stream, without waiting for it; asleep the host's copies of them."""
        if not self.awake:
            self._host_tier.erase(blocks)
            return
        self._follow_restored()
        with self.stream.entered(), self.workspace.entered():
            self.pool.erase(self._ids(blocks))

    def copy(self, sources: Items[int], targets: Items[int]) -> None:
        """Copies blocks in the order of the stream."""
        self._follow_restored()
        with self.stream.entered(), self.workspace.entered():
            self.pool.copy(self._ids(sources), self._ids(targets))

    def unmap(self, extents: Items[int]) -> None:
        """Zeroes these extents and gives their memory back, when the device has done what is queued."""
        self._follow_restored()
        self._zero_and_unmap(extents)

    def fixed_bytes(self, graphs: int) -> int:
        """What the model takes of the device beside its KV, with so many graphs."""
        return CONTEXT_BYTES + graphs * GRAPH_BYTES + self._weights.bytes + self.workspace.bytes

    def usage(self) -> MemoryUsage:
        """As in Sleeper. With `standby` the host's copy counts as a whole, however much of it is there."""
        graphs = self.workspace.graphs
        asleep_bytes, fixed_bytes = CONTEXT_BYTES + graphs * GRAPH_BYTES, self.fixed_bytes(graphs)
        extent_bytes, kv_bytes = self.pool.extent_bytes, self.pool.mapped_bytes
        copied_bytes = self._weights.bytes if self.standby else self._weights.held_bytes
        return MemoryUsage(
            device_bytes=fixed_bytes + kv_bytes if self.awake else asleep_bytes,
            asleep_bytes=asleep_bytes,
            min_bytes=fixed_bytes + self.layout.min_extents * extent_bytes,
            max_bytes=fixed_bytes + self.pool.extents * extent_bytes,
            memory_bytes=copied_bytes + self._host_tier.held_bytes,
            weights_bytes=self._weights.bytes,
            kv_bytes=kv_bytes,
            kept_bytes=self._host_tier.bytes,
            standby_bytes=self._weights.bytes + self._host_tier.max_bytes,
        )

    def _zero_and_unmap(self, extents: Items[int]) -> None:
        with self.stream.entered():
            self.pool.clear(extents)
        self.stream.wait()
        self.pool.unmap(extents)

    def _follow_restored(self) -> None:
        """Queues what is done to blocks behind their way back from the host, which the first mark is behind."""
        for mark in self.arrivals()[:1]:
            self.stream.follow(mark)

    def _ids(self, blocks: Items[int]) -> torch.Tensor:
        return self.stream.pinned(blocks).to(self.stream.device, non_blocking=True)


def open_gpu_memory(
    model: ModelSpec, config: ModelConfig, dtype: torch.dtype, weights: WeightBuffer, step_limits: StepLimits,
    context_tokens: int, device: torch.device,
) -> GpuMemory:  # fmt: skip
    """Reserves a pool for as much KV as the device could hold beside the weights, with one extent mapped.
    Raises OutOfDeviceMemory or DoesNotFit."""
    shape = kv_shape(config, model.block_tokens, torch.float8_e4m3fn if model.kv_dtype == "fp8" else dtype)
    kv_bytes = weights.arena.max_bytes - weights.bytes
    blocks = kv_blocks(model, shape, context_tokens, step_limits.sequences, kv_bytes, kv_bytes)
    pool = KVPool(shape, blocks, weights.arena, extents=1)
    return GpuMemory(model, config, dtype, weights, pool, step_limits, context_tokens, DeviceStream(device))
