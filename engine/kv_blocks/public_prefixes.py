"""Prefixes that everybody may read: an operator's, computed before a replica serves, and kept as long as it does.

Token ids are compared exactly. The module knows neither whose they are nor how their blocks were computed.
"""

from array import array
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray


class InvalidPublicPrefix(ValueError):
    """A prefix of a model's public_prefixes that cannot be kept; the message says which, and what to change."""


class PublicPrefixes:
    """Token prefixes in whole blocks, and the pages that hold them for good.

    Each of the `pages` has a number from 1 on, which stays the same when its contents move: namespaces of what lies
    behind it are named by this number.
    """

    def __init__(self, block_tokens: int) -> None:
        self.pages: dict[int, int] = {}
        self._block_tokens = block_tokens
        self._prefixes: list[tuple[NDArray[np.uint32], list[int]]] = []

    def add(self, tokens: "array[int]", pages: list[int]) -> None:
        assert len(tokens) == len(pages) * self._block_tokens
        self._prefixes.append((np.array(tokens, np.uint32), list(pages)))
        for page in pages:
            self.pages.setdefault(page, len(self.pages) + 1)

    def rename(self, renamed: Mapping[int, int]) -> None:
        """Names pages anew whose contents moved."""
        self.pages = {renamed.get(page, page): number for page, number in self.pages.items()}
        for _, pages in self._prefixes:
            pages[:] = [renamed.get(page, page) for page in pages]

    def find(self, tokens: "array[int] | memoryview") -> list[int]:
        """The pages of the longest part of a prefix that the tokens begin with. Costs a comparison with each prefix."""
        if not self._prefixes:
            return []
        ids, size = np.frombuffer(tokens, np.uint32), self._block_tokens
        return max((pages[: common_prefix_length(prefix, ids) // size] for prefix, pages in self._prefixes), key=len)


def common_prefix_length(first: NDArray[np.integer], second: NDArray[np.integer]) -> int:
    """The length of the longest common prefix."""
    length = min(len(first), len(second))
    differ = first[:length] != second[:length]
    return int(differ.argmax()) if differ.any() else length


def whole_blocks(prefixes: list[list[int]], blocks: int, block_tokens: int, vocabulary: int) -> list["array[int]"]:
    """The prefixes, cut to whole blocks. Raises InvalidPublicPrefix where one is not fit for such a pool."""
    whole = [prefix[: len(prefix) // block_tokens * block_tokens] for prefix in prefixes]
    for number, (prefix, cut) in enumerate(zip(prefixes, whole, strict=True)):
        if not cut:
            raise InvalidPublicPrefix(
                f"public_prefixes[{number}] has {len(prefix)} tokens, less than a block of {block_tokens}: leave it out"
            )
        if not 0 <= min(prefix) <= max(prefix) < vocabulary:
            raise InvalidPublicPrefix(f"public_prefixes[{number}] has a token id that is not below {vocabulary}")
    needed = sum(map(len, whole)) // block_tokens
    if needed > blocks // 2:
        raise InvalidPublicPrefix(
            f"public_prefixes take {needed} of {blocks} KV blocks; at most half may be pinned: shorten them, or raise "
            "kv_bytes"
        )
    return [array("I", prefix) for prefix in whole]
