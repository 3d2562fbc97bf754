"""Usage of the last minutes by account, bounded in time and in accounts."""

import pytest

from gateway.observability import recent_usage as module
from gateway.observability.recent_usage import BUCKET_S, KEPT_S, OTHERS, RecentUsage
from tenants.limits.reservation import CallUsage
from tests.support.waiting import StoppedClock


def test_only_what_ended_within_the_window_counts() -> None:
    clock = StoppedClock(1000.0)
    recent = RecentUsage(clock)
    recent.finished("ann", CallUsage(10, 4, 3, "done"), 1.5)
    recent.refused("bob")
    clock.now_s += 30
    recent.finished("ann", CallUsage(1, 0, 1, "done"), 0.5)
    ann = recent.sums(60)["ann"]
    assert (ann.requests, ann.prompt_tokens, ann.cached_tokens, ann.completion_tokens, ann.neurons) == (
        2,
        11,
        4,
        4,
        2.0,
    )
    assert recent.sums(60)["bob"].refused == 1
    assert recent.sums(10).keys() == {"ann"}
    assert recent.sums(10)["ann"].requests == 1
    clock.now_s += KEPT_S + BUCKET_S
    assert recent.sums(KEPT_S) == {}


def test_buckets_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ACCOUNTS_MAX", 2)
    clock = StoppedClock(0.0)
    recent = RecentUsage(clock)
    for account in ("a", "b", "c", "d", "a"):
        recent.refused(account)
    assert {name: row.refused for name, row in recent.sums(5).items()} == {"a": 2, "b": 1, OTHERS: 2}
    for second in range(0, 4000, BUCKET_S):
        clock.now_s = float(second)
        recent.refused("a")
    assert len(recent._buckets) == KEPT_S // BUCKET_S + 1
