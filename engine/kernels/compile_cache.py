"""Compiled kernels beside the model that uses them: what Triton's cache lacks is brought from there, and what a model
uses of it is kept there. Then a model that was prepared elsewhere compiles nothing here.

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

_GROUP: Final = "__grp__"  # begins the names of files that tell where the others of an entry are
_ENTRIES_MAX: Final = 1024  # beside one model, some 100 MB; an upgrade leaves its predecessors' behind


def name_kernels() -> None:
    """Works out all kernels' names in the cache, before any is used: half a second, which forks of this process save.

    Always in one order, because what Triton calls a function depends on which of those that it calls have names: found
    as they come to be used, some would have others when another kernel is first.
    """
    triton_key()
    for found in sorted(pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."), key=lambda found: found.name):
        for kernel in vars(importlib.import_module(found.name)).values():
            if isinstance(kernel, JITFunction):
                _ = kernel.cache_key


def share_kernel_cache(folder: Path) -> None:
    """From now on, for all kernels that this process uses. Whatever cannot be read or written there is done without."""
    name_kernels()
    _forget_oldest(folder)
    # Triton makes an object of this for each entry, with the entry's name.
    triton.knobs.cache.manager_class = type("Beside", (_ModelCacheManager,), {"beside": folder})


class _ModelCacheManager(FileCacheManager):  # type: ignore[misc]  # Triton has no types
    beside: Path

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override, dump)
        self._entry = None if override or dump else Path(self.cache_dir)
        if self._entry is not None and not any(self._entry.iterdir()):
            _copy(self.beside / key, self._entry)

    def get_file(self, filename: str) -> str | None:
        found: str | None = super().get_file(filename)
        self._keep(found)
        return found

    def get_group(self, filename: str) -> dict[str, str] | None:
        found: dict[str, str] | None = super().get_group(filename)
        self._keep(found)
        return found

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        path: str = super().put_group(filename, group)
        self._keep(path)
        return path

    def _keep(self, found: Any) -> None:
        """An entry that is used is whole."""
        if found and self._entry is not None and not (self.beside / self.key).exists():
            _copy(self._entry, self.beside / self.key)


def _forget_oldest(folder: Path) -> None:
    """Leaves at most _ENTRIES_MOST beside a model."""
    try:
        entries = sorted(folder.iterdir(), key=lambda entry: entry.stat().st_mtime)
    except OSError:
        return
    for entry in entries[:-_ENTRIES_MAX]:
        shutil.rmtree(entry, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    """A whole entry or none: where two processes do it at once, the first to be done has done it."""
    if not source.is_dir():
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".copying-") as scratch:
            made = Path(scratch) / target.name
            made.mkdir()
            for file in source.iterdir():
                if file.is_file() and file.name != "lock":
                    (made / file.name).write_bytes(_moved(file, target))
            os.replace(made, target)  # where the target is a folder, it must be empty
    except (OSError, ValueError, KeyError, AttributeError) as error:
        log.info("a compiled kernel was not copied to %s: %s", target, error)


def _moved(file: Path, target: Path) -> bytes:
    """The file's content; where it tells paths, those of the copy."""
    content = file.read_bytes()
    if not file.name.startswith(_GROUP):
        return content
    names = json.loads(content)["child_paths"]
    return json.dumps({"child_paths": {name: str(target / Path(path).name) for name, path in names.items()}}).encode()
