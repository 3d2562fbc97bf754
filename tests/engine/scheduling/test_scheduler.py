"""engine/scheduling/scheduler.py over the stamp engine: one budget, the door, cache hits, preemption, turns,
endings."""

import random
import time
from typing import Any

import numpy as np
import pytest

from engine.memory.errors import OutOfDeviceMemory
from engine.protocol.types import FinishReason, RejectReason, SamplingParams, SchedulingTerms, Scope, ScopeKind
from engine.scheduling import admission
from engine.scheduling.scheduler import NOT_FINITE, OUT_OF_MEMORY
from engine.scheduling.step_plan import StepPlan
from engine.sequences.sequence import PromptImage, Sequence, SequenceState
from engine.sequences.validation import SubmitRejected
from engine.step.executor import RunnerOutput
from engine.step.layout import unpack_step
from tests.engine.scheduling.simulation.replica import GROUPING, Fault, Simulation
from tests.support.stamp_engine import solo

A = Scope(ScopeKind.TENANT, b"a" * 16)
B = Scope(ScopeKind.TENANT, b"b" * 16)


def words(count: int, seed: int = 1) -> list[int]:
    pick = random.Random(seed)
    return [pick.randrange(1000) for _ in range(count)]


def steps_until_first_token(simulation: Simulation, id: int, most: int = 200) -> int:
    for step in range(1, most + 1):
        assert simulation.step()
        if simulation.heard[1, id].tokens:
            return step
    raise AssertionError(f"no token in {most} steps")


# One budget for prompts and decodes


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("step_tokens", [1, 3, 16, 64, 1000])
def test_text_does_not_depend_on_how_the_prompt_is_cut(step_tokens: int, depth: int) -> None:
    simulation = Simulation(step_tokens=step_tokens, depth=depth)
    simulation.submit(1, words(45), max_tokens=20)
    simulation.submit(2, words(7), max_tokens=20, sampling=SamplingParams(temperature=1.0, seed=5))
    simulation.run()
    simulation.assert_all_finished()


def test_a_prompt_is_cut_into_steps_of_the_budget() -> None:
    simulation = Simulation(step_tokens=16)
    simulation.submit(1, words(45))
    chunks = []
    while not simulation.heard[1, 1].tokens:
        plan = simulation.plan()
        assert plan is not None
        chunks.append(plan.chunks)
        simulation.scheduler.commit(plan, simulation.fly(plan))
        simulation.listen()
    assert chunks == [[16], [16], [13]]


def test_decodes_go_on_in_every_step_of_a_long_prompt() -> None:
    simulation = Simulation(blocks=128)
    simulation.submit(1, words(4), max_tokens=40)
    simulation.step()
    simulation.submit(2, words(300, 2))
    for count in range(2, 12):
        simulation.step()
        assert len(simulation.heard[1, 1].tokens) == count


def test_a_short_prompt_is_not_kept_waiting_by_a_long_one() -> None:
    simulation = Simulation(blocks=256)
    simulation.submit(1, words(800), A)
    simulation.step()
    simulation.submit(2, words(6, 2), B)
    assert steps_until_first_token(simulation, 2) <= 2


def test_a_long_prompt_is_not_starved_by_short_ones() -> None:
    simulation = Simulation(blocks=256, waiting=1000, step_tokens=16)
    simulation.submit(1, words(320), A)
    for step in range(60):  # alone it takes 20 steps, and half of every step is its right
        simulation.submit(100 + step, words(9, step), B, max_tokens=1)
        simulation.step()
        if simulation.heard[1, 1].tokens:
            assert step <= 50
            return
    raise AssertionError("starved")


def test_short_prompts_fill_a_step_together() -> None:
    simulation = Simulation(step_tokens=64, sequences=32)
    for id in range(20):
        simulation.submit(id, words(8, id))
    plan = simulation.plan()
    assert plan is not None
    assert plan.chunks == [8] * 8


def test_running_sequences_are_limited() -> None:
    simulation = Simulation(sequences=3)
    for id in range(10):
        simulation.submit(id, words(3, id), max_tokens=30)
    for _ in range(20):
        simulation.step()
        assert simulation.scheduler.load(draining=False).running <= 3


# The door


def test_queue_has_a_bound_and_takes_all_choices_or_none() -> None:
    simulation = Simulation(waiting=4)
    simulation.submit(1, words(3), n=3)
    with pytest.raises(SubmitRejected) as refused:
        simulation.submit(10, words(3), n=2)
    assert refused.value.reason == RejectReason.BUSY
    assert 250 <= refused.value.retry_after_ms <= 10_000
    assert simulation.scheduler.load(draining=False).waiting == 3
    simulation.submit(20, words(3))
    simulation.run()
    simulation.assert_all_finished()


def test_what_can_never_fit_the_pool_is_refused_at_once() -> None:
    simulation = Simulation(blocks=4, block_tokens=4)
    with pytest.raises(SubmitRejected) as refused:
        simulation.submit(1, words(16))
    assert refused.value.reason == RejectReason.TOO_LONG
    simulation.submit(2, words(15), max_tokens=100)
    simulation.run()
    assert len(simulation.heard[1, 2].tokens) == 1


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    simulation = Simulation()
    simulation.submit(1, words(3))
    with pytest.raises(SubmitRejected):
        simulation.submit(0, words(3), n=2)
    simulation.run()
    simulation.submit(0, words(3), n=2)
    simulation.run()


# Cache hits


def test_isolation_gate_with_its_positive_control() -> None:
    simulation = Simulation()
    prompt = words(22)
    cold, cross, same = (simulation.submit(id, prompt, scope) for id, scope in ((1, A), (2, B), (3, A)))
    tables = {}
    while not simulation.scheduler.intake.idle:
        plan = simulation.plan()
        assert plan is not None
        for sequence in plan.sequences:
            tables.setdefault(sequence.id, set()).update(sequence.table[: sequence.block_count].tolist())
        simulation.scheduler.commit(plan, simulation.fly(plan))
        simulation.listen()
    assert [heard[0].started.cached_tokens for heard in (cold, cross, same) if heard[0].started] == [0, 0, 20]
    assert tables[1].isdisjoint(tables[2])
    assert tables[3].isdisjoint(tables[2])
    assert len(tables[1] & tables[3]) >= 5
    simulation.assert_all_finished()


