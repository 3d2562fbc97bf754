"""engine/memory/virtual_memory.py: every byte is in one piece or given back, whatever the driver refuses."""

import gc
import mmap
import random
from contextlib import suppress
from unittest.mock import patch

import psutil
import pytest
import torch
from torch import Tensor

from engine.memory.errors import OutOfDeviceMemory
from engine.memory.virtual_memory import ADDRESS_BYTES_MAX, Arena, HostMemoryDriver, Region

CPU = torch.device("cpu")
UNIT = mmap.PAGESIZE


class Refusing(HostMemoryDriver):
    """The host's memory with an account of its own, that refuses to map wherever `refuses` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.mapped: dict[int, int] = {}
        self.addresses: dict[int, int] = {}  # of handles
        self.reserved: dict[int, int] = {}
        self.handles = 0
        self.refuses = lambda: False

    def reserve(self, size: int) -> int:
        address = super().reserve(size)
        self.reserved[address] = size
        return address

    def release(self, address: int, size: int) -> None:
        assert self.reserved.pop(address) == size
        assert not any(address <= mapped < address + size for mapped in self.mapped), "released with memory in it"
        super().release(address, size)

    def map(self, address: int, size: int) -> int:
        if self.refuses():
            raise OutOfDeviceMemory("refused")
        assert address not in self.mapped
        self.mapped[address] = size
        self.handles += 1
        self.addresses[self.handles] = address
        return self.handles

    def unmap(self, address: int, size: int, handles: list[int]) -> None:
        at = address
        for handle in handles:
            assert self.addresses.pop(handle) == at
            at += self.mapped.pop(at)
        assert at == address + size
        super().unmap(address, size, handles)


def test_what_is_given_back_reads_as_zero_and_addresses_stay() -> None:
    region = Arena.of(CPU).reserve("r", 4 * UNIT, UNIT)
    region.map_all()
    memory = region.tensor()
    memory.fill_(7)
    address = memory.data_ptr()
    region.unmap([1, 3])
    assert [int(part.sum()) for part in memory.view(4, UNIT)] == [7 * UNIT, 0, 7 * UNIT, 0]
    region.map([3])
    memory[-1] = 9
    assert region.tensor().data_ptr() == address == region.address
    assert int(region.tensor()[-1]) == 9
    assert region.mapped == [0, 2, 3]


def test_giving_back_is_real() -> None:
    region = Arena.of(CPU).reserve("r", 64 << 20, 1 << 20)
    region.map_all()
    process = psutil.Process()
    before = process.memory_info().rss
    region.tensor().fill_(1)
    assert process.memory_info().rss - before > 60 << 20
    region.unmap_all()
    assert process.memory_info().rss - before < 4 << 20


def test_the_last_piece_may_be_shorter_and_sizes_come_in_whole_units() -> None:
    arena = Arena.of(CPU)
    region = arena.reserve("r", 2 * UNIT + 1, 2 * UNIT)
    assert (len(region), region.size, region.bytes_of(0), region.bytes_of(1)) == (2, 3 * UNIT, 2 * UNIT, UNIT)
    region.map_all()
    assert arena.mapped_bytes == region.mapped_bytes == 3 * UNIT
    arena.check()


def test_a_failed_map_leaves_everything_as_it_was() -> None:
    driver = Refusing()
    arena = Arena(driver, 100 * UNIT)
    region = arena.reserve("r", 10 * UNIT, UNIT)
    region.map([4])
    answers = iter([False, False, True])
    driver.refuses = lambda: next(answers)
    with pytest.raises(OutOfDeviceMemory, match="refused"):
        region.map(range(4))
    assert region.mapped == [4]
    assert driver.mapped == {region.address + 4 * UNIT: UNIT}
    arena.check()


def test_no_more_is_mapped_than_the_arena_may_hold() -> None:
    arena = Arena(HostMemoryDriver(), 3 * UNIT)
    first, second = (arena.reserve(name, 2 * UNIT, UNIT) for name in ("first", "second"))
    first.map_all()
    with pytest.raises(OutOfDeviceMemory, match=f"second: {2 * UNIT} bytes more"):
        second.map_all()
    assert second.mapped == []
    first.unmap([0])
    second.map_all()
    arena.check()


def test_addresses_have_a_limit_too() -> None:
    with pytest.raises(OutOfDeviceMemory, match="have addresses"):
        Arena.of(CPU).reserve("r", ADDRESS_BYTES_MAX + 1, UNIT)


def test_a_region_lives_as_long_as_a_tensor_in_it() -> None:
    driver = Refusing()
    arena = Arena(driver, 100 * UNIT)
    region = arena.reserve("r", 4 * UNIT, UNIT)
    region.map_all()
    part = region.tensor()[UNIT : 2 * UNIT].view(torch.int32)
    part.fill_(3)
    del region
    gc.collect()
    assert part.sum() == 3 * UNIT // 4
    assert arena.mapped_bytes == 4 * UNIT
    del part
    gc.collect()
    assert (arena.mapped_bytes, driver.mapped, driver.reserved) == (0, {}, {})
    arena.check()


def test_a_region_without_memory_goes_without_waiting_for_the_device() -> None:
    driver = Refusing()
    region = Arena(driver, 100 * UNIT).reserve("r", 4 * UNIT, UNIT)
    region.map_all()
    region.unmap_all()
    with patch.object(driver, "wait") as waited:
        del region
    assert driver.reserved == {}
    assert not waited.called


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_mapped_and_refused_every_byte_is_accounted_for(seed: int) -> None:
    rng = random.Random(seed)
    driver = Refusing()
    driver.refuses = lambda: rng.random() < 0.03
    arena = Arena(driver, 200 * UNIT)
    regions: dict[int, tuple[Region, Tensor]] = {}
    contents: dict[tuple[int, int], int] = {}

    def part(name: int, piece: int) -> Tensor:
        region, memory = regions[name]
        start = piece * region.piece_bytes
        return memory[start : start + region.bytes_of(piece)]

    def step(name: int) -> None:
        if name not in regions:
            region = arena.reserve(str(name), rng.randint(1, 60 * UNIT), rng.randint(1, 5) * UNIT)
            regions[name] = region, region.tensor()
            return
        region = regions[name][0]
        pieces = rng.sample(range(len(region)), rng.randint(0, len(region)))
        absent, present = ([piece for piece in pieces if region.has(piece) is has] for has in (False, True))
        action = rng.random()
        if action < 0.5:
            region.map(absent)
            for piece in absent:
                contents[name, piece] = rng.randint(1, 255)
                part(name, piece).fill_(contents[name, piece])
        elif action < 0.95:
            region.unmap(present)
            for piece in present:
                del contents[name, piece]
        else:
            del regions[name]
            for key in [key for key in contents if key[0] == name]:
                del contents[key]

    for _ in range(300):
        with suppress(OutOfDeviceMemory):
            step(rng.randrange(6))
        arena.check()
        assert sum(driver.mapped.values()) == arena.mapped_bytes
        assert arena.mapped_bytes == sum(regions[name][0].bytes_of(piece) for name, piece in contents)
    for (name, piece), value in contents.items():
        assert part(name, piece).eq(value).all(), (seed, name, piece)
