"""Finds the fastest kernel for Llama-3.1-8B's matrices in 8 bits a number, per shape and number of rows, and what is
saved where rows are packed as they are written.

    python -m benchmarks.engine.fp8_matmuls [--rows 16,128,512,1024,2048,4096] [--table found.json]

First processes beside each other compile every kernel and compare what it gives with float32: a kernel whose sums are
off by more than a tenth of what 8 bits themselves lose is shown and not chosen. Then each runs alone in a CUDA graph
over copies of its weight, more than the L2 cache holds, with what brings its rows to 8 bits where nobody else does;
float32 parts are charged with reading them. Each time is printed beside max(bytes ÷ 4.3 TB/s, FLOP ÷ 1,580 T). The
table has the winners as kernels/tables has them.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from benchmarks.engine.experts import graph_us
from engine.bench.geometries import BYTES_PER_S, FLOP_PER_S
from engine.kernels import linear
from engine.kernels.elementwise import silu_and_multiply, silu_and_pack
from engine.kernels.experts.quantize_rows import quantize_rows
from engine.kernels.fp8 import tiles
from engine.kernels.fp8.tiles import Fp8Tiling
from engine.kernels.fp8.tuning import Fp8Kernel, LibraryMatmul, PackingRow, kernel_entry
from engine.kernels.linear import LINEAR_ROWS_MAX, LinearScales, LinearTiling
from engine.kernels.packed_rows import factors_of, new_packed, numbers_of
from engine.kernels.rms_norm import add_norm
from engine.kernels.tuning_tables import fp8_key
from engine.weights import fp8

SHAPES: Final = {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS: Final = (1, 64, 256, 8192)
ERROR_SHARE: Final = 0.1  # of what 8 bits lose, that sums may be off
_ROUNDED: Final = 2e-3  # that bfloat16 alone is off
_COPIES_BYTES: Final = 256 << 20
_SHARED_BYTES: Final = 226 << 10
_PROGRAMS_LEAST: Final = 80
_FIRST_S: Final = 100.0  # for compiling and comparing: what is not done by then is left out


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel for one shape and number of rows. Gated: outputs are those of gate above up."""

    name: str
    rows: int
    gated: bool
    kernel: Fp8Kernel

    @property
    def shape(self) -> tuple[int, int]:
        return SHAPES[self.name]

    @property
    def bound_us(self) -> float:
        outputs, inputs = self.shape
        return 1e6 * max(outputs * inputs / BYTES_PER_S, self.rows * outputs * inputs / FLOP_PER_S)


@dataclass(frozen=True, slots=True)
class Numbers:
    """Rows and a weight as they are, and in 8 bits."""

    x_TK: Tensor
    weight_NK: Tensor
    rows_TK: Tensor
    numbers_NK: Tensor
    scales: LinearScales

    @classmethod
    def make(cls, rows: int, outputs: int, inputs: int, device: str = "cuda") -> "Numbers":
        generator = torch.Generator(device).manual_seed(rows)
        x_TK = torch.randn(rows, inputs, device=device, generator=generator).bfloat16()
        weight_NK = torch.randn(outputs, inputs, device=device, generator=generator).mul_(inputs**-0.5).bfloat16()
        own, (numbers_NK, scales_N1) = quantize_rows(x_TK, 1), fp8.quantize(weight_NK)
        assert own.scales is not None
        return cls(x_TK, weight_NK, own.rows, numbers_NK, LinearScales(scales_N1, own.scales))

    def products(self) -> tuple[Tensor, Tensor]:
        """Of what they are in 8 bits, and of what they are: float32 [T, N]."""
        rows_TK = self.rows_TK.float() * self.scales.row_T1
        exact_TN = rows_TK @ (self.numbers_NK.float() * self.scales.weight_N1).T
        return exact_TN, self.x_TK.float() @ self.weight_NK.float().T


def works(rows: tuple[int, ...]) -> Iterator[Work]:
    for name, count in product(SHAPES, rows):
        outputs, inputs = SHAPES[name]
        kernels = [*_of_few_rows(outputs, inputs, count), *_of_tiles(outputs, inputs, count)]
        kernels += [LibraryMatmul(True), LibraryMatmul(False)] if count >= 64 else []
        yield from (Work(name, count, False, kernel) for kernel in kernels)
        if name == "gate_up" and count <= LINEAR_ROWS_MAX:
            yield from (Work(name, count, True, tiling) for tiling in _of_gated(count))


def _of_few_rows(outputs: int, inputs: int, rows: int) -> Iterator[Fp8Kernel]:
    if rows > LINEAR_ROWS_MAX:
        return
    blocks = ((64, 128, 4), (64, 128, 6), (64, 128, 8), (64, 256, 3), (64, 256, 4), (128, 128, 4), (128, 128, 6))
    for (block_n, block_k, stages), parts in product(blocks, (1, 2, 4)):
        programs, shared = outputs // block_n * parts, stages * block_k * (block_n + max(16, rows))
        if _PROGRAMS_LEAST <= programs <= 700 and shared <= _SHARED_BYTES:
            tiling = LinearTiling(block_n, block_k, parts, stages, 8 if block_n * rows > 8192 else 4)
            yield tiling
            if rows == 1:
                yield PackingRow(tiling)


