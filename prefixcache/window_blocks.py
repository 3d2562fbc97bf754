"""The cached blocks of layers that see only the keys near a token: one at most beside each block of the tree.

A block here lies beside the block of the tree that has the same tokens, and goes with it at the latest. Where space is
short it goes alone: no prefix can then be begun with whose next token would see it, which costs computing and nothing
else. It knows no tokens, no namespaces and no layers.

The method is that of the hybrid KV cache managers of vLLM and SGLang: full blocks decide what is found, and a prefix
is served where the other layers have the blocks that its next token sees.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any


class _Account:
    """What one account has here: how many blocks, and those that nobody reads, the least recently used first."""

    __slots__ = ("cached", "floor", "unused")

    def __init__(self) -> None:
        self.cached = 0
        self.floor = 0
        self.unused: OrderedDict[int, float] = OrderedDict()  # tree block → when it was last read

    @property
    def excess(self) -> int:
        """Blocks above the floor; negative below it."""
        return self.cached - self.floor


class WindowBlocks:
    """Blocks by the block of the tree that they lie beside. Ids are the caller's, below 2**64, and unlike each other.

    A block is pinned as often as `add` and `pin` named it, less the times that `unpin` did; what is pinned stays.
    Every operation costs a few dict operations per block; evicting looks at every account once for each run of blocks
    that it takes off one.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """The clock gives seconds and never goes back."""
        self._clock = clock
        self._blocks: dict[int, int] = {}  # tree block → its block here
        self._pins: dict[int, int] = {}  # of the pinned ones
        self._owner: dict[int, _Account] = {}
        self._accounts: dict[bytes, _Account] = {}

    @property
    def cached(self) -> int:
        """How many blocks are here."""
        return len(self._blocks)

    @property
    def unused(self) -> int:
        """Blocks that nobody has pinned: all of them can be had by `evict`."""
        return len(self._blocks) - len(self._pins)

    def usable(self, tree_blocks: Sequence[int], first: Callable[[int], int]) -> int:
        """How many of these blocks, which lead from a root on, may be begun with: the most of which all that the token
        behind them sees is here. `first`: the first block that the token behind so many blocks sees; it never falls."""
        count = at = len(tree_blocks)
        while at > first(count):
            at -= 1
            if tree_blocks[at] not in self._blocks:
                count = at
        return count

    def add(self, account: bytes, floor: int, tree_blocks: Sequence[int], blocks: Sequence[int]) -> list[int]:
        """Puts blocks beside these of the tree and pins them; where one is here already, that one is pinned. Returns
        what lies beside each of them now. The account loses none while it has no more than `floor` and another one has
        more than its own."""
        share = self._accounts.setdefault(account, _Account())
        share.floor = floor
        for tree_block, block in zip(tree_blocks, blocks, strict=True):
            if tree_block not in self._blocks:
                self._blocks[tree_block] = block
                self._pins[tree_block] = 0
                self._owner[tree_block] = share
                share.cached += 1
        if not share.cached:
            del self._accounts[account]
        return self.pin(tree_blocks)

    def pin(self, tree_blocks: Iterable[int]) -> list[int]:
        """Returns the blocks beside these of the tree, which are here and stay until they are unpinned."""
        blocks = []
        for tree_block in tree_blocks:
            pins = self._pins.get(tree_block)
            if pins is None:
                del self._owner[tree_block].unused[tree_block]
            self._pins[tree_block] = (pins or 0) + 1
            blocks.append(self._blocks[tree_block])
        return blocks

    def unpin(self, tree_blocks: Iterable[int]) -> None:
        """Ends one pin of each; the earlier one is named, the sooner it is evicted."""
        now_s = self._clock()
        for tree_block in tree_blocks:
            pins = self._pins[tree_block] - 1
            if pins:
                self._pins[tree_block] = pins
            else:
                del self._pins[tree_block]
                self._owner[tree_block].unused[tree_block] = now_s

    def remove(self, tree_blocks: Iterable[int]) -> list[int]:
        """Forgets the blocks beside these, which the tree freed, as far as there are any; none is pinned. Returns
        them."""
        blocks = []
        for tree_block in tree_blocks:
            block = self._blocks.pop(tree_block, None)
            if block is not None:
                assert tree_block not in self._pins, "a block that is read left the tree"
                owner = self._owner.pop(tree_block)
                del owner.unused[tree_block]
                owner.cached -= 1
                blocks.append(block)
        if blocks:
            self._forget_empty()
        return blocks

    def evict(self, count: int) -> list[int]:
        """Forgets up to so many blocks that nobody has pinned, and returns them: always the least recently used one of
        the account that is furthest above its floor."""
        blocks: list[int] = []
        while len(blocks) < count:
            accounts = [account for account in self._accounts.values() if account.unused]
            if not accounts:
                break
            accounts.sort(key=lambda account: -account.excess)
            ahead = accounts[0].excess - accounts[1].excess if len(accounts) > 1 else count
            blocks += self.remove(list(islice(accounts[0].unused, min(count - len(blocks), max(1, ahead)))))
        return blocks

    def unused_s(self) -> float | None:
        """For how long nobody read the block that is evicted next; None where all are pinned."""
        accounts = [account for account in self._accounts.values() if account.unused]
        if not accounts:
            return None
        used_s = next(iter(max(accounts, key=lambda account: account.excess).unused.values()))
        return self._clock() - used_s

    def evict_all_but(self, count: int) -> list[int]:
        """Forgets what nobody has pinned but the `count` most recently used blocks, whosever they are."""
        used_s = {
            block: (at_s, number)
            for account in self._accounts.values()
            for number, (block, at_s) in enumerate(account.unused.items())
        }
        ranked = sorted(used_s, key=used_s.__getitem__)
        return self.remove(ranked[: max(0, len(ranked) - count)])

    def unused_items(self) -> list[tuple[int, int]]:
        """Each unused block, as the tree's block and that beside it."""
        return [(block, self._blocks[block]) for account in self._accounts.values() for block in account.unused]

    def beside(self, tree_blocks: Iterable[int]) -> Iterator[int]:
        """The blocks that lie beside these, where there are any."""
        return (self._blocks[block] for block in tree_blocks if block in self._blocks)

    def missing(self, tree_blocks: Iterable[int]) -> Iterator[int]:
        """The blocks of these that none lies beside."""
        return (block for block in tree_blocks if block not in self._blocks)

    def count_unused(self, tree_blocks: Iterable[int]) -> int:
        """How many of the blocks beside these nobody has pinned."""
        return sum(block in self._blocks and block not in self._pins for block in tree_blocks)

    def rename(self, renamed: Mapping[int, int]) -> None:
        """Renames blocks whose contents moved."""
        for tree_block, block in self._blocks.items():
            if block in renamed:
                self._blocks[tree_block] = renamed[block]

    def rename_tree(self, renamed: Mapping[int, int]) -> None:
        """Renames blocks of the tree whose contents moved."""
        for table in (self._blocks, self._pins, self._owner):
            _rename_keys(table, renamed)
        for account in self._accounts.values():
            if not renamed.keys().isdisjoint(account.unused):
                items = [(renamed.get(block, block), used_s) for block, used_s in account.unused.items()]
                account.unused = OrderedDict(items)

    def check(self, tree_blocks: set[int], pins: Mapping[int, int]) -> set[int]:
        """All blocks that are here. Raises AssertionError where sums are wrong, where one lies beside none of these, or
        is pinned another number of times."""
        assert self._pins == pins, "blocks are pinned that nobody reads, or read and not pinned"
        assert self._blocks.keys() == self._owner.keys()
        assert self._blocks.keys() <= tree_blocks, "a block stayed that the tree has lost"
        blocks = set(self._blocks.values())
        assert len(blocks) == len(self._blocks), "a block lies beside two of the tree"
        unused = [block for account in self._accounts.values() for block in account.unused]
        assert len(unused) == len(set(unused))
        assert {*unused} == self._blocks.keys() - self._pins.keys(), "a block can never be evicted, or is read"
        for account in self._accounts.values():
            assert account.cached == sum(owner is account for owner in self._owner.values()) > 0
            ages = list(account.unused.values())
            assert ages == sorted(ages)
        return blocks

    # Inside

    def _forget_empty(self) -> None:
        for name in [name for name, account in self._accounts.items() if not account.cached]:
            del self._accounts[name]


def _rename_keys(table: dict[int, Any], renamed: Mapping[int, int]) -> None:
    """Renames keys; a new name may be another one's old one."""
    moved = [(renamed[key], table.pop(key)) for key in renamed if key in table]
    table.update(moved)
