"""What the radix tree promises, one promise a test; test_history.py holds it against a brute-force model."""

import sys
from array import array
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from engine.kv_blocks.block_pool import BlockPool
from prefixcache import tree as module
from prefixcache.lease import Lease
from prefixcache.namespace import CacheShare, Namespace, RetentionPolicy
from tests.prefixcache.history import cached_of

SIZE = 4
OPEN = CacheShare()


class Tree(module.PrefixTree):
    """Every scope is an account of its own where a test does not say otherwise. Its clock is `seconds`."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        super().__init__(blocks, block_tokens, lambda: self.seconds)
        self.seconds = 0.0
        self.shares: dict[bytes, CacheShare] = {}
        self.keep_s: float | None = None

    def match(self, namespace: Namespace, tokens: "array[int]", keep: RetentionPolicy | None = None) -> Lease:
        name = namespace.scope_id
        return super().match(namespace, tokens, keep or RetentionPolicy(name, self.shares.get(name, OPEN), self.keep_s))


def tokens(*ids: int) -> "array[int]":
    return array("I", ids)


def run(first: int, count: int) -> "array[int]":
    return array("I", range(first, first + count))


def namespace(scope: bytes = b"a" * 16, epoch: int = 0, revision: str = "r1") -> Namespace:
    return Namespace(revision, "", revision, "kv", SIZE, 2, scope, epoch)


def fill(tree: Tree, account: BlockPool, space: Namespace, ids: "array[int]") -> Lease:
    """What a sequence does with a prompt: match, compute the rest, insert its whole blocks."""
    lease = tree.match(space, ids)
    rest = ids[lease.tokens : len(ids) // SIZE * SIZE]
    blocks = account.allocate(len(rest) // SIZE)
    lease, spare = tree.insert(lease, rest, blocks)
    account.free(spare)
    return lease


@pytest.fixture
def tree() -> Tree:
    return Tree(64, SIZE)


@pytest.fixture
def account() -> BlockPool:
    return BlockPool(64)


def test_a_prefix_is_found_in_whole_blocks(tree: Tree, account: BlockPool) -> None:
    fill(tree, account, namespace(), run(0, 18))
    assert tree.match(namespace(), run(0, 18)).tokens == 16
    assert tree.match(namespace(), run(0, 15)).tokens == 12
    assert tree.match(namespace(), run(1, 18)).tokens == 0
    tree.check()


@pytest.mark.parametrize(
    "change",
    [
        {"model_revision": "r2"},
        {"adapter_revision": "a"},
        {"tokenizer": "t"},
        {"kv_layout": "fp8"},
        {"scope_kind": 1},
        {"scope_kind": 3},
        {"scope_id": b"b" * 16},
        {"model_revision": "r1r1", "tokenizer": ""},  # the same when joined
        {"behind": 1},
    ],
    ids=str,
)
def test_another_namespace_finds_nothing_and_holds_other_blocks(
    change: dict[str, Any], tree: Tree, account: BlockPool
) -> None:
    other = namespace()._replace(**change)
    mine = fill(tree, account, namespace(), run(0, 16))
    before = dict(tree.counters)
    assert tree.match(other, run(0, 16)).tokens == 0
    assert tree.counters["hit_tokens"] == before["hit_tokens"]
    theirs = fill(tree, account, other, run(0, 16))
    assert set(mine.blocks).isdisjoint(theirs.blocks)
    assert tree.match(namespace(), run(0, 16)).blocks == mine.blocks  # the positive control
    assert tree.match(other, run(0, 16)).blocks == theirs.blocks
    tree.check()


def test_a_namespace_of_another_block_size_is_refused(tree: Tree) -> None:
    with pytest.raises(AssertionError):
        tree.match(namespace()._replace(block_tokens=SIZE * 2), run(0, 16))


def test_tokens_are_compared_not_their_text(tree: Tree, account: BlockPool) -> None:
    fill(tree, account, namespace(), tokens(0x01020304, 5, 6, 7))
    assert tree.match(namespace(), tokens(0x04030201, 5, 6, 7)).tokens == 0
    assert tree.match(namespace(), tokens(0x01020304, 5, 6, 7)).tokens == 4


def test_a_duplicate_gives_way_to_the_trees_block(tree: Tree, account: BlockPool) -> None:
    first, second = tree.match(namespace(), run(0, 12)), tree.match(namespace(), run(0, 12))
    mine, theirs = account.allocate(3), account.allocate(3)
    tree.insert(first, run(0, 12), mine)
    second, spare = tree.insert(second, run(0, 12), theirs)
    assert (second.blocks, spare) == (mine, theirs)
    assert tree.counters["duplicate_blocks"] == 3
    assert tree.shared_blocks == 3
    tree.check()


def test_a_lease_grows_block_by_block_on_its_own_edge(tree: Tree, account: BlockPool) -> None:
    lease = fill(tree, account, namespace(), run(0, 8))
    for at in range(8, 40, SIZE):
        lease, spare = tree.insert(lease, run(at, SIZE), account.allocate(1))
        assert spare == []
        tree.check()
    assert tree.match(namespace(), run(0, 40)).blocks == lease.blocks


def test_what_two_leases_share_is_not_lengthened_under_either(tree: Tree, account: BlockPool) -> None:
    one = fill(tree, account, namespace(), run(0, 8))
    two = tree.match(namespace(), run(0, 8))
    tree.insert(one, run(100, 4), account.allocate(1))
    tree.insert(two, run(200, 4), account.allocate(1))
    assert one.blocks[:2] == two.blocks[:2]
    assert one.blocks[2] != two.blocks[2]
    assert tree.match(namespace(), run(0, 8) + run(200, 4)).blocks == two.blocks
    tree.check()


def test_a_leased_block_is_never_evicted(tree: Tree, account: BlockPool) -> None:
    kept = fill(tree, account, namespace(), run(0, 32))
    gone = fill(tree, account, namespace(), run(0, 16) + run(500, 16))
    assert tree.release(gone) == []
    assert tree.unused_blocks == 4
    freed = tree.evict(64)
    assert set(freed).isdisjoint(kept.blocks)
    assert len(freed) == 4
    assert tree.match(namespace(), run(0, 32)).blocks == kept.blocks
    tree.check()


def test_the_least_recently_used_leaf_goes_first_from_its_end(tree: Tree, account: BlockPool) -> None:
    for first in (0, 1000, 2000):
        tree.release(fill(tree, account, namespace(), run(first, 8)))
    tree.release(tree.match(namespace(), run(0, 8)))
    tree.evict(1)
    assert [tree.match(namespace(), run(first, 8)).tokens for first in (0, 1000, 2000)] == [8, 4, 8]


def test_the_scope_furthest_above_its_floor_is_evicted_first(tree: Tree, account: BlockPool) -> None:
    small, large, guarded = (namespace(name * 16) for name in (b"s", b"l", b"g"))
    tree.shares[guarded.scope_id] = CacheShare(floor=20)
    for space, blocks in ((guarded, 18), (small, 6), (large, 12)):
        tree.release(fill(tree, account, space, run(0, blocks * SIZE)))
    tree.evict(10)
    assert [cached_of(tree, space.scope_id) for space in (small, large, guarded)] == [4, 4, 18]
    tree.evict(9)
    assert cached_of(tree, guarded.scope_id) == 17  # only when nobody else has any left
    tree.check()


def test_a_scope_above_its_cap_keeps_only_what_it_uses(tree: Tree, account: BlockPool) -> None:
    space = namespace()
    tree.shares[space.scope_id] = CacheShare(cap=4)
    used = fill(tree, account, space, run(0, 24))
    assert cached_of(tree, space.scope_id) == 6
    account.free(tree.release(used))
    assert cached_of(tree, space.scope_id) == 4
    assert tree.counters["evicted_cap_blocks"] == 2
    account.free(tree.release(fill(tree, account, space, run(900, 12))))
    assert cached_of(tree, space.scope_id) == 4
    assert account.free_blocks + tree.cached_blocks == account.total
    tree.check()


def test_a_newer_epoch_wipes_the_scope_and_an_older_one_finds_nothing(tree: Tree, account: BlockPool) -> None:
    running = fill(tree, account, namespace(), run(0, 16))
    tree.release(fill(tree, account, namespace(), run(100, 16)))
    assert tree.match(namespace(epoch=1), run(0, 16)).tokens == 0
    fill(tree, account, namespace(epoch=1), run(0, 16))
    assert tree.match(namespace(epoch=0), run(0, 16)).tokens == 0
    running, _ = tree.insert(running, run(16, 4), account.allocate(1))  # goes on undisturbed
    assert len(running.blocks) == 5
    tree.release(running)
    tree.check()
    assert tree.evict(9) == []
    account.free(tree.sweep(9))
    assert tree.counters["evicted_epoch_blocks"] == 9
    assert tree.match(namespace(epoch=1), run(0, 16)).tokens == 16
    tree.check()


def test_raised_epochs_wipe_what_is_older_without_a_lookup(tree: Tree, account: BlockPool) -> None:
    running = fill(tree, account, namespace(), run(0, 16))
    behind = namespace()._replace(behind=3)
    tree.release(fill(tree, account, behind, run(100, 16)))
    other = namespace()._replace(scope_id=b"o" * 16)
    tree.release(fill(tree, account, other, run(200, 16)))
    tree.raise_epochs({namespace().scope_id: 2, b"unknown": 5})
    tree.check()
    assert tree.match(other, run(200, 16)).tokens == 16
    assert [tree.match(space, run(at, 16)).tokens for space, at in ((namespace(), 0), (behind, 100))] == [0, 0]
    assert tree.match(namespace(epoch=1), run(0, 16)).tokens == 0, "a late caller's"
    tree.release(running)
    account.free(tree.sweep(9))
    assert tree.counters["evicted_epoch_blocks"] == 8
    tree.release(fill(tree, account, namespace(epoch=2), run(0, 16)))
    tree.raise_epochs({namespace().scope_id: 2})
    assert tree.match(namespace(epoch=2), run(0, 16)).tokens == 16
    tree.check()


@pytest.mark.parametrize("raised", [namespace().scope_id, b"of an account"])
def test_a_late_caller_leaves_nothing_though_nothing_was_cached_when_its_epoch_was_raised(
    tree: Tree, account: BlockPool, raised: bytes
) -> None:
    def fill_as(epoch: int) -> None:
        lease = tree.match(namespace(epoch=epoch), run(0, 16), RetentionPolicy(b"of an account"))
        lease, _ = tree.insert(lease, run(lease.tokens, 16 - lease.tokens), account.allocate(4 - len(lease.blocks)))
        account.free(tree.release(lease))

    tree.raise_epochs({raised: 2})
    fill_as(1)
    tree.check()
    assert tree.match(namespace(epoch=1), run(0, 16), RetentionPolicy(b"of an account")).tokens == 0
    assert len(tree.sweep(9)) == 4, "it was kept for nobody"
    fill_as(2)
    tree.raise_epochs({raised: 1})
    assert tree.matched_tokens(namespace(epoch=2), memoryview(run(0, 16))) == 16
    tree.check()


def test_the_epochs_that_are_remembered_have_a_limit(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EPOCHS_MAX", 2)
    tree.raise_epochs({b"a": 1, b"b": 1, b"c": 1})
    assert list(tree._raised) == [b"b", b"c"]


def test_what_a_late_caller_of_an_old_epoch_inserts_is_never_found(tree: Tree, account: BlockPool) -> None:
    fill(tree, account, namespace(epoch=1), run(0, 4))
    late = fill(tree, account, namespace(epoch=0), run(0, 16))
    assert tree.match(namespace(epoch=0), run(0, 16)).tokens == 0
    tree.release(late)
    tree.check()
    assert set(tree.sweep(8)) == set(late.blocks)


def test_an_epoch_is_remembered_when_the_scope_has_nothing_left(tree: Tree, account: BlockPool) -> None:
    tree.release(tree.match(namespace(epoch=7), run(0, 4)))
    assert not tree._scopes
    tree.release(fill(tree, account, namespace(epoch=6), run(0, 16)))
    assert tree.match(namespace(epoch=6), run(0, 16)).tokens == 0
    tree.release(fill(tree, account, namespace(epoch=7), run(0, 16)))
    assert tree.match(namespace(epoch=7), run(0, 16)).tokens == 16
    tree.check()


def test_the_epochs_that_are_remembered_are_bounded(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EPOCHS_MAX", 10)
    for number in range(100):
        tree.release(tree.match(namespace(number.to_bytes(16, "big"), epoch=1), run(0, 4)))
    assert len(tree._epochs) == 10
    tree.check()


def test_a_share_is_kept_over_all_scopes_of_an_account(tree: Tree, account: BlockPool) -> None:
    for number in range(10):  # an account's users
        keep = RetentionPolicy(b"one", CacheShare(cap=6))
        lease = tree.match(namespace(bytes([number]) * 16), run(0, 12), keep)
        lease, spare = tree.insert(lease, run(0, 12), account.allocate(3))
        account.free(spare + tree.release(lease))
        tree.check()
    assert cached_of(tree, b"one") == 6
    assert [tree.match(namespace(bytes([number]) * 16), run(0, 12)).tokens for number in (7, 8, 9)] == [0, 12, 12]


def test_a_flood_over_many_scopes_leaves_an_account_what_its_floor_covers(tree: Tree, account: BlockPool) -> None:
    tree.shares[b"q" * 16] = CacheShare(floor=8)
    tree.release(fill(tree, account, namespace(b"q" * 16), run(0, 32)))
    for number in range(640 // 4):
        keep = RetentionPolicy(b"flood", CacheShare(floor=2))
        lease = tree.match(namespace(number.to_bytes(16, "big")), run(0, 16), keep)
        if account.free_blocks < 4:
            account.free(tree.evict(4 - account.free_blocks))
        tree.release(tree.insert(lease, run(0, 16), account.allocate(4))[0])
        tree.check()
    assert tree.match(namespace(b"q" * 16), run(0, 32)).tokens == 32


def test_floors_are_granted_as_far_as_the_pool_goes_and_are_free_again_afterwards(
    tree: Tree, account: BlockPool
) -> None:
    def floor(name: bytes) -> int:
        found = tree._accounts.by_name.get(name * 16)
        return found.floor if found else 0

    leases = []
    for name in (b"a", b"b", b"c"):
        tree.shares[name * 16] = CacheShare(floor=40)
        leases.append(fill(tree, account, namespace(name * 16), run(0, 4)))
    assert [floor(name) for name in (b"a", b"b", b"c")] == [40, 24, 0]
    tree.shares[b"a" * 16] = CacheShare(floor=30, cap=10)  # a cap bounds the floor too
    leases.append(tree.match(namespace(b"a" * 16), run(0, 4)))
    leases.append(tree.match(namespace(b"c" * 16), run(0, 4)))
    assert [floor(name) for name in (b"a", b"b", b"c")] == [10, 24, 30]
    for lease in leases:
        tree.release(lease)
    tree.evict(64)
    assert tree._accounts.floors == 0
    tree.check()


def test_what_is_over_is_found_no_more_at_once_and_swept(tree: Tree, account: BlockPool) -> None:
    tree.keep_s = 5.0
    tree.release(fill(tree, account, namespace(), run(0, 16)))
    tree.release(fill(tree, account, namespace(b"b" * 16), run(0, 16)))
    tree.seconds = 4.0
    assert tree.sweep(64) == []
    tree.release(tree.match(namespace(), run(0, 8)))  # refreshed as far as it was read
    tree.seconds = 6.0
    assert tree.match(namespace(b"b" * 16), run(0, 16)).tokens == 0
    again = tree.match(namespace(), run(0, 16))
    assert again.tokens == 8
    assert len(tree.sweep(3)) == 3
    assert len(tree.sweep(64)) == 3
    assert tree.counters["evicted_age_blocks"] == 6
    tree.check()
    tree.seconds = 60.0
    assert tree.sweep(64) == []  # it is in use
    tree.release(again)
    tree.seconds = 64.0
    assert tree.sweep(64) == []
    tree.seconds = 65.1
    assert len(tree.sweep(64)) == 2
    assert not tree.cached_blocks


def test_what_is_over_does_not_come_back_as_a_duplicate(tree: Tree, account: BlockPool) -> None:
    tree.keep_s = 5.0
    lease = tree.match(namespace(), run(0, 4))
    old = fill(tree, account, namespace(), run(0, 16))
    tree.release(old)
    tree.seconds = 6.0
    blocks = account.allocate(4)
    lease, spare = tree.insert(lease, run(0, 16), blocks)
    assert (lease.blocks, spare) == (blocks, [])
    tree.check()


def test_a_time_to_live_that_is_set_later_holds_for_what_is_there(tree: Tree, account: BlockPool) -> None:
    tree.release(fill(tree, account, namespace(), run(0, 16)))
    tree.keep_s = 5.0
    tree.seconds = 4.0
    tree.release(tree.match(namespace(), run(50, 4)))
    tree.seconds = 6.0
    assert len(tree.sweep(64)) == 4
    tree.check()


def test_age_counts_across_the_namespaces_of_a_scope(tree: Tree, account: BlockPool) -> None:
    for revision in ("r1", "r2", "r3"):
        tree.release(fill(tree, account, namespace(revision=revision), run(0, 8)))
    tree.release(tree.match(namespace(revision="r1"), run(0, 8)))
    tree.evict(2)
    assert [tree.match(namespace(revision=revision), run(0, 8)).tokens for revision in ("r1", "r2", "r3")] == [8, 0, 8]


def test_what_is_forgotten_is_found_no_more_and_stays_valid_for_its_readers(tree: Tree, account: BlockPool) -> None:
    lease = fill(tree, account, namespace(), run(0, 16))
    reader = tree.match(namespace(), run(0, 16))
    beside = fill(tree, account, namespace(), tokens(*run(0, 8), 50, 51, 52, 53))
    tree.forget(lease, 2)
    tree.check()
    assert tree.match(namespace(), run(0, 16)).tokens == 8
    assert tree.match(namespace(), tokens(*run(0, 8), 50, 51, 52, 53)).blocks == beside.blocks
    reader, spare = tree.insert(reader, run(16, 4), account.allocate(1))
    assert not spare
    assert tree.release(lease) == []
    tree.check()
    again = fill(tree, account, namespace(), run(0, 20))
    assert again.blocks[:2] == reader.blocks[:2]
    assert set(again.blocks[2:]).isdisjoint(reader.blocks)
    tree.check()
    tree.release(reader)
    assert set(tree.evict(3)) == set(reader.blocks[2:])
    tree.check()
    assert not any(root._hidden for root in tree._roots.values())


def test_forgetting_behind_the_end_or_twice_changes_nothing(tree: Tree, account: BlockPool) -> None:
    lease = fill(tree, account, namespace(), run(0, 16))
    tree.forget(lease, 4)
    assert tree.match(namespace(), run(0, 16)).tokens == 16
    tree.forget(lease, 1)
    tree.forget(lease, 1)
    tree.forget(lease, 3)
    assert tree.match(namespace(), run(0, 16)).tokens == 4
    tree.check()


def test_a_scope_without_blocks_and_leases_is_forgotten(tree: Tree, account: BlockPool) -> None:
    lease = fill(tree, account, namespace(), run(0, 16))
    tree.release(lease)
    tree.release(tree.match(namespace(b"b" * 16), run(0, 4)))
    tree.evict(4)
    assert tree._scopes == {}
    assert tree._roots == {}
    assert not tree._accounts.by_name


def test_counters_are_exact(tree: Tree, account: BlockPool) -> None:
    fill(tree, account, namespace(), run(0, 18))
    fill(tree, account, namespace(), run(0, 22))
    assert dict(tree.counters) == {
        "lookups": 2,
        "lookup_tokens": 40,
        "hit_tokens": 16,
        "inserted_blocks": 5,
        "duplicate_blocks": 0,
    }


def test_a_lease_ends_once(tree: Tree, account: BlockPool) -> None:
    lease = fill(tree, account, namespace(), run(0, 8))
    tree.release(lease)
    with pytest.raises(AssertionError, match="released twice"):
        tree.release(lease)
    with pytest.raises(AssertionError, match="is released"):
        tree.insert(lease, run(8, 4), account.allocate(1))
    tree.check()


def test_a_hot_prompt_leaves_nothing_behind(tree: Tree, account: BlockPool) -> None:
    tree.release(fill(tree, account, namespace(), run(0, 16)))
    for _ in range(1000):
        tree.release(tree.match(namespace(), run(0, 16)))
    assert len(tree._roots[namespace()].leaves) == 1
    assert len(tree._accounts._ranks._heap) == 1


def test_shares_that_change_leave_nothing_behind(tree: Tree, account: BlockPool) -> None:
    tree.release(fill(tree, account, namespace(), run(0, 16)))
    for number in range(1000):
        tree.shares[namespace().scope_id] = CacheShare(floor=60 - number % 60)
        tree.release(tree.match(namespace(), run(0, 16)))
    assert len(tree._accounts._ranks._heap) <= 64 + 2
    tree.check()


@pytest.mark.parametrize("users", [False, True])
@pytest.mark.parametrize("gone", ["evict", "epoch", "age"])
def test_making_room_costs_the_same_however_much_is_cached(gone: str, users: bool) -> None:
    """With thousands of accounts, and with one that has thousands of scopes."""

    def cost(scopes: int) -> int:
        account, tree = BlockPool(4 * scopes), Tree(4 * scopes, SIZE)
        tree.keep_s = 9.0 if gone == "age" else None
        for epoch in range(2 if gone == "epoch" else 1):
            for number in range(scopes):
                space, name = namespace(number.to_bytes(16, "big"), epoch), number.to_bytes(16, "big")
                for ids in (run(0, 8), run(0, 4) + run(100, 4)) if not epoch else ():
                    keep = RetentionPolicy(b"" if users else name, OPEN, tree.keep_s)
                    lease = tree.match(space, ids, keep)
                    rest = ids[lease.tokens :]
                    tree.release(tree.insert(lease, rest, account.allocate(len(rest) // SIZE))[0])
                if epoch:
                    tree.release(tree.match(space, run(0, 4)))
        tree.seconds = 10.0
        free = tree.evict if gone == "evict" else tree.sweep
        free(4)  # what moves in the queues because of all that came in
        return opcodes(lambda: assert_freed(free(16)))

    def assert_freed(blocks: list[int]) -> None:
        assert len(blocks) == 16

    assert cost(1000) < 1.5 * cost(20)


def opcodes(act: Callable[[], object]) -> int:
    """How many steps the interpreter takes: what an act costs, but the same in every run."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(None)
    return count


