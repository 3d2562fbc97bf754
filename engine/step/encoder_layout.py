"""One step's texts as one int32 array, and back. It does not know why these texts were chosen.

    S | starts_S+1 | poolings_S | tokens_T

S texts, T tokens of all of them together.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Final

import numpy as np

from engine.protocol.types import Pooling
from engine.step.layout import Int32s

POOLINGS: Final = tuple(Pooling)


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Views into the packed array. Text s is tokens_T[starts_S1[s] : starts_S1[s + 1]]."""

    starts_S1: Int32s
    poolings_S: Int32s  # indices of POOLINGS
    tokens_T: Int32s

    @property
    def lengths(self) -> list[int]:
        lengths: list[int] = np.diff(self.starts_S1).tolist()
        return lengths


def pack_texts(texts: Items[Items[int] | Int32s], poolings: Items[Pooling]) -> Int32s:
    """Packs the texts' step into one array that `unpack_texts` reads; nothing of it is shared with the texts."""
    assert texts, "a step without texts"
    assert len(texts) == len(poolings)
    count, lengths = len(texts), [len(text) for text in texts]
    assert min(lengths) > 0, "a text without tokens"
    packed = np.empty(2 + 2 * count + sum(lengths), np.int32)
    packed[0], packed[1] = count, 0
    view = unpack_texts(packed)
    np.cumsum(lengths, out=view.starts_S1[1:])
    view.poolings_S[:] = [POOLINGS.index(pooling) for pooling in poolings]
    np.concatenate([np.asarray(text, np.int32) for text in texts], out=view.tokens_T)
    return packed


def unpack_texts(packed: Int32s) -> TextBatch:
    """Views of a packed array; the result holds as long as the array is not written."""
    count = int(packed[0])
    starts, poolings, tokens = np.split(packed, [1, 2 + count, 2 + 2 * count])[1:]
    return TextBatch(starts, poolings, tokens)
