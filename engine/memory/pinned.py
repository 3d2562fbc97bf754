"""Host memory that a device copies from and to by itself, made piece by piece, ahead of its use.

A piece takes some 3 ms: eight threads touch it, and the driver registers what is touched in half the time. A copy
stays within a piece, since the driver refuses one over two registrations. It knows nothing of what is kept there.
"""

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np
from torch import Tensor

from engine.hostinfo.memory import available_memory_bytes
from engine.memory.errors import OutOfHostMemory
from engine.memory.virtual_memory import Arena, HostMemoryDriver, MemoryDriver

PIECE_BYTES: Final = 32 << 20
_SPARE_BYTES: Final = 1 << 30  # of the host, left to all else
_THREADS: Final = 8


class PinnedMemory:
    """Pieces of PIECE_BYTES, at most enough for max_bytes. The memory stays until it is closed or collected."""

    def __init__(self, driver: MemoryDriver, max_bytes: int) -> None:
        """`driver` is that of the device that copies."""
        self.pieces: list[Tensor] = []  # bytes
        self._driver = driver
        size = max(1, -(-max_bytes // PIECE_BYTES)) * PIECE_BYTES
        self._region = Arena(HostMemoryDriver(), size).reserve("pinned", size, PIECE_BYTES)
        self._memory = self._region.tensor()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="pinned")
        self._clearing: list[Future[None]] = []

    @property
    def bytes(self) -> int:
        return len(self.pieces) * PIECE_BYTES

    def grow(self) -> Tensor:
        """One piece more. Raises OutOfHostMemory."""
        index = len(self.pieces)
        if available_memory_bytes() < PIECE_BYTES + _SPARE_BYTES:
            raise OutOfHostMemory(f"the host has less than {_SPARE_BYTES / 1e9:.1f} GB left beside what sleeps")
        self._region.map([index])
        piece = self._memory[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]
        for touched in [self._threads.submit(part.fill, 0) for part in np.split(piece.numpy(), _THREADS)]:
            touched.result()
        try:
            self._driver.register(piece.data_ptr(), PIECE_BYTES)
        except OutOfHostMemory:
            self._region.unmap([index])
            raise
        self.pieces.append(piece)
        return piece

    def shrink(self) -> None:
        """Gives the last piece back, which nothing copies from or to."""
        self._driver.unregister(self.pieces.pop().data_ptr())
        self._region.unmap([len(self.pieces)])

    def clear(self, count: int) -> None:
        """Zeroes the first so many pieces, in threads; `wait` says when that is done."""
        self._clearing += [self._threads.submit(piece.numpy().fill, 0) for piece in self.pieces[:count]]

    def wait(self) -> None:
        while self._clearing:
            self._clearing.pop().result()

    def close(self) -> None:
        """Gives its memory back when the device has done all copies that are queued. It may be called again."""
        self.wait()
        self._threads.shutdown()
        self._driver.wait()
        while self.pieces:
            self._driver.unregister(self.pieces.pop().data_ptr())
        self._region.unmap_all()

    def __del__(self) -> None:
        if self.pieces and not sys.is_finalizing():  # a process that ends gives everything back
            self.close()
