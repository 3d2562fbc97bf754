"""Finds the fastest way to multiply, per shape and number of rows, and writes the table that choices.py reads: for
weights in bf16 by few rows, and for the same in 12 bits a number by any.

    python -m benchmarks.linear --write                  every shape, on the GPU at hand
    python -m benchmarks.linear --only bf12 --models llama-3.1-8b --rows 1,8

Each candidate runs in a CUDA graph over several copies of the weight, more than the L2 cache holds, as a decode step
reads each weight once. Few rows are each behind a norm, as there, and its time alone is taken off: what begins while
the norm ends gains by it. Float32 parts are charged with reading them. A process for each shape and number of rows
loads its kernels beside the others, and only one at a time replays its graphs.

Beside each time stand the bound, max(bytes of the weight ÷ 4.3 TB/s, FLOP ÷ 790 T), and the best of each kernel.
"""

import argparse
import fcntl
import json
import math
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import product
from multiprocessing.pool import Pool
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.record import record
from engine.kernels import coded, coded_hopper, linear
from engine.kernels.choices import BUCKETS, CODED_BUCKETS, CODED_KERNELS, device_name
from engine.kernels.coded import CodedTiling
from engine.kernels.coded_hopper import Tile
from engine.kernels.gated import silu_and_multiply
from engine.kernels.linear import Tiling
from engine.kernels.measured import key_of, path_of, ratio_key_of
from engine.kernels.norm import add_norm
from engine.weights.codec import Bf12, Coded, choose_bases, encode, stack
from engine.weights.compressed import multiply_expanded
from engine.weights.lanes import lanes_of
from engine.weights.resident import Resident

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
BYTES_PER_S: Final = 4.3e12
FLOP_PER_S: Final = 790e12
CODED_CANDIDATES_MOST: Final = 12
_COPIES_BYTES: Final = 400 << 20
_SHARED_BYTES: Final = 200 << 10
_NORM_ROWS_MOST: Final = 128  # more rows take so long that it matters little what is before them
_HEAD_OUTPUTS: Final = 100_000  # more are a head's, which multiplies a row of each sequence, not of each token
_HEAD_ROWS_MOST: Final = 512
_FINALISTS: Final = 4
_REPEATS: Final = 5
_WIN: Final = 0.99  # a kernel of ours is chosen over cuBLAS where it takes less than this of its time
_SIGMA: Final = 0.02
_GPU: Final = torch.device("cuda")
_STUCK_S: Final = 120.0  # without any result

AnyTiling = Tiling | CodedTiling | Tile
# What multiplies rows by a weight, in either storage.
Call = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Work:
    """What is measured by one process."""

    shape: Shape
    rows: int
    is_coded: bool


@dataclass(frozen=True, slots=True)
class Timed:
    """One way to multiply. Without a tiling it is the library's."""

    us: float
    tiling: AnyTiling | None


@dataclass(frozen=True, slots=True)
class Measured:
    """The fastest ways, fastest first, and the library's; and what bf16 takes, by the table as it is."""

    work: Work
    found: list[Timed]
    bf16_us: float


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
    """As `candidates`, for 12 bits a number: what was fast on an H200, and its neighbours."""
    lanes, inner, weights = lanes_of(inputs), outputs // 2 if gated else outputs, 2 if gated else 1
    grid: list[tuple[int, int, int, int, int, int]] = []
    if bucket == 1:
        grid += product((16,), (2,), (1, 2), (3, 4, 5), (4,), (0,))
        grid += product((8, 32), (2,), (1, 2), (4,), (4,), (0,))
        grid += product((32,), (1,), (1, 2), (4,), (4,), (0,))
    elif bucket <= 16:
        grid += product((32,), (1,), (1, 2, 4), (3, 4), (2,), (4,))
        grid += product((64,), (1,), (1, 2, 4), (3, 4), (4,), (4,))
    elif bucket <= 64:
        grid += product((64,), (1,), (1, 2, 4), (2, 3), (4,), (4,))
    found = []
    for block_n, blocks, parts, stages, warps, joined in grid:
        if (gated and parts > 1) or inner % block_n or inputs % (8 * lanes * blocks):
            continue
        programs, turns = inner // block_n * parts, inputs // (8 * lanes * blocks) // parts
        if turns < 1 or (parts > 1 and programs > 1600):
            continue
        staged = stages * 8 * lanes * blocks * (1.5 * block_n * weights + (2 * max(16, bucket) if joined else 2))
        if staged > _SHARED_BYTES:
            continue
        found.append(CodedTiling(block_n, blocks, parts, stages, warps, joined))
    return found


