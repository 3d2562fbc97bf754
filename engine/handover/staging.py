"""Blocks that came from another replica and wait here for the sequence that goes on with them.

The blocks lie in windows of the device where the sender reaches them and there is room, else in host memory, a mapping
for each handover. Memory that another process shares goes back to the system with its handover, zeroed; other memory is
zeroed here and used again, since new memory costs more than what comes into it. Whoever claims them shows the key and
tells namespace and tokens: from these the names are formed again, and blocks whose names differ are not found. It knows
no sockets, no sequences and no tensors.
"""

import mmap
import os
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from engine.handover.messages import HandoverFault, handover_id
from engine.handover.staged_memory import HostMemory, WindowMemory
from engine.memory.errors import OutOfDeviceMemory
from engine.step.exchange import BlockWindow, BlockWindows, WindowClosed
from prefixcache.names import BlockNames, next_name
from prefixcache.namespace import Namespace
from prefixcache.radix import TOKEN_BYTES

HANDOVERS_MAX: Final = 256  # held at once
CLAIM_S: Final = 5.0  # from the last block to the claim, and from the claim to its sequence's turn
_WRITES_END_S: Final = 0.1  # what a sender that ended had begun is in its window by then; one that lives zeroes it
_SPARE_TIMES: Final = 4  # memory is used again for handovers of at least this part of it
SHARES_MEMORY: Final = hasattr(os, "memfd_create")


