"""Makes a Python process of Hearth run as if it were on a Mac: what only Linux has is gone, and product code that asks
for the system is told `darwin`. Python takes this file in at its start, in children as well.

Other people's libraries go on as they are: they are built for this system.
"""

import fcntl
import importlib.machinery
import mmap
import os
import sys
from importlib.abc import MetaPathFinder
from typing import Any

PRODUCT = ("engine", "gateway", "prefixcache", "tenants")

for module, names in (
    (
        os,
        ("sched_getaffinity", "sched_setaffinity", "memfd_create", "eventfd", "posix_fadvise", "waitid", "pidfd_open"),
    ),
    (mmap, ("MADV_HUGEPAGE", "MAP_POPULATE")),
    (fcntl, ("F_SETPIPE_SZ", "F_GETPIPE_SZ")),
):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
sys.modules["triton"] = None  # type: ignore[assignment]


class DarwinLoader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        source = self.get_source(fullname) or ""
        told = source.replace("sys.platform", "'darwin'").replace('"/proc', '"/there/is/no/proc')
        return compile(told, self.get_filename(fullname), "exec", dont_inherit=True)


class DarwinFinder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.split(".")[0] not in PRODUCT:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = DarwinLoader(spec.loader.name, spec.loader.path)
        return spec


sys.meta_path.insert(0, DarwinFinder())
