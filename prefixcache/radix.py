"""The radix tree of one namespace: exact tokens → blocks, which of them are in use, and its unused ends by age; and the
account and scope that it belongs to.

It does not know the other namespaces. An edge holds a run of blocks: their tokens as packed bytes and their block ids,
so that a cached system prompt of thousands of tokens is one node and one memory comparison.
"""

from array import array
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush, heapreplace
from typing import Final

from prefixcache.lazy_heap import LazyHeap
from prefixcache.names import NAME_BYTES, next_name
from prefixcache.namespace import CacheShare, Namespace

TOKEN_BYTES: Final = 4


class RadixNode:
    """An edge and its end. `pins` counts the leases that reach the end of this edge, or go through it.

    There may be one for every cached block, so it is kept small: its label is the very bytes that are its key where
    it has one block, and becomes a bytearray only when it is lengthened or shortened; leaves have one dict in common.
    """

    __slots__ = ("blocks", "children", "label", "names", "parent", "pins", "queued_s", "reads", "used_s")

    def __init__(
        self, parent: "RadixNode | None", label: bytes | bytearray, blocks: "array[int]", pins: int, used_s: float
    ) -> None:
        self.parent = parent
        self.label = label
        self.blocks = blocks
        self.children = _CHILDLESS
        self.pins = pins
        self.used_s = used_s  # when a lease last began or ended here
        self.reads = 0  # how many requests found it
        self.queued_s = 0.0  # what its root's `leaves` are ordered by; 0 outside of them
        self.names = b""  # of its first blocks, one behind the other, as far as they were asked for; of a root its own

    def __lt__(self, other: "RadixNode") -> bool:
        return self.queued_s < other.queued_s

    def add_child(self, key: bytes, child: "RadixNode") -> None:
        if self.children is _CHILDLESS:
            self.children = {}
        self.children[key] = child

    def remove_child(self, key: bytes) -> None:
        del self.children[key]
        if not self.children:
            self.children = _CHILDLESS

    def editable(self) -> bytearray:
        """The label, to be changed at its end in place."""
        if not isinstance(self.label, bytearray):
            self.label = bytearray(self.label)
        return self.label

    def path(self) -> "Iterator[RadixNode]":
        """Itself and all above it, the root included."""
        node: RadixNode | None = self
        while node is not None:
            yield node
            node = node.parent


_CHILDLESS: Final[dict[bytes, RadixNode]] = {}


