"""How a model's KV lies in blocks: bytes and shapes. It knows no tensors."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one slot of one layer holds: K of all KV heads, then V of all KV heads."""

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: torch.dtype

    @property
    def slot_width(self) -> int:
        return 2 * self.kv_heads * self.head_dim

    @property
    def layer_block_bytes(self) -> int:
        return self.block_tokens * self.slot_width * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.layers * self.layer_block_bytes

    @property
    def layout(self) -> str:
        """Names the meaning of a block's bytes: two pools may exchange blocks only where it is equal."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"kv-{dtype}-l{self.layers}-h{self.kv_heads}x{self.head_dim}-b{self.block_tokens}"
