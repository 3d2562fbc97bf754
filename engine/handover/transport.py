"""How blocks get from a sender to its receiver once that has granted memory: over the socket, or into memory that both
share. One contract for both: the replica's loop fills a piece, the handover's thread sends it.
"""

import mmap
import os
import threading
from typing import Final, Protocol

from engine.handover.channel import MessageChannel
from engine.handover.messages import BlockRun, BlocksTaken, run_blocks

_NOTHING: Final = BlocksTaken(0, 0)
PIECES: Final = 8  # that wait for a receiver, or are on their way to it


class Transport(Protocol):
    """Blocks of one handover on their way.

    whole    of them are with the receiver, as it has said.
    took_us  to come there and to be compared, of the runs that it has answered.
    """

    whole: int
    took_us: int

    def piece(self, first: int, count: int) -> memoryview | None:
        """Memory to copy these blocks into, in the order of the blocks; None while the receiver is behind. Never
        waits."""

    def send(self, run: BlockRun, piece: memoryview) -> None:
        """Gives the receiver a piece, and waits where it is behind with earlier ones. Raises HandoverLost and
        HandoverError."""

    def close(self) -> None:
        """Lets go of the memory."""


class _Window:
    """How many runs the receiver has not answered yet."""

    def __init__(self, channel: MessageChannel) -> None:
        self._channel = channel
        self._unanswered = 0

    def send(self, run: BlockRun, payload: memoryview | None) -> BlocksTaken:
        """Sends a run. Returns what the receiver says of an earlier one, of no blocks where it has said nothing yet."""
        self._channel.send(run, payload)
        self._unanswered += 1
        if self._unanswered < PIECES:
            return _NOTHING
        self._unanswered -= 1
        return self._channel.receive(BlocksTaken)


class SocketTransport:
    """Blocks behind their run, in pieces that are used again, the last one first: it is in the cache."""

    def __init__(self, channel: MessageChannel, block_bytes: int) -> None:
        self.whole = self.took_us = 0
        self._window = _Window(channel)
        self._block_bytes = block_bytes
        size = run_blocks(block_bytes) * block_bytes
        self._memory = [mmap.mmap(-1, size) for _ in range(PIECES)]
        self._free = [memoryview(memory) for memory in self._memory]
        self._lock = threading.Lock()

    def piece(self, first: int, count: int) -> memoryview | None:
        with self._lock:
            return self._free.pop()[: count * self._block_bytes] if self._free else None

    def send(self, run: BlockRun, piece: memoryview) -> None:
        taken = self._window.send(run, piece)
        self.whole, self.took_us = max(self.whole, taken.whole), self.took_us + taken.took_us
        with self._lock:
            whole = piece.obj
            piece.release()
            self._free.append(memoryview(whole))

    def close(self) -> None:
        with self._lock:
            self._free.clear()


class SharedMemoryTransport:
    """Blocks where the receiver reads them: nothing is copied but from the pool and into it."""

    def __init__(self, channel: MessageChannel, block_bytes: int, blocks: int, descriptor: int) -> None:
        """It closes the descriptor. Raises OSError and ValueError where the file is not as large as was granted."""
        self.whole = self.took_us = 0
        self._window = _Window(channel)
        self._block_bytes = block_bytes
        try:
            self._memory = mmap.mmap(descriptor, block_bytes * blocks)
        finally:
            os.close(descriptor)
        self._waiting = 0
        self._lock = threading.Lock()

    def piece(self, first: int, count: int) -> memoryview | None:
        with self._lock:
            if self._waiting >= PIECES:
                return None
            self._waiting += 1
        return memoryview(self._memory)[first * self._block_bytes : (first + count) * self._block_bytes]

    def send(self, run: BlockRun, piece: memoryview) -> None:
        taken = self._window.send(run, None)
        self.whole, self.took_us = max(self.whole, taken.whole), self.took_us + taken.took_us
        piece.release()
        with self._lock:
            self._waiting -= 1

    def close(self) -> None:
        """The mapping goes with its last view."""