# What is kept, and what moves


def read(tree: Tree, account: BlockPool, space: Namespace, ids: "array[int]") -> None:
    """A request from its start to its end."""
    lease = tree.match(space, ids)
    tree.count_read(lease)
    rest = ids[lease.tokens : len(ids) // SIZE * SIZE]
    lease, spare = tree.insert(lease, rest, account.allocate(len(rest) // SIZE))
    account.free([*spare, *tree.release(lease)])


def test_what_most_requests_began_with_is_kept_and_then_what_was_used_last(tree: Tree, account: BlockPool) -> None:
    system, turns = run(0, 8), [run(100 * turn, 8) for turn in range(1, 4)]
    for turn in turns:
        read(tree, account, namespace(), system + turn)
    read(tree, account, namespace(b"b" * 16), run(500, 12))
    assert tree.cached_blocks == 2 + 3 * 2 + 3
    freed = tree.keep_hottest(2 + 3 + 1, excluded=())
    assert (len(freed), tree.cached_blocks, tree.unused_blocks) == (5, 6, 6)
    tree.check()
    assert tree.match(namespace(), system + turns[0]).tokens == 8
    assert tree.match(namespace(b"b" * 16), run(500, 12)).tokens == 12
    assert tree.match(namespace(), system + turns[2]).tokens == 12, "the start of what comes next"


def test_choices_of_one_request_and_its_own_return_make_nothing_hot(tree: Tree, account: BlockPool) -> None:
    read(tree, account, namespace(b"a" * 16), run(0, 8))
    for _ in range(5):
        account.free(tree.release(tree.match(namespace(b"a" * 16), run(0, 8))))
    for _ in range(2):
        read(tree, account, namespace(b"b" * 16), run(0, 8))
    account.free(tree.release(tree.match(namespace(b"a" * 16), run(0, 8))))
    tree.keep_hottest(2, excluded=())
    assert tree.match(namespace(b"b" * 16), run(0, 8)).tokens == 8


def test_what_one_request_adds_to_a_hot_prefix_is_not_hot(tree: Tree, account: BlockPool) -> None:
    for turn in range(4):
        read(tree, account, namespace(b"a" * 16), run(0, 8 + 40 * (turn == 3)))
    read(tree, account, namespace(b"b" * 16), run(0, 8))
    read(tree, account, namespace(b"b" * 16), run(0, 8))
    tree.keep_hottest(4, excluded=())
    assert tree.match(namespace(b"a" * 16), run(0, 48)).tokens == 8
    assert tree.match(namespace(b"b" * 16), run(0, 8)).tokens == 8


def test_the_upper_part_of_a_prefix_was_read_by_all_who_read_the_whole(tree: Tree, account: BlockPool) -> None:
    for ids in (run(0, 16), run(0, 16), run(0, 8) + run(100, 8)):
        read(tree, account, namespace(b"a" * 16), ids)
    for _ in range(2):
        read(tree, account, namespace(b"b" * 16), run(0, 8))
    tree.keep_hottest(2, excluded=())
    assert tree.match(namespace(b"a" * 16), run(0, 8)).tokens == 8


def test_popularity_fades_with_every_time_that_it_was_asked_for(tree: Tree, account: BlockPool) -> None:
    for _ in range(4):
        read(tree, account, namespace(b"a" * 16), run(0, 8))
    for _ in range(3):
        tree.keep_hottest(64, excluded=())
    read(tree, account, namespace(b"b" * 16), run(0, 8))
    tree.keep_hottest(2, excluded=())
    assert tree.match(namespace(b"a" * 16), run(0, 8)).tokens == 0


def test_nothing_is_kept_from_a_barred_block_on(tree: Tree, account: BlockPool) -> None:
    read(tree, account, namespace(), run(0, 24))
    lease = tree.match(namespace(), run(0, 24))
    barred = lease.blocks[2]
    account.free(tree.release(lease))
    freed = tree.keep_hottest(64, {barred})
    assert barred in freed
    assert tree.match(namespace(), run(0, 24)).tokens == 8
    tree.check()


def test_what_is_leased_is_kept_beside_and_what_is_forgotten_is_not(tree: Tree, account: BlockPool) -> None:
    lease = fill(tree, account, namespace(b"a" * 16), run(0, 16))
    read(tree, account, namespace(b"b" * 16), run(0, 16))
    other = tree.match(namespace(b"b" * 16), run(0, 16))
    tree.forget(other, 1)
    account.free(tree.release(other))
    assert len(tree.keep_hottest(1, excluded=())) == 3
    assert (tree.cached_blocks, tree.unused_blocks) == (5, 1)
    assert lease.tokens == 16
    tree.check()


def test_what_is_kept_is_over_and_evicted_and_capped_as_before(tree: Tree, account: BlockPool) -> None:
    tree.keep_s = 10.0
    read(tree, account, namespace(b"a" * 16), run(0, 16))
    tree.seconds = 5.0
    read(tree, account, namespace(b"b" * 16), run(0, 16))
    account.free(tree.keep_hottest(8, excluded=()))
    tree.seconds = 11.0
    assert len(tree.sweep(64)) == 4, "it is as old as it was"
    assert len(tree.evict(64)) == 4
    assert tree.check() == set()


def test_blocks_whose_contents_moved_are_found_under_their_new_ids(tree: Tree, account: BlockPool) -> None:
    lease = fill(tree, account, namespace(), run(0, 16))
    renamed = {old: 1000 + number for number, old in enumerate(lease.blocks[1:3])}
    expected = [lease.blocks[0], 1000, 1001, lease.blocks[3]]
    tree.rename(renamed)
    lease.rename(renamed)
    assert lease.blocks == expected
    assert tree.match(namespace(), run(0, 18)).blocks == expected
    assert tree.check() == set(expected)