@pytest.mark.parametrize(
    "other",
    [
        B,
        Scope(ScopeKind.USER, A.id),
        Scope(ScopeKind.PUBLIC, A.id),
        Scope(ScopeKind.TENANT, A.id, 1),
        Scope(ScopeKind.REQUEST, A.id),
        Scope(),
    ],
)
def test_another_kind_id_or_epoch_finds_nothing(other: Scope) -> None:
    simulation = Simulation()
    simulation.submit(1, words(22), A)
    simulation.run()
    simulation.submit(2, words(22), other)
    simulation.run()
    started = simulation.heard[1, 2].started
    assert started is not None
    assert started.cached_tokens == 0
    simulation.assert_all_finished()


def test_request_scope_never_touches_the_tree() -> None:
    simulation = Simulation()
    simulation.submit(1, words(22), Scope(ScopeKind.REQUEST, A.id), n=3)
    simulation.run()
    assert simulation.tree.cached_blocks == 0
    assert simulation.account.free_blocks == simulation.account.total
    assert [simulation.heard[1, id].started.cached_tokens for id in (1, 2, 3)] == [0, 0, 0]  # type: ignore[union-attr]
    simulation.assert_all_finished()


@pytest.mark.parametrize(("length", "cached"), [(4, 0), (5, 4), (8, 4), (9, 8), (22, 20)])
def test_the_last_prompt_token_is_always_computed(length: int, cached: int) -> None:
    simulation = Simulation(block_tokens=4)
    for id in (1, 2):
        simulation.submit(id, words(length), A)
        simulation.run()
    started = simulation.heard[1, 2].started
    assert started is not None
    assert started.cached_tokens == cached


def test_the_next_turn_hits_the_answer_of_the_last() -> None:
    simulation = Simulation(block_tokens=4)
    (first,) = simulation.submit(1, words(10), A, max_tokens=15)
    simulation.run()
    (second,) = simulation.submit(2, [*words(10), *first.tokens, *words(5, 2)], A)
    simulation.run()
    assert second.started is not None
    assert second.started.cached_tokens == 24  # 10 + 15 tokens; the KV of the last one was never computed
    simulation.assert_all_finished()


def test_choices_wait_for_the_first_and_then_share_its_prompt() -> None:
    simulation = Simulation(block_tokens=4, step_tokens=16)
    entries = simulation.submit(1, words(41), A, n=4)
    simulation.run()
    assert [entry.started.cached_tokens for entry in entries if entry.started] == [0, 40, 40, 40]
    computed = simulation.scheduler.load(draining=False).counters["computed_tokens"]
    assert computed == 41 + 3 * 1 + 4 * 3
    simulation.assert_all_finished()


def test_blocks_that_two_sequences_read_are_told_as_shared() -> None:
    simulation = Simulation(block_tokens=4, step_tokens=16)
    simulation.submit(1, words(41), A, n=3, max_tokens=20)
    while simulation.scheduler.load(draining=False).running < 3:
        simulation.step()
    assert simulation.scheduler.load(draining=False).shared_blocks == 10
    simulation.run()
    assert simulation.scheduler.load(draining=False).shared_blocks == 0


def test_a_sequence_that_shares_a_running_prompts_prefix_waits_for_it_and_blocks_no_other_scope() -> None:
    simulation = Simulation(blocks=256, step_tokens=16)
    simulation.submit(1, words(160), A)
    simulation.step()
    (sharer,) = simulation.submit(2, [*words(160), 5], A)
    (stranger,) = simulation.submit(3, words(4, 9), B)
    simulation.step()
    assert sharer.started is None
    assert stranger.started is not None
    simulation.run()
    assert sharer.started is not None
    assert sharer.started.cached_tokens == 160
    simulation.assert_all_finished()


def test_a_sequence_that_waits_for_a_prefix_is_compared_with_it_once_and_not_in_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared, common = [], admission.common_prefix_length

    def counted(*prompts: Any) -> int:
        compared.append(len(prompts[0]))
        return common(*prompts)

    monkeypatch.setattr(admission, "common_prefix_length", counted)
    simulation = Simulation(blocks=256, step_tokens=16, waiting=100)
    shared = [Scope(ScopeKind.PUBLIC, b"p" * 16, account=bytes([number]) * 16) for number in range(50)]
    for id, scope in enumerate(shared):
        simulation.submit(id, [*words(320), id], scope)
    for _ in range(20):
        simulation.step()
    assert simulation.scheduler.load(draining=False).running == 1
    assert len(compared) <= 49
    simulation.run()
    simulation.assert_all_finished()
    assert simulation.scheduler.load(draining=False).counters["cached_tokens"] == 49 * 320


def test_a_sequence_that_waited_for_a_prefix_goes_on_when_its_leader_is_cancelled() -> None:
    simulation = Simulation(blocks=256, step_tokens=16)
    simulation.submit(1, words(160), A, n=2)
    simulation.step()
    simulation.step()
    simulation.scheduler.intake.cancel(1, [1])
    simulation.run()
    started = simulation.heard[1, 2].started
    assert started is not None
    assert started.cached_tokens == 32
    simulation.assert_all_finished()


# When blocks run out


