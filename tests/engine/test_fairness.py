"""engine/fairness.py: no scope waits for more than its share, and nothing is saved up by idling."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from engine.fairness import FairQueue

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def take_next(queue: FairQueue[str], costs: dict[str, int], scopes: dict[str, bytes]) -> str:
    item = next(queue.heads())
    queue.take(scopes[item], item)
    queue.charge(scopes[item], costs[item])
    queue.check()
    return item


def fill(queue: FairQueue[str], scope: bytes, names: str, scopes: dict[str, bytes]) -> None:
    for name in names:
        scopes[name] = scope
        queue.push(scope, name)


def test_inside_one_scope_first_come_is_first_served() -> None:
    queue, scopes = FairQueue[str](), {}
    fill(queue, A, "xyz", scopes)
    assert [take_next(queue, dict.fromkeys("xyz", 5), scopes) for _ in range(3)] == ["x", "y", "z"]
    assert len(queue) == 0


def test_scopes_take_turns_by_tokens_and_not_by_requests() -> None:
    queue, scopes = FairQueue[str](), {}
    fill(queue, A, "xy", scopes)
    fill(queue, B, "123456", scopes)
    costs = {**dict.fromkeys("xy", 30), **dict.fromkeys("123456", 10)}
    order = "".join(take_next(queue, costs, scopes) for _ in range(8))
    assert order == "x123y456" or order == "x1234y56"


def test_a_new_scope_goes_before_the_backlog_of_another() -> None:
    queue, scopes = FairQueue[str](), {}
    fill(queue, A, "abcdefgh", scopes)
    for _ in range(4):
        take_next(queue, dict.fromkeys("abcdefgh", 10), scopes)
    fill(queue, B, "1", scopes)
    assert take_next(queue, {"1": 10}, scopes) == "1"


def test_a_returning_scope_does_not_burst() -> None:
    queue, scopes = FairQueue[str](), {}
    letters = "abcdefghijklmnopqrst"
    fill(queue, A, letters, scopes)
    for _ in range(10):  # A was served 100 while B was away
        take_next(queue, dict.fromkeys(letters, 10), scopes)
    fill(queue, B, "0123456789", scopes)
    order = [take_next(queue, dict.fromkeys(letters + "0123456789", 10), scopes) for _ in range(10)]
    assert 4 <= sum(name.isdigit() for name in order) <= 6


def test_emptying_the_queue_does_not_wipe_what_a_scope_was_served() -> None:
    queue, scopes = FairQueue[str](), {}
    fill(queue, A, "a", scopes)
    fill(queue, B, "bB", scopes)
    costs = {"a": 1000, "b": 10, "B": 10, "z": 10}
    take_next(queue, costs, scopes)  # a: A is empty now, with 1000 served
    fill(queue, A, "z", scopes)
    assert [take_next(queue, costs, scopes) for _ in range(3)] == ["b", "B", "z"]


def test_tokens_of_running_sequences_count_against_their_scope() -> None:
    queue, scopes = FairQueue[str](), {}
    fill(queue, A, "a", scopes)
    fill(queue, B, "b", scopes)
    queue.charge(A, 7)
    assert take_next(queue, {"b": 1}, scopes) == "b"
    assert queue.served(A) - queue.served(B) == 6


def test_removed_item_loses_its_turn_and_an_unknown_one_is_an_error() -> None:
    queue, scopes = FairQueue[str](), {}
    fill(queue, A, "xy", scopes)
    queue.remove(A, "x")
    with pytest.raises(KeyError):
        queue.remove(A, "x")
    assert list(queue.heads()) == ["y"]


def test_counts_of_idle_scopes_are_bounded() -> None:
    queue = FairQueue[int]()
    for number in range(10_000):
        scope = number.to_bytes(16, "big")
        queue.push(scope, number)
        queue.take(scope, number)
        queue.charge(scope, number % 7)
    queue.check()


@settings(max_examples=60, deadline=None)
@given(some.integers(0, 2**32), some.integers(2, 6))
def test_backlogged_scopes_stay_within_two_largest_charges(seed: int, scopes: int) -> None:
    """The bound of start-time fair queueing: over any stretch, two scopes that always wait differ by little."""
    random_of = random.Random(seed)
    queue, served, largest = FairQueue[int](), [0] * scopes, 50
    for number in range(scopes * 300):
        queue.push(bytes([number % scopes]), number)
    marks = []
    for _ in range(200):
        item = next(queue.heads())
        scope, cost = item % scopes, random_of.randint(1, largest)
        queue.take(bytes([scope]), item)
        queue.charge(bytes([scope]), cost)
        served[scope] += cost
        marks.append(list(served))
    for start in range(0, 200, 20):
        for end in range(start + 20, 200, 20):
            gained = [after - before for before, after in zip(marks[start], marks[end], strict=True)]
            assert max(gained) - min(gained) <= 2 * largest, f"seed {seed}"
