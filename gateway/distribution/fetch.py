"""One file from the first source that has it whole: what was there stays for the next try, and a file is there once it
has its sum. It knows no models and no network.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

from engine.log import log
from gateway.distribution.transfer import TransferError
from tenants.records.catalogue import CatalogueFile

SLOW_BYTES_S: Final = 64 << 10  # a source that gives less than this over SLOW_S is left for the next one
SLOW_S: Final = 20.0
FREE_BYTES: Final = 256 << 20  # that a file leaves on its disk
_READ_BYTES: Final = 4 << 20


class FileSource(Protocol):
    """Something that may have files; `name` is what people are told of it."""

    name: str

    def read(self, sha256: str, offset: int) -> Iterator[bytes]:
        """The file's bytes from `offset` on. Raises TransferError, also half-way."""


class FetchError(Exception):
    """No source gave the file; the message says what came of each."""


class NoRoom(FetchError):
    """The file does not fit on the disk."""


class FileFetcher:
    """Fetches into one folder, where `SUM.part` are files that are not whole. `advanced` is told of each piece that
    came, and may raise to stop; what came stays."""

    def __init__(
        self, folder: Path, advanced: Callable[[int], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._advanced = advanced
        self._clock = clock

    def fetch(self, file: CatalogueFile, sources: Sequence[FileSource]) -> Path:
        """The file's path below the folder, once it has its sum. Raises FetchError, and OSError of the disk."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        whole = self._folder / file.sha256
        if whole.exists():
            return whole
        problems = []
        for source in sources:
            try:
                self._read(file, source)
                os.replace(self._part(file), whole)
                return whole
            except TransferError as error:
                if str(error):
                    log("source_failed", level="warning", problem=str(error), file=file.name)
                problems.append(str(error))
        raise FetchError("; ".join(filter(None, problems)) or "no host has it")

    def bytes_of(self, file: CatalogueFile) -> int:
        """How much of the file is there."""
        for path in (self._folder / file.sha256, self._part(file)):
            if path.exists():
                return min(path.stat().st_size, file.bytes)
        return 0

    def _part(self, file: CatalogueFile) -> Path:
        return self._folder / f"{file.sha256}.part"

    def _read(self, file: CatalogueFile, source: FileSource) -> None:
        """Goes on with what is there. What turns out to be another file is thrown away, and read from the beginning
        where an earlier source may have given the wrong part. Raises TransferError, NoRoom, OSError."""
        for again in (True, False):
            part = self._part(file)
            begun = part.stat().st_size if part.exists() else 0
            self._require_room(file, begun)
            if self._sum_rest(file, source, begun) == file.sha256:
                return
            part.unlink()
            if not begun or not again:
                raise TransferError(f"{source.name} gave {file.name} damaged")

    def _sum_rest(self, file: CatalogueFile, source: FileSource, begun: int) -> str:
        digest = hashlib.sha256()
        with self._part(file).open("a+b", buffering=0) as part:
            part.seek(0)
            while piece := part.read(_READ_BYTES):
                digest.update(piece)
            since, since_bytes, size = self._clock(), begun, begun
            for piece in source.read(file.sha256, begun) if begun < file.bytes else ():
                size += len(piece)
                if size > file.bytes:
                    part.truncate(0)
                    raise TransferError(f"{source.name} gave more of {file.name} than it has")
                part.write(piece)
                digest.update(piece)
                self._advanced(len(piece))
                if (now := self._clock()) >= since + SLOW_S:
                    if size - since_bytes < SLOW_BYTES_S * (now - since):
                        raise TransferError(f"{source.name} is slow: {(size - since_bytes) / (now - since):.0f} B/s")
                    since, since_bytes = now, size
            os.fsync(part.fileno())
        if size < file.bytes:
            raise TransferError(f"{source.name} gave {size} of {file.bytes} bytes of {file.name}")
        return digest.hexdigest()

    def _require_room(self, file: CatalogueFile, begun: int) -> None:
        free, lacking = shutil.disk_usage(self._folder).free, file.bytes - begun
        if lacking + FREE_BYTES > free:
            raise NoRoom(f"{self._folder} has {free >> 20} MiB free, and {file.name} needs {lacking >> 20} MiB more")
