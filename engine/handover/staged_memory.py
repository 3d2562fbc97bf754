"""Memory where blocks of one handover come in and wait: of the host, or of the device. It knows no keys, no leases and
no sockets."""

import mmap
import os
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Final, Protocol

import xxhash

from engine.handover.fabric import FabricEndpoint, FabricEndpoints
from engine.handover.messages import run_blocks, window_run_blocks
from engine.step.exchange import BlockExchange, BlockWindow

_ZEROS: Final = memoryview(bytes(1 << 20))


class StagedMemory(Protocol):
    """Memory for the blocks of one handover.

    in_window   it is the device's: the sender sums up blocks as the device does.
    host_bytes  that it has of the host.
    run_blocks  come at once at most.
    """

    in_window: bool

    @property
    def host_bytes(self) -> int: ...

    @property
    def run_blocks(self) -> int: ...

    @property
    def descriptor(self) -> int | None:
        """What another process shares it by; None where blocks come over the socket."""

    def compare(self, first: int, checksums: list[int], receive: Callable[[memoryview], None]) -> int:
        """How many of these blocks, from `first` on, have their checksums before one has another. `receive` fills a
        view with what comes over the socket. Raises WindowClosed, and what `receive` raises."""

    def scatter(self, exchange: BlockExchange, first: int, blocks: Items[int]) -> None:
        """Copies blocks first, first + 1, … into these of the pool."""


class HostMemory:
    """A mapping, with room for all blocks, that is zero. Blocks come over the socket, unless another process shares it
    or writes to it over a fabric."""

    in_window = False

    def __init__(self, block_bytes: int, mapping: mmap.mmap, descriptor: int | None) -> None:
        self.mapping = mapping
        self.descriptor = descriptor
        self._block_bytes = block_bytes
        self._touched = 0
        self._fabric: tuple[FabricEndpoints, FabricEndpoint] | None = None

    @property
    def host_bytes(self) -> int:
        return len(self.mapping)

    @property
    def run_blocks(self) -> int:
        return run_blocks(self._block_bytes)

    def open_to_fabric(self, endpoints: FabricEndpoints, blocks: int) -> tuple[bytes, int]:
        """Lets another host's endpoint write so many blocks. Returns what that one wants of it, its metadata and the
        memory's address. Raises FabricError."""
        endpoint = endpoints.take()
        self._fabric = endpoints, endpoint
        self._touched = blocks  # nobody here sees what comes
        return endpoint.open(self.mapping, blocks * self._block_bytes)

    def leave_fabric(self, complete: bool) -> None:
        """Lets nobody write any more; `complete`: the sender says that it has written all. Idempotent."""
        if self._fabric is not None:
            (endpoints, endpoint), self._fabric = self._fabric, None
            if complete:
                endpoints.give_back(endpoint)
            else:
                endpoint.close()

    def view(self, first: int, count: int) -> memoryview:
        """The memory of blocks first … first+count−1, to be let go before `erase`."""
        self._touched = max(self._touched, first + count)
        return memoryview(self.mapping)[first * self._block_bytes : (first + count) * self._block_bytes]

    def compare(self, first: int, checksums: list[int], receive: Callable[[memoryview], None]) -> int:
        """As in StagedMemory, while each block is in the processor's cache."""
        whole = 0
        with self.view(first, len(checksums)) as view:
            for at, checksum in enumerate(checksums):
                with view[at * self._block_bytes : (at + 1) * self._block_bytes] as block:
                    if self.descriptor is None and self._fabric is None:
                        receive(block)
                    if whole == at and xxhash.xxh3_64_intdigest(block) == checksum:
                        whole += 1
        return whole

    def scatter(self, exchange: BlockExchange, first: int, blocks: Items[int]) -> None:
        """As in StagedMemory."""
        with self.view(first, len(blocks)) as view:
            exchange.scatter(blocks, view)

    def erase(self) -> None:
        """Zeroes whatever was written, once nobody writes."""
        self.leave_fabric(complete=False)
        with memoryview(self.mapping)[: self._touched * self._block_bytes] as written:
            for at in range(0, len(written), len(_ZEROS)):
                with written[at : at + len(_ZEROS)] as piece:
                    piece[:] = _ZEROS[: len(piece)]

    def close(self) -> None:
        """Gives the memory back; all views are gone."""
        self.mapping.close()
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class WindowMemory:
    """A window of the device, which the sender writes to by itself: what comes over the socket says when."""

    in_window = True
    host_bytes = 0

    def __init__(self, block_bytes: int, window: BlockWindow) -> None:
        self.window = window
        self._block_bytes = block_bytes

    @property
    def run_blocks(self) -> int:
        return window_run_blocks(self._block_bytes)

    @property
    def descriptor(self) -> int | None:
        return self.window.descriptor

    def compare(self, first: int, checksums: list[int], receive: Callable[[memoryview], None]) -> int:
        """As in StagedMemory, as the device sums them up."""
        pairs = zip(self.window.checksums(first, len(checksums)), checksums, strict=True)
        return next((at for at, (own, sent) in enumerate(pairs) if own != sent), len(checksums))

    def scatter(self, exchange: BlockExchange, first: int, blocks: Items[int]) -> None:
        """As in StagedMemory: the window knows its pool."""
        self.window.pull(first, blocks)
