"""The KV blocks of one group of layers, on a CPU, on a GPU, or nowhere. It knows no weights, and not when or why blocks
move."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from pathlib import Path

import torch

from engine.execution.memory_plan import unkept_layout
from engine.kvcache.host_tier import HostKVTier
from engine.kvcache.slot_tier import SlotTier
from engine.kvcache.tensors import KVPool
from engine.memory.streams import DeviceStream, StreamEvent
from engine.memory.virtual_memory import HostMemoryDriver, MemoryDriver
from engine.memory.workspace import Workspace
from engine.protocol.specs import ModelSpec
from engine.step.exchange import Gathered
from engine.step.executor import PagedLayout, PagedMemory
from engine.step.key_span import FULL


class UnkeptBlocks:
    """A PagedMemory of blocks that hold nothing: the tree's, where no layer sees everything."""

    def __init__(self, layout: PagedLayout) -> None:
        self.layout = layout
        self.mapped = list(range(layout.extents))

    def zero(self, blocks: Items[int]) -> None:
        """There is nothing to zero."""

    def copy(self, sources: Items[int], targets: Items[int]) -> None:
        """There is nothing to copy."""

    def map(self, extents: Items[int]) -> None:
        assert not extents, "blocks without bytes are all there"

    def unmap(self, extents: Items[int]) -> None:
        assert not extents, "blocks without bytes take no memory"


class CpuKVGroup:
    """A PagedMemory on a CPU. What is kept asleep is a copy."""

    windows, busy = None, False  # as in BlockExchange: what a CPU computes in is shared as it is, and copied at once

    def __init__(self, pool: KVPool, layout: PagedLayout) -> None:
        self.pool = pool
        self.layout = layout
        self.map = pool.map
        self.unmap = pool.unmap
        self._asleep = False
        self._kept_blocks: list[int] = []
        self._kept_LBW = torch.empty(0, dtype=torch.uint8)

    @property
    def mapped(self) -> list[int]:
        return self.pool.mapped

    @property
    def kept_bytes(self) -> int:
        """What is kept of it asleep."""
        return self._kept_LBW.nbytes

    def zero(self, blocks: Items[int]) -> None:
        if self._asleep:
            self._kept_LBW[:, [self._kept_blocks.index(block) for block in blocks]] = 0
        else:
            self.pool.erase(torch.tensor(blocks, dtype=torch.int64))

    def copy(self, sources: Items[int], targets: Items[int]) -> None:
        self.pool.copy(*(torch.tensor(blocks, dtype=torch.int64) for blocks in (sources, targets)))

    def gather(self, blocks: Items[int], into: memoryview) -> Gathered:
        """As in BlockExchange, at once."""
        self.pool.gather(torch.tensor(blocks, dtype=torch.int64), self._as_blocks(into, len(blocks)))
        return Gathered()

    def scatter(self, blocks: Items[int], gathered: memoryview) -> None:
        """As in BlockExchange."""
        self.pool.scatter(torch.tensor(blocks, dtype=torch.int64), self._as_blocks(gathered, len(blocks)))

    def _as_blocks(self, memory: memoryview, count: int) -> torch.Tensor:
        shape = self.pool.shape
        return torch.frombuffer(memory, dtype=torch.uint8).view(count, shape.layers, shape.layer_block_bytes)

    def keep(self, blocks: Items[int]) -> None:
        """Copies what these blocks hold."""
        shape, count = self.pool.shape, len(blocks)
        self._kept_LBW = torch.empty(shape.layers, count, shape.layer_block_bytes, dtype=torch.uint8)
        for layer in range(shape.layers if blocks else 0):
            self.pool.take(layer, torch.tensor(blocks), self._kept_LBW[layer])
        self._kept_blocks = list(blocks)

    def sleep(self) -> None:
        """Gives all memory back but what is kept."""
        self._asleep = True
        self.pool.unmap(self.pool.mapped)

    def wake(self, extents: Items[int], restore: Items[int]) -> int:
        """Takes memory for these extents, and puts what was kept into these blocks. Returns its bytes."""
        self.pool.map(extents)
        kept_LBW = self._kept_LBW
        for layer in range(len(kept_LBW) if restore else 0):
            self.pool.put(layer, torch.tensor(restore), kept_LBW[layer])
        self.forget()
        self._asleep = False
        return kept_LBW.nbytes

    def forget(self) -> None:
        """Zeroes and drops what is kept."""
        self._kept_LBW.zero_()
        self._kept_blocks, self._kept_LBW = [], torch.empty(0, dtype=torch.uint8)


