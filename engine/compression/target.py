"""A folder that appears whole or not at all, and the files that go into it. It does not know what they hold.

It is written beside its place, under a name of its own, and locked while it is written. A process that was killed
leaves one without a lock, which the next process empties and takes over.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from engine.compression.report import format_bytes

PARTIAL_SUFFIX: Final = ".partial-hearth"
ARTIFACTS_FOLDER: Final = ".hearth"  # what a start compiled and measured, for that folder alone
_COPIED_BYTES: Final = 4 << 20
_LAST: Final = "config.json"  # what makes a folder a model


class TargetError(Exception):
    """The folder cannot be made; the message says why and what to do."""


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A new folder to write into, which becomes `target` when the block ends well and is removed when it does not. The
    block synchronises its files itself. Raises TargetError, also for what the block could not write."""
    require_absent(target)
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    lock = _locked(partial)
    try:
        _empty(partial)
        yield partial
        for folder, _, _ in os.walk(partial):
            fsync_folder(Path(folder))
        require_absent(target)
        partial.rename(target)
        fsync_folder(target.parent)
    except BaseException as error:
        with suppress(OSError):
            (partial / _LAST).unlink(missing_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None:  # of an open file, as writing raises it
            raise TargetError(f"{target} cannot be written: {error.strerror}; nothing is left of it") from error
        raise
    finally:
        os.close(lock)


def require_absent(target: Path) -> None:
    """Raises TargetError where there is something already, or no folder around it."""
    if os.path.lexists(target):
        raise TargetError(f"{target} exists: name a folder that does not, or remove it first")
    if not target.parent.is_dir():
        raise TargetError(f"{target} cannot be made: there is no folder {target.parent}")


def require_disk_space(target: Path, needed: int) -> None:
    """Raises TargetError where the disk has less."""
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise TargetError(
            f"{target} needs {format_bytes(needed)}, and {target.parent} has {format_bytes(free)} free: make room, "
            "or name a folder on another disk"
        )


def list_files(folder: Path) -> list[Path]:
    """All files below it, relative, except what starts have left there; config.json comes last. Links count as their
    targets. Raises TargetError where something is no file."""
    return sorted(sorted(_below(folder, Path(), ())), key=lambda name: name == Path(_LAST))


def copy_file(source: Path, target: Path, on_bytes: Callable[[int], object], sha256: str | None = None) -> None:
    """Copies and synchronises a file. Calls `on_bytes` with the size of each part. Raises TargetError where the sum is
    not `sha256`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with source.open("rb") as reading, target.open("xb") as writing:
        while piece := reading.read(_COPIED_BYTES):
            if sha256 is not None:
                digest.update(piece)
            writing.write(piece)
            on_bytes(len(piece))
        writing.flush()
        os.fsync(writing.fileno())
    if sha256 is not None and digest.hexdigest() != sha256:
        raise TargetError(f"{source} is not what the folder's sums say: get the file again")


def write_file(target: Path, content: bytes) -> None:
    """Writes and synchronises a new file."""
    with target.open("xb") as writing:
        writing.write(content)
        writing.flush()
        os.fsync(writing.fileno())


def fsync_folder(folder: Path) -> None:
    """Synchronises the names in the folder."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _locked(partial: Path) -> int:
    """Makes the folder where there is none, and locks it. Raises TargetError where another process has it."""
    while True:
        with suppress(FileExistsError):
            partial.mkdir()
        try:
            lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # its process has just ended
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), partial.stat()):
                return lock
        except BlockingIOError:
            os.close(lock)
            raise TargetError(f"another process writes {partial} now: wait for it, or end it") from None
        except FileNotFoundError:
            pass
        os.close(lock)  # another process renamed or removed it since


def _empty(folder: Path) -> None:
    """Removes what is in the folder, first what makes it a model: killed on the way, it is taken for none."""
    (folder / _LAST).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _below(folder: Path, below: Path, above: tuple[Path, ...]) -> Iterator[Path]:
    real = (folder / below).resolve()
    if real in above:
        raise TargetError(f"{folder / below} leads back to {real}: remove the link")
    for entry in os.scandir(folder / below):
        if entry.name == ARTIFACTS_FOLDER:
            continue
        if entry.is_dir():
            yield from _below(folder, below / entry.name, (*above, real))
        elif entry.is_file():
            yield below / entry.name
        else:
            raise TargetError(f"{entry.path} is no file, or a link to one that is gone: get it again, or remove it")
