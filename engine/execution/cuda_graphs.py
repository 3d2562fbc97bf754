"""CUDA graphs of one computation at several sizes: which sizes, capture, replay; and when they are captured. It knows
nothing of what is computed.

A graph serves every size up to its own: what is computed for the rows beyond must harm nobody. All graphs, and what
runs without one, share a workspace, since no two run at once. A size that is not captured yet is served by the next
larger one that is.
"""

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

import torch

from engine.log import log
from engine.memory.errors import CaptureFailed, OutOfDeviceMemory, OutOfHostMemory
from engine.memory.streams import DeviceStream
from engine.memory.workspace import Workspace
from engine.step.order import StepAnnouncer

_STEPS: Final = ((256, 8), (512, 32), (1024, 64))  # behind 1, 2, 4: up to the one, in steps of the other
_PREPARE_EVERY_S: Final = 0.25
HOT_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def capture_sizes(max_rows: int) -> list[int]:
    """The sizes worth a graph, ascending, for up to max_rows rows; the last holds them or is the largest there is."""
    if max_rows == 0:
        return []
    sizes = [1, 2, 4]
    for end, step in _STEPS:
        sizes += range(sizes[-1] - sizes[-1] % step + step, end + 1, step)
    return sizes[: bisect_left(sizes, max_rows) + 1]


class CudaGraphs:
    """Graphs of `run`, which computes for a given number of rows on the current stream, and always in one place.

    `sizes` are all that may be captured, ascending; HOT_SIZES come first, small ones before large ones.
    """

    def __init__(
        self, run: Callable[[int], object], sizes: Iterable[int], workspace: Workspace,
        together: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        """`together` captures a size on all ranks of a model, by `capture` on each, or on none, and raises
        OutOfDeviceMemory then; None: there is one."""
        self._run = run
        self._workspace = workspace
        self._together = together
        self.sizes = sorted(sizes)
        self._missing = sorted(sizes, key=lambda size: (size in HOT_SIZES, -size))  # taken from the end
        self._captured: list[int] = []
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @property
    def hot(self) -> bool:
        """Whether the next to be captured is a hot one."""
        return bool(self._missing) and self._missing[-1] in HOT_SIZES

    def capture_next(self) -> bool:
        """Captures one size more, without computing it; some 10 ms. False where none is left, or no memory for it."""
        return bool(self._missing) and self._capture(self._missing[-1])

    def capture_for(self, rows: int) -> bool:
        """Captures the size that `rows` rows should have, as capture_next does; False where that has been done."""
        index = bisect_left(self.sizes, rows)
        return index < len(self.sizes) and self.sizes[index] in self._missing and self._capture(self.sizes[index])

    def _capture(self, size: int) -> bool:
        try:
            if self._together is None:
                self.capture(size)
            else:
                self._together(size)
        except (torch.OutOfMemoryError, OutOfDeviceMemory, CaptureFailed) as error:
            log("no_more_graphs", size=size, reason=f"{type(error).__name__}: {error}"[:300])
            self._missing.clear()
            return False
        return True

    def capture(self, size: int) -> None:
        """Captures a size. Raises torch's OutOfMemoryError, and CaptureFailed; nothing is captured then."""
        if size in self._missing:
            self._missing.remove(size)
        self._graphs[size] = _captured(lambda: self._run(size), self._workspace.graph_pool)
        insort(self._captured, size)
        self._workspace.graphs += 1

    def drop(self, size: int) -> None:
        """Takes a captured size back; it has not run, and no more are captured."""
        self._missing.clear()
        self._captured.remove(size)
        self._graphs.pop(size).reset()
        self._workspace.graphs -= 1

    def captured_size(self, rows: int) -> int:
        """The smallest captured size that holds so many rows; 0 where there is none."""
        index = bisect_left(self._captured, rows)
        return 0 if index == len(self._captured) else self._captured[index]

    def launch(self, rows: int, size: int) -> None:
        """Replays the graph of a captured size, or computes for `rows` rows without one where that is 0."""
        if size:
            self._graphs[size].replay()
            return
        with self._workspace.entered():
            self._run(rows)

    def close(self) -> None:
        """Drops all graphs, none of which runs, with their memory; no more are captured. It may be called again."""
        self._missing.clear()
        self._captured.clear()
        while self._graphs:
            self._graphs.popitem()[1].reset()
            self._workspace.graphs -= 1


def _captured(run: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="relaxed")  # a kernel not met yet may be loaded meanwhile
    try:
        run()
    except BaseException as error:
        with suppress(RuntimeError):  # it ends all the same, and says why it is no good, which the first error tells
            graph.capture_end()
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            raise CaptureFailed(str(error)) from error
        raise
    try:
        graph.capture_end()
    except RuntimeError as error:
        raise CaptureFailed(str(error)) from error
    return graph


class PreparedMemory(Protocol):
    """What sleeps, and has the host's copy of its weights made ahead where it is on `standby`."""

    standby: bool

    @property
    def stream(self) -> DeviceStream: ...

    @property
    def awake(self) -> bool: ...

    def prepare(self) -> int: ...


class GraphPreparation:
    """What a runner does ahead while it is idle, or now and then beside a step: captures of its graphs, and a little of
    the weights copied to the host, for a later sleep."""

    def __init__(
        self, memory: PreparedMemory, hot: Sequence[CudaGraphs], first: Sequence[CudaGraphs],
        announcer: StepAnnouncer | None, others: Sequence[CudaGraphs] = (),
    ) -> None:  # fmt: skip
        """Graphs are `hot`, of which an opening captures the hot sizes, and `others`; `first` of them are those of a
        single sequence that decodes. The first of several ranks has an `announcer`."""
        self._memory = memory
        self._hot, self._first, self._all = hot, first, (*hot, *others)
        self._announcer = announcer
        self._prepared_at = 0.0
        self.max_graphs = sum(len(graphs.sizes) for graphs in self._all)

    def capture_hot(self, beat: Callable[[], None]) -> None:
        """Captures the graphs of the hot sizes."""
        with self._memory.stream.entered():
            for graphs in self._hot:
                while graphs.hot:
                    graphs.capture_next()
                    beat()

    def capture_first(self) -> None:
        """Captures the graphs of a single sequence that decodes."""
        with self._memory.stream.entered():
            for graphs in self._first:
                graphs.capture_for(1)

    def warm_up(self) -> bool:
        """Captures a graph, or copies a little of the weights to the host. False where nothing is left to do."""
        if not self._memory.awake:
            return False
        return self._capture_one(hot=True) or self._prepare_sleep() or self._capture_one(hot=False)

    def now_and_then(self, *wanted: tuple[CudaGraphs, int]) -> None:
        """Captures a size of the first of these graphs that lacks its own, or copies a little to the host beside a
        step: under steady load there are no idle moments."""
        now = time.monotonic()
        if now - self._prepared_at <= _PREPARE_EVERY_S:
            return
        with self._memory.stream.entered():
            captured = any(graphs.capture_for(rows) for graphs, rows in wanted if rows)
        if captured or self._prepare_sleep():
            self._prepared_at = now

    def _capture_one(self, hot: bool) -> bool:
        with self._memory.stream.entered():
            return any(graphs.capture_next() for graphs in self._all if graphs.hot or not hot)

    def _prepare_sleep(self) -> bool:
        try:
            copied = self._memory.standby and self._memory.prepare() > 0
        except OutOfHostMemory:
            return False  # the machine hears of it when it orders the model to sleep
        if copied and self._announcer is not None:  # once all is copied, steps have nothing to say of it
            self._announcer.prepare()
        return copied
