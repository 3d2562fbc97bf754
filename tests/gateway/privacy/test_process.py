"""Processes that overwrite what they free, and leave no core file."""

import os
import resource
import subprocess
import sys

import pytest

from gateway.privacy import process
from gateway.settings.config import SettingsError

PROGRAM = """
import ctypes, os, resource, subprocess, sys
from gateway.privacy.process import scrub_memory
print("begins", sys.argv[1:], sys.flags.safe_path, flush=True)
scrub_memory()
print(resource.getrlimit(resource.RLIMIT_CORE))
freed = bytearray(os.urandom(5000))
at = ctypes.addressof(ctypes.c_char.from_buffer(freed))
before = ctypes.string_at(at + 2000, 1000)
del freed
print(ctypes.string_at(at + 2000, 1000) == b"\\xff" * 1000)
looks = [sys.executable, "-c", "from gateway.privacy.process import _overwrites; print(_overwrites())"]
print(subprocess.run(looks, capture_output=True, text=True).stdout)
"""


def test_a_process_begins_again_with_the_same_words_and_overwrites_what_it_frees() -> None:
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, "a b", "c"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    begins = "begins ['a b', 'c'] True"
    assert done.stdout.split("\n") == [begins, begins, "(1, 1)", "True", "True", "", ""]


def test_a_system_that_cannot_do_it_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here: this process did not begin so, whatever its environment says."""
    before = resource.getrlimit(resource.RLIMIT_CORE)
    monkeypatch.setenv("PYTHONMALLOC", "malloc")
    monkeypatch.setenv("GLIBC_TUNABLES", process._OVERWRITING)
    monkeypatch.setattr(process, "_overwrites", lambda: False)
    with pytest.raises(SettingsError, match="glibc"):
        process.scrub_memory()
    assert resource.getrlimit(resource.RLIMIT_CORE) == before
