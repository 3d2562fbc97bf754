"""engine/execution/cuda_graphs.py: which sizes are worth a graph, and which of them serves a step."""

from unittest.mock import Mock, patch

import pytest
import torch

from engine.execution import cuda_graphs
from engine.execution.cuda_graphs import HOT_SIZES, CudaGraphs, capture_sizes
from engine.memory.errors import CaptureFailed
from engine.memory.virtual_memory import Arena
from engine.memory.workspace import Workspace

CPU = torch.device("cpu")


def test_sizes_are_fine_for_few_rows_and_coarser_for_many() -> None:
    sizes = capture_sizes(1024)
    assert sizes[:6] == [1, 2, 4, 8, 16, 24]
    assert sizes[-1] == 1024
    assert len(sizes) == 51
    assert set(HOT_SIZES) <= set(sizes)


@pytest.mark.parametrize("rows", range(5, 1025))
def test_little_is_computed_in_vain(rows: int) -> None:
    size = next(size for size in capture_sizes(1024) if size >= rows)
    assert size - rows < max(8, rows // 8)


@pytest.mark.parametrize(("most", "last"), [(1, 1), (2, 2), (3, 4), (5, 8), (100, 104), (257, 288), (5000, 1024)])
def test_the_last_size_holds_the_most_or_is_the_largest(most: int, last: int) -> None:
    assert capture_sizes(most)[-1] == last


def test_a_capture_that_fails_is_the_last_one_and_steps_run_without_it() -> None:
    graph, run = Mock(), Mock(side_effect=RuntimeError("operation not permitted when stream is capturing"))
    with patch.object(torch.cuda, "CUDAGraph", Mock(return_value=graph)):
        several = CudaGraphs(run, [1, 2, 4], Mock(graphs=0))
        with pytest.raises(CaptureFailed, match="not permitted"):
            several.capture(2)
        graph.capture_end.assert_called_once()
        run.side_effect = None
        graph.capture_end.side_effect = RuntimeError("capture was invalidated")
        assert not several.capture_next()
    assert not several.capture_for(1)
    assert several.captured_size(1) == 0


def test_closed_graphs_are_let_go_once_and_no_more_are_captured() -> None:
    captured = [Mock(), Mock()]
    with patch.object(cuda_graphs, "_captured", side_effect=captured):
        several = CudaGraphs(lambda rows: None, [1, 2, 4], Workspace(Arena.of(CPU), CPU))
        assert several.capture_next()
        assert several.capture_next()
        for _ in range(2):
            several.close()
    assert [graph.reset.call_count for graph in captured] == [1, 1]
    assert several._graphs == {}
    assert not several.capture_next()
    assert not several.capture_for(4)
