"""engine/scheduling/step_loop.py: in which order it plans, launches and lands, and what it does where a step fails."""

import json
from collections.abc import Callable

import pytest

from engine.memory.errors import OutOfDeviceMemory
from engine.protocol.types import FinishReason
from engine.step.executor import ExecutorLost, InflightStep
from engine.step.layout import Int32s
from tests.engine.scheduling.simulation.replica import Fault, Simulation
from tests.support.stamp_engine import Rule

PROMPT = list(range(1, 9))


def at_launch(*failing: int, error: Exception, late: bool = False) -> Callable[[], Fault]:
    """A misfortune that befalls these launches, counted from 1."""
    launches = iter(range(1, 10_000))
    return lambda: Fault(error, late) if next(launches) in failing else Fault()


@pytest.mark.parametrize("depth", [1, 2])
def test_it_launches_until_depth_and_then_lands_the_oldest(depth: int) -> None:
    simulation = Simulation(depth=depth)
    in_the_air: list[int] = []
    simulation.meanwhile = lambda: in_the_air.append(len(simulation.scheduler.running.inflight))
    simulation.submit(1, PROMPT, max_tokens=20)
    for _ in range(10):
        simulation.step()
    assert in_the_air == [depth] * 10
    assert len(simulation.heard[1, 1].tokens) == 10


@pytest.mark.parametrize("depth", [1, 2])
def test_constrained_sequences_keep_as_many_flights_in_the_air(depth: int) -> None:
    simulation = Simulation(depth=depth)
    in_the_air: list[int] = []
    simulation.meanwhile = lambda: in_the_air.append(len(simulation.scheduler.running.inflight))
    (entry,) = simulation.submit(1, PROMPT, max_tokens=20, rule=Rule(20, forcing=False))
    for _ in range(10):
        simulation.step()
    assert in_the_air == [depth] * 10
    assert len(entry.tokens) == 10


def test_nothing_is_launched_behind_a_step_whose_masks_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step is planned while masks are written, with tokens that nobody will draw."""
    simulation = Simulation(depth=2, sequences=1)
    (lost,) = simulation.submit(1, PROMPT, max_tokens=20, rule=Rule(20, forcing=False))
    (later,) = simulation.submit(2, PROMPT, max_tokens=9)
    launch, sample, doings = simulation.launch, simulation.sample, list[str]()

    def failing(flight: InflightStep, masks_MW: Int32s) -> None:
        if doings.count("masks") == 3:
            doings.append("failed")
            raise RuntimeError("broken")
        doings.append("masks")
        sample(flight, masks_MW)

    def launching(packed: Int32s) -> InflightStep:
        doings.append("launch")
        return launch(packed)

    monkeypatch.setattr(simulation, "sample", failing)
    monkeypatch.setattr(simulation, "launch", launching)
    while lost.finish is None:
        simulation.step()
    assert lost.finish.reason == FinishReason.ERROR
    assert len(lost.tokens) == 3
    assert (doings[-1], doings.count("launch")) == ("failed", 4), "the prompt, and three steps behind it"
    simulation.run()
    assert later.finish is not None
    assert later.finish.reason == FinishReason.LENGTH


def test_without_work_a_turn_does_nothing() -> None:
    simulation = Simulation(depth=2)
    assert simulation.loop.idle
    assert not simulation.loop.turn()


def test_what_ended_in_the_air_still_lands() -> None:
    simulation = Simulation(depth=2)
    simulation.submit(1, PROMPT, max_tokens=20)
    simulation.step()
    simulation.scheduler.intake.cancel(1, [1])
    assert simulation.scheduler.intake.idle
    assert not simulation.loop.idle
    simulation.step()
    assert simulation.loop.idle
    assert simulation.account.free_blocks == simulation.account.total


@pytest.mark.parametrize("rule", [None, Rule(20, forcing=False)])
def test_landing_all_gives_every_token_and_launches_nothing(rule: Rule | None) -> None:
    simulation = Simulation(depth=2)
    (entry,) = simulation.submit(1, PROMPT, max_tokens=20, rule=rule)
    for _ in range(3):
        simulation.step()
    simulation.meanwhile = lambda: None
    flying, told = len(simulation.scheduler.running.inflight), len(entry.sequence.tokens)
    simulation.loop.land_all()
    assert (flying, len(simulation.scheduler.running.inflight)) == (1, 0)
    assert len(entry.sequence.tokens) == told + 1
    simulation.run()
    simulation.assert_all_finished()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_fails_costs_its_sequences_and_not_those_that_come_later(depth: int, late: bool) -> None:
    simulation = Simulation(depth=depth, sequences=1)
    simulation.misfortune = at_launch(3, error=RuntimeError("broken"), late=late)
    (lost,) = simulation.submit(1, PROMPT, max_tokens=9)
    (later,) = simulation.submit(2, PROMPT, max_tokens=9)
    simulation.run()
    assert lost.finish is not None
    assert lost.finish.reason == FinishReason.ERROR
    assert len(lost.tokens) == 2, "what landed before it was told"
    assert later.finish is not None
    assert later.finish.reason == FinishReason.LENGTH
    simulation.assert_all_finished()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_executor_that_is_lost_ends_the_loop_and_no_sequence(depth: int, late: bool) -> None:
    """Their callers ask again of another replica: an error would be an answer."""
    simulation = Simulation(depth=depth, sequences=1)
    simulation.misfortune = at_launch(3, error=ExecutorLost("a rank ended"), late=late)
    (asked,) = simulation.submit(1, PROMPT, max_tokens=9)
    with pytest.raises(ExecutorLost, match="a rank ended"):
        simulation.run()
    assert asked.finish is None
    assert simulation.loop.failures == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_failures_in_a_row_are_counted_and_missing_memory_is_none(depth: int) -> None:
    simulation = Simulation(depth=depth, sequences=1)
    for id in range(4):
        simulation.submit(id, PROMPT, max_tokens=9)
    simulation.misfortune = lambda: Fault(RuntimeError("broken"))
    simulation.step()
    simulation.step()
    assert simulation.loop.failures == 2
    simulation.misfortune = lambda: Fault(OutOfDeviceMemory("told to"))
    simulation.step()
    assert simulation.loop.failures == 2
    simulation.misfortune = Fault
    simulation.step()
    assert simulation.loop.failures == 0


@pytest.mark.parametrize("late", [False, True])
def test_what_is_behind_a_step_without_memory_is_taken_back_with_it(
    late: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    simulation = Simulation(depth=2, step_tokens=64)
    simulation.misfortune = at_launch(2, error=OutOfDeviceMemory("told to"), late=late)
    simulation.submit(1, PROMPT, max_tokens=9)
    simulation.submit(2, PROMPT[:5], max_tokens=9)
    simulation.run()
    simulation.assert_all_finished()
    assert {entry.finish.reason for entry in simulation.heard.values() if entry.finish} == {FinishReason.LENGTH}
    events = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [(event["event"], event["rows"], event["next_rows_at_most"]) for event in events] == [
        ("step_out_of_memory", 2, 1)
    ]
