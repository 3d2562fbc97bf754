"""engine/ranks/group.py: when rank 0 looks at its followers, and from when on their silence counts."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from engine.ranks.board import RankBoard
from engine.ranks.group import RankGroup, RankLost
from engine.ranks.silence import Silence


@pytest.fixture
def group() -> Iterator[RankGroup]:
    """Rank 0's view of a follower that does nothing and is not even on a core."""
    board = RankBoard(2, 1 << 12, 1)
    group = RankGroup.fork(board, lambda rank, waker: signal.pause(), stall_s=0.2)
    group._silence = Silence(0.0, lambda: 0.0)  # a busy machine lets it wait for a core
    yield group
    group.close()


def test_the_next_look_is_at_the_moment_at_which_a_rank_would_be_lost(group: RankGroup) -> None:
    group.board.published, began = 1, 1e9
    assert group._look(began, 2.0) == pytest.approx(began + 0.02, abs=1e-6)
    assert group._look(began + 0.195, 2.0) == pytest.approx(began + 0.2, abs=1e-6)
    with pytest.raises(RankLost, match=r"rank 1 made no progress for 0\.2 s"):
        group._look(began + 0.2 + 1e-6, 2.0)


def test_a_rank_that_had_nothing_to_do_was_not_silent(group: RankGroup) -> None:
    now = time.perf_counter()
    group._look(now - 0.15, 2.0)
    group.begin()
    group.board.published = 1
    group._look(now + 0.1, 2.0)
    group._look(now + 0.15, 2.0)


def test_rank_0_notices_a_frozen_rank_while_it_works_itself(group: RankGroup) -> None:
    """As it does between the tensors that a wake reads, without waiting for anybody."""
    beats: list[bool] = []
    beat = group.watched(lambda: beats.append(True))
    group.begin()
    group.board.published = 1
    os.kill(group.pids[0], signal.SIGSTOP)

    def read_tensors() -> None:
        while True:
            beat()

    began = time.perf_counter()
    with pytest.raises(RankLost, match="rank 1 made no progress"), group.working():
        read_tensors()
    assert time.perf_counter() - began > 0.15
    assert beats
    with pytest.raises(RankLost):
        group.begin()


def test_a_rank_that_waits_for_rank_0_is_not_silent_while_that_works(group: RankGroup) -> None:
    beat = group.watched(lambda: None)
    group.begin()
    group.board.published = group.board.waits_W[1] = 1
    until = time.perf_counter() + 0.3
    with group.working():
        while time.perf_counter() < until:
            beat()
    with pytest.raises(RankLost, match="rank 1 made no progress"):
        group.wait(lambda: False)