@pytest.mark.parametrize("depth", [1, 2])
def test_the_youngest_is_preempted_and_nobody_notices(depth: int) -> None:
    simulation = Simulation(blocks=12, block_tokens=4, step_tokens=64, depth=depth)
    entries = [simulation.submit(id, words(9, id), max_tokens=30)[0] for id in range(4)]
    oldest_preempted = False
    while not simulation.scheduler.intake.idle:
        assert simulation.step()
        oldest_preempted |= entries[0].started is not None and entries[0].sequence.state == SequenceState.WAITING
    assert not oldest_preempted
    assert simulation.scheduler.load(draining=False).counters["preemptions"] >= 3
    simulation.assert_all_finished()


def test_preempted_sequence_resumes_before_anything_new_starts() -> None:
    simulation = Simulation(sequences=2)
    (old,) = simulation.submit(1, words(9), max_tokens=20)
    simulation.step()
    (new,) = simulation.submit(2, words(9, 2), max_tokens=20)
    simulation.scheduler.preempt(old.sequence)
    simulation.step()
    assert old.sequence.state == SequenceState.RUNNING
    assert old.sequence.start_order < new.sequence.start_order
    simulation.run()
    simulation.assert_all_finished()


def test_cached_blocks_make_room_for_new_prompts() -> None:
    simulation = Simulation(blocks=12, block_tokens=4)
    for id in range(20):
        simulation.submit(id, words(30, id), A, max_tokens=5)
        simulation.run()
    counters = simulation.scheduler.load(draining=False).counters
    assert counters.get("preemptions", 0) == 0
    assert counters["evicted_space_blocks"] > 100
    simulation.assert_all_finished()


# Turns between accounts


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (A, B),
        (Scope(account=A.id), Scope(account=B.id)),  # requests that share with nobody, of two accounts
        (Scope(ScopeKind.PUBLIC, A.id, account=A.id), Scope(ScopeKind.PUBLIC, A.id, account=B.id)),
    ],
    ids=["tenant", "request", "public"],
)
def test_a_backlog_of_one_account_does_not_delay_another_by_more_than_a_turn(one: Scope, other: Scope) -> None:
    simulation = Simulation(blocks=64, sequences=2, waiting=200)
    for id in range(60):
        simulation.submit(id, words(20, id), one, max_tokens=6)
    for _ in range(10):
        simulation.step()
    started_before = simulation.scheduler.load(draining=False).counters["started"]
    (late,) = simulation.submit(100, words(20, 99), other, max_tokens=6)
    while late.started is None:
        assert simulation.step()
    assert simulation.scheduler.load(draining=False).counters["started"] - started_before <= 2


def test_users_of_one_account_take_the_turns_of_one() -> None:
    simulation = Simulation(blocks=64, sequences=2, waiting=400)
    for id in range(30):  # a user each
        simulation.submit(id, words(20, id), Scope(ScopeKind.USER, bytes([id]) * 16, account=A.id), max_tokens=6)
    for id in range(100, 130):
        simulation.submit(id, words(20, id), B, max_tokens=6)
    while any(not simulation.heard[1, id].started for id in range(100, 115)):
        assert simulation.step()
    assert 12 <= sum(simulation.heard[1, id].started is not None for id in range(30)) <= 18


def test_backlogged_accounts_are_served_alike_though_one_asks_in_bulk() -> None:
    simulation = Simulation(blocks=64, sequences=4, waiting=400)
    for id in range(100):
        simulation.submit(id, words(20, id), A, max_tokens=8)
    for id in range(100, 120):
        simulation.submit(id, words(20, id), B, max_tokens=8)
    while any(not simulation.heard[1, id].started for id in range(100, 120)):
        assert simulation.step()
    bulk = sum(simulation.heard[1, id].started is not None for id in range(100))
    assert 16 <= bulk <= 24, f"{bulk} of A while 20 of B"


def test_prompts_of_one_account_do_not_delay_another_though_they_would_fill_every_step() -> None:
    simulation = Simulation(blocks=1024, sequences=16)
    for id in range(4):
        simulation.submit(id, words(900, id), A)
    for _ in range(10):
        simulation.step()
    simulation.submit(9, words(10, 9), B)
    assert steps_until_first_token(simulation, 9) <= 2


def test_a_sequence_that_waits_for_a_prefix_lets_the_next_of_its_account_go_first() -> None:
    simulation = Simulation(blocks=256, sequences=4, step_tokens=32)
    prompt = words(100)
    simulation.submit(1, prompt, A)
    simulation.step()
    (same,) = simulation.submit(2, [*prompt, 7], A)
    (other,) = simulation.submit(3, words(4, 3), A)
    simulation.step()
    assert other.started is not None
    assert same.started is None
    simulation.run()
    assert same.started is not None
    assert same.started.cached_tokens == 100


# Caps of an account


def test_an_account_at_its_cap_of_sequences_is_passed_over_and_others_go_on() -> None:
    simulation = Simulation(blocks=128, sequences=4, step_tokens=64)
    capped = [
        simulation.submit(id, words(8, id), A, max_tokens=30, terms=SchedulingTerms(sequences=1))[0] for id in range(3)
    ]
    others = [simulation.submit(id, words(8, id), B, max_tokens=10)[0] for id in range(3, 6)]
    simulation.step()
    assert [entry.started is not None for entry in capped] == [True, False, False]
    assert all(entry.started for entry in others)
    simulation.run()  # which asserts the cap in every step
    simulation.assert_all_finished()


def test_an_account_grows_into_its_cap_of_blocks_and_not_past_it() -> None:
    simulation = Simulation(blocks=64, block_tokens=4, sequences=8)
    terms = SchedulingTerms(blocks=8)
    entries = [simulation.submit(id, words(5, id), A, max_tokens=20, terms=terms)[0] for id in range(4)]
    simulation.submit(9, words(5, 9), B, max_tokens=20)
    together = 0
    while not simulation.loop.idle:
        assert simulation.step()
        together = max(together, sum(entry.sequence.state == SequenceState.RUNNING for entry in entries))
    assert 2 <= together < 4
    assert simulation.scheduler.load(draining=False).counters["preemptions_cap"] >= 1
    simulation.assert_all_finished()


