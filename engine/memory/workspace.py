"""The memory that a GPU's steps compute in, graphs' included: it comes from an arena, so that it can be given back
while its addresses stay in captured graphs. It knows no steps.

    with workspace.entered(): …     what torch allocates there comes from the workspace, and stays its own when freed

Torch keeps what it once got, in segments. Eager steps and graphs share them: all of them run one behind the other.
"""

import ctypes
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Final

import torch

from engine.memory.errors import OutOfDeviceMemory
from engine.memory.virtual_memory import Arena, Region

_LARGE: Final = 20 << 20  # torch's segments for smaller tensors have this size, or a tenth of it
_ALLOCATE: Final = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_FREE: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


class Workspace:
    """On a CPU there is none: torch's allocator gives what is computed in, and keeps it.

    graphs  how many CUDA graphs compute in it; those who capture and close them count.
    """

    def __init__(self, arena: Arena, device: torch.device) -> None:
        self.graphs = 0
        self._device = device
        self._segments = _Segments(arena)
        if device.type == "cuda":
            self._segments.pool = _pool(self._segments)

    @property
    def bytes(self) -> int:
        """What the workspace takes of the device when it is mapped."""
        return sum(self.segments)

    @property
    def segments(self) -> list[int]:
        """The segments' bytes, in the order in which torch got them."""
        return [region.size for region in self._segments]

    def grow(self, segments: Items[int]) -> None:
        """Gets the large ones of these segments ahead, for the stream that is entered, which raises OutOfDeviceMemory.

        A tensor as large as a segment lies in one of its own, and leaves it to steps.
        """
        if self._segments.pool is None:
            return
        with self.entered():
            tensors = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in segments if size >= _LARGE]
            del tensors  # after the last: what is freed is given to the next

    @property
    def graph_pool(self) -> Any:
        """The pool that graphs are captured into, as torch names it. While one is, the workspace is not entered."""
        return None if self._segments.pool is None else self._segments.pool.id

    def entered(self) -> AbstractContextManager[None]:
        pool = self._segments.pool
        return nullcontext() if pool is None else torch.cuda.use_mem_pool(pool, self._device)

    def clear(self) -> None:
        """Zeroes all of it, in the order of the stream that is entered."""
        for region in self._segments:
            region.tensor().zero_()

    def map(self) -> None:
        """Takes its memory again, in which anything may lie. Raises OutOfDeviceMemory, and then it has none."""
        with ExitStack() as undoing:
            for region in self._segments:
                region.map_all()
                undoing.callback(region.unmap_all)
            undoing.pop_all()

    def unmap(self) -> None:
        """Gives its memory back. Nothing that is queued reads or writes it."""
        for region in self._segments:
            region.unmap_all()

    def close(self) -> None:
        """Gives its memory back, and then torch's pool, which ends the process where any workspace is entered or any
        graph captured meanwhile. Nothing that is queued reads or writes it. It may be called again."""
        if self._segments.pool is not None:
            torch._C._cuda_clearCublasWorkspaces()  # cuBLAS keeps what it got here for whoever has the stream next
        self.unmap()
        self._segments.pool = None


class _Segments:
    """What torch has got, each a region of its own, and its pool over them."""

    def __init__(self, arena: Arena) -> None:
        self.pool: torch.cuda.MemPool | None = None
        self._arena = arena
        self._regions: dict[int, Region] = {}

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions.values())

    def allocate(self, size: int, device: int, stream: int | None) -> int | None:
        """The address, or None, as torch wants it, where there is too little memory."""
        unit = self._arena.driver.granularity
        try:
            region = self._arena.reserve("workspace", size, -(-size // unit) * unit)
            region.map_all()
        except OutOfDeviceMemory:
            return None
        self._regions[region.address] = region
        return region.address

    def free(self, address: int, size: int, device: int, stream: int | None) -> None:
        del self._regions[address]


def _pool(segments: _Segments) -> torch.cuda.MemPool:
    """Torch's pool over the segments. Torch may call them for as long as the process lives, so they stay, empty in
    the end. The pool stays with them where nobody closes it: torch ends the process if a pool goes while another is
    in use, as it may when the collector comes."""
    calls = _ALLOCATE(segments.allocate), _FREE(segments.free)
    for call in calls:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(call))
    allocate, free = (ctypes.cast(call, ctypes.c_void_p).value or 0 for call in calls)
    return torch.cuda.MemPool(allocator=torch._C._cuda_customAllocator(allocate, free))
