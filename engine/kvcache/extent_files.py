"""Encrypted files on disk for blocks of a SlotTier: one file for each extent of so many places.

    place   AES-256-GCM of the block, its tag, and what fills it up to ALIGN bytes; a nonce is used once
    file    nameless from the moment it is open: the system takes it back with its process, however that ends

The key and each place's nonce are in this process alone: a file that was stolen, or put back as it was before, opens
nothing, and what was changed is noticed. The name of a block is authenticated with it. Reads and writes go past the
page cache where the file system lets them. The module knows neither tenants nor why a block is moved.
"""

import errno
import mmap
import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from engine.log import log
from engine.step.executor import CopyOutcome, FileCopy

ALIGN: Final = 4096  # bytes, of what a disk reads and writes at once
TAG_BYTES: Final = 16
NONCE_BYTES: Final = 12
EXTENT_BYTES: Final = 64 << 20
SUFFIX: Final = ".kv-extent"
_READERS: Final = 4  # threads
_BELL_BYTES: Final = 4096


class ExtentFiles:
    """A BlockFiles in a folder. Whatever the disk answers, no call raises: `error` says why there are no files."""

    def __init__(self, folder: Path, block_bytes: int, max_bytes: int, memory: Callable[[int], memoryview]) -> None:
        """`memory` is that of a slot, block_bytes long. Removes files that a start before this one left."""
        self.error = ""
        self.place_bytes = -(-(block_bytes + TAG_BYTES) // ALIGN) * ALIGN
        self.extent_places = max(1, EXTENT_BYTES // self.place_bytes)
        self.max_extents = max_bytes // (self.extent_places * self.place_bytes)
        self.direct = True
        self._folder = folder
        self._block_bytes = block_bytes
        self._memory = memory
        self._cipher = AESGCM(secrets.token_bytes(32))
        self._nonces: dict[int, bytes] = {}  # of what was written to each place last
        self._written = 0
        self._files: list[int] = []
        self._growing = False
        self._buffers = threading.local()
        self._done: deque[FileCopy] = deque()
        self._bell, self._bell_writer = socket.socketpair()
        self._bell.setblocking(False)
        self.fileno = self._bell.fileno  # as in BlockFiles
        self._bell_writer.setblocking(False)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv-write")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="kv-read")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in folder.glob(f"*{SUFFIX}"):
                left.unlink(missing_ok=True)
        except OSError as error:
            self._fail(error)

    @property
    def places(self) -> int:
        return len(self._files) * self.extent_places

    @property
    def max_places(self) -> int:
        return self.max_extents * self.extent_places

    def grow(self) -> None:
        """As in BlockFiles: an extent more, whose bytes the file system has set aside."""
        if not self._growing and not self.error and len(self._files) < self.max_extents:
            self._growing = True
            self._writer.submit(self._grow)

    def write(self, copy: FileCopy) -> None:
        """As in BlockFiles."""
        self._writer.submit(self._run, self._write, copy)

    def read(self, copy: FileCopy) -> None:
        """As in BlockFiles."""
        self._readers.submit(self._run, self._read, copy)

    def erase(self, places: Items[int]) -> None:
        """As in BlockFiles."""
        self._writer.submit(self._erase, list(places))

    def take_done(self) -> list[FileCopy]:
        """As in BlockFiles."""
        with suppress(BlockingIOError):
            while self._bell.recv(_BELL_BYTES):
                pass
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        """Ends the threads and gives the disk back. It may be called again."""
        self._writer.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)
        while self._files:
            os.close(self._files.pop())
        self._bell.close()
        self._bell_writer.close()

    # In threads

    def _run(self, way: Callable[[FileCopy], CopyOutcome], copy: FileCopy) -> None:
        try:
            if not self.error:
                copy.outcome = way(copy)
        except Exception as error:  # a bug too ends the files, and leaves nobody waiting
            self._fail(error)
        self._done.append(copy)
        self._ring()

    def _write(self, copy: FileCopy) -> CopyOutcome:
        buffer, end = self._buffer(), self._block_bytes + TAG_BYTES
        self._written += 1
        nonce = self._written.to_bytes(NONCE_BYTES, "big")
        self._cipher.encrypt_into(nonce, self._memory(copy.slot), copy.name, memoryview(buffer)[:end])
        self._nonces[copy.place] = nonce
        self._put(buffer, copy.place)
        return CopyOutcome.DONE

    def _read(self, copy: FileCopy) -> CopyOutcome:
        buffer, end = self._buffer(), self._block_bytes + TAG_BYTES
        nonce = self._nonces[copy.place]
        if os.preadv(*self._at(copy.place, buffer)) != self.place_bytes:
            return CopyOutcome.CORRUPT
        try:
            self._cipher.decrypt_into(nonce, memoryview(buffer)[:end], copy.name, self._memory(copy.slot))
        except InvalidTag:
            return CopyOutcome.CORRUPT
        return CopyOutcome.DONE

    def _erase(self, places: list[int]) -> None:
        try:
            for place in places:
                if not self.error:
                    self._put(mmap.mmap(-1, self.place_bytes), place)
        except OSError as error:
            self._fail(error)
            self._ring()

    def _grow(self) -> None:
        try:
            size = self.extent_places * self.place_bytes
            file = self._open()
            try:
                os.posix_fallocate(file, 0, size)
            except OSError:
                os.close(file)
                raise
            self._files.append(file)
        except OSError as error:
            self._fail(error)
        self._growing = False
        self._ring()

    def _open(self) -> int:
        """A new file without a name."""
        path = self._folder / f"{secrets.token_hex(8)}{SUFFIX}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            file = os.open(path, flags | (getattr(os, "O_DIRECT", 0) if self.direct else 0), 0o600)
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno != errno.EINVAL or not self.direct:
                raise
            self.direct = False
            log("disk_tier_buffered", level="warning", folder=str(self._folder), error=str(error))
            file = os.open(path, flags, 0o600)
        path.unlink()
        return file

    def _put(self, buffer: mmap.mmap, place: int) -> None:
        if (count := os.pwritev(*self._at(place, buffer))) != self.place_bytes:
            raise OSError(errno.EIO, f"{count} of {self.place_bytes} bytes were written")

    def _at(self, place: int, buffer: mmap.mmap) -> tuple[int, list[mmap.mmap], int]:
        extent, index = divmod(place, self.extent_places)
        return self._files[extent], [buffer], index * self.place_bytes

    def _buffer(self) -> mmap.mmap:
        """The thread's own, which begins at a page, as direct reads and writes have to."""
        if not hasattr(self._buffers, "memory"):
            self._buffers.memory = mmap.mmap(-1, self.place_bytes)
        memory: mmap.mmap = self._buffers.memory
        return memory

    def _fail(self, error: Exception) -> None:
        """Ends the use of the files; what they hold goes with the process, or with `close`."""
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        self.error = self.error or f"{'disk_full' if full else 'disk_failed'}: {error!s}"

    def _ring(self) -> None:
        with suppress(OSError):  # full: it is readable anyway; closed: nobody listens
            self._bell_writer.send(b"!")
