"""A compressed folder (bf12/metadata.py) → the one that it was made of, bit for bit.

    python -m engine.compression.expand SOURCE TARGET [--device auto|cpu|cuda:N] [--json]

Each piece that is read is checked against its sum, and the result against those of each tensor and of the whole file.
Memory is bounded by the pieces that are being made and a tensor's escapes.
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

from engine.bf12.codec import Escapes, expand
from engine.bf12.layout import words_of
from engine.bf12.metadata import (
    ALIGNED_BYTES,
    BASES,
    PIECE_BYTES,
    POSITIONS,
    VALUES,
    Bf12Metadata,
    Bf12MetadataError,
    parse_metadata,
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
from engine.weights.tensor_index import Bf12Planes, CheckpointError, StoredTensor, ZstdPlane

_RETRY_HINT: Final = "get the file again"

PieceJob = Callable[[], bytearray | memoryview]  # makes a piece of the original


@dataclass(frozen=True, slots=True)
class CompressedFile:
    """A compressed file: the tensors that it was made of by name, its metadata, and the original's header."""

    path: Path
    tensors: dict[str, StoredTensor]
    metadata: Bf12Metadata
    original: SafetensorsHeader

    def error(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {name} {problem}: {_RETRY_HINT}")


def expand_folder(source: Path, target: Path, device: torch.device) -> ExpansionReport:
    """Makes `target`. Raises CheckpointError for what is wrong with the folder, TargetError where it cannot be written;
    then nothing is left of it."""
    started = time.monotonic()
    require_absent(target)
    names = _list_names(source)
    files = {name: file for name in weight_files(source, names) if (file := read_compressed(source / name)) is not None}
    if not files:
        raise CheckpointError(f"{source} is not compressed: there is nothing to expand")
    copied = {name: _original_name(name) for name in names if name not in files}
    size = sum(file.original.bytes for file in files.values())
    copied_bytes = sum((source / name).stat().st_size for name in copied)
    require_disk_space(target, size + copied_bytes)
    threads = threads_for(device)
    with (
        SourceFiles(file.path for file in files.values()) as source_files,
        ThreadPoolExecutor(threads) as pool,
        ProgressBar("expanding", size + copied_bytes) as progress,
        atomic_folder(target) as partial_folder,
    ):
        for name, file in files.items():
            with closing(map_ordered(pool, _run, _jobs(source_files, file, device), threads + 2)) as pieces:
                _restore(file, pieces, partial_folder / name, progress)
        for name, original_name in copied.items():
            copy_file(source / name, partial_folder / original_name, progress.advance)
        source_files.require_unchanged()
    stored = sum(file.path.stat().st_size for file in files.values())
    return ExpansionReport(str(source), str(target), len(files), stored, size, round(time.monotonic() - started, 3))


def read_compressed(path: Path) -> CompressedFile | None:
    """The compressed file there; None where it is not compressed. Raises CheckpointError."""
    header = read_header(path)
    try:
        metadata = parse_metadata(header.metadata)
    except Bf12MetadataError as error:
        raise CheckpointError(f"{path} is a compressed file, and {error}") from error
    if metadata is None:
        return None
    tensors = gather_tensors(path, tensors_in(path, header), metadata)
    return CompressedFile(path, tensors, metadata, original_header(path, metadata))


def main() -> int:
    parser = argparse.ArgumentParser(prog="engine.compression.expand")
    add_options(parser)
    parser.add_argument("target", type=Path, help="a new folder")
    options = parser.parse_args()

    def work() -> None:
        report = expand_folder(options.source, options.target, device_for(options.device))
        print_json(report) if options.json else print(report.line)

    return run_program(work)


def _list_names(source: Path) -> list[Path]:
    """All files of the folder except the sums of the compressed ones."""
    if not source.is_dir():
        raise CheckpointError(f"there is no folder {source}")
    return [name for name in list_files(source) if name != Path(checksums.SUMS_NAME)]


def _original_name(name: Path) -> Path:
    return Path(checksums.SUMS_NAME) if name == Path(checksums.ORIGINAL_SUMS_NAME) else name


def _run(job: PieceJob) -> bytearray | memoryview:
    return job()


def _restore(file: CompressedFile, pieces: Iterator[bytearray | memoryview], path: Path, progress: ProgressBar) -> None:
    """Writes the original. Raises CheckpointError where the result is not the original."""
    text = file.original.text.encode()
    start = len(text).to_bytes(8, "little") + text
    total = xxhash.xxh3_128(start)
    with path.open("xb", buffering=0) as target:
        end = write_at(target.fileno(), 0, memoryview(start))
        progress.advance(end)
        for tensor in file.original.tensors:
            whole = xxhash.xxh3_128()
            while end < tensor.last:
                piece = next(pieces)
                total.update(piece)
                whole.update(piece)
                end = write_at(target.fileno(), end, memoryview(piece))
                progress.advance(len(piece))
            code = file.metadata.codes.get(tensor.name)
            if code is not None and whole.hexdigest() != code:
                raise file.error(tensor.name, "is not the tensor that was compressed")
        if total.hexdigest() != file.metadata.original.xxh3_128:
            raise CheckpointError(f"{file.path} does not give the file that was compressed: {_RETRY_HINT}")
        os.fsync(target.fileno())


def _jobs(files: SourceFiles, file: CompressedFile, device: torch.device) -> Iterator[PieceJob]:
    """The jobs that make the original's pieces, in the order of their bytes."""
    for tensor in file.original.tensors:
        stored = file.tensors[tensor.name]
        if stored.bf12 is None:
            yield from _stored_jobs(files, file, tensor.name, stored)
        else:
            yield from _bf12_jobs(files, file, tensor.name, stored, stored.bf12, device)


def _stored_jobs(files: SourceFiles, file: CompressedFile, name: str, stored: StoredTensor) -> Iterator[PieceJob]:
    for start, checksum in zip(range(stored.first, stored.last, PIECE_BYTES), _sums(stored), strict=True):
        yield partial(_checked, files, file, name, start, min(PIECE_BYTES, stored.last - start), checksum)


def _checked(files: SourceFiles, file: CompressedFile, name: str, first: int, count: int, checksum: int) -> bytearray:
    piece = files.read(file.path, first, count)
    if xxhash.xxh3_64_intdigest(piece) != checksum:
        raise file.error(name, "was altered")
    return piece


def _bf12_jobs(
    files: SourceFiles, file: CompressedFile, name: str, stored: StoredTensor, planes: Bf12Planes, device: torch.device
) -> Iterator[PieceJob]:
    outputs, inputs = stored.shape
    escapes = _escapes(files, file, name, stored, planes)
    starts = range(0, outputs, piece_rows(inputs))
    frames = [None] * len(starts) if planes.zstd is None else _frames(files, file, name, planes.zstd)
    for start, checksum, frame in zip(starts, _sums(stored), frames, strict=True):
        rows = range(start, min(start + starts.step, outputs))
        yield partial(_decoded, files, file, name, stored.first, escapes, rows, checksum, frame, device)


def _decoded(
    files: SourceFiles,
    file: CompressedFile,
    name: str,
    first: int,
    escapes: Escapes,
    rows: range,
    checksum: int,
    frame: range | None,
    device: torch.device,
) -> memoryview:
    """These rows of the matrix as bf16. Its words, or the low ones alone, begin at byte `first`."""
    words = words_of(escapes.inputs)
    width = 4 * words if frame is None else escapes.inputs
    raw = files.read(file.path, first + rows.start * width, len(rows) * width)
    words_NW = torch.frombuffer(raw, dtype=torch.int32).view(len(rows), -1)
    if frame is not None:
        low_NV, words_NW = words_NW, torch.empty(len(rows), words, dtype=torch.int32)
        try:
            unpack_plane(memoryview(files.read(file.path, frame.start, len(frame))), low_NV, words_NW)
        except ZstdPlaneError as error:
            raise file.error(name, f"has {error}") from error
    if xxhash.xxh3_64_intdigest(tensor_bytes(words_NW)) != checksum:
        raise file.error(name, "was altered")
    weight_NK = expand(words_NW.to(device), escapes.rows(rows).to(device)).cpu()
    return tensor_bytes(weight_NK)


def _escapes(files: SourceFiles, file: CompressedFile, name: str, stored: StoredTensor, planes: Bf12Planes) -> Escapes:
    bases_N = _plane(files, file, name + BASES, planes.bases, torch.uint8)
    positions_E = _plane(files, file, name + POSITIONS, planes.positions, torch.int64)
    values_E = _plane(files, file, name + VALUES, planes.values, torch.bfloat16)
    outputs, inputs = stored.shape
    outside = (positions_E[:1] < 0).any() or (positions_E[-1:] >= outputs * inputs).any()
    if outside or (positions_E.diff() <= 0).any():
        raise file.error(name, "has escapes out of their order")
    return Escapes(outputs, inputs, bases_N, positions_E, values_E)


def _plane(files: SourceFiles, file: CompressedFile, name: str, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
    content = bytearray().join(job() for job in _stored_jobs(files, file, name, stored))
    return torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)


def _frames(files: SourceFiles, file: CompressedFile, name: str, zstd: ZstdPlane) -> Sequence[range]:
    """The bytes of the file with each piece's frame."""
    frames = zstd.frames
    raw = files.read(file.path, zstd.ends.first, zstd.ends.last - zstd.ends.first)
    ends = torch.frombuffer(raw, dtype=torch.int64).tolist()
    starts = [0, *ends[:-1]]
    padding = frames.last - frames.first - ends[-1]
    fit = all(0 < end - start <= PIECE_BYTES for start, end in zip(starts, ends, strict=True))
    if not fit or not 0 <= padding < ALIGNED_BYTES:
        raise file.error(name, "has frames that end where they cannot")
    if any(files.read(file.path, frames.last - padding, padding)):
        raise file.error(name, "was altered behind its frames")
    return [range(frames.first + start, frames.first + end) for start, end in zip(starts, ends, strict=True)]


def _sums(stored: StoredTensor) -> tuple[int, ...]:
    assert stored.sums is not None  # which all tensors of compressed files have
    return stored.sums


if __name__ == "__main__":
    sys.exit(main())
