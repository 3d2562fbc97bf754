"""A decoder's memory on a CPU: its parameters, a KV pool that takes memory as it fills, and what stays in a sleep.

Asleep it holds no parameters: the page cache has the files that they are read from again.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Final

import torch

from engine.hostinfo.memory import available_memory_bytes
from engine.kvcache.tensors import KVPool
from engine.memory.errors import OutOfDeviceMemory, OutOfHostMemory
from engine.memory.trim import trim_memory
from engine.models.decoder_layer import DecoderParameters
from engine.models.llama import LlamaDecoder
from engine.step.executor import MemoryUsage, PagedLayout
from engine.weights.assembly import weights_bytes

_CPU: Final = torch.device("cpu")


class CpuMemory:
    """A model's PagedMemory and Sleeper on a CPU.

    decoder     the model, None while it sleeps.
    """

    def __init__(
        self, parameters: DecoderParameters, load: Callable[[], DecoderParameters], pool: KVPool, layout: PagedLayout,
        standby_bytes: int,
    ) -> None:  # fmt: skip
        """`load` reads the parameters again at each wake; standby_bytes of KV at most are kept while it sleeps."""
        self.decoder: LlamaDecoder | None = LlamaDecoder(parameters)
        self.pool = pool
        self.layout = layout
        self.map = pool.map
        self.unmap = pool.unmap
        self.weights_bytes = weights_bytes(parameters)
        self._load = load
        self._standby_bytes = standby_bytes
        self._kept_blocks: list[int] = []
        self._kept_LBW = torch.empty(0, dtype=torch.uint8)

    @property
    def mapped(self) -> list[int]:
        return self.pool.mapped

    def zero(self, blocks: Items[int]) -> None:
        if self.decoder is not None:
            self.pool.erase(torch.tensor(blocks, dtype=torch.int64))
            return
        for block in blocks:
            self._kept_LBW[:, self._kept_blocks.index(block)] = 0

    def copy(self, sources: Items[int], targets: Items[int]) -> None:
        self.pool.copy(*(torch.tensor(blocks, dtype=torch.int64) for blocks in (sources, targets)))

    def prepare(self) -> int:
        """Copies nothing: weights come from their files again."""
        return 0

    def sleep(self, keep: Items[int]) -> int:
        """Drops the parameters, and of the pool all but these blocks. Returns their bytes. Raises OutOfHostMemory."""
        assert self.decoder is not None, "asleep already"
        shape, count = self.pool.shape, len(keep)
        if count * shape.block_bytes > available_memory_bytes():
            raise OutOfHostMemory(f"{count * shape.block_bytes / 1e6:.0f} MB of KV to keep are more than what is free")
        kept_LBW = torch.empty(shape.layers, count, shape.layer_block_bytes, dtype=torch.uint8)
        for layer in range(shape.layers if keep else 0):
            self.pool.take(layer, torch.tensor(keep), kept_LBW[layer])
        self._kept_blocks, self._kept_LBW = list(keep), kept_LBW
        self.decoder = None
        self.pool.unmap(self.pool.mapped)
        trim_memory(_CPU)
        return kept_LBW.nbytes

    def wake(self, extents: Items[int], restore: Items[int]) -> int:
        """Reads the parameters again. Returns their bytes and those restored. Raises CheckpointError where the folder
        is not what it was, OutOfDeviceMemory where memory is short."""
        assert self.decoder is None, "awake already"
        free = available_memory_bytes()
        if self.weights_bytes > free:
            raise OutOfDeviceMemory(
                f"{self.weights_bytes / 1e6:.0f} MB of weights are more than the {free / 1e6:.0f} free"
            )
        decoder = LlamaDecoder(self._load())
        self.pool.map(extents)
        kept_LBW = self._kept_LBW
        for layer in range(len(kept_LBW) if restore else 0):
            self.pool.put(layer, torch.tensor(restore), kept_LBW[layer])
        kept_LBW.zero_()  # what was restored may be zeroed from now on
        self.decoder, self._kept_blocks, self._kept_LBW = decoder, [], kept_LBW.new_empty(0)
        return self.weights_bytes + kept_LBW.nbytes

    def arrived(self) -> bool:
        """True: `wake` returns when everything is there."""
        return True

    def close(self) -> None:
        """Gives everything back. It may be called again."""
        self.decoder, self._kept_blocks, self._kept_LBW = None, [], self._kept_LBW.new_empty(0)
        self.pool.unmap(self.pool.mapped)
        trim_memory(_CPU)

    def usage(self) -> MemoryUsage:
        """As in Sleeper. `device_bytes` is what steps read and write; the page cache, which the system takes back as it
        likes, counts for nobody."""
        weights_bytes, layout, awake = self.weights_bytes, self.layout, self.decoder is not None
        kv_bytes = len(self.pool.mapped) * layout.extent_bytes
        return MemoryUsage(
            device_bytes=weights_bytes + kv_bytes if awake else 0,
            asleep_bytes=0,
            min_bytes=weights_bytes + layout.min_extents * layout.extent_bytes,
            max_bytes=weights_bytes + layout.extents * layout.extent_bytes,
            host_bytes=self._kept_LBW.nbytes,
            weights_bytes=weights_bytes,
            kv_bytes=kv_bytes,
            host_kv_bytes=self._kept_LBW.nbytes,
            standby_bytes=self._standby_bytes,
        )
