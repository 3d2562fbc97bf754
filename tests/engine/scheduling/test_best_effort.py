"""engine/scheduling/best_effort.py and the scheduler: the background gets what live ones leave free, and loses nothing
by it."""

import random
from collections import Counter

import pytest

from engine.protocol.types import FinishReason, SchedulingTerms, Scope, ScopeKind
from engine.scheduling import best_effort
from engine.scheduling.best_effort import IDLE_STEP_FACTOR, IDLE_STEP_ROWS, BestEffortBudget
from engine.sequences.validation import SubmitRejected
from tests.engine.scheduling.simulation.replica import Heard, Simulation
from tests.engine.scheduling.test_scheduler import A, B, words
from tests.engine.scheduling.test_token_budget import COSTS, limits, predicted_us, running

BEHIND = SchedulingTerms(background=True)


def submitted(simulation: Simulation, id: int, length: int, terms: SchedulingTerms = BEHIND, **more: object) -> Heard:
    (entry,) = simulation.submit(id, words(length, id), terms=terms, **more)  # type: ignore[arg-type]
    return entry


def ended(entry: Heard) -> bool:
    return entry.finish is not None and entry.finish.reason == FinishReason.LENGTH


# Beside live sequences


@pytest.mark.parametrize("seed", range(40))
def test_live_steps_grow_by_less_than_a_twentieth(seed: int) -> None:
    pick = random.Random(seed)
    live = [running(length, length - 1) for length in pick.choices(range(1, 9000), k=pick.randint(1, 300))]
    behind = [running(length, pick.choice([0, length - 1])) for length in pick.choices(range(2, 9000), k=40)]
    chunks = BestEffortBudget(limits(costs=COSTS)).chunks(live, [1] * len(live), behind, 0.0, 8192)
    alone_us = predicted_us(live, {})
    added = behind[: len(chunks)]
    extra = {each: chunk - 1 for each, chunk in zip(added, chunks, strict=True)}
    assert predicted_us([*live, *added], extra) < 1.05 * alone_us


def test_live_steps_grow_by_more_where_the_slack_is_twice_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_effort, "STEP_SLACK", 2 * best_effort.STEP_SLACK)
    with pytest.raises(AssertionError):
        test_live_steps_grow_by_less_than_a_twentieth(0)


def test_what_a_step_has_room_for_is_used() -> None:
    live, behind = [running(4000, 3999) for _ in range(100)], [running(100, 0)]
    (chunk,) = BestEffortBudget(limits(costs=COSTS)).chunks(live, [1] * 100, behind, 0.0, 8192)
    assert chunk > 10


def test_without_costs_none_runs_beside_live_ones_and_all_goes_on_afterwards() -> None:
    simulation = Simulation()
    behind = submitted(simulation, 1, 6, max_tokens=20)
    for _ in range(4):
        simulation.step()
    before, blocks = len(behind.tokens), behind.sequence.block_count
    assert before
    live = submitted(simulation, 2, 6, SchedulingTerms(), max_tokens=10)
    while live.finish is None:
        simulation.step()
        assert len(behind.tokens) <= before
        assert behind.sequence.block_count == blocks, "it keeps what it has"
    simulation.run()
    simulation.assert_all_finished()
    assert ended(behind)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_each_busy_time_of_live_ones_begins_late_by_what_is_in_the_air_and_no_more(seed: int, depth: int) -> None:
    """Without costs: the same live requests come at the same steps with background ones beside them and without."""
    alone, beside = timings(seed, depth, 0), timings(seed, depth, 30)
    assert alone.keys() == beside.keys()
    late = [beside[id] - alone[id] for id in alone]
    assert sum(late) <= depth * len(late)
    assert max(late) <= depth + 1  # one that begins late may meet another company in its steps


def timings(seed: int, depth: int, behind: int) -> dict[int, float]:
    """When each live request ended, in steps."""
    pick = random.Random(seed)
    simulation = Simulation(blocks=80, sequences=4, depth=depth)
    for id in range(behind):
        submitted(simulation, 1000 + id, pick.randint(1, 30), max_tokens=pick.randint(1, 30), scope=B)
    pick = random.Random(seed)
    comes = {id: pick.randint(0, 400) for id in range(40)}
    sizes = {id: (pick.randint(1, 40), pick.randint(1, 12)) for id in comes}
    ends: dict[int, float] = {}
    while len(ends) < len(comes):
        for id in [id for id, at in comes.items() if at <= simulation.seconds and (1, id) not in simulation.heard]:
            submitted(simulation, id, sizes[id][0], SchedulingTerms(), max_tokens=sizes[id][1])
        if not simulation.step():
            assert simulation.scheduler.intake.idle
        for id in comes:
            entry = simulation.heard.get((1, id))
            if entry is not None and entry.finish is not None:
                ends.setdefault(id, simulation.seconds)
    simulation.run()
    simulation.assert_all_finished()
    return ends


# Giving way


