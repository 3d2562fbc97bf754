"""The block account: blocks leave and come back once, each time as another page, and secrets are erased in between;
their memory comes and goes, and what is in them moves."""

import random

import numpy as np
import pytest

from engine.kv_blocks.block_pool import BlockPool, WakeExtents, blocks_of


def test_every_block_is_handed_out_once() -> None:
    account = BlockPool(10)
    assert sorted(blocks_of(account.allocate(4) + account.allocate(6))) == list(range(10))
    assert account.free_blocks == 0


def test_more_than_there_is_cannot_be_taken() -> None:
    account = BlockPool(3)
    with pytest.raises(AssertionError, match="4 blocks requested, 3 free"):
        account.allocate(4)
    assert account.free_blocks == 3


def test_a_block_freed_twice_is_noticed_and_stays_with_its_new_owner() -> None:
    account = BlockPool(1)
    (page,) = account.allocate(1)
    account.free([page])
    (again,) = account.allocate(1)
    assert blocks_of([again]) == blocks_of([page])
    account.free([page])
    assert (account.free_blocks, account.stale_pages) == (0, 1)
    with pytest.raises(AssertionError, match="freed twice"):
        account.check([again])
    with pytest.raises(AssertionError, match="freed twice"):
        account.free([again, again])


def test_a_page_is_outdated_from_the_moment_its_block_is_freed() -> None:
    account = BlockPool(4)
    pages = account.allocate(3)
    account.free(pages[1:2])
    assert account.are_stale(np.array(pages)).tolist() == [False, True, False]
    account.allocate(1)
    assert account.are_stale(np.array(pages)).tolist() == [False, True, False]


def test_what_is_secret_has_to_be_erased_once_it_is_freed_and_not_again() -> None:
    account = BlockPool(4)
    plain, secret, hidden = account.allocate(1), account.allocate(1, secret=True), account.allocate(1)
    account.mark_secret(hidden)
    assert account.take_unerased() == []
    account.free(plain + secret + hidden)
    assert account.take_unerased() == blocks_of(secret + hidden)
    account.free(account.allocate(4))
    assert account.take_unerased() == []


@pytest.mark.parametrize("seed", range(10))
def test_takes_and_gives_in_any_order_lose_nothing(seed: int) -> None:
    draw = random.Random(seed)
    account, held, secrets, seen = BlockPool(50), set[int](), set[int](), set[int]()
    for _ in range(300):
        if draw.random() < 0.5:
            secret = draw.random() < 0.3
            taken = account.allocate(draw.randrange(account.free_blocks + 1), secret)
            assert seen.isdisjoint(taken), "a page came twice"
            seen.update(taken)
            held.update(taken)
            secrets.update(taken if secret else ())
        else:
            given = draw.sample(sorted(held), draw.randrange(len(held) + 1))
            held.difference_update(given)
            account.free(given)
            assert set(account.take_unerased()) == set(blocks_of([page for page in given if page in secrets]))
        account.check(held)


# Extents


def test_blocks_are_taken_from_the_first_extents_first_and_only_where_there_is_memory() -> None:
    account = BlockPool(10, extent_blocks=4, mapped=[2, 0], min_blocks=3)
    assert (account.mapped_blocks, account.free_blocks, account.absent_blocks) == (6, 6, 4)
    assert blocks_of(account.allocate(5)) == [0, 1, 2, 3, 8]
    assert account.extents_to_grow(9) == [1]
    account.grow([1])
    assert (account.mapped_blocks, account.free_blocks, account.absent_blocks) == (10, 5, 0)
    assert blocks_of(account.allocate(5)) == [9, 4, 5, 6, 7], "what was free before goes first"


def test_the_extents_go_in_which_least_is_held_and_the_least_stays() -> None:
    account = BlockPool(10, extent_blocks=4, mapped=[0, 1, 2], min_blocks=4)
    pages = account.allocate(10)
    account.free(pages[:1] + pages[4:7])
    assert account.cheapest_extents(3) == [1, 2], "one held block, two, and three in the last one, which has to stay"
    account.free(pages[1:4] + pages[7:])
    assert account.cheapest_extents(1) == [2], "of equal ones the highest"


