"""Commands from rank 0 to its followers, numbered and with a digest each, through a ring of bytes in shared memory.

A follower looks for the next one for some 50 µs, then sleeps until an eventfd wakes it. It does no command.

    record   number | kind | bytes | digest | payload, in whole words; where one would reach over the end of the ring
             there is a word WRAP instead, and it lies at the start. It does so too once a ring that is large for the
             sake of few commands has no more to be read, so that its pages behind RING_BYTES stay untouched.
"""

import enum
import os
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from engine.memory.errors import OutOfDeviceMemory
from engine.ranks.board import RankBoard

RING_BYTES: Final = 16 << 20  # at least
_HEAD: Final = struct.Struct("<qqqq")
_WRAP: Final = struct.pack("<q", -1)
_SPIN_S: Final = 50e-6


class CommandKind(enum.IntEnum):
    """What followers are told to do."""

    OPEN = 1
    LAUNCH = 2
    ZERO = 3
    COPY = 4
    MAP = 5
    UNMAP = 6
    SLEEP = 7
    WAKE = 8
    CLOSE = 9
    CAPTURE = 10
    DROP = 11
    PREPARE = 12
    HEAD = 13
    PART = 16  # LAUNCH of a micro-batch behind which others of its step come
    TIER_GROW = 17
    TIER_SHRINK = 18
    TIER_ZERO = 19
    TIER_STORE = 20
    TIER_LOAD = 21
    TIER_JOIN = 22  # steps begin behind the oldest load that none began behind
    GATHER = 23
    SCATTER = 24


COMPUTES: Final = frozenset({CommandKind.LAUNCH, CommandKind.PART, CommandKind.HEAD})


@dataclass(frozen=True, slots=True)
class Command:
    number: int
    kind: CommandKind
    payload: bytes


class DamagedCommand(RuntimeError):
    """A follower read something else than rank 0 wrote, or missed a command."""


class CommandWriter:
    """Rank 0's side. `publish` returns the command's number."""

    def __init__(self, board: RankBoard, wakers: Sequence[int], usual_bytes: int = RING_BYTES) -> None:
        """`wakers` are the followers' eventfds; behind usual_bytes of the ring are large commands alone."""
        self._board = board
        self._wakers = wakers
        self._usual_bytes = usual_bytes
        self._position = 0

    def publish(self, kind: CommandKind, payload: bytes, wait: Callable[[Callable[[], bool]], None]) -> int:
        """Writes a command for all followers. Where the slowest has not read enough, `wait` waits until a condition
        holds. Costs some 10 µs, and a copy of the payload. Raises OutOfDeviceMemory for one that is larger than what
        the ring was made for; nothing is said then."""
        size = _record_bytes(len(payload))
        capacity = len(self._board.ring)
        if size > capacity // 2:
            raise OutOfDeviceMemory(f"a command of {len(payload)} bytes to ranks that take {capacity // 2}")
        first = self._place(size, capacity)
        if not self._has_room(first + size):
            wait(lambda: self._has_room(first + size))
        number = self._board.published + 1
        start = first % capacity
        if first != self._position:
            self._board.ring[self._position % capacity :][: len(_WRAP)] = _WRAP
        self._board.ring[start : start + _HEAD.size] = _HEAD.pack(
            number, kind, len(payload), _digest(number, kind, payload)
        )
        self._board.ring[start + _HEAD.size : start + _HEAD.size + len(payload)] = payload
        self._position = first + size
        self._board.published = number
        for waker in self._wakers:
            os.eventfd_write(waker, 1)
        return number

    def _place(self, size: int, capacity: int) -> int:
        """Where a record of this size begins: places count bytes, and go on over the ring's end."""
        start = self._position % capacity
        is_read = self._usual_bytes <= start >= size and self._slowest(self._position) == self._position
        return self._position - start + capacity if is_read or start + size > capacity else self._position

    def _has_room(self, end: int) -> bool:
        return end - self._slowest(end) <= len(self._board.ring)

    def _slowest(self, most: int) -> int:
        return int(self._board.positions_W[1:].min(initial=most))


class CommandReader:
    """One follower's side."""

    def __init__(self, board: RankBoard, rank: int, waker: int) -> None:
        self._board = board
        self._rank = rank
        self._waker = waker
        self._position = 0
        self._number = 0

    def next(self) -> Command:
        """Waits for the next command. Raises DamagedCommand."""
        self._number += 1
        self._await()
        capacity = len(self._board.ring)
        start = self._position % capacity
        if self._board.ring[start : start + len(_WRAP)] == _WRAP:
            self._position += capacity - start
            start = 0
        number, kind, length, digest = self._head(start)
        if number != self._number or not 0 <= length <= capacity - start - _HEAD.size:
            raise DamagedCommand(f"rank {self._rank} looked for command {self._number} and read {number}")
        body = bytes(self._board.ring[start + _HEAD.size : start + _HEAD.size + length])
        if digest != _digest(number, kind, body):
            raise DamagedCommand(f"rank {self._rank} read command {number} otherwise than it was written")
        self._position += _record_bytes(length)
        self._board.positions_W[self._rank] = self._position
        return Command(number, CommandKind(kind), body)

    def _await(self) -> None:
        until = time.perf_counter() + _SPIN_S
        while self._board.published < self._number:
            if time.perf_counter() > until:
                os.eventfd_read(self._waker)

    def _head(self, start: int) -> tuple[int, int, int, int]:
        return _HEAD.unpack(self._board.ring[start : start + _HEAD.size])


def ring_bytes(words: int) -> int:
    """The bytes of a ring for steps that may have so many words of block tables."""
    return RING_BYTES + 2 * _record_bytes(4 * words)


def _record_bytes(length: int) -> int:
    return _HEAD.size + -(-length // 8) * 8


def _digest(number: int, kind: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(struct.pack("<qq", number, kind)))
