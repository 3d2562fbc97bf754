"""Hundreds of random lives of the tree agree with a brute-force model, step by step, and broken trees do not."""

import sys
import types
from collections import Counter
from pathlib import Path

import pytest

from prefixcache import tree as unbroken
from tests.prefixcache.history import History


@pytest.mark.parametrize("first", range(0, 240, 60))
def test_any_history_agrees_with_the_brute_force_model(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + 60):
        try:
            seen += History(seed).run().tree.counters
        except BaseException:
            print("seed", seed)
            raise
    # What the histories went through, so that one that lost its bite does not pass.
    causes = [f"evicted_{cause}_blocks" for cause in ("space", "cap", "epoch", "clear")]
    for what in ["hit_tokens", "inserted_blocks", "duplicate_blocks", *causes]:
        assert seen[what] > 100, f"{what}: {seen[what]}"


# What the source says, and what the broken build says instead.
BREAKS = {
    "scopes share a root": (
        "root = self._root_of(namespace)",
        "root = self._root_of(namespace._replace(scope_id=bytes(16)))",
    ),
    "kinds of scope share a root": (
        "root = self._root_of(namespace)",
        "root = self._root_of(namespace._replace(scope_kind=2))",
    ),
    "models share a root": (
        "root = self._root_of(namespace)",
        'root = self._root_of(namespace._replace(model_revision="r"))',
    ),
    "epochs share a root": ("namespace.epoch > scope.epoch", "False", "namespace.epoch < scope.epoch", "False"),
    "a lookup does not pin": (
        "            self._pin(root, node)\n        self.counters",
        "            pass\n        self.counters",
    ),
    "a duplicate is not pinned": (
        "            self._pin(root, node)\n            if node is not child",
        "            if node is not child",
    ),
    "only the end of a path is unpinned": (
        "            node = node.parent\n        freed",
        "            node = None\n        freed",
    ),
    "a split forgets who reads the upper part": ("lower.blocks[:blocks], lower.pins,", "lower.blocks[:blocks], 0,"),
    "an edge that others read is lengthened": ("node.pins == 1 and not node.children", "not node.children"),
    "an edge with children is lengthened": ("node.pins == 1 and not node.children", "node.pins == 1"),
    "an edge is believed after its first block": ("if packed.startswith(child.label, at):", "if True:"),
    "one differing block is let in": (
        "return self._split(child, low)",
        "return self._split(child, low + 1) if low + 1 < high else child",
    ),
    "the caller's duplicate wins": (
        "lease.blocks += node.blocks",
        "lease.blocks += blocks[first : first + len(node.blocks)]",
    ),
    "duplicates are kept": ("return lease, spare", "return lease, []"),
    "leaves in use are evicted": ("if node.pins or node.children:\n", "if node.children:\n"),
    "the start of an edge is evicted": (
        "freed = node.blocks[keep:].tolist()",
        "freed = node.blocks[: len(node.blocks) - keep].tolist()",
    ),
    "recent use does not help a leaf": ("elif node.queued < node.used:", "elif False:"),
    "a parent is never offered": ("            self._offer(root, parent)\n", ""),
    "the age is per namespace": ("min(roots, key=self._age)", "next(roots)"),
    "the nearest to its floor goes first": ("self.cached - self.share.floor", "self.share.floor - self.cached"),
    "floors are ignored": ("return self.cached - self.share.floor", "return self.cached"),
    "a scope that grows is not ranked again": (
        "if scope.rank is None or -scope.rank[0] < scope.excess:",
        "if scope.rank is None:",
    ),
    "a scope that shrank is not ranked again": ("elif -rank[0] > scope.excess:", "elif False:"),
    "one scope pays for all": (
        "step = min(count - len(freed), max(1, furthest.excess - level))",
        "step = count - len(freed)",
    ),
    "a cap is only looked at on insert": (
        "        freed = self._keep_cap(root.scope)\n        self._rank",
        "        freed = []\n        self._rank",
    ),
    "wiped blocks wait for their turn": ("freed = self._evict_from(self._wiped, count)\n", "freed = []\n"),
    "wiped blocks are found": ('            self._wipe(root, "clear")', "            pass"),
    "forgotten blocks are found": ('self._key(node) + self._hid.to_bytes(8, "big")', "self._key(node)"),
    "an edge is forgotten from its start": ("self._split(node, blocks - start)", "pass"),
    "an edge is forgotten up to its end": ("start + len(node.blocks) <= blocks", "start + len(node.blocks) >= blocks"),
    "an empty root stays": ("            self._forget_if_empty(root)\n        return freed", "        return freed"),
    "hits are counted in blocks": ("at // TOKEN_BYTES", "at // self._block_bytes"),
    "the cause is lost": ("{cause or root.cause}", "space"),
    "shared blocks are counted once too often": ("elif node.pins == 2:", "elif node.pins >= 2:"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_tree_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(str(unbroken.__file__)).read_text()
    for right, wrong in zip(BREAKS[name][::2], BREAKS[name][1::2], strict=True):
        assert source.count(right) >= 1, f"the source no longer says {right!r}"
        source = source.replace(right, wrong)
    broken = types.ModuleType("broken_tree")
    monkeypatch.setitem(sys.modules, broken.__name__, broken)
    exec(compile(source, broken.__name__, "exec"), broken.__dict__)
    for own in (True, False):  # by the model, and then also without the tree's own check
        if not own:
            broken.__dict__["Tree"].check = lambda tree: None
        assert any(_fails(seed, broken) for seed in range(60)), f"60 histories did not notice: {name}, check: {own}"


def _fails(seed: int, module: types.ModuleType) -> bool:
    try:
        History(seed, module).run()
    except (AssertionError, LookupError, ValueError, TypeError, AttributeError, StopIteration):
        return True
    return False
