"""A compressed folder (notes.py) → the one that it was made of, bit for bit.

    python -m engine.compression.expand SOURCE TARGET [--device auto|cpu|cuda:N] [--json]

What is read is held against the sum of each piece, what comes of it against those of each tensor and of the whole file.
Memory is bounded by the pieces under way and a tensor's escapes.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch
import xxhash
from torch import Tensor

from engine.bf12 import metadata
from engine.bf12.codec import Escapes
from engine.bf12.codec import expand as expanded
from engine.bf12.layout import words_of
from engine.bf12.metadata import (
    ALIGNED_BYTES,
    BASES,
    PIECE_BYTES,
    POSITIONS,
    VALUES,
    Bf12Metadata,
    Bf12MetadataError,
    piece_rows,
)
from engine.bf12.zstd_plane import ZstdPlaneError, unpack_plane
from engine.compression import checksums
from engine.compression.program import add_options, device_for, print_json, run_program, threads_for
from engine.compression.reader import SourceFiles, map_ordered
from engine.compression.report import ExpansionReport
from engine.compression.source import weight_files
from engine.compression.target import atomic_folder, copy_file, list_files, require_absent, require_disk_space
from engine.compression.writer import tensor_bytes, write_at
from engine.weights.bf12_reader import gather_tensors, original_header
from engine.weights.progress import ProgressBar
from engine.weights.safetensors_header import SafetensorsHeader, read_header, tensors_in
from engine.weights.tensor_index import CheckpointError, CodedPlanes, StoredTensor, ZstdPlane

_RETRY_HINT: Final = "get the file again"

PieceJob = Callable[[], bytearray | memoryview]  # gives a piece of the original


@dataclass(frozen=True, slots=True)
class CompressedFile:
    """A compressed file: the tensors that it was made of by name, what it says, and the header that it had."""

    path: Path
    tensors: dict[str, StoredTensor]
    said: Bf12Metadata
    original: SafetensorsHeader

    def fail(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {name} {what}: {_RETRY_HINT}")


def expand_folder(source: Path, target: Path, device: torch.device) -> ExpansionReport:
    """Makes `target`. Raises CheckpointError for what is wrong with the folder, TargetError where it cannot be written;
    then nothing is left of it."""
    started = time.monotonic()
    require_absent(target)
    names = _names_of(source)
    files = {name: file for name in weight_files(source, names) if (file := read_compressed(source / name)) is not None}
    if not files:
        raise CheckpointError(f"{source} is not compressed: there is nothing to expand")
    copied = {name: _name_of(name) for name in names if name not in files}
    size = sum(file.original.bytes for file in files.values())
    copied_bytes = sum((source / name).stat().st_size for name in copied)
    require_disk_space(target, size + copied_bytes)
    threads = threads_for(device)
    with (
        SourceFiles(file.path for file in files.values()) as opened,
        ThreadPoolExecutor(threads) as pool,
        ProgressBar("expanding", size + copied_bytes) as progress,
        atomic_folder(target) as made,
    ):
        for name, file in files.items():
            with closing(map_ordered(pool, _run, _jobs(opened, file, device), threads + 2)) as pieces:
                _restore(file, pieces, made / name, progress)
        for name, other in copied.items():
            copy_file(source / name, made / other, progress.more)
        opened.require_same()
    stored = sum(file.path.stat().st_size for file in files.values())
    return ExpansionReport(str(source), str(target), len(files), stored, size, round(time.monotonic() - started, 3))


def read_compressed(path: Path) -> CompressedFile | None:
    """None of a file that is not compressed. Raises CheckpointError."""
    header = read_header(path)
    try:
        said = metadata.parse_metadata(header.metadata)
    except Bf12MetadataError as error:
        raise CheckpointError(f"{path} is a compressed file, and {error}") from error
    if said is None:
        return None
    return CompressedFile(path, gather_tensors(path, tensors_in(path, header), said), said, original_header(path, said))


def main() -> int:
    parser = argparse.ArgumentParser(prog="engine.compression.expand")
    add_options(parser)
    parser.add_argument("target", type=Path, help="a new folder")
    options = parser.parse_args()

    def work() -> None:
        done = expand_folder(options.source, options.target, device_for(options.device))
        print_json(done) if options.json else print(done.line)

    return run_program(work)


def _names_of(source: Path) -> list[Path]:
    """But for the sums of the compressed files."""
    if not source.is_dir():
        raise CheckpointError(f"there is no folder {source}")
    return [name for name in list_files(source) if name != Path(checksums.SUMS_NAME)]


def _name_of(name: Path) -> Path:
    return Path(checksums.SUMS_NAME) if name == Path(checksums.ORIGINAL_SUMS_NAME) else name


def _run(job: PieceJob) -> bytearray | memoryview:
    return job()


def _restore(file: CompressedFile, pieces: Iterator[bytearray | memoryview], path: Path, progress: ProgressBar) -> None:
    """Writes the original. Raises CheckpointError where it comes out another one."""
    text = file.original.text.encode()
    start = len(text).to_bytes(8, "little") + text
    total = xxhash.xxh3_128(start)
    with path.open("xb", buffering=0) as made:
        place = write_at(made.fileno(), 0, memoryview(start))
        progress.more(place)
        for tensor in file.original.tensors:
            whole = xxhash.xxh3_128()
            while place < tensor.last:
                piece = next(pieces)
                total.update(piece)
                whole.update(piece)
                place = write_at(made.fileno(), place, memoryview(piece))
                progress.more(len(piece))
            code = file.said.codes.get(tensor.name)
            if code is not None and whole.hexdigest() != code:
                raise file.fail(tensor.name, "is not the tensor that was compressed")
        if total.hexdigest() != file.said.original.xxh3_128:
            raise CheckpointError(f"{file.path} does not give the file that was compressed: {_RETRY_HINT}")
        os.fsync(made.fileno())


def _jobs(opened: SourceFiles, file: CompressedFile, device: torch.device) -> Iterator[PieceJob]:
    """What gives the original's pieces, in the order of their bytes."""
    for tensor in file.original.tensors:
        stored = file.tensors[tensor.name]
        if stored.code is None:
            yield from _stored_jobs(opened, file, tensor.name, stored)
        else:
            yield from _coded(opened, file, tensor.name, stored, stored.code, device)


