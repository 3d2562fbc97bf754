"""The block account: ids leave and come back once."""

import random

import pytest

from engine.blocks import Blocks


def test_every_block_is_handed_out_once() -> None:
    account = Blocks(10)
    assert sorted(account.take(4) + account.take(6)) == list(range(10))
    assert account.free == 0


def test_more_than_there_is_cannot_be_taken() -> None:
    account = Blocks(3)
    with pytest.raises(AssertionError, match="4 blocks wanted, 3 free"):
        account.take(4)
    assert account.free == 3


def test_a_block_freed_twice_is_noticed() -> None:
    account = Blocks(3)
    (block,) = account.take(1)
    account.give([block])
    with pytest.raises(AssertionError, match="freed twice"):
        account.give([block])


@pytest.mark.parametrize("seed", range(10))
def test_takes_and_gives_in_any_order_lose_nothing(seed: int) -> None:
    draw = random.Random(seed)
    account, held = Blocks(50), set()
    for _ in range(300):
        if draw.random() < 0.5:
            taken = account.take(draw.randrange(account.free + 1))
            assert held.isdisjoint(taken)
            held.update(taken)
        else:
            given = draw.sample(sorted(held), draw.randrange(len(held) + 1))
            held.difference_update(given)
            account.give(given)
        account.check()
        assert account.free + len(held) == account.total
