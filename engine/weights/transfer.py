"""Bytes of files → tensors on a device: threads read into pinned slabs, and each slab is copied on when it is full.

It knows runs of bytes and where they belong, and nothing of models. Reading releases the GIL and copying to a GPU is
asynchronous: while one slab of a thread is on its way to the device, the thread fills its other one. Each thread has
a CUDA stream of its own, and 8 of them keep page cache and bus busy. Host memory is bounded by the slabs, whatever
the size of the model: `host_bytes`, 128 MiB for a GPU. They are pinned for this alone, because pinning is slow.
"""

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from engine.weights.checkpoint import CheckpointError

SLAB_BYTES: Final = 8 << 20
_SLABS: Final = 2  # of each thread
_LOOK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a file that fits into a slab. `target` is flat, contiguous and takes as many numbers; its dtype may be
    another than the `stored` one."""

    path: Path
    first: int
    stored: torch.dtype
    target: Tensor

    @property
    def bytes(self) -> int:
        return self.target.numel() * self.stored.itemsize


def pieces_of(path: Path, first: int, stored: torch.dtype, target: Tensor) -> Iterator[Piece]:
    """Cuts a tensor that begins at byte `first` of the file. `target` is contiguous."""
    flat = target.view(-1)
    numbers = SLAB_BYTES // stored.itemsize
    for start in range(0, flat.numel(), numbers):
        yield Piece(path, first + start * stored.itemsize, stored, flat[start : start + numbers])


def threads_for(device: torch.device) -> int:
    """A copy on a CPU uses several cores by itself."""
    return 8 if device.type == "cuda" else min(2, torch.get_num_threads())


def host_bytes(device: torch.device) -> int:
    """What the slabs take while a transfer runs, beside the targets."""
    return threads_for(device) * _SLABS * SLAB_BYTES


def transfer(pieces: Iterable[Piece], device: torch.device, moved: Callable[[int], None]) -> None:
    """Moves every piece and returns when all have arrived. Calls `moved` with the bytes so far as they become more,
    from the caller's thread, about ten times a second.

    Raises CheckpointError where a file is gone, cannot be read or is shorter than its header said. However it ends,
    its threads have ended and its files are closed.
    """
    threads = threads_for(device)
    waiting = deque(sorted(pieces, key=lambda piece: (piece.path, piece.first)))
    counts, told = [0] * threads, 0
    with _opened({piece.path for piece in waiting}) as files, ThreadPoolExecutor(threads, "weights") as pool:
        try:
            running = {pool.submit(_carry, waiting, files, device, counts, index) for index in range(threads)}
            while running:
                ended, running = wait(running, _LOOK_S, FIRST_EXCEPTION)
                for future in ended:
                    future.result()
                if sum(counts) > told:
                    told = sum(counts)
                    moved(told)
        finally:
            waiting.clear()  # after a failure, the others take no more


@contextmanager
def _opened(paths: Iterable[Path]) -> Iterator[dict[Path, int]]:
    with ExitStack() as closing:
        files = {}
        for path in paths:
            try:
                files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
            closing.callback(os.close, files[path])
        yield files


def _carry(
    waiting: deque[Piece], files: dict[Path, int], device: torch.device, counts: list[int], index: int
) -> None:  # fmt: skip
    """One thread: takes pieces until none is left. counts[index] is its own."""
    with torch.inference_mode(), _stream(device), ExitStack() as closing:
        slabs = [closing.enter_context(slab(device)) for _ in range(_SLABS)]
        for each in cycle(slabs):
            try:
                piece = waiting.popleft()
            except IndexError:
                return
            each.wait()
            _fill(each.memory, piece, files[piece.path])
            each.send(piece)
            counts[index] += piece.bytes


def _fill(memory: memoryview, piece: Piece, file: int) -> None:
    got = 0
    while got < piece.bytes:
        try:
            read = os.preadv(file, [memory[got : piece.bytes]], piece.first + got)
        except OSError as error:
            raise CheckpointError(f"{piece.path} cannot be read at {piece.first + got}: {error.strerror}") from error
        if read == 0:
            raise CheckpointError(f"{piece.path} ends at byte {piece.first + got}: it was cut short while it was read")
        got += read


class Slab:
    """Page-aligned memory that a file is read into and a copy leaves from."""

    def __init__(self) -> None:
        mapped = mmap.mmap(-1, SLAB_BYTES)
        self.memory = memoryview(mapped)
        self.bytes = torch.frombuffer(mapped, dtype=torch.uint8)

    def send(self, piece: Piece) -> None:
        """Copies what was read to where it belongs."""
        piece.target.copy_(self.bytes[: piece.bytes].view(piece.stored))

    def wait(self) -> None:
        """Until the memory may be filled again."""


class PinnedSlab(Slab):
    """A slab that a GPU fetches from by itself; call its methods in one stream."""

    def __init__(self) -> None:
        super().__init__()
        self._left = torch.cuda.Event()

    def send(self, piece: Piece) -> None:
        numbers = self.bytes[: piece.bytes].view(piece.stored)
        if piece.stored is not piece.target.dtype:
            numbers = numbers.to(piece.target.device, non_blocking=True)  # so that the device converts
        piece.target.copy_(numbers, non_blocking=True)
        self._left.record()

    def wait(self) -> None:
        self._left.synchronize()


@contextmanager
def slab(device: torch.device) -> Iterator[Slab]:
    """Memory for transfers to the device, until all that was sent has arrived."""
    if device.type != "cuda":
        yield Slab()
        return
    pinned = PinnedSlab()
    address = pinned.bytes.data_ptr()
    _succeed(torch.cuda.cudart().cudaHostRegister(address, SLAB_BYTES, 0))
    try:
        yield pinned
        pinned.wait()
    finally:
        _succeed(torch.cuda.cudart().cudaHostUnregister(address))


def _succeed(error: int) -> None:
    torch.cuda.check_error(error)


def _stream(device: torch.device) -> AbstractContextManager[object]:
    """A stream that begins after what the device has been told so far."""
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    return torch.cuda.stream(stream)
