"""Finds the fastest way to multiply few rows, per shape and number of rows, and writes the table that choices.py reads.

    python -m benchmarks.linear --write                  every shape, on the GPU at hand

Each candidate runs in a CUDA graph over several copies of the weight, more than the L2 cache holds, as a decode step
reads each weight once. Its time stands beside the bound: bytes of the weight ÷ the memory's speed.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.record import record
from engine.kernels.choices import BUCKETS, device_name
from engine.kernels.gated import silu_and_multiply
from engine.kernels.linear import Tiling, multiply, multiply_gated
from engine.kernels.measured import path_of

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


def runs(tiling: Tiling | None, gated: bool) -> Callable[[Tensor, Tensor], Tensor]:
    if tiling is not None:
        kernel = multiply_gated if gated else multiply
        return lambda x_TK, weight_NK: kernel(x_TK, weight_NK, tiling)
    if not gated:
        return torch.nn.functional.linear

    def library(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        x_T2I = torch.nn.functional.linear(x_TK, weight_NK)
        out_TI = x_T2I.new_empty(len(x_TK), len(weight_NK) // 2)
        silu_and_multiply(x_T2I, out_TI)
        return out_TI

    return library


def microseconds(call: Callable[[Tensor, Tensor], Tensor], x_TK: Tensor, weights: list[Tensor]) -> float:
    """The median time of one call, over copies that the L2 cache does not hold together."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(x_TK, weights[0])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight_NK in weights:
            call(x_TK, weight_NK)
    graph.replay()
    took = []
    for _ in range(_REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(start.elapsed_time(end) * 1e3 / len(weights))
    return statistics.median(took)


def compile_some(task: tuple[Shape, int, list[Tiling]]) -> None:
    """Fills Triton's cache, from several processes at once: compiling takes longer than measuring."""
    (outputs, inputs, gated), rows, tilings = task
    x_TK = torch.zeros(rows, inputs, dtype=torch.bfloat16, device="cuda")
    weight_NK = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="cuda")
    for tiling in tilings:
        try:
            runs(tiling, gated)(x_TK, weight_NK)
        except Exception as error:
            print(f"{outputs}x{inputs} {rows} {tiling}: {error!r}"[:200], file=sys.stderr)


def measure(shape: Shape, bucket: int, tilings: list[Tiling]) -> list[tuple[float, Tiling | None]]:
    """(µs, tiling or None for cuBLAS), fastest first. Those whose result is wrong are left out."""
    outputs, inputs, gated = shape
    copies = max(2, -(-_COPIES_BYTES // (outputs * inputs * 2)))
    weights = [torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda") for _ in range(min(copies, 24))]
    x_TK = torch.randn(bucket, inputs, dtype=torch.bfloat16, device="cuda")
    library = runs(None, gated)
    wanted = library(x_TK, weights[0]).double()
    found: list[tuple[float, Tiling | None]] = [(microseconds(library, x_TK, weights), None)]
    for tiling in tilings:
        call = runs(tiling, gated)
        try:
            result = call(x_TK, weights[0]).double()
            result = result if gated else result.sum(0)
            assert (result - wanted).norm() <= 0.01 * wanted.norm(), f"{tiling} is wrong"
            found.append((microseconds(call, x_TK, weights), tiling))
        except Exception as error:
            print(f"{outputs}x{inputs} {bucket} {tiling}: {error!r}"[:200], file=sys.stderr)
    return sorted(found, key=lambda pair: pair[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SHAPES), help="whose shapes (default: all)")
    parser.add_argument("--rows", default=",".join(map(str, BUCKETS)), help="buckets (default: all)")
    parser.add_argument(
        "--write", action="store_true", help="put what is found into the table of this GPU, and record it"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that compile (default: one per core)")
    options = parser.parse_args()
    buckets = [int(rows) for rows in options.rows.split(",")]
    shapes = [shape for model in options.models.split(",") for shape in SHAPES[model]]
    work = [(shape, bucket, candidates(*shape[:2], bucket, shape[2])) for shape in shapes for bucket in buckets]
    parts = [
        (shape, rows, tilings[first :: options.processes])
        for shape, rows, tilings in work
        for first in range(options.processes)
    ]
    with ProcessPoolExecutor(options.processes) as pool:
        list(tqdm(pool.map(compile_some, parts, chunksize=4), total=len(parts), desc="compile", mininterval=5))
    path = path_of(device_name(torch.device("cuda")))
    table = json.loads(path.read_text()) if path.exists() else {}
    print(f"{'shape':22} {'rows':>4} {'µs':>8} {'bound':>8} {'ratio':>6} {'cuBLAS':>8}  tiling")
    for shape, bucket, tilings in work:
        outputs, inputs, gated = shape
        found = measure(shape, bucket, tilings)
        library_us = next(us for us, tiling in found if tiling is None)
        us, tiling = found[0]
        if us > _WIN * library_us:
            us, tiling = library_us, None
        bound_us = outputs * inputs * 2 / BYTES_PER_S * 1e6
        key = f"{outputs}x{inputs}{' gated' if gated else ''}"
        print(f"{key:22} {bucket:4} {us:8.2f} {bound_us:8.2f} {us / bound_us:6.2f} {library_us:8.2f}  {tiling}")
        if options.write:
            record("linear", f"{key}, {bucket} rows", us, "µs", bound=bound_us)
            record("linear", f"{key}, {bucket} rows", library_us, "µs", bound=bound_us, peer="cuBLAS")
        chosen = None
        if tiling is not None:
            chosen = [tiling.block_n, tiling.block_k, tiling.parts, tiling.stages, tiling.warps]
        table.setdefault(key, {})[str(bucket)] = chosen
    if options.write:
        path.parent.mkdir(exist_ok=True)
        lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(table.items()))
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    torch.multiprocessing.set_start_method("spawn")
    main()
