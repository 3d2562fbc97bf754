"""A replica's heartbeat in eight mapped bytes, so that its agent sees a hang without asking it anything.

It knows neither what a step is nor how long one may take: the limits are the agent's.

    63      56 55                                    0
    | phase   |  beats, counted up, wraps            |
"""

import enum
import mmap
import os
from typing import Self

_BEATS = (1 << 56) - 1


class ReplicaPhase(enum.IntEnum):
    """The work of a process. In IDLE and STEP it beats at least once a second; else it may be silent longer."""

    STARTING = 0  # importing; what a new file says
    LOADING = 1  # weights on their way; a beat per tensor
    COMPILING = 2  # kernels or graphs
    IDLE = 3  # waiting on sockets; a beat per wake-up
    STEP = 4  # computing; a beat per layer
    STOPPING = 5  # draining or closing


class Heartbeat:
    """One writer, any readers, no locks: the word is stored in one piece. Open until `close`."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        self._words = memoryview(mapped).cast("Q")

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Self:
        """Makes or resets the file, in phase STARTING with no beats. Never truncates: a reader may have it mapped."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(file, bytes(8), 0)
        finally:
            os.close(file)
        return cls.open(path)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Maps a file that exists already. Raises FileNotFoundError, or ValueError where it is no heartbeat."""
        with open(path, "r+b") as file:
            return cls(mmap.mmap(file.fileno(), 8))

    def beat(self) -> None:
        """Counts one beat. About 0.1 µs: call it as often as you like."""
        word = self._words[0]
        self._words[0] = (word & ~_BEATS) | ((word + 1) & _BEATS)

    def enter(self, phase: ReplicaPhase) -> None:
        """Changes the phase, which is a beat as well."""
        self._words[0] = (int(phase) << 56) | ((self._words[0] + 1) & _BEATS)

    def read(self) -> tuple[ReplicaPhase, int]:
        """(phase, beats) as they are now."""
        word = self._words[0]
        return ReplicaPhase(word >> 56), word & _BEATS

    def close(self) -> None:
        """Unmaps the file, which stays. Idempotent."""
        self._words.release()
        self._mapped.close()
