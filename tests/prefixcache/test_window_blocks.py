"""Blocks beside those of the tree, against a list that says of each what it is."""

import random
from collections import Counter

import pytest

from prefixcache.window_blocks import WindowBlocks

A, B = b"a", b"b"


def test_the_most_blocks_of_which_the_next_token_sees_all_are_usable() -> None:
    blocks = WindowBlocks(lambda: 0.0)
    blocks.add(A, 0, [1, 2, 4, 5, 6], [11, 12, 14, 15, 16])
    assert blocks.usable([1, 2, 3, 4, 5, 6], lambda count: max(0, count - 3)) == 6, "it sees the last three"
    assert blocks.usable([1, 2, 3, 4, 5, 7], lambda count: max(0, count - 2)) == 5
    assert blocks.usable([1, 2, 3, 4], lambda count: max(0, count - 2)) == 2
    assert blocks.usable([7, 2, 3], lambda count: max(0, count - 2)) == 0
    assert blocks.usable([7, 8, 9], lambda count: count) == 3, "it sees none of them"
    assert blocks.usable([], lambda count: 0) == 0


def test_the_account_furthest_above_its_floor_loses_its_least_recently_used_ones() -> None:
    seconds = iter(range(100))
    blocks = WindowBlocks(lambda: float(next(seconds)))
    blocks.add(A, 3, [1, 2, 3, 4], [11, 12, 13, 14])
    blocks.add(B, 0, [5, 6], [15, 16])
    assert blocks.evict(9) == [], "all are read"
    blocks.unpin([2, 1, 3, 4])
    blocks.unpin([5, 6])
    assert blocks.evict(1) == [15], "b is two above its floor, a is one"
    blocks.pin([2])
    blocks.unpin([2])
    assert blocks.evict(2) == [11, 16]
    assert blocks.evict(9) == [13, 14, 12]
    assert (blocks.cached, blocks.unused) == (0, 0)


class Model:
    """What `WindowBlocks` says it does, by a search through everything."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self.seconds = 0.0
        self.real = WindowBlocks(lambda: self.seconds)
        self.beside: dict[int, int] = {}
        self.pins: Counter[int] = Counter()
        self.owner: dict[int, bytes] = {}
        self.used: dict[int, int] = {}
        self.floors: dict[bytes, int] = {}
        self.uses = 0
        self.ids = iter(range(1000, 1 << 30))
        self.tree: set[int] = set()

    def run(self, acts: int = 200) -> None:
        for _ in range(acts):
            self.seconds += self.pick.randrange(2)
            acts_of_all = [self.add, self.add, self.pin, self.unpin, self.unpin, self.remove, self.evict, self.rename]
            self.pick.choice(acts_of_all)()
            assert self.real.check(self.tree, +self.pins) == set(self.beside.values())
            assert (self.real.cached, self.real.unused) == (len(self.beside), len(self.unused()))

    def unused(self) -> list[int]:
        return sorted((block for block in self.beside if not self.pins[block]), key=self.used.__getitem__)

    def add(self) -> None:
        known = self.pick.sample(sorted(self.tree), min(len(self.tree), self.pick.randrange(3)))
        tree_blocks = known + [next(self.ids) for _ in range(self.pick.randrange(4))]
        own = [next(self.ids) for _ in tree_blocks]
        account, floor = self.pick.choice([A, B, b"c"]), self.pick.randrange(9)
        self.tree |= {*tree_blocks}
        if tree_blocks:
            self.floors[account] = floor
        for tree_block, block in zip(tree_blocks, own, strict=True):
            if tree_block not in self.beside:
                self.beside[tree_block], self.owner[tree_block] = block, account
            self.pins[tree_block] += 1
        if tree_blocks:
            assert self.real.add(account, floor, tree_blocks, own) == [self.beside[block] for block in tree_blocks]

    def pin(self) -> None:
        tree_blocks = self.pick.sample(sorted(self.beside), min(len(self.beside), self.pick.randrange(3)))
        self.pins.update(tree_blocks)
        assert self.real.pin(tree_blocks) == [self.beside[block] for block in tree_blocks]

    def unpin(self) -> None:
        pinned = sorted(+self.pins)
        for block in self.pick.sample(pinned, min(len(pinned), self.pick.randrange(4))):
            self.pins[block] -= 1
            self.real.unpin([block])
            self.uses += 1
            self.used[block] = self.uses

    def remove(self) -> None:
        free = [block for block in sorted(self.tree) if not self.pins[block]]
        gone = self.pick.sample(free, min(len(free), self.pick.randrange(3)))
        assert self.real.remove(gone) == [self.beside[block] for block in gone if block in self.beside]
        self.tree -= {*gone}
        self.forget(gone)

    def evict(self) -> None:
        for block in self.real.evict(self.pick.randrange(4)):
            excess = Counter(self.owner.values())
            excess.subtract({account: self.floors[account] for account in excess})
            most = max(excess[self.owner[other]] for other in self.unused())
            tree_block = next(other for other in self.unused() if excess[self.owner[other]] == most)
            richest = {self.owner[other] for other in self.unused() if excess[self.owner[other]] == most}
            gone = next(key for key, value in self.beside.items() if value == block)
            assert self.owner[gone] in richest, "another account has more above its floor"
            oldest = next(other for other in self.unused() if self.owner[other] == self.owner[gone])
            assert gone == oldest, "not the least recently used"
            assert len(richest) > 1 or gone == tree_block
            self.forget([gone])

    def forget(self, gone: list[int]) -> None:
        for block in gone:
            self.beside.pop(block, None)
            self.owner.pop(block, None)

    def rename(self) -> None:
        names = sorted(self.tree)
        chosen = self.pick.sample(names, min(len(names), 3))
        renamed = dict(zip(chosen, [*chosen[1:], next(self.ids)], strict=True)) if chosen else {}
        if renamed and renamed[chosen[-1]] not in self.tree:
            self.real.rename_tree(renamed)
            self.tree = {renamed.get(block, block) for block in self.tree}
            for table in (self.beside, self.owner, self.used):
                items = [(renamed.get(block, block), value) for block, value in table.items()]
                table.clear()
                table.update(items)  # type: ignore[arg-type]
            self.pins = Counter({renamed.get(block, block): count for block, count in self.pins.items()})
        moved = {block: next(self.ids) for block in list(self.beside.values())[:2]}
        self.real.rename(moved)
        self.beside = {key: moved.get(block, block) for key, block in self.beside.items()}


@pytest.mark.parametrize("seed", range(60))
def test_any_history_is_that_of_a_plain_list(seed: int) -> None:
    Model(seed).run()


@pytest.mark.parametrize("seed", range(20))
def test_what_may_be_begun_with_is_what_a_search_finds(seed: int) -> None:
    """`first` as windows and chunks of any number of blocks have it; any of a path's blocks may be gone."""
    pick = random.Random(seed)
    for _ in range(50):
        path, span, chunked = list(range(pick.randrange(1, 24))), pick.randrange(1, 9), pick.random() < 0.5

        def first(count: int, span: int = span, chunked: bool = chunked) -> int:
            return count // span * span if chunked else max(0, count - span)

        here = [block for block in path if pick.random() < 0.7]
        blocks = WindowBlocks(lambda: 0.0)
        blocks.add(A, 0, here, [100 + block for block in here])
        fitting = [count for count in range(len(path) + 1) if {*path[first(count) : count]} <= {*here}]
        assert blocks.usable(path, first) == max(fitting)