def _stored_jobs(opened: SourceFiles, file: CompressedFile, name: str, stored: StoredTensor) -> Iterator[PieceJob]:
    for start, said in zip(range(stored.first, stored.last, PIECE_BYTES), _sums(stored), strict=True):
        yield partial(_checked, opened, file, name, start, min(PIECE_BYTES, stored.last - start), said)


def _checked(opened: SourceFiles, file: CompressedFile, name: str, first: int, count: int, said: int) -> bytearray:
    piece = opened.read(file.path, first, count)
    if xxhash.xxh3_64_intdigest(piece) != said:
        raise file.fail(name, "was altered")
    return piece


def _coded(
    opened: SourceFiles, file: CompressedFile, name: str, stored: StoredTensor, code: CodedPlanes, device: torch.device
) -> Iterator[PieceJob]:
    outputs, inputs = stored.shape
    escapes = _escapes(opened, file, name, stored, code)
    starts = range(0, outputs, piece_rows(inputs))
    frames = [None] * len(starts) if code.high is None else _frames(opened, file, name, code.high)
    for start, said, frame in zip(starts, _sums(stored), frames, strict=True):
        rows = range(start, min(start + starts.step, outputs))
        yield partial(_decoded, opened, file, name, stored.first, escapes, rows, said, frame, device)


def _decoded(
    opened: SourceFiles,
    file: CompressedFile,
    name: str,
    first: int,
    escapes: Escapes,
    rows: range,
    said: int,
    frame: range | None,
    device: torch.device,
) -> memoryview:
    """These rows of the matrix as bf16. Its words, or the low ones alone, begin at byte `first`."""
    words = words_of(escapes.inputs)
    width = 4 * words if frame is None else escapes.inputs
    raw = opened.read(file.path, first + rows.start * width, len(rows) * width)
    words_NW = torch.frombuffer(raw, dtype=torch.int32).view(len(rows), -1)
    if frame is not None:
        low_NV, words_NW = words_NW, torch.empty(len(rows), words, dtype=torch.int32)
        try:
            unpack_plane(memoryview(opened.read(file.path, frame.start, len(frame))), low_NV, words_NW)
        except ZstdPlaneError as error:
            raise file.fail(name, f"has {error}") from error
    if xxhash.xxh3_64_intdigest(tensor_bytes(words_NW)) != said:
        raise file.fail(name, "was altered")
    weight_NK = expanded(words_NW.to(device), escapes.rows(rows).to(device)).cpu()
    return tensor_bytes(weight_NK)


def _escapes(opened: SourceFiles, file: CompressedFile, name: str, stored: StoredTensor, code: CodedPlanes) -> Escapes:
    bases_N = _plane(opened, file, name + BASES, code.bases, torch.uint8)
    positions_E = _plane(opened, file, name + POSITIONS, code.positions, torch.int64)
    values_E = _plane(opened, file, name + VALUES, code.values, torch.bfloat16)
    outputs, inputs = stored.shape
    ends = (positions_E[:1] < 0).any() or (positions_E[-1:] >= outputs * inputs).any()
    if ends or (positions_E.diff() <= 0).any():
        raise file.fail(name, "has escapes out of their order")
    return Escapes(outputs, inputs, bases_N, positions_E, values_E)


def _plane(opened: SourceFiles, file: CompressedFile, name: str, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
    content = bytearray().join(job() for job in _stored_jobs(opened, file, name, stored))
    return torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)


def _frames(opened: SourceFiles, file: CompressedFile, name: str, high: ZstdPlane) -> Sequence[range]:
    """Where in the file the frame of each piece lies."""
    frames = high.frames
    raw = opened.read(file.path, high.ends.first, high.ends.last - high.ends.first)
    ends = torch.frombuffer(raw, dtype=torch.int64).tolist()
    starts = [0, *ends[:-1]]
    padding = frames.last - frames.first - ends[-1]
    fit = all(0 < end - start <= PIECE_BYTES for start, end in zip(starts, ends, strict=True))
    if not fit or not 0 <= padding < ALIGNED_BYTES:
        raise file.fail(name, "has frames that end where they cannot")
    if any(opened.read(file.path, frames.last - padding, padding)):
        raise file.fail(name, "was altered behind its frames")
    return [range(frames.first + start, frames.first + end) for start, end in zip(starts, ends, strict=True)]


def _sums(stored: StoredTensor) -> tuple[int, ...]:
    assert stored.sums is not None  # which all tensors of compressed files have
    return stored.sums


if __name__ == "__main__":
    sys.exit(main())
