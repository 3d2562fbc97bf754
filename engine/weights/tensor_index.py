"""Where a checkpoint's tensors lie in its files, coded ones with all that they are made of. It reads nothing, and needs
no torch.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.models.weight_names import ParameterEntry

ITEM_BYTES: Final = {"F32": 4, "BF16": 2, "F16": 2}  # of weights
BF12: Final = "BF12"  # the dtype of what is coded
_LISTED_MAX: Final = 5


class CheckpointError(ValueError):
    """The folder's weights are not those of its config.json, or not what was written; the message names file and
    tensor."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor: bytes first … last−1 of its file.

    sums    of its pieces (notes.py), which every tensor of a compressed file has.
    code    where the dtype is BF12: then `shape` is the matrix's, and the bytes are those of its words.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int
    sums: tuple[int, ...] | None = None
    code: "CodedPlanes | None" = None

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """All that the file has of it."""
        return self.last - self.first + (0 if self.code is None else sum(plane.bytes for plane in self.code.planes))


@dataclass(frozen=True, slots=True)
class ZstdPlane:
    """High words, packed for their way: a frame for each piece of words, and where each of them ends."""

    frames: StoredTensor
    ends: StoredTensor


@dataclass(frozen=True, slots=True)
class CodedPlanes:
    """What a coded tensor has beside its words, which are the low ones alone where the high ones are packed."""

    bases: StoredTensor
    positions: StoredTensor
    values: StoredTensor
    high: ZstdPlane | None

    @property
    def planes(self) -> list[StoredTensor]:
        high = [] if self.high is None else [self.high.frames, self.high.ends]
        return [self.bases, self.positions, self.values, *high]


def coded_sources(entry: ParameterEntry, stored: Mapping[str, StoredTensor]) -> list[CodedPlanes]:
    """Those of a parameter's sources, where it can stay coded: all of them are, with as many inputs. Else none."""
    codes = [code for source in entry.sources if (code := stored[source.name].code) is not None]
    alike = len({source.shape[1:] for source in entry.sources}) == 1
    return codes if alike and len(codes) == len(entry.sources) else []


def abbreviate_names(names: Iterable[str]) -> str:
    """A few of them."""
    names = list(names)
    shown = ", ".join(names[:_LISTED_MAX])
    return shown if len(names) <= _LISTED_MAX else f"{shown} and {len(names) - _LISTED_MAX} more"
