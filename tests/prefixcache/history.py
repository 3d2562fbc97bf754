"""A random life of the prefix tree beside a model that is too simple to be wrong: one entry per cached block.

The model keeps no edges, no heaps and no sums. It says what a lookup finds, which blocks an insert must give back, what
may be evicted and in which order, and what every counter has to be.
"""

import random
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import ModuleType

from engine.blocks import Blocks
from prefixcache import tree as unbroken
from prefixcache.tree import Lease, Namespace, ScopeName

SIZE = 4
SCOPES = [(2, bytes([number]) * 16) for number in range(4)] + [(1, bytes(16))]


@dataclass(eq=False)
class Forgotten:
    """What the first token of a forgotten block is from then on: equal to none that is looked up."""


Id = int | Forgotten


@dataclass(eq=False)
class Root:
    """One life of a namespace, from its first lookup until it is empty or wiped (then `cause` says why)."""

    space: Namespace
    cause: str = "space"
    wiped: bool = False
    blocks: dict[tuple[Id, ...], int] = field(default_factory=dict)  # a whole prefix → its last block
    used: dict[int, int] = field(default_factory=dict)  # block → when a lease on it last ended

    def find(self, ids: Iterable[Id]) -> list[int]:
        ids, found = tuple(ids), []
        for end in range(SIZE, len(ids) + 1, SIZE):
            if ids[:end] not in self.blocks:
                break
            found.append(self.blocks[ids[:end]])
        return found

    def findable(self) -> list[tuple[Id, ...]]:
        return [prefix for prefix in self.blocks if all(isinstance(id, int) for id in prefix)]


@dataclass(eq=False)
class Run:
    """One sequence: its lease, and the tokens that the lease's blocks stand for."""

    root: Root
    lease: Lease
    ids: list[Id]


