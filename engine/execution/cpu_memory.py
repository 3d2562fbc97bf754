"""A decoder's memory on a CPU, of which the KV pool takes more as it fills. It knows no steps.

Asleep it holds no parameters: the page cache has the files that they are read from again.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Final

import torch

from engine.execution.kv_groups import CpuKVGroup
from engine.hostinfo.memory import available_memory_bytes
from engine.images.cpu_images import CpuImageEncoder
from engine.kvcache.layer_pools import LayerPools
from engine.kvcache.slot_tier import SlotTier
from engine.memory.errors import OutOfDeviceMemory, OutOfHostMemory
from engine.memory.streams import trim_memory
from engine.models.config import ModelConfig
from engine.models.cpu_step import CpuLayers
from engine.models.decoders import CpuRowDecoder, Decoder, DecoderParameters, make_decoder, row_decoder
from engine.process.allocator import large_blocks_in_heap
from engine.step.executor import MemoryUsage, PagedMemory
from engine.weights.assembly import weights_bytes

_CPU: Final = torch.device("cpu")


class CpuMemory:
    """A model's Sleeper on a CPU.

    decoder     the model, None while it sleeps.
    pools       the KV of all layers,
    groups      and the memory of each group of them, which is all of `memories` that has bytes.
    tier        memory for blocks that do not fit into the first pool, if there is any.
    images      what encodes images, if the model takes any; it sleeps and wakes with it.
    """

    def __init__(
        self, config: ModelConfig, parameters: DecoderParameters, load: Callable[[], DecoderParameters],
        pools: LayerPools, groups: Items[CpuKVGroup], memories: tuple[PagedMemory, ...], standby_bytes: int,
        tier: SlotTier | None = None, images: CpuImageEncoder | None = None,
    ) -> None:  # fmt: skip
        """`load` reads the parameters again at each wake; standby_bytes of KV at most are kept while it sleeps."""
        self.decoder: Decoder | None = make_decoder(config, parameters)
        self.pools = pools
        self.groups = groups
        self.memories = memories
        self.tier = tier
        self.images = images
        self.weights_bytes = weights_bytes(parameters) + (0 if images is None else images.bytes)
        self._config = config
        self._load = load
        self._standby_bytes = standby_bytes
        self._row_decoder: tuple[CpuRowDecoder | None] | None = (
            None  # of the decoder that is awake, once it was asked for
        )

    def row_decoder(self, layers: CpuLayers) -> CpuRowDecoder | None:
        """What computes steps of one row for the decoder; None: it does."""
        assert self.decoder is not None, "asleep"
        if self._row_decoder is None:
            self._row_decoder = (row_decoder(self._config, self.decoder.parameters, layers, self.pools),)
        return self._row_decoder[0]

    def prepare(self) -> int:
        """Copies nothing: weights come from their files again."""
        return 0

    def sleep(self, keep: Items[Items[int]]) -> int:
        """Drops the parameters, and of the pools all but these blocks. Returns their bytes. Raises OutOfHostMemory."""
        assert self.decoder is not None, "asleep already"
        kept = self._with_groups(keep)
        kept_bytes = sum(len(blocks) * group.layout.block_bytes for group, blocks in kept)
        if kept_bytes > available_memory_bytes():
            raise OutOfHostMemory(f"{kept_bytes / 1e6:.0f} MB of KV to keep are more than what is free")
        for group, blocks in kept:
            group.keep(blocks)
        self.decoder = self._row_decoder = None
        if self.images is not None:
            self.images.sleep()
        for group in self.groups:
            group.sleep()
        trim_memory(_CPU)
        return kept_bytes

    def wake(self, extents: Items[Items[int]], restore: Items[Items[int]]) -> int:
        """As in Sleeper: reads the parameters again. Returns their bytes and those restored."""
        assert self.decoder is None, "awake already"
        free = available_memory_bytes()
        if self.weights_bytes > free:
            raise OutOfDeviceMemory(
                f"{self.weights_bytes / 1e6:.0f} MB of weights are more than the {free / 1e6:.0f} free"
            )
        with large_blocks_in_heap():
            decoder = make_decoder(self._config, self._load())
            if self.images is not None:
                self.images.wake()
        restored_bytes = 0
        for (group, there), (_, blocks) in zip(self._with_groups(extents), self._with_groups(restore), strict=True):
            restored_bytes += group.wake(there, blocks)
        self.decoder = decoder
        return self.weights_bytes + restored_bytes

    def arrived(self) -> bool:
        """True: `wake` returns when everything is there."""
        return True

    def close(self) -> None:
        """Gives everything back. It may be called again."""
        self.decoder = self._row_decoder = None
        if self.images is not None:
            self.images.sleep()
        for group in self.groups:
            group.forget()
            group.pool.unmap(group.pool.mapped)
        if self.tier is not None:
            self.tier.close()
        trim_memory(_CPU)

    def usage(self) -> MemoryUsage:
        """As in Sleeper. `device_bytes` is what steps read and write; the page cache, which the system takes back as it
        likes, counts for nobody."""
        weights_bytes, layouts, awake = self.weights_bytes, [group.layout for group in self.groups], self.decoder
        kv_bytes = sum(len(group.mapped) * group.layout.extent_bytes for group in self.groups)
        kept_bytes = sum(group.kept_bytes for group in self.groups)
        kept_bytes += 0 if self.tier is None else self.tier.held_bytes
        return MemoryUsage(
            device_bytes=weights_bytes + kv_bytes if awake is not None else 0,
            asleep_bytes=0,
            min_bytes=weights_bytes + sum(layout.min_extents * layout.extent_bytes for layout in layouts),
            max_bytes=weights_bytes + max(layout.extents * layout.extent_bytes for layout in layouts),
            memory_bytes=kept_bytes,
            weights_bytes=weights_bytes,
            kv_bytes=kv_bytes,
            kept_bytes=kept_bytes,
            standby_bytes=self._standby_bytes + (0 if self.tier is None else self.tier.max_bytes),
        )

    def _with_groups(self, lists: Items[Items[int]]) -> list[tuple[CpuKVGroup, Items[int]]]:
        """Each group with its own of these lists; before them may be one of blocks that hold nothing."""
        return list(zip(self.groups, lists[len(lists) - len(self.groups) :], strict=True))
