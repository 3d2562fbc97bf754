"""The KV cache's tensors: blocks of slots, one slot per token and layer. It knows no sequences and no tables' owners."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one slot of one layer holds: K of all KV heads, then V of all KV heads."""

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: ModelConfig, block_tokens: int, dtype: torch.dtype) -> "KvShape":
        return cls(config.layers, config.kv_heads, config.head_dim, block_tokens, dtype)

    @property
    def slot_width(self) -> int:
        return 2 * self.kv_heads * self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.layers * self.block_tokens * self.slot_width * self.dtype.itemsize

    @property
    def layout(self) -> str:
        """Names the meaning of a block's bytes: two pools may exchange blocks only where it is equal."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"kv-{dtype}-l{self.layers}-h{self.kv_heads}x{self.head_dim}-b{self.block_tokens}"


class KvPool:
    """`blocks` blocks of every layer. Slot = block · block_tokens + offset; one more slot, `empty`, is always zero.

    The pages are touched when first written, so a large pool costs memory only as it fills.
    """

    def __init__(self, shape: KvShape, blocks: int) -> None:
        assert blocks > 0
        self.shape = shape
        self.blocks = blocks
        self.empty = blocks * shape.block_tokens
        slots = self.empty + shape.block_tokens
        self.layers: list[Tensor] = [
            torch.zeros(slots, shape.slot_width, dtype=shape.dtype) for _ in range(shape.layers)
        ]

    def write(self, layer: int, slots_T: Tensor, rows_TW: Tensor) -> None:
        """Puts K and V of T tokens into their slots (int64)."""
        self.layers[layer].index_copy_(0, slots_T, rows_TW)

    def read(self, layer: int, slots_L: Tensor) -> Tensor:
        """A copy of the slots' rows: [L, slot_width]."""
        return self.layers[layer].index_select(0, slots_L)

    def check(self) -> None:
        """The empty slot is still zero: nothing was written through a table's padding."""
        for rows in self.layers:
            assert not rows[self.empty :].any(), "the empty slot was written"
