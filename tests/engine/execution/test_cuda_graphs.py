"""engine/execution/cuda_graphs.py: which sizes are worth a graph, and which of them serves a step."""

import pytest

from engine.execution.cuda_graphs import HOT_SIZES, capture_sizes


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
