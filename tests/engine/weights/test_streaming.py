"""engine/weights/streaming.py: every byte arrives where it belongs, in little memory, and whatever fails ends it
all."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.weights import streaming as module
from engine.weights.checkpoint import CheckpointError
from engine.weights.streaming import FilePiece, RingSize, Slab, SourceFiles, host_bytes, split_pieces, stream_pieces

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SLAB_BYTES = 64


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few bytes make many pieces, and several threads carry them on any host."""
    monkeypatch.setattr(module, "SLAB_BYTES", SLAB_BYTES)
    monkeypatch.setattr(module, "ring_for", lambda device: RingSize(threads=4, slabs=8, inflight=3))


def written(path: Path, tensors: list[Tensor], gap: int = 0) -> list[int]:
    """Writes the tensors behind each other, with `gap` bytes before each; where each begins."""
    content, firsts = b"", []
    for tensor in tensors:
        content += b"\xff" * gap
        firsts.append(len(content))
        content += bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    path.write_bytes(content)
    return firsts


def pieces_for(path: Path, tensors: list[Tensor], targets: list[Tensor], gap: int = 0) -> list[FilePiece]:
    firsts = written(path, tensors, gap)
    return [
        piece
        for first, tensor, target in zip(firsts, tensors, targets, strict=True)
        for piece in split_pieces("some.weight", path, first, tensor.dtype, target)
    ]


def ignore(moved: int) -> None:
    pass


@contextmanager
def all_ends() -> Iterator[None]:
    """Neither a thread nor an open file is left."""
    files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("ThreadPool")]
    assert files == (len(os.listdir("/proc/self/fd")) if files else 0)


@pytest.mark.parametrize("kept", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_all_numbers_arrive_whatever_the_shapes_the_places_and_the_dtypes(
    tmp_path: Path, stored: torch.dtype, kept: torch.dtype
) -> None:
    torch.manual_seed(0)
    pieces, expected, targets = [], [], []
    for shard in range(3):
        tensors = [torch.randn(shape).to(stored) for shape in [(1,), (7, 3), (16,), (17,), (33, 5), (0, 4), (64, 9)]]
        into = [torch.full(tensor.shape, float("nan"), dtype=kept) for tensor in tensors]
        pieces += pieces_for(tmp_path / f"shard-{shard}", tensors, into, gap=shard * 3)
        expected += [tensor.to(kept) for tensor in tensors]
        targets += into
    with all_ends():
        stream_pieces(pieces, CPU, ignore)
    for target, wanted in zip(targets, expected, strict=True):
        assert torch.equal(target, wanted)


def test_parts_of_a_stacked_tensor_land_below_each_other(tmp_path: Path) -> None:
    parts = [torch.randn(rows, 11) for rows in (8, 2, 3)]
    stacked = torch.full((13, 11), float("nan"))
    stream_pieces(pieces_for(tmp_path / "file", parts, list(stacked.split([8, 2, 3]))), CPU, ignore)
    assert torch.equal(stacked, torch.cat(parts))


def test_reads_that_give_less_than_asked_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, views, first: real(file, [views[0][:5]], first))
    tensor, target = torch.randn(501), torch.empty(501)
    stream_pieces(pieces_for(tmp_path / "file", [tensor], [target]), CPU, ignore)
    assert torch.equal(tensor, target)


class LateSlab(Slab):
    """A device that fetches a while after it was told to, as a GPU does."""

    def __init__(self, memory: memoryview) -> None:
        super().__init__(memory)
        self._fetching: threading.Thread | None = None

    def send(self, piece: FilePiece) -> None:
        def fetch() -> None:
            time.sleep(0.002)
            with torch.inference_mode():
                super(LateSlab, self).send(piece)

        self._fetching = threading.Thread(target=fetch)
        self._fetching.start()

    def wait(self) -> None:
        if self._fetching is not None:
            self._fetching.join()


def test_a_slab_is_not_filled_again_before_the_device_has_fetched_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    @contextmanager
    def slabs(count: int, device: torch.device) -> Iterator[list[LateSlab]]:
        made.extend(LateSlab(memoryview(bytearray(SLAB_BYTES))) for _ in range(count))
        yield made

    monkeypatch.setattr(module, "allocate_slabs", slabs)
    tensor, target = torch.randn(3000), torch.empty(3000)
    with all_ends():
        stream_pieces(pieces_for(tmp_path / "file", [tensor], [target]), CPU, ignore)
    assert torch.equal(tensor, target)
    assert sum(len(slab.memory) for slab in made) == host_bytes(CPU) == 8 * SLAB_BYTES, "memory is what it says"


