"""What a sequence reads of the prefix tree. It knows neither accounts nor time."""

from collections.abc import Mapping

from prefixcache.radix import NamespaceRoot, RadixNode


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
        """Renames blocks, as `PrefixTree.rename` does."""
        self.blocks[:] = [renamed.get(block, block) for block in self.blocks]
