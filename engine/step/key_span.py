"""Which keys a row of a layer sees, and which layers see alike. It knows no tensors, no blocks and no families."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class KeySpan:
    """The keys that a row sees of those up to its own position: all of them, or where one of these is set

    window  the last so many, its own included;
    chunk   those of its own run of so many positions: the runs begin at its multiples (Llama 4).

    Where rows of an image see each other, so many keys `ahead` of a windowed row have to be there too.
    """

    window: int | None = None
    chunk: int | None = None
    ahead: int = 0

    def __post_init__(self) -> None:
        assert self.window is None or self.chunk is None, "a window and a chunk at once"
        assert all(size is None or size > 0 for size in (self.window, self.chunk)), "a span of no key"

    @property
    def tokens(self) -> int | None:
        """The most keys that a row sees; None: as many as there are."""
        return self.window or self.chunk

    def first(self, position: int) -> int:
        """The first key that the row at this position sees."""
        if self.window is not None:
            return max(0, position + 1 - self.window)
        return 0 if self.chunk is None else position - position % self.chunk

    def firsts(self, positions_T: NDArray[np.integer]) -> NDArray[np.int64]:
        """`first` of each position."""
        if self.window is not None:
            return np.maximum(0, positions_T.astype(np.int64) + 1 - self.window)
        if self.chunk is None:
            return np.zeros(positions_T.shape, np.int64)
        positions = positions_T.astype(np.int64)
        return positions - positions % self.chunk

    def held_blocks(self, tokens: int, block_tokens: int) -> int:
        """The most blocks that a sequence of so many tokens has to have at once: all of its own, or those that a row
        sees, and one more on either side."""
        blocks = -(-tokens // block_tokens)
        return blocks if self.tokens is None else min(blocks, -(-(self.tokens + self.ahead) // block_tokens) + 2)


FULL: Final = KeySpan()


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers of one span: what of their keys is kept for a sequence is the same for each of them."""

    span: KeySpan
    layers: tuple[int, ...]


def group_layers(spans: Items[KeySpan]) -> tuple[LayerGroup, ...]:
    """The distinct spans with their layers: the full one first, the others in the order of their first layer."""
    distinct = sorted(dict.fromkeys(spans), key=lambda span: span != FULL)
    return tuple(
        LayerGroup(span, tuple(layer for layer, other in enumerate(spans) if other == span)) for span in distinct
    )
