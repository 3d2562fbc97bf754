"""How long each way to multiply takes alone: in a CUDA graph over several copies of the weight, more than the L2 cache
holds, as a decode step reads each weight once. Few rows come behind a norm, as in a step, and the norm's own time is
subtracted: a kernel that begins while the norm ends gains by it. Float32 parts are charged with reading them. A process
for each shape and number of rows loads its kernels beside the others, and only one at a time replays its graphs.
"""

import fcntl
import math
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.engine.linear.shapes import BYTES_PER_S, AnyTiling, Shape, Work, tilings_of
from engine.bf12.codec import Bf12Matrix, Bf12Weight, choose_bases, encode, stack_matrices
from engine.bf12.layout import lanes_of
from engine.kernels import bf12_linear, bf12_linear_hopper, linear
from engine.kernels.bf12_linear import Bf12Tiling
from engine.kernels.bf12_linear_hopper import HopperTiling
from engine.kernels.elementwise import silu_and_multiply
from engine.kernels.linear import LinearTiling
from engine.kernels.rms_norm import add_norm
from engine.layers.linear_gpu import GpuLinear, multiply_expanded

GPU: Final = torch.device("cuda")
_COPIES_BYTES: Final = 400 << 20
_NORM_ROWS_MOST: Final = 128  # more rows take so long that it matters little what is before them
_FINALISTS: Final = 4
_REPEATS: Final = 5
_WIN: Final = 0.99  # a kernel of ours is chosen over cuBLAS where it takes less than this of its time
_SIGMA: Final = 0.02
_STUCK_S: Final = 120.0  # without any result

# What multiplies rows by a weight, in either storage.
Call = Callable[[Tensor, Any], Tensor]
Weight = TypeVar("Weight", Tensor, Bf12Weight)


@dataclass(frozen=True, slots=True)
class Timed:
    """One way to multiply. Without a tiling it is the library's."""

    us: float
    tiling: AnyTiling | None


@dataclass(frozen=True, slots=True)
class Measured:
    """The fastest ways, fastest first, and the library's; the others, measured once; and what bf16 takes, by the table
    as it is."""

    work: Work
    found: list[Timed]
    others: list[Timed]
    bf16_us: float

    @property
    def library_us(self) -> float:
        return next(timed.us for timed in self.found if timed.tiling is None)

    @property
    def best(self) -> Timed:
        """The library's way, where nothing is clearly faster."""
        best = self.found[0]
        return best if best.us <= _WIN * self.library_us else Timed(self.library_us, None)


def runs(tiling: AnyTiling, gated: bool) -> Call:
    module: Any = {LinearTiling: linear, Bf12Tiling: bf12_linear, HopperTiling: bf12_linear_hopper}[type(tiling)]
    multiply = module.multiply_gated if gated else module.multiply
    return lambda x_TK, weight: multiply(x_TK, weight, tiling)


def by_library(gated: bool, is_coded: bool) -> Call:
    multiply = multiply_expanded if is_coded else torch.nn.functional.linear
    return (lambda x_TK, weight: silu_and_multiply(multiply(x_TK, weight))) if gated else multiply


def as_bf16(gated: bool) -> Call:
    return lambda x_TK, weight_NK: GpuLinear(weight_NK).swiglu(x_TK) if gated else GpuLinear(weight_NK)(x_TK)


def in_parts(parts: Tensor) -> Tensor:
    """[P, T, N], whatever multiplied."""
    return parts if parts.ndim == 3 else parts[None]


