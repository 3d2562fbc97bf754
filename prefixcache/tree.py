"""A radix tree per namespace: which KV blocks hold which tokens. It knows no tensors, sequences or tenants.

Only whole blocks are in the tree. An edge holds a run of blocks: their tokens as packed bytes and their block ids, so a
cached system prompt of thousands of tokens is one node and one memory comparison. Token bytes are compared exactly;
nothing here is decided by a hash. Looking up and pinning are one operation: what `match` returns cannot be evicted
until it is released.

How a sequence uses it: `match` its prompt (all but the last token, which has to be computed), compute the rest into
blocks of its own, `insert` each block once it is full, under the same lease, also while generating; `release` at its
end or when it is preempted. What it inserted stays until it is evicted, or is found no more once it was told to
`forget` it. Where another sequence was first to insert the
same tokens, its blocks enter the lease: read those from then on, and free your own, which hold the same. A sequence
without a scope (a REQUEST) never comes here.

The method is that of SGLang's RadixAttention (Zheng et al., 2023), with a root per namespace and shares per scope.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, Literal, NamedTuple

TOKEN_BYTES: Final = 4
Cause = Literal["space", "cap", "epoch", "clear"]
ScopeName = tuple[int, bytes]


class Namespace(NamedTuple):
    """All that must be equal before KV may be shared. A scope is (scope_kind, scope_id), over all its namespaces."""

    model_revision: str
    adapter_revision: str
    tokenizer: str
    kv_layout: str
    block_tokens: int
    scope_kind: int
    scope_id: bytes
    epoch: int

    @property
    def scope(self) -> ScopeName:
        return self.scope_kind, self.scope_id


class Share(NamedTuple):
    """Blocks of one scope. Below `floor` it loses none while another scope is above its own floor; above `cap` it
    keeps only what is in use."""

    floor: int = 0
    cap: int | None = None


class _Node:
    """An edge and its end. `pins` counts the leases that reach the end of this edge, or go through it.

    There may be one for every cached block, so it is kept small: its label is the very bytes that are its key where
    it has one block, and becomes a bytearray only when it is lengthened or shortened; leaves have one dict in common.
    """

    __slots__ = ("blocks", "children", "label", "parent", "pins", "queued", "used")

    def __init__(
        self, parent: "_Node | None", label: bytes | bytearray, blocks: "array[int]", pins: int, used: int
    ) -> None:
        self.parent = parent
        self.label = label
        self.blocks = blocks
        self.children = _CHILDLESS
        self.pins = pins
        self.used = used  # when a lease last began or ended here
        self.queued = 0  # what its root's `leaves` are ordered by; 0 outside of them

    def __lt__(self, other: "_Node") -> bool:
        return self.queued < other.queued

    def adopt(self, key: bytes, child: "_Node") -> None:
        if self.children is _CHILDLESS:
            self.children = {}
        self.children[key] = child

    def disown(self, key: bytes) -> None:
        del self.children[key]
        if not self.children:
            self.children = _CHILDLESS

    def editable(self) -> bytearray:
        """The label, to be changed at its end in place."""
        if not isinstance(self.label, bytearray):
            self.label = bytearray(self.label)
        return self.label


_CHILDLESS: Final[dict[bytes, _Node]] = {}


class _Root(_Node):
    """The top of one namespace; its `pins` counts all its leases. It keeps its unpinned leaves by age.

    A node is in `leaves` once, where it belonged when it came in; `Tree._oldest` moves those that were used since.
    """

    __slots__ = ("cached", "cause", "leaves", "namespace", "pinned", "scope")

    def __init__(self, namespace: Namespace, scope: "_Scope") -> None:
        super().__init__(None, b"", array("I"), 0, 0)
        self.namespace = namespace
        self.scope = scope
        self.cause: Cause = "space"  # why its blocks will be evicted
        self.cached = 0
        self.pinned = 0
        self.leaves: list[_Node] = []

    @property
    def unpinned(self) -> int:
        return self.cached - self.pinned


class _Scope:
    """The sums over one scope's namespaces of the current epoch, and its share."""

    __slots__ = ("cached", "epoch", "pinned", "rank", "roots", "share")

    def __init__(self, share: Share, epoch: int) -> None:
        self.roots: OrderedDict[_Root, None] = OrderedDict()
        self.share = share
        self.epoch = epoch
        self.cached = 0
        self.pinned = 0
        self.rank: _Rank | None = None

    @property
    def unpinned(self) -> int:
        return self.cached - self.pinned

    @property
    def excess(self) -> int:
        """Blocks above the floor; negative below it."""
        return self.cached - self.share.floor

    @property
    def over(self) -> int:
        """Blocks above the cap that nobody uses."""
        return 0 if self.share.cap is None else min(self.cached - self.share.cap, self.unpinned)


