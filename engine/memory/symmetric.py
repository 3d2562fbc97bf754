"""Memory that the ranks of a model share: each makes a window on its own device, hands it to the others as a file
descriptor, and maps the windows of all, one behind the other.

Windows of ranks stay mapped for as long as the process lives, also while the model sleeps: captured graphs hold
addresses in those of others. Other windows come and go (kvcache/device_exchange.py). It knows neither what is written
there nor how descriptors travel. Two drivers are behind it: that of CUDA, and the host's memory, which is how
everything above runs on a CPU.
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.memory.errors import OutOfDeviceMemory
from engine.memory.virtual_memory import CudaMemoryDriver, HostMemoryDriver

SwapDescriptors = Callable[[int], Sequence[int]]
"""Gives a rank's descriptor to all others, and returns those of all ranks in their order, the own one too."""


class WindowDriver(Protocol):
    """Where windows come from; beside this it is a MemoryDriver.

    kind  of memory: processes with equal ones may open each other's, and find out whether they reach it.
    """

    kind: str
    granularity: int

    def attach(self) -> None:
        """Makes this thread one that may call it, which the one that made it is."""
        ...

    def make(self, size: int) -> tuple[int, int]:
        """New memory of this device: its handle, and a descriptor for others, who close it. Raises
        OutOfDeviceMemory."""
        ...

    def open(self, descriptor: int) -> int:
        """The handle of memory that another process made."""
        ...

    def place(self, address: int, size: int, handle: int) -> None:
        """Puts memory at an address of a reserved range, for this device to read and write. Raises OutOfDeviceMemory
        or RuntimeError where it cannot, and the range is as it was; the handle is used up in any case."""
        ...

    def displace(self, address: int, size: int) -> None:
        """Takes that memory away. Nothing on the device reads or writes it."""
        ...

    def reserve(self, size: int) -> int: ...

    def release(self, address: int, size: int) -> None: ...

    def wait(self) -> None: ...

    def tensor(self, address: int, size: int, owner: object) -> Tensor: ...


def share_windows(driver: WindowDriver, size: int, rank: int, ranks: int, swap: SwapDescriptors) -> Tensor:
    """The windows of all ranks, [W, bytes] of at least `size` each, full of zeroes when `swap` gave the others this
    rank's. Raises OutOfDeviceMemory, and what `swap` raises."""
    size = -(-size // driver.granularity) * driver.granularity
    handle, descriptor = driver.make(size)
    address = driver.reserve(ranks * size)
    driver.place(address + rank * size, size, handle)
    driver.tensor(address + rank * size, size, None).zero_()
    driver.wait()
    try:
        descriptors = swap(descriptor)
    finally:
        os.close(descriptor)
    for other, received in enumerate(descriptors):
        if other != rank:
            driver.place(address + other * size, size, driver.open(received))
        os.close(received)
    return driver.tensor(address, ranks * size, driver).view(ranks, size)


class HostWindowDriver(HostMemoryDriver):
    """Windows in files without a name."""

    kind = "host"

    def __init__(self) -> None:
        super().__init__()
        self._map = ctypes.CDLL(None, use_errno=True).mmap
        self._map.restype = ctypes.c_void_p
        self._map.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)

    def attach(self) -> None:
        """Any thread may call it."""

    def make(self, size: int) -> tuple[int, int]:
        handle = os.memfd_create("hearth-window", os.MFD_CLOEXEC)
        os.ftruncate(handle, size)
        return handle, os.dup(handle)

    def open(self, descriptor: int) -> int:
        return os.dup(descriptor)

    def place(self, address: int, size: int, handle: int) -> None:
        if os.fstat(handle).st_size < size:  # pages past its end would end the process that touches them
            os.close(handle)
            raise OutOfDeviceMemory(f"a window of {size} bytes is smaller than that")
        flags = mmap.MAP_SHARED | 0x10  # MAP_FIXED, for which mmap has no name
        placed = self._map(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, handle, 0)
        os.close(handle)
        if placed != address:
            raise OutOfDeviceMemory(f"a window of {size} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}")

    def displace(self, address: int, size: int) -> None:
        """The pages go with their range."""


class CudaWindowDriver(CudaMemoryDriver):
    """Windows on GPUs that reach each other's memory, whether this process sees the other GPU or not: memory that was
    imported belongs to no device of its own, and what counts is that the driver gives this GPU access to it."""

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._kind = self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._properties.requestedHandleTypes = self._kind
        self._context = self._done(self._driver.cuCtxGetCurrent())

    def attach(self) -> None:
        self._done(self._driver.cuCtxSetCurrent(self._context))

    def make(self, size: int) -> tuple[int, int]:
        handle = self._done(self._driver.cuMemCreate(size, self._properties, 0))
        with ExitStack() as undoing:
            undoing.callback(self._driver.cuMemRelease, handle)
            descriptor = self._done(self._driver.cuMemExportToShareableHandle(handle, self._kind, 0))
            undoing.pop_all()
        return int(handle), int(descriptor)

    def open(self, descriptor: int) -> int:
        return int(self._done(self._driver.cuMemImportFromShareableHandle(descriptor, self._kind)))

    def place(self, address: int, size: int, handle: int) -> None:
        """Raises RuntimeError where this GPU does not reach the one that the memory is on."""
        with ExitStack() as undoing:
            undoing.callback(self._driver.cuMemRelease, handle)  # the mapping keeps the memory
            self._done(self._driver.cuMemMap(address, size, 0, handle, 0))
            with ExitStack() as unmapping:
                unmapping.callback(self._driver.cuMemUnmap, address, size)
                self._done(self._driver.cuMemSetAccess(address, size, [self._access], 1))
                unmapping.pop_all()

    def displace(self, address: int, size: int) -> None:
        self._done(self._driver.cuMemUnmap(address, size))

    def tensor(self, address: int, size: int, owner: object) -> Tensor:
        """As a tensor of this GPU, wherever the memory is: torch would go by the pointer, which may be another's, and
        copy what it points to. Nothing is kept for the tensor: whoever gives the memory back drops it before."""
        storage = torch._C._construct_storage_from_data_pointer(address, self._device, size)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)


def window_driver(device: torch.device) -> Any:
    return CudaWindowDriver(device) if device.type == "cuda" else HostWindowDriver()
