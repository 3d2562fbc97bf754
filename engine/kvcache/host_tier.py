"""What KV blocks hold, in host memory while a GPU is given back. It knows no sequences, and not why these are kept."""

from collections.abc import Iterator
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from engine.kvcache.tensors import KVPool
from engine.memory.pinned import PIECE_BYTES, PinnedMemory
from engine.memory.streams import DeviceStream
from engine.memory.virtual_memory import MemoryDriver


class HostKVTier:
    """Contents of blocks, in host memory while the device is given back. A row is one block of one layer; those of a
    layer follow each other, in the order of the blocks."""

    def __init__(self, pool: KVPool, driver: MemoryDriver, max_bytes: int, device: torch.device) -> None:
        """Raises torch.OutOfMemoryError."""
        self._pool = pool
        width = pool.shape.layer_block_bytes
        self._rows = PIECE_BYTES // width  # of a piece
        assert self._rows > 0, "a block of one layer is more than a piece"
        max_blocks = max_bytes // pool.shape.block_bytes
        # What is on its way lies in memory that is there from the start, so that moves take none.
        self._staged = torch.empty(self._rows if max_blocks else 0, width, dtype=torch.uint8, device=device)
        self._ids = torch.empty(max_blocks, dtype=torch.int64, device=device)
        self._pinned = PinnedMemory(driver, self.max_bytes)
        self._blocks: list[int] = []

    @property
    def bytes(self) -> int:
        """What is kept."""
        return len(self._blocks) * self._pool.shape.block_bytes

    @property
    def held_bytes(self) -> int:
        """What of host memory is held for it, now and the next time."""
        return self._pinned.bytes

    @property
    def max_bytes(self) -> int:
        """What of host memory is ever held for it."""
        return -(-len(self._ids) * self._pool.shape.layers // self._rows) * PIECE_BYTES

    def save(self, blocks: Items[int], stream: DeviceStream) -> int:
        """Queues the copy of these blocks to the host; gives its bytes. Raises OutOfHostMemory."""
        assert not self._blocks, "something is kept already"
        assert len(blocks) <= len(self._ids), "more blocks than are ever kept"
        self._pinned.wait()
        count = len(blocks) * self._pool.shape.layers
        while len(self._pinned.pieces) * self._rows < count:
            self._pinned.grow()
        self._blocks = list(blocks)
        with stream.entered():
            blocks_B = self._ids[: len(blocks)].copy_(stream.pinned(blocks), non_blocking=True)
            for piece, rows, parts in self._chunks():
                for layer, first, last, row in parts:
                    self._pool.take(layer, blocks_B[first:last], self._staged[row : row + last - first])
                piece.copy_(self._staged[:rows], non_blocking=True)
        return self.bytes

    def restore(self, blocks: Items[int], stream: DeviceStream) -> int:
        """Queues the way back into these blocks, in the order of `save`. Returns the bytes. The copies stay until
        `forget`."""
        assert len(blocks) == len(self._blocks), "not as many blocks as are kept"
        with stream.entered():
            blocks_B = self._ids[: len(blocks)].copy_(stream.pinned(blocks), non_blocking=True)
            for piece, rows, parts in self._chunks():
                self._staged[:rows].copy_(piece, non_blocking=True)
                for layer, first, last, row in parts:
                    self._pool.put(layer, blocks_B[first:last], self._staged[row : row + last - first])
        return self.bytes

    def erase(self, blocks: Items[int]) -> None:
        """Zeroes what is kept of these."""
        for place in (self._blocks.index(block) for block in blocks if block in self._blocks):
            for layer in range(self._pool.shape.layers):
                piece, row = divmod(layer * len(self._blocks) + place, self._rows)
                self._piece(piece, self._rows)[row].zero_()

    def forget(self) -> None:
        """Zeroes all of it, in threads: what was restored may be erased from the device from now on."""
        self._pinned.clear(-(-len(self._blocks) * self._pool.shape.layers // self._rows))
        self._blocks = []

    def close(self) -> None:
        """Gives the host's memory back. Nothing that is queued reads or writes it. It may be called again."""
        self._blocks = []
        self._pinned.close()

    def _chunks(self) -> Iterator[tuple[Tensor, int, list[tuple[int, int, int, int]]]]:
        """Each piece's rows, their number, and where they belong: (layer, first place, last place + 1, row)."""
        count = len(self._blocks)
        total = count * self._pool.shape.layers
        for index, start in enumerate(range(0, total, self._rows)):
            end = min(start + self._rows, total)
            parts = []
            for layer in range(start // count, -(-end // count)):
                first, last = max(start, layer * count), min(end, (layer + 1) * count)
                parts.append((layer, first - layer * count, last - layer * count, first - start))
            yield self._piece(index, end - start), end - start, parts

    def _piece(self, index: int, rows: int) -> Tensor:
        width = self._pool.shape.layer_block_bytes
        return self._pinned.pieces[index][: rows * width].view(rows, width)
