"""engine/fairness.py: no account waits for more than its share, and nothing is saved up by idling."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from engine.fairness import FairQueue

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def anything(item: object) -> bool:
    return True


def take_next(queue: FairQueue[str], costs: dict[str, int], accounts: dict[str, bytes]) -> str:
    item = queue.first(anything)
    assert item is not None
    queue.take(accounts[item], item)
    queue.charge(accounts[item], costs[item])
    queue.check()
    return item


def fill(queue: FairQueue[str], account: bytes, names: str, accounts: dict[str, bytes]) -> None:
    for name in names:
        accounts[name] = account
        queue.push(account, name)


def test_inside_one_account_first_come_is_first_served() -> None:
    queue, accounts = FairQueue[str](), {}
    fill(queue, A, "xyz", accounts)
    assert [take_next(queue, dict.fromkeys("xyz", 5), accounts) for _ in range(3)] == ["x", "y", "z"]
    assert len(queue) == 0


def test_accounts_take_turns_by_tokens_and_not_by_requests() -> None:
    queue, accounts = FairQueue[str](), {}
    fill(queue, A, "xy", accounts)
    fill(queue, B, "123456", accounts)
    costs = {**dict.fromkeys("xy", 30), **dict.fromkeys("123456", 10)}
    order = "".join(take_next(queue, costs, accounts) for _ in range(8))
    assert order == "x123y456" or order == "x1234y56"


def test_a_new_account_goes_before_the_backlog_of_another() -> None:
    queue, accounts = FairQueue[str](), {}
    fill(queue, A, "abcdefgh", accounts)
    for _ in range(4):
        take_next(queue, dict.fromkeys("abcdefgh", 10), accounts)
    fill(queue, B, "1", accounts)
    assert take_next(queue, {"1": 10}, accounts) == "1"


def test_a_returning_account_does_not_burst() -> None:
    queue, accounts = FairQueue[str](), {}
    letters = "abcdefghijklmnopqrst"
    fill(queue, A, letters, accounts)
    for _ in range(10):  # A was served 100 while B was away
        take_next(queue, dict.fromkeys(letters, 10), accounts)
    fill(queue, B, "0123456789", accounts)
    order = [take_next(queue, dict.fromkeys(letters + "0123456789", 10), accounts) for _ in range(10)]
    assert 4 <= sum(name.isdigit() for name in order) <= 6


def test_emptying_the_queue_does_not_wipe_what_a_account_was_served() -> None:
    queue, accounts = FairQueue[str](), {}
    fill(queue, A, "a", accounts)
    fill(queue, B, "bB", accounts)
    costs = {"a": 1000, "b": 10, "B": 10, "z": 10}
    take_next(queue, costs, accounts)  # a: A is empty now, with 1000 served
    fill(queue, A, "z", accounts)
    assert [take_next(queue, costs, accounts) for _ in range(3)] == ["b", "B", "z"]


def test_tokens_of_running_sequences_count_against_their_account() -> None:
    queue, accounts = FairQueue[str](), {}
    fill(queue, A, "a", accounts)
    fill(queue, B, "b", accounts)
    queue.charge(A, 7)
    assert take_next(queue, {"b": 1}, accounts) == "b"
    assert queue.served(A) - queue.served(B) == 6


def test_removed_item_loses_its_turn_and_an_unknown_one_is_an_error() -> None:
    queue, accounts = FairQueue[str](), {}
    fill(queue, A, "xy", accounts)
    queue.remove(A, "x")
    with pytest.raises(KeyError):
        queue.remove(A, "x")
    assert queue.first(anything) == "y"


@pytest.mark.parametrize("seed", range(20))
def test_the_next_item_is_that_of_the_least_served_account_where_it_fits(seed: int) -> None:
    """Against the rule itself: of the first items that fit, one whose account was served least."""
    print("seed", seed)
    pick = random.Random(seed)
    queue, waiting = FairQueue[int](), dict[bytes, list[int]]()
    for number in range(600):
        account = bytes([pick.randrange(8)])
        if pick.random() < 0.5:
            queue.push(account, number)
            waiting.setdefault(account, []).append(number)
        elif account in waiting and pick.random() < 0.3:
            item = pick.choice(waiting[account])
            queue.remove(account, item)
            waiting[account].remove(item)
        else:
            refused = {item for items in waiting.values() for item in items if pick.random() < 0.3}
            heads = [(queue.served(name), items[0], name) for name, items in waiting.items()]
            least = min((served for served, item, _ in heads if item not in refused), default=None)
            item = queue.first(lambda item, refused=refused: item not in refused)  # type: ignore[misc]
            assert (
                item in [head for served, head, _ in heads if served == least and head not in refused] or item is None
            )
            assert (item is None) == (least is None)
            if item is not None:
                (account,) = [name for _, head, name in heads if head == item]
                queue.take(account, item)
                waiting[account].remove(item)
        queue.charge(bytes([pick.randrange(10)]), pick.randrange(30))
        waiting = {name: items for name, items in waiting.items() if items}
        queue.check()


def test_accounts_that_come_and_go_leave_no_turns_behind() -> None:
    queue = FairQueue[int]()
    queue.push(A, 0)
    for number in range(1, 10_000):
        queue.push(B, number)
        queue.remove(B, number)
    assert len(queue._turns) <= 64 + 2 * 2 + 1
    assert queue.first(anything) == 0


def test_counts_of_idle_accounts_are_bounded() -> None:
    queue = FairQueue[int]()
    for number in range(10_000):
        account = number.to_bytes(16, "big")
        queue.push(account, number)
        queue.take(account, number)
        queue.charge(account, number % 7)
    queue.check()


@settings(max_examples=60, deadline=None)
@given(some.integers(0, 2**32), some.integers(2, 6))
def test_backlogged_accounts_stay_within_two_largest_charges(seed: int, accounts: int) -> None:
    """The bound of start-time fair queueing: over any stretch, two accounts that always wait differ by little."""
    random_of = random.Random(seed)
    queue, served, largest = FairQueue[int](), [0] * accounts, 50
    for number in range(accounts * 300):
        queue.push(bytes([number % accounts]), number)
    marks = []
    for _ in range(200):
        item = queue.first(anything)
        assert item is not None
        account, cost = item % accounts, random_of.randint(1, largest)
        queue.take(bytes([account]), item)
        queue.charge(bytes([account]), cost)
        served[account] += cost
        marks.append(list(served))
    for start in range(0, 200, 20):
        for end in range(start + 20, 200, 20):
            gained = [after - before for before, after in zip(marks[start], marks[end], strict=True)]
            assert max(gained) - min(gained) <= 2 * largest, f"seed {seed}"
