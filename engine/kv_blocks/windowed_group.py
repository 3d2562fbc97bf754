"""What sequences hold of the KV blocks of layers that see only near keys: what rows to come can see, and nothing before
that. It does not know who runs next, nor what the other layers hold.

A block is free, cached beside the tree's block of the same tokens (prefixcache/window_blocks.py), or private to one
sequence. What a sequence can see no more is given back as it goes on, so that a long context costs no more than a
window. A step in flight may still read what is given back: whatever writes there next is launched behind it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from itertools import chain

import numpy as np

from engine.kv_blocks.block_pool import BlockPool
from engine.sequences.sequence import Sequence, WindowTable
from engine.step.key_span import KeySpan
from prefixcache.window_blocks import WindowBlocks


class WindowedGroup:
    """The blocks of one windowed KV group, whose layers see `span`; `index` is its place in the `window_tables` of
    sequences.

    What a sequence holds of it below its `shared_blocks` is pinned beside the tree's blocks, the rest is its own.
    """

    def __init__(
        self, index: int, span: KeySpan, block_tokens: int, pool: BlockPool, clock: Callable[[], float]
    ) -> None:  # fmt: skip
        assert span.tokens is not None, "layers that see everything"
        self.index = index
        self.span = span
        self.pressed = 0  # as KVManager.take_pressed has it
        self.pool = pool
        self.cached = WindowBlocks(clock)
        self._block_tokens = block_tokens
        self._public: list[int] = []  # tree blocks beside which everything stays

    @property
    def available_blocks(self) -> int:
        """Blocks that can be had at once: free ones, and cached ones that nobody reads."""
        return self.pool.free_blocks + self.cached.unused

    def first_block(self, tokens: int) -> int:
        """The first block that the row at position `tokens` sees, or any row behind it."""
        return self.span.first(tokens) // self._block_tokens

    def usable(self, tree_blocks: Items[int]) -> int:
        """How many of these blocks of the tree a sequence can begin with."""
        return self.cached.usable(tree_blocks, lambda blocks: self.first_block(blocks * self._block_tokens))

    def fits(self, tokens: int, tree_blocks: Items[int], spare: int) -> bool:
        """Whether there are blocks for a sequence of so many tokens that begins with these blocks of the tree, as many
        as it may need at once, and `spare` more beside the cached ones that it begins with."""
        start = len(tree_blocks)
        seen = tree_blocks[self.first_block(start * self._block_tokens) :]
        held = self.span.held_blocks(tokens, self._block_tokens)
        needed = min(-(-tokens // self._block_tokens) - start, held - len(seen))
        lacking = needed + spare - self.available_blocks + self.cached.count_unused(seen)
        if lacking > 0:
            self.pressed = max(self.pressed, 1 + lacking)
        return lacking <= 0

    def begin(self, sequence: Sequence) -> None:
        """Pins what a sequence sees of the blocks that it begins with."""
        first = self.first_block(sequence.computed)
        pages = self.cached.pin(sequence.pages[first : sequence.shared_blocks].tolist())
        sequence.window_tables.append(WindowTable(first, np.array(pages, np.int64)))
        if sequence.terms.erase:
            self.pool.mark_secret(pages[max(0, sequence.public_blocks - first) :])

    def cover(self, sequence: Sequence, tokens: int, spare: int, sweep: Callable[[], bool]) -> int:
        """Takes blocks for the sequence's positions below `tokens`, as many as leave `spare` ones available. Returns
        how many tokens its blocks hold then, at most so many. `sweep` as for `free_up`."""
        table = sequence.window_tables[self.index]
        missing = -(-tokens // self._block_tokens) - table.end
        if missing > 0:
            count = max(0, min(missing, self.available_blocks - spare))
            self.pressed = max(self.pressed, int(count < missing))
            self.free_up(count, sweep)
            pages = np.array(self.pool.allocate(count, sequence.terms.erase), np.int64)
            table.pages = np.concatenate((table.pages, pages))
        return min(tokens, table.end * self._block_tokens)

    def cache(self, sequence: Sequence, first: int, last: int) -> None:
        """Puts its blocks first … last−1, which are full, beside the tree's. Where one is there already, the sequence
        reads that one from now on, and its own is freed."""
        table = sequence.window_tables[self.index]
        first = max(first, table.first)
        if first >= last:
            return
        own = table.pages[first - table.first : last - table.first].tolist()
        policy = sequence.retention
        pages = self.cached.add(policy.account, policy.share.floor, sequence.pages[first:last].tolist(), own)
        spare = [page for page, now in zip(own, pages, strict=True) if page != now]
        if not spare:
            return
        table.pages[first - table.first : last - table.first] = pages
        if sequence.terms.erase:
            self.pool.mark_secret(pages)
        self.pool.free(spare)

    def advance(self, sequence: Sequence) -> None:
        """Gives back what no row of the sequence sees that has yet to land."""
        self._drop_before(sequence, self.first_block(sequence.computed))

    def release(self, sequence: Sequence) -> None:
        """Gives back all that a sequence holds; cached blocks stay beside the tree."""
        if sequence.window_tables:
            self._drop_before(sequence, sequence.window_tables[self.index].end)

    def _drop_before(self, sequence: Sequence, end: int) -> None:
        table = sequence.window_tables[self.index]
        first = table.first
        if end <= first:
            return
        shared_end = max(first, min(end, sequence.shared_blocks))
        self.cached.unpin(sequence.pages[first:shared_end].tolist())
        self.pool.free(table.pages[shared_end - first : end - first].tolist())
        table.first, table.pages = end, table.pages[end - first :]

    def private_pages(self, sequence: Sequence) -> list[int]:
        """What a sequence holds that does not lie beside the tree's."""
        table = sequence.window_tables[self.index]
        shared_end = max(table.first, min(table.end, sequence.shared_blocks))
        pages: list[int] = table.pages[shared_end - table.first :].tolist()
        return pages

    def remove(self, tree_blocks: Items[int], secret: bool = False) -> None:
        """Frees what lies beside these blocks, which have left the tree; `secret`: to be erased."""
        pages = self.cached.remove(tree_blocks)
        if secret:
            self.pool.mark_secret(pages)
        self.pool.free(pages)

    def pin_all(self, tree_blocks: Items[int]) -> bool:
        """Pins what lies beside each of these blocks, for good. False where one is missing."""
        if next(self.cached.missing(tree_blocks), None) is not None:
            return False
        self.cached.pin(tree_blocks)
        self._public += tree_blocks
        return True

    def free_up(self, count: int, sweep: Callable[[], bool]) -> None:
        """Frees blocks until there are so many, at the cost of the cached ones. Only after asking `available_blocks`.
        `sweep` frees some of what is found no more, and returns whether there may be more of it: none of that is
        evicted here, where it would not be erased."""
        while self.pool.free_blocks < count and sweep():
            pass
        if self.pool.free_blocks < count:
            self.pressed = max(self.pressed, 1)
            self.pool.free(self.cached.evict(count - self.pool.free_blocks))

    def keep(self, max_blocks: int) -> None:
        """Frees what nobody reads but so many blocks, and all secrets."""
        secret = self.pool.secret_pages()
        self.pool.free(self.cached.remove([block for block, page in self.cached.unused_items() if page in secret]))
        self.pool.free(self.cached.evict_all_but(max_blocks))

    def rename_tree(self, renamed: Mapping[int, int]) -> None:
        """Renames blocks of the tree that moved."""
        self.cached.rename_tree(renamed)
        self._public = [renamed.get(block, block) for block in self._public]

    def rename(self, renamed: Mapping[int, int], holders: Iterable[Sequence]) -> None:
        """Renames pages of the group that moved, wherever they are named."""
        self.cached.rename(renamed)
        for sequence in holders:
            table = sequence.window_tables[self.index]
            pages = table.pages.tolist()
            if not renamed.keys().isdisjoint(pages):
                table.pages = np.array([renamed.get(page, page) for page in pages], np.int64)

    def check(self, holders: Iterable[Sequence], tree_blocks: set[int]) -> None:
        """Every block is free, cached or private to one holder, and holders hold what they see."""
        private: list[list[int]] = []
        pins = Counter(self._public)
        for sequence in holders:
            table = sequence.window_tables[self.index]
            shared_end = max(table.first, min(table.end, sequence.shared_blocks))
            private.append(self.private_pages(sequence))
            keys = sequence.pages[table.first : shared_end].tolist()
            assert list(self.cached.beside(keys)) == table.pages[: len(keys)].tolist()
            pins.update(keys)
            assert table.first <= self.first_block(sequence.computed), "a block was dropped that rows see"
            assert table.end * self._block_tokens >= sequence.launched, "a row has no slot"
        cached = self.cached.check(tree_blocks, pins)
        self.pool.check([*cached, *chain.from_iterable(private)])


def usable_behind(public: list[int], groups: Items[WindowedGroup]) -> Callable[[list[int]], int]:
    """How many of the blocks that the tree has behind these public ones a sequence can begin with."""

    def usable(blocks: list[int]) -> int:
        pages, count = [*public, *blocks], -1
        while count != len(pages):
            count = len(pages)
            for group in groups:
                del pages[group.usable(pages) :]
        assert count >= len(public), "what is public is not all there"
        return count - len(public)

    return usable
