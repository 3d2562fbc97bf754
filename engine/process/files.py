"""Files that other processes see whole or not at all. It knows no formats."""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

_DEPTH: Final = 4  # of folders that are looked into


def replace_file(path: Path, content: bytes) -> None:
    """Writes `content` beside `path`, readable by this user alone, and moves it there once it is on the disk.

    The folder exists. Raises OSError; then `path` is as it was, and nothing is left beside it.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as unfinished:
        try:
            unfinished.write(content)
            unfinished.flush()
            os.fsync(unfinished.fileno())
            os.replace(unfinished.name, path)
        except BaseException:
            os.unlink(unfinished.name)
            raise


def file_stamp(path: str | os.PathLike[str]) -> tuple[int, int, int] | None:
    """Values that change when a file is written or replaced; None for a missing file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def fingerprint(paths: Iterable[str | os.PathLike[str]]) -> str:
    """A text that differs once one of these files was written, came or went, or below one of these folders another
    folder or a TOML file did. What is hidden does not count."""
    found = sorted(found for path in paths for found in _look(os.fspath(path), 0))
    return hashlib.sha256(repr(found).encode("utf-8", "surrogateescape")).hexdigest()


def _look(path: str, depth: int) -> Iterator[tuple[str, int, int, int]]:
    with contextlib.suppress(OSError):  # it is not there, or goes just now: then it is not in the text either
        status = os.stat(path)
        yield path, status.st_ino, status.st_mtime_ns, status.st_size
        if os.path.isdir(path) and depth < _DEPTH:
            with os.scandir(path) as entries:
                for entry in entries:
                    if not entry.name.startswith(".") and (entry.is_dir() or entry.name.endswith(".toml")):
                        yield from _look(entry.path, depth + 1)
