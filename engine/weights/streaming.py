"""Bytes of files → tensors on a device: threads read into a ring of slabs, and the caller's thread sends full ones on.

It knows runs of bytes and where they belong, and nothing of models. Reading releases the GIL, and sending to a GPU is
asynchronous, out of pinned memory: while some slabs are on their way to the device, the readers fill others. One
thread alone speaks to the device, because several would wait for each other there. Host memory is bounded by the
slabs, whatever the size of the model: `host_bytes`, 64 MiB for a GPU, pinned for this alone because pinning is slow.

Readers also compare the sums of what they read, some 20 GB/s on a core, and decompress high words, 2.7 GB/s of bf16 on
a core; both release the GIL. Words become numbers in the readers for a CPU, which cannot multiply by them, and on the
device for a GPU.

On an H200 with 16 cores: 42 to 45 GB/s from the page cache, where the same readers alone make 46. From a cold disk 2.3
GB/s, where O_DIRECT gives 2.4; but with that each further start and replica would read the disk again.
"""

import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, Self

import torch
import xxhash
from torch import Tensor

from engine.bf12.codec import Escapes, expand
from engine.bf12.layout import words_of
from engine.bf12.metadata import PIECE_BYTES
from engine.bf12.zstd_plane import ZstdPlaneError, unpack_plane
from engine.weights.tensor_index import CheckpointError

SLAB_BYTES: Final = PIECE_BYTES
_REPORT_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class RingSize:
    """How many readers and slabs there are, and how many slabs may be on their way to the device at once."""

    threads: int
    slabs: int
    inflight: int


_GPU: Final = RingSize(threads=8, slabs=16, inflight=4)  # the fastest measured
_CPU: Final = RingSize(threads=2, slabs=3, inflight=0)  # a copy there uses several cores by itself


@dataclass(frozen=True, slots=True)
class Bf12Rows:
    """Whole rows of a bf12 matrix. Where there is a `frame`, a range of the file's bytes, the high words are compressed
    in it, and the piece's own are low ones alone. Where there are `escapes`, the target takes numbers."""

    count: int
    inputs: int
    frame: range | None
    escapes: Escapes | None


