"""A model's folder → one whose weights take 12 bits each, without loss, in the format of bf12/metadata.py.

    python -m engine.compression.compress SOURCE TARGET [--level device|distribution] [--device auto|cpu|cuda:N]
                                      [--dry-run] [--json]

Any architecture will do. Threads read pieces and encode them, on a GPU where there is one with room; one thread takes
the results in the order of the files, sums and writes them. So memory is bounded by the pieces that are being made,
whatever the size of a tensor.
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import torch
import xxhash
from torch import Tensor

from engine.bf12.codec import encode
from engine.bf12.metadata import PIECE_BYTES, CompressionLevel, piece_rows
from engine.bf12.zstd_plane import pack_plane
from engine.compression import checksums
from engine.compression.program import add_options, device_for, map_ordered, print_json, run_program, threads_for
from engine.compression.report import BF12_KIND, CompressionReport, TensorReport, format_report
from engine.compression.source import SourceFolder, scan_folder
from engine.compression.survey import (
    CodeCounts,
    CodingDecision,
    CodingSurvey,
    count_codes,
    merge_counts,
    shape_reason,
    tensor_groups,
)
from engine.compression.target import (
    TargetError,
    atomic_folder,
    copy_file,
    require_absent,
    require_disk_space,
    write_file,
)
from engine.compression.writer import Bf12Writer, EncodedPiece, tensor_bytes
from engine.weights.progress import ProgressBar
from engine.weights.safetensors_header import TensorSpan
from engine.weights.streaming import SourceFiles
from engine.weights.tensor_index import CheckpointError

_ESCAPE_BYTES: Final = 10
_SHARE_MIN: Final = {CompressionLevel.DEVICE: 0.75, CompressionLevel.DISTRIBUTION: 0.6}  # of bf16


class SourcePiece(NamedTuple):
    """A run of a tensor's bytes, from `start` of them on; with the tensor's bases it is whole rows, to be encoded."""

    path: Path
    tensor: TensorSpan
    start: int
    bytes: int
    bases_N: Tensor | None = None


@dataclass(frozen=True, slots=True)
class CompressionJob:
    """What making pieces needs. `prefetch` pieces are made ahead of the one that is written."""

    folder: SourceFolder
    level: CompressionLevel
    device: torch.device
    files: SourceFiles
    pool: Executor
    prefetch: int
    progress: ProgressBar


def compress_folder(
    folder: SourceFolder, target: Path, level: CompressionLevel, device: torch.device
) -> CompressionReport:
    """Makes `target`. Raises CheckpointError for what is wrong with the folder, TargetError where it cannot be written;
    then nothing is left of it."""
    started = time.monotonic()
    require_absent(target)
    if target.resolve().is_relative_to(folder.path.resolve()):
        raise TargetError(f"{target} lies in {folder.path}: name a folder elsewhere")
    require_disk_space(target, _min_bytes(folder, level))
    size = folder.weights_bytes + folder.other_bytes
    with _job(folder, level, device, "compressing", size) as job, atomic_folder(target) as partial_folder:
        survey = _survey(job, lambda count: None)
        reports = [report for name in folder.weights for report in _compress(job, survey, name, partial_folder)]
        _copy_others(job, partial_folder)
        job.files.require_unchanged()
        written = sum((partial_folder / name).stat().st_size for name in folder.weights)
    return _report(folder, target, level, reports, written, started)


def estimate(folder: SourceFolder, level: CompressionLevel, device: torch.device) -> CompressionReport:
    """What `compress_folder` would make, without writing; it counts escapes of tensors whose shape has no code too."""
    started = time.monotonic()
    with _job(folder, level, device, "looking", folder.weights_bytes) as job:
        survey = _survey(job, job.progress.advance, every=True)
        reports = [
            _tensor_report(name, tensor, decision, _estimated_bytes(tensor, decision, level))
            for name, header in folder.weights.items()
            for tensor in header.tensors
            for decision in [survey.decide(tensor.name)]
        ]
        job.files.require_unchanged()
    return _report(folder, None, level, reports, sum(report.bytes_after for report in reports), started)


def main() -> int:
    parser = argparse.ArgumentParser(prog="engine.compression.compress")
    add_options(parser)
    parser.add_argument("target", type=Path, nargs="?", help="a new folder, not wanted in a dry run")
    parser.add_argument(
        "--level",
        choices=[level.name.lower() for level in CompressionLevel],
        default=CompressionLevel.DEVICE.name.lower(),
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be made")
    options = parser.parse_args()
    if options.target is None and not options.dry_run:
        parser.error("a target, or --dry-run")

    def work() -> None:
        level, device = CompressionLevel[options.level.upper()], device_for(options.device)
        folder = scan_folder(options.source)
        if options.dry_run:
            report = estimate(folder, level, device)
        else:
            report = compress_folder(folder, options.target, level, device)
        print_json(report) if options.json else print(*format_report(report), sep="\n")

    return run_program(work)


@contextmanager
def _job(
    folder: SourceFolder, level: CompressionLevel, device: torch.device, doing: str, size: int
) -> Iterator[CompressionJob]:
    threads = threads_for(device)
    with (
        SourceFiles(folder.path / name for name in folder.weights) as files,
        ThreadPoolExecutor(threads) as pool,
        ProgressBar(doing, size) as progress,
    ):
        yield CompressionJob(folder, level, device, files, pool, threads + 2, progress)


def _survey(job: CompressionJob, on_bytes: Callable[[int], object], every: bool = False) -> CodingSurvey:
    tensors = job.folder.tensors

    def counts(tensor: TensorSpan) -> CodeCounts:
        pieces = _pieces(tensors[tensor.name][0], tensor, _counted_bytes(tensor))
        parts = []
        with closing(map_ordered(job.pool, partial(_count, job), pieces, job.prefetch)) as counted:
            for part in counted:
                parts.append(part)
                on_bytes(2 * int(part.codes_C.sum()))
        return merge_counts(parts)

    by_name = {name: tensor for name, (_, tensor) in tensors.items()}
    return CodingSurvey(by_name, tensor_groups(job.folder.path, list(tensors)), counts, every)


def _compress(job: CompressionJob, survey: CodingSurvey, name: Path, target: Path) -> Iterator[TensorReport]:
    """Writes one file."""
    header, path = job.folder.weights[name], job.folder.path / name
    digest = hashlib.sha256()
    recorded = checksums.parse_sums(job.folder.sums).get(str(name))

    def pieces() -> Iterator[SourcePiece]:
        for tensor in header.tensors:
            bases_N = survey.decide(tensor.name).bases_N
            yield from _pieces(path, tensor, _piece_bytes(tensor, bases_N), bases_N)

    with (
        closing(Bf12Writer(target / name, header, job.level, digest if recorded else None)) as writer,
        closing(map_ordered(job.pool, partial(_encode, job), pieces(), job.prefetch)) as ready,
    ):
        for tensor in header.tensors:
            decision = survey.decide(tensor.name)
            count = -(-tensor.bytes // _piece_bytes(tensor, decision.bases_N))
            own = _track_progress(islice(ready, count), job.progress)
            if decision.bases_N is None:
                writer.write_plain(tensor, own)
                size = tensor.bytes
            else:
                size = writer.write_bf12(tensor, own)
            yield _tensor_report(name, tensor, decision, size)
        writer.finish(partial(job.files.read, path))
    if recorded and digest.hexdigest() != recorded:
        raise CheckpointError(f"{path} is not what {checksums.SUMS_NAME} says: get the file again")


def _pieces(path: Path, tensor: TensorSpan, size: int, bases_N: Tensor | None = None) -> Iterator[SourcePiece]:
    for start in range(0, tensor.bytes, size):
        yield SourcePiece(path, tensor, start, min(size, tensor.bytes - start), bases_N)


def _piece_bytes(tensor: TensorSpan, bases_N: Tensor | None) -> int:
    """The bytes of a piece of the tensor, but for the last one."""
    return PIECE_BYTES if bases_N is None else 2 * tensor.shape[1] * piece_rows(tensor.shape[1])


def _counted_bytes(tensor: TensorSpan) -> int:
    """The bytes that are counted at once: whole rows, or any where the tensor has no rows that fit into a piece."""
    width = _width(tensor)
    return PIECE_BYTES if width is None else PIECE_BYTES // (2 * width) * 2 * width


def _width(tensor: TensorSpan) -> int | None:
    """The width of the tensor's rows; None where a piece holds no whole one."""
    return tensor.shape[1] if len(tensor.shape) == 2 and 0 < 2 * tensor.shape[1] <= PIECE_BYTES else None


