"""The scheduler of texts: what a step takes, whose turn it is, and every way in which a text ends."""

import pytest

from engine.memory.errors import OutOfDeviceMemory
from engine.protocol.types import FinishReason, Pooling, RejectReason, SchedulingTerms
from engine.scheduling.encoder_scheduler import BEST_EFFORT_DIVISOR
from engine.sequences.validation import SubmitRejected
from tests.engine.scheduling.simulation.encoder import ACCOUNTS, CONTEXT_TOKENS, VOCABULARY, Simulation, live


@pytest.mark.parametrize("seed", range(100))
def test_every_text_of_a_random_life_ends_once_with_its_own_vector(seed: int) -> None:
    life = live(seed)
    for (owner, _), heard in life.heard.items():
        told = (heard.finish is not None) + (heard.reject is not None)
        assert told == 1 or owner in life.gone
    assert life.scheduler.intake.idle
    load = life.scheduler.load(draining=False)
    assert (load.running, load.waiting, load.waiting_tokens, load.background) == (0, 0, 0, 0)


def test_a_step_takes_whole_texts_as_long_as_they_fit() -> None:
    sim = Simulation(step_tokens=32)
    for id, length in enumerate((10, 10, 10, 10, 5)):
        sim.submit(id, [id + 1] * length)
    sim.run()
    assert [sorted(map(len, step)) for step in sim.steps] == [[10, 10, 10], [5, 10]]


def test_a_text_longer_than_a_step_runs_alone() -> None:
    sim = Simulation(step_tokens=32)
    sim.submit(1, [1] * 60)
    sim.submit(2, [2] * 3)
    sim.run()
    assert [[len(text) for text in step] for step in sim.steps] == [[60], [3]]


def test_a_steps_texts_come_by_length() -> None:
    sim = Simulation()
    for id, length in enumerate((9, 2, 7, 4)):
        sim.submit(id, [id + 1] * length)
    sim.run()
    assert [len(text) for text in sim.steps[0]] == [2, 4, 7, 9]


@pytest.mark.parametrize("sequences", [1, 100])
def test_accounts_share_steps_by_their_weight(sequences: int) -> None:
    sim = Simulation(step_tokens=30, sequences=sequences, waiting=1000)
    for id in range(60):
        sim.submit(id, [1] * 10, ACCOUNTS[0])
        sim.submit(100 + id, [2] * 10, ACCOUNTS[1], terms=SchedulingTerms(weight=2.0))
    for _ in range(30):
        sim.step()
    served = [text[0] for step in sim.steps for text in step]
    assert 2 * served.count(1) == pytest.approx(served.count(2), abs=6)


def test_one_accounts_flood_does_not_delay_anothers_text() -> None:
    sim = Simulation(step_tokens=32, waiting=1000)
    for id in range(500):
        sim.submit(id, [1] * 16, ACCOUNTS[0])
    sim.step()
    other = sim.submit(1000, [2] * 16, ACCOUNTS[1])
    sim.step()
    assert other.finish is not None


def test_an_account_runs_no_more_at_once_than_it_may() -> None:
    sim = Simulation()
    for id in range(6):
        sim.submit(id, [1], terms=SchedulingTerms(sequences=2))
    sim.run()
    assert max(map(len, sim.steps)) == 2


def test_background_texts_run_in_short_steps_while_nothing_else_waits() -> None:
    sim = Simulation(step_tokens=64, sequences=64, waiting=100)
    for id in range(30):
        sim.submit(id, [1] * 4, terms=SchedulingTerms(background=True))
    live_text = sim.submit(100, [2] * 4, ACCOUNTS[1])
    sim.step()
    assert live_text.finish is not None
    assert all(text[0] == 2 for text in sim.steps[0])
    assert sim.scheduler.load(draining=False).background == 30
    sim.run()
    assert max(sum(map(len, step)) for step in sim.steps) <= 64 // BEST_EFFORT_DIVISOR
    assert all(heard.finish is not None for heard in sim.heard.values())


def test_a_full_queue_refuses_who_has_most_in_it() -> None:
    sim = Simulation(waiting=3)
    for id in range(3):
        sim.submit(id, [1], ACCOUNTS[0])
    with pytest.raises(SubmitRejected) as refused:
        sim.submit(3, [1], ACCOUNTS[0])
    assert refused.value.reason is RejectReason.BUSY
    assert refused.value.retry_after_ms > 0
    sim.submit(4, [1], ACCOUNTS[1])
    sim.listen()
    displaced = sim.heard[1, 2].reject
    assert displaced is not None
    assert displaced.reason is RejectReason.BUSY
    assert sim.scheduler.load(draining=False).counters["displaced_requests"] == 1


