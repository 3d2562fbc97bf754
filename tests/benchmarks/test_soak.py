"""benchmarks/gateway/soak.py: what comes and goes is no growth, and a small leak below it is."""

import random
import statistics
from collections.abc import Callable

import pytest

from benchmarks.gateway.soak import (
    FLOOR_SAMPLES,
    LEAST_MAX_PERCENT,
    MOST_MAX_PERCENT,
    SAMPLE_S,
    Growth,
    floors,
    leaked,
    rise,
)

SAMPLES = 20 * FLOOR_SAMPLES
HOURS = SAMPLES * SAMPLE_S / 3600


def sawtooth(sample: int, dice: random.Random) -> float:
    """600 MB, and up to 90 more that are returned once a minute, at no sample's time."""
    return 600 + 90 * ((sample + 0.3) % FLOOR_SAMPLES) / FLOOR_SAMPLES + dice.gauss(0, 0.3)


def noise(sample: int, dice: random.Random) -> float:
    return 100 + dice.gauss(0, 0.1) + (5 if dice.random() < 0.2 else 0)


def fails(grown: Growth) -> bool:
    return grown.least > LEAST_MAX_PERCENT or grown.most > MOST_MAX_PERCENT


@pytest.mark.parametrize("memory", [sawtooth, noise])
def test_what_comes_and_goes_passes_and_a_leak_of_two_percent_does_not(
    memory: Callable[[int, random.Random], float],
) -> None:
    passed = failed = 0
    for seed in range(50):
        dice = random.Random(seed)
        values = [memory(sample, dice) for sample in range(SAMPLES)]
        passed += not fails(Growth.of(floors(values)))
        failed += fails(Growth.of(floors([leaked(number, 2.0) * value for number, value in enumerate(values)])))
    assert passed == 50
    assert failed >= 45, "nine in ten"


def test_the_line_through_all_samples_would_take_what_comes_and_goes_for_growth() -> None:
    dice = random.Random(1)
    values = [sawtooth(sample, dice) for sample in range(SAMPLES - FLOOR_SAMPLES // 2)]
    slopes = [100 * rise(values[first:]) / statistics.mean(values) / HOURS for first in range(FLOOR_SAMPLES)]
    assert max(slopes) - min(slopes) > LEAST_MAX_PERCENT


def test_too_few_floors_cannot_tell() -> None:
    dice = random.Random(1)
    assert fails(Growth.of([100 + dice.gauss(0, 1) for _ in range(5)]))


def test_what_stays_as_it_is_grows_by_nothing() -> None:
    assert Growth.of([25.0] * 20) == Growth(0.0, 0.0, 0.0)
