"""A model's folder in bf16 → one whose linear layers' weights are in fp8 (e4m3), with a factor for each output, in the
layout of compressed-tensors; and how far each tensor is from what it was. Numbers are lost for good.

    python -m engine.compression.quantize SOURCE TARGET [--device auto|cpu|cuda:N] [--json]

The embedding, the head, norms, biases and routers stay as they are, and so do experts that are all in one tensor. Rows
are read, coded and written some at a time, so memory is bounded whatever the size of a tensor.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from engine.bf12.metadata import PIECE_BYTES
from engine.compression import checksums
from engine.compression.program import add_options, device_for, print_json, run_program
from engine.compression.source import list_names, weight_files
from engine.compression.target import atomic_folder, copy_file, require_absent, require_disk_space, write_file
from engine.compression.writer import tensor_bytes, write_at
from engine.models.config import ModelConfigError, read_decoder_config, read_json
from engine.models.weight_names import required_tensors
from engine.weights import fp8
from engine.weights.checkpoint import INDEX_NAME, Checkpoint
from engine.weights.progress import ProgressBar
from engine.weights.safetensors_header import SafetensorsHeader, TensorSpan, encode_header, read_header
from engine.weights.streaming import SourceFiles
from engine.weights.tensor_index import CheckpointError

_CODED: Final = ("qkv.weight", "output.weight", "gate_up.weight", "down.weight")  # ends of parameters' names
_DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_CONFIG: Final = "config.json"
_KIND: Final = "F8_E4M3"
_Span = tuple[str, str, tuple[int, ...], int]  # a tensor's name, dtype, shape and bytes


class QuantizedTensor(msgspec.Struct, frozen=True):
    """What became of a tensor. `error` is ‖what it is − what it was‖ ÷ ‖what it was‖, and `worst` that of its worst
    output; 0 where the tensor stays as it is."""

    name: str
    kind: str
    bytes_before: int
    bytes_after: int
    error: float = 0.0
    worst: float = 0.0


class QuantizationReport(msgspec.Struct, frozen=True):
    """What became of a folder; bytes are of the weights' files."""

    source: str
    target: str
    tensors: list[QuantizedTensor]
    bytes_before: int
    bytes_after: int
    seconds: float

    def lines(self) -> Iterator[str]:
        coded = [tensor for tensor in self.tensors if tensor.kind == _KIND]
        for tensor in sorted(coded, key=lambda tensor: -tensor.error):
            yield f"{tensor.error:8.4%}  worst output {tensor.worst:8.4%}  {tensor.name}"
        mean = sum(tensor.error for tensor in coded) / max(1, len(coded))
        yield f"{len(coded)} of {len(self.tensors)} tensors in 8 bits, {mean:.4%} off on average"
        yield f"{self.bytes_before / 1e6:.1f} MB -> {self.bytes_after / 1e6:.1f} MB in {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class _FilePlan:
    """What a file becomes: factors first, then what stays, then numbers of 8 bits, so that all are aligned."""

    header: SafetensorsHeader
    targets: dict[str, TensorSpan]
    start: bytes


def quantize_folder(source: Path, target: Path, device: torch.device) -> QuantizationReport:
    """Makes `target`. Raises CheckpointError for what is wrong with the folder, TargetError where it cannot be written;
    then nothing is left of it."""
    started = time.monotonic()
    require_absent(target)
    names = list_names(source)
    coded = _coded_tensors(source)
    plans = {name: _plan(read_header(source / name), coded) for name in weight_files(source, names)}
    before = sum(plan.header.bytes for plan in plans.values())
    others = [name for name in names if name not in plans and str(name) not in (_CONFIG, INDEX_NAME)]
    others = [name for name in others if str(name) not in (checksums.SUMS_NAME, checksums.ORIGINAL_SUMS_NAME)]
    require_disk_space(target, before)
    reports: list[QuantizedTensor] = []
    with (
        SourceFiles(source / name for name in plans) as files,
        ProgressBar("quantizing", before) as progress,
        atomic_folder(target) as folder,
    ):
        for name, plan in plans.items():
            reports += _write(files, source / name, plan, folder / name, device, progress.advance)
        for name in others:
            copy_file(source / name, folder / name, lambda count: None)
        files.require_unchanged()
        if (source / INDEX_NAME).exists():
            write_file(folder / INDEX_NAME, _index(read_json(source / INDEX_NAME), plans))
        write_file(folder / _CONFIG, _config(read_json(source / _CONFIG), [r.name for r in reports if r.kind != _KIND]))
        after = sum((folder / name).stat().st_size for name in plans)
    return QuantizationReport(str(source), str(target), reports, before, after, round(time.monotonic() - started, 3))


def _coded_tensors(source: Path) -> set[str]:
    """The names of those that become fp8. Raises CheckpointError where there are none, or the folder is not whole."""
    try:
        config = read_decoder_config(source, vectors=True)
    except ModelConfigError as error:
        raise CheckpointError(str(error)) from error
    checkpoint = Checkpoint(source)
    table, is_unused = required_tensors(config, checkpoint.tensors)
    checkpoint.require(table, is_unused)
    sources = [own for entry in table if entry.parameter.endswith(_CODED) for own in entry.sources]
    if config.fp8 is not None or any(checkpoint.tensors[own.name].bf12 is not None for own in sources):
        raise CheckpointError(f"{source} is quantised or compressed already: take the folder that it was made of")
    coded = {own.name for own in sources if len(own.shape) == 2 and own.stack is None}
    if not coded:
        raise CheckpointError(f"{source} has no matrix that could be in fp8")
    return coded


