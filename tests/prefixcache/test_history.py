"""Hundreds of random lives of the tree agree with a brute-force model, step by step, and broken trees do not."""

import sys
import types
from collections import Counter
from pathlib import Path

import pytest

import prefixcache
from tests.prefixcache.history import SLEEPY, History


@pytest.mark.parametrize("first", [*range(0, 160, 40), SLEEPY])
def test_any_history_agrees_with_the_brute_force_model(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + 40):
        try:
            seen += History(seed).run().tree.counters
        except BaseException:
            print("seed", seed)
            raise
    # What the histories went through, so that one that lost its bite does not pass.
    causes = [f"evicted_{cause}_blocks" for cause in ("space", "cap", "epoch", "age")]
    for what in ["hit_tokens", "inserted_blocks", "duplicate_blocks", *causes]:
        assert seen[what] > (100 if first < SLEEPY else 20), f"{what}: {seen[what]}"


# What one of the sources says, and what the broken build says instead. The modules are in the order in which they need
# each other.
MODULES = ("namespace", "lazy_heap", "names", "tier", "radix", "lease", "shares", "tree")
BREAKS = {
    "scopes share a root": (
        "root = self._root_of(namespace, policy)",
        "root = self._root_of(namespace._replace(scope_id=bytes(16)), policy)",
    ),
    "kinds of scope share a root": (
        "root = self._root_of(namespace, policy)",
        "root = self._root_of(namespace._replace(scope_kind=2), policy)",
    ),
    "models share a root": (
        "root = self._root_of(namespace, policy)",
        'root = self._root_of(namespace._replace(model_revision="r"), policy)',
    ),
    "what lies behind others' blocks is found without them": (
        "root = self._root_of(namespace, policy)",
        "root = self._root_of(namespace._replace(behind=0), policy)",
    ),
    "epochs share a root": ("namespace.epoch > scope.epoch", "False", "namespace.epoch < newest", "False"),
    "an old epoch wipes a newer one": (
        "if namespace.epoch < newest:",
        "if False:",
        "epoch > scope.epoch",
        "epoch != scope.epoch",
    ),
    "an epoch is forgotten with the scope's last block": ("self._epochs[name] = root.scope.epoch", "pass"),
    "what a late caller leaves is found": (
        "root = NamespaceRoot(namespace, self.wiped, ScopeState(namespace.epoch))",
        "root = self._roots.setdefault(namespace, NamespaceRoot(namespace, self.wiped, ScopeState(namespace.epoch)))",
    ),
    "a lookup does not pin": ("            root.pin(reached, now_s)\n", "            pass\n"),
    "a duplicate is not pinned": ("            root.pin(node, self._operation_s)\n", ""),
    "only the end of a path is unpinned": ("for node in lease._node.path():", "for node in [lease._node, root]:"),
    "a split forgets who reads the upper part": ("lower.blocks[:blocks], lower.pins,", "lower.blocks[:blocks], 0,"),
    "an edge that others read is lengthened": ("node.pins == 1 and not node.children", "not node.children"),
    "an edge with children is lengthened": ("node.pins == 1 and not node.children", "node.pins == 1"),
    "an edge is believed after its first block": ("if packed.startswith(child.label, at):", "if True:"),
    "one differing block is let in": (
        "return low\n",
        "return min(low + 1, len(child.blocks))\n",
    ),
    "the caller's duplicate wins": (
        "lease.blocks += node.blocks",
        "lease.blocks += blocks[first : first + len(node.blocks)]",
    ),
    "duplicates are kept": ("return lease, spare + self", "return lease, self"),
    "leaves in use are evicted": ("if node.pins or node.children:\n", "if node.children:\n"),
    "the start of an edge is evicted": (
        "freed = node.blocks[left:].tolist()",
        "freed = node.blocks[: len(node.blocks) - left].tolist()",
    ),
    "recent use does not help a leaf": ("elif node.queued_s < node.used_s:", "elif False:"),
    "a parent is never offered": ("            self._queue_if_leaf(parent)\n", ""),
    "the age is per namespace": ("return None if node is None else node.used_s", "return node and float(id(self))"),
    "a root that was used stays where it was": ("elif key > entry[0]:", "elif False:"),
    "a root that is in use all over is never lined up again": ("        root.account.by_age.put(root)\n", ""),
    "the nearest to its floor goes first": ("return self.cached - self.floor", "return self.floor - self.cached"),
    "floors are ignored": ("return self.cached - self.floor", "return self.cached"),
    "floors are promised twice": ("min(floor, self._blocks - others)", "floor"),
    "a floor is never given back": ("            self.floors -= account.floor\n", ""),
    "a floor may be above its cap": (
        "floor = share.floor if share.cap is None else min(share.floor, share.cap)",
        "floor = share.floor",
    ),
    "each scope has a share of its own": (
        "self._accounts.get_or_create(policy.account)",
        "self._accounts.get_or_create(namespace.scope_id)",
    ),
    "an account that grows is not ranked again": ("        self._accounts.rank(account)\n", ""),
    "one account pays for all": ("min(count - len(freed), ahead)", "count - len(freed)"),
    "a cap is only looked at on insert": (
        "        freed = self._keep_cap(root.account)\n        self._remove",
        "        freed = []\n        self._accounts.rank(root.account)\n        self._remove",
    ),
    "a cap is forgotten": ("account.cap = share.cap", "account.cap = account.cap"),
    "wiped blocks are evicted": ("        if account is self.wiped:\n            return []\n", ""),
    "wiped blocks are never swept": ('self._evict_from(self.wiped, count, "epoch")', "[]"),
    "wiped blocks count for their account": ("before.cached -= root.cached", "pass"),
    "what is over is found": ("if not child.pins and child.used_s <= expired_s:", "if False:"),
    "what is over is gone while it is read": (
        "if not child.pins and child.used_s <= expired_s:",
        "if child.used_s <= expired_s:",
    ),
    "what is over stays": ("        self._expiring.put(root)\n", ""),
    "a hit does not refresh": (
        "        node.pins += 1\n        node.used_s = used_s\n",
        "        node.pins += 1\n",
        "        node.pins -= 1\n        node.used_s = used_s\n",
        "        node.pins -= 1\n",
    ),
    "a time to live is set once": ("if scope.keep_s != policy.keep_s:", "if scope.keep_s is None:"),
    "what is fresh is swept": ("used_s > self._expired_s(root)", "False"),
    "forgotten blocks are found": ('self._key(node) + self._hides.to_bytes(8, "big")', "self._key(node)"),
    "an edge is forgotten from its start": ("root.split(node, blocks - start)", "pass"),
    "an edge is forgotten up to its end": ("start + len(node.blocks) <= blocks", "start + len(node.blocks) >= blocks"),
    "an empty root stays": (
        "        self._remove_if_empty(root)\n        return freed\n\n    def evict",
        "        return freed\n\n    def evict",
    ),
    "hits are counted in blocks": ("at // TOKEN_BYTES\n        return", "at // self._block_bytes\n        return"),
    "the cause is lost": ("{cause}", "space"),
    "what is barred is kept": ("if block in excluded", "if False"),
    "more is kept than may be": ("                max_blocks -= clear\n", "                max_blocks -= clear - 1\n"),
    "what was kept is never evicted": ("            self._queue_root(root)\n", ""),
    "what moved is found where it was": ("                node.blocks = array", "                _ = array"),
    "a lease reads what moved where it was": ("self.blocks[:] = [renamed", "_ = [renamed"),
    "shared blocks are counted once too often": ("elif node.pins == 2:", "elif node.pins >= 2:"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_tree_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(str(prefixcache.__file__)).parent
    sources = {module: (folder / f"{module}.py").read_text() for module in MODULES}
    for right, wrong in zip(BREAKS[name][::2], BREAKS[name][1::2], strict=True):
        assert any(right in source for source in sources.values()), f"no source says {right!r} any more"
        sources = {module: source.replace(right, wrong) for module, source in sources.items()}
    broken = types.ModuleType("")
    for module, source in sources.items():
        broken = types.ModuleType(f"broken_{module}")
        monkeypatch.setitem(sys.modules, broken.__name__, broken)
        exec(compile(source.replace("from prefixcache.", "from broken_"), broken.__name__, "exec"), broken.__dict__)
    for own in (True, False):  # by the model, and then also without the tree's own check
        if not own:
            broken.__dict__["PrefixTree"].check = lambda tree: None
        seeds = [*range(SLEEPY, SLEEPY + 10), *range(60)]
        assert any(_fails(seed, broken) for seed in seeds), f"70 histories did not notice: {name}, check: {own}"


def _fails(seed: int, module: types.ModuleType) -> bool:
    try:
        History(seed, module).run()
    except (AssertionError, LookupError, ValueError, TypeError, AttributeError, StopIteration):
        return True
    return False
