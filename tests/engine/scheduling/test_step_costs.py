"""What steps take, learned from noisy ones: their costs come out again, whatever the mix of steps was."""

import random

import pytest

from engine.scheduling.step_costs import StepCosts

FIXED, DECODE, ROW, PAIR = 2000.0, 30.0, 60.0, 0.004


def taught(seed: int, steps: int, prompts: float, speed: float = 1.0, costs: StepCosts | None = None) -> StepCosts:
    rng, costs = random.Random(seed), costs or StepCosts()
    for _ in range(steps):
        decoding, rows, pairs = rng.randrange(0, 60), 0, 0
        if rng.random() < prompts or not decoding:
            rows, seen = rng.randrange(2, 512), rng.randrange(0, 8000)
            pairs = rows * seen + rows * (rows + 1) // 2
        took_us = speed * (FIXED + DECODE * decoding + ROW * rows + PAIR * pairs) * rng.lognormvariate(0.0, 0.03)
        costs.add(decoding, rows, pairs, took_us)
    return costs


def predicted(costs: StepCosts, decoding: int, rows: int, seen: int) -> float:
    fixed, decode, row, pair = costs.costs
    return fixed + decode * decoding + row * rows + pair * (rows * seen + rows * (rows + 1) // 2)


def true(decoding: int, rows: int, seen: int) -> float:
    return FIXED + DECODE * decoding + ROW * rows + PAIR * (rows * seen + rows * (rows + 1) // 2)


@pytest.mark.parametrize("prompts", [0.05, 0.5, 1.0])
def test_costs_are_learned_from_any_mix_of_steps(prompts: float) -> None:
    costs = taught(3, 3000, prompts)
    for shape in ((0, 512, 0), (50, 512, 4000), (50, 0, 0), (10, 100, 100)):
        if prompts < 1.0 or shape[1]:
            assert predicted(costs, *shape) == pytest.approx(true(*shape), rel=0.05), shape
    assert 256 < costs.chunk_tokens <= 512
    assert min(costs.costs) >= 0


def test_nothing_is_known_of_prompts_before_the_first_one() -> None:
    assert StepCosts().costs == (0.0, 0.0, 0.0, 0.0)
    only = StepCosts()
    for count in range(1, 200):
        only.add(count % 40 + 1, 0, 0, FIXED + DECODE * (count % 40 + 1))
    fixed, decode, row, pair = only.costs
    assert (row, pair) == (0.0, 0.0)
    assert (fixed, decode) == (pytest.approx(FIXED, rel=0.01), pytest.approx(DECODE, rel=0.01))


def test_thousands_of_steps_without_prompts_do_not_blur_what_prompts_take() -> None:
    costs = taught(5, 600, 0.5)
    for _ in range(5000):
        costs.add(20, 0, 0, FIXED + DECODE * 20)
    assert predicted(costs, 20, 512, 1000) == pytest.approx(true(20, 512, 1000), rel=0.05)


def test_a_processor_that_gets_slower_is_learned_and_one_step_that_hangs_is_not() -> None:
    costs = taught(6, 1000, 0.5)
    costs.add(10, 300, 50_000, 60e6)
    assert predicted(costs, 10, 300, 200) < 1.6 * true(10, 300, 200)
    taught(7, 400, 0.5, speed=2.0, costs=costs)
    assert predicted(costs, 10, 300, 200) == pytest.approx(2 * true(10, 300, 200), rel=0.06)


def test_the_time_of_steps_is_split_between_prompts_and_the_rest() -> None:
    costs = taught(8, 2000, 0.3)
    assert 0.2 < costs.prompts_us / costs.steps_us < 0.95
    quiet = StepCosts()
    for _ in range(50):
        quiet.add(5, 0, 0, 1000.0)
    assert (quiet.prompts_us, quiet.steps_us) == (0.0, 50_000.0)
