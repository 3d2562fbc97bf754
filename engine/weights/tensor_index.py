"""Where a checkpoint's tensors lie in its files, those in 12 bits with all their planes. It reads nothing, and needs no
torch.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.bf12.metadata import Plane
from engine.models.weight_names import ParameterEntry

ITEM_BYTES: Final = {"F32": 4, "BF16": 2, "F16": 2}  # of weights
BF12: Final = "BF12"  # the dtype of a tensor in 12 bits a number
_LISTED_MAX: Final = 5


class CheckpointError(ValueError):
    """The folder's weights are not those of its config.json, or not what was written; the message names file and
    tensor."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor: bytes first … last−1 of its file.

    sums    one for each piece (bf12/metadata.py); every tensor of a compressed file has them.
    bf12    the planes by suffix, where the dtype is BF12: then `shape` is the matrix's, and the bytes are its words',
            the low ones' alone where there is a plane of high ones.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int
    sums: tuple[int, ...] | None = None
    bf12: "Mapping[str, StoredTensor] | None" = None

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """What the file has of it, planes included."""
        return self.last - self.first + (0 if self.bf12 is None else sum(plane.bytes for plane in self.bf12.values()))


def bf12_escapes(entry: ParameterEntry, stored: Mapping[str, StoredTensor]) -> int | None:
    """How many escapes a parameter's sources have where it can stay in 12 bits: all sources are, with as many inputs,
    and no row changes its place. Else None."""
    planes = [bf12 for source in entry.sources if (bf12 := stored[source.name].bf12) is not None]
    alike = len({source.shape[1:] for source in entry.sources}) == 1
    known = alike and len(planes) == len(entry.sources) and entry.order is None
    return sum(bf12[Plane.VALUES].numbers for bf12 in planes) if known else None


def abbreviate_names(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    listed = ", ".join(names[:_LISTED_MAX])
    return listed if len(names) <= _LISTED_MAX else f"{listed} and {len(names) - _LISTED_MAX} more"