def test_a_text_that_waited_for_too_long_is_rejected() -> None:
    sim = Simulation(step_tokens=8)
    for id in range(8):
        sim.submit(id, [1] * 8)
    late = sim.submit(8, [1] * 8, deadline_ms=2000)
    sim.run()
    assert late.reject is not None
    assert late.started is None
    assert sim.scheduler.load(draining=False).counters["expired_requests"] == 1


def test_what_would_wait_for_longer_than_it_may_is_refused_at_once() -> None:
    sim = Simulation(step_tokens=8, waiting=1000)
    for id in range(100):
        sim.submit(id, [1] * 8)
    for _ in range(10):
        sim.step()
    with pytest.raises(SubmitRejected, match="would wait for about"):
        sim.submit(1000, [1] * 8, deadline_ms=2000)


def test_a_text_cancelled_in_the_air_ends_once_and_its_vector_is_thrown_away() -> None:
    sim = Simulation()
    text = sim.submit(1, [1, 2])
    sim.meanwhile = lambda: sim.scheduler.intake.cancel(1, [1])
    sim.run()
    assert text.finish is not None
    assert text.finish.reason is FinishReason.CANCELLED


def test_texts_of_a_lost_step_end_with_an_error_and_others_go_on() -> None:
    sim = Simulation(step_tokens=4)
    first, second = sim.submit(1, [1] * 4), sim.submit(2, [2] * 4)
    errors = iter([RuntimeError("lost"), None])
    sim.misfortune = lambda: next(errors)
    sim.run()
    assert first.finish is not None
    assert first.finish.reason is FinishReason.ERROR
    assert second.vector is not None


def test_a_step_without_memory_is_tried_again_in_smaller_ones() -> None:
    sim = Simulation(step_tokens=32)
    for id in range(8):
        sim.submit(id, [id + 1] * 4)
    errors = iter([OutOfDeviceMemory("full")])
    sim.misfortune = lambda: next(errors, None)
    sim.run()
    assert [sum(map(len, step)) for step in sim.steps][:2] == [32, 16]
    assert all(heard.vector is not None for heard in sim.heard.values())


def test_a_text_alone_without_memory_ends_with_an_error() -> None:
    sim = Simulation(depth=2)
    text, behind = sim.submit(1, [1] * 32), sim.submit(2, [2] * 32)
    errors = iter([OutOfDeviceMemory("full")])
    sim.misfortune = lambda: next(errors, None)
    sim.run()
    assert text.finish is not None
    assert text.finish.reason is FinishReason.ERROR
    assert behind.vector is not None


def test_the_door_takes_texts_of_the_whole_context_and_no_more() -> None:
    sim = Simulation()
    whole = sim.submit(1, [1] * CONTEXT_TOKENS)
    with pytest.raises(SubmitRejected) as refused:
        sim.submit(2, [1] * (CONTEXT_TOKENS + 1))
    assert refused.value.reason is RejectReason.TOO_LONG
    sim.run()
    assert whole.vector is not None


@pytest.mark.parametrize("pooling", [None, Pooling.LAST, Pooling.SCORE])
def test_a_pooling_that_the_model_has_not_is_refused(pooling: Pooling | None) -> None:
    with pytest.raises(SubmitRejected) as refused:
        Simulation().submit(1, [1], pooling=pooling)
    assert refused.value.reason is RejectReason.INVALID


def test_an_id_in_use_and_a_token_past_the_vocabulary_are_refused() -> None:
    sim = Simulation()
    sim.submit(1, [1])
    for id, tokens in ((1, [1]), (2, [VOCABULARY])):
        with pytest.raises(SubmitRejected) as refused:
            sim.submit(id, tokens)
        assert refused.value.reason is RejectReason.INVALID


def test_texts_that_come_while_the_model_sleeps_wait_or_expire_and_run_when_it_is_awake() -> None:
    sim = Simulation()
    sim.scheduler.preempt_all()
    sim.scheduler.intake.admitting = False
    late, waiting = sim.submit(1, [1] * 5, deadline_ms=1500), sim.submit(2, [2] * 5)
    for _ in range(3):
        assert not sim.step()
    assert late.reject is not None
    sim.scheduler.intake.admitting = True
    sim.run()
    assert waiting.finish is not None
    assert waiting.finish.reason == FinishReason.STOP


def test_nothing_starts_while_it_is_not_to() -> None:
    sim = Simulation()
    sim.scheduler.intake.admitting = False
    heard = sim.submit(1, [1] * 5)
    assert not sim.step()
    sim.scheduler.intake.admitting = True
    sim.run()
    assert heard.finish is not None