_Rank = tuple[int, int, _Scope]  # -excess when it was ranked, tie-breaker, scope


class Lease:
    """A pinned path from a namespace's root. `blocks` are its block ids in order; they stay valid until `release`.

    It belongs to the sequence that asked for it; `Tree.insert` lengthens it.
    """

    __slots__ = ("_node", "_root", "block_tokens", "blocks")

    def __init__(self, root: _Root, node: _Node, blocks: list[int]) -> None:
        self._root: _Root | None = root
        self._node = node
        self.blocks = blocks
        self.block_tokens = root.namespace.block_tokens

    @property
    def tokens(self) -> int:
        """Tokens whose KV is in `blocks`."""
        return len(self.blocks) * self.block_tokens


class Tree:
    """The cached blocks of all namespaces. Block ids are the caller's; the tree says when one is free again.

    Every operation costs the bytes it compares or copies plus the nodes on its path; evicting costs a few heap
    operations per edge and per change of scope, however many nodes and scopes there are. `counters` only grow: lookups,
    lookup_tokens, hit_tokens, inserted_blocks, duplicate_blocks and evicted_{space, cap, epoch, clear}_blocks.
    """

    def __init__(self, blocks: int, block_tokens: int, share: Share | None = None) -> None:
        """`blocks` is the pool's size, `share` what a scope has that `set_share` was not told about."""
        assert blocks > 0
        assert block_tokens > 0
        self.block_tokens = block_tokens
        self.counters: Counter[str] = Counter()
        self._blocks = blocks
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._share = share or Share()
        self._shares: dict[ScopeName, Share] = {}
        self._scopes: dict[ScopeName, _Scope] = {}
        self._wiped = _Scope(Share(), 0)  # roots of old epochs and dropped namespaces: never matched, evicted first
        self._ranks: list[
            _Rank
        ] = []  # the furthest above its floor first; those that a scope no longer has are skipped
        self._ranked = 0
        self._roots: dict[Namespace, _Root] = {}  # those that can be found
        self._hidden: dict[_Node, bytes] = {}  # forgotten nodes and what their parents call them
        self._hid = 0
        self._tick = 0
        self._cached = 0
        self._pinned = 0
        self._shared = 0

    @property
    def cached(self) -> int:
        """Blocks that the tree holds."""
        return self._cached

    @property
    def evictable(self) -> int:
        """Cached blocks that no lease pins."""
        return self._cached - self._pinned

    @property
    def shared(self) -> int:
        """Cached blocks that two or more leases pin at this moment."""
        return self._shared

    def cached_of(self, scope: ScopeName) -> int:
        """Cached blocks of one scope, wiped ones not counted."""
        found = self._scopes.get(scope)
        return found.cached if found else 0

    def match(self, namespace: Namespace, tokens: "array[int]") -> Lease:
        """Finds and pins the longest cached prefix, in whole blocks, of u32 `tokens`. The lease may be empty."""
        root = self._root_of(namespace)
        packed = tokens.tobytes()
        node: _Node = root
        path, at = [node], 0
        blocks: list[int] = []
        while (child := node.children.get(packed[at : at + self._block_bytes])) is not None:
            node = self._reach(root, child, packed, at)
            path.append(node)
            blocks += node.blocks
            at += len(node.label)
            if node is not child:
                break
        self._tick += 1
        for node in path:
            self._pin(root, node)
        self.counters["lookups"] += 1
        self.counters["lookup_tokens"] += len(tokens)
        self.counters["hit_tokens"] += at // TOKEN_BYTES
        return Lease(root, node, blocks)

    def insert(self, lease: Lease, tokens: "array[int]", blocks: Sequence[int]) -> tuple[Lease, list[int]]:
        """Adds full blocks behind the lease's end and pins them too. `tokens` has exactly `blocks`' tokens.

        Where the tree has the same tokens already, its own blocks enter the lease. Returns the lease, now longer, and
        the block ids that are the caller's again: its duplicates, and unused blocks that a cap made the scope give up.
        """
        root = lease._root
        assert root is not None, "the lease is released"
        assert len(tokens) == len(blocks) * self.block_tokens
        packed = tokens.tobytes()
        node, at = lease._node, 0
        spare: list[int] = []
        while (child := node.children.get(packed[at : at + self._block_bytes])) is not None:
            node = self._reach(root, child, packed, at)
            first = at // self._block_bytes
            spare += blocks[first : first + len(node.blocks)]
            lease.blocks += node.blocks
            at += len(node.label)
            self._pin(root, node)
            if node is not child:
                break
        self.counters["duplicate_blocks"] += len(spare)
        added = list(blocks[at // self._block_bytes :])
        if added:
            node = self._append(root, node, packed[at:], added)
            lease.blocks += added
        lease._node = node
        spare += self._keep_cap(root.scope)
        self._rank(root.scope)
        return lease, spare

    def release(self, lease: Lease) -> list[int]:
        """Unpins the path; the lease is over. Returns the block ids that a cap made the scope give up."""
        root = lease._root
        assert root is not None, "released twice"
        lease._root = None
        self._tick += 1
        node: _Node | None = lease._node
        while node is not None:
            self._unpin(root, node)
            node = node.parent
        freed = self._keep_cap(root.scope)
        self._rank(root.scope)
        self._forget_if_empty(root)
        return freed

    def evict(self, count: int) -> list[int]:
        """Frees up to `count` unpinned blocks and returns their ids.

        Wiped ones go first; then those of the scope that is furthest above its floor, its least recently used leaves
        first, each from its end. A scope goes below its floor only where no other has unpinned blocks above its own.
        """
        freed = self._evict_from(self._wiped, count)
        while len(freed) < count and (furthest := self._furthest()) is not None:
            heappop(self._ranks)
            furthest.rank = None
            second = self._furthest()
            level = -self._blocks if second is None else second.excess
            step = min(count - len(freed), max(1, furthest.excess - level))
            freed += self._evict_from(furthest, step)
            self._rank(furthest)
        return freed

    def set_share(self, scope: ScopeName, share: Share) -> list[int]:
        """Sets one scope's floor and cap, from now on. Returns the block ids that a lower cap freed."""
        assert 0 <= share.floor <= (self._blocks if share.cap is None else share.cap)
        self._shares[scope] = share
        found = self._scopes.get(scope)
        if found is None:
            return []
        found.share = share
        freed = self._keep_cap(found)
        self._rank(found)
        return freed

    def drop(self, namespace: Namespace) -> None:
        """Makes all that the namespace has cached unfindable at once. Leases go on; its blocks are evicted next."""
        root = self._roots.get(namespace)
        if root is not None:
            self._wipe(root, "clear")

    def forget(self, lease: Lease, blocks: int) -> None:
        """Makes what the lease reads behind its first `blocks`, and all that hangs below it, unfindable at once.

        Leases on it go on, and may grow. It is evicted in its turn, as if it were found no more by chance.
        """
        assert lease._root is not None, "the lease is released"
        node, start = lease._node, len(lease.blocks) - len(lease._node.blocks)
        while start > blocks:
            assert node.parent is not None
            node = node.parent
            start -= len(node.blocks)
        if start + len(node.blocks) <= blocks or any(above in self._hidden for above in _path(node)):
            return  # nothing is behind, or it is forgotten already
        if start < blocks:
            self._split(node, blocks - start)
        parent = node.parent
        assert parent is not None
        parent.disown(self._key(node))
        self._hid += 1
        self._hidden[node] = self._key(node) + self._hid.to_bytes(8, "big")  # longer than any key that is looked up
        parent.adopt(self._key(node), node)

    def check(self) -> None:
        """Raises AssertionError where the structure or a sum is wrong. Costs a walk over everything."""
        blocks: set[int] = set()
        hidden: set[_Node] = set()
        sums = [0, 0, 0]
        for scope in [self._wiped, *self._scopes.values()]:
            for root in scope.roots:
                assert root.scope is scope
                assert (self._roots.get(root.namespace) is root) != (scope is self._wiped)
                cached, pinned, shared = self._check_root(root, blocks)
                hidden.update(node for node in _below(root) if node in self._hidden)
                assert (cached, pinned) == (root.cached, root.pinned), f"{root.namespace}: {cached}, {pinned}"
                sums = [sums[0] + cached, sums[1] + pinned, sums[2] + shared]
            assert scope.cached == sum(root.cached for root in scope.roots)
            assert scope.pinned == sum(root.pinned for root in scope.roots)
            assert scope.over <= 0, "a scope keeps unused blocks above its cap"
            assert scope is self._wiped or scope.roots, "an empty scope is kept"
            assert scope is self._wiped or not scope.unpinned or self._is_ranked(scope), "a scope can never be evicted"
        assert sums == [self._cached, self._pinned, self._shared], f"{sums}"
        assert len(blocks) == self._cached <= self._blocks
        assert hidden == self._hidden.keys(), "a node that is gone is still hidden"
        assert not _CHILDLESS

    # Inside

    def _root_of(self, namespace: Namespace) -> _Root:
        """The namespace's root, new where there is none. A newer epoch wipes the scope; an older one finds nothing."""
        assert namespace.block_tokens == self.block_tokens
        scope = self._scopes.get(namespace.scope)
        if scope is not None and namespace.epoch > scope.epoch:
            for root in list(scope.roots):
                self._wipe(root, "epoch")
            scope = None
        if scope is None:
            scope = _Scope(self._shares.get(namespace.scope, self._share), namespace.epoch)
            self._scopes[namespace.scope] = scope
        if namespace.epoch < scope.epoch:
            root = _Root(namespace, self._wiped)
            root.cause = "epoch"
            self._wiped.roots[root] = None
            return root
        if namespace not in self._roots:
            self._roots[namespace] = root = _Root(namespace, scope)
            scope.roots[root] = None
        return self._roots[namespace]

    def _wipe(self, root: _Root, cause: Cause) -> None:
        self._remove(root)
        for sums, sign in ((root.scope, -1), (self._wiped, 1)):
            sums.cached += sign * root.cached
            sums.pinned += sign * root.pinned
        root.scope, root.cause = self._wiped, cause
        self._wiped.roots[root] = None
        self._forget_if_empty(root)

    def _remove(self, root: _Root) -> None:
        del root.scope.roots[root]
        if root.scope is not self._wiped:
            del self._roots[root.namespace]
            if not root.scope.roots:
                del self._scopes[root.namespace.scope]
                root.scope.rank = None

    def _forget_if_empty(self, root: _Root) -> None:
        if not root.cached and not root.pins and root in root.scope.roots:
            self._remove(root)

    def _reach(self, root: _Root, child: _Node, packed: bytes, at: int) -> _Node:
        """The part of `child`'s edge that `packed` has from `at` on, as a node: the child or its upper part."""
        if packed.startswith(child.label, at):
            return child
        low, high = 1, len(child.blocks)  # blocks: `low` are equal (the child's key), `high` are not
        while high - low > 1:
            middle = (low + high) // 2
            start, end = low * self._block_bytes, middle * self._block_bytes
            if packed.startswith(child.label[start:end], at + start):
                low = middle
            else:
                high = middle
        return self._split(child, low)

    def _split(self, lower: _Node, blocks: int) -> _Node:
        """Cuts an edge behind its first `blocks`. The node keeps its lower part: leases that end there still do."""
        parent, cut = lower.parent, blocks * self._block_bytes
        assert parent is not None
        parent.disown(self._key(lower))  # whose key must not outlive it beside an equal label
        upper = _Node(parent, bytes(lower.label[:cut]), lower.blocks[:blocks], lower.pins, lower.used)
        lower.label, lower.blocks = bytes(lower.label[cut:]), lower.blocks[blocks:]
        lower.parent = upper
        parent.adopt(self._key(upper), upper)
        upper.adopt(self._key(lower), lower)
        return upper

    def _key(self, node: _Node) -> bytes:
        """Its parent's name for it: the bytes of its first block, unless it is forgotten."""
        return self._hidden.get(node) or bytes(node.label[: self._block_bytes])

    def _append(self, root: _Root, node: _Node, label: bytes, blocks: list[int]) -> _Node:
        """Puts new, pinned blocks below `node`: on its own edge where only this lease reaches it, else on a new one."""
        if node is not root and node.pins == 1 and not node.children:
            node.editable().extend(label)
            node.blocks.extend(blocks)
        else:
            child = _Node(node, label, array("I", blocks), 1, self._tick)
            node.adopt(self._key(child), child)
            node = child
        self._count(root, cached=len(blocks), pinned=len(blocks))
        self.counters["inserted_blocks"] += len(blocks)
        assert self._cached <= self._blocks, "more blocks than the pool has"
        return node

    def _pin(self, root: _Root, node: _Node) -> None:
        node.pins += 1
        node.used = self._tick
        if node.pins == 1:
            self._count(root, pinned=len(node.blocks))
        elif node.pins == 2:
            self._shared += len(node.blocks)

    def _unpin(self, root: _Root, node: _Node) -> None:
        node.pins -= 1
        node.used = self._tick
        if node.pins == 0:
            self._count(root, pinned=-len(node.blocks))
            self._offer(root, node)
        elif node.pins == 1:
            self._shared -= len(node.blocks)

    def _count(self, root: _Root, cached: int = 0, pinned: int = 0) -> None:
        root.cached += cached
        root.pinned += pinned
        root.scope.cached += cached
        root.scope.pinned += pinned
        self._cached += cached
        self._pinned += pinned

    def _offer(self, root: _Root, node: _Node) -> None:
        """Lets a node be evicted from now on, if it is an unpinned leaf."""
        if node is not root and not node.pins and not node.children and not node.queued:
            node.queued = node.used
            heappush(root.leaves, node)

    def _oldest(self, root: _Root) -> _Node:
        """The least recently used unpinned leaf of a root that has one. It stays the first of `root.leaves`."""
        while True:
            node = root.leaves[0]
            if node.pins or node.children:
                heappop(root.leaves).queued = 0
            elif node.queued < node.used:
                node.queued = node.used
                heapreplace(root.leaves, node)
            else:
                return node

    def _rank(self, scope: _Scope) -> None:
        """Sees to it that a scope with unpinned blocks is ranked at its excess or above."""
        if scope is self._wiped or not scope.unpinned:
            return
        if scope.rank is None or -scope.rank[0] < scope.excess:
            heappush(self._ranks, self._ranked_now(scope))
            if len(self._ranks) > 64 + 2 * len(self._scopes):
                self._ranks = [rank for rank in self._ranks if rank[2].rank is rank]
                heapify(self._ranks)

    def _ranked_now(self, scope: _Scope) -> _Rank:
        self._ranked += 1
        scope.rank = rank = (-scope.excess, self._ranked, scope)
        return rank

    def _furthest(self) -> _Scope | None:
        """The scope with unpinned blocks that is furthest above its floor. It stays the first of the ranks."""
        while self._ranks:
            rank = self._ranks[0]
            scope = rank[2]
            if scope.rank is not rank:
                heappop(self._ranks)
            elif not scope.unpinned:
                heappop(self._ranks)
                scope.rank = None
            elif -rank[0] > scope.excess:
                heapreplace(self._ranks, self._ranked_now(scope))
            else:
                return scope
        return None

    def _evict_from(self, scope: _Scope, count: int, cause: Cause | None = None) -> list[int]:
        freed: list[int] = []
        while len(freed) < count and scope.unpinned:
            roots = (root for root in scope.roots if root.unpinned)
            root = next(roots) if scope is self._wiped else min(roots, key=self._age)
            taken = self._trim(root, count - len(freed))
            self.counters[f"evicted_{cause or root.cause}_blocks"] += len(taken)
            freed += taken
            self._forget_if_empty(root)
        return freed

    def _age(self, root: _Root) -> int:
        return self._oldest(root).used

    def _trim(self, root: _Root, count: int) -> list[int]:
        """Takes up to `count` blocks off the end of the least recently used leaf."""
        node = self._oldest(root)
        keep = max(0, len(node.blocks) - count)
        freed = node.blocks[keep:].tolist()
        if keep:
            del node.blocks[keep:], node.editable()[keep * self._block_bytes :]
        else:
            parent = node.parent
            assert parent is not None
            parent.disown(self._key(node))
            self._hidden.pop(node, None)
            heappop(root.leaves)
            self._offer(root, parent)
        self._count(root, cached=-len(freed))
        return freed

    def _keep_cap(self, scope: _Scope) -> list[int]:
        return self._evict_from(scope, scope.over, "cap") if scope.over > 0 else []

    def _is_ranked(self, scope: _Scope) -> bool:
        return (
            scope.rank is not None
            and -scope.rank[0] >= scope.excess
            and any(rank is scope.rank for rank in self._ranks)
        )

    def _check_root(self, root: _Root, blocks: set[int]) -> tuple[int, int, int]:
        cached = pinned = shared = 0
        queued = {id(node) for node in root.leaves}
        assert len(queued) == len(root.leaves), "a node is queued twice"
        assert all(root.leaves[(at - 1) // 2].queued <= root.leaves[at].queued for at in range(1, len(root.leaves)))
        for node in _below(root):
            size = len(node.blocks)
            assert size > 0
            assert len(node.label) == size * self._block_bytes
            assert node.parent is not None
            assert node.parent.children[self._key(node)] is node
            assert 0 <= node.pins <= node.parent.pins, "a pinned node hangs below an unpinned one"
            assert node.pins or node.used <= node.parent.used, "a node was used after its parent"
            assert blocks.isdisjoint(node.blocks), "a block is cached twice"
            assert (id(node) in queued) == (node.queued > 0)
            assert node.pins or node.children or 0 < node.queued <= node.used, "an unpinned leaf can never be evicted"
            blocks.update(node.blocks)
            cached += size
            pinned += size if node.pins else 0
            shared += size if node.pins > 1 else 0
        assert root.cached or root.pins, "an empty root is kept"
        return cached, pinned, shared


def _path(node: _Node | None) -> Iterator[_Node]:
    while node is not None:
        yield node
        node = node.parent


def _below(root: _Node) -> Iterator[_Node]:
    nodes = list(root.children.values())
    while nodes:
        node = nodes.pop()
        yield node
        nodes += node.children.values()
