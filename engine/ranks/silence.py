"""How long a rank has been silent: without progress, while rank 0 looks at it.

A time in which rank 0 itself did not look is not counted. Nor is one in which the rank computed or waited for a core,
up to a limit: a rank that is frozen does neither, and a busy host is no sign of one. It ends nobody.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

_LOOKS_APART_S: Final = 0.25  # what lies between two looks counts at most so much


def active_s(pid: int) -> float:
    """For how long the threads of a process have been on a core or waited for one, in all, those that ended left out; 0
    where the kernel does not tell."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError, ValueError):  # it has ended
            running_ns, waiting_ns, _ = task.read_text().split()
            total_ns += int(running_ns) + int(waiting_ns)
    return total_ns / 1e9


class Silence:
    """The silence of one rank, to be told of its progress again and again."""

    def __init__(self, now: float, active: Callable[[], float]) -> None:
        """`active` is active_s of the rank."""
        self._active = active
        self._looked = now
        self._progress: bytes | None = None
        self._silent_s = self._excused_s = self._active_before_s = 0.0

    def look(self, now: float, progress: bytes, excused_s: float) -> float:
        """Its seconds until now, where `progress` is all that the rank has done: without those in which it was active,
        of which so many are excused. Costs a read of a file where it is silent."""
        apart_s, self._looked = min(now - self._looked, _LOOKS_APART_S), now
        if progress != self._progress:
            self._progress, self._silent_s, self._excused_s = progress, 0.0, 0.0
            self._active_before_s = self._active()
            return 0.0
        active_s = self._active()
        self._silent_s += apart_s
        self._excused_s += min(apart_s, max(0.0, active_s - self._active_before_s))  # several threads are one rank
        self._active_before_s = active_s
        return self._silent_s - min(self._excused_s, excused_s)

    def rest(self, now: float) -> None:
        """Begins anew: nobody waits for the rank."""
        self._looked, self._progress = now, None
