"""Which blocks of the KV pool are free, which have memory, and which have to be erased. The pool does not know what is
in them, nor who has the others.

A **page** is a block as it was allocated once: the block in its low 32 bits, its tag in those above. A block's tag
changes whenever it is freed, or its contents move to another block, so that a page says for ever whether its holder may
still read the block.

An **extent** is a run of blocks that gets memory or gives it back as a whole. Where contents move, every page that
changes is returned as old → new; no other page becomes stale.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.step.layout import Pages

_TAG: Final = 1 << 32
_BLOCK: Final = _TAG - 1


@dataclass(frozen=True, slots=True)
class WakeExtents:
    """The extents that get memory, and the blocks that what was kept is restored into, in the order in which it was
    kept."""

    extents: list[int]
    restore: list[int]


@dataclass(frozen=True, slots=True)
class ShrinkPlan:
    """The extents that give up their memory, once the contents of `sources` are copied to `targets`, and those of the
    sources that are `secret` are erased after that."""

    extents: list[int]
    sources: list[int]
    targets: list[int]
    secret: list[int]


class BlockPool:
    """Blocks 0 … total−1. At any time each is free here, cached in the prefix tree, private to one sequence, or absent:
    nobody's, in an extent without memory.

    A block that has to be erased is free like the others; before each launch `take_unerased` is called and its blocks
    are erased, so that nobody reads or writes them before.

    Asleep no extent has memory. Kept blocks stay cached under the pages that they had, their contents are elsewhere,
    and a block that is freed is absent.
    """

    def __init__(
        self, total: int, extent_blocks: int | None = None, mapped: Items[int] = (0,), min_blocks: int | None = None
    ) -> None:
        """extent_blocks: the last extent may have fewer; None: there is one. `mapped`: the extents that have memory.
        min_blocks: how many blocks always have memory while awake; None: all."""
        assert total > 0
        self.total = total
        self.min_blocks = total if min_blocks is None else min_blocks
        self.version = 0  # grows when blocks are freed or move; until then no current page becomes stale
        self.stale_pages = 0  # pages that were freed when their block was no longer theirs
        self._extent_blocks = extent_blocks or total
        self._extents = -(-total // self._extent_blocks)
        self._mapped = set(mapped)
        self._kept_pages: Pages | None = None  # asleep: in the order of their blocks
        self._pages: Pages = np.arange(total, dtype=np.int64) + _TAG  # what each block is now; no page is 0
        self._secret = np.zeros(total, np.bool_)  # to be erased when it is freed
        self._unerased: list[int] = []
        self._free = self._blocks_of(self._mapped)[::-1]  # the last one is allocated first
        self.absent_blocks = total - len(self._free)
        assert self.mapped_blocks >= self.min_blocks, "fewer blocks are mapped than always have to be"

    @property
    def asleep(self) -> bool:
        return self._kept_pages is not None

    @property
    def mapped_blocks(self) -> int:
        """Blocks that have memory."""
        return self.blocks_in(self._mapped)

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def allocate(self, count: int, secret: bool = False) -> list[int]:
        """`count` pages that are the caller's until it frees them; the most recently freed blocks first. `secret`: they
        are erased then."""
        assert 0 <= count <= len(self._free), f"{count} blocks requested, {len(self._free)} free"
        remaining = len(self._free) - count
        blocks = self._free[remaining:][::-1]
        del self._free[remaining:]
        if secret:
            self._secret[blocks] = True
        pages: list[int] = self._pages[blocks].tolist()
        return pages

    def free(self, pages: Items[int]) -> None:
        """Frees allocated blocks. A stale page frees nothing, and is counted."""
        if not pages:
            return
        blocks = self._current(pages)
        self.version += 1
        self._pages[blocks] += _TAG
        if self._kept_pages is None:
            self._free += blocks.tolist()
        else:
            self.absent_blocks += len(blocks)
        secret = self._secret[blocks]
        if secret.any():
            self._unerased += blocks[secret].tolist()
            self._secret[blocks] = False

    def mark_secret(self, pages: Items[int]) -> None:
        """Has these pages erased when they are freed, however they were allocated."""
        if pages:
            self._secret[self._current(pages)] = True

    def take_unerased(self) -> list[int]:
        """The blocks to be erased now, before a step is launched and before they lose their memory; they count as
        erased from then on. Asleep these are blocks as `sleep` returned them: their contents are erased where they
        are."""
        blocks, self._unerased = self._unerased, []
        return list(dict.fromkeys(blocks))

    def are_stale(self, pages_N: Pages) -> NDArray[np.bool_]:
        """Which of these pages name a block that was freed or moved since. About 3 ns each."""
        stale_N: NDArray[np.bool_] = self._pages[pages_N & _BLOCK] != pages_N
        return stale_N

    def stale_runs(self, runs: list[Pages]) -> NDArray[np.bool_]:
        """Which of these runs of pages have a stale one."""
        stale = self.are_stale(np.concatenate(runs))
        if not stale.any():
            return np.zeros(len(runs), np.bool_)
        ends = np.cumsum([len(part) for part in runs])
        return np.array([part.any() for part in np.split(stale, ends[:-1])])

    # Extents

    def blocks_in(self, extents: Iterable[int]) -> int:
        """How many blocks these extents have."""
        short = self._extents * self._extent_blocks - self.total
        count = list(extents)
        return len(count) * self._extent_blocks - short * (self._extents - 1 in count)

    def extents_to_grow(self, count: int) -> list[int]:
        """Up to so many extents that have no memory, to be mapped next: the lowest."""
        return [extent for extent in range(self._extents) if extent not in self._mapped][:count]

    def grow(self, extents: Items[int]) -> None:
        """Adds the blocks of newly mapped extents, to be allocated after those that were free before."""
        assert self._kept_pages is None, "asleep"
        assert self._mapped.isdisjoint(extents), "an extent is mapped twice"
        self._mapped.update(extents)
        more = self._blocks_of(extents)
        self._free[:0] = more[::-1]
        self.absent_blocks -= len(more)

    def cheapest_extents(self, count: int) -> list[int]:
        """Up to so many extents in which the fewest blocks are held, and of those the highest, the best first;
        `min_blocks` blocks stay."""
        counts = np.add.reduceat(self._in_use(), range(0, self.total, self._extent_blocks), dtype=np.int64).tolist()
        chosen = sorted(self._mapped, key=lambda extent: (counts[extent], -extent))[:count]
        while self.mapped_blocks - self.blocks_in(chosen) < self.min_blocks:
            chosen.pop()
        return chosen

    def shrink(self, extents: Items[int]) -> tuple[ShrinkPlan, dict[int, int]]:
        """Takes these extents out of use. What is held in them moves to the lowest blocks that are free elsewhere, of
        which there are enough; also returns the pages that changed."""
        in_use_B, leaving = self._in_use(), self._blocks_of(extents)
        sources = [block for block in leaving if in_use_B[block]]
        removed = set(leaving)
        staying = [block for block in self._free if block not in removed]
        targets = sorted(staying)[: len(sources)]
        assert len(targets) == len(sources), "held blocks fit nowhere else"
        self._mapped.difference_update(extents)
        occupied = set(targets)
        self._free = [block for block in staying if block not in occupied]
        self.absent_blocks += len(leaving)
        secret = [block for block in sources if self._secret[block]]
        return ShrinkPlan(list(extents), sources, targets, secret), self._move(sources, targets)

    def sleep(self) -> list[int]:
        """Takes all extents out of use. Returns the blocks that are held, whose contents are kept, in their order."""
        assert self._kept_pages is None, "asleep already"
        blocks_N = self._in_use().nonzero()[0]
        self._kept_pages = self._pages[blocks_N]
        self._mapped, self._free = set(), []
        self.absent_blocks = self.total - len(blocks_N)
        blocks: list[int] = blocks_N.tolist()
        return blocks

    def plan_wake(self, extents: int) -> WakeExtents:
        """Plans to wake with so many extents, or more where `min_blocks` or the kept blocks need them: the lowest, and
        in them the lowest blocks. Kept blocks that were freed meanwhile get a block too. Changes nothing; what
        `take_unerased` returns is erased before, and the plan holds until a kept block is freed."""
        assert self._kept_pages is not None, "awake"
        assert not self._unerased, "erase first what was freed asleep: blocks have other contents afterwards"
        needed = max(self.min_blocks, len(self._kept_pages))
        count = min(max(extents, -(-needed // self._extent_blocks)), self._extents)
        return WakeExtents(list(range(count)), list(range(len(self._kept_pages))))

    def finish_wake(self, plan: WakeExtents) -> dict[int, int]:
        """Wakes as planned; returns the pages that changed. A sleep that failed is taken back by a plan of the extents
        that had memory before, and the blocks that `sleep` returned."""
        assert self._kept_pages is not None, "awake"
        current = ~self.are_stale(self._kept_pages)
        targets = np.array(plan.restore, np.int64)[current].tolist()
        sources = (self._kept_pages & _BLOCK)[current].tolist()
        self._kept_pages, self._mapped = None, set(plan.extents)
        occupied, blocks = set(targets), self._blocks_of(plan.extents)
        assert occupied <= set(blocks)
        assert len(blocks) >= self.min_blocks
        self._free = [block for block in blocks[::-1] if block not in occupied]
        self.absent_blocks = self.total - len(blocks)
        return self._move(sources, targets)

    def secret_pages(self) -> set[int]:
        """The pages that are to be erased when they are freed."""
        return set(self._pages[self._secret].tolist())

    def secret_of(self, pages: Items[int]) -> set[int]:
        """Which of these pages, which are not stale, are to be erased when they are freed."""
        secret = self._secret[np.array(pages, np.int64) & _BLOCK]
        return {page for page, is_secret in zip(pages, secret.tolist(), strict=True) if is_secret}

    # Inside

    def _blocks_of(self, extents: Iterable[int]) -> list[int]:
        """Their blocks, ascending."""
        size, total = self._extent_blocks, self.total
        return [block for extent in sorted(extents) for block in range(extent * size, min((extent + 1) * size, total))]

    def _in_use(self) -> NDArray[np.bool_]:
        """Whether each block has memory and is not free; only while awake."""
        in_use_B = np.zeros(self.total, np.bool_)
        in_use_B[self._blocks_of(self._mapped)] = True
        in_use_B[self._free] = False
        return in_use_B

    def _move(self, sources: list[int], targets: list[int]) -> dict[int, int]:
        """Notes that contents moved from one block to the other; returns the new name of each page."""
        self.version += 1
        old: list[int] = self._pages[sources].tolist()
        secret = self._secret[sources]
        self._pages[sources] += _TAG
        self._secret[sources] = False
        self._secret[targets] = secret
        return dict(zip(old, self._pages[targets].tolist(), strict=True))

    def _current(self, pages: Items[int]) -> NDArray[np.int64]:
        """The blocks of those pages that are not stale."""
        pages_N = np.array(pages, np.int64)
        assert len(set(pages)) == len(pages), "a block is freed twice"
        stale_N = self.are_stale(pages_N)
        if stale_N.any():
            self.stale_pages += int(stale_N.sum())
            pages_N = pages_N[~stale_N]
        return pages_N & _BLOCK

    def check(self, held_pages: Iterable[int]) -> None:
        """Raises AssertionError where a block is free twice, or free and held by these pages, or without memory, or
        where a held page is stale."""
        pages = list(held_pages)
        assert not self.stale_pages, "a block is freed twice, or was held for too long"
        assert not self.are_stale(np.array(pages, np.int64)).any(), "a held page was freed"
        assert len(set(self._free)) == len(self._free)
        assert len(set(pages)) == len(pages), "a block has two owners"
        assert len(self._free) + len(pages) + self.absent_blocks == self.total, "a block is lost"
        if self._kept_pages is None:
            mapped = set(self._blocks_of(self._mapped))
            assert mapped == {*self._free, *blocks_of(pages)}, "a block without memory is free, or held"
            assert len(mapped) >= self.min_blocks
        else:
            assert not self._free
            assert not self._mapped
            assert set(pages) <= set(self._kept_pages.tolist()), "a block that was not kept is held"
        assert not self._secret[self._free].any(), "a free block is still to be erased when it is freed"


def blocks_of(pages: Items[int]) -> list[int]:
    """The blocks that these pages are."""
    return [page & _BLOCK for page in pages]
