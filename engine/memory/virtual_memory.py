"""Memory at addresses that stay: a range is reserved once, and physical memory comes and goes under it in pieces.

    arena.reserve("kv", size, piece_bytes) ─► region      addresses, for as long as anybody reads or writes there
    region.map(pieces)  region.unmap(pieces)              physical memory under them, all of the pieces or none

Kernels and captured graphs hold addresses, so that they are good again when memory is back. Giving back is real:
another process can allocate it. It knows bytes, and nothing of what they mean. Two drivers are behind it: that of
CUDA, and the host's memory, which is how everything above runs on a CPU.
"""

import ctypes
import mmap
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, Final, Protocol
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from engine.memory.errors import OutOfDeviceMemory, OutOfHostMemory

ADDRESS_BYTES_MAX: Final = 1 << 44  # bytes of addresses that one arena reserves: a process has 2⁴⁷
_NO_RESERVE: Final = 0x4000 if sys.platform == "linux" else 0  # addresses promise no memory; mmap has no name for it


class MemoryDriver(Protocol):
    """Where memory comes from. Addresses and sizes are multiples of `granularity`."""

    granularity: int

    def reserve(self, size: int) -> int:
        """The address of a range without memory. Raises OutOfDeviceMemory."""
        ...

    def release(self, address: int, size: int) -> None:
        """Gives back a range that `reserve` gave, which has no memory."""
        ...

    def map(self, address: int, size: int) -> int:
        """Puts new memory there, whose contents are anything; returns its handle. Raises OutOfDeviceMemory."""
        ...

    def unmap(self, address: int, size: int, handles: list[int]) -> None:
        """Gives back what `map` put there, one piece behind the other. Nothing on the device reads or writes it."""
        ...

    def wait(self) -> None:
        """Until nothing that is queued reads or writes any memory."""
        ...

    def register(self, address: int, size: int) -> None:
        """Lets the device copy from and to memory of the host by itself. Raises OutOfHostMemory."""
        ...

    def unregister(self, address: int) -> None: ...

    def tensor(self, address: int, size: int, owner: object) -> Tensor:
        """The range as bytes, which keep `owner` alive. Its first byte has memory now."""
        ...


