"""A radix tree per namespace: which KV blocks hold which tokens. It knows no tensors, sequences or tenants.

Only whole blocks are in the tree. Token bytes are compared exactly; nothing here is decided by a hash. Looking up and
pinning are one operation: what `match` returns cannot be evicted until it is released.

How a sequence uses it: `match` its prompt (all but the last token, which has to be computed), compute the rest into
blocks of its own, `insert` each block once it is full, under the same lease, also while generating; `release` at its
end or when it is preempted. What it inserted stays until it is evicted, expires, or is hidden by `forget`. Where
another sequence was first to insert the same tokens, the other's blocks enter the lease: read those from then on, and
free your own, which hold the same. A sequence without a scope (a REQUEST) never comes here.

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
from prefixcache.lease import Lease
from prefixcache.names import NAME_BYTES, BlockNames, split_names
from prefixcache.namespace import Namespace, RetentionPolicy, ScopeKey
from prefixcache.radix import TOKEN_BYTES, AccountShare, NamespaceRoot, RadixNode, ScopeState
from prefixcache.shares import AccountShares
from prefixcache.tier import DepartedBlocks

EPOCHS_MAX: Final = 1 << 16
EvictionCause = Literal["space", "cap", "epoch", "age"]


class PrefixTree:
    """The cached blocks of all namespaces. Block ids are the caller's, below 2**64; methods return ids to be freed.

    Every operation costs the bytes it compares or copies plus the nodes on its path; evicting costs a few heap
    operations per edge and per change of account, however many nodes, scopes and accounts there are. `counters` only
    grow: lookups, lookup_tokens, hit_tokens, inserted_blocks, duplicate_blocks and
    evicted_{space, cap, epoch, age}_blocks.
    """

    def __init__(
        self, blocks: int, block_tokens: int, clock: Callable[[], float], names: BlockNames | None = None
    ) -> None:
        """`blocks` is the pool's size; the clock gives seconds and never goes back. With `names`, what is evicted for
        want of space is told by `take_departed`."""
        assert blocks > 0
        assert block_tokens > 0
        self.block_tokens = block_tokens
        self.counters: Counter[str] = Counter()
        self._blocks = blocks
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._clock = clock
        self._names = names
        self._departed: list[DepartedBlocks] = []
        self._accounts = AccountShares(blocks)
        self._totals = self._accounts.totals
        self.wiped = AccountShare(b"", self._totals)  # roots of old epochs: never matched, swept and not evicted
        self._scopes: dict[ScopeKey, ScopeState] = {}
        self._epochs: OrderedDict[ScopeKey, int] = OrderedDict()  # of scopes that have no blocks now
        self._raised: OrderedDict[bytes, int] = OrderedDict()  # by account or scope id, whether it has blocks or not
        self._roots: dict[Namespace, NamespaceRoot] = {}  # roots that can be found
        self._expiring: LazyHeap[NamespaceRoot] = LazyHeap(NamespaceRoot.expires_s)
        self._operation_s = 0.0

    @property
    def cached_blocks(self) -> int:
        """Blocks that the tree holds."""
        return self._totals.cached

    @property
    def unused_blocks(self) -> int:
        """Cached blocks that no lease pins: all of them can be had, by `sweep` or by `evict`."""
        return self._totals.cached - self._totals.pinned

    @property
    def shared_blocks(self) -> int:
        """Cached blocks that two or more leases pin at this moment."""
        return self._totals.shared

    def match(
        self, namespace: Namespace, tokens: "array[int]", policy: RetentionPolicy,
        usable: Callable[[list[int]], int] = len,
    ) -> Lease:  # fmt: skip
        """Finds and pins the longest cached prefix, in whole blocks, of u32 `tokens`. The lease may be empty.

        `usable` says with how many of the blocks found the caller can begin; the lease has no more.

        The policy holds from now on: its share for the account, its keep_s for the scope. A scope that several
        accounts use counts for the one that was the first to. A cap that was lowered is kept from the scope's next
        `insert` or `release` on.
        """
        root = self._root_of(namespace, policy)
        packed, at, expired_s = tokens.tobytes(), 0, self._expired_s(root)
        node: RadixNode = root
        path, blocks = [node], list[int]()
        while (child := root.child_at(node, packed, at, expired_s)) is not None:
            node = child
            path.append(node)
            blocks += node.blocks
            at += len(node.label)
        if (count := usable(blocks)) < len(blocks):
            node = root.cut(path, blocks, count)
            at = count * self._block_bytes
        now_s = self._tick()
        for reached in path:
            root.pin(reached, now_s)
        self.counters["lookups"] += 1
        self.counters["lookup_tokens"] += len(tokens)
        self.counters["hit_tokens"] += at // TOKEN_BYTES
        return Lease(root, node, blocks)

    def matched_tokens(self, namespace: Namespace, tokens: memoryview) -> int:
        """How many of these u32 tokens `match` would find now. It pins nothing, and is neither a use nor a lookup."""
        root = self._roots.get(namespace)
        if root is None:
            return 0
        return root.matched_blocks(tokens.cast("B"), self._expired_s(root)) * self.block_tokens

    def insert(self, lease: Lease, tokens: "array[int]", blocks: Sequence[int]) -> tuple[Lease, list[int]]:
        """Adds full blocks behind the lease's end and pins them too. `tokens` has exactly `blocks`' tokens.

        Where the tree has the same tokens already, its own blocks enter the lease. Returns the lease, now longer, and
        the block ids that are the caller's again: its duplicates, and unused blocks that a cap took off the account.
        """
        root = lease._root
        assert root is not None, "the lease is released"
        assert len(tokens) == len(blocks) * self.block_tokens
        packed, at, expired_s = tokens.tobytes(), 0, self._expired_s(root)
        node = lease._node
        spare: list[int] = []
        while (child := root.child_at(node, packed, at, expired_s)) is not None:
            node = child
            first = at // self._block_bytes
            spare += blocks[first : first + len(node.blocks)]
            lease.blocks += node.blocks
            at += len(node.label)
            root.pin(node, self._operation_s)
        self.counters["duplicate_blocks"] += len(spare)
        added = list(blocks[at // self._block_bytes :])
        if added:
            node = root.append(node, packed[at:], added, self._operation_s)
            lease.blocks += added
            self.counters["inserted_blocks"] += len(added)
            assert self._totals.cached <= self._blocks, "more blocks than the pool has"
        lease._node = node
        return lease, spare + self._keep_cap(root.account)

    def release(self, lease: Lease) -> list[int]:
        """Unpins the path; the lease is over. Returns the block ids that a cap took off the account."""
        root = lease._root
        assert root is not None, "released twice"
        lease._root = None
        now_s = self._tick()
        for node in lease._node.path():
            root.unpin(node, now_s)
        self._queue_root(root)
        freed = self._keep_cap(root.account)
        self._remove_if_empty(root)
        return freed

    def evict(self, count: int) -> list[int]:
        """Frees up to `count` unpinned blocks that could be found and returns their ids.

        Blocks of the account that is furthest above its floor go first, its least recently used leaves first, each from
        its end. An account goes below its floor only where no other has unpinned blocks above its own.
        """
        freed: list[int] = []
        while len(freed) < count and (candidate := self._accounts.next_to_evict()) is not None:
            account, ahead = candidate
            more = self._evict_from(account, min(count - len(freed), ahead), "space")
            assert more, "unused blocks cannot be evicted"
            freed += more
        return freed

    def take_departed(self) -> list[DepartedBlocks]:
        """What was evicted for want of space since the last call, but for what nobody was to find any more."""
        departed, self._departed = self._departed, []
        return departed

    def names(self, lease: Lease) -> list[bytes]:
        """The name that a lease's namespace begins with, and those of its blocks."""
        root = lease._root
        assert root is not None, "the lease is released"
        root.names_of(lease._node)
        return split_names(b"".join(node.names for node in [*lease._node.path()][::-1]))

    def last_name(self, lease: Lease) -> bytes:
        """The last of its `names`."""
        assert lease._root is not None, "the lease is released"
        return lease._root.names_of(lease._node)[-NAME_BYTES:]

    def share_of(self, lease: Lease) -> AccountShare:
        """The share that the lease's blocks count for; `wiped` where nobody else finds them any more."""
        assert lease._root is not None, "the lease is released"
        return lease._root.account

    def unused_s(self) -> float | None:
        """For how long nobody read the block that `evict` frees next; None where all are pinned."""
        candidate = self._accounts.next_to_evict()
        root = None if candidate is None else candidate[0].by_age.peek()
        used_s = None if root is None else root.oldest_used_s()
        return None if used_s is None else self._clock() - used_s

    def sweep(self, count: int) -> list[int]:
        """Frees up to `count` unpinned blocks that are found no more: first those of old epochs, then expired ones.

        Costs next to nothing where there are none.
        """
        freed = self._evict_from(self.wiped, count, "epoch")
        while len(freed) < count and (root := self._expiring.peek()) is not None:
            used_s = root.oldest_used_s()
            if used_s is None or used_s > self._expired_s(root):
                break
            freed += self._trim(root, count - len(freed), "age")
        return freed

    def raise_epochs(self, epochs: Mapping[bytes, int]) -> None:
        """Wipes what is of an epoch before these, by account or scope id, as lookups of these would, and has later
        lookups of it leave nothing. O(namespaces)."""
        for id, epoch in epochs.items():
            self._raised[id] = max(epoch, self._raised.pop(id, 0))
            if len(self._raised) > EPOCHS_MAX:
                self._raised.popitem(last=False)
        for root in list(self._roots.values()):
            epoch = max(epochs.get(root.account.name, 0), epochs.get(root.namespace.scope_id, 0))
            if epoch > root.namespace.epoch:
                root.scope.epoch = epoch
                self._wipe(root)

    def forget(self, lease: Lease, blocks: int) -> None:
        """Hides what the lease reads behind its first `blocks`, and all nodes below: it is found by nobody from now on.

        Leases on it go on, and may grow. It is evicted in its turn, like blocks that are not used any more.
        """
        root = lease._root
        assert root is not None, "the lease is released"
        node, start = lease._node, len(lease.blocks) - len(lease._node.blocks)
        while start > blocks:
            assert node.parent is not None
            node = node.parent
            start -= len(node.blocks)
        if start + len(node.blocks) <= blocks or root.is_hidden(node):
            return  # nothing is behind, or it is hidden already
        if start < blocks:
            root.split(node, blocks - start)
        root.hide(node)

    def count_read(self, lease: Lease) -> None:
        """Counts one more request that began with what the lease has: once for a request and all its choices."""
        for above in lease._node.path():
            above.reads += 1

    def keep_hottest(self, max_blocks: int, excluded: Container[int]) -> list[int]:
        """Evicts all that no lease pins but the `max_blocks` blocks that may be used soonest; returns what it evicted.

        Prefixes that most requests began with come first, which are system prompts, then the most recently used ones;
        always from a root on, and up to the first `excluded` block. Reads until now count half from then on.
        """
        hottest = self._hottest(max_blocks, excluded)
        for root, node in hottest:
            root.pin(node, node.used_s)
        freed: list[int] = []
        for account in list(self._accounts.by_name.values()):
            freed += self._evict_from(account, account.unpinned, "space")
        for root, node in hottest:
            node.reads //= 2
            root.unpin(node, node.used_s)
        for root in dict.fromkeys(root for root, _ in hottest):
            self._queue_root(root)
            self._accounts.rank(root.account)
        return freed

    def rename(self, renamed: Mapping[int, int]) -> None:
        """Renames blocks whose contents moved; leases are renamed by `Lease.rename`. Walks over everything."""
        for root in [*self.wiped.roots, *self._roots.values()]:
            root.rename(renamed)

    def check(self) -> set[int]:
        """All cached blocks. Raises AssertionError where structure or sums are wrong. Costs a walk over everything."""
        blocks: set[int] = set()
        shared = 0
        self._accounts.check()
        for root in [*self.wiped.roots, *self._roots.values()]:
            shared += root.check(blocks)
        roots = {root for scope in self._scopes.values() for root in scope.roots}
        assert roots == set(self._roots.values()), "a root is found and has no scope, or the other way round"
        for name, scope in self._scopes.items():
            assert scope.roots, "an empty scope is kept"
            assert all(root.namespace.scope == name and root.namespace.epoch == scope.epoch for root in scope.roots)
        for namespace, root in self._roots.items():
            assert root.namespace == namespace
            assert root.account.roots.keys() >= {root}
            self._expiring.check(root)
        assert all(root.account is self.wiped for root in self.wiped.roots)
        assert self.wiped.cached == sum(root.cached for root in self.wiped.roots)
        assert self.wiped.pinned == sum(root.pinned for root in self.wiped.roots)
        assert len(self._epochs) <= EPOCHS_MAX
        assert self._epochs.keys().isdisjoint(self._scopes)
        assert (len(blocks), shared) == (self._totals.cached, self._totals.shared)
        assert 0 <= self._totals.pinned <= self._totals.cached <= self._blocks
        return blocks

    # Inside

    def _tick(self) -> float:
        """Now, and later than every operation before, so that the order of uses is never in doubt."""
        self._operation_s = max(self._clock(), nextafter(self._operation_s, inf))
        return self._operation_s

    def _expired_s(self, root: NamespaceRoot) -> float:
        """Blocks that were last used then or before have expired."""
        keep_s = root.scope.keep_s
        return -inf if keep_s is None else self._clock() - keep_s

    def _root_of(self, namespace: Namespace, policy: RetentionPolicy) -> NamespaceRoot:
        """The namespace's root, new where there is none.

        A newer epoch wipes the scope. A late lookup of an older epoch finds nothing, and nobody finds its blocks.
        """
        assert namespace.block_tokens == self.block_tokens
        name = namespace.scope
        scope = self._scopes.get(name)
        newest = self._epochs.get(name, 0) if scope is None else scope.epoch
        newest = max(newest, self._raised.get(policy.account, 0), self._raised.get(namespace.scope_id, 0))
        if namespace.epoch < newest:
            root = NamespaceRoot(namespace, self.wiped, ScopeState(namespace.epoch))
            self.wiped.add_root(root)
            return root
        if scope is not None and namespace.epoch > scope.epoch:
            for old in list(scope.roots):
                self._wipe(old)
            scope = None
        if scope is None:
            self._epochs.pop(name, None)
            scope = self._scopes[name] = ScopeState(namespace.epoch)
        root = self._roots.get(namespace) or self._new_root(namespace, policy, scope)
        if root.account.name == policy.account:
            self._accounts.grant(root.account, policy.share)
        if scope.keep_s != policy.keep_s:
            scope.keep_s = policy.keep_s
            for root_of_scope in scope.roots:
                self._expiring.put(root_of_scope)
        return root

    def _new_root(self, namespace: Namespace, policy: RetentionPolicy, scope: ScopeState) -> NamespaceRoot:
        account = next(iter(scope.roots)).account if scope.roots else self._accounts.get_or_create(policy.account)
        root = self._roots[namespace] = NamespaceRoot(namespace, account, scope)
        if self._names is not None:
            root.names = self._names.root(namespace)
        account.add_root(root)
        scope.roots[root] = None
        return root

    def _wipe(self, root: NamespaceRoot) -> None:
        account = root.account
        self._forget_root(root)
        self.wiped.add_root(root)
        self._accounts.forget_if_empty(account)
        self._remove_if_empty(root)

    def _forget_root(self, root: NamespaceRoot) -> None:
        """Makes the root unfindable. A scope without roots is forgotten, but for its epoch."""
        name = root.namespace.scope
        del self._roots[root.namespace], root.scope.roots[root]
        self._expiring.remove(root)
        if not root.scope.roots:
            del self._scopes[name]
            if root.scope.epoch:
                self._epochs[name] = root.scope.epoch
                if len(self._epochs) > EPOCHS_MAX:
                    self._epochs.popitem(last=False)

    def _remove_if_empty(self, root: NamespaceRoot) -> None:
        if root.cached or root.pins or root not in root.account.roots:
            return
        if root.account is not self.wiped:
            self._forget_root(root)
        root.account.remove_root(root)
        self._accounts.forget_if_empty(root.account)

    def _keep_cap(self, account: AccountShare) -> list[int]:
        if account is self.wiped:
            return []
        freed = self._evict_from(account, account.above_cap, "cap")
        self._accounts.rank(account)
        return freed

    def _hottest(self, max_blocks: int, excluded: Container[int]) -> list[tuple[NamespaceRoot, RadixNode]]:
        """The nodes to keep, split where they have too much; none that is pinned already. A node is never read more
        often, nor later, than the one above it, so that the next one is always the best below the nodes kept."""
        retained: list[tuple[NamespaceRoot, RadixNode]] = []
        ranks: list[tuple[int, float, int, NamespaceRoot, RadixNode]] = []
        number = numbers()

        def push_children(root: NamespaceRoot, node: RadixNode) -> None:
            for child in root.visible_children(node):
                heappush(ranks, (-child.reads, -child.used_s, next(number), root, child))

        for root in self._roots.values():
            push_children(root, root)
        while ranks and max_blocks:
            *_, root, node = heappop(ranks)
            if not node.pins:
                size = len(node.blocks)
                clear = min(max_blocks, next((at for at, block in enumerate(node.blocks) if block in excluded), size))
                if 0 < clear < size:
                    retained.append((root, root.split(node, clear)))
                max_blocks -= clear
                if clear < size:
                    continue
                retained.append((root, node))
            push_children(root, node)
        return retained

    def _queue_root(self, root: NamespaceRoot) -> None:
        """Lets leaves of the root that became unpinned be the next to be evicted, or to expire."""
        root.account.by_age.put(root)
        self._expiring.put(root)

    def _evict_from(self, account: AccountShare, count: int, cause: EvictionCause) -> list[int]:
        freed: list[int] = []
        while len(freed) < count and (root := account.by_age.peek()) is not None:
            freed += self._trim(root, count - len(freed), cause)
        return freed

    def _trim(self, root: NamespaceRoot, count: int, cause: EvictionCause) -> list[int]:
        node = root.oldest() if cause == "space" and self._names is not None else None
        names = b"" if node is None or root.is_hidden(node) else root.names_of(node)
        freed = root.trim(count)
        if node is not None and names:
            policy = RetentionPolicy(root.account.name, root.account.share, root.scope.keep_s)
            named = split_names(names[-len(freed) * NAME_BYTES :])
            self._departed.append(DepartedBlocks(root.namespace, policy, node.used_s, named, freed))
        self.counters[f"evicted_{cause}_blocks"] += len(freed)
        self._remove_if_empty(root)
        return freed
