"""gateway/commands/gateway.py: its process's heap, which a long prompt's buffers may not leave larger."""

import subprocess
import sys

import pytest

HEAP = """
import ctypes, sys
from gateway import cli
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
library.free(library.malloc(2_000_000))  # from now on glibc puts less than that into the heap
status = cli.main([sys.argv[1], "--config", "nowhere.toml"])  # ends before it serves
assert status == 1, status
before = resident()
buffers = []
for _ in range(10):
    buffers.append(library.malloc(720_000))
    ctypes.memset(buffers[-1], 1, 720_000)
    library.malloc(20_000)  # stays
for buffer in buffers:
    library.free(buffer)
print(resident() - before)
"""


def heap_growth(command: str) -> int:
    """Bytes, in a process that has run this command."""
    run = subprocess.run([sys.executable, "-c", HEAP, command], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has such a heap")
def test_buffers_of_a_long_prompt_do_not_stay_in_a_gateways_heap() -> None:
    assert heap_growth("gateway") < 1_000_000
    assert heap_growth("machine") > 5_000_000, "the control: another command leaves glibc as it is"
