"""A folder's safetensors files while another folder is made of them: read in pieces by several threads, and checked to
be the same at the end. It knows no tensors.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from engine.weights.streaming import FilePiece, read_bytes, read_piece
from engine.weights.tensor_index import CheckpointError

Item = TypeVar("Item")
Result = TypeVar("Result")


class SourceFiles:
    """Files open for reading until the block ends."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files: dict[Path, int] = {}
        self._stamps: dict[Path, tuple[int, ...]] = {}
        with ExitStack() as closing:
            for path in paths:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                closing.callback(os.close, self._files[path])
                self._stamps[path] = _stamp(os.fstat(self._files[path]))
            self._closing = closing.pop_all()

    def read(self, path: Path, first: int, count: int) -> bytearray:
        """These bytes of the file. Raises CheckpointError."""
        memory = bytearray(count)
        read_bytes(self._files[path], path, first, memoryview(memory))
        return memory

    def read_piece(self, piece: FilePiece) -> bytearray:
        """A piece's bytes; its words are whole ones. Raises CheckpointError where they are not those that were
        written."""
        memory = bytearray(piece.bytes)
        read_piece(self._files[piece.path], piece, memoryview(memory))
        return memory

    def require_unchanged(self) -> None:
        """Raises CheckpointError where a file was written, replaced or removed since."""
        for path, stamp in self._stamps.items():
            try:
                now = _stamp(path.stat())
            except OSError as error:
                raise CheckpointError(f"{path} went away while it was read: {error.strerror}") from error
            if now != stamp or _stamp(os.fstat(self._files[path])) != stamp:
                raise CheckpointError(f"{path} was changed while it was read: run the command again")

    def __enter__(self) -> "SourceFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()


def map_ordered(
    pool: Executor, make: Callable[[Item], Result], items: Iterable[Item], prefetch: int
) -> Generator[Result]:
    """The results of `make` for each item, in order; `prefetch` of them are made ahead of the one that is taken."""
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(make, item))
            if len(waiting) > prefetch:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def _stamp(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
