"""A compressed folder (bf12/metadata.py) → the one that it was made of, bit for bit.

    python -m engine.compression.expand SOURCE TARGET [--device auto|cpu|cuda:N] [--json]

Each piece that is read is checked against its sum, and the result against those of each tensor and of the whole file.
Memory is bounded by the pieces that are being made and a tensor's escapes.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final

import torch
import xxhash

from engine.bf12.metadata import Plane
from engine.compression import checksums
from engine.compression.program import add_options, device_for, map_ordered, print_json, run_program, threads_for
from engine.compression.report import ExpansionReport
from engine.compression.source import list_names, weight_files
from engine.compression.target import atomic_folder, copy_file, require_absent, require_disk_space
from engine.compression.writer import tensor_bytes, write_at
from engine.weights.bf12_reader import CompressedFile, read_compressed
from engine.weights.pieces import read_matrices
from engine.weights.progress import ProgressBar
from engine.weights.safetensors_header import read_header
from engine.weights.streaming import FilePiece, SourceFiles, expand_piece, split_pieces
from engine.weights.tensor_index import CheckpointError

_RETRY_HINT: Final = "get the file again"


def expand_folder(source: Path, target: Path, device: torch.device) -> ExpansionReport:
    """Makes `target`. Raises CheckpointError for what is wrong with the folder, TargetError where it cannot be written;
    then nothing is left of it."""
    started = time.monotonic()
    require_absent(target)
    names = list_names(source)
    opened = {name: read_compressed(source / name, read_header(source / name)) for name in weight_files(source, names)}
    files = {name: file for name, file in opened.items() if file is not None}
    if not files:
        raise CheckpointError(f"{source} is not compressed: there is nothing to expand")
    copied = [name for name in names if name not in files]
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
        make = partial(_original_bytes, source_files, device)
        for name, file in files.items():
            with closing(map_ordered(pool, make, _pieces(source_files, file), threads + 2)) as pieces:
                _restore(file, pieces, partial_folder / name, progress)
        for name in copied:
            is_sums = name == Path(checksums.ORIGINAL_SUMS_NAME)
            original_name = checksums.SUMS_NAME if is_sums else name
            copy_file(source / name, partial_folder / original_name, progress.advance)
        source_files.require_unchanged()
    stored = sum(file.path.stat().st_size for file in files.values())
    return ExpansionReport(str(source), str(target), len(files), stored, size, round(time.monotonic() - started, 3))


def main() -> int:
    parser = argparse.ArgumentParser(prog="engine.compression.expand")
    add_options(parser)
    parser.add_argument("target", type=Path, help="a new folder")
    options = parser.parse_args()

    def work() -> None:
        report = expand_folder(options.source, options.target, device_for(options.device))
        print_json(report) if options.json else print(report.line)

    return run_program(work)


def _restore(file: CompressedFile, pieces: Iterator[memoryview], path: Path, progress: ProgressBar) -> None:
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
                end = write_at(target.fileno(), end, piece)
                progress.advance(len(piece))
            code = file.metadata.codes.get(tensor.name)
            if code is not None and whole.hexdigest() != code:
                raise CheckpointError(
                    f"{file.path}: {tensor.name} is not the tensor that was compressed: {_RETRY_HINT}"
                )
        if total.hexdigest() != file.metadata.original.xxh3_128:
            raise CheckpointError(f"{file.path} does not give the file that was compressed: {_RETRY_HINT}")
        os.fsync(target.fileno())


def _pieces(files: SourceFiles, file: CompressedFile) -> Iterator[FilePiece]:
    """The pieces of the original, in the order of their bytes. Their targets have shapes and no memory."""
    for tensor in file.original.tensors:
        name, stored = tensor.name, file.tensors[tensor.name]
        if stored.bf12 is None:
            target = torch.empty(stored.bytes, dtype=torch.uint8, device="meta")
            yield from split_pieces(name, file.path, stored.first, torch.uint8, target, stored.sums)
        else:
            matrix = read_matrices({name: stored}, lambda: None)[name]
            if matrix.frames is not None:
                end, last = matrix.frames[-1].stop, stored.bf12[Plane.HIGH].last
                if any(files.read(file.path, end, last - end)):
                    raise CheckpointError(f"{file.path}: {name} was altered behind its frames: {_RETRY_HINT}")
            yield from matrix.pieces(torch.empty(stored.shape, dtype=torch.bfloat16, device="meta"))


def _original_bytes(files: SourceFiles, device: torch.device, piece: FilePiece) -> memoryview:
    stored = bytearray(piece.bytes)
    files.read_piece(piece, memoryview(stored))
    if piece.rows is None:
        return memoryview(stored)
    return tensor_bytes(expand_piece(piece, torch.frombuffer(stored, dtype=torch.int32).to(device)).cpu())


if __name__ == "__main__":
    sys.exit(main())
