"""Finds the fastest way to multiply few rows, per shape and number of rows, and writes the table that choices.py reads:
for weights in bf16, and for the same in 12 bits a number.

    python -m benchmarks.linear --write                  every shape, on the GPU at hand
    python -m benchmarks.linear --only bf12 --models llama-3.1-8b --rows 1,8

Each candidate runs in a CUDA graph over several copies of the weight, more than the L2 cache holds, as a decode step
reads each weight once. Its time stands beside the bound: bytes of the weight ÷ the memory's speed.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.record import record
from engine.kernels import coded, linear
from engine.kernels.choices import BUCKETS, CODED_BUCKETS, choose, device_name
from engine.kernels.coded import CodedTiling
from engine.kernels.expand import expand
from engine.kernels.gated import silu_and_multiply
from engine.kernels.linear import Tiling
from engine.kernels.measured import key_of, path_of, ratio_key_of
from engine.weights.codec import Bf12, choose_bases, encode, stack
from engine.weights.lanes import lanes_of

Shape = tuple[int, int, bool]  # outputs, inputs, gated
LLAMA_8B: list[Shape] = [(6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False)]
SHAPES: dict[str, list[Shape]] = {
    "llama-3.1-8b": [*LLAMA_8B, (128256, 4096, False)],
    "qwen3-8b": [(24576, 4096, True), (4096, 12288, False), (151936, 4096, False)],
    "qwen3-14b": [
        (7168, 5120, False), (5120, 5120, False), (34816, 5120, True), (5120, 17408, False), (151936, 5120, False),
    ],
    "qwen3-0.6b": [
        (4096, 1024, False), (1024, 2048, False), (6144, 1024, True), (1024, 3072, False), (151936, 1024, False),
    ],
}  # fmt: skip
BYTES_PER_S = 4.3e12
_COPIES_BYTES = 400 << 20
_SHARED_BYTES = 200 << 10
_REPEATS = 5
_WIN = 0.99  # a kernel of ours is chosen over cuBLAS where it takes less than this of its time
_SIGMA = 0.02

# What multiplies rows by a weight, in either storage.
Call = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Timed:
    """One way to multiply. Without a tiling it is the library's; what is gated after its product is not fused."""

    us: float
    tiling: Tiling | CodedTiling | None
    fused: bool


def candidates(outputs: int, inputs: int, bucket: int, gated: bool) -> list[Tiling]:
    """Tilings whose tiles fit the shape and the shared memory, with enough programs to keep the GPU reading."""
    if bucket == 1:
        grid = product((4, 8, 16, 32), (256, 512, 1024), (1, 2, 4), (2, 3, 4), (2, 4))
    else:
        grid = product((32, 64, 128), (64, 128, 256), (1, 2, 3, 4), (3, 4, 5, 6), (4, 8))
    found = []
    for block_n, block_k, parts, stages, warps in grid:
        weights = 2 if gated else 1
        programs = outputs // weights // block_n * parts
        staged = stages * block_k * 2 * (block_n * weights + max(16, bucket)) if bucket > 1 else 0
        if (gated and parts > 1) or inputs % block_k or outputs // weights % block_n or staged > _SHARED_BYTES:
            continue
        if inputs // block_k // parts < 2 or (programs < 90 and parts < 8) or (parts > 1 and programs > 1600):
            continue
        if bucket == 1 and not 8 <= block_n * block_k * weights // (warps * 32) <= 128:
            continue
        if bucket > 1 and (warps == 8) != (block_n * weights * max(64, bucket) > 64 * 128):
            continue
        found.append(Tiling(block_n, block_k, parts, stages, warps))
    return found


