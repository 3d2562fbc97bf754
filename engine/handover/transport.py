"""How blocks get from a sender to its receiver once that has granted memory: over the socket, into host memory that
both share, or into memory of the receiver's device; fabric_transport.py has the way over a fabric. One contract for
all: the replica's loop fills a piece, the handover's thread sends it.
"""

import mmap
import os
import threading
from collections.abc import Sequence as Items
from typing import Final, Protocol

import xxhash

from engine.handover.channel import HandoverLost, MessageChannel
from engine.handover.messages import BlockRun, BlocksTaken, run_blocks, window_run_blocks
from engine.step.exchange import BlockExchange, BlockWindow, Gathering, GatheringLost, WindowClosed

_NOTHING: Final = BlocksTaken(0, 0)
PIECES: Final = 8  # that wait for a receiver, or are on their way to it,
WINDOW_PIECES: Final = 32  # and where the device copies them by itself


class Piece(Protocol):
    """A place for some blocks of one handover."""

    took_us: int

    def fill(self, exchange: BlockExchange, blocks: Items[int]) -> None:
        """Begins to copy as many blocks of the pool as there is place for; steps that are launched later change none
        of them before. Raises OutOfDeviceMemory and OutOfHostMemory."""

    def checksums(self) -> list[int]:
        """That of each block, once all are there. The thread's. Raises HandoverLost."""


class Transport(Protocol):
    """Blocks of one handover on their way.

    in_window  they are copied by the device.
    max_run    blocks of a piece.
    whole      of them are with the receiver, as it has said.
    over_fabric  of them were written by an endpoint.
    took_us    to come there and to be compared, of the runs that it has answered.
    """

    in_window: bool
    max_run: int
    whole: int
    over_fabric: int
    took_us: int

    def piece(self, first: int, count: int) -> Piece | None:
        """A place for these blocks; None while the receiver is behind. Never waits."""

    def send(self, run: BlockRun, piece: Piece) -> None:
        """Gives the receiver a piece, and waits where it is behind with earlier ones. Raises HandoverLost and
        HandoverError."""

    def seal(self) -> None:
        """Ends what is under way before the receiver is told that all is sent: from then on it may read what came.
        Raises HandoverLost and HandoverError."""

    def close(self) -> None:
        """Lets go of the memory."""


class HostPiece:
    """Host memory, in the order of the blocks."""

    def __init__(self, view: memoryview, block_bytes: int) -> None:
        self.view = view
        self.took_us = 0
        self._block_bytes = block_bytes
        self._gathering: Gathering | None = None

    def fill(self, exchange: BlockExchange, blocks: Items[int]) -> None:
        """As in Piece."""
        self._gathering = exchange.gather(blocks, self.view)

    def checksums(self) -> list[int]:
        """As in Piece: XXH3."""
        if self._gathering is not None:
            try:
                self._gathering.wait()
            except GatheringLost as error:
                raise HandoverLost(str(error)) from error
        view, size = self.view, self._block_bytes
        return [xxhash.xxh3_64_intdigest(view[at : at + size]) for at in range(0, len(view), size)]


class WindowPiece:
    """Some places of a window."""

    def __init__(self, window: BlockWindow, first: int) -> None:
        self.took_us = 0
        self._window = window
        self._first = first
        self._gathering: Gathering | None = None

    def fill(self, exchange: BlockExchange, blocks: Items[int]) -> None:
        """As in Piece: the window knows its pool."""
        try:
            self._gathering = self._window.push(self._first, blocks)
        except WindowClosed:  # the thread has ended, and nobody sends what was to be here
            return

    def checksums(self) -> list[int]:
        """As in Piece: the device's."""
        if self._gathering is None:
            raise HandoverLost("its memory was given back")
        checksums = self._gathering.wait()
        self.took_us = self._gathering.took_us
        return checksums


