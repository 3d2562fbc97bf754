"""Makes this process, and all that it starts, overwrite the memory that it frees, and crash without a core file.

glibc and Python decide this in a process's first moment, so the process begins again. It does not know what was in the
memory.
"""

import ctypes
import os
import resource
import secrets
import sys
from typing import Final

from gateway.settings.config import SettingsError

_TUNABLES: Final = "GLIBC_TUNABLES"
# glibc then fills what is freed with 0xff, and what is given out with zeros. What its caches of each thread take back
# it does not fill, so there are none; and Python's own allocator, which never does, is left out.
_OVERWRITING: Final = "glibc.malloc.perturb=255:glibc.malloc.tcache_count=0"
_CORE_BYTES: Final = 1  # no file is that small, and where cores go to a program, the kernel takes 1 for none


def scrub_memory() -> None:
    """Returns once this process scrubs; where it did not, it begins again, with the same command line.

    Raises SettingsError where the system cannot do it.
    """
    existing = os.environ.get(_TUNABLES, "")
    if _OVERWRITING not in existing or os.environ.get("PYTHONMALLOC") != "malloc":
        tunables = f"{existing}:{_OVERWRITING}" if existing else _OVERWRITING
        environment = {**os.environ, "PYTHONMALLOC": "malloc", _TUNABLES: tunables}
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    if not _overwrites():
        raise SettingsError("server.scrub_memory needs Linux with glibc: leave it out, or serve from such a system")
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CORE)
    limit = _CORE_BYTES if hard_limit == resource.RLIM_INFINITY else min(_CORE_BYTES, hard_limit)
    resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))


def _overwrites() -> bool:
    """Whether freed memory is overwritten: frees some bytes and reads them again."""
    freed = secrets.token_bytes(64)
    middle = id(freed) + sys.getsizeof(b"") + 16
    before = ctypes.string_at(middle, 16)
    del freed
    return before != ctypes.string_at(middle, 16)
