"""engine/sequences/fair_queue.py: no account waits for more than its share, and nothing is saved up by idling or at a
cap."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from engine.protocol.types import SchedulingTerms
from engine.sequences.fair_queue import CREDIT, GENERATED_TOKEN, PROMPT_TOKEN, AccountQueue, FairQueue, fair_shares

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def head(account: AccountQueue[int]) -> int | None:
    return next(iter(account.resuming or account.waiting))


class Turns:
    """A queue of numbers, each of an account and served at once, or in part, when its turn comes."""

    def __init__(self) -> None:
        self.queue = FairQueue[int](lambda item: item)
        self.account: dict[int, bytes] = {}
        self.terms: dict[bytes, SchedulingTerms] = {}
        self._count = 0

    def account_queue(self, account: bytes) -> AccountQueue[int]:
        return self.queue.account_queue(account, self.terms.get(account, SchedulingTerms()))

    def push(self, account: bytes, count: int = 1, work: float = 0.0) -> list[int]:
        items = list(range(self._count, self._count + count))
        self._count += count
        for item in items:
            self.account[item] = account
            self.queue.push(self.account_queue(account), item, work)
        return items

    def start(self, tokens: int = 10) -> bytes:
        """Starts an item of the account that is next, which is served so many tokens and goes on running."""
        item = self.queue.peek(head)
        assert item is not None
        account = self.account[item]
        self.queue.start(self.account_queue(account), item)
        self.serve(account, tokens)
        self.queue.check()
        return account

    def serve(self, account: bytes, tokens: int) -> None:
        self.account_queue(account).level += tokens * self.account_queue(account).prompt_cost

    def take(self, tokens: int = 10) -> bytes:
        """The same, and it ends."""
        account = self.start(tokens)
        self.queue.stop(self.account_queue(account))
        return account


def test_inside_one_account_first_come_is_first_served_and_who_was_preempted_comes_before() -> None:
    turns = Turns()
    items = turns.push(A, 4)
    account = turns.account_queue(A)
    for item in items[:2]:
        turns.queue.start(account, item)
    for item in reversed(items[:2]):
        turns.queue.stop(account)
        turns.queue.resume(account, item, 1.0)
    order = []
    while (first := turns.queue.peek(head)) is not None:
        order.append(first)
        turns.queue.remove(account, first)
    assert order == items
    assert len(turns.queue) == 0


def test_accounts_take_turns_by_tokens_and_not_by_requests() -> None:
    turns = Turns()
    turns.push(A, 10)
    turns.push(B, 40)
    served = [turns.take(30 if turns.queue.peek(head) in range(10) else 10) for _ in range(24)]
    assert 5 <= served.count(A) <= 7


def test_an_account_of_twice_the_weight_gets_twice_as_much() -> None:
    turns = Turns()
    turns.terms = {A: SchedulingTerms(weight=2.0), B: SchedulingTerms(weight=1.0), C: SchedulingTerms(weight=0.5)}
    for account in (A, B, C):
        turns.push(account, 100)
    served = [turns.take() for _ in range(70)]
    assert [served.count(account) for account in (A, B, C)] == [40, 20, 10]


def test_a_generated_token_counts_as_much_as_it_says() -> None:
    assert AccountQueue[int](SchedulingTerms(weight=4.0)).generated_cost == GENERATED_TOKEN / 4.0
    assert AccountQueue[int](SchedulingTerms(weight=4.0)).prompt_cost == PROMPT_TOKEN / 4.0


def test_what_is_promised_counts_for_the_next_turn_and_not_for_rows() -> None:
    turns = Turns()
    turns.push(A, 4)
    turns.push(B, 4)
    turns.start(0)
    turns.queue.add_pending(turns.account_queue(A), 100)
    assert turns.take() == turns.take() == B
    assert turns.account_queue(A).level < turns.account_queue(B).level
    turns.queue.add_pending(turns.account_queue(A), -100)  # cancelled before any of it was computed
    assert turns.take() == A


def test_a_new_account_goes_before_the_backlog_of_another() -> None:
    turns = Turns()
    turns.push(A, 8)
    for _ in range(4):
        turns.take()
    turns.push(B)
    assert B in [turns.take(), turns.take()]


def test_a_returning_account_neither_bursts_nor_starves() -> None:
    turns = Turns()
    turns.push(A, 60)
    turns.push(B, 5)
    while turns.account_queue(B).waiting:
        turns.take()
    for _ in range(20):  # A is served while B is away
        turns.take(1000)
    turns.push(B, 20)
    assert turns.take(1000) == B, "its first goes before the next of who has waited all the time"
    assert 9 <= [turns.take(1000) for _ in range(20)].count(B) <= 11


def test_returning_again_and_again_saves_up_no_more_than_once() -> None:
    turns = Turns()
    turns.push(A, 200)
    served = Counter[bytes]()
    for _ in range(150):
        if not turns.account_queue(B).waiting:
            turns.push(B)
        served[turns.take(100)] += 100
    assert abs(served[A] - served[B]) <= CREDIT + 200


def test_an_account_that_arrives_when_none_waits_starts_even_with_the_most_served() -> None:
    turns = Turns()
    turns.push(C)
    turns.start(1)  # C goes on running at a low level
    turns.push(A)
    turns.start(100_000)
    turns.push(B, 20)
    turns.push(A, 20)
    assert 9 <= [turns.take(1000) for _ in range(20)].count(B) <= 11


def test_what_an_account_was_served_is_remembered_while_others_wait() -> None:
    turns = Turns()
    turns.push(A)
    turns.push(B, 3)
    assert turns.take(1000) == A
    turns.push(A)
    assert [turns.take() for _ in range(4)] == [B, B, B, A]


def test_an_account_at_its_cap_is_skipped_and_saves_up_nothing() -> None:
    turns = Turns()
    turns.terms = {A: SchedulingTerms(sequences=1)}
    turns.push(A, 30)
    turns.push(B, 200)
    assert {turns.start(), turns.start()} == {A, B}
    for _ in range(100):
        assert turns.take(1000) == B
    turns.queue.stop(turns.account_queue(A))
    turns.terms = {}
    assert 5 <= [turns.take(1000) for _ in range(10)].count(A) <= 6


def test_an_account_that_is_full_has_its_turn_when_one_of_its_own_lets_blocks_go() -> None:
    turns = Turns()
    turns.push(A, 2)
    account = turns.account_queue(A)
    turns.start()
    account.add_blocks([3, 4])
    turns.queue.skip(account)
    assert turns.queue.peek(head) is None
    turns.queue.remove_blocks(account, [4])
    turns.queue.check()
    assert turns.queue.peek(head) is not None


def test_a_block_that_several_hold_counts_once_until_the_last_lets_it_go() -> None:
    account = AccountQueue[int]()
    account.add_blocks([1, 2, 3])
    account.add_blocks([1, 2, 9])
    assert account.blocks == 4
    account.remove_blocks([1, 2, 3])
    assert account.blocks == 3
    account.remove_blocks([1, 2, 9])
    assert account.blocks == 0


def test_changed_terms_hold_from_the_next_turn_on() -> None:
    turns = Turns()
    turns.push(A, 100)
    turns.push(B, 100)
    for _ in range(10):
        turns.take()
    turns.terms = {A: SchedulingTerms(weight=4.0)}
    turns.push(A)
    assert 38 <= [turns.take() for _ in range(50)].count(A) <= 42
    turns.queue.check()


def test_removed_item_loses_its_turn_and_an_unknown_one_is_an_error() -> None:
    turns = Turns()
    first, second = turns.push(A, 2)
    turns.queue.remove(turns.account_queue(A), first)
    with pytest.raises(KeyError):
        turns.queue.remove(turns.account_queue(A), first)
    assert turns.queue.peek(head) == second


def test_what_is_ahead_is_what_others_get_until_the_turn_comes() -> None:
    turns = Turns()
    turns.push(A, 50, work=100.0)
    assert turns.queue.work_ahead(turns.account_queue(A), 1.0) == 5000.0
    assert turns.queue.work_ahead(turns.account_queue(A), 0.5) == 2500.0
    assert turns.queue.work_ahead(turns.account_queue(B), 1.0) == 0.0  # it is the next
    turns.push(B, 3, work=100.0)
    assert turns.queue.work_ahead(turns.account_queue(B), 1.0) == 600.0  # its own, and as much of A's
    turns.terms = {B: SchedulingTerms(weight=3.0)}
    assert turns.queue.work_ahead(turns.account_queue(B), 1.0) == pytest.approx(400.0)


def test_the_longest_is_who_has_most_for_its_weight() -> None:
    turns = Turns()
    turns.terms = {A: SchedulingTerms(weight=10.0)}
    turns.push(A, 50)
    turns.push(B, 6)
    assert turns.queue.longest_account() is turns.account_queue(B)


@pytest.mark.parametrize("seed", range(20))
def test_the_next_item_is_that_of_the_lowest_account_where_it_fits(seed: int) -> None:
    """Against the rule itself: of the first items that fit, one whose account has the lowest turn."""
    print("seed", seed)
    pick = random.Random(seed)
    turns, caps = Turns(), [None, None, 1, 3]
    turns.terms = {bytes([key]): SchedulingTerms(pick.choice([0.3, 1.0, 5.0]), pick.choice(caps)) for key in range(10)}
    for _ in range(600):
        name = bytes([pick.randrange(8)])
        account = turns.account_queue(name)
        if pick.random() < 0.5:
            turns.push(name)
        elif account.waiting and pick.random() < 0.3:
            turns.queue.remove(account, pick.choice(list(account.waiting)))
        elif account.running and pick.random() < 0.5:
            turns.queue.stop(account)
        else:
            line = [each for each in map(turns.account_queue, turns.terms) if each.is_eligible]
            refused = {head(each) for each in line if pick.random() < 0.3}
            fitting = [each for each in line if head(each) not in refused]
            item = turns.queue.peek(lambda each, refused=refused: None if head(each) in refused else head(each))  # type: ignore[misc]
            least = min((each.priority for each in fitting), default=None)
            assert item in [head(each) for each in fitting if each.priority == least] or item is least is None
            if item is not None:
                turns.queue.start(turns.account_queue(turns.account[item]), item)
        turns.queue.add_pending(account, pick.randrange(30))
        turns.queue.add_pending(account, -pick.randrange(account.pending_tokens + 1))
        turns.serve(bytes([pick.randrange(10)]), pick.randrange(30))
        turns.queue.check()


def test_accounts_that_come_and_go_leave_no_turns_behind() -> None:
    turns = Turns()
    turns.push(A)
    for _ in range(10_000):
        (item,) = turns.push(B)
        turns.queue.remove(turns.account_queue(B), item)
    assert len(turns.queue._heap) <= 64 + 2 * 2 + 1
    assert turns.queue.peek(head) == 0


def test_accounts_that_are_gone_are_forgotten() -> None:
    turns = Turns()
    turns.terms = {A: SchedulingTerms(sequences=1)}
    turns.push(A, 2)
    turns.start()
    for number in range(10_000):  # while A waits at its cap
        account = number.to_bytes(16, "big")
        turns.push(account)
        turns.take(number % 7)
    assert len(turns.queue._accounts) <= 4096 + 2
    turns.push(B)
    assert len(turns.queue._accounts) <= 2, "where nobody waits for a turn only those stay that wait or run"
    turns.queue.check()


@settings(max_examples=60, deadline=None)
@given(some.integers(0, 2**32), some.integers(2, 6))
def test_backlogged_accounts_stay_within_two_largest_charges(seed: int, accounts: int) -> None:
    """The bound of the virtual token counter: over any stretch, two accounts that always wait differ by little."""
    random_of, turns, largest = random.Random(seed), Turns(), 50
    served = dict.fromkeys((bytes([number]) for number in range(accounts)), 0)
    for account in served:
        turns.push(account, 200)
    marks = []
    for _ in range(200):
        cost = random_of.randint(1, largest)
        served[turns.take(cost)] += cost
        marks.append(list(served.values()))
    for start in range(0, 200, 20):
        for end in range(start + 20, 200, 20):
            gained = [after - before for before, after in zip(marks[start], marks[end], strict=True)]
            assert max(gained) - min(gained) <= 2 * largest, f"seed {seed}"


@settings(max_examples=300, deadline=None)
@given(
    some.lists(
        some.tuples(some.floats(0, 1e6), some.integers(1, 400), some.sampled_from([0.1, 0.7, 1.0, 3.0])),
        min_size=1,
        max_size=7,
    ),
    some.integers(0, 3000),
)
def test_rows_go_to_the_lowest_until_they_are_level(accounts: list[tuple[float, int, float]], rows: int) -> None:
    standings, wanted = [], [count for _, count, _ in accounts]
    for level, _, weight in accounts:
        standings.append(AccountQueue[int](SchedulingTerms(weight=weight)))
        standings[-1].level = level
    shares = fair_shares(standings, wanted, rows)
    assert sum(shares) == min(rows, sum(wanted))
    assert all(0 <= share <= count for share, count in zip(shares, wanted, strict=True))
    slack = len(accounts) + 1  # what is left over by rounding
    short = [
        each.level + (share + 1) * each.prompt_cost
        for each, share, count in zip(standings, shares, wanted, strict=True)
        if share < count
    ]
    lowest = min(short, default=math.inf)
    for each, share in zip(standings, shares, strict=True):
        if share > slack:
            assert each.level + (share - slack) * each.prompt_cost <= lowest + 1e-6 * (1 + lowest)