def tilings_of(work: Work, device: torch.device) -> list[AnyTiling]:
    outputs, inputs, gated = work.shape
    if not work.is_coded:
        return [*candidates(outputs, inputs, work.rows, gated)]
    few = coded_candidates(outputs, inputs, work.rows, gated)
    if not coded_hopper.serves(outputs, gated, device):
        return [*few]
    multiprocessors = coded_hopper.multiprocessors_of(device)
    return [*few, *coded_hopper.candidates(outputs, inputs, work.rows, gated, multiprocessors)]


def runs(tiling: AnyTiling, gated: bool) -> Call:
    module: Any = {Tiling: linear, CodedTiling: coded, Tile: coded_hopper}[type(tiling)]
    multiply = module.multiply_gated if gated else module.multiply
    return lambda x_TK, weight: multiply(x_TK, weight, tiling)


def by_library(gated: bool, is_coded: bool) -> Call:
    multiply = multiply_expanded if is_coded else torch.nn.functional.linear
    return (lambda x_TK, weight: silu_and_multiply(multiply(x_TK, weight))) if gated else multiply


def as_bf16(gated: bool) -> Call:
    return lambda x_TK, weight_NK: Resident(weight_NK).gated(x_TK) if gated else Resident(weight_NK)(x_TK)


def bound_us(work: Work) -> float:
    outputs, inputs, _ = work.shape
    weight_bytes = outputs * inputs * (1.5 if work.is_coded else 2)
    return max(weight_bytes / BYTES_PER_S, 2 * work.rows * outputs * inputs / FLOP_PER_S) * 1e6


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """No other process is here meanwhile."""
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def random_weights(shape: Shape, is_coded: bool) -> tuple[list[Tensor], list[Bf12]]:
    """Copies of a matrix in bf16, and in 12 bits, or none. Its rows repeat, so that it is soon made."""
    outputs, inputs, _ = shape
    piece_NK = torch.randn(math.gcd(outputs, 256), inputs).mul_(_SIGMA).bfloat16()
    weight_NK = piece_NK.to(_GPU).repeat(outputs // len(piece_NK), 1)
    plain = [weight_NK, *(weight_NK.clone() for _ in range(_copies(weight_NK.nbytes) - 1))]
    if not is_coded:
        return plain, []
    weight = repeated(piece_NK, outputs)
    copies = _copies(weight.words_NW.nbytes)
    return plain, [weight, *(Bf12(weight.words_NW.clone(), weight.index) for _ in range(copies - 1))]


def repeated(piece_NK: Tensor, outputs: int) -> Bf12:
    """Coded, and below itself as often as it takes, on the GPU."""
    piece = encode(piece_NK, choose_bases(piece_NK))
    return stack([Coded(piece.words_NW.to(_GPU), piece.escapes.to(_GPU))] * (outputs // len(piece_NK)))


def _copies(weight_bytes: int) -> int:
    return min(24, max(2, -(-_COPIES_BYTES // weight_bytes)))


@dataclass(frozen=True, slots=True)
class Way:
    """`parts_us`: what reading its float32 parts takes longer than reading the same in bfloat16."""

    tiling: AnyTiling | None
    graph: torch.cuda.CUDAGraph
    calls: int
    parts_us: float


class Bench:
    """Graphs of calls over copies of a weight, few rows each behind a norm. All share memory: what their calls give is
    nobody's."""

    def __init__(self, work: Work) -> None:
        _, inputs, gated = work.shape
        self.plain, words = random_weights(work.shape, work.is_coded)
        self.weights: Sequence[Any] = words if work.is_coded else self.plain
        self.x_TK = torch.randn(work.rows, inputs, dtype=torch.bfloat16, device=_GPU)
        self._sum_TK = torch.randn(work.rows, inputs, device=_GPU)
        self._ones_K = torch.ones(inputs, device=_GPU)
        self._normed = work.rows <= _NORM_ROWS_MOST
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._norm()
        self._wanted = by_library(gated, False)(self.x_TK, self.plain[0]).float()
        torch.cuda.synchronize()
        self._norms = self._captured(None, self.plain) if self._normed else None

    def way(self, tiling: AnyTiling | None, call: Call, weights: Sequence[Any]) -> Way:
        """Asserts that its result is right."""
        found = call(self.x_TK, weights[0])
        result = found.sum(0) if found.ndim == 3 else found
        assert (result - self._wanted).norm() <= 0.01 * self._wanted.norm(), "wrong"
        more_bytes = found.nbytes - result.numel() * 2
        return Way(tiling, self._captured(call, weights), len(weights), more_bytes / BYTES_PER_S * 1e6)

    def us(self, way: Way, times: int) -> float:
        """The median time of one call."""
        norm_us = 0.0 if self._norms is None else replayed_us(self._norms, times) / len(self.plain)
        return replayed_us(way.graph, times) / way.calls - norm_us + way.parts_us

    def _captured(self, call: Call | None, weights: Sequence[Any]) -> torch.cuda.CUDAGraph:
        """Without a call it is the norms alone."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            for weight in weights:
                self._norm()
                if call is not None:
                    call(self.x_TK, weight)
            graph.capture_end()
        return graph

    def _norm(self) -> None:
        if self._normed:
            add_norm(self._sum_TK, None, self._ones_K, 1e-5, self.x_TK)


def replayed_us(graph: torch.cuda.CUDAGraph, times: int) -> float:
    """The median, after a replay that does not count."""
    graph.replay()
    took: list[float] = []
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(start.elapsed_time(end) * 1e3)
    return statistics.median(took)


def measure(work: Work, lock: Path) -> Measured:
    """Ways that fail, or whose result is wrong, are left out."""
    gated, bench = work.shape[2], Bench(work)
    peer = bench.way(None, as_bf16(gated), bench.plain)
    ways = [bench.way(None, by_library(gated, work.is_coded), bench.weights)]
    for tiling in tilings_of(work, _GPU):
        try:
            ways.append(bench.way(tiling, runs(tiling, gated), bench.weights))
        except Exception as error:
            print(f"{work} {tiling}: {error!r}"[:300], file=sys.stderr)
    torch.cuda.synchronize()
    with alone(lock):
        kept = finalists({way.tiling: bench.us(way, 1) for way in ways})
        found = [Timed(bench.us(way, _REPEATS), way.tiling) for way in ways if way.tiling in kept]
        return Measured(work, sorted(found, key=lambda timed: timed.us), bench.us(peer, _REPEATS))


def finalists(first: dict[AnyTiling | None, float]) -> set[AnyTiling | None]:
    """The fastest few, the fastest of each kernel among them; and the library."""
    ranked = sorted(first, key=lambda tiling: first[tiling])
    of_each = {type(tiling): tiling for tiling in reversed(ranked)}
    return {None, *ranked[:_FINALISTS], *of_each.values()}


def compile_some(task: tuple[Work, list[AnyTiling]]) -> None:
    """Fills Triton's cache, from several processes at once: compiling takes longer than measuring."""
    work, tilings = task
    outputs, inputs, gated = work.shape
    x_TK = torch.zeros(work.rows, inputs, dtype=torch.bfloat16, device=_GPU)
    weight: Any
    if work.is_coded:
        weight = repeated(torch.eye(math.gcd(outputs, 256), inputs, dtype=torch.bfloat16), outputs)
    else:
        weight = torch.zeros(outputs, inputs, dtype=torch.bfloat16, device=_GPU)
    for tiling in tilings:
        try:
            runs(tiling, gated)(x_TK, weight)
        except Exception as error:
            print(f"{work} {tiling}: {error!r}"[:300], file=sys.stderr)


def compile_all(works: list[Work], pool: Pool, processes: int) -> None:
    """Each kernel once, whichever works have it in common: sizes and the number of parts are its arguments."""
    seen, tasks = set(), []
    for work in works:
        fresh = []
        for tiling in tilings_of(work, _GPU):
            width = 0 if isinstance(tiling, Tile) else 1 if work.rows == 1 else max(16, work.rows)
            kernel = (replace(tiling, parts=min(2, tiling.parts)), work.shape[2], width, lanes_of(work.shape[1]))
            if kernel not in seen:
                seen.add(kernel)
                fresh.append(tiling)
        tasks += [(work, fresh[first::processes]) for first in range(min(processes, len(fresh)))]
    for _ in tqdm(done(pool, compile_some, tasks), "compile", len(tasks), mininterval=5):
        pass


def done(pool: Pool, function: Callable[[Any], Any], tasks: list[Any]) -> Iterator[Any]:
    """Results as they come, of those that do not fail."""
    results = pool.imap_unordered(function, tasks)
    for _ in tasks:
        try:
            yield results.next(_STUCK_S)
        except multiprocessing.TimeoutError:
            raise SystemExit("Stuck: what was found until now is kept.") from None
        except Exception as error:
            print(f"{error!r}"[:300], file=sys.stderr)


def numbers_of(tiling: AnyTiling | None) -> list[Any] | None:
    """As the table has it."""
    if tiling is None:
        return None
    if isinstance(tiling, Tiling):
        return [*astuple(tiling)]
    kernel = next(name for name, made in CODED_KERNELS.items() if isinstance(tiling, made))
    return [kernel, *astuple(tiling)]


class Found:
    """The table as it comes to be: read, filled, printed row by row, and written."""

    def __init__(self, path: Path, records: bool) -> None:
        self._path = path
        self._records = records
        self._table: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
        print(
            f"{'shape':26} {'rows':>4} {'µs':>8} {'bound':>8} {'ratio':>6} {'library':>8} {'÷ bf16':>6} {'tiles':>8} "
            f"{'few rows':>8}  tiling"
        )

    def add(self, measured: Measured) -> None:
        work = measured.work
        outputs, inputs, gated = work.shape
        key, best, bound = key_of(outputs, inputs, gated, work.is_coded), measured.found[0], bound_us(work)
        library_us = next(timed.us for timed in measured.found if timed.tiling is None)
        if best.us > _WIN * library_us:
            best = Timed(library_us, None)
        tiles, few = (
            next((f"{timed.us:8.2f}" for timed in measured.found if isinstance(timed.tiling, kind)), f"{'':8}")
            for kind in (Tile, Tiling | CodedTiling)
        )
        print(
            f"{key:26} {work.rows:4} {best.us:8.2f} {bound:8.2f} {best.us / bound:6.2f} {library_us:8.2f} "
            f"{best.us / measured.bf16_us:6.3f} {tiles} {few}  {best.tiling}", flush=True,
        )  # fmt: skip
        if self._records:
            record("linear", f"{key}, {work.rows} rows", best.us, "µs", bound=bound)
            record("linear", f"{key}, {work.rows} rows", library_us, "µs", bound=bound, peer="library")
        self._put(key, work.rows, numbers_of(best.tiling))
        if work.is_coded:
            self._put(ratio_key_of(outputs, inputs, gated), work.rows, round(best.us / measured.bf16_us, 3))
            if gated and best.tiling is None:
                self._put(key_of(outputs, inputs, False, True), work.rows, None)

    def _put(self, key: str, rows: int, value: list[Any] | float | None) -> None:
        self._table.setdefault(key, {})[str(rows)] = value

    def write(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(self._table.items()))
        self._path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def works_of(models: Sequence[str], rows: Sequence[int] | None, only: str | None) -> list[Work]:
    shapes = dict.fromkeys(shape for model in models for shape in SHAPES[model])
    return [
        Work(shape, bucket, is_coded)
        for is_coded, buckets in ((False, BUCKETS), (True, CODED_BUCKETS))
        if only is None or is_coded == (only == "bf12")
        for shape in shapes
        for bucket in buckets
        if (rows is None or bucket in rows) and (shape[0] <= _HEAD_OUTPUTS or bucket <= _HEAD_ROWS_MOST)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SHAPES), help="whose shapes (default: all)")
    parser.add_argument("--rows", help="buckets (default: all)")
    parser.add_argument("--only", choices=("bf16", "bf12"), help="one storage (default: both, bf16 first)")
    parser.add_argument(
        "--write", action="store_true", help="put what is found into the table of this GPU, and record it"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="at once (default: one per core)")
    options = parser.parse_args()
    rows = None if options.rows is None else [int(rows) for rows in options.rows.split(",")]
    works = works_of(options.models.split(","), rows, options.only)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__spec__.name])
    with processes.Pool(options.processes) as pool:
        compile_all(works, pool, options.processes)
    found = Found(path_of(device_name(_GPU)), options.write)
    # A process for each work: where a kernel goes astray, no other is lost.
    with NamedTemporaryFile() as lock, processes.Pool(options.processes, maxtasksperchild=1) as pool:
        for measured in done(pool, partial(measure, lock=Path(lock.name)), works):
            found.add(measured)
            if options.write:
                found.write()


if __name__ == "__main__":
    main()
