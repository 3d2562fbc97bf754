"""How KV blocks leave a model's memory and come in, between steps: by host memory, or by memory of a device that two
processes share. It knows no sequences and no replicas, and not what a device is."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol


class WindowUnreachable(Exception):
    """The device here does not reach memory that another process gave."""


class WindowClosed(Exception):
    """The memory was given back while somebody still meant to use it."""


class GatheringLost(Exception):
    """Blocks that were to be copied will never be there."""


class Gathering(Protocol):
    """Blocks on their way out of the pool.

    took_us  that the device needed for them, once they were waited for; 0 where that is not known.
    """

    took_us: int

    def wait(self) -> list[int]:
        """Returns when they are there. A checksum (64 bits) of each where a device has computed them, else none. One
        thread calls it, not always the one that began. Raises GatheringLost."""


@dataclass(slots=True)
class Gathered:
    """Blocks that were there as soon as they were asked for."""

    took_us: int = 0

    def wait(self) -> list[int]:
        return []


class BlockWindow(Protocol):
    """Memory of a device for some blocks, one behind the other: made by the process that takes them in, mapped by the
    one that they come from. Threads may use it.

    descriptor  by which the other process maps it, as long as it is open; None where that is this process.
    """

    descriptor: int | None

    def push(self, first: int, blocks: Items[int]) -> Gathering:
        """Begins to copy these blocks of the pool into places first, first + 1, … Raises WindowClosed,
        OutOfDeviceMemory and OutOfHostMemory."""

    def checksums(self, first: int, count: int) -> list[int]:
        """What lies there, as `Gathering.wait` sums it up. It waits for the device. Raises WindowClosed."""

    def pull(self, first: int, blocks: Items[int]) -> None:
        """Copies what lies there into these blocks of the pool, which no step in flight reads or writes: before any
        step that is launched later. Raises WindowClosed."""

    def close(self, erase: bool = False) -> None:
        """Gives the memory back once the device has done what was begun, zeroed where this process made it, or is to
        `erase` it: nobody reads it any more. It may be called again."""


class BlockWindows(Protocol):
    """Where windows come from.

    kind  of device: windows are shared between processes that say the same.
    """

    @property
    def kind(self) -> str: ...

    def make(self, blocks: int) -> BlockWindow:
        """Memory for so many blocks. Raises OutOfDeviceMemory."""

    def open(self, descriptor: int, blocks: int) -> BlockWindow:
        """Maps what another process made for so many blocks; it closes the descriptor. Raises WindowUnreachable."""


class BlockExchange(Protocol):
    """How blocks of a model's only memory leave it and come in, all layers of each, between steps.

    windows  None where the device shares no memory.
    busy     `gather` would wait now, for what was begun before.
    """

    @property
    def windows(self) -> BlockWindows | None: ...

    @property
    def busy(self) -> bool: ...

    def gather(self, blocks: Items[int], into: memoryview) -> Gathering:
        """Begins to copy blocks, one behind the other, into len(blocks) · block_bytes bytes, before any step that is
        launched later changes them. Raises OutOfDeviceMemory and OutOfHostMemory."""

    def scatter(self, blocks: Items[int], gathered: memoryview) -> None:
        """Copies what `gather` gave into blocks that no step reads or writes: before any step that is launched
        later. Raises as `gather`."""
