"""Blocks that came from another replica and wait here for the sequence that goes on with them.

The blocks lie in host memory, a mapping for each handover. Memory that another process shares goes back to the system
with its handover, which zeroes it; other memory is zeroed here and used again, since new memory costs more than what
comes into it. Whoever claims them shows the key and tells namespace and tokens: from these the names are formed again,
and blocks whose names differ are not found. It knows no sockets, no sequences and no tensors.
"""

import mmap
import os
import threading
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Final

from engine.handover.messages import HandoverFault, handover_id
from prefixcache.names import BlockNames, next_name
from prefixcache.namespace import Namespace
from prefixcache.radix import TOKEN_BYTES

HANDOVERS_MAX: Final = 256  # held at once
CLAIM_S: Final = 5.0  # from the last block to the claim, and from the claim to its sequence's turn
_ZEROS: Final = memoryview(bytes(1 << 20))
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

    whole   so many of them have their checksums.
    names   of all that came.
    """

    def __init__(self, id: bytes, block_bytes: int, max_blocks: int, memory: mmap.mmap, descriptor: int | None) -> None:
        """The memory has room for all blocks, and is zero; a descriptor is what another process shares it by."""
        self.id = id
        self.block_bytes = block_bytes
        self.max_blocks = max_blocks
        self.memory = memory
        self.descriptor = descriptor
        self.names: list[bytes] = []
        self.whole = 0
        self.claimed = False
        self.lapses_s = float("inf")
        self.on_release: Callable[[StagedPrefix], None] | None = None
        self.purges = 0  # of its area, when it began to come
        self._touched = 0

    @property
    def memory_bytes(self) -> int:
        return len(self.memory)

    def view(self, first: int, count: int) -> memoryview:
        """The memory of blocks first … first+count−1, to be let go before `release`."""
        self._touched = max(self._touched, first + count)
        return memoryview(self.memory)[first * self.block_bytes : (first + count) * self.block_bytes]

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

    def erase(self) -> None:
        """Zeroes whatever was written."""
        with memoryview(self.memory)[: self._touched * self.block_bytes] as written:
            for at in range(0, len(written), len(_ZEROS)):
                with written[at : at + len(_ZEROS)] as piece:
                    piece[:] = _ZEROS[: len(piece)]

    def close(self) -> None:
        """Gives the memory back; all views are gone."""
        self.memory.close()
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class StagingArea:
    """All handovers that one replica receives. Threads may use it.

    counters    of handovers: staged, claimed, lapsed, and claims that found nothing (unknown) or blocks of something
                else (foreign); of blocks: corrupt_blocks, whose checksums differ, and the claimed_blocks.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float], shares_memory: bool = SHARES_MEMORY) -> None:
        self.max_bytes = max_bytes
        self.counters: Counter[str] = Counter()
        self.shares_memory = shares_memory
        self._clock = clock
        self._purges = 0
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
        """Bytes of the handovers that are held."""
        return sum(staged.memory_bytes for staged in list(self._held.values()))

    def open(self, id: bytes, block_bytes: int, blocks: int, shared: bool) -> StagedPrefix:
        """Memory for a handover that begins. Raises StagingRefused."""
        size = block_bytes * blocks
        with self._lock:
            if id in self._held:
                raise StagingRefused(HandoverFault.INVALID, "a handover of this id is held already")
            if len(self._held) >= HANDOVERS_MAX or self.held_bytes + size > self.max_bytes:
                raise StagingRefused(
                    HandoverFault.FULL,
                    f"{size} bytes more than {self.held_bytes} of {len(self._held)} handovers are over the limits of "
                    f"handover_bytes, {self.max_bytes}, and of {HANDOVERS_MAX} handovers",
                )
            try:
                memory, descriptor = self._memory(size, shared and self.shares_memory)
            except OSError as error:
                raise StagingRefused(HandoverFault.FULL, f"the host gives no memory: {error}") from error
            self._held[id] = staged = StagedPrefix(id, block_bytes, blocks, memory, descriptor)
            staged.on_release, staged.purges = self._drop, self._purges
            return staged

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
            if staged is None or staged.claimed or not self._sealed(staged) or staged.lapses_s <= self._clock():
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
                if self._sealed(staged):
                    staged.lapses_s = self._clock()

    def count_corrupt(self, blocks: int) -> None:
        """Counts blocks that have other checksums, and those behind them in their run."""
        with self._lock:
            self.counters["corrupt_blocks"] += blocks

    def sweep(self) -> list[bytes]:
        """Lets go of those whose lease is over, and returns their ids. What still comes is its connection's."""
        now = self._clock()
        with self._lock:
            lapsed = [staged for staged in self._held.values() if self._sealed(staged) and staged.lapses_s <= now]
        for staged in lapsed:
            self.counters["lapsed"] += 1
            staged.whole = 0
            staged.release()
        return [staged.id for staged in lapsed]

    def check(self) -> None:
        """Raises AssertionError where what is held is not what is counted."""
        with self._lock:
            assert self._bytes == self.held_bytes + sum(map(len, self._spare)) <= self.max_bytes
            assert not any(any(memory[:]) for memory in self._spare), "what was let go is not erased"
            assert all(staged.whole <= len(staged.names) <= staged.max_blocks for staged in self._held.values())

    def _sealed(self, staged: StagedPrefix) -> bool:
        return staged.lapses_s < float("inf")

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
        staged.erase()
        with self._lock:
            del self._held[staged.id]
            if staged.descriptor is None:
                self._spare.append(staged.memory)
            else:
                self._bytes -= staged.memory_bytes
                staged.close()


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
