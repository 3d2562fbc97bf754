"""KV blocks of a pool that go to other processes and come from them: into memory of a device that both map, or through
the host's pinned memory.

    out   gathers, beside the steps: what a sequence holds and has landed is written by nobody. Steps that are launched
          later come behind them, since a block may be somebody else's by then
    in    scatters, in the order of the steps; checksums and zeroing beside them

A window is one handover's alone: whatever a sender that was given up still writes, it writes where nobody reads. It
knows no sequences, no leases and no sockets.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from engine.kvcache.tensors import KVPool
from engine.memory.errors import OutOfDeviceMemory, OutOfHostMemory
from engine.memory.streams import DeviceStream, StreamEvent
from engine.memory.symmetric import WindowDriver
from engine.step.exchange import WindowClosed, WindowUnreachable

_SCATTERED_BYTES: Final = 32 << 20  # of host memory at once
_WORD: Final = 1 << 64


class BlockCopies(Protocol):
    """The kernels of kernels/ranks/block_copies.py, or what computes the same in kernels/reference.py."""

    def gather_blocks(self, words_LNW: Tensor, ids_B: Tensor, into_BLW: Tensor, sums_BL: Tensor) -> None: ...

    def scatter_blocks(self, blocks_BLW: Tensor, words_LNW: Tensor, ids_B: Tensor) -> None: ...

    def sum_blocks(self, blocks_BLW: Tensor, sums_BL: Tensor) -> None: ...


@dataclass(slots=True)
class DeviceGathering:
    """Blocks on their way into a window, or into pinned memory and from there to `into`."""

    began: StreamEvent
    done: StreamEvent
    ids_B: Tensor
    sums_BL: Tensor
    pinned_BLW: Tensor | None = None
    into: memoryview | None = None
    took_us: int = 0

    def wait(self) -> list[int]:
        """As in Gathering."""
        self.done.wait()
        self.took_us = int(1e3 * self.done.ms_since(self.began))
        if self.pinned_BLW is None:
            return _checksums(self.sums_BL)
        assert self.into is not None
        with torch.inference_mode():
            torch.frombuffer(self.into, dtype=torch.int64).copy_(self.pinned_BLW.view(-1))
            self.pinned_BLW.zero_()  # torch gives this memory to others
        self.into = self.pinned_BLW = None
        return []


class DeviceBlockExchange:
    """A BlockExchange over a pool on a device, and its BlockWindows: `windows`. A thread that waits for the device
    begins with `attach`: else it would open the first one that the process sees."""

    busy = False

    def __init__(
        self, pool: KVPool, stream: DeviceStream, copies: BlockCopies, driver: WindowDriver, max_bytes: int,
        awake: Callable[[], bool], settle: Callable[[DeviceStream], None],
    ) -> None:  # fmt: skip
        """Steps are launched into `stream`. Windows take at most max_bytes of the device, and none while it is not
        `awake`. `settle` has a stream follow what brings blocks beside the steps."""
        assert pool.words_LNW.dtype == torch.int64
        self._pool = pool
        self._stream = stream
        self._copies = copies
        self._settle = settle
        self._out, self._beside = DeviceStream(stream.device), DeviceStream(stream.device)
        self._pulled = stream.mark()
        self._gathering: deque[DeviceGathering] = deque()  # the device may still write to their memory
        self.attach = driver.attach
        self._zeroing = ThreadPoolExecutor(1, thread_name_prefix="handover-zero", initializer=self.attach)
        self.windows = DeviceWindows(self, driver, max_bytes, awake)

    def gather(self, blocks: Items[int], into: memoryview) -> DeviceGathering:
        """As in BlockExchange."""
        pinned_BLW = self._words(len(blocks))
        gathering = self.gather_into(blocks, pinned_BLW)
        gathering.pinned_BLW, gathering.into = pinned_BLW, into
        return gathering

    def scatter(self, blocks: Items[int], gathered: memoryview) -> None:
        """As in BlockExchange. The caller waits for the host's copy alone: the device reads that by itself."""
        size = self._pool.shape.block_bytes
        count = max(1, _SCATTERED_BYTES // size)
        for first in range(0, len(blocks), count):
            some = blocks[first : first + count]
            pinned_BLW = self._words(len(some))
            with gathered[first * size : (first + len(some)) * size] as part:
                pinned_BLW.view(-1).copy_(torch.frombuffer(part, dtype=torch.int64))
            self._zeroing.submit(_zero, self.scatter_from(pinned_BLW, some), pinned_BLW)

    def gather_into(self, blocks: Items[int], into_BLW: Tensor) -> DeviceGathering:
        """Queues the copy of blocks beside the steps, and before those to come. Raises OutOfDeviceMemory and
        OutOfHostMemory."""
        began, done = self._out.mark(), self._out.mark()
        self._settle(self._out)
        self._out.follow(self._pulled)
        with _pinning(), self._out.entered():
            began.set()
            ids_B = self._ids(self._out, blocks)
            sums_BL = self._out.staging(*into_BLW.shape[:2], dtype=torch.int64)
            self._copies.gather_blocks(self._pool.words_LNW, ids_B, into_BLW, sums_BL)
            done.set()
        self._stream.follow(done)
        gathering = DeviceGathering(began, done, ids_B, sums_BL)
        while self._gathering and self._gathering[0].done.passed():
            self._gathering.popleft()
        self._gathering.append(gathering)
        return gathering

    def scatter_from(self, from_BLW: Tensor, blocks: Items[int]) -> StreamEvent:
        """Queues the copy into blocks in the order of the steps; returns its end. Raises as `gather_into`."""
        done = self._stream.mark()
        with _pinning(), self._stream.entered():
            self._copies.scatter_blocks(from_BLW, self._pool.words_LNW, self._ids(self._stream, blocks))
            done.set()
            self._pulled.set()
        return done

    def sum(self, blocks_BLW: Tensor) -> list[int]:
        """The checksums of blocks that lie in a window, once the device has them."""
        done = self._beside.mark()
        with torch.inference_mode(), self._beside.entered():
            sums_BL = self._beside.staging(*blocks_BLW.shape[:2], dtype=torch.int64)
            self._copies.sum_blocks(blocks_BLW, sums_BL)
            done.set()
        done.wait()
        return _checksums(sums_BL)

    def zero(self, memory: Tensor) -> None:
        """Zeroes a window's memory, and waits for that."""
        done = self._beside.mark()
        with torch.inference_mode(), self._beside.entered():
            memory.zero_()
            done.set()
        done.wait()

    def blocks_view(self, memory: Tensor, blocks: int) -> Tensor:
        """Bytes of so many blocks, as words of blocks and layers."""
        layers, _, words = self._pool.words_LNW.shape
        return memory[: blocks * self._pool.shape.block_bytes].view(torch.int64).view(blocks, layers, words)

    def compile(self) -> None:
        """Has its kernels compiled or loaded, which threads would wait for. Block 0 holds nothing yet."""
        pinned_BLW = self._words(1)
        self.gather_into([0], pinned_BLW).wait()
        self.sum(pinned_BLW)
        self.scatter_from(pinned_BLW, [0]).wait()

    @property
    def block_bytes(self) -> int:
        return self._pool.shape.block_bytes

    def close(self) -> None:
        """Waits until nothing reads or writes the pool."""
        self._zeroing.shutdown()
        for stream in (self._out, self._beside, self._stream):
            stream.wait()

    def _words(self, count: int) -> Tensor:
        """Pinned memory for so many blocks, with anything in it. Raises OutOfHostMemory."""
        layers, _, words = self._pool.words_LNW.shape
        with _pinning():
            return torch.empty(count, layers, words, dtype=torch.int64, pin_memory=self._stream.queues)

    def _ids(self, stream: DeviceStream, blocks: Items[int]) -> Tensor:
        return stream.pinned(blocks).to(stream.device, non_blocking=True)


class DeviceWindow:
    """A BlockWindow of this process, or of another one's device."""

    def __init__(
        self, windows: "DeviceWindows", address: int, size: int, blocks: int, descriptor: int | None
    ) -> None:  # fmt: skip
        self.descriptor = descriptor
        self._windows = windows
        self._range = address, size
        self._lock = threading.Lock()
        self._memory: Tensor | None = windows.driver.tensor(address, size, None)
        self._blocks_BLW: Tensor | None = windows.exchange.blocks_view(self._memory, blocks)
        self._used: list[StreamEvent] = []  # the end of the copy that was begun last

    def push(self, first: int, blocks: Items[int]) -> DeviceGathering:
        """As in BlockWindow."""
        with self._open() as blocks_BLW:
            gathering = self._windows.exchange.gather_into(blocks, blocks_BLW[first : first + len(blocks)])
            self._used = [gathering.done]
        return gathering

    def checksums(self, first: int, count: int) -> list[int]:
        """As in BlockWindow."""
        with self._open() as blocks_BLW:
            return self._windows.exchange.sum(blocks_BLW[first : first + count])

    def pull(self, first: int, blocks: Items[int]) -> None:
        """As in BlockWindow."""
        with self._open() as blocks_BLW:
            self._used = [self._windows.exchange.scatter_from(blocks_BLW[first : first + len(blocks)], blocks)]

    def close(self, erase: bool = False) -> None:
        """As in BlockWindow."""
        with self._lock:
            memory, self._memory, self._blocks_BLW = self._memory, None, None
            if memory is None:
                return
            for mark in self._used:
                mark.wait()
            if erase or self.descriptor is not None:  # else whoever made it may read it still
                self._windows.exchange.zero(memory)
            del memory
            self._windows.give_back(*self._range, made=self.descriptor is not None)
            if self.descriptor is not None:
                os.close(self.descriptor)

    @contextmanager
    def _open(self) -> Iterator[Tensor]:
        """Its blocks, which stay while they are used. Raises WindowClosed."""
        with self._lock:
            if self._blocks_BLW is None:
                raise WindowClosed("the memory of this handover was given back")
            yield self._blocks_BLW


class DeviceWindows:
    """BlockWindows of one device. Threads may use it.

    held_bytes  of the device, in windows made here.
    """

    def __init__(
        self, exchange: DeviceBlockExchange, driver: WindowDriver, max_bytes: int, awake: Callable[[], bool]
    ) -> None:
        self.exchange = exchange
        self.driver = driver
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._awake = awake
        self._lock = threading.Lock()

    @property
    def kind(self) -> str:
        """As in BlockWindows."""
        return self.driver.kind

    def make(self, blocks: int) -> DeviceWindow:
        """As in BlockWindows."""
        size = self._size(blocks)
        with self._lock:
            if self.held_bytes + size > self.max_bytes or not self._awake():
                raise OutOfDeviceMemory(f"{size} bytes more than {self.held_bytes} are over the limit for handovers")
            self.held_bytes += size
        with ExitStack() as undoing:
            undoing.callback(self._count, -size)
            address = self._reserve(size, undoing)
            handle, descriptor = self.driver.make(size)
            undoing.callback(os.close, descriptor)
            self.driver.place(address, size, handle)
            undoing.pop_all()
        return DeviceWindow(self, address, size, blocks, descriptor)

    def open(self, descriptor: int, blocks: int) -> DeviceWindow:
        """As in BlockWindows."""
        size = self._size(blocks)
        try:
            with ExitStack() as undoing:
                address = self._reserve(size, undoing)
                self.driver.place(address, size, self.driver.open(descriptor))
                undoing.pop_all()
        except (OutOfDeviceMemory, RuntimeError, OSError) as error:
            raise WindowUnreachable(str(error)) from error
        finally:
            os.close(descriptor)
        return DeviceWindow(self, address, size, blocks, None)

    def give_back(self, address: int, size: int, made: bool) -> None:
        """Unmaps a window that nothing uses any more."""
        self.driver.attach()
        self.driver.displace(address, size)
        self.driver.release(address, size)
        self._count(-size if made else 0)

    def _reserve(self, size: int, undoing: ExitStack) -> int:
        """A range of addresses, before there is memory that it would have to give back."""
        self.driver.attach()
        address = self.driver.reserve(size)
        undoing.callback(self.driver.release, address, size)
        return address

    def _size(self, blocks: int) -> int:
        unit = self.driver.granularity
        return -(-blocks * self.exchange.block_bytes // unit) * unit

    def _count(self, more_bytes: int) -> None:
        with self._lock:
            self.held_bytes += more_bytes


@contextmanager
def _pinning() -> Iterator[None]:
    """Torch takes host memory within it that the device reads and writes by itself. Raises OutOfHostMemory."""
    try:
        yield
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        raise OutOfHostMemory(f"no host memory to copy KV blocks by: {error}"[:300]) from error


def _checksums(sums_BL: Tensor) -> list[int]:
    """What is summed up of each block's layers, as one number."""
    return [sum(layers) % _WORD for layers in sums_BL.tolist()]


def _zero(done: StreamEvent, memory: Any) -> None:
    with torch.inference_mode():
        done.wait()
        memory.zero_()
