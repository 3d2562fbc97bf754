"""The block account: which blocks of the KV pool are free, which have memory, and which have to be erased. It does not
know what is in them, nor who has the others.

A **page** is a block as it was taken once: the block in its low 32 bits, its tag in those above. A block's tag changes
whenever it is freed, or its contents move to another block, so that a page says for ever whether who holds it may still
read the block.

An **extent** is a run of blocks that gets memory or gives it back as a whole. Where contents move, every page that
changes is told as old → new; there is nothing else that could be outdated.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int64]
_TAG: Final = 1 << 32
_BLOCK: Final = _TAG - 1


@dataclass(frozen=True, slots=True)
class WakeExtents:
    """The extents that get memory, and the blocks into which what was kept goes, in the order in which it was kept."""

    extents: list[int]
    restored: list[int]


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

    A block that has to be erased is free like the others; whoever launches steps asks `unerased` before each of them,
    so that nobody reads or writes it before.

    Asleep no extent has memory. What is kept stays cached under the pages that it had, its contents are elsewhere, and
    a block that is freed is absent.
    """

    def __init__(
        self, total: int, extent_blocks: int | None = None, mapped: Items[int] = (0,), least: int | None = None
    ) -> None:
        """Extents have so many blocks, the last one maybe fewer; None: there is one. Those in `mapped` have memory.
        Awake never fewer than `least` blocks have any; None: all."""
        assert total > 0
        self.total = total
        self.least = total if least is None else least
        self.frees = 0  # how often blocks were freed; until it grows, no page that was current is outdated
        self.stale = 0  # pages that came back when their block was no longer theirs
        self._extent_blocks = extent_blocks or total
        self._extents = -(-total // self._extent_blocks)
        self._mapped = set(mapped)
        self._kept: Pages | None = None  # asleep: what was kept, in its order
        self._pages: Pages = np.arange(total, dtype=np.int64) + _TAG  # what each block is now; no page is 0
        self._secret = np.zeros(total, np.bool_)  # to be erased when it is freed
        self._unerased: list[int] = []
        self._free = self._blocks_of(self._mapped)[::-1]  # the last one is taken first
        self.absent = total - len(self._free)
        assert self.mapped >= self.least, "less is mapped than always has to be"

    @property
    def asleep(self) -> bool:
        return self._kept is not None

    @property
    def mapped(self) -> int:
        """Blocks that have memory."""
        return self.size(self._mapped)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int, secret: bool = False) -> list[int]:
        """`count` pages that are the caller's until it gives them back; the most recently freed blocks first. What is
        `secret` is erased then."""
        assert 0 <= count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        kept = len(self._free) - count
        taken = self._free[kept:][::-1]
        del self._free[kept:]
        if secret:
            self._secret[taken] = True
        pages: list[int] = self._pages[taken].tolist()
        return pages

    def give(self, pages: Items[int]) -> None:
        """Frees blocks that were taken. One that is somebody else's meanwhile stays theirs, and is counted."""
        if not pages:
            return
        blocks = self._current(pages)
        self.frees += 1
        self._pages[blocks] += _TAG
        if self._kept is None:
            self._free += blocks.tolist()
        else:
            self.absent += len(blocks)
        secret = self._secret[blocks]
        if secret.any():
            self._unerased += blocks[secret].tolist()
            self._secret[blocks] = False

    def hide(self, pages: Items[int]) -> None:
        """Pages that have to be erased when they are freed, whatever was said when they were taken."""
        if pages:
            self._secret[self._current(pages)] = True

    def unerased(self) -> list[int]:
        """The blocks to be erased now, before a step is launched and before they lose their memory; they count as
        erased from then on. Asleep these are blocks as `sleep` gave them: their contents are erased where they are."""
        blocks, self._unerased = self._unerased, []
        return list(dict.fromkeys(blocks))

    def outdated(self, pages_N: Pages) -> NDArray[np.bool_]:
        """Which of these pages are no longer what they were when they were taken. About 3 ns each."""
        outdated: NDArray[np.bool_] = self._pages[pages_N & _BLOCK] != pages_N
        return outdated

    # Extents

    def size(self, extents: Iterable[int]) -> int:
        """How many blocks they have."""
        short = self._extents * self._extent_blocks - self.total
        count = list(extents)
        return len(count) * self._extent_blocks - short * (self._extents - 1 in count)

    def growing(self, count: int) -> list[int]:
        """Up to so many extents that have no memory, to be mapped next: the lowest."""
        return [extent for extent in range(self._extents) if extent not in self._mapped][:count]

    def grow(self, extents: Items[int]) -> None:
        """They have memory from now on. Their blocks are taken after those that were free before."""
        assert self._kept is None, "asleep"
        assert self._mapped.isdisjoint(extents), "an extent is mapped twice"
        self._mapped.update(extents)
        more = self._blocks_of(extents)
        self._free[:0] = more[::-1]
        self.absent -= len(more)

    def cheapest(self, count: int) -> list[int]:
        """Up to so many extents in which the fewest blocks are held, and of those the highest, the best first; `least`
        blocks stay."""
        held = np.add.reduceat(self._held(), range(0, self.total, self._extent_blocks), dtype=np.int64).tolist()
        chosen = sorted(self._mapped, key=lambda extent: (held[extent], -extent))[:count]
        while self.mapped - self.size(chosen) < self.least:
            chosen.pop()
        return chosen

    def shrink(self, extents: Items[int]) -> tuple[ShrinkPlan, dict[int, int]]:
        """They have no memory from now on. What is held in them moves to the lowest blocks that are free elsewhere, of
        which there are enough; also gives the pages that changed."""
        held, leaving = self._held(), self._blocks_of(extents)
        sources = [block for block in leaving if held[block]]
        gone = set(leaving)
        staying = [block for block in self._free if block not in gone]
        targets = sorted(staying)[: len(sources)]
        assert len(targets) == len(sources), "what is held fits nowhere else"
        self._mapped.difference_update(extents)
        taken = set(targets)
        self._free = [block for block in staying if block not in taken]
        self.absent += len(leaving)
        secret = [block for block in sources if self._secret[block]]
        return ShrinkPlan(list(extents), sources, targets, secret), self._move(sources, targets)

    def sleep(self) -> list[int]:
        """No extent has memory from now on. Gives the blocks that are held, whose contents are kept, in their order."""
        assert self._kept is None, "asleep already"
        kept = self._held().nonzero()[0]
        self._kept = self._pages[kept]
        self._mapped, self._free = set(), []
        self.absent = self.total - len(kept)
        blocks: list[int] = kept.tolist()
        return blocks

    def waking(self, extents: int) -> WakeExtents:
        """At least so many extents, and enough for `least` blocks and for what was kept: the lowest, and in them the
        lowest blocks. What was freed meanwhile is given a block too."""
        assert self._kept is not None, "awake"
        assert not self._unerased, "erase first what was freed asleep: blocks have other contents afterwards"
        needed = max(self.least, len(self._kept))
        count = min(max(extents, -(-needed // self._extent_blocks)), self._extents)
        return WakeExtents(list(range(count)), list(range(len(self._kept))))

    def woken(self, waking: WakeExtents) -> dict[int, int]:
        """It is awake, as planned. Gives the pages that changed. With the extents that had memory before, and what
        `sleep` gave for `restored`, a sleep that came to nothing is taken back."""
        assert self._kept is not None, "awake"
        current = ~self.outdated(self._kept)
        targets = np.array(waking.restored, np.int64)[current].tolist()
        sources = (self._kept & _BLOCK)[current].tolist()
        self._kept, self._mapped = None, set(waking.extents)
        taken, blocks = set(targets), self._blocks_of(waking.extents)
        assert taken <= set(blocks)
        assert len(blocks) >= self.least
        self._free = [block for block in blocks[::-1] if block not in taken]
        self.absent = self.total - len(blocks)
        return self._move(sources, targets)

    def secrets(self) -> set[int]:
        """The pages that are to be erased when they are freed."""
        return set(self._pages[self._secret].tolist())

    # Inside

    def _blocks_of(self, extents: Iterable[int]) -> list[int]:
        """Their blocks, ascending."""
        size, total = self._extent_blocks, self.total
        return [block for extent in sorted(extents) for block in range(extent * size, min((extent + 1) * size, total))]

    def _held(self) -> NDArray[np.bool_]:
        """Of each block, awake, whether it has memory and is not free."""
        held = np.zeros(self.total, np.bool_)
        held[self._blocks_of(self._mapped)] = True
        held[self._free] = False
        return held

    def _move(self, sources: list[int], targets: list[int]) -> dict[int, int]:
        """What was in the one is in the other; what each page is called from now on."""
        self.frees += 1
        old: list[int] = self._pages[sources].tolist()
        secret = self._secret[sources]
        self._pages[sources] += _TAG
        self._secret[sources] = False
        self._secret[targets] = secret
        return dict(zip(old, self._pages[targets].tolist(), strict=True))

    def _current(self, pages: Items[int]) -> NDArray[np.int64]:
        """The blocks of those pages that still are what they say."""
        pages_N = np.array(pages, np.int64)
        assert len(set(pages)) == len(pages), "a block is freed twice"
        outdated = self.outdated(pages_N)
        if outdated.any():
            self.stale += int(outdated.sum())
            pages_N = pages_N[~outdated]
        return pages_N & _BLOCK

    def check(self, held: Iterable[int]) -> None:
        """Raises AssertionError where a block is free twice, or free and held, by these pages, or the hold is over, or
        where one has no memory."""
        held = list(held)
        assert not self.stale, "a block is freed twice, or was held for too long"
        assert not self.outdated(np.array(held, np.int64)).any(), "what is held was freed"
        assert len(set(self._free)) == len(self._free)
        assert len(set(held)) == len(held), "a block has two owners"
        assert len(self._free) + len(held) + self.absent == self.total, "a block is lost"
        if self._kept is None:
            there = set(self._blocks_of(self._mapped))
            assert there == {*self._free, *blocks_of(held)}, "a block without memory is free, or held"
            assert len(there) >= self.least
        else:
            assert not self._free
            assert not self._mapped
            assert set(held) <= set(self._kept.tolist()), "what was not kept is held"
        assert not self._secret[self._free].any(), "a free block is still to be erased when it is freed"


def blocks_of(pages: Items[int]) -> list[int]:
    """The blocks that these pages are."""
    return [page & _BLOCK for page in pages]
