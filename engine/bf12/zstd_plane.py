"""The high words of a piece as a zstd frame, for a folder's way to other machines. It knows no files.

Trained weights use few values of a byte of sign and exponents, so zstd's Huffman code takes a piece of high words to
some 68 % of its size: with the low words, which nothing makes smaller, to 67.0 % of bf16. For Gaussian weights 66.7 %
is the bound of any code of single bytes, and 65.9 % of one that also knew the exponent's last bit. One core of a Xeon
packs 1.7 and unpacks 2.7 GB/s of bf16 at level 1. Levels from 3 on search for repetitions that are not there, ten
times slower and for larger files; levels below 0 have no Huffman code at all. zstd's other parameters (table sizes,
the minimum match) change nothing at level 1, and neither does dividing signs from exponents.

N outputs, W words of a row, V = 2 · W ÷ 3 low words of a row.
"""

from typing import Any, Final

import numpy as np
import zstandard
from torch import Tensor

from engine.bf12.layout import lanes_of

_LEVEL: Final = 1


class ZstdPlaneError(ValueError):
    """A frame does not hold a piece's high words."""


def pack_plane(words_NW: Tensor) -> tuple[bytes, Tensor]:
    """The frame of the high words, and the low ones [N, V], a copy. The words lie in host memory."""
    words = _blocks(words_NW)
    high, low = words[:, :, 0], words_NW.view(words.shape)[:, :, 1:]
    frame = zstandard.ZstdCompressor(level=_LEVEL).compress(np.ascontiguousarray(high).data)
    return frame, low.flatten(1).contiguous()


def unpack_plane(frame: bytes | memoryview, low_NV: Tensor, words_NW: Tensor) -> None:
    """Fills `words_NW`, contiguous in host memory, with what was packed. Raises ZstdPlaneError where the frame is not
    of such a piece; whether the words are right, only their sum says. Takes a third of their memory meanwhile."""
    words = _blocks(words_NW)
    high, low = words[:, :, 0], words[:, :, 1:]
    try:
        size = zstandard.get_frame_parameters(frame).content_size
        if size != high.nbytes:  # before memory is taken for it
            raise ZstdPlaneError(f"a frame of {size} bytes, where {high.nbytes} are due")
        content = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ZstdPlaneError(f"a frame that cannot be read: {error}") from error
    if len(content) != high.nbytes:
        raise ZstdPlaneError(f"a frame that ends after {len(content)} bytes of {high.nbytes}")
    high[...] = np.frombuffer(content, np.int32).reshape(high.shape)
    low[...] = low_NV.numpy().reshape(low.shape)


def _blocks(words_NW: Tensor) -> "np.ndarray[Any, np.dtype[np.int32]]":
    """The words as [N, blocks, 3, lanes], in the same memory."""
    assert words_NW.is_contiguous()
    outputs, words = words_NW.shape
    return words_NW.numpy().reshape(outputs, -1, 3, lanes_of(words * 8 // 3))