def test_what_an_account_reads_from_its_cache_together_counts_once_under_its_cap() -> None:
    simulation = Simulation(blocks=64, block_tokens=4, sequences=8)
    prompt, terms = words(40), SchedulingTerms(blocks=16)
    simulation.submit(1, prompt, A, max_tokens=1, terms=terms)
    simulation.run()
    entries = [simulation.submit(id, [*prompt, id], A, max_tokens=2, terms=terms)[0] for id in range(2, 5)]
    simulation.step()
    assert all(entry.started for entry in entries)


def test_what_can_never_fit_an_accounts_cap_is_refused_at_once_and_says_so() -> None:
    simulation = Simulation(blocks=64, block_tokens=4)
    with pytest.raises(SubmitRejected) as refused:
        simulation.submit(1, words(9), A, max_tokens=9, terms=SchedulingTerms(blocks=4))
    assert refused.value.reason == RejectReason.TOO_LONG
    assert "18 tokens can never fit the 16" in refused.value.message
    simulation.submit(1, words(9), A, max_tokens=8, terms=SchedulingTerms(blocks=4))
    simulation.run()
    simulation.assert_all_finished()


def test_a_cap_that_is_lowered_stops_nobody_who_runs_alone() -> None:
    simulation = Simulation(blocks=64, block_tokens=4)
    for id in range(3):
        simulation.submit(id, words(9, id), A, max_tokens=30)
    simulation.step()
    simulation.submit(3, words(3, 3), A, max_tokens=2, terms=SchedulingTerms(sequences=1, blocks=2))
    for _ in range(300):
        if simulation.loop.idle:
            break
        assert simulation.loop.turn()
        simulation.listen()
    simulation.assert_all_finished()


# Who gives way


def test_blocks_are_taken_from_the_account_with_most_for_its_weight_and_from_its_youngest() -> None:
    simulation = Simulation(blocks=24, block_tokens=4, step_tokens=64)
    few = simulation.submit(1, words(9, 1), B, max_tokens=8)
    many = [simulation.submit(id, words(9, id), A, max_tokens=40)[0] for id in range(3, 7)]
    (late,) = simulation.submit(7, words(9, 7), B, max_tokens=8)
    gave_way = []
    while not simulation.loop.idle:
        assert simulation.step()
        gave_way += [each.sequence.id for each in many if each.started and each.sequence.state == SequenceState.WAITING]
        assert all(each.sequence.state != SequenceState.WAITING for each in [*few, late] if each.started)
    assert gave_way[0] == 6
    simulation.assert_all_finished()


@pytest.mark.parametrize("depth", [1, 2])
def test_places_that_one_account_has_taken_are_given_up_for_another(depth: int) -> None:
    simulation = Simulation(blocks=256, sequences=8, depth=depth)
    for id in range(20):
        simulation.submit(id, words(8, id), A, max_tokens=60)
    for _ in range(8):
        simulation.step()
    simulation.submit(30, words(8, 30), B, max_tokens=60)
    assert steps_until_first_token(simulation, 30) <= 3
    counters = simulation.scheduler.load(draining=False).counters
    assert counters["preemptions"] == counters["preemptions_share"] == 1
    simulation.run()
    assert simulation.scheduler.load(draining=False).counters["preemptions_share"] <= 8
    simulation.assert_all_finished()


@pytest.mark.parametrize("seed", range(30))
def test_the_oldest_always_moves_on_and_so_all_end(seed: int) -> None:
    """Accounts whose sequences outgrow a small pool together, so that someone is preempted again and again."""
    pick = random.Random(seed)
    simulation = Simulation(
        blocks=pick.randint(12, 20), block_tokens=2, step_tokens=64, sequences=6, depth=pick.choice([1, 2])
    )
    for id in range(24):
        scope, weight = pick.choice([(A, 1.0), (B, 4.0), (Scope(account=b"c" * 16), 0.5)])
        simulation.submit(id, words(pick.randint(2, 8), id), scope, pick.randint(1, 14), terms=SchedulingTerms(weight))
    running: list[Sequence] = []
    while not simulation.loop.idle:
        oldest = running[0] if running else None
        was = oldest.launched if oldest is not None else 0
        assert simulation.step()
        if oldest is not None and oldest.state != SequenceState.ENDED:
            assert oldest.state == SequenceState.RUNNING, "the oldest was preempted"
            assert oldest.launched > was or not oldest.launchable or simulation.depth == 2
        running = list(simulation.scheduler.running.sequences)
        assert simulation.seconds < 2000
    assert simulation.scheduler.load(draining=False).counters["preemptions"] > 0
    simulation.assert_all_finished()


# How long it may wait


def overloaded(**sizes: Any) -> Simulation:
    """One whose pace is known and whose queue is long: ten of an account wait."""
    simulation = Simulation(blocks=64, sequences=2, **sizes)
    for id in range(20):
        simulation.submit(id, words(8, id), A, max_tokens=8)
    while simulation.scheduler.load(draining=False).waiting > 10:
        simulation.step()
    return simulation


def test_what_cannot_start_in_time_is_refused_at_once_with_the_time_that_it_would_take() -> None:
    simulation = overloaded()
    with pytest.raises(SubmitRejected) as refused:
        simulation.submit(50, words(8, 50), A, deadline_ms=5_000)
    assert refused.value.reason == RejectReason.BUSY
    (waits,) = simulation.submit(51, words(8, 51), A, deadline_ms=600_000)
    assert simulation.scheduler.load(draining=False).counters["refused_deadline"] == 1
    simulation.run()
    assert waits.started is not None
    assert waits.started.waited_ms == pytest.approx(refused.value.retry_after_ms, rel=0.3)


def test_the_wait_is_estimated_in_fair_order() -> None:
    simulation = overloaded()
    with pytest.raises(SubmitRejected):
        simulation.submit(50, words(8, 50), A, deadline_ms=20_000)
    (quick,) = simulation.submit(51, words(8, 51), B, deadline_ms=20_000)
    simulation.run()
    assert quick.started is not None
    assert quick.started.waited_ms <= 20_000


