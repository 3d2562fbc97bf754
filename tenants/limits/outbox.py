"""Settlements that the store could not take, as lines of append-only files in one folder. It does not know the store.

Each process appends to a file of its own, which it locks for as long as it lives; a file whose lock is free belongs to
nobody any more and is replayed by whoever finds it. append() returns when the lines are on the disk (fsync), so what it
took survives a killed process and a power cut. Replaying a line twice must do no harm, and does none.
"""

import fcntl
import os
import threading
import uuid
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from tenants.records.usage import UsageRecord

SUFFIX: Final = ".outbox"
DAMAGED: Final = ".damaged"

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(UsageRecord).decode


class Outbox:
    """One process's place in the folder. append() blocks for as long as the disk needs, and close() for one that runs:
    whoever waited for it may have been cancelled, its thread goes on, and needs its descriptor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()  # of the current file
        self._current_file: tuple[Path, int] | None = None

    def append(self, records: Sequence[UsageRecord]) -> None:
        """All of them on the disk, or OSError; then some may be, and the caller keeps them all."""
        lines = b"\n" + b"".join(_line(record) for record in records)  # the line break ends what a full disk cut off
        with self._lock:
            if self._current_file is None:
                self._current_file = self._create()
            descriptor = self._current_file[1]
            written = os.write(descriptor, lines)
            while written < len(lines):
                written += os.write(descriptor, lines[written:])
            os.fsync(descriptor)

    def waiting(self) -> list[Path]:
        """Files that this process may replay: its own and those of processes that ended."""
        if not self._folder.is_dir():
            return []
        return [path for path in sorted(self._folder.glob(f"*{SUFFIX}")) if self._is_current(path) or _abandoned(path)]

    def read(self, path: Path) -> tuple[list[UsageRecord], int]:
        """The file's records, and how many of its lines are damaged (a last line cut off by a crash is one)."""
        lines = [_parse(line) for line in path.read_bytes().split(b"\n") if line]
        records = [record for record in lines if record is not None]
        return records, len(lines) - len(records)

    def remove(self, path: Path, damaged: int) -> None:
        """The store has all its records. A file with damaged lines is kept beside the others under another suffix."""
        if damaged:
            path.rename(path.with_suffix(DAMAGED))
        else:
            path.unlink(missing_ok=True)
        if self._is_current(path):
            self.close()

    def close(self) -> None:
        with self._lock:
            if self._current_file is not None:
                os.close(self._current_file[1])
                self._current_file = None

    def _is_current(self, path: Path) -> bool:
        return self._current_file is not None and self._current_file[0] == path

    def _create(self) -> tuple[Path, int]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / f"{uuid.uuid4().hex}{SUFFIX}"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return path, descriptor


def _line(record: UsageRecord) -> bytes:
    body = _encode(record)
    return b"%08x %b\n" % (zlib.crc32(body), body)


def _parse(line: bytes) -> UsageRecord | None:
    checksum, _, body = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(body):
        return None
    try:
        return _decode(body)
    except msgspec.MsgspecError:
        return None


def _abandoned(path: Path) -> bool:
    """No living process holds the file's lock. One that this user may not open counts: read() says why."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except PermissionError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