def _of_gated(rows: int) -> Iterator[LinearTiling]:
    for block_n, block_k, stages, warps in (
        (64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 5, 4), (64, 128, 6, 4), (64, 256, 2, 4), (64, 256, 3, 4),
        (64, 128, 4, 8), (128, 128, 3, 8), (128, 128, 4, 8), (32, 128, 6, 4), (32, 256, 4, 4),
    ):  # fmt: skip
        if stages * block_k * (2 * block_n + max(16, rows)) <= _SHARED_BYTES:
            yield LinearTiling(block_n, block_k, 1, stages, warps)


def _of_tiles(outputs: int, inputs: int, rows: int) -> Iterator[Fp8Kernel]:
    blocks = [(64, 64, 6, 4, False), (64, 128, 5, 4, False), (64, 256, 4, 4, False)]
    if rows > 64:
        blocks += [
            (128, 256, 3, 8, False), (128, 256, 4, 8, False), (128, 128, 4, 8, False), (128, 128, 6, 8, False),
            (256, 128, 3, 8, False), (256, 128, 4, 8, False), (128, 128, 4, 8, True), (128, 64, 6, 4, False),
        ]  # fmt: skip
    for (block_t, block_n, stages, warps, exact), parts in product(blocks, (1, 2, 4)):
        programs = -(-rows // block_t) * (outputs // block_n) * parts
        crowded = parts > 1 and (programs > 300 or rows > 1024)
        if programs < _PROGRAMS_LEAST or crowded or (rows > 512 and block_t == 64):
            continue
        yield Fp8Tiling(block_t, block_n, 128, parts, stages, warps, exact)


def multiply(kernel: Fp8Kernel, numbers: Numbers, weight_NK: Tensor, gated: bool) -> Tensor:
    """[P, T, N], as engine/layers/linear_fp8.py has it."""
    rows_TK, scales, dtype = numbers.rows_TK, numbers.scales, torch.bfloat16
    match kernel:
        case LinearTiling() if gated:
            return linear.multiply_gated(rows_TK, weight_NK, kernel, scales, dtype)[None]
        case PackingRow(tiling):
            return linear.multiply(numbers.x_TK, weight_NK, tiling, LinearScales(scales.weight_N1, None), dtype)
        case LinearTiling():
            return linear.multiply(rows_TK, weight_NK, kernel, scales, dtype)
        case Fp8Tiling():
            return tiles.multiply(rows_TK, weight_NK, kernel, scales, dtype)
        case LibraryMatmul(exact):
            out_TN: Tensor = torch._scaled_mm(
                rows_TK, weight_NK.T, scales.row_T1, scales.weight_N1.T, out_dtype=dtype, use_fast_accum=not exact
            )
            return out_TN[None]


def check(batch: list[Work]) -> list[tuple[float, float] | str]:
    """Of each kernel of one shape and number of rows how far it is off, and how far 8 bits are, or why there is none.
    What is compiled here is compiled for good."""
    first = batch[0]
    numbers = Numbers.make(first.rows, *first.shape)
    exact_TN, plain_TN = numbers.products()
    found: list[tuple[float, float] | str] = []
    for work in batch:
        try:
            found_TN = multiply(work.kernel, numbers, numbers.numbers_NK, work.gated).float().sum(0)
            wanted_TN = silu_and_multiply(exact_TN) if work.gated else exact_TN
            torch.cuda.synchronize()
            found.append((_error(found_TN, wanted_TN), _error(exact_TN, plain_TN)))
        except Exception as error:  # a kernel that does not fit is left out, whatever says so
            found.append(f"{type(error).__name__}: {str(error)[:80]}")
    return found


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def measure_us(work: Work, numbers: Numbers, copies: list[Tensor]) -> float:
    """With what brings rows to 8 bits before, where nobody else does: attention's, and few gated ones."""
    plain = work.name == "output" or (work.name == "down" and work.rows <= LINEAR_ROWS_MAX)

    def call(weight_NK: Tensor) -> Callable[[], Tensor]:
        def called() -> Tensor:
            if plain and not isinstance(work.kernel, PackingRow):
                quantize_rows(numbers.x_TK, 1)
            return multiply(work.kernel, numbers, weight_NK, work.gated)

        return called

    parts_PTN = multiply(work.kernel, numbers, copies[0], work.gated)
    extra_bytes = parts_PTN.nbytes - 2 * parts_PTN[0].numel()
    return graph_us([call(weight_NK) for weight_NK in copies]) + 1e6 * extra_bytes / BYTES_PER_S


def find(rows: tuple[int, ...], processes: int) -> dict[str, dict[str, list[str | int | bool]]]:
    """The winners, by key and number of rows."""
    batches: dict[tuple[str, int], list[Work]] = {}
    for work in works(rows):
        batches.setdefault((work.name, work.rows), []).append(work)
    checked = _check_all(batches, processes)
    table: dict[str, dict[str, list[str | int | bool]]] = {}
    for (name, count), batch in batches.items():
        numbers = Numbers.make(count, *SHAPES[name])
        copies = [numbers.numbers_NK.clone() for _ in range(max(2, _COPIES_BYTES // numbers.numbers_NK.nbytes))]
        for gated in (False, True):
            timed = []
            for work in batch:
                state = checked.get(work, "was not compiled in time")
                if work.gated != gated:
                    continue
                if isinstance(state, str):
                    print(f"{name:8} {count:5} {work.kernel}: {state}", flush=True)
                    continue
                timed.append((measure_us(work, numbers, copies), *state, work))
            best = _shown(sorted(timed, key=lambda each: each[0]))
            if best is not None:
                outputs, inputs = best.shape
                table.setdefault(fp8_key(outputs, inputs, gated), {})[str(count)] = kernel_entry(best.kernel)
        del numbers, copies
    return table


def _check_all(
    batches: dict[tuple[str, int], list[Work]], processes: int
) -> dict[Work, tuple[float, float] | str]:  # fmt: skip
    """Four kernels a process and turn, so that no process has all the slow ones."""
    pieces = [batch[first : first + 4] for batch in batches.values() for first in range(0, len(batch), 4)]
    until, checked = time.monotonic() + _FIRST_S, {}
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
    futures = {pool.submit(check, piece): piece for piece in pieces}
    for future, piece in futures.items():
        try:
            states = future.result(max(0.1, until - time.monotonic()))
        except TimeoutError:
            continue
        except Exception as error:  # its process ended: nothing else is lost
            states = [repr(error)] * len(piece)
        checked.update(zip(piece, states, strict=True))
    pool.shutdown(wait=False, cancel_futures=True)
    return checked


def _shown(timed: list[tuple[float, float, float, Work]]) -> Work | None:
    """Prints the fastest ones, and gives the first whose sums are near enough."""
    best = None
    for place, (us, off, lost, work) in enumerate(timed):
        near = off <= max(ERROR_SHARE * lost, 2 * _ROUNDED)
        first = near and best is None
        best = work if first else best
        is_library = isinstance(work.kernel, LibraryMatmul)
        if place < 4 or first or is_library:
            sign, gated = "*" if first else " " if near else "!", " gated" if work.gated else ""
            print(
                f"{sign} {work.name + gated:14} {work.rows:5} {us:9.1f} µs  x{us / work.bound_us:5.2f}  "
                f"error {off:.5f} of {lost:.4f}  {kernel_entry(work.kernel)}",
                flush=True,
            )
    return best


def measure_packing(rows: int) -> None:
    """What rows take that are packed where they are written, beside those that are brought to 8 bits afterwards."""
    sum_TH, weight_H = torch.randn(rows, 4096, device="cuda"), torch.ones(4096, device="cuda")
    plain_TH = torch.empty(rows, 4096, dtype=torch.bfloat16, device="cuda")
    packed_TP = new_packed(rows, 4096, sum_TH.device)
    gate_up = torch.randn(rows, 28672, device="cuda").bfloat16()
    part = torch.zeros(1, rows, 4096, dtype=torch.bfloat16, device="cuda")

    def normed(out: Tensor) -> Tensor:
        add_norm(sum_TH, part, weight_H, 1e-5, out)
        return out

    for packed, plain in ((normed(packed_TP), normed(plain_TH)), (silu_and_pack(gate_up), silu_and_multiply(gate_up))):
        off = _error(numbers_of(packed).float() * factors_of(packed), plain.float())
        assert off < 0.05, "packed rows are wrong"
    ways: dict[str, Callable[[], object]] = {
        "norm, plain": lambda: normed(plain_TH),
        "norm, then 8 bits": lambda: quantize_rows(normed(plain_TH), 1),
        "norm, packed": lambda: normed(packed_TP),
        "gate, then 8 bits": lambda: quantize_rows(silu_and_multiply(gate_up), 1),
        "gate, packed": lambda: silu_and_pack(gate_up),
    }
    for name, way in ways.items():
        print(f"  {name:18} {rows:5} {graph_us([way] * 16):9.2f} µs", flush=True)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.engine.fp8_matmuls", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--processes", type=int, default=14, help="that compile beside each other (default: 14)")
    parser.add_argument("--table", type=Path, help="file for the winners")
    options = parser.parse_args(arguments)
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = tuple(int(count) for count in options.rows.split(","))
    print(torch.cuda.get_device_name())
    for count in rows:
        measure_packing(count)
    table = find(rows, options.processes)
    if options.table is not None:
        options.table.write_text(json.dumps(table, indent=1))
    print(json.dumps(table))


if __name__ == "__main__":
    main(sys.argv[1:])
