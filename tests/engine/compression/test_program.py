"""engine/compression/program.py: pieces come in their order, and only so many ahead."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from engine.compression.program import map_ordered


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