def test_it_gives_its_place_to_a_live_one_and_ends_with_the_text_of_a_run_alone() -> None:
    simulation = Simulation(sequences=2)
    behind = [submitted(simulation, id, 5, max_tokens=12) for id in (1, 2)]
    for _ in range(4):
        simulation.step()
    live = [submitted(simulation, id, 5, SchedulingTerms(), max_tokens=6) for id in (3, 4)]
    simulation.step()
    simulation.step()
    assert all(entry.started is not None for entry in live)
    simulation.run()
    simulation.assert_all_finished()
    assert all(map(ended, behind))
    assert simulation.scheduler.load(draining=False).counters["preemptions_background"] == 2


def test_it_gives_its_blocks_to_a_live_one_that_grows() -> None:
    simulation = Simulation(blocks=12, block_tokens=4, costs=COSTS, gap_ms=50.0)
    live = submitted(simulation, 1, 8, SchedulingTerms(), max_tokens=30)
    behind = submitted(simulation, 2, 8, max_tokens=12)
    while live.finish is None:
        simulation.step()
    assert ended(live)
    assert simulation.scheduler.load(draining=False).counters.get("preemptions_share", 0) == 0
    simulation.run()
    simulation.assert_all_finished()
    assert ended(behind)


def test_it_waits_behind_all_live_ones() -> None:
    simulation = Simulation(sequences=1)
    behind = submitted(simulation, 1, 3)
    live = [submitted(simulation, id, 3, SchedulingTerms()) for id in range(2, 8)]
    while behind.started is None:
        simulation.step()
    assert all(entry.finish is not None for entry in live)
    simulation.run()


# Its own queue


def test_it_takes_no_place_of_live_ones_in_the_queue_and_has_a_limit_of_its_own() -> None:
    simulation = Simulation(waiting=4)
    for id in range(4):
        submitted(simulation, id, 3)
    with pytest.raises(SubmitRejected):
        submitted(simulation, 4, 3)
    for id in range(10, 14):
        submitted(simulation, id, 3, SchedulingTerms())
    load = simulation.scheduler.load(draining=False)
    assert (load.running, load.waiting, load.background) == (0, 4, 4)
    simulation.run()
    assert simulation.scheduler.load(draining=False).background == 0


def test_accounts_take_turns_in_the_background_too_and_owe_nothing_for_it_afterwards() -> None:
    simulation = Simulation(sequences=1, waiting=100)
    for id in range(20):
        submitted(simulation, id, 30, scope=A, max_tokens=30)
    for id in range(20, 24):
        submitted(simulation, id, 30, scope=B, max_tokens=30)
    order = []
    while not simulation.loop.idle:
        simulation.step()
        order += [id for (_, id), entry in simulation.heard.items() if entry.finish and id not in order]
    last = max(order.index(id) for id in range(20, 24))
    assert last < 10, "the account with few had to wait for the other's many"
    live = simulation.scheduler.intake.waiting.live
    assert live.account_queue(A.id, SchedulingTerms()).level == 0


def test_no_deadline_ends_it() -> None:
    simulation = Simulation(sequences=1)
    behind = submitted(simulation, 2, 3, deadline_ms=1000)
    submitted(simulation, 1, 3, SchedulingTerms(), max_tokens=40)
    simulation.run()
    assert ended(behind)


def test_a_replica_that_has_nothing_else_to_do_runs_short_steps_of_it() -> None:
    simulation = Simulation(blocks=400, step_tokens=64, sequences=64)
    for id in range(40):
        submitted(simulation, id, 30)
    rows: Counter[int] = Counter()
    while not simulation.loop.idle:
        plan = simulation.plan()
        assert plan is not None
        rows[sum(plan.chunks)] += 1
        simulation.scheduler.commit(plan, simulation.fly(plan))
        simulation.listen()
    assert max(rows) == IDLE_STEP_ROWS
    simulation.assert_all_finished()


def test_with_costs_a_step_of_its_own_takes_at_most_twice_that_of_one_row() -> None:
    background = BestEffortBudget(limits(costs=COSTS))
    for count, computed in ((500, 0), (500, 99), (3, 0)):
        behind = [running(100, computed) for _ in range(count)]
        chunks = background.chunks([], [], behind, 0.0, 8192)
        assert len(chunks) == min(count, sum(chunks))
        assert IDLE_STEP_ROWS < sum(chunks) <= background.max_idle_rows
        extra = {each: chunk - 1 for each, chunk in zip(behind, chunks, strict=False)}
        assert predicted_us(behind[: len(chunks)], extra) <= IDLE_STEP_FACTOR * COSTS.rows_us(1)


def test_one_row_is_run_where_even_that_takes_long() -> None:
    behind = [running(1_000_000, 999_999)]
    assert BestEffortBudget(limits(costs=COSTS)).chunks([], [], behind, 0.0, 8192) == [1]


def test_a_live_user_of_the_same_account_is_not_held_up_by_its_own_batch() -> None:
    scope, terms = Scope(ScopeKind.TENANT, b"c" * 16), SchedulingTerms(sequences=1)
    simulation = Simulation()
    submitted(simulation, 1, 3, SchedulingTerms(sequences=1, background=True), scope=scope, max_tokens=50)
    simulation.step()
    live = submitted(simulation, 2, 3, terms, scope=scope, max_tokens=2)
    simulation.step()
    assert live.started is not None
    simulation.run()
    simulation.assert_all_finished()
