"""engine/compression/reader.py: pieces come in their order, only so many ahead, and of files that stay the same."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from engine.compression.reader import SourceFiles, map_ordered
from engine.weights.tensor_index import CheckpointError


def test_results_come_in_order_and_no_more_are_made_than_may_wait() -> None:
    begun, taken = [0], 0
    lock = threading.Lock()

    def make(item: int) -> int:
        with lock:
            begun[0] += 1
        time.sleep(0.002 * (item % 3))
        return item

    with ThreadPoolExecutor(4) as pool:
        for result in map_ordered(pool, make, range(60), prefetch=5):
            time.sleep(0.003)  # who takes them is the slowest
            assert result == taken
            taken += 1
            assert begun[0] <= taken + 6
    assert taken == 60


def test_who_takes_no_more_has_no_more_made() -> None:
    made = []
    with (
        ThreadPoolExecutor(1) as pool,
        closing(map_ordered(pool, lambda item: made.append(item), range(100), 50)) as results,
    ):
        next(results)
    assert len(made) < 60


def test_what_fails_in_a_thread_is_raised_in_its_turn() -> None:
    with ThreadPoolExecutor(2) as pool, pytest.raises(ZeroDivisionError):
        assert list(map_ordered(pool, lambda item: 1 // (3 - item), range(9), 4)) == []


def test_a_file_that_is_cut_written_or_gone_is_told(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for change, said in (
        (lambda: path.write_bytes(b"other"), "was changed while it was read"),
        (lambda: (path.unlink(), path.write_bytes(b"12345678")), "was changed while it was read"),
        (path.unlink, "went away while it was read"),
    ):
        path.write_bytes(b"12345678")
        with SourceFiles([path]) as files:
            assert files.read(path, 2, 4) == b"3456"
            with pytest.raises(CheckpointError, match="ends at byte 8"):
                files.read(path, 6, 4)
            files.require_unchanged()
            change()
            with pytest.raises(CheckpointError, match=said):
                files.require_unchanged()
