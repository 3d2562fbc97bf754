"""Cached blocks that are found no more, because an epoch rose or their time is over: they are freed, and erased before
anybody else has them, in every group. It does not know who runs, nor what is evicted for want of space."""

from collections.abc import Sequence as Items
from typing import Final

from engine.kv_blocks.block_pool import BlockPool
from engine.kv_blocks.windowed_group import WindowedGroup
from prefixcache.tree import PrefixTree

SWEEP_MAX: Final = 128  # blocks given back beside one step: erasing so many takes a fraction of it


class LostBlocks:
    """What of a tree's blocks, and of those beside them, is found no more."""

    def __init__(self, tree: PrefixTree, pool: BlockPool, windowed: Items[WindowedGroup]) -> None:
        self._tree, self._pool, self._windowed = tree, pool, windowed
        self._marked: list[object] = []  # what was inserted, and which roots were wiped, when blocks were marked last

    def sweep(self) -> bool:
        """Frees some that nobody reads. Returns whether there may be more of them."""
        pages = self._tree.sweep(SWEEP_MAX)
        for group in self._windowed:
            group.remove(pages, secret=True)
        self._pool.mark_secret(pages)
        self._pool.free(pages)
        return len(pages) == SWEEP_MAX

    def forget(self) -> None:
        """Frees all that nobody reads, and has the others erased wherever they are freed or moved from: to be called
        before a windowed group evicts, which may have them go before the tree's, and before memory is given away."""
        while self.sweep():
            pass
        roots = self._tree.wiped.roots
        marked = [self._tree.counters["inserted_blocks"], *roots]
        if roots and marked != self._marked:
            self._marked, pages = marked, self._tree.wiped.blocks()
            self._pool.mark_secret(pages)
            for group in self._windowed:
                group.pool.mark_secret([*group.cached.beside(pages)])