def test_what_has_waited_for_as_long_as_it_may_is_rejected_whole_and_leaves_nothing() -> None:
    simulation = Simulation(sequences=1)
    simulation.submit(1, words(8), max_tokens=40)
    simulation.step()
    entries = simulation.submit(2, words(8, 2), n=3, deadline_ms=5_000)  # nothing has waited yet: its pace is not known
    for _ in range(8):
        simulation.step()
    for entry in entries:
        assert entry.reject is not None
        assert entry.reject.reason == RejectReason.BUSY
        assert entry.reject.retry_after_ms >= 250
    load = simulation.scheduler.load(draining=False)
    assert (load.waiting, load.waiting_tokens, load.counters["expired_requests"]) == (0, 0, 1)
    simulation.run()
    simulation.assert_all_finished()


def test_a_request_of_which_one_choice_has_started_is_not_rejected() -> None:
    simulation = Simulation(sequences=1)
    simulation.submit(1, words(8), max_tokens=8, n=3, deadline_ms=3_000)
    simulation.run()
    simulation.assert_all_finished()
    assert simulation.scheduler.load(draining=False).counters["finished_length"] == 3


def test_deadlines_of_what_is_gone_are_forgotten() -> None:
    simulation = Simulation(sequences=1)
    for id in range(500):
        simulation.submit(id, words(3, id), max_tokens=1, deadline_ms=10**9)
        simulation.run()
    assert len(simulation.scheduler.intake.waiting._deadlines) <= 64 + 2


def test_a_full_queue_makes_room_for_who_has_less_in_it() -> None:
    simulation = Simulation(sequences=1, waiting=8)
    for id in range(9):
        simulation.submit(id, words(8, id), A, max_tokens=40)
        simulation.step()
    with pytest.raises(SubmitRejected):
        simulation.submit(20, words(8, 20), A)
    others = [simulation.submit(id, words(8, id), B)[0] for id in range(30, 34)]
    with pytest.raises(SubmitRejected):  # it has half of the queue
        simulation.submit(40, words(8, 40), B)
    simulation.run()
    assert all(entry.finish for entry in others)
    rejected = [id for (_, id), entry in simulation.heard.items() if entry.reject is not None]
    assert rejected, "nobody made room"
    assert rejected == sorted(range(9 - len(rejected), 9)), "the newest make room"
    counters = simulation.scheduler.load(draining=False).counters
    assert counters["displaced_requests"] == len(rejected)
    assert counters["refused_full"] == 2
    simulation.assert_all_finished()


def test_a_queue_that_is_full_of_preempted_sequences_has_room_for_nobody() -> None:
    simulation = Simulation(sequences=2, waiting=1)
    entries = []
    for id in (1, 2):
        entries += simulation.submit(id, words(8, id), max_tokens=8)
        simulation.step()
    for entry in entries:
        simulation.scheduler.preempt(entry.sequence)
    with pytest.raises(SubmitRejected):
        simulation.submit(3, words(8, 3), B)
    simulation.run()
    simulation.assert_all_finished()


def test_what_is_refused_at_once_takes_no_time_however_many_wait() -> None:
    simulation = Simulation(blocks=64, sequences=2, waiting=1000)
    for id in range(980):
        account = (id % 400).to_bytes(16, "big")
        simulation.submit(id, words(8), Scope(ScopeKind.TENANT, account), terms=SchedulingTerms(weight=1.0 + id % 3))
    for _ in range(6):
        simulation.step()
    began = time.process_time()
    for id in range(1000, 1100):
        with pytest.raises(SubmitRejected):
            simulation.submit(id, words(8), Scope(ScopeKind.TENANT, bytes(16)), deadline_ms=1)
    assert (time.process_time() - began) / 100 < 0.005


# While a step is in the air


def two_in_the_air(simulation: Simulation) -> tuple[StepPlan, RunnerOutput, StepPlan, RunnerOutput]:
    older = simulation.plan()
    assert older is not None
    first = simulation.fly(older)
    younger = simulation.plan()
    assert younger is not None
    return older, first, younger, simulation.fly(younger)


def test_a_token_that_is_being_sampled_is_launched_as_the_row_that_it_will_be_in() -> None:
    simulation = Simulation()
    simulation.submit(1, words(20), max_tokens=9)  # more than one step computes: it samples nothing in the first
    simulation.submit(2, words(3, 2), max_tokens=9)
    _, _, younger, _ = two_in_the_air(simulation)
    batch = unpack_step(younger.packed)
    assert batch.tokens_T.tolist() == [*words(20)[13:], -1]
    assert batch.positions_T.tolist() == [*range(13, 20), 3]
    assert younger.rows == [0, 1]


def test_nothing_is_launched_behind_the_token_that_will_be_the_last() -> None:
    simulation = Simulation(depth=2)
    simulation.submit(1, words(5), max_tokens=3)
    simulation.run()
    counters = simulation.scheduler.load(draining=False).counters
    assert counters["computed_tokens"] == 5 + 2
    simulation.assert_all_finished()


@pytest.mark.parametrize("depth", [1, 2])
def test_stop_tokens_wait_for_min_tokens_and_end_nothing_with_ignore_eos(depth: int) -> None:
    simulation = Simulation(depth=depth, vocabulary=3, stop_ids=[0, 1])
    for id, sampling in enumerate((SamplingParams(), SamplingParams(min_tokens=7), SamplingParams(ignore_eos=True))):
        simulation.submit(id, [2, 0, 1], A, max_tokens=12, sampling=sampling)
    simulation.run()
    simulation.assert_all_finished()
    plain, late, endless = (simulation.heard[1, id].tokens for id in range(3))
    assert len(plain) < 7
    assert set(late[:7]) == {2}
    assert len(endless) == 12
    assert {0, 1} & set(endless)