def coded_candidates(outputs: int, inputs: int, bucket: int, gated: bool) -> list[CodedTiling]:
    """As `candidates`, for 12 bits a number: by multiply and add for one row, and on tensor cores."""
    lanes, inner, weights = lanes_of(inputs), outputs // 2 if gated else outputs, 2 if gated else 1
    grid = [*product((4, 8, 16, 32, 64), (1, 2, 4), (1, 2, 4), (3, 5), (2, 4, 8), (0,))] if bucket == 1 else []
    if bucket < 64:
        grid += product((32,), (1,), (1, 2, 4, 8), (3, 4, 6), (2,), (4,))
        grid += product((64, 128), (1,), (1, 2, 3, 4, 6, 8), (2, 3, 4, 6), (4,), (4,) if bucket == 1 else (1, 4, 8))
    else:
        grid += product((64, 128), (1,), (1, 2, 3, 4, 6), (2, 3, 4), (4, 8), (2, 4, 8))
    found = []
    for block_n, blocks, parts, stages, warps, joined in grid:
        if (gated and parts > 1) or inner % block_n or inputs % (8 * lanes * blocks):
            continue
        programs, turns = inner // block_n * parts, inputs // (8 * lanes * blocks) // parts
        if turns < 1 or (programs < 90 and parts < 8) or (parts > 1 and programs > 1600):
            continue
        staged = stages * 8 * lanes * blocks * (1.5 * block_n * weights + (2 * max(16, bucket) if joined else 2))
        if staged > _SHARED_BYTES:
            continue
        if joined == 0 and block_n * blocks * lanes // (warps * 32) not in (4, 8, 16):
            continue  # words of a thread, of which four are 16 bytes
        if joined > 0 and block_n * weights * max(bucket, 16) > 2048 * warps:
            continue  # sums and decoded weights would not fit the registers
        found.append(CodedTiling(block_n, blocks, parts, stages, warps, joined))
    return found


