"""engine/scheduling/admission.py in the simulated replica, whose queues are checked after every step: which request of
an account starts first, and how often one may be passed."""

import random

import pytest

from engine.protocol.types import Scope, ScopeKind
from engine.scheduling import admission
from engine.scheduling.waiting import PASSES_MAX
from tests.engine.scheduling.simulation.replica import Heard, Simulation
from tests.engine.scheduling.simulation.test_replica import install_broken

A = Scope(ScopeKind.TENANT, b"a" * 16)
ONE_USER = Scope(ScopeKind.USER, b"1" * 16, account=b"a" * 16)
ANOTHER_USER = Scope(ScopeKind.USER, b"2" * 16, account=b"a" * 16)


def words(count: int, seed: int) -> list[int]:
    pick = random.Random(seed)
    return [pick.randrange(1000) for _ in range(count)]


def start_orders(entries: list[Heard]) -> list[int]:
    return [entry.sequence.start_order for entry in entries]


def test_the_longest_cached_prefix_of_an_account_goes_first() -> None:
    simulation = Simulation(sequences=1)
    simulation.submit(0, words(16, seed=1) + words(3, seed=2), A)
    simulation.run()
    prompts = [words(24, seed=3), words(8, seed=1)[:8] + words(8, seed=4), words(16, seed=1) + words(4, seed=5)]
    entries = [simulation.submit(id, prompt, A)[0] for id, prompt in enumerate(prompts, start=1)]
    simulation.run()
    assert start_orders(entries) == [3, 2, 1]
    assert [entry.started.cached_tokens for entry in entries if entry.started] == [0, 8, 16]


def test_what_is_cached_moves_no_user_of_an_account_before_another() -> None:
    simulation = Simulation(sequences=1)
    cached = words(16, seed=1)
    simulation.submit(0, cached, ONE_USER)
    simulation.run()
    scopes = [ANOTHER_USER, ONE_USER, ANOTHER_USER, ONE_USER, ONE_USER]
    prompts = [words(9, 2), words(9, 3), words(9, 4), words(9, 5), [*cached, 7]]
    pairs = enumerate(zip(prompts, scopes, strict=True), start=1)
    entries = [simulation.submit(id, prompt, scope)[0] for id, (prompt, scope) in pairs]
    simulation.run()
    assert start_orders(entries) == [1, 2, 3, 5, 4], "only inside its own user's run of requests"


def pass_one_by(simulation: Simulation) -> int:
    """One request that finds nothing, before a stream of others that find most of their prompt in the cache. Returns
    how many of these start first."""
    prefix = words(16, seed=1)
    simulation.submit(0, prefix, A)
    simulation.run()
    (alone,) = simulation.submit(1, words(20, seed=2), A)
    id = 1
    while alone.started is None:
        while len(simulation.scheduler.intake.waiting.live) < 2 * PASSES_MAX:
            id += 1
            simulation.submit(id, [*prefix, id], A, max_tokens=2)
        assert simulation.step()
        assert id < 10 * PASSES_MAX, "starved"
    return alone.sequence.start_order - 1


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_is_passed_as_often_as_it_may_be_and_no_more(depth: int) -> None:
    assert pass_one_by(Simulation(sequences=2, depth=depth)) == PASSES_MAX


def test_a_request_that_is_passed_more_often_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    install_broken("scheduling.admission", " or sequence.passed == PASSES_MAX", "", monkeypatch)
    with pytest.raises(AssertionError, match="passed too often"):
        pass_one_by(Simulation(sequences=2))


def test_only_the_window_is_looked_at() -> None:
    simulation = Simulation(sequences=1)
    prefix = words(16, seed=1)
    simulation.submit(0, prefix, A)
    simulation.run()
    entries = [simulation.submit(id, words(9, id), A)[0] for id in range(1, admission.PREFIX_WINDOW + 1)]
    (behind,) = simulation.submit(1000, [*prefix, 7], A)
    simulation.run()
    assert entries[0].sequence.start_order == 1
    assert behind.sequence.start_order == 2


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_passed_too_often_in_a_random_queue(seed: int) -> None:
    """Several prefixes in a cache for few of them, two users of an account and a second account; checked each step."""
    pick = random.Random(seed)
    simulation = Simulation(
        blocks=40, sequences=pick.choice([1, 3]), waiting=300, depth=pick.choice([1, 2]), vocabulary=1000
    )
    scopes = [A, ONE_USER, ANOTHER_USER, Scope(ScopeKind.TENANT, b"b" * 16), Scope()]
    for id in range(200):
        prefix = words(4 * pick.randint(1, 5), seed=pick.randrange(6))
        simulation.submit(id, prefix + words(pick.randint(1, 6), id + 100), pick.choice(scopes), pick.randint(1, 4))
        if pick.random() < 0.3:
            simulation.step()
    simulation.run()
    simulation.assert_all_finished()
    assert simulation.scheduler.load(draining=False).counters["cached_tokens"] > 0