def test_a_stop_is_found_one_step_late_and_what_was_computed_meanwhile_is_thrown_away() -> None:
    simulation = Simulation(block_tokens=4)
    third = solo(words(9), SamplingParams(), 30, [], 1000)[0][2]
    (entry,) = simulation.submit(1, words(9), A, max_tokens=20, stop_ids=[third])
    plan, sampled, younger, late = two_in_the_air(simulation)
    for _ in range(2):
        simulation.scheduler.commit(plan, sampled)
        plan, sampled = younger, late
        planned = simulation.plan()
        assert planned is not None
        younger, late = planned, simulation.fly(planned)
    held = simulation.account.free_blocks
    simulation.scheduler.commit(plan, sampled)
    simulation.listen()
    assert entry.finish is not None
    assert entry.finish.reason == FinishReason.STOP
    assert simulation.account.free_blocks == held, "blocks are freed while a flight reads them"
    assert simulation.plan() is None
    simulation.scheduler.commit(younger, late)
    simulation.listen()
    assert simulation.account.free_blocks + simulation.tree.cached_blocks == simulation.account.total
    assert simulation.tree.cached_blocks == (9 + 2) // 4
    simulation.assert_all_finished()


def test_preemption_waits_for_what_is_in_the_air() -> None:
    simulation = Simulation(blocks=6, block_tokens=4, step_tokens=64)
    for id in (1, 2):
        simulation.submit(id, words(7, id), max_tokens=16)
    older, first, younger, second = two_in_the_air(simulation)
    simulation.scheduler.commit(older, first)
    plans = []
    while (plan := simulation.plan()) is not None:
        plans.append((plan, simulation.fly(plan)))
        simulation.scheduler.commit(younger, second)
        younger, second = plans[-1]
    assert simulation.scheduler.load(draining=False).counters.get("preemptions", 0) == 0
    simulation.scheduler.commit(younger, second)
    assert simulation.plan() is not None
    assert simulation.scheduler.load(draining=False).counters["preemptions"] == 1


def test_a_duplicate_is_kept_until_the_flight_that_reads_it_has_landed() -> None:
    simulation = Simulation(block_tokens=4)
    for id in (1, 2):
        simulation.submit(id, words(3), A, max_tokens=9)  # no whole block: neither waits for the other
    older, first, younger, second = two_in_the_air(simulation)
    simulation.scheduler.commit(older, first)
    third = simulation.plan()
    assert third is not None
    simulation.fly(third)
    free = simulation.account.free_blocks
    simulation.scheduler.commit(younger, second)  # position 3 fills the first block of both
    simulation.scheduler.check()
    assert simulation.tree.counters["duplicate_blocks"] == 1
    assert simulation.account.free_blocks == free
    simulation.scheduler.fail(third, "over")
    assert simulation.account.free_blocks == simulation.account.total - 1


def test_a_sequence_that_shares_a_prompt_waits_while_its_last_piece_is_in_flight() -> None:
    simulation = Simulation(block_tokens=4, step_tokens=64, depth=2)
    entries = simulation.submit(1, words(41), A, n=3)
    simulation.run()
    assert [entry.started.cached_tokens for entry in entries if entry.started] == [0, 40, 40]
    simulation.assert_all_finished()


# When numbers are not finite


def test_a_sequence_whose_numbers_are_not_finite_ends_alone() -> None:
    simulation = Simulation(depth=2, step_tokens=64)
    (bad,) = simulation.submit(1, words(9), A, max_tokens=20)
    (good,) = simulation.submit(2, words(9, 2), A, max_tokens=20)
    faults = iter([Fault(glitch=4)])
    simulation.misfortune = lambda: next(faults, Fault())
    simulation.run()
    assert bad.finish is not None
    assert (bad.finish.reason, bad.finish.message) == (FinishReason.ERROR, NOT_FINITE)
    assert bad.tokens == []
    assert good.finish is not None
    assert good.finish.reason == FinishReason.LENGTH
    simulation.assert_all_finished()


def test_what_was_cached_without_finite_numbers_is_not_matched_again_but_what_others_proved_is() -> None:
    simulation = Simulation(blocks=64, block_tokens=4, step_tokens=16)
    shared, rest = words(12), words(20, 2)
    simulation.submit(1, [*shared, 5], A, max_tokens=40)
    simulation.step()
    (bad,) = simulation.submit(2, [*shared, *rest], A)
    faults = iter([Fault(glitch=3)])
    simulation.misfortune = lambda: next(faults, Fault())
    while bad.finish is None:
        simulation.step()
    assert bad.finish.message == NOT_FINITE
    assert bad.started is not None
    assert bad.started.cached_tokens == 12
    (again,) = simulation.submit(3, [*shared, *rest], A)
    simulation.run()
    assert again.started is not None
    assert again.started.cached_tokens == 12
    simulation.assert_all_finished()


def test_a_prefix_that_nobody_proved_is_dropped_whole() -> None:
    simulation = Simulation(block_tokens=4, step_tokens=16)
    simulation.submit(1, words(20), A)
    faults = iter([Fault(glitch=3)])
    simulation.misfortune = lambda: next(faults, Fault())
    simulation.step()
    simulation.scheduler.intake.cancel(1, [1])  # before it could tell that its first block is bad
    simulation.run()
    reasons = []
    for id in (2, 3):
        (entry,) = simulation.submit(id, words(20), A)
        simulation.run()
        assert entry.started is not None
        assert entry.finish is not None
        reasons.append((entry.started.cached_tokens, entry.finish.reason))
    assert reasons == [(16, FinishReason.ERROR), (0, FinishReason.LENGTH)]
    simulation.assert_all_finished()


