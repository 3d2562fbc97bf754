"""A radix tree per namespace: which KV blocks hold which tokens. It knows no tensors, sequences or tenants.

Only whole blocks are in the tree. Token bytes are compared exactly; nothing here is decided by a hash. Looking up and
pinning are one operation: what `match` returns cannot be evicted until it is released.

How a sequence uses it: `match` its prompt (all but the last token, which has to be computed), compute the rest into
blocks of its own, `insert` each block once it is full, under the same lease, also while generating; `release` at its
end or when it is preempted. What it inserted stays until it is evicted or its time is over, or is found no more once
the tree was told to `forget` it. Where another sequence was first to insert the same tokens, its blocks enter the
lease: read those from then on, and free your own, which hold the same. A sequence without a scope (a REQUEST) never
comes here.

The method is that of SGLang's RadixAttention (Zheng et al., 2023), with a root per namespace and shares per account.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count as numbers
from math import inf, nextafter
from typing import Final, Literal

from prefixcache.lazy_heap import LazyHeap
from prefixcache.namespace import Namespace, RetentionPolicy, ScopeKey
from prefixcache.radix import TOKEN_BYTES, NamespaceRoot, RadixNode
from prefixcache.shares import AccountShare, AccountShares, ScopeState

EPOCHS_MAX: Final = 1 << 16
EvictionCause = Literal["space", "cap", "epoch", "age"]


class Lease:
    """A pinned path from a namespace's root. `blocks` are its block ids in order; they stay valid until `release`.

    It belongs to the sequence that asked for it; `PrefixTree.insert` lengthens it.
    """

    __slots__ = ("_node", "_root", "block_tokens", "blocks")

    def __init__(self, root: NamespaceRoot, node: RadixNode, blocks: list[int]) -> None:
        self._root: NamespaceRoot | None = root
        self._node = node
        self.blocks = blocks
        self.block_tokens = root.namespace.block_tokens

    @property
    def tokens(self) -> int:
        """Tokens whose KV is in `blocks`."""
        return len(self.blocks) * self.block_tokens

    def rename(self, renamed: Mapping[int, int]) -> None:
        """Calls some blocks by other ids, as the tree does that was told the same."""
        self.blocks[:] = [renamed.get(block, block) for block in self.blocks]


class PrefixTree:
    """The cached blocks of all namespaces. Block ids are the caller's, below 2**64; it says when one is free again.

    Every operation costs the bytes it compares or copies plus the nodes on its path; evicting costs a few heap
    operations per edge and per change of account, however many nodes, scopes and accounts there are. `counters` only
    grow: lookups, lookup_tokens, hit_tokens, inserted_blocks, duplicate_blocks and
    evicted_{space, cap, epoch, age}_blocks.
    """

    def __init__(self, blocks: int, block_tokens: int, clock: Callable[[], float]) -> None:
        """`blocks` is the pool's size; the clock gives seconds and never goes back."""
        assert blocks > 0
        assert block_tokens > 0
        self.block_tokens = block_tokens
        self.counters: Counter[str] = Counter()
        self._blocks = blocks
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._clock = clock
        self._accounts = AccountShares(blocks)
        self._sums = self._accounts.sums
        self._wiped = AccountShare(b"", self._sums)  # roots of old epochs: never matched, swept and not evicted
        self._scopes: dict[ScopeKey, ScopeState] = {}
        self._epochs: OrderedDict[ScopeKey, int] = OrderedDict()  # of scopes that have nothing here now
        self._roots: dict[Namespace, NamespaceRoot] = {}  # those that can be found
        self._ends: LazyHeap[NamespaceRoot] = LazyHeap(NamespaceRoot.over_s)
        self._acted_s = 0.0

    @property
    def cached(self) -> int:
        """Blocks that the tree holds."""
        return self._sums.cached

    @property
    def unused(self) -> int:
        """Cached blocks that no lease pins: all of them can be had, by `sweep` or by `evict`."""
        return self._sums.cached - self._sums.pinned

    @property
    def shared(self) -> int:
        """Cached blocks that two or more leases pin at this moment."""
        return self._sums.shared

    def cached_of(self, account: bytes) -> int:
        """Cached blocks of one account, wiped ones not counted."""
        found = self._accounts.find(account)
        return found.cached if found else 0

    def match(self, namespace: Namespace, tokens: "array[int]", keep: RetentionPolicy) -> Lease:
        """Finds and pins the longest cached prefix, in whole blocks, of u32 `tokens`. The lease may be empty.

        What `keep` says holds from now on: its share for the account, its keep_s for the scope. A scope that several
        accounts use counts for the one that was the first to. A cap that was lowered is kept from the scope's next
        `insert` or `release` on.
        """
        root = self._root_of(namespace, keep)
        packed, at, over_s = tokens.tobytes(), 0, self._over_s(root)
        node: RadixNode = root
        path, blocks = [node], list[int]()
        while (child := root.next(node, packed, at, over_s)) is not None:
            node = child
            path.append(node)
            blocks += node.blocks
            at += len(node.label)
        now_s = self._act()
        for node in path:
            root.pin(node, now_s)
        self.counters["lookups"] += 1
        self.counters["lookup_tokens"] += len(tokens)
        self.counters["hit_tokens"] += at // TOKEN_BYTES
        return Lease(root, node, blocks)

    def insert(self, lease: Lease, tokens: "array[int]", blocks: Sequence[int]) -> tuple[Lease, list[int]]:
        """Adds full blocks behind the lease's end and pins them too. `tokens` has exactly `blocks`' tokens.

        Where the tree has the same tokens already, its own blocks enter the lease. Returns the lease, now longer, and
        the block ids that are the caller's again: its duplicates, and unused blocks that a cap made the account lose.
        """
        root = lease._root
        assert root is not None, "the lease is released"
        assert len(tokens) == len(blocks) * self.block_tokens
        packed, at, over_s = tokens.tobytes(), 0, self._over_s(root)
        node = lease._node
        spare: list[int] = []
        while (child := root.next(node, packed, at, over_s)) is not None:
            node = child
            first = at // self._block_bytes
            spare += blocks[first : first + len(node.blocks)]
            lease.blocks += node.blocks
            at += len(node.label)
            root.pin(node, self._acted_s)
        self.counters["duplicate_blocks"] += len(spare)
        added = list(blocks[at // self._block_bytes :])
        if added:
            node = root.append(node, packed[at:], added, self._acted_s)
            lease.blocks += added
            self.counters["inserted_blocks"] += len(added)
            assert self._sums.cached <= self._blocks, "more blocks than the pool has"
        lease._node = node
        return lease, spare + self._keep_cap(root.account)

    def release(self, lease: Lease) -> list[int]:
        """Unpins the path; the lease is over. Returns the block ids that a cap made the account give up."""
        root = lease._root
        assert root is not None, "released twice"
        lease._root = None
        now_s = self._act()
        for node in lease._node.path():
            root.unpin(node, now_s)
        self._line_up(root)
        freed = self._keep_cap(root.account)
        self._remove_if_empty(root)
        return freed

    def evict(self, count: int) -> list[int]:
        """Frees up to `count` unpinned blocks that could be found and returns their ids.

        Those of the account that is furthest above its floor go first, its least recently used leaves first, each from
        its end. An account goes below its floor only where no other has unpinned blocks above its own.
        """
        freed: list[int] = []
        while len(freed) < count and (furthest := self._accounts.furthest()) is not None:
            account, ahead = furthest
            more = self._evict_from(account, min(count - len(freed), ahead), "space")
            assert more, "unused blocks that cannot be had"
            freed += more
        return freed

    def sweep(self, count: int) -> list[int]:
        """Frees up to `count` unpinned blocks that are found no more: of old epochs, then those whose time is over.

        Costs next to nothing where there are none.
        """
        freed = self._evict_from(self._wiped, count, "epoch")
        while len(freed) < count and (root := self._ends.least()) is not None:
            age = root.age()
            if age is None or age > self._over_s(root):
                break
            freed += self._trim(root, count - len(freed), "age")
        return freed

    def forget(self, lease: Lease, blocks: int) -> None:
        """Makes what the lease reads behind its first `blocks`, and all that hangs below it, unfindable at once.

        Leases on it go on, and may grow. It is evicted in its turn, as if it were found no more by chance.
        """
        root = lease._root
        assert root is not None, "the lease is released"
        node, start = lease._node, len(lease.blocks) - len(lease._node.blocks)
        while start > blocks:
            assert node.parent is not None
            node = node.parent
            start -= len(node.blocks)
        if start + len(node.blocks) <= blocks or root.is_hidden(node):
            return  # nothing is behind, or it is forgotten already
        if start < blocks:
            root.split(node, blocks - start)
        root.hide(node)

    def read(self, lease: Lease) -> None:
        """One more request began with what the lease has: not the same again, nor another choice of it."""
        for above in lease._node.path():
            above.reads += 1

    def keep_hottest(self, most: int, barred: Container[int]) -> list[int]:
        """Evicts all that no lease pins but the `most` blocks that may be wanted soonest, and returns what it evicted.

        Prefixes that most requests began with come first, which are system prompts, then those that were used last;
        always from a root on, and up to the first `barred` block. What was read so often counts half from then on.
        """
        kept = self._hottest(most, barred)
        for root, node in kept:
            root.pin(node, node.used)
        freed: list[int] = []
        for account in self._accounts.all():
            freed += self._evict_from(account, account.unpinned, "space")
        for root, node in kept:
            node.reads //= 2
            root.unpin(node, node.used)
        for root in dict.fromkeys(root for root, _ in kept):
            self._line_up(root)
            self._accounts.rank(root.account)
        return freed

    def rename(self, renamed: Mapping[int, int]) -> None:
        """Calls some blocks by other ids, whose contents moved. Leases have to be told too. Walks over everything."""
        for root in [*self._wiped.roots, *self._roots.values()]:
            root.rename(renamed)

    def check(self) -> set[int]:
        """All cached blocks. Raises AssertionError where structure or sums are wrong. Costs a walk over everything."""
        blocks: set[int] = set()
        shared = 0
        self._accounts.check()
        for root in [*self._wiped.roots, *self._roots.values()]:
            shared += root.check(blocks)
        roots = {root for scope in self._scopes.values() for root in scope.roots}
        assert roots == set(self._roots.values()), "a root is found and has no scope, or the other way round"
        for name, scope in self._scopes.items():
            assert scope.roots, "an empty scope is kept"
            assert all(root.namespace.scope == name and root.namespace.epoch == scope.epoch for root in scope.roots)
        for namespace, root in self._roots.items():
            assert root.namespace == namespace
            assert root.account.roots.keys() >= {root}
            self._ends.check(root)
        assert all(root.account is self._wiped for root in self._wiped.roots)
        assert self._wiped.cached == sum(root.cached for root in self._wiped.roots)
        assert self._wiped.pinned == sum(root.pinned for root in self._wiped.roots)
        assert len(self._epochs) <= EPOCHS_MAX
        assert self._epochs.keys().isdisjoint(self._scopes)
        assert (len(blocks), shared) == (self._sums.cached, self._sums.shared)
        assert 0 <= self._sums.pinned <= self._sums.cached <= self._blocks
        return blocks

    # Inside

    def _act(self) -> float:
        """Now, and later than every act before: what was used when is never in doubt."""
        self._acted_s = max(self._clock(), nextafter(self._acted_s, inf))
        return self._acted_s

    def _over_s(self, root: NamespaceRoot) -> float:
        """What was last used then or before is found no more."""
        keep_s = root.scope.keep_s
        return -inf if keep_s is None else self._clock() - keep_s

    def _root_of(self, namespace: Namespace, keep: RetentionPolicy) -> NamespaceRoot:
        """The namespace's root, new where there is none.

        A newer epoch wipes the scope. What a lookup of an older one, which somebody sends who has not heard yet, finds
        is empty, and what it leaves is found by nobody.
        """
        assert namespace.block_tokens == self.block_tokens
        name = namespace.scope
        scope = self._scopes.get(name)
        newest = self._epochs.get(name, 0) if scope is None else scope.epoch
        if namespace.epoch < newest:
            root = NamespaceRoot(namespace, self._wiped, ScopeState(namespace.epoch))
            self._wiped.take_in(root)
            return root
        if scope is not None and namespace.epoch > newest:
            for old in list(scope.roots):
                self._wipe(old)
            scope = None
        if scope is None:
            self._epochs.pop(name, None)
            scope = self._scopes[name] = ScopeState(namespace.epoch)
        root = self._roots.get(namespace) or self._new_root(namespace, keep, scope)
        if root.account.name == keep.account:
            self._accounts.grant(root.account, keep.share)
        if scope.keep_s != keep.keep_s:
            scope.keep_s = keep.keep_s
            for root_of_scope in scope.roots:
                self._ends.put(root_of_scope)
        return root

    def _new_root(self, namespace: Namespace, keep: RetentionPolicy, scope: ScopeState) -> NamespaceRoot:
        account = next(iter(scope.roots)).account if scope.roots else self._accounts.named(keep.account)
        root = self._roots[namespace] = NamespaceRoot(namespace, account, scope)
        account.take_in(root)
        scope.roots[root] = None
        return root

    def _wipe(self, root: NamespaceRoot) -> None:
        account = root.account
        self._unname(root)
        self._wiped.take_in(root)
        self._accounts.forget_if_empty(account)
        self._remove_if_empty(root)

    def _unname(self, root: NamespaceRoot) -> None:
        """Nobody finds the root any more. A scope that has no other is forgotten, but for its epoch."""
        name = root.namespace.scope
        del self._roots[root.namespace], root.scope.roots[root]
        self._ends.remove(root)
        if not root.scope.roots:
            del self._scopes[name]
            if root.scope.epoch:
                self._epochs[name] = root.scope.epoch
                if len(self._epochs) > EPOCHS_MAX:
                    self._epochs.popitem(last=False)

    def _remove_if_empty(self, root: NamespaceRoot) -> None:
        if root.cached or root.pins or root not in root.account.roots:
            return
        if root.account is not self._wiped:
            self._unname(root)
        root.account.leave_out(root)
        self._accounts.forget_if_empty(root.account)

    def _keep_cap(self, account: AccountShare) -> list[int]:
        if account is self._wiped:
            return []
        freed = self._evict_from(account, account.over, "cap")
        self._accounts.rank(account)
        return freed

    def _hottest(self, most: int, barred: Container[int]) -> list[tuple[NamespaceRoot, RadixNode]]:
        """The nodes that are kept, cut where they have too much; none that is pinned already. A node is never read more
        often, nor later, than the one above it, so that the next one is always the best below those that are kept."""
        kept: list[tuple[NamespaceRoot, RadixNode]] = []
        ranks: list[tuple[int, float, int, NamespaceRoot, RadixNode]] = []
        number = numbers()

        def offer(root: NamespaceRoot, node: RadixNode) -> None:
            for child in root.found(node):
                heappush(ranks, (-child.reads, -child.used, next(number), root, child))

        for root in self._roots.values():
            offer(root, root)
        while ranks and most:
            *_, root, node = heappop(ranks)
            if not node.pins:
                size = len(node.blocks)
                clear = min(most, next((at for at, block in enumerate(node.blocks) if block in barred), size))
                if 0 < clear < size:
                    kept.append((root, root.split(node, clear)))
                most -= clear
                if clear < size:
                    continue
                kept.append((root, node))
            offer(root, node)
        return kept

    def _line_up(self, root: NamespaceRoot) -> None:
        """What of it became free may be the next to be evicted, or to be over."""
        root.account.ages.put(root)
        self._ends.put(root)

    def _evict_from(self, account: AccountShare, count: int, cause: EvictionCause) -> list[int]:
        freed: list[int] = []
        while len(freed) < count and (root := account.ages.least()) is not None:
            freed += self._trim(root, count - len(freed), cause)
        return freed

    def _trim(self, root: NamespaceRoot, count: int, cause: EvictionCause) -> list[int]:
        freed = root.trim(count)
        self.counters[f"evicted_{cause}_blocks"] += len(freed)
        self._remove_if_empty(root)
        return freed
