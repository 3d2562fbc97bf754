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
from typing import Final, Protocol, Self
from weakref import proxy

import torch

from engine.execution.cuda_graphs import capture_sizes
from engine.execution.kv_groups import GpuKVGroup, all_memories, open_tier
from engine.execution.memory_plan import (
    CONTEXT_BYTES,
    GRAPH_BYTES,
    host_tier_bytes,
    kv_blocks,
    paged_layout,
    windows_bytes,
)
from engine.kvcache.host_tier import HostKVTier
from engine.kvcache.layer_pools import LayerPools, group_shapes
from engine.kvcache.tensors import KVPool
from engine.memory.streams import DeviceStream, StreamEvent
from engine.memory.workspace import Workspace
from engine.models.config import ModelConfig
from engine.models.gpu_step import RankWindows, StepBuffers
from engine.models.llama import kv_shape
from engine.protocol.specs import ModelSpec
from engine.step.executor import ImageEncoder, MemoryUsage
from engine.step.layout import HEADER_WORDS
from engine.weights.device_buffer import WeightBuffer

_STEP_TOKENS: Final = 2048
_PROMPT_STEP_TOKENS: Final = 8192
SEQUENCES: Final = 512
_ROW_WORDS: Final = 28  # what a step has per row,
_GROUP_ROW_WORDS: Final = 20  # and per row in each group, tiles included
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
    def of(
        cls, sequences: int | None, step_tokens: int | None, context_tokens: int, block_tokens: int, groups: int = 1,
        image_tokens: int = 0,
    ) -> Self:  # fmt: skip
        """`sequences` and `step_tokens` as a spec asks for them, or None. An image's tokens may come beside those."""
        sequences = sequences or SEQUENCES
        prompt_step_tokens = step_tokens or _PROMPT_STEP_TOKENS
        rows = min(max(prompt_step_tokens, sequences) + image_tokens, sequences * context_tokens)
        tables = sequences * -(-context_tokens // block_tokens)
        words = HEADER_WORDS + rows * _ROW_WORDS + groups * (rows * _GROUP_ROW_WORDS + tables) + _MORE_WORDS
        return cls(rows, sequences, words, step_tokens or _STEP_TOKENS, prompt_step_tokens)


class DeviceImageEncoder(ImageEncoder, Protocol):
    """What encodes images on a GPU (images/gpu_images.py), as the memory and steps see it.

    encoding_bytes  that `encode` takes for a moment.
    """

    encoding_bytes: int

    def clear(self) -> None:
        """Has what was placed zeroed behind the step that reads it, which is queued."""

    def sleep(self) -> None:
        """Once what is encoded at this moment is done: the parameters' memory may go."""

    def wake(self, arrived: StreamEvent) -> None:
        """Encodes again, behind the mark of the parameters, which are on their way."""


class GpuMemory:
    """A model's Sleeper on a GPU. It is awake when it is made, with everything mapped but extents of the pools.

    pools           the KV of all layers,
    groups          and the memory of each group of them, which is all of `memories` that has bytes.
    tier            host memory for blocks that do not fit here, if the spec asks for it.
    standby         the host's copy of the weights is made ahead, while nothing else is to be done.
    windows         what several ranks of a stage share (memory/symmetric.py),
    windows_bytes   and what all that is shared holds of the device for good, asleep too.
    handover_bytes  left to windows for blocks that other replicas hand over; none while it sleeps.
    images          what encodes images, if the model takes any here; it sleeps and wakes with it.
    sampled_rows    how many tokens the last launched step sampled, to which the next may point; 0 after a wake.
    """

    def __init__(
        self, model: ModelSpec, config: ModelConfig, dtype: torch.dtype, weights: WeightBuffer, pools: LayerPools,
        step_limits: StepLimits, context_tokens: int, stream: DeviceStream, kept_steps: int = 0,
        embedding_rows: int = 0,
    ) -> None:  # fmt: skip
        """Adds a workspace for steps of the most rows, and host tiers, to weights and pools. Steps are launched into
        `stream`; tokens of kept_steps more are kept beside those of the newest, and embedding_rows are there for
        images. Raises OutOfDeviceMemory, and then the workspace is closed."""
        self.awake = True
        self.standby = False
        self.sampled_rows = 0
        self.windows: RankWindows | None = None
        self.windows_bytes = 0
        self.images: DeviceImageEncoder | None = None
        self.handover_bytes = windows_bytes(model, pools.pools, weights.arena.max_bytes)
        self.pools = pools
        self.workspace = Workspace(weights.arena, stream.device)
        self.stream = stream
        self._weights = weights
        self._copies = DeviceStream(stream.device)
        self._arrivals: list[StreamEvent] = []
        rows = max(step_limits.rows, *capture_sizes(step_limits.rows))
        sampled_rows = max(step_limits.sequences, *capture_sizes(step_limits.sequences))
        with ExitStack() as undoing:
            undoing.callback(self.workspace.close)  # nothing else ever gives its memory back
            undoing.callback(stream.wait)
            with stream.entered(), self.workspace.entered():
                self.buffers = StepBuffers.make(
                    config, dtype, stream.device, step_limits.words, rows, sampled_rows, context_tokens,
                    kept_steps * sampled_rows, embedding_rows,
                )  # fmt: skip
                tiers = [
                    HostKVTier(pool, weights.arena.driver, kept_bytes, stream.device)
                    for pool, kept_bytes in zip(
                        pools.pools, host_tier_bytes(model, pools.pools, context_tokens), strict=True
                    )
                ]
                self.tier = open_tier(model, pools.pools[0], weights.arena.driver, stream)
            undoing.pop_all()
        weak = proxy(self)  # a circle would keep memory until the collector comes
        self.groups = [
            GpuKVGroup(
                pool, paged_layout(model, pool, context_tokens), tier, stream, self.workspace, lambda: weak.arrivals()
            )
            for pool, tier in zip(pools.pools, tiers, strict=True)
        ]
        self.memories = all_memories(self.groups, context_tokens, step_limits.sequences)

    def prepare(self) -> int:
        """As in Sleeper: copies a little of the weights to the host."""
        return self._weights.prepare(self._copies)

    def sleep(self, keep: Items[Items[int]]) -> int:
        """As in Sleeper: gives everything back, in the order that the module describes."""
        assert self.awake, "asleep already"
        self.stream.wait()
        self._copies.wait()
        if self.tier is not None:
            self.tier.wait()
        self.arrived()
        copied = 0
        while count := self._weights.prepare(self._copies):
            copied += count
        copied += self._save(keep)
        with self.stream.entered():
            for group in self.groups:
                group.pool.clear(group.mapped)
            self.workspace.clear()
        self._copies.wait()
        if self.images is not None:
            self.images.sleep()
        self._weights.unmap()  # while the rest is zeroed
        self.stream.wait()
        for group in self.groups:
            group.pool.unmap(group.mapped)
            group.asleep = True
        self.workspace.unmap()
        if self.stream.queues:
            torch.cuda.empty_cache()
        self.awake = False
        return copied

    def wake(self, extents: Items[Items[int]], restore: Items[Items[int]]) -> int:
        """As in Sleeper: maps everything with these extents, and queues what comes back from the host."""
        assert not self.awake, "awake already"
        there, kept = self._of_groups(extents), self._of_groups(restore)
        needed = [
            sorted({block // group.pool.extent_blocks for block in blocks})
            for group, blocks in zip(self.groups, kept, strict=True)
        ]
        with ExitStack() as undoing:
            self._weights.map()
            undoing.callback(self._weights.unmap)
            self.workspace.map()
            undoing.callback(self.workspace.unmap)
            for group, first in zip(self.groups, needed, strict=True):
                group.map(first)
                undoing.callback(group.zero_and_unmap, first)
            undoing.callback(self._copies.wait)
            with self.stream.entered():
                self.buffers.renew()
            copied = sum(
                group.tier.restore(blocks, self._copies) for group, blocks in zip(self.groups, kept, strict=True)
            )
            restored = self._copies.mark()
            restored.set()
            self.stream.follow(restored)  # blocks may be given to others before any step is launched
            arrivals = self._weights.send(self._copies)
            for group, first, mapped in zip(self.groups, needed, there, strict=True):  # while copies are under way
                rest = [extent for extent in mapped if extent not in first]
                group.map(rest)
                undoing.callback(group.zero_and_unmap, rest)
            undoing.pop_all()
        for group in self.groups:
            group.asleep = False
        self.awake, self.sampled_rows, self._arrivals = True, 0, arrivals
        if self.images is not None:
            self.images.wake(arrivals[-1])
        return copied + self._weights.bytes

    def close(self) -> None:
        """Gives everything back, on the host too. Graphs in the workspace are closed. It may be called again."""
        if self.images is not None:
            self.images.sleep()
        self.stream.wait()
        self._copies.wait()
        if self.tier is not None:
            self.tier.wait()
        self.awake, self._arrivals = False, []
        self.workspace.close()
        for tier in [self.tier, *(group.tier for group in self.groups)]:
            if tier is not None:
                tier.close()
        self._weights.close()
        for group in self.groups:
            group.pool.unmap(group.mapped)

    def arrived(self) -> bool:
        """Whether everything is there. The host forgets the kept blocks then."""
        if self._arrivals and self._arrivals[-1].passed():
            self._arrivals = []
            for group in self.groups:
                group.tier.forget()
        return not self._arrivals

    def arrivals(self) -> list[StreamEvent]:
        """The marks of a step's stages that are on their way, in the order of their use; none where all have arrived,
        and what encodes images too."""
        if self.arrived():
            return []
        return self._arrivals if self.images is None else self._arrivals[:-1]

    def fixed_bytes(self, graphs: int) -> int:
        """What the model takes of the device beside its KV, with so many graphs."""
        return self._asleep_bytes(graphs) + self._weights.bytes + self.workspace.bytes + self.unmapped_bytes

    @property
    def unmapped_bytes(self) -> int:
        """What is left to others for a while: blocks that are handed over, and images that are encoded."""
        return self.handover_bytes + (0 if self.images is None else self.images.encoding_bytes)

    def _asleep_bytes(self, graphs: int) -> int:
        return CONTEXT_BYTES + graphs * GRAPH_BYTES + self.windows_bytes

    @property
    def kv_bytes(self) -> int:
        """What is mapped of KV."""
        return sum(group.pool.mapped_bytes for group in self.groups)

    def usage(self) -> MemoryUsage:
        """As in Sleeper. With `standby` the host's copy counts as a whole, however much of it is there."""
        graphs = self.workspace.graphs
        asleep_bytes, fixed_bytes = self._asleep_bytes(graphs), self.fixed_bytes(graphs)
        layouts, kv_bytes = [group.layout for group in self.groups], self.kv_bytes
        copied_bytes = self._weights.bytes if self.standby else self._weights.held_bytes
        held_bytes, max_bytes = (0, 0) if self.tier is None else (self.tier.held_bytes, self.tier.max_bytes)
        return MemoryUsage(
            device_bytes=fixed_bytes + kv_bytes if self.awake else asleep_bytes,
            asleep_bytes=asleep_bytes,
            min_bytes=fixed_bytes + sum(layout.min_extents * layout.extent_bytes for layout in layouts),
            max_bytes=fixed_bytes + max(layout.extents * layout.extent_bytes for layout in layouts),
            memory_bytes=copied_bytes + held_bytes + sum(group.tier.held_bytes for group in self.groups),
            weights_bytes=self._weights.bytes,
            kv_bytes=kv_bytes,
            kept_bytes=held_bytes + sum(group.tier.bytes for group in self.groups),
            standby_bytes=self._weights.bytes + max_bytes + sum(group.tier.max_bytes for group in self.groups),
        )

    def _save(self, keep: Items[Items[int]]) -> int:
        """Queues the copy of what is kept to the host. Raises OutOfHostMemory, and then nothing is kept."""
        with ExitStack() as undoing:
            copied = 0
            for group, blocks in zip(self.groups, self._of_groups(keep), strict=True):
                copied += group.tier.save(blocks, self.stream)
                undoing.callback(group.tier.forget)
            undoing.pop_all()
        return copied

    def _of_groups(self, lists: Items[Items[int]]) -> Items[Items[int]]:
        """The lists of the groups; before them may be one of blocks that hold nothing."""
        return lists[len(lists) - len(self.groups) :]


def open_gpu_memory(
    model: ModelSpec, config: ModelConfig, dtype: torch.dtype, weights: WeightBuffer, step_limits: StepLimits,
    context_tokens: int, device: torch.device, sizes: Items[tuple[int, int]] = (), kept_steps: int = 0,
    embedding_rows: int = 0,
) -> GpuMemory:  # fmt: skip
    """Reserves pools for as much KV as the device could hold beside the weights, with one extent of each mapped; or for
    as many blocks, and so many in an extent, as `sizes` say. Raises OutOfDeviceMemory or DoesNotFit."""
    groups = config.kv_groups
    shape = kv_shape(config, model.block_tokens, torch.float8_e4m3fn if model.kv_dtype == "fp8" else dtype)
    kv_bytes = weights.arena.max_bytes - weights.bytes
    shapes = group_shapes(shape, groups)
    if not sizes:
        blocks = kv_blocks(model, shapes, context_tokens, step_limits.sequences, kv_bytes, kv_bytes)
        sizes = [(count, 0) for count in blocks]
    pools = [
        KVPool(each, count, weights.arena, 1, at_once) for each, (count, at_once) in zip(shapes, sizes, strict=True)
    ]
    layers = LayerPools(groups, pools)
    return GpuMemory(
        model, config, dtype, weights, layers, step_limits, context_tokens, DeviceStream(device), kept_steps,
        embedding_rows,
    )  # fmt: skip