@dataclass(frozen=True, slots=True)
class PackedNumbers:
    """So many numbers of the file, and what makes as many of them as the target takes."""

    count: int
    expand: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ColumnRange:
    """What of each row of a matrix with so many inputs is taken."""

    inputs: int
    columns: range


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A run of a file that fits into a slab, of the tensor `name`. `target` is flat and contiguous, and takes as many
    numbers, or those of some `columns` of whole rows; its dtype may be another than the `stored` one. Where a
    `checksum` is known, what was read must have it."""

    name: str
    path: Path
    first: int
    stored: torch.dtype
    target: Tensor
    checksum: int | None = None
    rows: Bf12Rows | None = None
    packed: PackedNumbers | None = None
    columns: ColumnRange | None = None

    @property
    def bytes(self) -> int:
        """The bytes that it takes in a slab."""
        if self.packed is not None:
            return self.packed.count * self.stored.itemsize
        if self.rows is not None:
            return self.rows.count * words_of(self.rows.inputs) * self.stored.itemsize
        if self.columns is not None:
            rows = self.target.numel() // len(self.columns.columns)
            return rows * self.columns.inputs * self.stored.itemsize
        return self.target.numel() * self.stored.itemsize


def split_pieces(
    name: str, path: Path, first: int, stored: torch.dtype, target: Tensor, sums: Sequence[int] | None = None
) -> Iterator[FilePiece]:
    """Cuts a tensor that begins at byte `first` of the file. `target` is contiguous."""
    flat = target.view(-1)
    numbers = SLAB_BYTES // stored.itemsize
    for index, start in enumerate(range(0, flat.numel(), numbers)):
        into, checksum = flat[start : start + numbers], None if sums is None else sums[index]
        yield FilePiece(name, path, first + start * stored.itemsize, stored, into, checksum)


def column_pieces(
    name: str, path: Path, first: int, stored: torch.dtype, target: Tensor, cut: ColumnRange
) -> Iterator[FilePiece]:
    """Cuts the columns of a matrix whose rows begin at byte `first` of the file. `target`, [rows, columns], is
    contiguous."""
    row_bytes = cut.inputs * stored.itemsize
    assert row_bytes <= SLAB_BYTES, "a row that is larger than a slab"
    rows = SLAB_BYTES // row_bytes
    for start in range(0, len(target), rows):
        into = target[start : start + rows].view(-1)
        yield FilePiece(name, path, first + start * row_bytes, stored, into, columns=cut)


class SourceFiles:
    """Files open for reading until the block ends; several threads may read them."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Raises CheckpointError where one cannot be opened."""
        self._files: dict[Path, int] = {}
        self._stamps: dict[Path, tuple[int, ...]] = {}
        with ExitStack() as closing:
            for path in paths:
                try:
                    self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
                closing.callback(os.close, self._files[path])
                self._stamps[path] = _stamp(os.fstat(self._files[path]))
            self._closing = closing.pop_all()

    def read(self, path: Path, first: int, count: int) -> bytearray:
        """These bytes of the file. Raises CheckpointError."""
        content = bytearray(count)
        self.read_into(path, first, memoryview(content))
        return content

    def read_piece(self, piece: FilePiece, memory: memoryview) -> None:
        """Fills the start of `memory` with the piece's bytes; words are whole ones again. Raises CheckpointError where
        they cannot be read or are not those that were written."""
        into = memory[: piece.bytes]
        if piece.rows is None or piece.rows.frame is None:
            self.read_into(piece.path, piece.first, into)
        else:
            self._unpack(into, piece, piece.rows, piece.rows.frame)
        if piece.checksum is not None and xxhash.xxh3_64_intdigest(into) != piece.checksum:
            raise CheckpointError(
                f"{piece.path}: {piece.name} is not as it was written, within what begins at byte {piece.first}: "
                "get the file again"
            )

    def read_into(self, path: Path, first: int, into: memoryview) -> None:
        """Fills `into` from byte `first` of the file. Raises CheckpointError."""
        file = self._files[path]
        if hasattr(os, "posix_fadvise"):  # else the disk reads little at a time: the readers look like random access
            os.posix_fadvise(file, first, len(into), os.POSIX_FADV_WILLNEED)
        count = 0
        while count < len(into):
            try:
                read = os.preadv(file, [into[count:]], first + count)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read at {first + count}: {error.strerror}") from error
            if read == 0:
                raise CheckpointError(f"{path} ends at byte {first + count}: it was cut short while it was read")
            count += read

    def require_unchanged(self) -> None:
        """Raises CheckpointError where a file was written, replaced or removed since."""
        for path, stamp in self._stamps.items():
            try:
                now = _stamp(path.stat())
            except OSError as error:
                raise CheckpointError(f"{path} went away while it was read: {error.strerror}") from error
            if now != stamp or _stamp(os.fstat(self._files[path])) != stamp:
                raise CheckpointError(f"{path} was changed while it was read: run the command again")

    def _unpack(self, into: memoryview, piece: FilePiece, rows: Bf12Rows, frame: range) -> None:
        low = self.read(piece.path, piece.first, rows.count * rows.inputs)
        packed = memoryview(self.read(piece.path, frame.start, len(frame)))
        low_NV = torch.frombuffer(low, dtype=torch.int32).view(rows.count, -1)
        try:
            unpack_plane(packed, low_NV, torch.frombuffer(into, dtype=torch.int32).view(rows.count, -1))
        except ZstdPlaneError as error:
            raise CheckpointError(f"{piece.path}: {piece.name} has {error}: get the file again") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()


