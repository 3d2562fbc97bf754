"""All the memory of a model on its device: what is given back when it sleeps, and in which order it comes again.

    sleep   what the host has no copy of is copied, what others wrote is zeroed, all is unmapped
    wake    memory is mapped where it was; the blocks that were kept come first, then the weights, stage by stage
    close   all is given back for good: the workspace, the host's copies, then what else is mapped

Steps may be launched as soon as `wake` returns: each layer waits on the device until its weights are there. It knows
no steps, and not when a model is to sleep, or why.
"""

from collections.abc import Sequence as Items
from contextlib import ExitStack
from typing import Final

import torch

from engine.execution.memory_plan import CONTEXT_BYTES
from engine.kvcache.host_tier import HostKVTier
from engine.kvcache.tensors import KVPool
from engine.memory.streams import DeviceStream, StreamEvent
from engine.memory.workspace import Workspace
from engine.models.gpu_step import StepBuffers
from engine.step.executor import MemoryUsage
from engine.weights.device_buffer import WeightBuffer

GRAPH_BYTES: Final = 1 << 20  # and for each captured graph


class DeviceMemory:
    """Awake when it is made, with everything mapped but extents of the pool."""

    def __init__(
        self, weights: WeightBuffer, pool: KVPool, space: StepBuffers, workspace: Workspace, kept: HostKVTier,
        stream: DeviceStream,
        extents_least: int,
    ) -> None:  # fmt: skip
        """`stream` is the one of the steps."""
        self.awake = True
        self.pool = pool
        self.space = space
        self.workspace = workspace
        self._weights = weights
        self._kept = kept
        self._stream = stream
        self._copies = DeviceStream(stream.device)
        self._coming: list[StreamEvent] = []
        self._extents_least = extents_least

    def prepare(self) -> int:
        """Copies a little of the weights to the host, beside the steps; gives its bytes, 0 where that is done. Raises
        OutOfHostMemory."""
        return self._weights.prepare(self._copies)

    def sleep(self, kept: Items[int]) -> int:
        """Gives everything back but what these blocks hold; gives how many bytes that copied. Raises OutOfHostMemory,
        and then it is awake as before."""
        assert self.awake, "asleep already"
        self._stream.wait()
        self._copies.wait()
        self.arrived()
        copied = 0
        while count := self._weights.prepare(self._copies):
            copied += count
        copied += self._kept.save(kept, self._stream)
        with self._stream.entered():
            self.pool.clear(self.pool.mapped)
            self.workspace.clear()
        self._copies.wait()
        self._weights.unmap()  # while the rest is zeroed
        self._stream.wait()
        self.pool.unmap(self.pool.mapped)
        self.workspace.unmap()
        if self._stream.queues:
            torch.cuda.empty_cache()
        self.awake = False
        return copied

    def wake(self, extents: Items[int], restored: Items[int]) -> int:
        """Maps everything with these extents, and queues what comes back from the host, what was kept into the blocks
        `restored`; gives how many bytes that are. Raises OutOfDeviceMemory, and then it sleeps as before."""
        assert not self.awake, "awake already"
        needed = sorted({block // self.pool.extent_blocks for block in restored})
        with ExitStack() as undoing:
            self._weights.map()
            undoing.callback(self._weights.unmap)
            self.workspace.map()
            undoing.callback(self.workspace.unmap)
            self.pool.map(needed)
            undoing.callback(self._lose, needed)
            with self._stream.entered():
                self.space.renew()
            copied = self._kept.restore(restored, self._copies)
            self._coming = self._weights.send(self._copies)
            self.pool.map([extent for extent in extents if extent not in needed])  # while copies are under way
            undoing.pop_all()
        self.awake = True
        return copied + self._weights.bytes

    def close(self) -> None:
        """Gives everything back, on the host too. Graphs in the workspace are closed. It may be called again."""
        self._stream.wait()
        self._copies.wait()
        self.awake, self._coming = False, []
        self.workspace.close()
        self._kept.close()
        self._weights.close()
        self.pool.unmap(self.pool.mapped)

    def _lose(self, extents: Items[int]) -> None:
        """Unmaps them, zeroed: what was kept is on its way there."""
        self._copies.wait()
        self._coming = []
        with self._stream.entered():
            self.pool.clear(extents)
        self._stream.wait()
        self.pool.unmap(extents)

    def arrived(self) -> bool:
        """Whether everything is there. What was kept is forgotten then."""
        if self._coming and self._coming[-1].passed():
            self._coming = []
            self._kept.forget()
        return not self._coming

    def coming(self) -> list[StreamEvent]:
        """Of the stages that are on their way, a mark each, in the order of their use; none where all have arrived."""
        return [] if self.arrived() else self._coming

    def erase(self, blocks: Items[int]) -> None:
        """Zeroes them, asleep in what is kept of them, in the order of the stream."""
        if not self.awake:
            self._kept.erase(blocks)
            return
        self._follow_restored()
        with self._stream.entered(), self.workspace.entered():
            self.pool.erase(self._ids(blocks))

    def copy(self, sources: Items[int], targets: Items[int]) -> None:
        """Copies blocks, in the order of the stream."""
        self._follow_restored()
        with self._stream.entered(), self.workspace.entered():
            self.pool.copy(self._ids(sources), self._ids(targets))

    def unmap(self, extents: Items[int]) -> None:
        """Zeroes these extents and gives their memory back. No step in the air reads or writes them."""
        self._follow_restored()
        with self._stream.entered():
            self.pool.clear(extents)
        self._stream.wait()
        self.pool.unmap(extents)

    def sizes(self, graphs: int, standby: bool) -> MemoryUsage:
        """With so many graphs captured; with `standby` the host's copy counts as a whole, however much is there."""
        asleep_bytes = CONTEXT_BYTES + graphs * GRAPH_BYTES
        fixed_bytes = asleep_bytes + self._weights.bytes + self.workspace.bytes
        extent_bytes, kv_bytes = self.pool.extent_bytes, self.pool.mapped_bytes
        image_bytes = self._weights.bytes if standby else self._weights.held_bytes
        return MemoryUsage(
            device_bytes=fixed_bytes + kv_bytes if self.awake else asleep_bytes,
            asleep_bytes=asleep_bytes,
            least_bytes=fixed_bytes + self._extents_least * extent_bytes,
            most_bytes=fixed_bytes + self.pool.extents * extent_bytes,
            memory_bytes=image_bytes + self._kept.held_bytes,
            weights_bytes=self._weights.bytes,
            kv_bytes=kv_bytes,
            kept_bytes=self._kept.bytes,
            standby_bytes=self._weights.bytes + self._kept.most_bytes,
            extent_bytes=extent_bytes,
            extents_least=self._extents_least,
        )

    def _follow_restored(self) -> None:
        """What is done to blocks comes behind their way back from the host, which the first mark is behind."""
        for mark in self.coming()[:1]:
            self._stream.follow(mark)

    def _ids(self, blocks: Items[int]) -> torch.Tensor:
        return self._stream.pinned(blocks).to(self._stream.device, non_blocking=True)
