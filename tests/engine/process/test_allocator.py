import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys, threading
from engine.process.allocator import keep_one_arena
if sys.argv[1] == "one":
    keep_one_arena()
barrier = threading.Barrier(4)
def work():
    kept = [bytes(20_000) for _ in range(10)]
    barrier.wait(10)
threads = [threading.Thread(target=work) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
ctypes.CDLL(None).malloc_stats()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has arenas")
def test_threads_share_one_arena() -> None:
    arenas = {}
    for case in ("one", "many"):
        command = [sys.executable, "-c", PROGRAM, case]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        arenas[case] = run.stderr.count("Arena ")
    assert arenas["one"] == 1
    assert arenas["many"] > 1, "a C library whose threads share one arena anyway does not try this"


HOLES = """
import ctypes
from engine.process.allocator import keep_one_arena, trim_heap
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
keep_one_arena()
library = ctypes.CDLL(None)
library.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: all of it lies in the heap
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
freed, kept = [], []
for _ in range(100):
    freed.append(library.malloc(500_000))
    ctypes.memset(freed[-1], 1, 500_000)
    kept.append(library.malloc(100))
full = resident()
for address in freed:
    library.free(address)
holes = resident()
trim_heap()
print(full - holes, full - resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc keeps holes")
def test_holes_between_what_stays_go_back_to_the_system() -> None:
    run = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, timeout=60, check=True)
    by_itself, trimmed = map(int, run.stdout.split())
    assert by_itself < 10_000_000, "the control: a C library that returns them by itself does not try this"
    assert trimmed > 40_000_000


KERNELS = """
import contextlib, ctypes, sys
from engine.process.allocator import keep_one_arena, large_blocks_in_heap, map_large_blocks
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
keep_one_arena()
library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
library.free(library.malloc(30_000_000))  # from now on glibc puts less than that into the heap
if sys.argv[1] != "neither":
    map_large_blocks()
kernels = []
with large_blocks_in_heap() if sys.argv[1] == "undone" else contextlib.nullcontext():
    for _ in range(100):
        kernels.append(library.malloc(258_376))
        ctypes.memset(kernels[-1], 1, 258_376)
        library.malloc(2_000)  # stays
full = resident()
for kernel in kernels:
    library.free(kernel)
print(full - resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has such a heap")
def test_kernels_between_what_stays_leave_no_holes_where_large_blocks_are_mapped() -> None:
    returned = {}
    for case in ("mapped", "undone", "neither"):
        command = [sys.executable, "-c", KERNELS, case]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        returned[case] = int(run.stdout)
    assert returned["mapped"] > 20_000_000
    assert max(returned["neither"], returned["undone"]) < 5_000_000, "the control: the heap keeps them"


PROMPTS = """
import ctypes, sys
from engine.process.allocator import keep_first_thresholds, keep_one_arena
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
keep_one_arena()
if sys.argv[1] == "first":
    keep_first_thresholds()
library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
before = resident()
for _ in range(3):
    buffers = []
    for count in (1_400_000, 720_000, 720_000, 216_000, 216_000, 144_000):
        buffers.append(library.malloc(count))
        ctypes.memset(buffers[-1], 1, count)
        library.malloc(20_000)  # stays
    for buffer in buffers:
        library.free(buffer)
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc raises thresholds")
def test_buffers_of_a_long_prompt_leave_the_heap_as_it_was_where_thresholds_stay() -> None:
    grown = {}
    for case in ("first", "raised"):
        command = [sys.executable, "-c", PROMPTS, case]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        grown[case] = int(run.stdout)
    assert grown["first"] < 400_000
    assert grown["raised"] > 1_500_000, "the control: a C library that returns them by itself does not try this"