def test_reading_a_block_that_another_sequence_cached_first_does_not_prove_it() -> None:
    simulation = Simulation(block_tokens=4, step_tokens=10)
    simulation.submit(1, words(2), A, max_tokens=10)
    simulation.step()
    text = [*words(2), *solo(words(2), SamplingParams(), 4, [], 1000)[0], *words(10, 2)]
    faults = iter([Fault(glitch=3)])  # in the other one's first block, which it caches before it samples
    simulation.misfortune = lambda: next(faults, Fault())
    simulation.submit(2, text, A)
    while simulation.heard[1, 2].finish is None:
        simulation.step()
    (again,) = simulation.submit(3, text, A)
    simulation.run()
    assert again.started is not None
    assert again.started.cached_tokens == 0
    simulation.assert_all_finished()


# When a device has too little memory


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_steps_that_find_too_little_memory_are_halved_until_they_fit_and_no_text_changes(
    depth: int, late: bool
) -> None:
    simulation = Simulation(blocks=256, step_tokens=64, depth=depth)
    rows = []

    def misfortune() -> Fault:
        rows.append(sum(simulation.scheduler.running.inflight[-1].chunks))
        return Fault(OutOfDeviceMemory("told to"), late) if rows[-1] > 20 else Fault()

    simulation.misfortune = misfortune
    simulation.submit(1, words(200), A, max_tokens=30)
    simulation.submit(2, words(9, 2), B, max_tokens=30)
    simulation.run()
    simulation.assert_all_finished()
    assert {entry.finish.reason for entry in simulation.heard.values() if entry.finish} == {FinishReason.LENGTH}
    assert rows[0] == 64
    fitting = [count for count in rows if count <= 20]
    assert fitting[0] == 16
    assert max(fitting) > 16, "it never recovers"
    assert simulation.scheduler.load(draining=False).counters["steps_out_of_memory"] <= len(fitting) // 4


@pytest.mark.parametrize("depth", [1, 2])
def test_one_row_that_finds_too_little_memory_costs_its_sequence_and_no_other(depth: int) -> None:
    simulation = Simulation(depth=depth)
    bad, *good = (simulation.submit(id, words(5, id), max_tokens=9)[0] for id in range(3))

    def misfortune() -> Fault:
        flying = simulation.scheduler.running.inflight[-1].sequences
        return Fault(OutOfDeviceMemory("told to")) if bad.sequence in flying else Fault()

    simulation.misfortune = misfortune
    simulation.run()
    assert bad.finish is not None
    assert (bad.finish.reason, bad.finish.message) == (FinishReason.ERROR, OUT_OF_MEMORY)
    assert [entry.finish.reason for entry in good if entry.finish] == [FinishReason.LENGTH] * 2
    simulation.assert_all_finished()


def test_an_image_that_finds_too_little_memory_costs_its_sequence_and_no_other() -> None:
    simulation = Simulation(step_tokens=64)
    bad, good = (simulation.submit(id, words(40, id), max_tokens=2)[0] for id in range(2))
    bad.sequence.images = [PromptImage(0, 30, 5, b"", 0, np.ones((30, 2), np.float32), users=1)]
    rows = []
    while bad.finish is None and len(rows) < 20:
        plan = simulation.plan()
        assert plan is not None
        rows.append(sum(plan.chunks))
        simulation.scheduler.retry_smaller(plan)
        simulation.listen()
    assert rows[-1] == 30, "images are computed whole"
    assert bad.finish is not None, "it is tried for ever"
    assert bad.finish.message == OUT_OF_MEMORY
    simulation.run()
    assert good.finish is not None
    assert good.finish.reason == FinishReason.LENGTH


# Groups


@pytest.mark.parametrize("depth", [1, 2])
def test_sequences_that_share_a_prefix_read_it_together_and_another_scopes_apart(depth: int) -> None:
    simulation = Simulation(blocks=256, step_tokens=32, depth=depth, costs=GROUPING)
    for id, scope in enumerate([A, B, Scope(), A, B, Scope(), A]):
        simulation.submit(id, [*words(16), id], scope, max_tokens=30)
    groups = set()

    def look() -> None:
        for plan in simulation.scheduler.running.inflight:
            batch = unpack_step(plan.packed)
            ids = [plan.sequences[member].id for member in batch.members_M.tolist()]
            start = 0
            for _, _, first, last, end in batch.segments_N5.tolist():
                groups.add((*ids[start:end], (first, last)))
                start = end

    simulation.meanwhile = look
    simulation.run()
    assert {(0, 3, 6, (0, 16)), (1, 4, (0, 16))} <= groups
    assert all(len({id % 3 for id in group[:-1]}) == 1 and group[0] != 2 for group in groups)
    simulation.assert_all_finished()


def test_keys_that_groups_spare_are_counted_and_there_are_no_groups_without_costs() -> None:
    spared = []
    for costs in (GROUPING, None):
        simulation = Simulation(blocks=256, step_tokens=32, costs=costs)
        simulation.submit(1, words(16), A, max_tokens=8)
        simulation.run()
        simulation.submit(2, [*words(16), 2], A, max_tokens=3)
        simulation.submit(3, [*words(16), 3], A, max_tokens=3)
        simulation.run()
        spared.append(simulation.scheduler.load(draining=False).counters.get("spared_keys", 0))
    assert spared == [3 * 16, 0]


# Endings


def test_cancel_in_flight_keeps_the_blocks_until_the_step_is_over() -> None:
    simulation = Simulation()
    (entry,) = simulation.submit(1, words(9), max_tokens=20)
    simulation.step()
    plan = simulation.plan()
    assert plan is not None
    free = simulation.account.free_blocks
    simulation.scheduler.intake.cancel(1, [1])
    simulation.scheduler.check()
    assert simulation.account.free_blocks == free
    simulation.scheduler.commit(plan, simulation.fly(plan))
    simulation.listen()
    assert simulation.account.free_blocks == simulation.account.total
    assert entry.finish is not None
    assert (entry.finish.reason, entry.finish.completion_tokens) == (FinishReason.CANCELLED, 1)
    assert len(entry.tokens) == 1


