"""engine/scheduling/preemption.py: which sequence gives way, by accounts' shares and ages."""

from array import array

import pytest

from engine.protocol.types import SamplingParams, SchedulingTerms
from engine.scheduling.preemption import victim_for_turn, victim_of_shortage, victim_under_cap
from engine.sequences.fair_queue import AccountQueue
from engine.sequences.sequence import Sequence

Account = AccountQueue[Sequence]


def running(account: Account, start_order: int, blocks: int = 1, inflight_steps: int = 0) -> Sequence:
    """A sequence that holds so many blocks, as its account knows."""
    sequence = Sequence(
        owner=1, id=start_order, account=b"", namespace=None, tokens=array("I", [1]), prompt_tokens=1,
        max_total_tokens=9, sampling=SamplingParams(), stop_ids=frozenset(), arrived_s=0.0,
    )  # fmt: skip
    sequence.start_order, sequence.account_queue, sequence.block_count = start_order, account, blocks
    sequence.inflight_steps = inflight_steps
    account.running += 1
    account.add_blocks(range(1000 * start_order, 1000 * start_order + blocks))
    return sequence


def test_a_cap_is_paid_for_by_the_youngest_of_its_own_account() -> None:
    one, two = Account(), Account()
    sequences = [running(one, 0), running(one, 1), running(two, 2)]
    assert victim_under_cap(sequences, one) is sequences[1]


def test_a_shortage_is_paid_for_by_the_youngest_of_the_account_with_most_blocks_for_its_weight() -> None:
    heavy, light = Account(SchedulingTerms(weight=4.0)), Account()
    sequences = [running(light, 0), running(heavy, 1, 6), running(light, 2, 2), running(heavy, 3, 5)]
    assert victim_of_shortage(sequences) is sequences[2], "3 blocks of weight 1 are more than 11 of weight 4"


def test_the_oldest_sequence_is_never_preempted_though_its_account_has_most() -> None:
    rich, poor = Account(), Account()
    sequences = [running(rich, 0, 50), running(poor, 1)]
    assert victim_of_shortage(sequences) is sequences[1]
    assert victim_for_turn(sequences, [rich, poor], Account(), 1) is None


@pytest.mark.parametrize(("blocks", "gives_way"), [(5, False), (6, True)])
def test_an_account_gives_way_only_where_it_keeps_twice_as_much(blocks: int, gives_way: bool) -> None:
    rich, poor = Account(), Account()
    sequences = [running(rich, 0, blocks - 2), running(rich, 1, 2)]
    victim = victim_for_turn(sequences, [rich], poor, 2)
    assert victim is (sequences[1] if gives_way else None), "what is left is to be at least 2 · 2 blocks"


def test_places_are_compared_by_counts_and_not_by_blocks() -> None:
    many, large = Account(), Account()
    sequences = [running(large, 0, 90), *(running(many, order) for order in range(1, 5))]
    assert victim_for_turn(sequences, [many, large], Account(), None) is sequences[-1]
    assert victim_for_turn(sequences, [many, large], Account(), 10) is None, "of large, only the oldest runs"


def test_a_sequence_in_flight_gives_way_only_where_no_other_can() -> None:
    rich = Account()
    sequences = [running(rich, 0, 9), running(rich, 1, 2), running(rich, 2, 2, inflight_steps=1)]
    assert victim_for_turn(sequences, [rich], Account(), 1) is sequences[1]
    sequences[1].inflight_steps = 1
    assert victim_for_turn(sequences, [rich], Account(), 1) is sequences[2]


def test_an_account_takes_nothing_from_itself() -> None:
    account = Account()
    sequences = [running(account, 0, 9), running(account, 1, 9)]
    assert victim_for_turn(sequences, [account], account, 1) is None
