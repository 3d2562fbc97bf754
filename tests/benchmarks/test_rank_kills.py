"""benchmarks/engine/rank_kills.py on a few kills: no rank that is lost is hidden, hangs, or leaves a wrong token."""

from benchmarks.engine.rank_kills import kill_again_and_again


def test_killed_and_frozen_ranks_end_their_model_and_nothing_else() -> None:
    tally = kill_again_and_again(kills=8, ranks=2, stages=1, seed=7)
    assert tally.wrong == []
    assert tally.lives == 8
    assert tally.lost > 0
