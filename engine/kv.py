"""The KV cache's tensors: blocks of slots, one slot per token and layer. It knows no sequences and no owners."""

import mmap
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine.model.config import ModelConfig

_CPU: Final = torch.device("cpu")


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
    """`blocks` blocks of every layer; slot = block · block_tokens + offset.

    On a CPU one more block, `empty`, is always zero, and pages are touched when first written, so a large pool costs
    memory only as it fills. On a GPU nothing is touched: what lies in a slot before it is written is anything.
    """

    def __init__(self, shape: KvShape, blocks: int, device: torch.device = _CPU) -> None:
        assert blocks > 0
        self.shape = shape
        self.blocks = blocks
        self.empty = blocks
        slots = (blocks + 1) * shape.block_tokens
        width = shape.slot_width
        memory = _memory(shape.layers * slots * width * shape.dtype.itemsize, device)
        self.layers: list[Tensor] = list(memory.view(shape.dtype).view(shape.layers, slots, width).unbind())
        self._blocks = [rows.view(blocks + 1, shape.block_tokens * width) for rows in self.layers]
        words = memory.view(torch.int64) if shape.block_tokens * width * shape.dtype.itemsize % 8 == 0 else memory
        self._words = words.view(shape.layers, blocks + 1, -1)

    @property
    def bytes(self) -> int:
        """What the blocks that tables can name occupy, over all layers."""
        return self.blocks * self.shape.block_bytes

    def write(self, layer: int, slots_T: Tensor, rows_TW: Tensor) -> None:
        """Puts K and V of T tokens into their slots (int64)."""
        self.layers[layer].index_copy_(0, slots_T, rows_TW)

    def read(self, layer: int, blocks_B: Tensor, unwritten_U: Tensor, into_LW: Tensor) -> None:
        """Copies whole blocks into rows [B · block_tokens, slot_width], then clears the rows `unwritten_U` of these.

        What earlier owners left in a block must be cleared: a weight of 0 does not silence a NaN. The caller's memory
        is used again from layer to layer, because page faults of new memory cost more than the copy.
        """
        into_BW = into_LW.view(len(blocks_B), -1)
        torch.index_select(self._blocks[layer], 0, blocks_B, out=into_BW)
        into_LW.index_fill_(0, unwritten_U, 0)

    def erase(self, blocks_B: Tensor) -> None:
        """Zeroes whole blocks (int64) in all layers, on a GPU in the order of the stream that is entered.

        One pass over their bytes: bytes ÷ bandwidth.
        """
        self._words.index_fill_(1, blocks_B, 0)

    def check(self) -> None:
        """The empty block is still zero: nothing was written through a table's padding."""
        for rows in self._blocks:
            assert not rows[self.empty].any(), "the empty block was written"


def _memory(count: int, device: torch.device) -> Tensor:
    """So many bytes. On a CPU they are zero, and the operating system gives them page by page as they are written,
    which no allocator promises that may have been told to overwrite what it gives."""
    if device.type == "cpu":
        pages = mmap.mmap(-1, count, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=torch.uint8)
    return torch.empty(count, dtype=torch.uint8, device=device)