def test_waiting_sequence_can_be_cancelled_and_never_starts() -> None:
    simulation = Simulation(sequences=1)
    simulation.submit(1, words(9))
    (waiting,) = simulation.submit(2, words(9))
    simulation.step()
    simulation.scheduler.intake.cancel(1, [2, 77])
    simulation.run()
    simulation.listen()
    assert waiting.started is None
    assert waiting.finish is not None
    assert waiting.finish.reason == FinishReason.CANCELLED


def test_an_owner_that_leaves_takes_only_its_own_sequences() -> None:
    simulation = Simulation()
    simulation.submit(1, words(9), owner=1, max_tokens=9)
    simulation.submit(1, words(9), owner=2, max_tokens=9)
    simulation.step()
    simulation.drop(2)
    simulation.run()
    simulation.assert_all_finished()
    assert simulation.heard[1, 1].finish is not None


def test_failed_step_ends_its_sequences_with_a_message_and_no_others() -> None:
    simulation = Simulation(sequences=1)
    (running,) = simulation.submit(1, words(9), A)
    (waiting,) = simulation.submit(2, words(9), A)
    plan = simulation.plan()
    assert plan is not None
    simulation.scheduler.fail(plan, "broken")
    simulation.listen()
    simulation.run()
    assert running.finish is not None
    assert (running.finish.reason, running.finish.message) == (FinishReason.ERROR, "broken")
    assert waiting.started is not None
    assert waiting.started.cached_tokens == 0, "the KV of a failed step was kept"
    simulation.assert_all_finished()


def test_output_ends_at_the_stop_token_or_at_the_context() -> None:
    simulation = Simulation(context_tokens=20, vocabulary=5, stop_ids=[3])
    for id in range(20):
        simulation.submit(id, [token % 3 for token in words(8, id)], max_tokens=100)
    simulation.run()
    simulation.assert_all_finished()
    reasons = {entry.finish.reason for entry in simulation.heard.values() if entry.finish}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    assert max(len(entry.tokens) for entry in simulation.heard.values()) == 12


@pytest.mark.parametrize("depth", [1, 2])
def test_penalties_see_prompt_and_output_even_after_preemption(depth: int) -> None:
    simulation = Simulation(depth=depth)
    (entry,) = simulation.submit(1, words(9), A, max_tokens=20, sampling=SamplingParams(presence_penalty=1.0))
    for step in range(12):
        simulation.step()
        if step in (3, 7):
            simulation.land()
            simulation.scheduler.preempt(entry.sequence)
    simulation.run()
    simulation.assert_all_finished()


def test_bias_reaches_the_sampler() -> None:
    simulation = Simulation()
    (entry,) = simulation.submit(1, words(9), max_tokens=3, sampling=SamplingParams(logit_bias={42: 100.0}))
    simulation.run()
    assert entry.tokens == [42, 42, 42]


def test_waiting_time_is_told_and_makes_the_hint_of_a_full_queue() -> None:
    simulation = Simulation(sequences=1, waiting=1)
    simulation.submit(1, words(3), max_tokens=3)
    simulation.step()
    (second,) = simulation.submit(2, words(3), max_tokens=3)
    simulation.run()
    assert second.started is not None
    assert second.started.waited_ms == 2000.0
    simulation.submit(3, words(3))
    with pytest.raises(SubmitRejected) as refused:
        simulation.submit(4, words(3))
    assert 2000 <= refused.value.retry_after_ms <= 4000  # what the third takes, at the pace of the second


def test_a_lookup_that_starts_nothing_is_not_counted() -> None:
    simulation = Simulation(blocks=16, block_tokens=4, step_tokens=64)
    simulation.submit(1, words(24), A, max_tokens=1)
    simulation.run()
    simulation.submit(2, words(20, 2), B, max_tokens=20)
    simulation.submit(3, words(16, 3), B, max_tokens=8)
    simulation.step()
    (large,) = simulation.submit(4, [*words(24), *words(20, 4)], A, max_tokens=2)  # fits when the others have ended
    waited = 0
    while not large.started:
        assert simulation.step()
        waited += 1
    simulation.run()
    assert waited > 5
    assert large.started.cached_tokens > 0
    counters = simulation.scheduler.load(draining=False).counters
    assert counters.get("preemptions", 0) == 0
    assert (counters["lookups"], counters["lookup_tokens"]) == (4, 23 + 19 + 15 + 43)
    assert counters["hit_tokens"] == counters["cached_tokens"] == large.started.cached_tokens


def test_tokens_that_were_cached_count_once_though_a_preempted_sequence_looks_them_up_again() -> None:
    simulation = Simulation()
    for id in (1, 2):
        (entry,) = simulation.submit(id, words(22), A, max_tokens=9)
        simulation.step()
        simulation.step()
        simulation.scheduler.preempt(entry.sequence)
        simulation.run()
    counters = simulation.scheduler.load(draining=False).counters
    assert counters["preemptions"] == 2
    assert counters["cached_tokens"] == 20
    assert counters["hit_tokens"] == 20 + 2 * 20
    assert counters["prompt_tokens"] == 44


def test_load_counts_what_runs_waits_and_is_cached() -> None:
    simulation = Simulation(blocks=64, block_tokens=4, sequences=1)
    simulation.submit(1, words(9), A, max_tokens=3)
    simulation.submit(2, words(11), A, max_tokens=3)
    simulation.step()
    load = simulation.scheduler.load(draining=True)
    assert (load.running, load.waiting, load.waiting_tokens, load.steps, load.draining) == (1, 1, 11, 1, True)
    assert (load.free_blocks, load.cached_blocks, load.shared_blocks) == (61, 2, 0)
    simulation.run()
    counters = simulation.scheduler.load(draining=False).counters
    assert counters["finished_length"] == counters["started"] == 2
    assert counters["prompt_tokens"] == 20
    assert counters["cached_tokens"] == counters["hit_tokens"] == 8
    assert counters["computed_tokens"] == 20 - 8 + 4