class NamespaceRoot(RadixNode):
    """The top of one namespace; its `pins` counts all its leases. It keeps its unpinned leaves by age.

    A node is in `leaves` once, at the place of its age when it was queued; `oldest` moves nodes that were used since.
    Its blocks count for `account` at this moment; it is found by `scope`.
    """

    __slots__ = ("_block_bytes", "_hidden", "_hides", "account", "cached", "leaves", "namespace", "pinned", "scope")

    def __init__(self, namespace: Namespace, account: "AccountShare", scope: "ScopeState") -> None:
        super().__init__(None, b"", array("Q"), 0, 0.0)
        self.namespace = namespace
        self.account = account
        self.scope = scope
        self.cached = 0
        self.pinned = 0
        self.leaves: list[RadixNode] = []
        self._block_bytes = namespace.block_tokens * TOKEN_BYTES
        self._hidden: dict[RadixNode, bytes] = {}  # hidden nodes and their keys in their parents
        self._hides = 0

    def child_at(self, node: RadixNode, packed: bytes, at: int, expired_s: float) -> RadixNode | None:
        """The child of `node` that goes on with `packed` from `at` on, cut where they part; None where there is none.

        A child that nobody reads and that was last used at `expired_s` or before is hidden instead, for everybody.
        """
        child = node.children.get(packed[at : at + self._block_bytes])
        if child is None:
            return None
        if not child.pins and child.used_s <= expired_s:
            self.hide(child)
            return None
        common = self._common_blocks(child, packed, at)
        return child if common == len(child.blocks) else self.split(child, common)

    def matched_blocks(self, packed: memoryview, expired_s: float) -> int:
        """How many blocks of `packed` are found, by the rules of `child_at`. It changes nothing, and copies no more of
        `packed` than is compared."""
        node: RadixNode = self
        blocks = 0
        while (child := node.children.get(bytes(packed[: self._block_bytes]))) is not None:
            if not child.pins and child.used_s <= expired_s:
                break
            common = self._common_blocks(child, bytes(packed[: len(child.label)]), 0)
            blocks += common
            if common < len(child.blocks):
                break
            node, packed = child, packed[len(child.label) :]
        return blocks

    def _common_blocks(self, child: RadixNode, packed: bytes, at: int) -> int:
        """How many blocks of a child are those of `packed` from `at` on, which begins with its key."""
        if packed.startswith(child.label, at):
            return len(child.blocks)
        low, high = 1, len(child.blocks)  # blocks: `low` are equal (the child's key), `high` are not
        while high - low > 1:
            middle = (low + high) // 2
            start, end = low * self._block_bytes, middle * self._block_bytes
            if packed.startswith(child.label[start:end], at + start):
                low = middle
            else:
                high = middle
        return low

    def split(self, lower: RadixNode, blocks: int) -> RadixNode:
        """Cuts an edge behind its first `blocks`. The node keeps its lower part: leases that end there still do."""
        parent, cut = lower.parent, blocks * self._block_bytes
        assert parent is not None
        parent.remove_child(self._key(lower))  # whose key must not outlive it beside an equal label
        upper = RadixNode(parent, bytes(lower.label[:cut]), lower.blocks[:blocks], lower.pins, lower.used_s)
        upper.reads = lower.reads
        upper.names, lower.names = lower.names[: blocks * NAME_BYTES], lower.names[blocks * NAME_BYTES :]
        lower.label, lower.blocks = bytes(lower.label[cut:]), lower.blocks[blocks:]
        lower.parent = upper
        parent.add_child(self._key(upper), upper)
        upper.add_child(self._key(lower), lower)
        return upper

    def cut(self, path: list[RadixNode], blocks: list[int], count: int) -> RadixNode:
        """Shortens a path from here, and its blocks, to so many of them. Returns the node where it ends now."""
        while len(blocks) > count:
            node = path.pop()
            start = len(blocks) - len(node.blocks)
            del blocks[max(start, count) :]
            if start < count:
                path.append(self.split(node, count - start))
        return path[-1]

    def append(self, node: RadixNode, label: bytes, blocks: list[int], used_s: float) -> RadixNode:
        """Puts new, pinned blocks below `node`: on its own edge where the one lease that reaches it was the first to,
        else on a new edge."""
        self.count(cached=len(blocks), pinned=len(blocks))
        if node is not self and node.pins == 1 and not node.children and not node.reads:
            node.editable().extend(label)
            node.blocks.extend(blocks)
            return node
        child = RadixNode(node, label, array("Q", blocks), 1, used_s)
        node.add_child(self._key(child), child)
        return child

    def pin(self, node: RadixNode, used_s: float) -> None:
        node.pins += 1
        node.used_s = used_s
        if node.pins == 1:
            self.count(pinned=len(node.blocks))
        elif node.pins == 2:
            self.account.totals.shared += len(node.blocks)

    def unpin(self, node: RadixNode, used_s: float) -> None:
        node.pins -= 1
        node.used_s = used_s
        if node.pins == 0:
            self.count(pinned=-len(node.blocks))
            self._queue_if_leaf(node)
        elif node.pins == 1:
            self.account.totals.shared -= len(node.blocks)

    def count(self, cached: int = 0, pinned: int = 0) -> None:
        account = self.account
        self.cached += cached
        self.pinned += pinned
        account.cached += cached
        account.pinned += pinned
        account.totals.cached += cached
        account.totals.pinned += pinned

    def hide(self, node: RadixNode) -> None:
        """Makes a node, and all nodes below it, unfindable at once. Leases on it go on, and may grow."""
        parent = node.parent
        assert parent is not None
        parent.remove_child(self._key(node))
        self._hides += 1
        self._hidden[node] = self._key(node) + self._hides.to_bytes(8, "big")  # longer than any key that is looked up
        parent.add_child(self._key(node), node)

    def visible_children(self, node: RadixNode) -> Iterator[RadixNode]:
        """A node's children, without hidden ones."""
        return (child for child in node.children.values() if child not in self._hidden)

    def rename(self, renamed: Mapping[int, int]) -> None:
        """Renames blocks, wherever they are."""
        for node in _below(self):
            if not renamed.keys().isdisjoint(node.blocks):
                node.blocks = array("Q", (renamed.get(block, block) for block in node.blocks))

    def is_hidden(self, node: RadixNode) -> bool:
        return any(above in self._hidden for above in node.path())

    def oldest(self) -> RadixNode | None:
        """The least recently used unpinned leaf. It stays the first of `leaves`."""
        while self.leaves:
            node = self.leaves[0]
            if node.pins or node.children:
                heappop(self.leaves).queued_s = 0.0
            elif node.queued_s < node.used_s:
                node.queued_s = node.used_s
                heapreplace(self.leaves, node)
            else:
                return node
        return None

    def oldest_used_s(self) -> float | None:
        """When its oldest unpinned leaf was last used. It falls only where there was none."""
        node = self.oldest()
        return None if node is None else node.used_s

    def expires_s(self) -> float | None:
        """When its oldest unpinned leaf expires, if it has any that does."""
        used_s, keep_s = self.oldest_used_s(), self.scope.keep_s
        return None if used_s is None or keep_s is None else used_s + keep_s

    def names_of(self, node: RadixNode) -> bytes:
        """The names of a node's blocks, one behind the other; the root has its own. Each is worked out once."""
        unnamed = []
        for above in node.path():
            if above is self or len(above.names) == len(above.blocks) * NAME_BYTES:
                break
            unnamed.append(above)
        for below in reversed(unnamed):
            assert below.parent is not None
            names, size = bytearray(below.names), self._block_bytes
            name = (names or below.parent.names)[-NAME_BYTES:]
            for start in range(len(names) // NAME_BYTES * size, len(below.label), size):
                name = next_name(bytes(name), below.label[start : start + size])
                names += name
            below.names = bytes(names)
        return node.names

    def trim(self, count: int) -> list[int]:
        """Takes up to `count` blocks off the end of the least recently used leaf."""
        node = self.oldest()
        assert node is not None
        left = max(0, len(node.blocks) - count)
        freed = node.blocks[left:].tolist()
        if left:
            del node.blocks[left:], node.editable()[left * self._block_bytes :]
            node.names = node.names[: left * NAME_BYTES]
        else:
            parent = node.parent
            assert parent is not None
            parent.remove_child(self._key(node))
            self._hidden.pop(node, None)
            heappop(self.leaves)
            self._queue_if_leaf(parent)
        self.count(cached=-len(freed))
        return freed

    def _queue_if_leaf(self, node: RadixNode) -> None:
        """Queues a node for eviction, if it is an unpinned leaf."""
        if node is not self and not node.pins and not node.children and not node.queued_s:
            node.queued_s = node.used_s
            heappush(self.leaves, node)

    def _key(self, node: RadixNode) -> bytes:
        """A node's key in its parent: the bytes of its first block, unless it is hidden."""
        return self._hidden.get(node) or bytes(node.label[: self._block_bytes])

    def check(self, blocks: set[int]) -> int:
        """Adds its blocks to `blocks`; returns how many of them two leases or more pin. Raises AssertionError."""
        cached = pinned = shared = 0
        hidden: set[RadixNode] = set()
        queued = {id(node) for node in self.leaves}
        assert len(queued) == len(self.leaves), "a node is queued twice"
        assert all(self.leaves[(at - 1) // 2].queued_s <= self.leaves[at].queued_s for at in range(1, len(self.leaves)))
        for node in _below(self):
            size = len(node.blocks)
            assert size > 0
            assert len(node.label) == size * self._block_bytes
            assert node.parent is not None
            assert node.parent.children[self._key(node)] is node
            assert 0 <= node.pins <= node.parent.pins, "a pinned node hangs below an unpinned one"
            assert node.pins or node.used_s <= node.parent.used_s, "a node was used after its parent"
            assert blocks.isdisjoint(node.blocks), "a block is cached twice"
            assert (id(node) in queued) == (node.queued_s > 0)
            assert node.pins or node.children or 0 < node.queued_s <= node.used_s, (
                "an unpinned leaf can never be evicted"
            )
            blocks.update(node.blocks)
            assert node.reads <= node.parent.reads, "a node was found without its parent"
            hidden.update({node} & self._hidden.keys())
            cached += size
            pinned += size if node.pins else 0
            shared += size if node.pins > 1 else 0
        assert self.cached or self.pins, "an empty root is kept"
        assert hidden == self._hidden.keys(), "a removed node is still hidden"
        assert (cached, pinned) == (self.cached, self.pinned), f"{self.namespace}: {cached}, {pinned}"
        assert not _CHILDLESS
        return shared

    def all_blocks(self) -> list[int]:
        """The namespace's blocks. Walks over everything in it."""
        return [block for node in _below(self) for block in node.blocks]


class BlockCounts:
    """Blocks that are cached, pinned by leases, and pinned by two or more."""

    __slots__ = ("cached", "pinned", "shared")

    def __init__(self) -> None:
        self.cached = self.pinned = self.shared = 0


class ScopeState:
    """The namespaces of one scope's current epoch, and for how long their blocks are found."""

    __slots__ = ("epoch", "keep_s", "roots")

    def __init__(self, epoch: int) -> None:
        self.roots: dict[NamespaceRoot, None] = {}
        self.epoch = epoch
        self.keep_s: float | None = None


class AccountShare:
    """The sums over one account's namespaces, its share, and its namespaces by age."""

    __slots__ = ("by_age", "cached", "cap", "floor", "name", "pinned", "roots", "share", "totals")

    def __init__(self, name: bytes, totals: BlockCounts) -> None:
        self.name = name
        self.totals = totals  # of all accounts
        self.roots: dict[NamespaceRoot, None] = {}
        self.by_age: LazyHeap[NamespaceRoot] = LazyHeap(NamespaceRoot.oldest_used_s)
        self.share = CacheShare()  # as it was asked for
        self.floor = 0  # as far as it was granted
        self.cap: int | None = None
        self.cached = 0
        self.pinned = 0

    @property
    def unpinned(self) -> int:
        return self.cached - self.pinned

    @property
    def excess(self) -> int:
        """Blocks above the floor; negative below it."""
        return self.cached - self.floor

    @property
    def above_cap(self) -> int:
        """Blocks above the cap that nobody uses."""
        return 0 if self.cap is None else max(0, min(self.cached - self.cap, self.unpinned))

    def add_root(self, root: NamespaceRoot) -> None:
        """Counts the root's blocks for this account, and no longer for the one before."""
        before = root.account
        if before is not self:
            before.remove_root(root)
            before.cached -= root.cached
            before.pinned -= root.pinned
            self.cached += root.cached
            self.pinned += root.pinned
            root.account = self
        self.roots[root] = None
        self.by_age.put(root)

    def remove_root(self, root: NamespaceRoot) -> None:
        del self.roots[root]
        self.by_age.remove(root)


def _below(root: RadixNode) -> Iterator[RadixNode]:
    nodes = list(root.children.values())
    while nodes:
        node = nodes.pop()
        yield node
        nodes += node.children.values()