def parts_us(found_PTN: Tensor) -> float:
    """What reading its float32 parts takes longer than reading the same in bfloat16."""
    return (found_PTN.nbytes - found_PTN[0].numel() * 2) / BYTES_PER_S * 1e6


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """No other process is here meanwhile."""
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def random_weights(shape: Shape, is_coded: bool, copies: int | None = None) -> tuple[list[Tensor], list[Bf12Weight]]:
    """Copies of a matrix in bf16, and in 12 bits, or none. Its rows repeat, so that it is soon made."""
    outputs, inputs, _ = shape
    piece_NK = torch.randn(math.gcd(outputs, 256), inputs).mul_(_SIGMA).bfloat16()
    weight_NK = piece_NK.to(GPU).repeat(outputs // len(piece_NK), 1)
    plain = _copied(weight_NK, copies or _copies(weight_NK.nbytes))
    if not is_coded:
        return plain, []
    weight = repeated(piece_NK, outputs)
    return plain, _copied(weight, copies or _copies(weight.bytes))


def _copied(weight: Weight, copies: int) -> list[Weight]:
    copied = [weight]
    copied += (deepcopy(weight) for _ in range(copies - 1))
    return copied


def repeated(piece_NK: Tensor, outputs: int) -> Bf12Weight:
    """Coded, and below itself as often as it takes, on the GPU."""
    piece = encode(piece_NK, choose_bases(piece_NK))
    return stack_matrices([Bf12Matrix(piece.words_NW.to(GPU), piece.escapes.to(GPU))] * (outputs // len(piece_NK)))


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
        self.x_TK = torch.randn(work.rows, inputs, dtype=torch.bfloat16, device=GPU)
        self._sum_TK = torch.randn(work.rows, inputs, device=GPU)
        self._ones_K = torch.ones(inputs, device=GPU)
        self._normed = work.rows <= _NORM_ROWS_MOST
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._norm()
        self._wanted = by_library(gated, False)(self.x_TK, self.plain[0]).float()
        torch.cuda.synchronize()
        self._norms = self._captured(None, self.plain) if self._normed else None

    def way(self, tiling: AnyTiling | None, call: Call, weights: Sequence[Any]) -> Way:
        """Asserts that its result is right."""
        found_PTN = in_parts(call(self.x_TK, weights[0]))
        result = found_PTN.sum(0)
        assert (result - self._wanted).norm() <= 0.01 * self._wanted.norm(), "wrong"
        return Way(tiling, self._captured(call, weights), len(weights), parts_us(found_PTN))

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
    for tiling in tilings_of(work, GPU):
        try:
            ways.append(bench.way(tiling, runs(tiling, gated), bench.weights))
        except Exception as error:
            print(f"{work} {tiling}: {error!r}"[:300], file=sys.stderr)
    torch.cuda.synchronize()
    with alone(lock):
        first = {way.tiling: bench.us(way, 1) for way in ways}
        best = finalists(first)
        final_times = [Timed(bench.us(way, _REPEATS), way.tiling) for way in ways if way.tiling in best]
        others = [Timed(us, tiling) for tiling, us in first.items() if tiling not in best]
        final_times.sort(key=lambda timed: timed.us)
        return Measured(work, final_times, others, bench.us(peer, _REPEATS))


def finalists(first: dict[AnyTiling | None, float]) -> set[AnyTiling | None]:
    """The fastest few, the fastest of each kernel among them; and the library."""
    ranked = sorted(first, key=lambda tiling: first[tiling])
    of_each = {type(tiling): tiling for tiling in reversed(ranked)}
    return {None, *ranked[:_FINALISTS], *of_each.values()}


def compile_some(task: tuple[Work, list[AnyTiling]]) -> None:
    """Fills Triton's cache, from several processes at once: compiling takes longer than measuring."""
    work, tilings = task
    outputs, inputs, gated = work.shape
    x_TK = torch.zeros(work.rows, inputs, dtype=torch.bfloat16, device=GPU)
    weight: Any
    if work.is_coded:
        weight = repeated(torch.eye(math.gcd(outputs, 256), inputs, dtype=torch.bfloat16), outputs)
    else:
        weight = torch.zeros(outputs, inputs, dtype=torch.bfloat16, device=GPU)
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
        for tiling in tilings_of(work, GPU):
            width = 0 if isinstance(tiling, HopperTiling) else 1 if work.rows == 1 else max(16, work.rows)
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
