"""A GGUF file → a model's folder with its weights in bfloat16.

    python -m engine.gguf.convert FILE.gguf FOLDER [--json]

The file is looked through first, so that what cannot be served is refused before anything is written. Then weights are
read, expanded and written in pieces of whole rows: memory is bounded by a piece, whatever the size of a tensor.
"""

import argparse
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from engine.compression.program import print_json, run_program
from engine.compression.report import format_bytes
from engine.compression.target import atomic_folder, require_absent, require_disk_space, write_file
from engine.gguf.architectures import ROPE_FACTORS, TensorImport, config_of, tensor_imports
from engine.gguf.reader import GgufError, GgufFile, GgufTensor, read_gguf
from engine.gguf.tokenizer import TokenizerFiles, tokenizer_files
from engine.weights.checkpoint import INDEX_NAME, SINGLE_NAME
from engine.weights.progress import ProgressBar
from engine.weights.safetensors_header import TensorSpan, encode_header
from engine.weights.streaming import SourceFiles

_TYPES: Final = {
    kind: kind.name
    for kind in (
        *(GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.Q8_0),
        *(GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q5_0, GGMLQuantizationType.Q5_1),
        *(GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_K, GGMLQuantizationType.Q6_K),
    )
}
_NUMBER_BYTES: Final = 2
_PIECE_NUMBERS: Final = 1 << 20
SHARD_BYTES: Final = 4 << 30