class History:
    """`run` acts at random and compares after every act; it raises AssertionError at the first difference."""

    def __init__(self, seed: int, module: ModuleType = unbroken) -> None:
        self.pick = random.Random(seed)
        self.total = self.pick.choice([12, 40, 150])
        self.vocabulary = self.pick.choice([2, 3, 50])
        self.text = [self.pick.randrange(self.vocabulary) for _ in range(64)]  # what everybody says again and again
        self.scopes = SCOPES[: self.pick.randrange(1, len(SCOPES) + 1)] + SCOPES[-1:]
        self.tree = module.Tree(self.total, SIZE)
        self.account = Blocks(self.total)
        self.roots: list[Root] = []  # of all lives that hold blocks or leases
        self.runs: list[Run] = []
        self.epochs = dict.fromkeys(SCOPES, 0)
        self.shares: dict[ScopeName, tuple[int, int | None]] = {}
        self.counters: Counter[str] = Counter()
        self.time = 0
        self.share = module.Share

    def run(self, acts: int = 200) -> "History":
        doings = [self.match] * 30 + [self.grow] * 28 + [self.release] * 29 + [self.evict] * 10
        doings += [self.set_share, self.raise_epoch, self.drop, self.forget]
        for _ in range(acts):
            self.pick.choice(doings)()
            self.compare()
        while self.runs:
            self.release()
            self.compare()
        self.give(self.tree.evict(self.total), "space")
        assert self.account.free == self.total
        assert not self.tree._roots
        assert not self.tree._scopes
        assert not self.tree._wiped.roots
        return self

    # Acts

    def match(self) -> None:
        kind, id = scope = self.pick.choice(self.scopes)
        late = self.pick.random() < 0.1
        epoch = max(0, self.epochs[scope] - late)
        space = Namespace(self.pick.choice("rs"), "", "", "kv", SIZE, kind, id, epoch)
        root = self.root_of(space)
        ids = self.ids(0, self.pick.randrange(40))
        if (findable := root.findable()) and self.pick.random() < 0.4:
            ids = array("I", self.pick.choice(findable)) + ids[: self.pick.randrange(SIZE)]
        lease = self.tree.match(space, ids)
        assert lease.blocks == root.find(ids), "not the longest cached prefix"
        self.counters["lookups"] += 1
        self.counters["lookup_tokens"] += len(ids)
        self.counters["hit_tokens"] += lease.tokens
        self.runs.append(Run(root, lease, list(ids[: lease.tokens])))

    def grow(self) -> None:
        if not self.runs or not self.account.free:
            return
        run = self.pick.choice(self.runs)
        count = self.pick.randrange(1, min(6, self.account.free + 1))
        more, mine = self.ids(len(run.ids), count * SIZE), self.account.take(count)
        before, ids = list(run.lease.blocks), run.ids + list(more)
        known = run.root.find(ids)[len(before) :]
        expected = before + known + mine[len(known) :]
        lease, spare = self.tree.insert(run.lease, more, mine)
        assert lease is run.lease
        assert lease.blocks == expected, "the tree's blocks come first, then the caller's"
        for end in range(len(before) + len(known) + 1, len(expected) + 1):
            run.root.blocks[tuple(ids[: end * SIZE])] = expected[end - 1]
        run.ids = ids
        self.counters["duplicate_blocks"] += len(known)
        self.counters["inserted_blocks"] += count - len(known)
        assert spare[: len(known)] == mine[: len(known)], "duplicates are the caller's again"
        self.account.give(spare[: len(known)])
        self.give_capped(run.root, spare[len(known) :])

    def release(self) -> None:
        if not self.runs:
            return
        run = self.runs.pop(self.pick.randrange(len(self.runs)))
        self.time += 1
        run.root.used.update(dict.fromkeys(run.lease.blocks, self.time))
        self.give_capped(run.root, self.tree.release(run.lease))

    def evict(self) -> None:
        wanted, idle = self.pick.randrange(1, 12), self.idle(self.roots)
        freed = self.tree.evict(wanted)
        assert len(freed) == min(wanted, len(idle)), "too few or too many were evicted"
        self.give(freed, "space")

    def set_share(self) -> None:
        scope = self.pick.choice(SCOPES)
        floor, cap = self.pick.randrange(6), self.pick.choice([None, 6, 8, 20])
        self.shares[scope] = floor, cap
        freed = self.tree.set_share(scope, self.share(floor, cap))
        roots = [root for root in self.roots if root.space.scope == scope and not root.wiped]
        if roots:
            self.give_capped(roots[0], freed)
        else:
            assert not freed

    def raise_epoch(self) -> None:
        """The scope's next lookup wipes it."""
        self.epochs[self.pick.choice(SCOPES)] += 1

    def drop(self) -> None:
        current = [root for root in self.roots if not root.wiped]
        if current:
            root = self.pick.choice(current)
            self.tree.drop(root.space)
            root.wiped, root.cause = True, "clear"

    def forget(self) -> None:
        if not self.runs:
            return
        run = self.pick.choice(self.runs)
        kept = self.pick.randrange(len(run.lease.blocks) + 1)
        self.tree.forget(run.lease, kept)
        at, prefix, forgotten = kept * SIZE, run.ids[: (kept + 1) * SIZE], Forgotten()
        if len(prefix) <= at or any(isinstance(id, Forgotten) for id in prefix):
            return

        def renamed(ids: list[Id]) -> list[Id]:
            return [*ids[:at], forgotten, *ids[at + 1 :]] if ids[: len(prefix)] == prefix else ids

        run.root.blocks = {tuple(renamed(list(ids))): block for ids, block in run.root.blocks.items()}
        for other in self.runs:
            if other.root is run.root:
                other.ids = renamed(other.ids)

    # The model

    def ids(self, at: int, count: int) -> "array[int]":
        """Tokens for the positions from `at` on: the common text as far as it goes, or up to a random place."""
        known = self.text[at : at + count] if self.pick.random() < 0.7 else []
        known = known[: self.pick.randrange(len(known) + 1)] if self.pick.random() < 0.5 else known
        return array("I", known + [self.pick.randrange(self.vocabulary) for _ in range(count - len(known))])

    def root_of(self, space: Namespace) -> Root:
        current = [root for root in self.roots if root.space.scope == space.scope and not root.wiped]
        for root in current:
            if root.space.epoch < space.epoch:
                root.wiped, root.cause = True, "epoch"
            elif root.space == space:
                return root
        root = Root(space)
        if any(other.space.epoch > space.epoch for other in current):
            root.wiped, root.cause = True, "epoch"
        self.roots.append(root)
        return root

    def pinned(self) -> set[int]:
        return {block for run in self.runs for block in run.lease.blocks}

    def idle(self, roots: list[Root]) -> list[int]:
        """Unpinned blocks in the order in which one scope loses them: the longest unused first, ends before starts."""
        pinned = self.pinned()
        order = [
            (root.used[block], -len(prefix), block)
            for root in roots
            for prefix, block in root.blocks.items()
            if block not in pinned
        ]
        return [block for _, _, block in sorted(order)]

    def scope_of(self, scope: ScopeName) -> list[Root]:
        return [root for root in self.roots if root.space.scope == scope and not root.wiped]

    def excess(self, scope: ScopeName) -> int:
        return sum(len(root.blocks) for root in self.scope_of(scope)) - self.shares.get(scope, (0, None))[0]

    def give(self, freed: list[int], cause: str) -> None:
        """Takes blocks out of the model, after seeing that they were the right ones."""
        gone = set(freed)
        assert len(gone) == len(freed), "a block was freed twice"
        assert gone.isdisjoint(self.pinned()), "a leased block was evicted"
        wiped = [root for root in self.roots if root.wiped]
        assert gone <= set(self.idle(wiped)) or gone >= set(self.idle(wiped)) or cause == "cap", "wiped ones go first"
        floors = []
        for scope in SCOPES:
            idle = self.idle(self.scope_of(scope))
            lost = len(gone.intersection(idle))
            assert gone.issuperset(idle[:lost]), "not the least recently used, from their ends"
            after = self.excess(scope) - lost
            floors.append((after, lost, len(idle) - lost))
        if cause == "space":
            level = max((after for after, _, left in floors if left), default=-self.total)
            assert all(after + 1 >= level for after, lost, _ in floors if lost), "another was further above its floor"
        for root in self.roots:
            kept = {prefix: block for prefix, block in root.blocks.items() if block not in gone}
            lost = len(root.blocks) - len(kept)
            self.counters[f"evicted_{'cap' if cause == 'cap' else root.cause}_blocks"] += lost
            root.blocks = kept
        self.account.give(freed)

    def give_capped(self, root: Root, freed: list[int]) -> None:
        """What a scope lost because it was above its cap: its own blocks, exactly as many as it must."""
        over = 0
        cap = self.shares.get(root.space.scope, (0, None))[1]
        if cap is not None and not root.wiped:
            mine = self.scope_of(root.space.scope)
            over = max(0, min(sum(len(root.blocks) for root in mine) - cap, len(self.idle(mine))))
            assert set(freed) <= set(self.idle(mine)), "a cap took another scope's blocks"
        assert len(freed) == over, "a cap took too much or too little"
        self.give(freed, "cap")

    def compare(self) -> None:
        self.tree.check()
        self.account.check()
        leased = {id(run.root) for run in self.runs}
        self.roots = [root for root in self.roots if root.blocks or id(root) in leased]
        held = [block for root in self.roots for block in root.blocks.values()]
        uses = Counter(block for run in self.runs for block in run.lease.blocks)
        assert self.tree.cached == len(held)
        assert self.tree.evictable == len(set(held)) - len(uses)
        assert self.tree.shared == sum(count > 1 for count in uses.values())
        assert self.account.free + self.tree.cached == self.total
        assert +self.tree.counters == +self.counters
        for run in self.runs:
            assert run.lease.blocks == run.root.find(run.ids), "a lease's blocks changed"
        for scope in SCOPES:
            assert self.tree.cached_of(scope) == sum(len(root.blocks) for root in self.scope_of(scope))
        spaces = {root.space for root in self.roots if not root.wiped}
        assert set(self.tree._roots) == spaces, "a root outlives its last block and lease, or goes before"
