"""The timing gate of benchmarks/scheduling/isolation.py, small: times tell that accounts share prefixes, where the
gateway is broken so that they do."""

import random
from pathlib import Path

import pytest

from benchmarks.scheduling.isolation import CROSS, auc, judge, ks_p, measure
from tests.end_to_end.conftest import serving_broken

TRIPLES, WORDS = 25, 100


def test_the_timing_gate_fails_where_accounts_share_prefixes(tmp_path: Path) -> None:
    with serving_broken("tenants-share-prefixes", tmp_path) as hearth:
        with pytest.raises(AssertionError, match=r"^cross: "):
            measure(hearth, 1, WORDS, random.Random(1))
        verdict = judge(measure(hearth, TRIPLES, WORDS, random.Random(2), exact=False))
    assert verdict.cross > CROSS[1]
    assert not verdict.passes


def test_equal_times_pass_and_faster_ones_do_not() -> None:
    pick = random.Random(3)
    cold, cross, leaky = ([pick.gauss(mean, 1.0) for _ in range(1000)] for mean in (10.0, 10.0, 9.7))
    same = [time / 2 for time in cold]
    assert judge({"cold": cold, "cross": cross, "same": same}).passes
    assert not judge({"cold": cold, "cross": leaky, "same": same}).passes
    assert not judge({"cold": cold, "cross": cross, "same": cross}).passes, "it could not have told"
    assert auc([1.0, 2.0], [2.0, 3.0]) == (2 + 1 + 0.5) / 4
    assert ks_p(cold, cold) == 1.0
