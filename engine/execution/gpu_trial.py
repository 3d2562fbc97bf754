"""Steps of made-up work on a GPU, run as a model opens: their kernels are compiled or loaded, and their costs measured.
It knows no memory."""

from collections.abc import Callable
from typing import Final, Protocol

import numpy as np

from engine.execution.cuda_graphs import HOT_SIZES
from engine.execution.gpu_runner import GRAPH_ROWS_MAX
from engine.kernels.tuning import BF12_ROW_BUCKETS
from engine.protocol.types import SamplingParams
from engine.step.cost_model import CostModel
from engine.step.executor import InflightStep
from engine.step.layout import Int32s, SequenceSlice, pack_step
from engine.step.limits import ExecutorLimits
from engine.step.profiling import ProfilingLimits, profile_costs

_PRELOADED_ROWS: Final = (64, 128, 1024)  # rows of steps whose kernels a first prompt would wait for
_PROFILED_ROWS: Final = (1, 16, 64, 128, 256, 512, 2048)
_GREEDY: Final = SamplingParams()
_ALL_FEATURES: Final = SamplingParams(
    temperature=1.0, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logit_bias={0: 1.0}, logprobs=1
)


class TrialRunner(Protocol):
    """Launches steps, and measures them."""

    limits: ExecutorLimits

    def launch(self, packed: Int32s) -> InflightStep: ...

    def sample(self, step: InflightStep, masks_MW: Int32s) -> None: ...

    def launch_ms(self, packed: Int32s, launches: int) -> float: ...


class TrialSteps:
    """Runs steps of up to rows_max rows on a runner, all of them in the first blocks of its pool."""

    def __init__(
        self, runner: TrialRunner, rows_max: int, block_tokens: int, vectors: bool,
        windows: tuple[tuple[int, float], ...],
    ) -> None:  # fmt: skip
        """`vectors`: the model gives vectors, and no row can have a mask. `windows` as CostModel has them."""
        self._runner = runner
        self._rows_max = rows_max
        self._block_tokens = block_tokens
        self._vectors = vectors
        self._windows = windows

    def compile(self, beat: Callable[[], None]) -> None:
        """Runs a step of each hot size, of larger ones that may have other kernels, the largest that has a graph, and
        the largest there is: the workspace has what steps need then."""
        for rows in sorted({size for size in (*HOT_SIZES, *BF12_ROW_BUCKETS) if size <= self._rows_max}):
            self._run(rows)
            beat()
        sequences = self._runner.limits.sequences
        for rows in (sequences, min(GRAPH_ROWS_MAX, self._rows_max), self._rows_max):
            self._run(rows)
        self._run(sequences, _ALL_FEATURES)

    def load(self) -> None:
        """Runs a step of one row, whose kernels cannot be loaded while its graph is captured, and steps whose kernels a
        first prompt would wait for, or the first wake."""
        for rows in (1, *[rows for rows in _PRELOADED_ROWS if rows <= self._rows_max]):
            self._run(rows)

    def profiling_limits(self, blocks: int) -> ProfilingLimits:
        """What steps may use where so many blocks are mapped."""
        limits = self._runner.limits
        return ProfilingLimits(
            blocks, self._block_tokens, limits.context_tokens, limits.sequences, limits.groups, self._windows
        )

    def profile(self, limits: ProfilingLimits) -> CostModel:
        """Measures what steps cost."""
        return profile_costs(
            self._runner.launch_ms, [rows for rows in _PROFILED_ROWS if rows <= self._rows_max], limits
        )

    def _run(self, rows: int, sampling: SamplingParams = _GREEDY) -> None:
        limits = self._runner.limits
        length = 1 if rows <= limits.sequences else limits.context_tokens
        tables = [[0] * -(-length // self._block_tokens)] * limits.groups
        lengths = [min(length, rows - start) for start in range(0, rows, length)]
        history, masked = (([0], 1), not self._vectors) if sampling is _ALL_FEATURES else (None, False)
        slices = [SequenceSlice([0] * count, 0, tables, sampling, history, masked) for count in lengths]
        step = self._runner.launch(pack_step(slices, self._block_tokens))
        if masked:
            self._runner.sample(step, np.full((len(lengths), -(-limits.vocabulary // 32)), -1, np.int32))
        step.wait()
