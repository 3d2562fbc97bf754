"""The KV cache's tensors: blocks of slots, one slot per token and layer, what lies in them, and which of them have
memory. It knows no sequences and no owners."""

import math
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from engine.memory.virtual_memory import Arena, contiguous_ranges
from engine.step.key_span import FULL, KeySpan, LayerGroup

EXTENT_BYTES: Final = 1 << 30
_EXTENTS: Final = 64
_COPIED_BLOCKS: Final = 256  # at once
_CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one slot of one layer holds: K of all KV heads, then V of all KV heads. A pool's layers have one span."""

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: torch.dtype
    span: KeySpan = FULL

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

    def whole_layouts(self, kv_heads: int, groups: Items[LayerGroup]) -> list[str]:
        """The layouts of a model's groups of layers, of all of its KV heads: this is the shape of some heads' slots."""
        return [replace(self, layers=len(group.layers), kv_heads=kv_heads).layout for group in groups]


class KVPool:
    """`blocks` blocks of every layer; slot = block · block_tokens + offset. Extents, runs of extent_blocks of them, get
    memory and give it back, one piece of a region in each layer. A layer is one tensor over all of its range.

        layer 0 │ extent 0 │ extent 1 │ … │ extent n−1 │ empty │
        layer 1 │ extent 0 │ …

    One more block, `empty`, is for a CPU, where it is always zero, and pages are touched when first written, so that a
    large pool costs memory only as it fills. On a GPU what lies in a slot before it is written is anything.

    words_LNW  all blocks of each layer, in words of 8 bytes where a layer's part of a block is a multiple of that. On
               a GPU `empty` may have no memory.
    """

    def __init__(
        self, shape: KVShape, blocks: int, arena: Arena | None = None, extents: int | None = None,
        blocks_at_once: int = 0,
    ) -> None:  # fmt: skip
        """With memory for the first so many extents, or for all. An extent has as many blocks as `extent_blocks`
        says, or so many where that is decided elsewhere. Raises OutOfDeviceMemory."""
        assert blocks > 0
        arena = arena or Arena.of(_CPU)
        self.shape = shape
        self.blocks = blocks
        self.empty = blocks
        self.extent_blocks = blocks_at_once or extent_blocks(shape, blocks, arena.driver.granularity)
        self.extents = -(-blocks // self.extent_blocks)
        piece_bytes = self.extent_blocks * shape.layer_block_bytes
        # The empty block lies in one more piece, which gets no memory: on a CPU that reads as zero.
        self._layer_pieces = self.extents + 1
        layer_bytes = self._layer_pieces * piece_bytes
        self._region = arena.reserve("KV", shape.layers * layer_bytes, piece_bytes)
        self._region.map(self._pieces(range(self.extents if extents is None else extents)))
        memory = self._region.tensor()
        slots, width = (blocks + 1) * shape.block_tokens, shape.slot_width
        numbers = memory.view(shape.dtype)
        stride = layer_bytes // shape.dtype.itemsize
        self.layers: list[Tensor] = list(numbers.as_strided((shape.layers, slots, width), (stride, width, 1)).unbind())
        self._blocks = [rows.view(blocks + 1, shape.block_tokens * width) for rows in self.layers]
        words = memory.view(torch.int64) if shape.layer_block_bytes % 8 == 0 else memory
        block_words = shape.layer_block_bytes // words.itemsize
        strides = (layer_bytes // words.itemsize, block_words, 1)
        self.words_LNW = words.as_strided((shape.layers, blocks + 1, block_words), strides)

    @property
    def bytes(self) -> int:
        """What the blocks that tables can name would occupy, over all layers."""
        return self.blocks * self.shape.block_bytes

    @property
    def extent_bytes(self) -> int:
        """What one extent takes, over all layers."""
        return self.extent_blocks * self.shape.block_bytes

    @property
    def mapped_bytes(self) -> int:
        return self._region.mapped_bytes

    @property
    def mapped(self) -> list[int]:
        """The extents that have memory, ascending."""
        return [extent for extent in range(self.extents) if self._region.has(extent)]

    def map(self, extents: Items[int]) -> None:
        """Gives these extents memory. Raises OutOfDeviceMemory, and then none of them has got any."""
        self._region.map(self._pieces(extents))

    def unmap(self, extents: Items[int]) -> None:
        """Gives their memory back. Nothing that is queued on the device reads or writes it."""
        self._region.unmap(self._pieces(extents))

    def clear(self, extents: Items[int]) -> None:
        """Zeroes all of these extents, so that nothing of what was written there reaches whoever gets the memory."""
        for first, last in contiguous_ranges(extents):
            for words in self.words_LNW:
                words[first * self.extent_blocks : last * self.extent_blocks].zero_()

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
        self.words_LNW.index_fill_(1, blocks_B, 0)

    def copy(self, sources_B: Tensor, targets_B: Tensor) -> None:
        """Copies whole blocks (int64) in all layers, in the order of the stream. No target is a source. It takes memory
        for some blocks of one layer."""
        for sources, targets in zip(sources_B.split(_COPIED_BLOCKS), targets_B.split(_COPIED_BLOCKS), strict=True):
            for words in self.words_LNW:
                words.index_copy_(0, targets, words.index_select(0, sources))

    def take(self, layer: int, blocks_B: Tensor, into: Tensor) -> None:
        """Copies blocks of a layer into bytes [B, layer_block_bytes]."""
        torch.index_select(self.words_LNW[layer], 0, blocks_B, out=into.view(self.words_LNW.dtype))

    def put(self, layer: int, blocks_B: Tensor, taken: Tensor) -> None:
        """Copies into blocks of a layer what `take` took."""
        self.words_LNW[layer].index_copy_(0, blocks_B, taken.view(self.words_LNW.dtype))

    def gather(self, blocks_B: Tensor, into_BLW: Tensor) -> None:
        """Copies whole blocks, all layers of each, into bytes [B, layers, layer_block_bytes]."""
        torch.index_select(self.words_LNW.transpose(0, 1), 0, blocks_B, out=into_BLW.view(self.words_LNW.dtype))

    def scatter(self, blocks_B: Tensor, gathered_BLW: Tensor) -> None:
        """Copies into whole blocks what `gather` copied."""
        self.words_LNW.transpose(0, 1).index_copy_(0, blocks_B, gathered_BLW.view(self.words_LNW.dtype))

    def check(self) -> None:
        """The empty block is still zero: nothing was written through a table's padding."""
        for rows in self._blocks:
            assert not rows[self.empty].any(), "the empty block was written"

    def _pieces(self, extents: Iterable[int]) -> list[int]:
        """The pieces of these extents in all layers."""
        extents = list(extents)
        assert all(0 <= extent < self.extents for extent in extents)
        return [layer * self._layer_pieces + extent for layer in range(self.shape.layers) for extent in extents]


def extent_blocks(shape: KVShape, blocks: int, granularity: int) -> int:
    """How many blocks come and go at once: pieces of whole units of memory, some 64 extents in all, none larger than
    EXTENT_BYTES but where a unit in each layer is."""
    unit = math.lcm(shape.layer_block_bytes, granularity) // shape.layer_block_bytes
    target = min(blocks * shape.block_bytes // _EXTENTS, EXTENT_BYTES) // shape.block_bytes
    return max(1, target // unit) * unit
