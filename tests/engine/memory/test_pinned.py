"""engine/memory/pinned.py: host memory made piece by piece, which the device's driver knows for as long as it is
there."""

import gc
from unittest.mock import patch

import pytest

from engine.memory import pinned
from engine.memory.errors import OutOfHostMemory
from engine.memory.pinned import PIECE_BYTES, PinnedMemory
from engine.memory.virtual_memory import HostMemoryDriver


class Registering(HostMemoryDriver):
    """Tells which memory it may copy from, and refuses where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.registered: dict[int, int] = {}
        self.refuses = False

    def register(self, address: int, size: int) -> None:
        if self.refuses:
            raise OutOfHostMemory("refused")
        self.registered[address] = size

    def unregister(self, address: int) -> None:
        del self.registered[address]


def test_each_piece_is_registered_as_long_as_it_lives() -> None:
    driver = Registering()
    memory = PinnedMemory(driver, 2 * PIECE_BYTES + 1)
    pieces = [memory.grow() for _ in range(3)]
    assert driver.registered == {piece.data_ptr(): PIECE_BYTES for piece in pieces}
    assert memory.bytes == 3 * PIECE_BYTES
    assert not any(piece.any() for piece in pieces)
    with pytest.raises(AssertionError):
        memory.grow()  # max_bytes are there
    del pieces, memory
    gc.collect()
    assert driver.registered == {}


def test_where_the_host_is_short_or_the_driver_refuses_nothing_is_added() -> None:
    driver = Registering()
    memory = PinnedMemory(driver, 2 * PIECE_BYTES)
    memory.grow().fill_(3)
    with (
        patch.object(pinned, "available_memory_bytes", return_value=PIECE_BYTES + (1 << 30) - 1),
        pytest.raises(OutOfHostMemory),
    ):
        memory.grow()
    driver.refuses = True
    with pytest.raises(OutOfHostMemory, match="refused"):
        memory.grow()
    assert (memory.bytes, len(driver.registered)) == (PIECE_BYTES, 1)
    driver.refuses = False
    assert memory.grow().data_ptr() == memory.pieces[0].data_ptr() + PIECE_BYTES
    assert memory.pieces[0].eq(3).all()


def test_clearing_zeroes_the_first_pieces() -> None:
    memory = PinnedMemory(Registering(), 3 * PIECE_BYTES)
    for _ in range(3):
        memory.grow().fill_(5)
    memory.clear(2)
    memory.wait()
    assert [bool(piece.any()) for piece in memory.pieces] == [False, False, True]


def test_what_is_closed_is_given_back_whoever_still_refers_to_it() -> None:
    driver = Registering()
    memory = PinnedMemory(driver, 2 * PIECE_BYTES)
    piece = memory.grow()
    memory.clear(1)
    for _ in range(2):
        memory.close()
        assert (memory.bytes, driver.registered, memory._region.mapped) == (0, {}, [])
    assert not piece.any()
