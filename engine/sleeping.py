"""What of a model on a GPU outlives its sleep, and how it comes back: weights by a copy in host memory, blocks of KV
that are kept. It knows tensors and streams; when a model sleeps, and why, is others' business.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from typing import Final

import torch
from torch import Tensor

from engine.arena import Arena, Driver
from engine.kv import KvPool
from engine.pinned import PIECE_BYTES, Pinned
from engine.streams import Mark, Stream

_MAPPED_BYTES: Final = 256 << 20  # at once: larger pieces are mapped no faster
_ALIGNED_BYTES: Final = 512

Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]


class Weights:
    """Tensors one behind the other in memory of an arena, which do not change once they are loaded. Their copy in host
    memory is made ahead, or when they sleep first; it stays.

    A stage is what a step needs together: consecutive tensors whose names begin alike, `layers.3.` or one alone.
    """

    def __init__(self, arena: Arena, shapes: Shapes) -> None:
        """With memory, in which anything may lie. Raises OutOfDeviceMemory."""
        self.arena = arena
        self._region = arena.reserve("weights", sum(_size(*shape) for shape in shapes.values()), _MAPPED_BYTES)
        self._region.map_all()
        self._memory = self._region.tensor()
        self._ends: dict[str, int] = {}  # of each stage, in bytes
        self._pinned = Pinned(arena.driver, self._region.size)
        self.tensors: dict[str, Tensor] = {}
        end = 0
        for name, (shape, dtype) in shapes.items():
            count = shape.numel() * dtype.itemsize
            self.tensors[name] = self._memory[end : end + count].view(dtype).view(shape)
            end += _size(shape, dtype)
            self._ends[_stage(name)] = end

    @property
    def bytes(self) -> int:
        """What they take of the device when they are there."""
        return self._region.size

    @property
    def held_bytes(self) -> int:
        """What their copy takes of host memory."""
        return self._pinned.bytes

    def prepare(self, copies: Stream) -> int:
        """Queues the copy of one piece more to the host; gives its bytes, 0 where all is copied. It takes some 3 ms and
        does not wait for the copy. Raises OutOfHostMemory."""
        start = self._pinned.bytes
        source = self._memory[start : start + PIECE_BYTES]
        if len(source):
            piece = self._pinned.grow()
            with copies.entered():
                piece[: len(source)].copy_(source, non_blocking=True)
        return len(source)

    def unmap(self) -> None:
        """Gives their memory back. All of them are copied, and nothing that is queued reads them."""
        assert self._pinned.bytes >= self._region.size, "weights that the host has no copy of"
        self._region.unmap_all()

    def map(self) -> None:
        """Raises OutOfDeviceMemory."""
        self._region.map_all()

    def send(self, copies: Stream) -> list[Mark]:
        """Queues their way back to the device, with a mark behind each stage."""
        marks: list[Mark] = []
        ends = list(self._ends.values())
        with copies.entered():
            for index, piece in enumerate(self._pinned.pieces):
                target = self._memory[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]
                target.copy_(piece[: len(target)], non_blocking=True)
                while len(marks) < len(ends) and ends[len(marks)] <= (index + 1) * PIECE_BYTES:
                    marks.append(copies.mark())
                    marks[-1].set()
        return marks


class Kept:
    """Contents of blocks, in host memory while the device is given back. A row is one block of one layer; those of a
    layer follow each other, in the order of the blocks."""

    def __init__(self, pool: KvPool, driver: Driver, most_bytes: int, staging: Tensor) -> None:
        """`staging`, PIECE_BYTES of the device, is where rows are gathered on their way."""
        self._pool = pool
        width = pool.shape.layer_block_bytes
        self._rows = PIECE_BYTES // width  # of a piece
        assert self._rows > 0, "a block of one layer is more than a piece"
        self._staged = staging[: self._rows * width].view(-1, width)
        most_rows = most_bytes // pool.shape.block_bytes * pool.shape.layers
        self._pinned = Pinned(driver, -(-most_rows // self._rows) * PIECE_BYTES)
        self._blocks: list[int] = []

    @property
    def bytes(self) -> int:
        """What is kept."""
        return len(self._blocks) * self._pool.shape.block_bytes

    @property
    def held_bytes(self) -> int:
        """What of host memory is held for it, now and the next time."""
        return self._pinned.bytes

    def save(self, blocks: Items[int], stream: Stream) -> int:
        """Queues the copy of these blocks to the host; gives its bytes. Raises OutOfHostMemory."""
        assert not self._blocks, "something is kept already"
        self._pinned.wait()
        count = len(blocks) * self._pool.shape.layers
        while len(self._pinned.pieces) * self._rows < count:
            self._pinned.grow()
        self._blocks = list(blocks)
        with stream.entered():
            blocks_B = stream.sent(blocks)
            for piece, rows, parts in self._chunks():
                for layer, first, last, at in parts:
                    self._pool.take(layer, blocks_B[first:last], self._staged[at : at + last - first])
                piece.copy_(self._staged[:rows], non_blocking=True)
        return self.bytes

    def restore(self, blocks: Items[int], stream: Stream) -> int:
        """Queues the way back, into other blocks perhaps, in the same order; gives its bytes. They stay kept until
        `forget`."""
        assert len(blocks) == len(self._blocks), "not as many blocks as are kept"
        with stream.entered():
            blocks_B = stream.sent(blocks)
            for piece, rows, parts in self._chunks():
                self._staged[:rows].copy_(piece, non_blocking=True)
                for layer, first, last, at in parts:
                    self._pool.put(layer, blocks_B[first:last], self._staged[at : at + last - first])
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


def _size(shape: torch.Size, dtype: torch.dtype) -> int:
    """Bytes, the gap behind them included."""
    return -(-shape.numel() * dtype.itemsize // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _stage(name: str) -> str:
    return ".".join(name.split(".")[:2]) if name.startswith("layers.") else name
