"""Thousands of random lives of a replica over the stamp engine; see tests/engine/simulation.py for what is checked."""

from collections import Counter

import pytest

from tests.engine.simulation import Chaos


@pytest.mark.parametrize("first", range(0, 2000, 250))
def test_every_life_ends_with_the_texts_of_solo_runs(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + 250):
        try:
            simulation = Chaos(seed).run()
        except BaseException:
            print(f"seed {seed}")
            raise
        seen += Counter(simulation.scheduler.load(draining=False).counters)
    # What the lives went through, so that a simulation that lost its bite does not pass.
    for what in (
        "preemptions",
        "hit_tokens",
        "finished_stop",
        "finished_length",
        "finished_cancelled",
        "finished_error",
    ):
        assert seen[what] > 20, f"{what}: {seen[what]}"
