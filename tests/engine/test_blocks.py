"""The block account: blocks leave and come back once, each time as another page, and secrets are erased in between."""

import random

import numpy as np
import pytest

from engine.blocks import Blocks, blocks_of


def test_every_block_is_handed_out_once() -> None:
    account = Blocks(10)
    assert sorted(blocks_of(account.take(4) + account.take(6))) == list(range(10))
    assert account.free == 0


def test_more_than_there_is_cannot_be_taken() -> None:
    account = Blocks(3)
    with pytest.raises(AssertionError, match="4 blocks wanted, 3 free"):
        account.take(4)
    assert account.free == 3


def test_a_block_freed_twice_is_noticed_and_stays_with_its_new_owner() -> None:
    account = Blocks(1)
    (page,) = account.take(1)
    account.give([page])
    (again,) = account.take(1)
    assert blocks_of([again]) == blocks_of([page])
    account.give([page])
    assert (account.free, account.stale) == (0, 1)
    with pytest.raises(AssertionError, match="freed twice"):
        account.check([again])
    with pytest.raises(AssertionError, match="freed twice"):
        account.give([again, again])


def test_a_page_is_outdated_from_the_moment_its_block_is_freed() -> None:
    account = Blocks(4)
    pages = account.take(3)
    account.give(pages[1:2])
    assert account.outdated(np.array(pages)).tolist() == [False, True, False]
    account.take(1)
    assert account.outdated(np.array(pages)).tolist() == [False, True, False]


def test_what_is_secret_has_to_be_erased_once_it_is_freed_and_not_again() -> None:
    account = Blocks(4)
    plain, secret, hidden = account.take(1), account.take(1, secret=True), account.take(1)
    account.hide(hidden)
    assert account.unerased() == []
    account.give(plain + secret + hidden)
    assert account.unerased() == blocks_of(secret + hidden)
    account.give(account.take(4))
    assert account.unerased() == []


@pytest.mark.parametrize("seed", range(10))
def test_takes_and_gives_in_any_order_lose_nothing(seed: int) -> None:
    draw = random.Random(seed)
    account, held, secrets, seen = Blocks(50), set[int](), set[int](), set[int]()
    for _ in range(300):
        if draw.random() < 0.5:
            secret = draw.random() < 0.3
            taken = account.take(draw.randrange(account.free + 1), secret)
            assert seen.isdisjoint(taken), "a page came twice"
            seen.update(taken)
            held.update(taken)
            secrets.update(taken if secret else ())
        else:
            given = draw.sample(sorted(held), draw.randrange(len(held) + 1))
            held.difference_update(given)
            account.give(given)
            assert set(account.unerased()) == set(blocks_of([page for page in given if page in secrets]))
        account.check(held)
