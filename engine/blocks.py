"""The block account: which blocks of the KV pool are free, and which have to be erased. It does not know what is in
them, nor who has the others.

A **page** is a block as it was taken once: the block in its low 32 bits, its tag in those above. A block's tag changes
whenever it is freed, so that a page says for ever whether who holds it may still read the block.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Final

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int64]
_TAG: Final = 1 << 32
_BLOCK: Final = _TAG - 1


class Blocks:
    """Blocks 0 … total−1. At any time each is free here, cached in the prefix tree, or private to one sequence.

    A block that has to be erased is free like the others; whoever launches steps asks `unerased` before each of them,
    so that nobody reads or writes it before.
    """

    def __init__(self, total: int) -> None:
        assert total > 0
        self.total = total
        self.frees = 0  # how often blocks were freed; until it grows, no page that was current is outdated
        self.stale = 0  # pages that came back when their block was no longer theirs
        self._free = list(range(total - 1, -1, -1))
        self._pages: Pages = np.arange(total, dtype=np.int64) + _TAG  # what each block is now; no page is 0
        self._secret = np.zeros(total, np.bool_)  # to be erased when it is freed
        self._unerased: list[int] = []

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
        self._free += blocks.tolist()
        secret = self._secret[blocks]
        if secret.any():
            self._unerased += blocks[secret].tolist()
            self._secret[blocks] = False

    def hide(self, pages: Items[int]) -> None:
        """Pages that have to be erased when they are freed, whatever was said when they were taken."""
        if pages:
            self._secret[self._current(pages)] = True

    def unerased(self) -> list[int]:
        """The blocks to be erased now, before a step is launched; they count as erased from then on."""
        blocks, self._unerased = self._unerased, []
        return list(dict.fromkeys(blocks))

    def outdated(self, pages_N: Pages) -> NDArray[np.bool_]:
        """Which of these pages are no longer what they were when they were taken. About 3 ns each."""
        outdated: NDArray[np.bool_] = self._pages[pages_N & _BLOCK] != pages_N
        return outdated

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
        """Raises AssertionError where a block is free twice, or free and held, by these pages, or the hold is over."""
        held = list(held)
        assert not self.stale, "a block is freed twice, or was held for too long"
        assert not self.outdated(np.array(held, np.int64)).any(), "what is held was freed"
        assert len(set(self._free)) == len(self._free)
        assert len(set(held)) == len(held) == self.total - len(self._free), "a block is lost, or has two owners"
        assert not self._secret[self._free].any(), "a free block is still to be erased when it is freed"


def blocks_of(pages: Items[int]) -> list[int]:
    """The blocks that these pages are."""
    return [page & _BLOCK for page in pages]
