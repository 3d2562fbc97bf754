"""engine/kv_blocks/expired_blocks.py: what is found no more is erased wherever it is freed, and at no other's cost."""

from array import array

import numpy as np

from engine.kv_blocks.block_pool import BlockPool, blocks_of
from engine.kv_blocks.expired_blocks import SWEEP_MAX, ExpiredBlocks
from engine.kv_blocks.windowed_group import WindowedGroup
from engine.protocol.frames import Submit
from engine.protocol.types import SamplingParams, Scope
from engine.sequences.sequence import Sequence, WindowTable
from engine.sequences.validation import RequestValidator
from engine.step.key_span import KeySpan
from prefixcache.lease import Lease
from prefixcache.namespace import CacheShare, Namespace, RetentionPolicy
from prefixcache.tree import PrefixTree

SIZE = 4
SCOPE = b"s" * 16
ANN, BOB = b"a" * 16, b"b" * 16
DOOR = RequestValidator("r", "kv", SIZE, 1000, 1000, frozenset())


class Cache:
    """A tree with a window beside it, and what of them is found no more."""

    def __init__(self, blocks: int = 100, window_blocks: int = 4) -> None:
        self.now_s = 0.0
        self.tree = PrefixTree(blocks, SIZE, lambda: self.now_s)
        self.pool, self.window_pool = BlockPool(blocks), BlockPool(window_blocks)
        self.group = WindowedGroup(0, KeySpan(window=8), SIZE, self.window_pool, lambda: self.now_s)
        self.expired = ExpiredBlocks(self.tree, self.pool, [self.group])

    def begin(self, policy: RetentionPolicy) -> Lease:
        return self.tree.match(Namespace("m", "", "t", "k", SIZE, 1, SCOPE, 0), array("I"), policy)

    def insert(self, lease: Lease, tokens: range, beside: int = 0) -> tuple[Lease, list[int], list[int]]:
        """Puts full blocks into the tree, and so many of a window beside the last of them, as a sequence does that
        reads none of the latter any more. Returns what is freed, and the window's blocks."""
        pages, window_pages = self.pool.allocate(len(tokens) // SIZE), self.window_pool.allocate(beside)
        self.expired.mark_held(self.holder(lease, pages, window_pages))
        self.expired.before_cap(lease, len(pages))
        lease, freed = self.tree.insert(lease, array("I", tokens), pages)
        if beside:
            self.group.cached.add(ANN, 0, lease.blocks[-beside:], window_pages)
            self.group.cached.unpin(lease.blocks[-beside:])
        return lease, freed, blocks_of(window_pages)

    def holder(self, lease: Lease, pages: list[int], window_pages: list[int]) -> Sequence:
        """A sequence that has these blocks behind those of its lease."""
        (sequence,) = DOOR.sequences(Submit(1, bytes(4 * SIZE), Scope(), SamplingParams(), 1), owner=1, now_s=0.0)
        sequence.lease, sequence.shared_blocks = lease, len(lease.blocks)
        held = [*lease.blocks, *pages]
        sequence.pages, sequence.block_count = np.array(held, np.int64), len(held)
        sequence.window_tables = [WindowTable(len(lease.blocks), np.array(window_pages, np.int64))]
        return sequence


def test_what_lies_beside_purged_blocks_is_erased_also_where_another_had_inserted_the_same() -> None:
    cache = Cache()
    first, second = cache.begin(RetentionPolicy(ANN)), cache.begin(RetentionPolicy(ANN))
    cache.tree.raise_epochs({SCOPE: 1})
    for lease in (first, second):
        _, _, beside = cache.insert(lease, range(SIZE), beside=1)
        cache.group.free_up(4, cache.expired.sweep)
        assert cache.window_pool.take_unerased() == beside


def test_what_a_cap_takes_of_expired_blocks_is_erased_whoever_releases_them() -> None:
    """The scope's blocks count for Ann, who has a cap; Bob's sequence in it has none."""
    cache = Cache()
    lease, _, _ = cache.insert(cache.begin(RetentionPolicy(ANN, CacheShare(0, 2), 10.0)), range(2 * SIZE))
    old = blocks_of(lease.blocks)
    cache.tree.release(lease)
    cache.now_s = 11.0
    _, freed, _ = cache.insert(cache.begin(RetentionPolicy(BOB, CacheShare(0, None), 10.0)), range(50, 50 + 2 * SIZE))
    cache.pool.free(freed)
    assert sorted(cache.pool.take_unerased()) == sorted(old)


def test_a_purge_costs_whoever_needs_a_block_no_more_than_that_takes() -> None:
    count = 5 * SWEEP_MAX
    cache = Cache(blocks=2 * count, window_blocks=2)
    lease, _, beside = cache.insert(cache.begin(RetentionPolicy(ANN)), range(count * SIZE), beside=1)
    cache.tree.release(lease)
    cache.tree.raise_epochs({SCOPE: 1})
    cache.group.free_up(1, cache.expired.sweep)
    assert not cache.pool.take_unerased(), "there was room without it"
    cache.group.free_up(2, cache.expired.sweep)
    assert cache.window_pool.take_unerased() == beside
    assert len(cache.pool.take_unerased()) == SWEEP_MAX


def test_what_is_inserted_into_a_purged_namespace_is_erased_too() -> None:
    cache = Cache()
    lease, _, _ = cache.insert(cache.begin(RetentionPolicy(ANN)), range(8 * SIZE))
    cache.tree.raise_epochs({SCOPE: 1})
    cache.expired.sweep()
    assert cache.pool.secret_of(lease.blocks) == set(lease.blocks)
    lease, _, _ = cache.insert(lease, range(8 * SIZE, 9 * SIZE))
    assert len(lease.blocks) == 9
    assert cache.pool.secret_of(lease.blocks) == set(lease.blocks)


def test_what_a_sequence_alone_holds_is_erased_once_its_epoch_is_over() -> None:
    cache = Cache()
    lease, _, _ = cache.insert(cache.begin(RetentionPolicy(ANN)), range(SIZE))
    pages, window_pages = cache.pool.allocate(2), cache.window_pool.allocate(1)
    holder = cache.holder(lease, pages, window_pages)
    cache.expired.mark_held(holder)
    assert not cache.pool.secret_of(pages), "it is found"
    cache.tree.raise_epochs({SCOPE: 1})
    cache.expired.mark_held(holder)
    cache.pool.free(pages)
    cache.window_pool.free(window_pages)
    assert sorted(cache.pool.take_unerased()) == sorted(blocks_of(pages))
    assert cache.window_pool.take_unerased() == blocks_of(window_pages)
