"""Host memory for KV blocks that the device has no room for: slots of one block each, over all layers.

    store   compute stream: blocks → staging │ copy stream: staging → slots
    load    copy stream: slots → staging │ scatter stream: staging → blocks, behind the steps in flight

A step is never waited for by the host, nor a copy by later steps, but where the staging is full. What lies in which
slot, and why, is not known here.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from engine.kvcache.tensors import KVPool
from engine.log import log
from engine.memory.errors import OutOfHostMemory
from engine.memory.pinned import PIECE_BYTES, PinnedMemory
from engine.memory.streams import DeviceStream, StreamEvent
from engine.memory.virtual_memory import MemoryDriver

if TYPE_CHECKING:
    from engine.kvcache.extent_files import ExtentFiles

_STAGINGS: Final = 4  # pieces on the device, each way: 2.6 ms of copies at 50 GB/s


class _Staging:
    """Device memory for the blocks of a piece and their ids, and when it was filled and read last."""

    def __init__(self, memory_BLW: Tensor, ids_B: Tensor, filler: DeviceStream, reader: DeviceStream) -> None:
        self.memory_BLW = memory_BLW
        self._ids_B = ids_B
        self.filled = filler.mark()
        self.read = reader.mark()

    def ids(self, stream: DeviceStream, blocks: Items[int]) -> Tensor:
        """These blocks on the device, copied in the order of the stream that is entered."""
        return self._ids_B[: len(blocks)].copy_(stream.pinned(blocks), non_blocking=True)


def _open_files(folder: Path, block_bytes: int, max_bytes: int, memory: Callable[[int], memoryview]) -> "ExtentFiles":
    from engine.kvcache.extent_files import ExtentFiles  # only here: it imports ciphers

    return ExtentFiles(folder, block_bytes, max_bytes, memory)


class SlotTier:
    """A BlockTier over a pool. It gets memory piece by piece, by `grow`, and keeps it over a sleep."""

    def __init__(
        self, pool: KVPool, driver: MemoryDriver, max_bytes: int, stream: DeviceStream,
        disk_folder: Path | None = None, disk_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Steps are launched into `stream`; in the folder are files of its blocks. Raises torch.OutOfMemoryError."""
        shape = pool.shape
        self.piece_slots = PIECE_BYTES // shape.block_bytes
        assert self.piece_slots > 0, "a block is more than a piece"
        self.max_pieces = max_bytes // PIECE_BYTES
        self._pool = pool
        self._stream = stream
        self._copies = DeviceStream(stream.device)
        self._scatters = DeviceStream(stream.device)
        self._pinned = PinnedMemory(driver, self.max_bytes)
        self.shrink = self._pinned.shrink  # takes back what `grow` added last, and nobody used
        size = (self.piece_slots, shape.layers, shape.layer_block_bytes)
        # What is on its way lies in memory that is there from the start, so that copies take none.
        memory = torch.empty(2 * _STAGINGS, *size, dtype=torch.uint8, device=stream.device).unbind()
        ids = torch.empty(2 * _STAGINGS, self.piece_slots, dtype=torch.int64, device=stream.device).unbind()
        parts = list(zip(memory, ids, strict=True))
        self._outward = [_Staging(*part, stream, self._copies) for part in parts[:_STAGINGS]]
        self._inward = [_Staging(*part, self._copies, self._scatters) for part in parts[_STAGINGS:]]
        self._turns = 0
        self.files = _open_files(disk_folder, shape.block_bytes, disk_bytes, self._memory) if disk_folder else None

    @property
    def slots(self) -> int:
        return len(self._pinned.pieces) * self.piece_slots

    @property
    def max_slots(self) -> int:
        return self.max_pieces * self.piece_slots

    @property
    def held_bytes(self) -> int:
        """What of host memory is held now."""
        return self._pinned.bytes

    @property
    def max_bytes(self) -> int:
        """What of host memory is ever held."""
        return self.max_pieces * PIECE_BYTES

    def grow(self) -> bool:
        """Adds a piece, in some 3 ms. Returns False where there is nothing to add; a host that has too little memory is
        not asked again."""
        if len(self._pinned.pieces) >= self.max_pieces:
            return False
        try:
            self._pinned.grow()
        except OutOfHostMemory as error:
            log("host_tier_stays_small", level="warning", bytes=self.held_bytes, error=str(error))
            self.max_pieces = len(self._pinned.pieces)
            return False
        return True

    def store(self, blocks: Items[int], slots: Items[int]) -> None:
        """As in BlockTier."""
        for staging, first, last in self._chunks(self._outward, len(blocks)):
            with self._stream.entered():
                self._stream.follow(staging.read)
                self._pool.gather(staging.ids(self._stream, blocks[first:last]), staging.memory_BLW[: last - first])
                staging.filled.set()
            with self._copies.entered():
                self._copies.follow(staging.filled)
                for at, slot, count in _runs(slots[first:last], self.piece_slots):
                    self._slots(slot, count).copy_(staging.memory_BLW[at : at + count], non_blocking=True)
                staging.read.set()

    def load(self, slots: Items[int], blocks: Items[int]) -> StreamEvent:
        """As in BlockTier."""
        launched = self._stream.mark()
        launched.set()
        self._scatters.follow(launched)  # steps in flight, and stores, may still read what the blocks held before
        for staging, first, last in self._chunks(self._inward, len(blocks)):
            with self._copies.entered():
                self._copies.follow(staging.read)
                for at, slot, count in _runs(slots[first:last], self.piece_slots):
                    staging.memory_BLW[at : at + count].copy_(self._slots(slot, count), non_blocking=True)
                staging.filled.set()
            with self._scatters.entered():
                self._scatters.follow(staging.filled)
                self._pool.scatter(staging.ids(self._scatters, blocks[first:last]), staging.memory_BLW[: last - first])
                staging.read.set()
        arrival = self._scatters.mark()
        arrival.set()
        return arrival

    def join(self, load: StreamEvent) -> None:
        """Has steps that are launched from now on begin behind a load: the host need not see it end."""
        self._stream.follow(load)

    def copied(self) -> StreamEvent:
        """As in BlockTier."""
        event = self._copies.mark()
        event.set()
        return event

    def zero(self, slots: Items[int]) -> None:
        """As in BlockTier, when the copies are done that are queued: asleep there are none, nor a staging."""
        self._copies.wait()
        for slot in slots:
            self._slots(slot, 1).zero_()

    def wait(self) -> None:
        """Until all copies are done. The device's memory may be given back then."""
        self._copies.wait()
        self._scatters.wait()

    def close(self) -> None:
        """Gives the host's memory back, and the disk. It may be called again."""
        if self.files is not None:
            self.files.close()
        self.wait()
        self._pinned.close()

    def _chunks(self, ring: list[_Staging], count: int) -> Iterator[tuple[_Staging, int, int]]:
        """A staging for each run of so many blocks, first … last−1, in turns."""
        for first in range(0, count, self.piece_slots):
            self._turns += 1
            yield ring[self._turns % len(ring)], first, min(first + self.piece_slots, count)

    def _memory(self, slot: int) -> memoryview:
        """The bytes of a slot."""
        return self._slots(slot, 1).flatten().numpy().data

    def _slots(self, slot: int, count: int) -> Tensor:
        """So many slots of one piece, as blocks."""
        shape = self._pool.shape
        piece, first = divmod(slot, self.piece_slots)
        rows = self._pinned.pieces[piece][first * shape.block_bytes : (first + count) * shape.block_bytes]
        return rows.view(count, shape.layers, shape.layer_block_bytes)


def _runs(slots: Items[int], piece_slots: int) -> Iterator[tuple[int, int, int]]:
    """Slots that follow each other within a piece, as (place among `slots`, first slot, count): a copy for each."""
    start = 0
    for at in range(1, len(slots) + 1):
        if at == len(slots) or slots[at] != slots[at - 1] + 1 or slots[at] % piece_slots == 0:
            yield start, slots[start], at - start
            start = at
