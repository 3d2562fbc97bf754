"""How the C library keeps memory: in one arena, large blocks apart from it where it is told to, and what is free there
goes back to the system when it is told to. It does not know what the memory is for.

glibc gives threads that allocate arenas of their own, each of which grows to the most that its thread ever held, and
keeps it: in processes that serve for months, whose few threads take turns, that is memory nobody uses.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

MAPPED_BYTES: Final = 240 << 10  # a kernel that oneDNN compiles has 252 KiB
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_HEAP_BYTES_MAX: Final = 32 << 20  # glibc takes no higher threshold
_TOP_BYTES: Final = 64 << 20  # free at the heap's end: what a step frees is what the next one takes
_FIRST_MAPPED_BYTES: Final = 128 << 10  # as glibc itself begins
_REQUESTS_TOP_BYTES: Final = 1 << 20


def keep_one_arena() -> None:
    """Lets later threads of this process, and its forks, allocate where the first one does; only glibc has arenas."""
    with suppress(AttributeError):  # of another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def map_large_blocks() -> None:
    """Gives each later block of MAPPED_BYTES and more pages of its own, which go back to the system when it is freed.

    By itself glibc puts blocks of up to 32 MB into the heap once one of that size was freed. Compiled kernels, which
    stay a while, then leave holes between smaller blocks that stay for longer, and the heap grows as if they leaked.
    """
    _set_thresholds(MAPPED_BYTES, _TOP_BYTES)


def keep_first_thresholds() -> None:
    """Gives each later block of 128 KiB and more pages of its own, and returns the heap's end where 1 MiB is free.

    So glibc begins, but with each larger block that is freed it raises both. For a process that takes large buffers now
    and then: encoding a prompt of 9,000 words takes some 5 MB, by which its heap would be larger from then on. Mapping
    them anew makes that a tenth slower.
    """
    _set_thresholds(_FIRST_MAPPED_BYTES, _REQUESTS_TOP_BYTES)


@contextmanager
def large_blocks_in_heap() -> Iterator[None]:
    """Undoes `map_large_blocks` for what is allocated within it and stays: only the heap has large pages for blocks
    that are smaller than these (engine/hostinfo/cpu.py: paging_environment)."""
    _set_thresholds(_HEAP_BYTES_MAX, _TOP_BYTES)
    try:
        yield
    finally:
        map_large_blocks()


def _set_thresholds(mapped_bytes: int, top_bytes: int) -> None:
    with suppress(AttributeError):  # of another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, mapped_bytes)
        mallopt(_M_TRIM_THRESHOLD, top_bytes)


def trim_heap() -> None:
    """Returns all whole pages that are free, wherever they lie; by itself glibc returns those at the heap's end alone.
    Costs some 1 to 20 ms."""
    with suppress(AttributeError):  # of another C library
        ctypes.CDLL(None).malloc_trim(0)
