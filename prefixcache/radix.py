"""The radix tree of one namespace: exact tokens → blocks, what of it is in use, and its unused ends by age.

It does not know the other namespaces. An edge holds a run of blocks: their tokens as packed bytes and their block ids,
so that a cached system prompt of thousands of tokens is one node and one memory comparison.
"""

from array import array
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Final

from prefixcache.namespace import Namespace

if TYPE_CHECKING:
    from prefixcache.shares import AccountShare, ScopeState

TOKEN_BYTES: Final = 4


class RadixNode:
    """An edge and its end. `pins` counts the leases that reach the end of this edge, or go through it.

    There may be one for every cached block, so it is kept small: its label is the very bytes that are its key where
    it has one block, and becomes a bytearray only when it is lengthened or shortened; leaves have one dict in common.
    """

    __slots__ = ("blocks", "children", "label", "parent", "pins", "queued", "reads", "used")

    def __init__(
        self, parent: "RadixNode | None", label: bytes | bytearray, blocks: "array[int]", pins: int, used: float
    ) -> None:
        self.parent = parent
        self.label = label
        self.blocks = blocks
        self.children = _CHILDLESS
        self.pins = pins
        self.used = used  # when a lease last began or ended here
        self.reads = 0  # how many requests found it
        self.queued = 0.0  # what its root's `leaves` are ordered by; 0 outside of them

    def __lt__(self, other: "RadixNode") -> bool:
        return self.queued < other.queued

    def adopt(self, key: bytes, child: "RadixNode") -> None:
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

    def path(self) -> "Iterator[RadixNode]":
        """Itself and all above it, the root included."""
        node: RadixNode | None = self
        while node is not None:
            yield node
            node = node.parent


_CHILDLESS: Final[dict[bytes, RadixNode]] = {}


