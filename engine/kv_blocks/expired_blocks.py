"""Cached blocks that are found no more, because an epoch rose or their time is over: they are freed, and erased before
anybody else has them, in every group. It does not know who runs, nor what is evicted for want of space."""

from collections.abc import Sequence as Items
from typing import Final

from engine.kv_blocks.block_pool import BlockPool
from engine.kv_blocks.windowed_group import WindowedGroup
from engine.sequences.sequence import Sequence
from prefixcache.lease import Lease
from prefixcache.radix import NamespaceRoot
from prefixcache.tree import PrefixTree

SWEEP_MAX: Final = 128  # blocks given back beside one step: erasing so many takes a fraction of it


class ExpiredBlocks:
    """What of a tree's blocks, and of those beside them, is found no more.

    Blocks of old epochs are marked, once, so that they are erased wherever they are freed: a windowed group may evict
    its own before the tree's. What has been there for too long is read by nobody, and swept before anything of it can
    be evicted.
    """

    def __init__(self, tree: PrefixTree, pool: BlockPool, windowed: Items[WindowedGroup]) -> None:
        self._tree, self._pool, self._windowed = tree, pool, windowed
        self._marked: set[NamespaceRoot] = set()  # of old epochs

    def sweep(self) -> bool:
        """Frees some that nobody reads. Returns whether there may be more of them."""
        self.mark()
        pages = self._tree.sweep(SWEEP_MAX)
        for group in self._windowed:
            group.remove(pages, secret=True)
        self._pool.mark_secret(pages)
        self._pool.free(pages)
        return len(pages) == SWEEP_MAX

    def free_all(self) -> None:
        """Frees all that nobody reads."""
        while self.sweep():
            pass

    def mark(self) -> None:
        """Has blocks erased when they are freed whose epoch rose since the last time. Walks over these."""
        wiped = set(self._tree.wiped.roots)
        for root in wiped - self._marked:
            self._mark(root.all_blocks())
        self._marked = wiped

    def mark_held(self, sequence: Sequence) -> None:
        """Has what a sequence alone holds erased when it is freed, where its epoch rose while it ran: before it frees
        some of it, or puts it where nobody finds it."""
        if sequence.lease is not None and self._tree.share_of(sequence.lease) is self._tree.wiped:
            self._pool.mark_secret(sequence.private_pages())
            for group in self._windowed if sequence.window_tables else ():
                group.pool.mark_secret(group.private_pages(sequence))

    def before_cap(self, lease: Lease, more: int) -> None:
        """Frees all where the lease's account, with so many blocks more, may have to give some back under its cap:
        expired ones among them would not be erased."""
        share = self._tree.share_of(lease)
        if share.cap is not None and share.cached + more > share.cap:
            self.free_all()

    def _mark(self, pages: list[int]) -> None:
        self._pool.mark_secret(pages)
        for group in self._windowed:
            group.pool.mark_secret([*group.cached.beside(pages)])