class UnansweredRuns:
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

    in_window, over_fabric = False, 0

    def __init__(self, channel: MessageChannel, block_bytes: int) -> None:
        self.whole = self.took_us = 0
        self._runs = UnansweredRuns(channel)
        self._block_bytes = block_bytes
        self.max_run = run_blocks(block_bytes)
        size = self.max_run * block_bytes
        self._memory = [mmap.mmap(-1, size) for _ in range(PIECES)]
        self._free = [memoryview(memory) for memory in self._memory]
        self._lock = threading.Lock()

    def piece(self, first: int, count: int) -> HostPiece | None:
        with self._lock:
            memory = self._free.pop() if self._free else None
        return None if memory is None else HostPiece(memory[: count * self._block_bytes], self._block_bytes)

    def send(self, run: BlockRun, piece: Piece) -> None:
        assert isinstance(piece, HostPiece)
        taken = self._runs.send(run, piece.view)
        self.whole, self.took_us = max(self.whole, taken.whole), self.took_us + taken.took_us
        with self._lock:
            whole = piece.view.obj
            piece.view.release()
            self._free.append(memoryview(whole))

    def seal(self) -> None:
        """The receiver has what was sent."""

    def close(self) -> None:
        with self._lock:
            self._free.clear()


class SharedMemoryTransport:
    """Blocks where the receiver reads them: nothing is copied but from the pool and into it."""

    in_window, over_fabric = False, 0

    def __init__(self, channel: MessageChannel, block_bytes: int, blocks: int, descriptor: int) -> None:
        """It closes the descriptor. Raises OSError and ValueError where the file is not as large as was granted."""
        self.whole = self.took_us = 0
        self._runs = UnansweredRuns(channel)
        self._block_bytes = block_bytes
        self.max_run = run_blocks(block_bytes)
        try:
            self._memory = mmap.mmap(descriptor, block_bytes * blocks)
        finally:
            os.close(descriptor)
        self._waiting = 0
        self._lock = threading.Lock()

    def piece(self, first: int, count: int) -> HostPiece | None:
        with self._lock:
            if self._waiting >= PIECES:
                return None
            self._waiting += 1
        view = memoryview(self._memory)[first * self._block_bytes : (first + count) * self._block_bytes]
        return HostPiece(view, self._block_bytes)

    def send(self, run: BlockRun, piece: Piece) -> None:
        assert isinstance(piece, HostPiece)
        taken = self._runs.send(run, None)
        self.whole, self.took_us = max(self.whole, taken.whole), self.took_us + taken.took_us
        piece.view.release()
        with self._lock:
            self._waiting -= 1

    def seal(self) -> None:
        """The receiver has what was sent."""

    def close(self) -> None:
        """The mapping goes with its last view."""


class WindowTransport:
    """Blocks where the receiver's device reads them: this one copies them there, over what links the two."""

    in_window, over_fabric = True, 0

    def __init__(self, channel: MessageChannel, block_bytes: int, window: BlockWindow) -> None:
        """It closes the window."""
        self.whole = self.took_us = 0
        self.max_run = window_run_blocks(block_bytes)
        self._runs = UnansweredRuns(channel)
        self._window = window
        self._waiting = 0
        self._sealed = False
        self._lock = threading.Lock()

    def piece(self, first: int, count: int) -> WindowPiece | None:
        with self._lock:
            if self._waiting >= WINDOW_PIECES:
                return None
            self._waiting += 1
        return WindowPiece(self._window, first)

    def send(self, run: BlockRun, piece: Piece) -> None:
        taken = self._runs.send(run, None)
        self.whole = max(self.whole, taken.whole)
        self.took_us += taken.took_us + piece.took_us
        with self._lock:
            self._waiting -= 1

    def seal(self) -> None:
        self._sealed = True

    def close(self) -> None:
        """What was not sealed nobody has read: it is zeroed, since the receiver may have let go before it came."""
        self._window.close(erase=not self._sealed)
