"""Weights on a GPU that can go and come back: in memory of an arena, with a copy in host memory. It knows names and
bytes, and no maths.
"""

from typing import Final

import torch
from torch import Tensor

from engine.memory.pinned import PIECE_BYTES, PinnedMemory
from engine.memory.streams import DeviceStream, StreamEvent
from engine.memory.virtual_memory import Arena
from engine.weights.formats import TensorShapes

_MAPPED_BYTES: Final = 256 << 20  # of one mapping: larger ones are no faster
_ALIGNED_BYTES: Final = 512


class WeightBuffer:
    """Tensors one behind the other in memory of an arena, which do not change once they are loaded. Their copy in host
    memory is made ahead, or when they first go to sleep; it stays.

    A stage is what a step needs together: consecutive tensors whose names begin alike, `layers.3.` or `head.`.
    """

    def __init__(self, arena: Arena, shapes: TensorShapes) -> None:
        """Takes memory for the shapes, in which anything may lie. Raises OutOfDeviceMemory."""
        self.arena = arena
        self._region = arena.reserve("weights", sum(_size(*shape) for shape in shapes.values()), _MAPPED_BYTES)
        self._region.map_all()
        self._memory = self._region.tensor()
        self._ends: dict[str, int] = {}  # of each stage, in bytes
        self._pinned = PinnedMemory(arena.driver, self._region.size)
        self.tensors: dict[str, Tensor] = {}
        end = 0
        for name, (shape, dtype) in shapes.items():
            count = shape.numel() * dtype.itemsize
            self.tensors[name] = self._memory[end : end + count].view(dtype).view(shape)
            end += _size(shape, dtype)
            self._ends[_stage(name)] = end

    @property
    def bytes(self) -> int:
        """What the tensors take of the device while they are there."""
        return self._region.size

    @property
    def held_bytes(self) -> int:
        """What the copy takes of host memory."""
        return self._pinned.bytes

    def prepare(self, copies: DeviceStream) -> int:
        """Queues the copy of one piece more to the host; returns its bytes, 0 where all is copied. It takes some 3 ms
        and does not wait for the copy. Raises OutOfHostMemory."""
        start = self._pinned.bytes
        source = self._memory[start : start + PIECE_BYTES]
        if len(source):
            piece = self._pinned.grow()
            with copies.entered():
                piece[: len(source)].copy_(source, non_blocking=True)
        return len(source)

    def unmap(self) -> None:
        """Gives the memory back. All tensors are copied, and nothing that is queued reads them."""
        assert self._pinned.bytes >= self._region.size, "weights that the host has no copy of"
        self._region.unmap_all()

    def map(self) -> None:
        """Takes memory again. Raises OutOfDeviceMemory."""
        self._region.map_all()

    def send(self, copies: DeviceStream) -> list[StreamEvent]:
        """Queues the copies back to the device, with a mark behind each stage."""
        marks: list[StreamEvent] = []
        ends = list(self._ends.values())
        with copies.entered():
            for index, piece in enumerate(self._pinned.pieces):
                target = self._memory[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]
                target.copy_(piece[: len(target)], non_blocking=True)
                while len(marks) < len(ends) and ends[len(marks)] <= (index + 1) * PIECE_BYTES:
                    marks.append(copies.mark())
                    marks[-1].set()
        return marks

    def close(self) -> None:
        """Gives their memory back, the host's too. Nothing that is queued reads them. It may be called again."""
        self._pinned.close()
        self._region.unmap_all()


def _size(shape: torch.Size, dtype: torch.dtype) -> int:
    """Bytes of a tensor, the gap behind it included."""
    return -(-shape.numel() * dtype.itemsize // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _stage(name: str) -> str:
    return ".".join(name.split(".")[: 2 if name.startswith("layers.") else 1])
