"""How the C library keeps memory: in one arena, and what is free there goes back to the system when it is told. It does
not know what the memory is for.

glibc gives threads that allocate arenas of their own, each of which grows to the most that its thread ever held, and
keeps it: in processes that serve for months, whose few threads take turns, that is memory nobody uses.
"""

import ctypes
from contextlib import suppress
from typing import Final

_M_ARENA_MAX: Final = -8  # malloc.h


def keep_one_arena() -> None:
    """Lets later threads of this process, and its forks, allocate where the first one does; only glibc has arenas."""
    with suppress(AttributeError):  # of another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def trim_heap() -> None:
    """Returns all whole pages that are free, wherever they lie; by itself glibc returns those at the heap's end alone.
    Costs some 1 to 20 ms."""
    with suppress(AttributeError):  # of another C library
        ctypes.CDLL(None).malloc_trim(0)