def test_what_is_held_in_an_extent_that_goes_has_a_new_page_in_another() -> None:
    account = BlockPool(8, extent_blocks=4, mapped=[0, 1], min_blocks=4)
    pages = account.allocate(4)
    held = [*account.allocate(1, secret=True), *account.allocate(1)]
    account.free(pages[:2])
    shrinking, renamed = account.shrink([1])
    assert (shrinking.extents, shrinking.sources, shrinking.targets) == ([1], [4, 5], [0, 1])
    assert shrinking.secret == [4]
    assert list(renamed) == held
    assert account.are_stale(np.array(held)).all()
    assert not account.are_stale(np.array([*renamed.values(), *pages[2:]])).any()
    assert (account.mapped_blocks, account.free_blocks, account.absent_blocks) == (4, 0, 4)
    account.check([*renamed.values(), *pages[2:]])
    account.free(list(renamed.values()))
    assert account.take_unerased() == [0], "it is still a secret"


def test_what_is_kept_comes_back_in_the_lowest_blocks_but_for_what_was_freed_asleep() -> None:
    account = BlockPool(12, extent_blocks=4, mapped=[0, 1, 2], min_blocks=2)
    pages = account.allocate(12)
    account.free(pages[:5])
    assert account.sleep() == [5, 6, 7, 8, 9, 10, 11]
    assert (account.mapped_blocks, account.free_blocks, account.absent_blocks) == (0, 0, 5)
    account.check(pages[5:])
    account.mark_secret(pages[6:7])
    account.free(pages[6:7])
    assert account.absent_blocks == 6
    with pytest.raises(AssertionError, match="erase first"):
        account.plan_wake(1)
    assert account.take_unerased() == [6], "as it was called when it was kept"
    waking = account.plan_wake(1)
    assert waking == WakeExtents([0, 1], [0, 1, 2, 3, 4, 5, 6]), "as many extents as it needs"
    renamed = account.finish_wake(waking)
    assert blocks_of(list(renamed)) == [5, 7, 8, 9, 10, 11]
    assert blocks_of(list(renamed.values())) == [0, 2, 3, 4, 5, 6]
    assert account.are_stale(np.array(list(renamed))).all()
    assert blocks_of(account.allocate(2)) == [1, 7]
    assert account.absent_blocks == 4


def test_a_sleep_is_taken_back_with_the_extents_and_blocks_that_it_had() -> None:
    account = BlockPool(12, extent_blocks=4, mapped=[0, 2], min_blocks=2)
    pages = account.allocate(7)
    account.free(pages[:3])
    kept = account.sleep()
    renamed = account.finish_wake(WakeExtents([0, 2], kept))
    assert blocks_of(list(renamed)) == blocks_of(list(renamed.values())) == kept
    assert (account.mapped_blocks, account.free_blocks, account.absent_blocks) == (8, 4, 4)
    account.check(renamed.values())


@pytest.mark.parametrize("seed", range(10))
def test_memory_that_comes_and_goes_in_any_order_loses_nothing(seed: int) -> None:
    draw = random.Random(seed)
    account = BlockPool(50, extent_blocks=7, mapped=[0, 1, 2, 3], min_blocks=12)
    contents: dict[int, int] = {}  # of each block: the page's number
    held: dict[int, int] = {}  # page → number
    for number in range(400):
        act = draw.randrange(6)
        if act < 2 and account.free_blocks:
            (page,) = account.allocate(1, secret=draw.random() < 0.2)
            held[page] = contents[blocks_of([page])[0]] = number
        elif act == 2 and held:
            page = draw.choice(sorted(held))
            del held[page]
            account.free([page])
        elif act == 3:
            account.grow(account.extents_to_grow(draw.randrange(3)))
        elif act == 4:
            extents = account.cheapest_extents(draw.randrange(3))
            while extents and account.blocks_in(extents) > account.free_blocks:
                extents.pop()
            account.take_unerased()
            shrinking, renamed = account.shrink(extents)
            for source, target in zip(shrinking.sources, shrinking.targets, strict=True):
                contents[target] = contents.pop(source)
            held = {renamed.get(page, page): number for page, number in held.items()}
        elif act == 5 and draw.random() < 0.2:
            kept = account.sleep()
            account.take_unerased()
            waking = account.plan_wake(draw.randrange(9))
            contents = {target: contents[block] for block, target in zip(kept, waking.restore, strict=True)}
            renamed = account.finish_wake(waking)
            held = {renamed[page]: number for page, number in held.items()}
        account.check(held)
        assert all(
            contents[block] == number for block, number in zip(blocks_of(list(held)), held.values(), strict=True)
        )
