"""Compiled kernels beside the model that uses them: entries that Triton's cache lacks come from there, and entries
that a model uses go there. Then a model that was prepared elsewhere compiles nothing here.

Each entry of the cache is a folder of small files, named by everything that they depend on.
"""

import importlib
import json
import logging
import os
import pkgutil
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import triton
from triton.runtime.cache import FileCacheManager, triton_key
from triton.runtime.jit import JITFunction

from engine import kernels

log = logging.getLogger(__name__)

_GROUP: Final = "__grp__"  # prefix of the files that list the paths of an entry's other files
_ENTRIES_MAX: Final = 1024  # beside one model, some 100 MB; upgrades leave older entries behind


def name_kernels() -> None:
    """Computes all kernels' names in the cache, before any is used: half a second, which forks of this process save.

    The order is fixed, because Triton's name of a function depends on which of the functions that it calls have names
    already: in the order of use, some names would depend on which kernel comes first.
    """
    triton_key()
    for name in sorted(module.name for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")):
        for kernel in vars(importlib.import_module(name)).values():
            if isinstance(kernel, JITFunction):
                _ = kernel.cache_key


def share_kernel_cache(folder: Path) -> None:
    """Shares the cache with `folder` from now on, for all kernels of this process. Files that cannot be read or written
    there are skipped."""
    name_kernels()
    _remove_oldest(folder)
    # Triton makes an instance for each entry, with the entry's name.
    triton.knobs.cache.manager_class = type("Beside", (_ModelCacheManager,), {"beside": folder})


class _ModelCacheManager(FileCacheManager):  # type: ignore[misc]  # Triton has no types
    beside: Path

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override, dump)
        self._entry = None if override or dump else Path(self.cache_dir)
        if self._entry is not None and not any(self._entry.iterdir()):
            _copy(self.beside / key, self._entry)

    def get_file(self, filename: str) -> str | None:
        path: str | None = super().get_file(filename)
        self._keep(path)
        return path

    def get_group(self, filename: str) -> dict[str, str] | None:
        group: dict[str, str] | None = super().get_group(filename)
        self._keep(group)
        return group

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        path: str = super().put_group(filename, group)
        self._keep(path)
        return path

    def _keep(self, content: Any) -> None:
        """Copies the entry beside the model once something of it is used: it is complete by then."""
        if content and self._entry is not None and not (self.beside / self.key).exists():
            _copy(self._entry, self.beside / self.key)


def _remove_oldest(folder: Path) -> None:
    """Removes the oldest entries beyond _ENTRIES_MAX."""
    try:
        entries = sorted(folder.iterdir(), key=lambda entry: entry.stat().st_mtime)
    except OSError:
        return
    for entry in entries[:-_ENTRIES_MAX]:
        shutil.rmtree(entry, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    """Copies a whole entry or none; of two processes that do it at once, the first one to finish wins."""
    if not source.is_dir():
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".copying-") as scratch:
            copy = Path(scratch) / target.name
            copy.mkdir()
            for file in source.iterdir():
                if file.is_file() and file.name != "lock":
                    (copy / file.name).write_bytes(_relocated(file, target))
            os.replace(copy, target)  # where the target is a folder, it must be empty
    except (OSError, ValueError, KeyError, AttributeError) as error:
        if not target.is_dir():  # nobody else has copied it meanwhile, as another rank does
            log.info("a compiled kernel was not copied to %s: %s", target, error)


def _relocated(file: Path, target: Path) -> bytes:
    """The file's content; paths in it are those of the copy."""
    content = file.read_bytes()
    if not file.name.startswith(_GROUP):
        return content
    names = json.loads(content)["child_paths"]
    return json.dumps({"child_paths": {name: str(target / Path(path).name) for name, path in names.items()}}).encode()
