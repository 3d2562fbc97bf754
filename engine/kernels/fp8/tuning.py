"""Which kernel multiplies a weight in 8 bits a number, each output with a factor, with some number of rows: as measured
by `python -m benchmarks.engine.fp8 --part matmuls`, in the tables of kernels/tuning_tables.py.

A GPU or a shape that was not measured gets a choice by a rule that follows from a sweep over one model's shapes.
"""

from bisect import bisect_left
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any, Final

import torch
import triton

from engine.kernels.fp8.tiles import Fp8Tiling
from engine.kernels.linear import LINEAR_ROWS_MAX, LinearTiling
from engine.kernels.tuning import device_name
from engine.kernels.tuning_tables import fp8_key, load_table

FP8_ROW_BUCKETS: Final = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # larger counts take the last one
_PROGRAMS: Final = 128  # that keep a large GPU reading numbers of 8 bits by tensor cores
_PARTS_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class LibraryMatmul:
    """The library's product. `exact`: sums are brought to float32 again and again, which tensor cores do not do."""

    exact: bool


@dataclass(frozen=True, slots=True)
class PackingRow:
    """The kernel of linear.py for one row that it brings to 8 bits itself, where nobody has."""

    tiling: LinearTiling


Fp8Kernel = LinearTiling | PackingRow | Fp8Tiling | LibraryMatmul


def kernel_entry(kernel: Fp8Kernel) -> list[str | int | bool]:
    """A kernel as a table has it: its name, then its numbers."""
    match kernel:
        case PackingRow(tiling):
            return ["packing row", *astuple(tiling)]
        case LinearTiling():
            return ["rows", *astuple(kernel)]
        case Fp8Tiling():
            return ["tiles", *astuple(kernel)]
        case LibraryMatmul(exact):
            return ["library", exact]


def kernel_of(entry: list[Any]) -> Fp8Kernel:
    """The kernel of a table's entry. Raises ValueError for one of another name."""
    match entry:
        case ["packing row", *numbers]:
            return PackingRow(LinearTiling(*numbers))
        case ["rows", *numbers]:
            return LinearTiling(*numbers)
        case ["tiles", *numbers]:
            return Fp8Tiling(*numbers)
        case ["library", exact]:
            return LibraryMatmul(exact)
    raise ValueError(f"{entry}: there is no such kernel for 8 bits")


def select_fp8_kernel(outputs: int, inputs: int, rows: int, device: torch.device) -> Fp8Kernel:
    bucket = fp8_bucket(rows)
    kernel = _measured(outputs, inputs, bucket, False, device_name(device))
    if kernel is not None:
        return kernel
    return LibraryMatmul(exact=True) if rows > LINEAR_ROWS_MAX else rule_tiling(outputs, inputs, rows, gated=False)


def select_gated_tiling(outputs: int, inputs: int, rows: int, device: torch.device) -> LinearTiling | None:
    """The tiling of a kernel that gates what it multiplies, or None: what is multiplied by another is gated then."""
    if rows > LINEAR_ROWS_MAX:
        return None
    kernel = _measured(outputs, inputs, fp8_bucket(rows), True, device_name(device))
    if kernel is None:
        return rule_tiling(outputs, inputs, rows, gated=True)
    return kernel if isinstance(kernel, LinearTiling) else None


def fp8_bucket(rows: int) -> int:
    """The number of rows whose measurement serves so many."""
    return FP8_ROW_BUCKETS[min(bisect_left(FP8_ROW_BUCKETS, rows), len(FP8_ROW_BUCKETS) - 1)]


def rule_tiling(outputs: int, inputs: int, rows: int, gated: bool) -> LinearTiling:
    """For at most linear.LINEAR_ROWS_MAX rows: the fastest, or nearly, of a sweep over Llama-3.1-8B's shapes on an
    H200."""
    if gated:
        return LinearTiling(64, 128, 1, 4 if rows <= 64 else 3, 4)
    programs, parts = triton.cdiv(outputs, 64), 1
    wanted = _PROGRAMS if rows > 32 else _PROGRAMS * 3 // 2  # parts of few rows are soon added up
    while parts < _PARTS_MAX and programs * parts < wanted and inputs >= 8 * 128 * parts:
        parts *= 2
    return LinearTiling(64, 128, parts, 6 if rows <= 64 else 4, 4)


@cache
def _measured(outputs: int, inputs: int, bucket: int, gated: bool, gpu: str) -> Fp8Kernel | None:
    entry = load_table(gpu).get(fp8_key(outputs, inputs, gated), {}).get(str(bucket))
    return None if entry is None else kernel_of(entry)
