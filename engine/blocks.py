"""The block account: which blocks of the KV pool are free. It does not know what is in them or who has the others."""

from collections.abc import Iterable


class Blocks:
    """Block ids 0 … total−1. At any time each is free here, cached in the prefix tree, or private to one sequence."""

    def __init__(self, total: int) -> None:
        assert total > 0
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._is_free = bytearray(b"\1" * total)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` block ids that are the caller's until it gives them back; the most recently freed first."""
        assert 0 <= count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        kept = len(self._free) - count
        taken = self._free[kept:][::-1]
        del self._free[kept:]
        for block in taken:
            self._is_free[block] = 0
        return taken

    def give(self, blocks: Iterable[int]) -> None:
        """Frees blocks that were taken."""
        for block in blocks:
            assert not self._is_free[block], f"block {block} is freed twice"
            self._is_free[block] = 1
            self._free.append(block)

    def check(self) -> None:
        """Raises AssertionError where a block is in the free list twice, or free and not in it."""
        assert len(set(self._free)) == len(self._free) == sum(self._is_free)
        assert all(self._is_free[block] for block in self._free)