def test_what_has_moved_is_told_from_the_callers_thread_and_ends_with_all(tmp_path: Path) -> None:
    tensor, told = torch.randn(3000), []
    stream_pieces(
        pieces_for(tmp_path / "file", [tensor], [torch.empty(3000)]),
        CPU,
        lambda moved: told.append((moved, threading.current_thread())),
    )
    assert told[-1] == (12000, threading.main_thread())
    assert told == sorted(told, key=lambda each: each[0])


def failing_at(call: int, error: OSError) -> tuple[Callable[..., int], list[int]]:
    """And how often it was called."""
    real, calls, lock = os.preadv, [0], threading.Lock()

    def preadv(*asked: Any) -> int:
        with lock:
            calls[0] += 1
            if calls[0] == call:
                raise error
        time.sleep(0.001)
        return real(*asked)

    return preadv, calls


def test_a_disk_that_fails_is_named_and_ends_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = pieces_for(tmp_path / "shard-7", [torch.randn(50_000)], [torch.empty(50_000)])
    preadv, calls = failing_at(20, OSError(errno.EIO, "Input/output error"))
    monkeypatch.setattr(os, "preadv", preadv)
    with all_ends(), pytest.raises(CheckpointError, match=r"shard-7 cannot be read at \d+: Input/output error"):
        stream_pieces(pieces, CPU, ignore)
    assert calls[0] < len(pieces) / 2, "the other threads went on to the end"


def test_a_file_that_is_cut_short_meanwhile_is_named(tmp_path: Path) -> None:
    pieces = pieces_for(tmp_path / "file", [torch.randn(1000)], [torch.empty(1000)])
    os.truncate(tmp_path / "file", 1234)
    with all_ends(), pytest.raises(CheckpointError, match=r"file ends at byte 1\d+: it was cut short"):
        stream_pieces(pieces, CPU, ignore)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    pieces = pieces_for(tmp_path / "here", [torch.randn(10)], [torch.empty(10)])
    pieces += pieces_for(tmp_path / "gone", [torch.randn(10)], [torch.empty(10)])
    (tmp_path / "gone").unlink()
    with all_ends(), pytest.raises(CheckpointError, match="gone cannot be opened: No such file"):
        stream_pieces(pieces, CPU, ignore)


def test_a_caller_that_stops_it_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = pieces_for(tmp_path / "file", [torch.randn(50_000)], [torch.empty(50_000)])
    monkeypatch.setattr(os, "preadv", failing_at(0, OSError())[0])

    def interrupt(moved: int) -> None:
        raise KeyboardInterrupt

    with all_ends(), pytest.raises(KeyboardInterrupt):
        stream_pieces(pieces, CPU, interrupt)


@pytest.mark.gpu
@pytest.mark.parametrize("kept", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_all_numbers_arrive_on_a_gpu_from_little_pinned_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, kept: torch.dtype
) -> None:
    monkeypatch.undo()
    gpu = torch.device("cuda", 0)
    torch.manual_seed(0)
    tensors = [torch.randn(shape).to(stored) for shape in [(1,), (7, 3), (513, 4097), (0, 4), (12_000_001,)]]
    path, firsts = tmp_path / "file", []
    with path.open("wb") as file:
        for tensor in tensors:
            file.write(b"odd")
            firsts.append(file.tell())
            file.write(tensor.reshape(-1).view(torch.uint8).numpy())
    targets = [torch.full(tensor.shape, float("nan"), dtype=kept, device=gpu) for tensor in tensors]
    pieces = [
        piece
        for first, tensor, target in zip(firsts, tensors, targets, strict=True)
        for piece in split_pieces("some.weight", path, first, stored, target)
    ]
    for _ in range(3):
        stream_pieces(pieces, gpu, ignore)
    for target, tensor in zip(targets, tensors, strict=True):
        assert torch.equal(target.cpu(), tensor.to(kept))
    assert host_bytes(gpu) <= 256 << 20


def test_a_file_that_is_cut_written_or_gone_is_told(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for change, said in (
        (lambda: path.write_bytes(b"other"), "was changed while it was read"),
        (lambda: (path.unlink(), path.write_bytes(b"12345678")), "was changed while it was read"),
        (path.unlink, "went away while it was read"),
    ):
        path.write_bytes(b"12345678")
        with SourceFiles([path]) as files:
            assert files.read(path, 2, 4) == b"3456"
            with pytest.raises(CheckpointError, match="ends at byte 8"):
                files.read(path, 6, 4)
            files.require_unchanged()
            change()
            with pytest.raises(CheckpointError, match=said):
                files.require_unchanged()
