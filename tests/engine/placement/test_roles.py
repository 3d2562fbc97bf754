"""Which replicas compute prompts for the others, as settings say and as load that moves wants it."""

import random

import pytest

from engine.placement.roles import CHANGE_AT, WINDOW_S, RoleBalance, RoleCandidate, assign_roles
from engine.protocol.types import ReplicaRole

BOTH, PREFILL, DECODE = ReplicaRole.BOTH, ReplicaRole.PREFILL, ReplicaRole.DECODE


def replicas(*roles: ReplicaRole, running: tuple[int, ...] = ()) -> list[RoleCandidate]:
    counts = running or (0,) * len(roles)
    return [RoleCandidate(f"r{at}", role, True, counts[at]) for at, role in enumerate(roles)]


def test_without_prefill_replicas_all_do_both() -> None:
    assert set(assign_roles(replicas(PREFILL, DECODE), 0).values()) == {BOTH}


def test_those_that_compute_prompts_go_on_and_then_the_one_with_the_least_to_do_begins() -> None:
    assert assign_roles(replicas(DECODE, PREFILL, DECODE, running=(5, 9, 3)), 2) == {
        "r0": DECODE, "r1": PREFILL, "r2": PREFILL,
    }  # fmt: skip


def test_a_replica_that_does_not_serve_has_no_role_and_counts_for_none() -> None:
    away = [RoleCandidate("a", PREFILL, False, 0), *replicas(DECODE, DECODE)]
    roles = assign_roles(away, 1)
    assert roles["a"] is BOTH
    assert sorted(roles.values()) == [BOTH, PREFILL, DECODE]


@pytest.mark.parametrize("seed", range(4))
def test_roles_follow_the_load_and_one_at_least_answers(seed: int) -> None:
    rng, balance, clock, prompts_ms, steps_ms = random.Random(seed), RoleBalance(), 0.0, 0.0, 0.0
    count, changes, before = 6, 0, 0
    for window in range(400):
        share = 0.1 if window // 40 % 2 else 0.7  # prompts come and go
        if window % 97 == 0:
            count = rng.randrange(1, 9)
        for _ in range(5):  # it is asked far more often than it looks
            clock += WINDOW_S / 5
            steps_ms += 1e3 * WINDOW_S / 5 * count * rng.uniform(0.5, 0.9)
            prompts_ms += share * 1e3 * WINDOW_S / 5 * count * 0.7 * rng.uniform(0.9, 1.1)
            prefill = balance.update(clock, count, int(prompts_ms), int(steps_ms))
            assert 0 <= prefill <= max(0, count - 1), f"seed {seed}"
            assert abs(prefill - min(before, count - 1)) <= 1
            changes, before = changes + (prefill != before), prefill
        if window % 40 == 39 and window % 97 > 30:
            wanted = min(count * share, count - 1)
            assert abs(prefill - wanted) <= CHANGE_AT + 0.4, f"seed {seed}: {prefill} where {wanted} are wanted"
    assert changes < 100, "a load that does not move changes nothing"


def test_a_model_with_little_to_do_has_no_prefill_replicas() -> None:
    balance, clock = RoleBalance(), 0.0
    for window in range(50):
        clock += WINDOW_S
        balance.update(clock, 4, 100 * window, 110 * window)
    assert balance.prefill == 0


def test_a_replica_that_counts_anew_changes_nothing() -> None:
    balance, busy_ms = RoleBalance(), int(1e3 * WINDOW_S * 2)
    for window in range(1, 9):
        balance.update(window * WINDOW_S, 2, busy_ms * window // 2, busy_ms * window)
    assert balance.prefill == 1
    assert balance.update(9 * WINDOW_S, 2, 0, 0) == 1
