"""tenants/limits/local_rate.py: what passes in which time, and what is remembered."""

import random

import pytest

from tenants.limits import local_rate
from tenants.limits.local_rate import LocalRate
from tests.support.waiting import StoppedClock


def test_a_key_may_take_its_room_at_once_and_then_its_rate() -> None:
    clock = StoppedClock(100.0)
    rate = LocalRate(per_s=2, room=4, clock=clock)
    assert [rate.take("a") for _ in range(4)] == [0.0] * 4
    assert rate.take("a") == pytest.approx(0.5)
    assert rate.take("b", 4) == 0.0, "keys are apart"
    clock.now_s += 0.5
    assert rate.take("a") == 0.0
    assert rate.take("a") == pytest.approx(0.5)
    assert rate.take("a", 4) == pytest.approx(2.0), "what is refused takes nothing"
    clock.now_s += 60
    assert rate.take("a", 4) == 0.0
    assert rate.take("a") > 0, "room does not add up"


def test_what_fills_the_room_exactly_passes_at_any_time() -> None:
    """Sums of large times are rounded: room that is there by a hair less is there."""
    rng, clock = random.Random(1), StoppedClock()
    for _ in range(5000):
        clock.now_s = 1e6 * rng.random()
        assert LocalRate(per_s=1 / 60, room=1, clock=clock).take("a") == 0.0, clock.now_s


def test_in_any_time_no_more_passes_than_room_and_rate_allow() -> None:
    seed = random.randrange(1 << 32)
    rng, clock = random.Random(seed), StoppedClock()
    rate, passed = LocalRate(per_s=10, room=50, clock=clock), 0.0
    for _ in range(2000):
        clock.now_s += rng.random()
        amount = rng.randrange(1, 51)
        wait_s = rate.take("a", amount)
        if wait_s:
            clock.now_s += wait_s
            assert rate.take("a", amount - 1e-6) == 0.0, f"seed {seed}: it may after the time that was named"
        passed += amount
        assert passed <= 50 + 10 * clock.now_s + 1, f"seed {seed}"


def test_the_oldest_keys_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_rate, "KEYS_MAX", 3)
    rate = LocalRate(per_s=1, room=1, clock=StoppedClock())
    for key in "abcd":
        assert rate.take(key) == 0.0
    assert len(rate) == 3
    assert rate.take("d") > 0
    assert rate.take("a") == 0.0