def gated_after(call: Call) -> Call:
    def gate(x_TK: Tensor, weight: Any) -> Tensor:
        x_T2I = call(x_TK, weight)
        x_T2I = x_T2I[0] if x_T2I.ndim == 3 else x_T2I
        out_TI = x_T2I.new_empty(len(x_TK), x_T2I.shape[1] // 2)
        silu_and_multiply(x_T2I, out_TI)
        return out_TI

    return gate


def runs(tiling: Tiling | CodedTiling | None, gated: bool, fused: bool) -> Call:
    """None is the library, with a bf16 weight."""
    if tiling is None:
        return gated_after(torch.nn.functional.linear) if gated else torch.nn.functional.linear
    module: Any = coded if isinstance(tiling, CodedTiling) else linear
    if gated and fused:
        return lambda x_TK, weight: module.multiply_gated(x_TK, weight, tiling)
    plain: Call = lambda x_TK, weight: module.multiply(x_TK, weight, tiling)  # noqa: E731
    return gated_after(plain) if gated else plain


def by_expanding(x_TK: Tensor, weight: Bf12) -> Tensor:
    weight_NK = x_TK.new_empty(weight.outputs, weight.inputs)
    expand(weight, weight_NK, range(weight.outputs))
    return torch.nn.functional.linear(x_TK, weight_NK)


def microseconds(call: Call, x_TK: Tensor, weights: Sequence[Any]) -> float:
    """The median time of one call, over copies that the L2 cache does not hold
    together."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(x_TK, weights[0])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            call(x_TK, weight)
    graph.replay()
    took = []
    for _ in range(_REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(start.elapsed_time(end) * 1e3 / len(weights))
    return float(statistics.median(took))


def random_weights(shape: Shape, is_coded: bool) -> tuple[Tensor, list[Any]]:
    """A matrix, and copies of it as they are multiplied."""
    outputs, inputs, _ = shape
    weight_NK = torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda").mul_(_SIGMA)
    weight_bytes = outputs * inputs * (1.5 if is_coded else 2)
    copies = min(24, max(2, -int(-_COPIES_BYTES // weight_bytes)))
    if not is_coded:
        return weight_NK, [weight_NK, *(weight_NK.clone() for _ in range(copies - 1))]
    weight = stack([encode(weight_NK, choose_bases(weight_NK))])
    return weight_NK, [weight, *(Bf12(weight.words_NW.clone(), weight.index) for _ in range(copies - 1))]


def compile_some(task: tuple[Shape, int, list[tuple[Tiling | CodedTiling, bool]]]) -> None:
    """Fills Triton's cache, from several processes at once: compiling takes longer than measuring."""
    (outputs, inputs, gated), rows, tilings = task
    x_TK = torch.zeros(rows, inputs, dtype=torch.bfloat16, device="cuda")
    weight_NK = torch.zeros(outputs, inputs, dtype=torch.bfloat16, device="cuda")
    words_NW = torch.zeros(outputs, inputs // 8 * 3, dtype=torch.int32, device="cuda")
    nothing = torch.zeros(1, 128, dtype=torch.bfloat16, device="cuda").add_(1)
    ones = stack([encode(nothing, choose_bases(nothing))]).index
    for tiling, fused in tilings:
        weight: Any = weight_NK
        if isinstance(tiling, CodedTiling):
            scales_N = torch.ones(outputs, device="cuda")
            firsts_G = torch.zeros(-(-outputs // 16) + 1, dtype=torch.int32, device="cuda")
            weight = Bf12(words_NW, replace(ones, scales_N=scales_N, firsts_G=firsts_G))
        try:
            runs(tiling, gated, fused)(x_TK, weight)
        except Exception as error:
            print(f"{outputs}x{inputs} {rows} {tiling}: {error!r}"[:200], file=sys.stderr)


def tilings_of(shape: Shape, bucket: int, is_coded: bool) -> list[tuple[Tiling | CodedTiling, bool]]:
    """And whether each gates in its epilogue."""
    outputs, inputs, gated = shape
    if not is_coded:
        return [(tiling, True) for tiling in candidates(outputs, inputs, bucket, gated)]
    found = [(tiling, True) for tiling in coded_candidates(outputs, inputs, bucket, gated)]
    if gated and bucket > 16:
        found += [(tiling, False) for tiling in coded_candidates(outputs, inputs, bucket, False) if tiling.parts == 1]
    return [*found]


def measure(shape: Shape, bucket: int, is_coded: bool) -> list[Timed]:
    """Fastest first. Those whose result is wrong are left out."""
    _, inputs, gated = shape
    weight_NK, weights = random_weights(shape, is_coded)
    x_TK = torch.randn(bucket, inputs, dtype=torch.bfloat16, device="cuda")
    library = runs(None, gated, False)
    wanted = library(x_TK, weight_NK).double()
    if is_coded:
        library = gated_after(by_expanding) if gated else by_expanding
    found = [Timed(microseconds(library, x_TK, weights), None, False)]
    for tiling, fused in tilings_of(shape, bucket, is_coded):
        call = runs(tiling, gated, fused)
        try:
            result = call(x_TK, weights[0]).double()
            result = result if gated else result.sum(0)
            assert (result - wanted).norm() <= 0.01 * wanted.norm(), f"{tiling} is wrong"
            found.append(Timed(microseconds(call, x_TK, weights), tiling, fused))
        except Exception as error:
            print(f"{shape} {bucket} {tiling}: {error!r}"[:200], file=sys.stderr)
    found.sort(key=lambda timed: timed.us)
    return found


def bf16_us(shape: Shape, bucket: int) -> float:
    """What the same takes in bf16, by the table as it is."""
    outputs, inputs, gated = shape
    _, weights = random_weights(shape, False)
    x_TK = torch.randn(bucket, inputs, dtype=torch.bfloat16, device="cuda")
    return microseconds(runs(choose(outputs, inputs, bucket, gated, x_TK.device), gated, True), x_TK, weights)


def numbers_of(tiling: Tiling | CodedTiling | None) -> list[int] | None:
    if tiling is None:
        return None
    if isinstance(tiling, Tiling):
        return [tiling.block_n, tiling.block_k, tiling.parts, tiling.stages, tiling.warps]
    return [tiling.block_n, tiling.blocks, tiling.parts, tiling.stages, tiling.warps, tiling.joined]


class Found:
    """The table as it comes to be: read, filled, printed row by row, and written."""

    def __init__(self, path: Path, records: bool) -> None:
        self._path = path
        self._records = records
        self._table: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
        print(f"{'shape':26} {'rows':>4} {'µs':>8} {'bound':>8} {'ratio':>6} {'library':>8} {'÷ bf16':>6}  tiling")

    def add(self, shape: Shape, bucket: int, is_coded: bool, found: list[Timed]) -> None:
        outputs, inputs, gated = shape
        key, best = key_of(outputs, inputs, gated, is_coded), found[0]
        library_us = next(timed.us for timed in found if timed.tiling is None)
        if best.us > _WIN * library_us:
            best = Timed(library_us, None, False)
        bound_us = outputs * inputs * (1.5 if is_coded else 2) / BYTES_PER_S * 1e6
        peer_us = bf16_us(shape, bucket) if is_coded else best.us
        print(
            f"{key:26} {bucket:4} {best.us:8.2f} {bound_us:8.2f} {best.us / bound_us:6.2f} {library_us:8.2f} "
            f"{best.us / peer_us:6.3f}  {best.tiling}{'' if best.fused or not gated else ', gated after'}", flush=True,
        )  # fmt: skip
        if self._records:
            record("linear", f"{key}, {bucket} rows", best.us, "µs", bound=bound_us)
            record("linear", f"{key}, {bucket} rows", library_us, "µs", bound=bound_us, peer="library")
        self._put(key, bucket, numbers_of(best.tiling) if best.fused or not gated else None)
        if is_coded:
            self._put(ratio_key_of(outputs, inputs, gated), bucket, round(best.us / peer_us, 3))
            if gated and not best.fused:
                self._put(key_of(outputs, inputs, False, True), bucket, numbers_of(best.tiling))

    def _put(self, key: str, bucket: int, value: list[int] | float | None) -> None:
        self._table.setdefault(key, {})[str(bucket)] = value

    def write(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(self._table.items()))
        self._path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SHAPES), help="whose shapes (default: all)")
    parser.add_argument("--rows", help="buckets (default: all)")
    parser.add_argument("--only", choices=("bf16", "bf12"), help="one storage (default: both, bf16 first)")
    parser.add_argument(
        "--write", action="store_true", help="put what is found into the table of this GPU, and record it"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that compile (default: one per core)")
    options = parser.parse_args()
    rows = None if options.rows is None else [int(rows) for rows in options.rows.split(",")]
    shapes = dict.fromkeys(shape for model in options.models.split(",") for shape in SHAPES[model])
    work = [
        (shape, bucket, is_coded)
        for is_coded, buckets in ((False, BUCKETS), (True, CODED_BUCKETS))
        if options.only is None or is_coded == (options.only == "bf12")
        for shape in shapes
        for bucket in buckets
        if rows is None or bucket in rows
    ]
    compile_all(work, options.processes)
    found = Found(path_of(device_name(torch.device("cuda"))), options.write)
    for shape, bucket, is_coded in work:
        found.add(shape, bucket, is_coded, measure(shape, bucket, is_coded))
        if options.write:
            found.write()


def compile_all(work: list[tuple[Shape, int, bool]], processes: int) -> None:
    """Each kernel once, whichever shapes have it in common: sizes and the number of parts are its arguments."""
    seen, parts = set(), []
    for shape, bucket, is_coded in work:
        fresh = []
        for tiling, fused in tilings_of(shape, bucket, is_coded):
            width = 1 if bucket == 1 else max(16, bucket)
            kernel = (replace(tiling, parts=min(2, tiling.parts)), fused and shape[2], width, lanes_of(shape[1]))
            if kernel not in seen:
                seen.add(kernel)
                fresh.append((tiling, fused))
        parts += [(shape, bucket, fresh[first::processes]) for first in range(min(processes, len(fresh)))]
    with ProcessPoolExecutor(processes) as pool:
        list(tqdm(pool.map(compile_some, parts, chunksize=1), total=len(parts), desc="compile", mininterval=5))


if __name__ == "__main__":
    torch.multiprocessing.set_start_method("spawn")
    main()