class NamespaceRoot(RadixNode):
    """The top of one namespace; its `pins` counts all its leases. It keeps its unpinned leaves by age.

    A node is in `leaves` once, where it belonged when it came in; `oldest` moves those that were used since. `account`
    is whom its blocks count for at this moment, `scope` what it is found by.
    """

    __slots__ = (
        "_block_bytes",
        "_hid",
        "_hidden",
        "account",
        "cached",
        "leaves",
        "namespace",
        "pinned",
        "scope",
    )

    def __init__(self, namespace: Namespace, account: "AccountShare", scope: "ScopeState") -> None:
        super().__init__(None, b"", array("Q"), 0, 0.0)
        self.namespace = namespace
        self.account = account
        self.scope = scope
        self.cached = 0
        self.pinned = 0
        self.leaves: list[RadixNode] = []
        self._block_bytes = namespace.block_tokens * TOKEN_BYTES
        self._hidden: dict[RadixNode, bytes] = {}  # forgotten nodes and what their parents call them
        self._hid = 0

    @property
    def unpinned(self) -> int:
        return self.cached - self.pinned

    def next(self, node: RadixNode, packed: bytes, at: int, over: float) -> RadixNode | None:
        """The child of `node` that goes on with `packed` from `at` on, cut where they part; None where there is none.

        What nobody reads and was last used at `over` or before is found no more, from now on by nobody.
        """
        child = node.children.get(packed[at : at + self._block_bytes])
        if child is None:
            return None
        if not child.pins and child.used <= over:
            self.hide(child)
            return None
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
        return self.split(child, low)

    def split(self, lower: RadixNode, blocks: int) -> RadixNode:
        """Cuts an edge behind its first `blocks`. The node keeps its lower part: leases that end there still do."""
        parent, cut = lower.parent, blocks * self._block_bytes
        assert parent is not None
        parent.disown(self._key(lower))  # whose key must not outlive it beside an equal label
        upper = RadixNode(parent, bytes(lower.label[:cut]), lower.blocks[:blocks], lower.pins, lower.used)
        upper.reads = lower.reads
        lower.label, lower.blocks = bytes(lower.label[cut:]), lower.blocks[blocks:]
        lower.parent = upper
        parent.adopt(self._key(upper), upper)
        upper.adopt(self._key(lower), lower)
        return upper

    def append(self, node: RadixNode, label: bytes, blocks: list[int], used: float) -> RadixNode:
        """Puts new, pinned blocks below `node`: on its own edge where only one lease reaches it, which
        was the first to, else on a new one."""
        self.count(cached=len(blocks), pinned=len(blocks))
        if node is not self and node.pins == 1 and not node.children and not node.reads:
            node.editable().extend(label)
            node.blocks.extend(blocks)
            return node
        child = RadixNode(node, label, array("Q", blocks), 1, used)
        node.adopt(self._key(child), child)
        return child

    def pin(self, node: RadixNode, used: float) -> None:
        node.pins += 1
        node.used = used
        if node.pins == 1:
            self.count(pinned=len(node.blocks))
        elif node.pins == 2:
            self.account.sums.shared += len(node.blocks)

    def unpin(self, node: RadixNode, used: float) -> None:
        node.pins -= 1
        node.used = used
        if node.pins == 0:
            self.count(pinned=-len(node.blocks))
            self._offer(node)
        elif node.pins == 1:
            self.account.sums.shared -= len(node.blocks)

    def count(self, cached: int = 0, pinned: int = 0) -> None:
        account = self.account
        self.cached += cached
        self.pinned += pinned
        account.cached += cached
        account.pinned += pinned
        account.sums.cached += cached
        account.sums.pinned += pinned

    def hide(self, node: RadixNode) -> None:
        """Makes a node, and all that hangs below it, unfindable at once. Leases on it go on, and may grow."""
        parent = node.parent
        assert parent is not None
        parent.disown(self._key(node))
        self._hid += 1
        self._hidden[node] = self._key(node) + self._hid.to_bytes(8, "big")  # longer than any key that is looked up
        parent.adopt(self._key(node), node)

    def found(self, node: RadixNode) -> Iterator[RadixNode]:
        """Its children, without forgotten ones."""
        return (child for child in node.children.values() if child not in self._hidden)

    def rename(self, renamed: Mapping[int, int]) -> None:
        """Calls some blocks by other ids, wherever they are."""
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
                heappop(self.leaves).queued = 0.0
            elif node.queued < node.used:
                node.queued = node.used
                heapreplace(self.leaves, node)
            else:
                return node
        return None

    def age(self) -> float | None:
        """When its oldest unpinned leaf was last used. It falls only where there was none."""
        node = self.oldest()
        return None if node is None else node.used

    def over_s(self) -> float | None:
        """When the time of its oldest unpinned leaf is over, if it has any."""
        age, keep_s = self.age(), self.scope.keep_s
        return None if age is None or keep_s is None else age + keep_s

    def trim(self, count: int) -> list[int]:
        """Takes up to `count` blocks off the end of the least recently used leaf."""
        node = self.oldest()
        assert node is not None
        keep = max(0, len(node.blocks) - count)
        freed = node.blocks[keep:].tolist()
        if keep:
            del node.blocks[keep:], node.editable()[keep * self._block_bytes :]
        else:
            parent = node.parent
            assert parent is not None
            parent.disown(self._key(node))
            self._hidden.pop(node, None)
            heappop(self.leaves)
            self._offer(parent)
        self.count(cached=-len(freed))
        return freed

    def _offer(self, node: RadixNode) -> None:
        """Lets a node be evicted from now on, if it is an unpinned leaf."""
        if node is not self and not node.pins and not node.children and not node.queued:
            node.queued = node.used
            heappush(self.leaves, node)

    def _key(self, node: RadixNode) -> bytes:
        """Its parent's name for it: the bytes of its first block, unless it is forgotten."""
        return self._hidden.get(node) or bytes(node.label[: self._block_bytes])

    def check(self, blocks: set[int]) -> int:
        """Adds its blocks to `blocks`; gives how many of them two leases or more pin. Raises AssertionError."""
        cached = pinned = shared = 0
        hidden: set[RadixNode] = set()
        queued = {id(node) for node in self.leaves}
        assert len(queued) == len(self.leaves), "a node is queued twice"
        assert all(self.leaves[(at - 1) // 2].queued <= self.leaves[at].queued for at in range(1, len(self.leaves)))
        for node in _below(self):
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
            assert node.reads <= node.parent.reads, "a node was found without its parent"
            hidden.update({node} & self._hidden.keys())
            cached += size
            pinned += size if node.pins else 0
            shared += size if node.pins > 1 else 0
        assert self.cached or self.pins, "an empty root is kept"
        assert hidden == self._hidden.keys(), "a node that is gone is still hidden"
        assert (cached, pinned) == (self.cached, self.pinned), f"{self.namespace}: {cached}, {pinned}"
        assert not _CHILDLESS
        return shared


def _below(root: RadixNode) -> Iterator[RadixNode]:
    nodes = list(root.children.values())
    while nodes:
        node = nodes.pop()
        yield node
        nodes += node.children.values()