class ImportReport(msgspec.Struct, frozen=True):
    """What became of a file. `types` counts its tensors by their types."""

    source: str
    target: str
    architecture: str
    tensors: int
    types: dict[str, int]
    bytes_before: int
    bytes_after: int
    chat_template: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of weights, and where each tensor lies in it."""

    name: str
    imports: tuple[TensorImport, ...]

    def spans(self) -> Iterator[TensorSpan]:
        end = 0
        for entry in self.imports:
            first, end = end, end + _bytes(entry)
            yield TensorSpan(entry.name, "BF16", entry.shape, first, end)


def import_file(path: Path, target: Path, shard_bytes: int = SHARD_BYTES) -> ImportReport:
    """Makes `target`, which may be an empty folder. Raises GgufError for what is wrong with the file, TargetError where
    the folder cannot be written; then nothing is left of it."""
    started = time.monotonic()
    with SourceFiles([path]) as files:
        file = read_gguf(path)
        config = config_of(file, _rope_factors(file, files))
        imports = tensor_imports(file, config)
        for entry in imports:
            _require_type(file, entry.source)
        texts = tokenizer_files(file, config["vocab_size"], config["max_position_embeddings"])
        written = sum(map(_bytes, imports))
        if target.name.strip(".") and target.is_dir() and not target.is_symlink() and not any(target.iterdir()):
            target.rmdir()
        require_absent(target)
        require_disk_space(target, written)
        with atomic_folder(target) as folder, ProgressBar("importing", written) as progress:
            shards = split_shards(imports, shard_bytes)
            for shard in shards:
                _write_shard(files, path, folder / shard.name, shard, progress)
            files.require_unchanged()
            if len(shards) > 1:
                _write_json(folder / INDEX_NAME, _index(shards, written))
            _write_texts(folder, config, texts)
    return ImportReport(
        source=str(path),
        target=str(target),
        architecture=config["architectures"][0],
        tensors=len(imports),
        types=dict(Counter(_TYPES[entry.source.type] for entry in imports).most_common()),
        bytes_before=file.bytes,
        bytes_after=written,
        chat_template="chat_template" in texts.settings,
        seconds=round(time.monotonic() - started, 3),
    )


def split_shards(imports: list[TensorImport], shard_bytes: int) -> list[Shard]:
    """The tensors in their order, in files of at most so many bytes, but for a tensor that alone has more."""
    groups: list[list[TensorImport]] = [[]]
    size = 0
    for entry in imports:
        if groups[-1] and size + _bytes(entry) > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += _bytes(entry)
    if len(groups) == 1:
        return [Shard(SINGLE_NAME, tuple(groups[0]))]
    return [
        Shard(f"model-{number:05}-of-{len(groups):05}.safetensors", tuple(group))
        for number, group in enumerate(groups, start=1)
    ]


def format_import(report: ImportReport) -> Iterator[str]:
    types = ", ".join(f"{count} {name}" for name, count in report.types.items())
    yield f"{report.architecture}: {report.tensors} tensors ({types}), now in bfloat16"
    sizes = f"{format_bytes(report.bytes_before)} → {format_bytes(report.bytes_after)}"
    yield f"{report.target} is written: {sizes} in {report.seconds:.1f} s"
    if not report.chat_template:
        yield "The file has no chat template: the model takes a `prompt`, and no `messages`"


def main() -> int:
    parser = argparse.ArgumentParser(prog="engine.gguf.convert")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()

    def work() -> None:
        report = import_file(options.source, options.target)
        print_json(report) if options.json else print(*format_import(report), sep="\n")

    return run_program(work)


def _bytes(entry: TensorImport) -> int:
    """Bytes in the checkpoint."""
    return _NUMBER_BYTES * math.prod(entry.shape)


def _require_type(file: GgufFile, tensor: GgufTensor) -> None:
    if tensor.type not in _TYPES:
        read = ", ".join(_TYPES.values())
        raise GgufError(f"{file.path} has {tensor.name} in {tensor.type.name}; read are {read}")


def _rope_factors(file: GgufFile, files: SourceFiles) -> NDArray[np.float32] | None:
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.type is not GGMLQuantizationType.F32 or math.prod(tensor.shape) > _PIECE_NUMBERS:
        raise GgufError(f"{file.path}: {ROPE_FACTORS} of {tensor.type.name} {list(tensor.shape)} is none of a rotation")
    return np.frombuffer(files.read(file.path, tensor.first, tensor.last - tensor.first), np.float32)


def _write_shard(files: SourceFiles, path: Path, target: Path, shard: Shard, progress: ProgressBar) -> None:
    with target.open("xb") as writing:
        writing.write(encode_header(shard.spans(), {"format": "pt"}))
        for entry in shard.imports:
            for piece_N in _pieces(files, path, entry):
                writing.write(piece_N.data)
                progress.advance(piece_N.nbytes)
        writing.flush()
        os.fsync(writing.fileno())


def _pieces(files: SourceFiles, path: Path, entry: TensorImport) -> Iterator[NDArray[np.uint8]]:
    """The tensor's bytes in bfloat16, some rows at a time; a vector is one row. Raises GgufError."""
    tensor = entry.source
    *outer, width = tensor.shape
    rows, unit = math.prod(outer), entry.head_dim if entry.head_dim and outer else 1
    row_bytes = (tensor.last - tensor.first) // rows
    step = max(1, _PIECE_NUMBERS // (width * unit)) * unit
    for first in range(0, rows, step):
        count = min(step, rows - first)
        raw = files.read(path, tensor.first + first * row_bytes, count * row_bytes)
        with np.errstate(all="ignore"):  # what is damaged is found below
            weight_NK = dequantize(np.frombuffer(raw, np.uint8).reshape(count, row_bytes), tensor.type)
        if not np.isfinite(weight_NK).all():
            raise GgufError(f"{path}: {tensor.name} has numbers that are none: it is damaged. Get the file again")
        if entry.head_dim:
            weight_NK = _in_halves(weight_NK, entry.head_dim, width if outer else 1)
        yield quantize(weight_NK, GGMLQuantizationType.BF16).reshape(-1)


def _in_halves(weight_NK: NDArray[np.float32], head_dim: int, width: int) -> NDArray[np.float32]:
    """Whole heads, whose rows have this width: of each head the first row of every pair, then the second."""
    pairs_HP2K = weight_NK.reshape(-1, head_dim // 2, 2, width)
    return np.ascontiguousarray(pairs_HP2K.swapaxes(1, 2)).reshape(weight_NK.shape)


def _index(shards: list[Shard], size: int) -> dict[str, Any]:
    places = {entry.name: shard.name for shard in shards for entry in shard.imports}
    return {"metadata": {"total_size": size}, "weight_map": places}


def _write_texts(folder: Path, config: dict[str, Any], texts: TokenizerFiles) -> None:
    """Writes config.json last: it makes a folder a model."""
    ids = texts.generation
    _write_json(folder / "tokenizer.json", texts.tokenizer)
    _write_json(folder / "tokenizer_config.json", texts.settings)
    _write_json(folder / "generation_config.json", ids)
    ends = {"bos_token_id": ids.get("bos_token_id"), "eos_token_id": ids["eos_token_id"][0]}
    _write_json(folder / "config.json", config | ends)


def _write_json(path: Path, document: object) -> None:
    write_file(path, json.dumps(document, indent=1, ensure_ascii=False).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