def _plan(header: SafetensorsHeader, coded: set[str]) -> _FilePlan:
    own = [tensor for tensor in header.tensors if tensor.name in coded]
    kept = sorted((tensor for tensor in header.tensors if tensor.name not in coded), key=lambda kept: -kept.item_bytes)
    spans: list[_Span] = [(f"{each.name}_scale", "F32", (each.shape[0], 1), 4 * each.shape[0]) for each in own]
    spans += [(tensor.name, tensor.dtype, tensor.shape, tensor.bytes) for tensor in kept]
    spans += [(tensor.name, _KIND, tensor.shape, math.prod(tensor.shape)) for tensor in own]
    start = len(encode_header(_placed(spans, 0), header.metadata))
    targets = _placed(spans, start)
    return _FilePlan(header, {span.name: span for span in targets}, encode_header(targets, header.metadata, start))


def _placed(spans: list[_Span], first: int) -> list[TensorSpan]:
    placed = []
    for name, dtype, shape, size in spans:
        placed.append(TensorSpan(name, dtype, shape, first, first + size))
        first += size
    return placed


def _write(
    files: SourceFiles, path: Path, plan: _FilePlan, target: Path, device: torch.device,
    on_bytes: Callable[[int], object],
) -> Iterator[QuantizedTensor]:  # fmt: skip
    with target.open("xb", buffering=0) as writing:
        write_at(writing.fileno(), 0, memoryview(plan.start))
        for tensor in plan.header.tensors:
            span, scales = plan.targets[tensor.name], plan.targets.get(f"{tensor.name}_scale")
            errors, rows = [], _rows_together(tensor)
            for first in range(0, tensor.bytes, rows):
                content = files.read(path, tensor.first + first, min(rows, tensor.bytes - first))
                on_bytes(len(content))
                if scales is None:
                    write_at(writing.fileno(), span.first + first, memoryview(content))
                    continue
                weight_NK = torch.frombuffer(content, dtype=_DTYPES[tensor.dtype]).view(-1, tensor.shape[1])
                numbers_NK, scales_N1, squares_N2 = _code(weight_NK.to(device), path, tensor.name)
                done = first // (tensor.shape[1] * tensor.item_bytes)
                write_at(writing.fileno(), span.first + done * tensor.shape[1], tensor_bytes(numbers_NK.cpu()))
                write_at(writing.fileno(), scales.first + 4 * done, tensor_bytes(scales_N1.cpu()))
                errors.append(squares_N2)
            yield _report(tensor, span, torch.cat(errors) if errors else None)
        os.fsync(writing.fileno())


def _rows_together(tensor: TensorSpan) -> int:
    """The bytes of so many whole rows as are read at once."""
    row = tensor.item_bytes * math.prod(tensor.shape[1:])
    return max(1, PIECE_BYTES // max(1, row)) * row if len(tensor.shape) > 1 else max(1, tensor.bytes)


def _code(weight_NK: Tensor, path: Path, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers as bytes, factors, and the squares of each output's error and of itself."""
    if not bool(weight_NK.isfinite().all()):
        raise CheckpointError(f"{path}: {name} has values that are not finite: the file is damaged")
    numbers_NK, scales_N1 = fp8.quantize(weight_NK)
    wanted = weight_NK.double()
    off = fp8.expand(numbers_NK, scales_N1, torch.float64) - wanted
    return numbers_NK.view(torch.uint8), scales_N1, torch.stack((off.square().sum(1), wanted.square().sum(1)), 1)


def _report(tensor: TensorSpan, span: TensorSpan, squares_N2: Tensor | None) -> QuantizedTensor:
    if squares_N2 is None:
        return QuantizedTensor(tensor.name, tensor.dtype, tensor.bytes, span.bytes)
    off, whole = squares_N2.sum(0).tolist()
    worst = (squares_N2[:, 0] / squares_N2[:, 1].clamp_min(1e-300)).max().sqrt().item()
    error = math.sqrt(off / whole) if whole else 0.0
    after = span.bytes + 4 * tensor.shape[0]
    return QuantizedTensor(tensor.name, _KIND, tensor.bytes, after, error, worst)


def _index(index: dict[str, Any], plans: dict[Path, _FilePlan]) -> bytes:
    where = {tensor: str(name) for name, plan in plans.items() for tensor in plan.targets}
    size = sum(span.bytes for plan in plans.values() for span in plan.targets.values())
    return json.dumps({**index, "metadata": {"total_size": size}, "weight_map": where}, indent=2).encode()


def _config(config: dict[str, Any], kept: list[str]) -> bytes:
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": "channel", "dynamic": False},
        "input_activations": {**number, "strategy": "token", "dynamic": True},
    }
    entry = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(name.removesuffix(".weight") for name in kept if name.endswith(".weight")),
    }  # fmt: skip
    return json.dumps({**config, "quantization_config": entry}, indent=2).encode()


def main() -> int:
    parser = argparse.ArgumentParser(prog="engine.compression.quantize")
    add_options(parser)
    parser.add_argument("target", type=Path, help="a new folder")
    options = parser.parse_args()

    def work() -> None:
        report = quantize_folder(options.source, options.target, device_for(options.device))
        print_json(report) if options.json else print(*report.lines(), sep="\n")

    return run_program(work)


if __name__ == "__main__":
    sys.exit(main())
