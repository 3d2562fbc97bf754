"""Names of blocks outside their replica: whatever KV depends on is in them, and nobody forms one without the key."""

from array import array

import pytest

from prefixcache.names import NAME_BYTES, BlockNames, next_name
from prefixcache.namespace import Namespace, RetentionPolicy
from prefixcache.tree import PrefixTree

SPACE = Namespace("revision", "adapter", "tokenizer", "kv-l2", 4, 2, b"1" * 16, 0)
POLICY = RetentionPolicy(b"a")


@pytest.mark.parametrize(
    "change",
    [
        {"model_revision": "other"},
        {"adapter_revision": ""},
        {"tokenizer": "other"},
        {"kv_layout": "kv-l3"},
        {"block_tokens": 8},
        {"scope_kind": 1},
        {"scope_id": b"2" * 16},
        {"epoch": 1},
        {"behind": 1},
        {"model_revision": "revisiona", "adapter_revision": "dapter"},  # where fields ran into each other
    ],
    ids=str,
)
def test_another_value_of_any_field_has_another_root(change: dict[str, object]) -> None:
    names = BlockNames(bytes(32))
    assert names.root(SPACE._replace(**change)) != names.root(SPACE)  # type: ignore[arg-type]


def test_another_key_has_other_names_and_a_short_one_is_refused() -> None:
    assert BlockNames(bytes(32)).root(SPACE) != BlockNames(b"k" * 32).root(SPACE)
    with pytest.raises(AssertionError, match="guessed"):
        BlockNames(b"short")


def chain(root: bytes, tokens: "array[int]") -> list[bytes]:
    """Each name from all the tokens before it, the slow way."""
    names = [root]
    for end in range(4, len(tokens) + 1, 4):
        names.append(next_name(names[-1], tokens[end - 4 : end].tobytes()))
    return names


def test_the_tree_names_blocks_by_all_tokens_before_them_however_its_edges_are_cut() -> None:
    names = BlockNames(bytes(32))
    tree = PrefixTree(64, 4, lambda: 0.0, names)
    long, short = array("I", range(24)), array("I", [*range(8), *range(50, 58)])
    lease, _ = tree.insert(tree.match(SPACE, long, POLICY), long, range(6))
    root = names.root(SPACE)
    assert tree.names(lease) == chain(root, long)
    assert tree.last_name(lease) == chain(root, long)[-1]
    found = tree.match(SPACE, short, POLICY)  # which cuts the edge
    other, _ = tree.insert(found, short[8:], [10, 11])
    assert tree.names(other) == chain(root, short)
    assert tree.names(lease) == chain(root, long)
    more = array("I", range(90, 98))
    longer, _ = tree.insert(lease, more, [20, 21])
    assert tree.names(longer) == chain(root, long + more)
    assert {len(name) for name in tree.names(longer)} == {NAME_BYTES}


def test_what_is_evicted_for_want_of_space_departs_under_its_names_and_nothing_else_does() -> None:
    names, clock = BlockNames(bytes(32)), [0.0]
    tree = PrefixTree(64, 4, lambda: clock[0], names)
    policy, tokens = RetentionPolicy(b"a", keep_s=9.0), array("I", range(24))
    lease, _ = tree.insert(tree.match(SPACE, tokens, policy), tokens, range(6))
    tree.release(lease)
    assert tree.evict(2) == [4, 5]
    assert tree.evict(1) == [3]
    first, second = tree.take_departed()
    named = chain(names.root(SPACE), tokens)
    assert (first.blocks, first.names, first.policy.keep_s) == ([4, 5], named[5:7], 9.0)
    assert (second.blocks, second.names) == ([3], named[4:5])
    assert not tree.take_departed()
    clock[0] = 20.0
    assert len(tree.sweep(64)) == 3
    assert not tree.take_departed(), "what is over departs"
    hidden, _ = tree.insert(tree.match(SPACE, tokens, POLICY), tokens, range(6))
    tree.forget(hidden, 0)
    tree.release(hidden)
    assert len(tree.evict(64)) == 6
    assert not tree.take_departed(), "what nobody is to find departs"