class Arena:
    """The memory of one model on one device, of which at most `max_bytes` are mapped at once.

    mapped_bytes    of all regions, which count theirs here.
    """

    def __init__(self, driver: MemoryDriver, max_bytes: int) -> None:
        self.driver = driver
        self.max_bytes = max_bytes
        self.mapped_bytes = 0
        self._regions: WeakSet[Region] = WeakSet()

    @classmethod
    def of(cls, device: torch.device, max_bytes: int | None = None) -> "Arena":
        """On a GPU at most all that it has; on a CPU at most so much, or what the system gives."""
        if device.type == "cuda":
            return cls(CudaMemoryDriver(device), max_bytes or torch.cuda.mem_get_info(device)[1])
        return cls(HostMemoryDriver(), max_bytes or ADDRESS_BYTES_MAX)

    def reserve(self, name: str, size: int, piece_bytes: int) -> "Region":
        """Addresses for `size` bytes and what is missing to whole units, in pieces of which the last may be shorter.
        `piece_bytes` is a multiple of the driver's granularity. Raises OutOfDeviceMemory."""
        unit = self.driver.granularity
        size = -(-size // unit) * unit
        assert size > 0, "an empty region"
        assert piece_bytes % unit == 0, f"pieces of {piece_bytes} bytes, where memory comes in units of {unit}"
        if sum(region.size for region in self._regions) + size > ADDRESS_BYTES_MAX:
            raise OutOfDeviceMemory(f"{name}: {size} bytes are more than the {ADDRESS_BYTES_MAX} that have addresses")
        region = Region(self, name, self.driver.reserve(size), size, piece_bytes)
        self._regions.add(region)
        return region

    def require(self, name: str, size: int) -> None:
        """Raises OutOfDeviceMemory where so many bytes more are too many."""
        if self.mapped_bytes + size > self.max_bytes:
            raise OutOfDeviceMemory(
                f"{name}: {size} bytes more, where {self.mapped_bytes} of at most {self.max_bytes} are held"
            )

    def check(self) -> None:
        """Every byte that is mapped lies in a piece of one region, and no two regions overlap."""
        regions = sorted(self._regions, key=lambda region: region.address)
        for before, after in pairwise(regions):
            assert before.address + before.size <= after.address, f"{before.name} and {after.name} overlap"
        for region in regions:
            region.check()
        assert sum(region.mapped_bytes for region in regions) == self.mapped_bytes <= self.max_bytes


class Region:
    """A reserved range. Its addresses stay as long as it, or a tensor in it, is referred to. Its memory goes when it is
    unmapped, or else with them."""

    def __init__(self, arena: Arena, name: str, address: int, size: int, piece_bytes: int) -> None:
        self.name = name
        self.address = address
        self.size = size
        self.piece_bytes = piece_bytes
        self.mapped_bytes = 0
        self._arena = arena
        self._handles: dict[int, int] = {}

    def __len__(self) -> int:
        """How many pieces it has."""
        return -(-self.size // self.piece_bytes)

    @property
    def mapped(self) -> list[int]:
        """The pieces that have memory, ascending."""
        return sorted(self._handles)

    def has(self, piece: int) -> bool:
        """Whether it has memory."""
        return piece in self._handles

    def bytes_of(self, piece: int) -> int:
        assert 0 <= piece < len(self)
        return min(self.piece_bytes, self.size - piece * self.piece_bytes)

    def map(self, pieces: Iterable[int]) -> None:
        """Gives pieces memory, with anything in it. Raises OutOfDeviceMemory, and then it is as it was."""
        pieces = list(pieces)
        self._arena.require(self.name, sum(self.bytes_of(piece) for piece in pieces))
        with ExitStack() as undoing:
            for piece in pieces:
                assert piece not in self._handles, f"piece {piece} of {self.name} has memory already"
                address, size = self.address + piece * self.piece_bytes, self.bytes_of(piece)
                self._handles[piece] = self._arena.driver.map(address, size)
                self._count(size)
                undoing.callback(self.unmap, [piece])
            undoing.pop_all()

    def unmap(self, pieces: Iterable[int]) -> None:
        """Takes memory away. Nothing on the device reads or writes it any more."""
        for first, last in contiguous_ranges(pieces):
            assert all(piece in self._handles for piece in range(first, last)), f"some of {self.name} has no memory"
            size = sum(self.bytes_of(piece) for piece in range(first, last))
            handles = [self._handles.pop(piece) for piece in range(first, last)]
            self._arena.driver.unmap(self.address + first * self.piece_bytes, size, handles)
            self._count(-size)

    def _count(self, size: int) -> None:
        self.mapped_bytes += size
        self._arena.mapped_bytes += size

    def map_all(self) -> None:
        self.map(range(len(self)))

    def unmap_all(self) -> None:
        self.unmap(self.mapped)

    def tensor(self) -> Tensor:
        """All of it as bytes. Only what is mapped may be read or written."""
        lent = [] if 0 in self._handles else [0]
        self.map(lent)
        try:
            return self._arena.driver.tensor(self.address, self.size, self)
        finally:
            self.unmap(lent)

    def check(self) -> None:
        assert self.mapped_bytes == sum(self.bytes_of(piece) for piece in self._handles), f"{self.name} lost bytes"
        assert set(self._handles) <= set(range(len(self)))

    def __del__(self) -> None:
        if sys.is_finalizing():
            return  # the process gives everything back
        if self._handles:
            self._arena.driver.wait()
            self.unmap_all()
        self._arena.driver.release(self.address, self.size)


def contiguous_ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """As ranges (first, last + 1)."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number:
            ranges[-1] = (ranges[-1][0], number + 1)
        else:
            ranges.append((number, number + 1))
    return ranges


class HostMemoryDriver:
    """The system's own. It gives memory as it is touched, and what is taken away reads as zero after."""

    granularity = mmap.PAGESIZE

    def __init__(self) -> None:
        self._ranges: dict[int, mmap.mmap] = {}

    def reserve(self, size: int) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        try:
            pages = mmap.mmap(-1, size, flags)
        except OSError as error:
            raise OutOfDeviceMemory(f"the system has no addresses for {size} bytes: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
        self._ranges[address] = pages
        return address

    def release(self, address: int, size: int) -> None:
        del self._ranges[address]

    def map(self, address: int, size: int) -> int:
        return 0

    def unmap(self, address: int, size: int, handles: list[int]) -> None:
        start, pages = self._range(address)
        if sys.platform != "linux":  # elsewhere what is not needed may keep what it held
            ctypes.memset(address, 0, size)
        pages.madvise(mmap.MADV_DONTNEED, address - start, size)

    def wait(self) -> None:
        """Nothing is queued on a CPU."""

    def register(self, address: int, size: int) -> None:
        """A CPU copies anything."""

    def unregister(self, address: int) -> None: ...

    def tensor(self, address: int, size: int, owner: object) -> Tensor:
        return torch.from_numpy(np.asarray(_ArrayInterface(address, size, owner)))

    def _range(self, address: int) -> tuple[int, mmap.mmap]:
        start = max(start for start in self._ranges if start <= address)
        return start, self._ranges[start]


class CudaMemoryDriver:
    """A GPU's, by the driver's calls. Each piece costs some 40 µs to map, and as much to unmap, whatever its size."""

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver  # only here: torch for CUDA brings it, torch for a CPU does not

        torch.cuda.synchronize(device)  # the device's context is there, and this thread's, from now on
        self._driver = driver
        self._device = device
        index = torch.cuda.current_device() if device.index is None else device.index
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = index
        self._access = driver.CUmemAccessDesc()
        self._access.location = self._properties.location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(self._done(driver.cuMemGetAllocationGranularity(self._properties, minimum)))

    def reserve(self, size: int) -> int:
        return int(self._done(self._driver.cuMemAddressReserve(size, 0, 0, 0)))

    def release(self, address: int, size: int) -> None:
        self._done(self._driver.cuMemAddressFree(address, size))

    def map(self, address: int, size: int) -> int:
        with ExitStack() as undoing:
            handle = self._done(self._driver.cuMemCreate(size, self._properties, 0))
            undoing.callback(self._driver.cuMemRelease, handle)
            self._done(self._driver.cuMemMap(address, size, 0, handle, 0))
            undoing.callback(self._driver.cuMemUnmap, address, size)
            self._done(self._driver.cuMemSetAccess(address, size, [self._access], 1))
            undoing.pop_all()
        return int(handle)

    def unmap(self, address: int, size: int, handles: list[int]) -> None:
        self._done(self._driver.cuMemUnmap(address, size))  # a call for all takes a third less than one for each
        for handle in handles:
            self._done(self._driver.cuMemRelease(handle))

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def register(self, address: int, size: int) -> None:
        # Not by the runtime's call: where that fails, torch finds the error later and blames whatever comes next.
        (result,) = self._driver.cuMemHostRegister(address, size, 0)
        if result != self._driver.CUresult.CUDA_SUCCESS:
            raise OutOfHostMemory(f"{size} bytes of host memory cannot be registered: {result.name}")

    def unregister(self, address: int) -> None:
        self._done(self._driver.cuMemHostUnregister(address))

    def tensor(self, address: int, size: int, owner: object) -> Tensor:
        return torch.as_tensor(_ArrayInterface(address, size, owner), device=self._device)

    def _done(self, answer: tuple[Any, ...]) -> Any:
        """What a call gives beside its result. Raises OutOfDeviceMemory, and RuntimeError for all else."""
        result, *values = answer
        if result == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise OutOfDeviceMemory("the device has too little memory left")
        if result != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"CUDA's driver refuses a call of the arena: {result.name}")
        return values[0] if values else None


class _ArrayInterface:
    """Memory as numpy and torch take it over: their arrays keep this, and this keeps `owner`."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        self.owner = owner
        interface = {"shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}
        self.__array_interface__ = self.__cuda_array_interface__ = interface