class GpuKVGroup:
    """A PagedMemory on a GPU: calls are queued in the order of the stream.

    asleep  the blocks' memory is given back, and the tier has what is kept.
    """

    def __init__(
        self, pool: KVPool, layout: PagedLayout, tier: HostKVTier, stream: DeviceStream, workspace: Workspace,
        arrivals: Callable[[], list[StreamEvent]],
    ) -> None:  # fmt: skip
        """`arrivals`: the marks of what is on its way after a wake, of which the first is behind the kept blocks."""
        self.pool = pool
        self.layout = layout
        self.tier = tier
        self.map = pool.map
        self.asleep = False
        self._stream = stream
        self._workspace = workspace
        self._arrivals = arrivals
        self._copied = stream.mark()

    @property
    def mapped(self) -> list[int]:
        return self.pool.mapped

    def zero(self, blocks: Items[int]) -> None:
        """Zeroes blocks without waiting for the stream; asleep the host's copies of them."""
        if self.asleep:
            self.tier.erase(blocks)
            return
        self._follow_restored()
        with self._stream.entered(), self._workspace.entered():
            self.pool.erase(self._ids(blocks))

    def copy(self, sources: Items[int], targets: Items[int]) -> None:
        self._follow_restored()
        with self._stream.entered(), self._workspace.entered():
            self.pool.copy(self._ids(sources), self._ids(targets))
            self._copied.set()

    def settle(self, stream: DeviceStream) -> None:
        """Queues what comes in another stream behind what brought blocks here beside the steps."""
        stream.follow(self._copied)
        for mark in self._arrivals()[:1]:
            stream.follow(mark)

    def unmap(self, extents: Items[int]) -> None:
        """Zeroes these extents and gives their memory back, when the device has done what is queued."""
        self._follow_restored()
        self.zero_and_unmap(extents)

    def zero_and_unmap(self, extents: Items[int]) -> None:
        """As `unmap`, where nothing is on its way."""
        with self._stream.entered():
            self.pool.clear(extents)
        self._stream.wait()
        self.pool.unmap(extents)

    def _follow_restored(self) -> None:
        """Queues what is done to blocks behind their way back from the host, which the first mark is behind."""
        for mark in self._arrivals()[:1]:
            self._stream.follow(mark)

    def _ids(self, blocks: Items[int]) -> torch.Tensor:
        return self._stream.pinned(blocks).to(self._stream.device, non_blocking=True)


def open_tier(
    model: ModelSpec, pool: KVPool, driver: MemoryDriver | None = None, stream: DeviceStream | None = None
) -> SlotTier | None:
    """Host memory for a pool's blocks, and files below it, as the spec asks for; None where it does not. Without a
    driver and a stream, on a CPU."""
    if not model.host_kv_bytes:
        return None
    folder = Path(model.disk_kv_folder) if model.disk_kv_bytes else None
    driver, stream = driver or HostMemoryDriver(), stream or DeviceStream(torch.device("cpu"))
    return SlotTier(pool, driver, model.host_kv_bytes, stream, folder, model.disk_kv_bytes)


def all_memories(groups: Items[PagedMemory], tokens: int, sequences: int) -> tuple[PagedMemory, ...]:
    """The memories of a model as LoadedModel has them, for so many sequences of `tokens` each: the tree's blocks first,
    unkept where no group has them."""
    layouts = [group.layout for group in groups]
    if layouts[0].span == FULL:
        return (*groups,)
    return UnkeptBlocks(unkept_layout(layouts, tokens, sequences)), *groups