def _stamp(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def ring_for(device: torch.device) -> RingSize:
    return _GPU if device.type == "cuda" else _CPU


def host_bytes(device: torch.device) -> int:
    """What the slabs take while a transfer runs, beside the targets."""
    return ring_for(device).slabs * SLAB_BYTES


def stream_pieces(pieces: Iterable[FilePiece], device: torch.device, on_bytes: Callable[[int], None]) -> None:
    """Moves every piece and returns when all have arrived. Calls `on_bytes` with the bytes so far as they become more,
    about ten times a second and at the end.

    Raises CheckpointError where a file is gone, cannot be read, is shorter than its header said or has other bytes than
    its sums say. However it ends, its threads have ended and its files are closed.
    """
    ring = ring_for(device)
    assert ring.inflight < ring.slabs
    waiting = deque(sorted(pieces, key=lambda piece: (piece.path, piece.first)))
    count, paths = len(waiting), {piece.path for piece in waiting}
    free: SimpleQueue[Slab | None] = SimpleQueue()
    full: SimpleQueue[FilledSlab] = SimpleQueue()
    with (
        SourceFiles(paths) as files,
        allocate_slabs(ring.slabs, device) as slabs,
        ThreadPoolExecutor(ring.threads) as pool,
    ):
        for slab in slabs:
            free.put(slab)
        try:
            for _ in range(ring.threads):
                pool.submit(_read, waiting, files, free, full)
            _send(full, free, count, ring.inflight, on_bytes)
        finally:
            waiting.clear()
            for _ in range(ring.threads):
                free.put(None)


def _read(
    waiting: deque[FilePiece],
    files: SourceFiles,
    free: "SimpleQueue[Slab | None]",
    full: "SimpleQueue[FilledSlab]",
) -> None:
    """One reader: fills slabs until no pieces are left or it gets None. The sender raises what it raises."""
    try:
        while waiting and (slab := free.get()) is not None:
            try:
                piece = waiting.popleft()
            except IndexError:  # another reader took the last one
                return
            files.read_piece(piece, slab.memory)
            slab.prepare(piece)
            full.put((slab, piece))
    except BaseException as error:
        full.put(error)


def _send(
    full: "SimpleQueue[FilledSlab]",
    free: "SimpleQueue[Slab | None]",
    count: int,
    max_inflight: int,
    on_bytes: Callable[[int], None],
) -> None:
    """Sends `count` pieces on as they come, at most `max_inflight` of them unawaited."""
    inflight: deque[Slab] = deque()
    done, reported_at = 0, time.monotonic()
    for _ in range(count):
        filled = full.get()
        if isinstance(filled, BaseException):
            raise filled
        slab, piece = filled
        slab.send(piece)
        inflight.append(slab)
        if len(inflight) > max_inflight:
            oldest = inflight.popleft()
            oldest.wait()
            free.put(oldest)
        done += piece.bytes
        if time.monotonic() - reported_at >= _REPORT_S:
            reported_at = time.monotonic()
            on_bytes(done)
    for slab in inflight:
        slab.wait()
    on_bytes(done)


class Slab:
    """Memory that a file is read into and a copy leaves from."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._numbers: Tensor

    def prepare(self, piece: FilePiece) -> None:
        """Does in the reader's thread what the sender's thread would have to wait for."""
        self._numbers = expand_piece(piece, self._taken(piece))

    def send(self, piece: FilePiece) -> None:
        """Copies what was read to where it belongs."""
        piece.target.copy_(self._numbers)

    def wait(self) -> None:
        """Blocks until the memory may be filled again."""

    def _taken(self, piece: FilePiece) -> Tensor:
        """What of the bytes that were read the target takes, [numbers]."""
        stored, cut = self._bytes[: piece.bytes].view(piece.stored), piece.columns
        if cut is None:
            return stored
        return stored.view(-1, cut.inputs)[:, cut.columns.start : cut.columns.stop].reshape(-1)


class PinnedSlab(Slab):
    """A slab that a GPU fetches from by itself, in the current stream's turn."""

    def __init__(self, memory: memoryview) -> None:
        super().__init__(memory)
        self._fetched = torch.cuda.Event()
        self._fetch: Tensor
        self._pinned = False

    def prepare(self, piece: FilePiece) -> None:
        """Puts columns one behind the other, to be fetched in one copy; the device expands and converts."""
        taken = self._taken(piece)
        self._fetch = self._bytes[: taken.nbytes].view(piece.stored)
        if piece.columns is not None:
            self._fetch.copy_(taken)

    def send(self, piece: FilePiece) -> None:
        if not self._pinned:  # only now: memory that was written once is pinned in a third of the time
            torch.cuda.check_error(_cudart().cudaHostRegister(self._bytes.data_ptr(), len(self.memory), 0))
            self._pinned = True
        stored = self._fetch
        if piece.stored is not piece.target.dtype:
            stored = expand_piece(piece, stored.to(piece.target.device, non_blocking=True))
        piece.target.copy_(stored, non_blocking=True)
        self._fetched.record()

    def wait(self) -> None:
        self._fetched.synchronize()

    def unpin(self) -> None:
        """Waits for what was sent, however the transfer ended, and makes the memory ordinary again."""
        if self._pinned:
            self.wait()
            torch.cuda.check_error(_cudart().cudaHostUnregister(self._bytes.data_ptr()))


def expand_piece(piece: FilePiece, stored: Tensor) -> Tensor:
    """The numbers that the target takes, in the dtype and where `stored` lies."""
    if piece.packed is not None:
        return piece.packed.expand(stored)
    if piece.rows is None or piece.rows.escapes is None:
        return stored
    return expand(stored.view(piece.rows.count, -1), piece.rows.escapes.to(stored.device)).view(-1)


def _cudart() -> Any:
    return torch.cuda.cudart()


FilledSlab = tuple[Slab, FilePiece] | BaseException  # what readers hand over: a piece in its slab, or their error


@contextmanager
def allocate_slabs(count: int, device: torch.device) -> Iterator[Sequence[Slab]]:
    """Slabs for transfers to the device."""
    memory = mmap.mmap(-1, count * SLAB_BYTES)
    views = [memoryview(memory)[first : first + SLAB_BYTES] for first in range(0, len(memory), SLAB_BYTES)]
    if device.type != "cuda":
        yield [Slab(view) for view in views]
        return
    pinned = [PinnedSlab(view) for view in views]
    try:
        with torch.cuda.device(device):
            yield pinned
    finally:
        for slab in pinned:
            slab.unpin()