class StagingRefused(Exception):
    """There is no room for a handover."""

    def __init__(self, fault: HandoverFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class StagedPrefix:
    """The first blocks of one sequence. While they come they are their connection's, then the area's, and once claimed
    their sequence's, which releases them.

    whole    so many of them have their checksums.
    names    of all that came.
    revoked  the memory is wanted back while they come: their connection is to end.
    """

    def __init__(self, id: bytes, block_bytes: int, max_blocks: int, memory: HostMemory | WindowMemory) -> None:
        self.id = id
        self.block_bytes = block_bytes
        self.max_blocks = max_blocks
        self.memory = memory
        self.names: list[bytes] = []
        self.whole = 0
        self.claimed = False
        self.revoked = False
        self.lapses_s = float("inf")
        self.on_release: Callable[[StagedPrefix], None] | None = None
        self.purges = 0  # of its area, when it began to come

    @property
    def sealed(self) -> bool:
        """Whether all of them came."""
        return self.lapses_s < float("inf")

    def require(self) -> None:
        """Raises WindowClosed where the memory is wanted back."""
        if self.revoked:
            raise WindowClosed("the device's memory is wanted back")

    def add(self, names: list[bytes], whole: int) -> None:
        """Notes that blocks came behind those that are there, the first `whole` of which have their checksums."""
        if self.whole == len(self.names):
            self.whole += whole
        self.names += names

    def release(self) -> None:
        """Lets go of the blocks, once."""
        if self.on_release is not None:
            released, self.on_release = self.on_release, None
            released(self)


class StagingArea:
    """All handovers that one replica receives. Threads may use it.

    counters    of handovers: staged, claimed, lapsed, and claims that found nothing (unknown) or blocks of something
                else (foreign); of blocks: corrupt_blocks, whose checksums differ, and the claimed_blocks.
    """

    def __init__(
        self, max_bytes: int, clock: Callable[[], float], shares_memory: bool = SHARES_MEMORY,
        windows: BlockWindows | None = None,
    ) -> None:  # fmt: skip
        """At most max_bytes of the host; `windows` have a limit of their own."""
        self.max_bytes = max_bytes
        self.counters: Counter[str] = Counter()
        self.shares_memory = shares_memory
        self._windows = windows
        self._closing = ThreadPoolExecutor(1, thread_name_prefix="handover-close")
        self._clock = clock
        self._purges = 0
        self._reclaims = 0  # of the windows' memory
        self._lock = threading.Lock()
        self._held: dict[bytes, StagedPrefix] = {}
        self._bytes = 0  # of what is held and of
        self._spare: list[mmap.mmap] = []  # which is zero

    @property
    def held(self) -> int:
        """How many handovers are held, on their way too."""
        return len(self._held)

    @property
    def held_bytes(self) -> int:
        """Bytes of the host of the handovers that are held."""
        return sum(staged.memory.host_bytes for staged in list(self._held.values()))

    def open(self, id: bytes, block_bytes: int, blocks: int, shared: bool, windows: str = "") -> StagedPrefix:
        """Memory for a handover that begins, the device's where the sender has `windows` of its kind. Raises
        StagingRefused."""
        reclaims = self._reclaims
        window = self._make_window(blocks, windows if shared else "")
        try:
            with self._lock:
                if window is not None and reclaims != self._reclaims:
                    raise StagingRefused(HandoverFault.FULL, "the device's memory is wanted back")
                if id in self._held:
                    raise StagingRefused(HandoverFault.INVALID, "a handover of this id is held already")
                if len(self._held) >= HANDOVERS_MAX:
                    raise StagingRefused(HandoverFault.FULL, f"{HANDOVERS_MAX} handovers are held already")
                memory = (
                    self._host_memory(block_bytes, blocks, shared)
                    if window is None
                    else WindowMemory(block_bytes, window)
                )
                self._held[id] = staged = StagedPrefix(id, block_bytes, blocks, memory)
                staged.on_release, staged.purges = self._drop, self._purges
                return staged
        except StagingRefused:
            if window is not None:
                window.close()
            raise

    def to_host(self, staged: StagedPrefix, shared: bool) -> None:
        """Has a handover that nothing came of yet come into host memory: the sender does not reach its window. Raises
        StagingRefused."""
        assert isinstance(staged.memory, WindowMemory)
        window = staged.memory.window
        with self._lock:
            staged.memory = self._host_memory(staged.block_bytes, staged.max_blocks, shared)
        window.close()

    def seal(self, staged: StagedPrefix) -> None:
        """All blocks are there: they wait for their sequence, but where a purge came meanwhile."""
        with self._lock:
            staged.lapses_s = self._clock() + (CLAIM_S if staged.purges == self._purges else 0.0)
            self.counters["staged"] += 1

    def claim(self, key: bytes, namespace: Namespace, tokens: "array[int]") -> StagedPrefix | None:
        """The blocks under a key, whose names are those of this namespace and these tokens, for one sequence; their
        `whole` ones can be read. None where there are no such: they stay for whoever they belong to."""
        with self._lock:
            staged = self._held.get(handover_id(key))
            if staged is None or staged.claimed or not staged.sealed or staged.lapses_s <= self._clock():
                self.counters["unknown"] += 1
                return None
            whole = _matching(staged.names[: staged.whole], key, namespace, tokens)
            if not whole:
                self.counters["foreign"] += 1
                return None
            staged.whole = whole
            staged.claimed = True
            staged.lapses_s = self._clock() + CLAIM_S
            self.counters["claimed"] += 1
            self.counters["claimed_blocks"] += whole
            return staged

    def purge(self) -> None:
        """Lets go of all that no sequence reads yet, and, once it is there, of what still comes: an account's KV from
        before is to be gone, and whose is whose is not known here."""
        with self._lock:
            self._purges += 1
            for staged in self._held.values():
                if staged.sealed:
                    staged.lapses_s = self._clock()

    def count_corrupt(self, blocks: int) -> None:
        """Counts blocks that have other checksums, and those behind them in their run."""
        with self._lock:
            self.counters["corrupt_blocks"] += blocks

    def sweep(self) -> list[bytes]:
        """Lets go of those whose lease is over, and returns their ids. What still comes is its connection's."""
        now = self._clock()
        with self._lock:
            lapsed = [
                staged
                for staged in self._held.values()
                if staged.sealed and staged.on_release is not None and staged.lapses_s <= now
            ]
        for staged in lapsed:
            self.counters["lapsed"] += 1
            staged.whole = 0
            staged.release()
        return [staged.id for staged in lapsed]

    def release_windows(self) -> None:
        """Gives the device its memory back: what lies there is found no more, and what still comes is to end."""
        with self._lock:
            self._reclaims += 1
            in_windows = [staged for staged in self._held.values() if staged.memory.in_window]
        for staged in in_windows:
            staged.whole, staged.revoked = 0, True
            if staged.sealed and staged.on_release is not None:
                self.counters["lapsed"] += 1
                staged.release()

    def close(self) -> None:
        """Lets go of all that no connection holds, and waits for windows that are given back."""
        for staged in [staged for staged in list(self._held.values()) if staged.sealed]:
            staged.whole = 0
            staged.release()
        self._closing.shutdown()

    def check(self) -> None:
        """Raises AssertionError where what is held is not what is counted."""
        with self._lock:
            assert self._bytes == self.held_bytes + sum(map(len, self._spare)) <= self.max_bytes
            assert not any(any(memory[:]) for memory in self._spare), "what was let go is not erased"
            assert all(staged.whole <= len(staged.names) <= staged.max_blocks for staged in self._held.values())

    def _make_window(self, blocks: int, windows: str) -> BlockWindow | None:
        """Memory of the device, where the other side's is of its kind and there is room."""
        if self._windows is None or windows != self._windows.kind or blocks < 1:
            return None
        try:
            return self._windows.make(blocks)
        except (OutOfDeviceMemory, RuntimeError, OSError):  # the host's memory is as good, and slower
            self.counters["windows_refused"] += 1
            return None

    def _host_memory(self, block_bytes: int, blocks: int, shared: bool) -> HostMemory:
        """Memory for so many blocks, shared where it can be. Raises StagingRefused."""
        size = block_bytes * blocks
        if self.held_bytes + size > self.max_bytes:
            raise StagingRefused(
                HandoverFault.FULL,
                f"{size} bytes more than {self.held_bytes} of {len(self._held)} handovers are over the limit of "
                f"handover_bytes, {self.max_bytes}",
            )
        try:
            return HostMemory(block_bytes, *self._memory(size, shared and self.shares_memory))
        except OSError as error:
            raise StagingRefused(HandoverFault.FULL, f"the host gives no memory: {error}") from error

    def _memory(self, size: int, shared: bool) -> tuple[mmap.mmap, int | None]:
        """Memory of at least so many bytes, and its descriptor where it is shared. Raises OSError."""
        if not shared:
            for spare in self._spare:
                if size <= len(spare) <= _SPARE_TIMES * size:
                    self._spare.remove(spare)
                    return spare, None
        while self._spare and self._bytes + size > self.max_bytes:
            oldest = self._spare.pop(0)
            self._bytes -= len(oldest)
            oldest.close()
        descriptor = os.memfd_create("hearth-handover", os.MFD_CLOEXEC) if shared else None
        if descriptor is not None:
            os.ftruncate(descriptor, size)
        memory = mmap.mmap(-1 if descriptor is None else descriptor, size)
        self._bytes += size
        return memory, descriptor

    def _drop(self, staged: StagedPrefix) -> None:
        memory = staged.memory
        if isinstance(memory, WindowMemory):
            try:
                self._closing.submit(self._drop_window, staged, memory.window, time.monotonic())
            except RuntimeError:  # the area is closed
                self._drop_window(staged, memory.window, time.monotonic())
            return
        memory.erase()
        with self._lock:
            del self._held[staged.id]
            if memory.descriptor is None:
                self._spare.append(memory.mapping)
            else:
                self._bytes -= memory.host_bytes
                memory.close()

    def _drop_window(self, staged: StagedPrefix, window: BlockWindow, released_s: float) -> None:
        """Closes a window beside the loop, which would wait for the device."""
        if not staged.sealed:
            time.sleep(max(0.0, released_s + _WRITES_END_S - time.monotonic()))
        try:
            window.close()
        finally:
            with self._lock:
                del self._held[staged.id]


def _matching(names: list[bytes], key: bytes, namespace: Namespace, tokens: "array[int]") -> int:
    """How many of these names are those of the first whole blocks of `tokens`, none of which is the last token's."""
    size = namespace.block_tokens * TOKEN_BYTES
    packed = memoryview(tokens).cast("B")[: (len(tokens) - 1) * TOKEN_BYTES]
    name, count = BlockNames(key).root(namespace), 0
    for start in range(0, len(packed) // size * size, size):
        name = next_name(name, packed[start : start + size])
        if count == len(names) or names[count] != name:
            break
        count += 1
    return count