def _read(job: CompressionJob, piece: SourcePiece) -> bytearray:
    return job.files.read(piece.path, piece.tensor.first + piece.start, piece.bytes)


def _count(job: CompressionJob, piece: SourcePiece) -> CodeCounts:
    raw = _read(job, piece)
    numbers = torch.frombuffer(raw, dtype=torch.bfloat16)
    return count_codes(numbers.view(-1, _width(piece.tensor) or len(numbers)).to(job.device))


def _encode(job: CompressionJob, piece: SourcePiece) -> EncodedPiece:
    raw = _read(job, piece)
    if piece.bases_N is None:
        return EncodedPiece(raw, memoryview(raw), xxhash.xxh3_64_intdigest(raw))
    inputs = piece.tensor.shape[1]
    weight_NK = torch.frombuffer(raw, dtype=torch.bfloat16).view(-1, inputs).to(job.device)
    first = piece.start // 2
    bases_N = piece.bases_N[first // inputs :][: len(weight_NK)]
    matrix = encode(weight_NK, bases_N.to(job.device))
    words_NW = matrix.words_NW.cpu()
    encoded = EncodedPiece(
        raw,
        tensor_bytes(words_NW),
        xxhash.xxh3_64_intdigest(tensor_bytes(words_NW)),
        bases_N,
        matrix.escapes.positions_E.cpu() + first,
        matrix.escapes.values_E.cpu(),
    )
    if job.level is CompressionLevel.DEVICE:
        return encoded
    frame, low_NV = pack_plane(words_NW)
    return encoded._replace(stored=tensor_bytes(low_NV), frame=frame)


def _track_progress(pieces: Iterator[EncodedPiece], progress: ProgressBar) -> Iterator[EncodedPiece]:
    for piece in pieces:
        yield piece
        progress.advance(len(piece.raw))


def _copy_others(job: CompressionJob, target: Path) -> None:
    """Copies all that is not weights, with the sums of the new weights."""
    folder = job.folder
    recorded = checksums.parse_sums(folder.sums)
    if folder.sums:
        names = [name for name in folder.weights if str(name) in recorded]
        sums = dict(zip(map(str, names), job.pool.map(lambda name: _sha256(target / name), names), strict=True))
        write_file(target / checksums.SUMS_NAME, checksums.encode_sums(checksums.replace_sums(folder.sums, sums)))
        write_file(target / checksums.ORIGINAL_SUMS_NAME, checksums.encode_sums(folder.sums))
    for name in folder.other_files:
        copy_file(folder.path / name, target / name, job.progress.advance, recorded.get(str(name)))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _min_bytes(folder: SourceFolder, level: CompressionLevel) -> int:
    """The smallest size that the new folder can have."""
    shares = {True: _SHARE_MIN[level], False: 1.0}
    tensors = (tensor for header in folder.weights.values() for tensor in header.tensors)
    return folder.other_bytes + int(sum(shares[not shape_reason(tensor)] * tensor.bytes for tensor in tensors))


def _estimated_bytes(tensor: TensorSpan, decision: CodingDecision, level: CompressionLevel) -> int:
    if decision.bases_N is None:
        return tensor.bytes
    numbers = tensor.bytes // 2
    high_bits = 4.0 if level is CompressionLevel.DEVICE else decision.high_bits
    return int(numbers * (8.0 + high_bits) / 8) + tensor.shape[0] + _ESCAPE_BYTES * (decision.escapes or 0)


def _tensor_report(file: Path, tensor: TensorSpan, decision: CodingDecision, size: int) -> TensorReport:
    numbers = max(1, tensor.bytes // 2)
    return TensorReport(
        name=tensor.name,
        file=str(file),
        shape=tensor.shape,
        kind=tensor.dtype.lower() if decision.bases_N is None else BF12_KIND,
        escapes=decision.escapes,
        escape_rate=None if decision.escapes is None else decision.escapes / numbers,
        bytes_before=tensor.bytes,
        bytes_after=size,
        reason=decision.reason,
    )


def _report(
    folder: SourceFolder,
    target: Path | None,
    level: CompressionLevel,
    tensors: list[TensorReport],
    size: int,
    started: float,
) -> CompressionReport:
    return CompressionReport(
        source=str(folder.path),
        target=None if target is None else str(target),
        level=level.name.lower(),
        tensors=tensors,
        bytes_before=folder.weights_bytes,
        bytes_after=size,
        copied_files=len(folder.other_files),
        seconds=round(time.monotonic() - started, 3),
    )


if __name__ == "__main__":
    sys.exit(main())
