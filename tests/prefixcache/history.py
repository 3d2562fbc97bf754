"""A random life of the prefix tree beside a model that is too simple to be wrong: one entry per cached block.

The model keeps no edges, no heaps and no sums. It says what a lookup finds, which blocks an insert must give back, what
may be evicted or is over and in which order, which floors are granted, and what every counter has to be.
"""

import random
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import ModuleType

from engine.kv_blocks.block_pool import BlockPool
from prefixcache import tree as unbroken
from prefixcache.lease import Lease
from prefixcache.namespace import CacheShare, Namespace, RetentionPolicy, ScopeKey
from prefixcache.tree import PrefixTree

SIZE = 4
SCOPES = [(2, bytes([number]) * 16) for number in range(4)] + [(1, bytes(16))]
ACCOUNTS = dict(zip(SCOPES, (b"a", b"b", b"a", b"c", b"a"), strict=True))
SLEEPY = 1000  # the first seed of those lives in which little is kept and blocks move, which leaves less for all else
KEEPS_S = (None, None, 0.5, 9.5, 30.5)  # never a whole number of seconds, as the clock's times are


@dataclass(eq=False)
class Forgotten:
    """What the first token of a forgotten block is from then on: equal to none that is looked up."""


Id = int | Forgotten


@dataclass(eq=False)
class Root:
    """One life of a namespace, from its first lookup until it is empty or wiped (then `cause` says why)."""

    space: Namespace
    cause: str = ""
    wiped: bool = False
    blocks: dict[tuple[Id, ...], int] = field(default_factory=dict)  # a whole prefix → its last block
    used: dict[int, tuple[int, int]] = field(default_factory=dict)  # block → when a lease on it last ended, and which
    reads: Counter[int] = field(default_factory=Counter)  # block → how many requests began with it

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
        self.sleepy = seed >= SLEEPY
        self.total = self.pick.choice([12, 40, 150])
        self.vocabulary = self.pick.choice([2, 3, 50])
        self.text = [self.pick.randrange(self.vocabulary) for _ in range(64)]  # what everybody says again and again
        self.scopes = SCOPES[: self.pick.randrange(1, len(SCOPES) + 1)] + SCOPES[-1:]
        self.tree = module.PrefixTree(self.total, SIZE, lambda: self.seconds)
        self.account = BlockPool(self.total)
        self.roots: list[Root] = []  # of all lives that hold blocks or leases
        self.runs: list[Run] = []
        self.epochs = dict.fromkeys(SCOPES, 0)
        self.newest = dict.fromkeys(SCOPES, 0)  # epochs that the tree has heard of
        self.shares = dict.fromkeys(set(ACCOUNTS.values()), CacheShare())  # what lookups say
        self.keeps_s: dict[ScopeKey, float | None] = {scope: self.pick.choice(KEEPS_S) for scope in SCOPES}
        self.granted: dict[bytes, CacheShare] = {}  # what the tree was told last
        self.told_s: dict[ScopeKey, float | None] = {}
        self.counters: Counter[str] = Counter()
        self.seconds = 0
        self.releases = 0

    def run(self, acts: int = 200) -> "History":
        doings = [self.match] * 30 + [self.grow] * 28 + [self.release] * 29 + [self.evict] * 8 + [self.sweep] * 5
        doings += [self.set_share, self.set_keep, self.raise_epoch, self.forget]
        if self.sleepy:
            doings += [self.keep_hottest] * 4 + [self.rename] * 2
        for _ in range(acts):
            self.seconds += self.pick.randrange(3)
            self.pick.choice(doings)()
            self.compare()
        while self.runs:
            self.release()
            self.compare()
        self.give(self.tree.evict(self.total), "space")
        self.give(self.tree.sweep(self.total), "age")
        assert self.account.free_blocks == self.total
        assert not self.tree._roots
        assert not self.tree._scopes
        assert not self.tree.wiped.roots
        assert not self.tree._accounts.by_name
        return self

    # Acts

    def match(self) -> None:
        kind, id = scope = self.pick.choice(self.scopes)
        late = self.pick.random() < 0.1
        epoch = max(0, self.epochs[scope] - late)
        space = Namespace(
            self.pick.choice("rrrs"), "", "", "kv", SIZE, kind, id, epoch, self.pick.choice([0, 0, 0, 0, 0, 7])
        )
        account = ACCOUNTS[scope]
        keep = RetentionPolicy(account, self.shares[account], self.keeps_s[scope])
        root = self.root_of(space, keep)
        ids = self.ids(0, self.pick.randrange(40))
        if (findable := root.findable()) and self.pick.random() < 0.4:
            ids = array("I", self.pick.choice(findable)) + ids[: self.pick.randrange(SIZE)]
        self.expire(root, ids)
        known = self.tree._scopes.get(scope)
        same_policy = known is not None and known.keep_s == keep.keep_s
        matched = self.tree.matched_tokens(space, memoryview(ids))
        most = self.pick.randrange(12) if self.sleepy and self.pick.random() < 0.2 else self.total
        lease = self.tree.match(space, ids, keep, lambda blocks: min(len(blocks), most))
        assert min(matched, most * SIZE) == lease.tokens or not same_policy, "what is predicted is not what is found"
        assert lease.blocks == root.find(ids)[:most], "not the longest cached prefix that is of use"
        if self.sleepy and self.pick.random() < 0.7:
            self.tree.count_read(lease)
            root.reads.update(lease.blocks)
        self.counters["lookups"] += 1
        self.counters["lookup_tokens"] += len(ids)
        self.counters["hit_tokens"] += lease.tokens
        self.runs.append(Run(root, lease, list(ids[: lease.tokens])))

    def grow(self) -> None:
        if not self.runs or not self.account.free_blocks:
            return
        run = self.pick.choice(self.runs)
        count = self.pick.randrange(1, min(6, self.account.free_blocks + 1))
        more, mine = self.ids(len(run.ids), count * SIZE), self.account.allocate(count)
        before, ids = list(run.lease.blocks), run.ids + list(more)
        self.expire(run.root, ids)
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
        self.account.free(spare[: len(known)])
        self.give_capped(run.root, spare[len(known) :])

    def release(self) -> None:
        if not self.runs:
            return
        run = self.runs.pop(self.pick.randrange(len(self.runs)))
        self.releases += 1
        run.root.used.update(dict.fromkeys(run.lease.blocks, (self.seconds, self.releases)))
        self.give_capped(run.root, self.tree.release(run.lease))

    def evict(self) -> None:
        wanted, idle = self.pick.randrange(1, 12), self.idle([root for root in self.roots if not root.wiped])
        freed = self.tree.evict(wanted)
        assert len(freed) == min(wanted, len(idle)), "too few or too many were evicted"
        self.give(freed, "space")

    def sweep(self) -> None:
        wanted, over = self.pick.randrange(1, 12), self.over()
        wiped = self.idle([root for root in self.roots if root.wiped])
        freed = self.tree.sweep(wanted)
        assert len(freed) == min(wanted, len(over) + len(wiped)), "too few or too many were swept"
        assert set(freed) <= set(over) | set(wiped)
        assert set(freed) <= set(wiped) or set(freed) >= set(wiped), "wiped ones go first"
        self.give(freed, "age")

    def keep_hottest(self) -> None:
        """All goes but what is leased and so many others, of which each was read as often as any that went, and as
        lately; none of them is barred, or behind one that is."""
        most, idle = self.pick.randrange(self.total), self.idle([root for root in self.roots if not root.wiped])
        barred = set(self.pick.sample(sorted(idle), self.pick.randrange(len(idle) // 4 + 1)))
        clear = [
            (root, prefix)
            for root in self.roots
            if not root.wiped
            for prefix in root.findable()
            if root.blocks[prefix] in idle and barred.isdisjoint(root.find(prefix))
        ]
        freed = set(self.tree.keep_hottest(most, barred))
        kept = [(root, prefix) for root, prefix in clear if root.blocks[prefix] not in freed]
        assert len(kept) == min(most, len(clear)) == len(idle) - len(freed), "too few or too many were kept"
        gone = [(root, prefix) for root, prefix in clear if root.blocks[prefix] in freed]
        worst = min((self.heat(root, prefix) for root, prefix in kept), default=None)
        best = max((self.heat(root, prefix) for root, prefix in gone), default=None)
        assert worst is None or best is None or worst >= best, "another one was wanted sooner"
        for root in self.roots:
            for prefix in [prefix for prefix, block in root.blocks.items() if block in freed]:
                del root.blocks[prefix]
        for root, prefix in kept:
            root.reads[root.blocks[prefix]] //= 2
        self.counters["evicted_space_blocks"] += len(freed)
        self.account.free(list(freed))

    def heat(self, root: Root, prefix: tuple[Id, ...]) -> tuple[int, tuple[int, int]]:
        block = root.blocks[prefix]
        return root.reads[block], root.used[block]

    def rename(self) -> None:
        """Contents of some blocks move to free ones."""
        held = [block for root in self.roots for block in root.blocks.values()]
        moved = self.pick.sample(held, self.pick.randrange(1 + min(len(held), self.account.free_blocks)))
        renamed = dict(zip(moved, self.account.allocate(len(moved)), strict=True))
        self.tree.rename(renamed)
        for run in self.runs:
            run.lease.rename(renamed)
        for root in self.roots:
            root.blocks = {prefix: renamed.get(block, block) for prefix, block in root.blocks.items()}
            root.used = {renamed.get(block, block): used for block, used in root.used.items()}
            root.reads = Counter({renamed.get(block, block): reads for block, reads in root.reads.items()})
        self.account.free(moved)

    def set_share(self) -> None:
        """The account's next lookup says so."""
        account = self.pick.choice(sorted(self.shares))
        self.shares[account] = CacheShare(self.pick.choice([0, 2, 5, self.total]), self.pick.choice([None, 6, 8, 20]))

    def set_keep(self) -> None:
        """The scope's next lookup says so."""
        self.keeps_s[self.pick.choice(SCOPES)] = self.pick.choice(KEEPS_S)

    def raise_epoch(self) -> None:
        """The scope's next lookup wipes it."""
        self.epochs[self.pick.choice(SCOPES)] += 1

    def forget(self) -> None:
        if not self.runs:
            return
        run = self.pick.choice(self.runs)
        kept = self.pick.randrange(len(run.lease.blocks) + 1)
        self.tree.forget(run.lease, kept)
        self.forgotten(run.root, run.ids, kept)

    # The model

    def forgotten(self, root: Root, ids_of_path: list[Id], kept: int) -> None:
        """What begins with the first `kept` + 1 blocks of the path is found no more, by nobody."""
        at, prefix, forgotten = kept * SIZE, ids_of_path[: (kept + 1) * SIZE], Forgotten()
        if len(prefix) <= at or any(isinstance(id, Forgotten) for id in prefix):
            return

        def renamed(ids: list[Id]) -> list[Id]:
            return [*ids[:at], forgotten, *ids[at + 1 :]] if ids[: len(prefix)] == prefix else ids

        root.blocks = {tuple(renamed(list(ids))): block for ids, block in root.blocks.items()}
        for other in self.runs:
            if other.root is root:
                other.ids = renamed(other.ids)

    def expire(self, root: Root, ids: Iterable[Id]) -> None:
        """A lookup of these tokens finds nothing from the first block on whose time is over."""
        ids, over = list(ids), set(self.over())
        for kept, block in enumerate(root.find(ids)):
            if block in over:
                self.forgotten(root, ids, kept)
                return

    def over(self) -> list[int]:
        """Unused blocks whose time is over."""
        return [
            block
            for root in self.roots
            if not root.wiped and (keep_s := self.told_s[root.space.scope]) is not None
            for block in self.idle([root])
            if root.used[block][0] <= self.seconds - keep_s
        ]

    def ids(self, at: int, count: int) -> "array[int]":
        """Tokens for the positions from `at` on: the common text as far as it goes, or up to a random place."""
        known = self.text[at : at + count] if self.pick.random() < 0.7 else []
        known = known[: self.pick.randrange(len(known) + 1)] if self.pick.random() < 0.5 else known
        return array("I", known + [self.pick.randrange(self.vocabulary) for _ in range(count - len(known))])

    def root_of(self, space: Namespace, keep: RetentionPolicy) -> Root:
        late = space.epoch < self.newest[space.scope]
        self.newest[space.scope] = max(space.epoch, self.newest[space.scope])
        for root in self.scope_of(space.scope):
            if root.space.epoch < space.epoch:
                root.wiped, root.cause = True, "epoch"
        if not late:
            self.told_s[space.scope] = keep.keep_s
            alive = {ACCOUNTS[root.space.scope] for root in self.roots if not root.wiped}
            others = sum(self.granted[account].floor for account in alive - {keep.account})
            cap = self.total if keep.share.cap is None else keep.share.cap
            self.granted[keep.account] = CacheShare(min(keep.share.floor, cap, self.total - others), keep.share.cap)
            for root in self.scope_of(space.scope):
                if root.space == space:
                    return root
        root = Root(space)
        if late:
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

    def scope_of(self, scope: ScopeKey) -> list[Root]:
        return [root for root in self.roots if root.space.scope == scope and not root.wiped]

    def account_of(self, account: bytes) -> list[Root]:
        return [root for root in self.roots if ACCOUNTS[root.space.scope] == account and not root.wiped]

    def cached(self, account: bytes) -> int:
        return sum(len(root.blocks) for root in self.account_of(account))

    def give(self, freed: list[int], cause: str) -> None:
        """Takes blocks out of the model, after seeing that they were the right ones."""
        gone = set(freed)
        assert len(gone) == len(freed), "a block was freed twice"
        assert gone.isdisjoint(self.pinned()), "a leased block was evicted"
        floors = []
        for account in self.shares if cause != "age" else ():
            idle = self.idle(self.account_of(account))
            lost = len(gone.intersection(idle))
            assert gone.issuperset(idle[:lost]), "not the least recently used, from their ends"
            after = self.cached(account) - self.granted.get(account, CacheShare()).floor - lost
            floors.append((after, lost, len(idle) - lost))
        if cause == "space":
            level = max((after for after, _, left in floors if left), default=-self.total)
            assert all(after + 1 >= level for after, lost, _ in floors if lost), "another was further above its floor"
        for root in self.roots:
            kept = {prefix: block for prefix, block in root.blocks.items() if block not in gone}
            lost = len(root.blocks) - len(kept)
            self.counters[f"evicted_{root.cause if root.wiped else cause}_blocks"] += lost
            assert all(len(prefix) == SIZE or prefix[:-SIZE] in kept for prefix in kept), "a start went before its end"
            root.blocks = kept
        self.account.free(freed)

    def give_capped(self, root: Root, freed: list[int]) -> None:
        """What an account lost because it was above its cap: its own blocks, exactly as many as it must."""
        over, account = 0, ACCOUNTS[root.space.scope]
        if not root.wiped and (cap := self.granted[account].cap) is not None:
            idle = self.idle(self.account_of(account))
            over = max(0, min(self.cached(account) - cap, len(idle)))
            assert set(freed) <= set(idle), "a cap took another account's blocks"
        assert len(freed) == over, "a cap took too much or too little"
        self.give(freed, "cap")

    def compare(self) -> None:
        self.tree.check()
        leased = {id(run.root) for run in self.runs}
        self.roots = [root for root in self.roots if root.blocks or id(root) in leased]
        held = [block for root in self.roots for block in root.blocks.values()]
        self.account.check(held)
        uses = Counter(block for run in self.runs for block in run.lease.blocks)
        assert self.tree.cached_blocks == len(held)
        assert self.tree.unused_blocks == len(set(held)) - len(uses)
        assert self.tree.shared_blocks == sum(count > 1 for count in uses.values())
        assert self.account.free_blocks + self.tree.cached_blocks == self.total
        assert +self.tree.counters == +self.counters
        for run in self.runs:
            assert run.lease.blocks == run.root.find(run.ids), "a lease's blocks changed"
        for account in self.shares:
            assert cached_of(self.tree, account) == self.cached(account)
            found = self.tree._accounts.by_name.get(account)
            assert found is None or (found.floor, found.cap) == self.granted[account]
            assert (found is None) == (not self.account_of(account)), "an account outlives its last root"
        spaces = {root.space for root in self.roots if not root.wiped}
        assert set(self.tree._roots) == spaces, "a root outlives its last block and lease, or goes before"


def cached_of(tree: PrefixTree, account: bytes) -> int:
    """Cached blocks of one account, wiped ones not counted."""
    share = tree._accounts.by_name.get(account)
    return share.cached if share else 0
