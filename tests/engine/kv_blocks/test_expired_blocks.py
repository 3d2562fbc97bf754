"""engine/kv_blocks/expired_blocks.py: what is found no more is erased wherever it is freed, and at no other's cost."""

from array import array

from engine.kv_blocks.block_pool import BlockPool, blocks_of
from engine.kv_blocks.expired_blocks import SWEEP_MAX, ExpiredBlocks
from engine.kv_blocks.windowed_group import WindowedGroup
from engine.step.key_span import KeySpan
from prefixcache.lease import Lease
from prefixcache.namespace import CacheShare, Namespace, RetentionPolicy
from prefixcache.tree import PrefixTree

SIZE = 4
SCOPE = b"s" * 16
ANN, BOB = b"a" * 16, b"b" * 16


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

    def insert(self, lease: Lease, tokens: range) -> tuple[Lease, list[int]]:
        """Puts full blocks into the tree, as a sequence does. Returns what is freed."""
        pages = self.pool.allocate(len(tokens) // SIZE)
        self.expired.before_cap(lease, len(pages))
        lease, freed = self.tree.insert(lease, array("I", tokens), pages)
        self.expired.inserted(lease, len(pages))
        return lease, freed

    def put_beside(self, lease: Lease) -> list[int]:
        """A window's block beside the lease's last one, which nobody reads. Returns its number."""
        pages = self.window_pool.allocate(1)
        self.group.cached.add(ANN, 0, lease.blocks[-1:], pages)
        self.expired.inserted(lease, 1)
        self.group.cached.unpin(lease.blocks[-1:])
        return blocks_of(pages)


def test_what_lies_beside_purged_blocks_is_erased_also_where_another_had_inserted_the_same() -> None:
    cache = Cache()
    first, second = cache.begin(RetentionPolicy(ANN)), cache.begin(RetentionPolicy(ANN))
    cache.tree.raise_epochs({SCOPE: 1})
    for lease in (first, second):
        lease, _ = cache.insert(lease, range(SIZE))
        beside = cache.put_beside(lease)
        cache.group.free_up(4, cache.expired.sweep)
        assert cache.window_pool.take_unerased() == beside


def test_what_a_cap_takes_of_expired_blocks_is_erased_whoever_releases_them() -> None:
    """The scope's blocks count for Ann, who has a cap; Bob's sequence in it has none."""
    cache = Cache()
    lease, _ = cache.insert(cache.begin(RetentionPolicy(ANN, CacheShare(0, 2), 10.0)), range(2 * SIZE))
    old = blocks_of(lease.blocks)
    cache.tree.release(lease)
    cache.now_s = 11.0
    _, freed = cache.insert(cache.begin(RetentionPolicy(BOB, CacheShare(0, None), 10.0)), range(50, 50 + 2 * SIZE))
    cache.pool.free(freed)
    assert sorted(cache.pool.take_unerased()) == sorted(old)


def test_a_purge_costs_whoever_needs_a_block_no_more_than_that_takes() -> None:
    count = 5 * SWEEP_MAX
    cache = Cache(blocks=2 * count, window_blocks=2)
    lease, _ = cache.insert(cache.begin(RetentionPolicy(ANN)), range(count * SIZE))
    beside = cache.put_beside(lease)
    cache.tree.release(lease)
    cache.tree.raise_epochs({SCOPE: 1})
    cache.group.free_up(1, cache.expired.sweep)
    assert not cache.pool.take_unerased(), "there was room without it"
    cache.group.free_up(2, cache.expired.sweep)
    assert cache.window_pool.take_unerased() == beside
    assert len(cache.pool.take_unerased()) == SWEEP_MAX


def test_what_is_inserted_into_a_purged_namespace_is_erased_too() -> None:
    cache = Cache()
    lease, _ = cache.insert(cache.begin(RetentionPolicy(ANN)), range(8 * SIZE))
    cache.tree.raise_epochs({SCOPE: 1})
    cache.expired.sweep()
    assert cache.pool.secret_of(lease.blocks) == set(lease.blocks)
    lease, _ = cache.insert(lease, range(8 * SIZE, 9 * SIZE))
    assert len(lease.blocks) == 9
    assert cache.pool.secret_of(lease.blocks) == set(lease.blocks)
