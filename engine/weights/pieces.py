"""A checkpoint's tensors → the pieces that carry them to a device, and all that has to be known of bf12 ones before:
their escapes, and where their compressed high words lie. These are small, and read first.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine.bf12 import layout
from engine.bf12.codec import Escapes
from engine.bf12.layout import ZEROS, words_of
from engine.bf12.metadata import ALIGNED_BYTES, PIECE_BYTES, Plane, piece_rows
from engine.weights.streaming import Bf12Rows, FilePiece, split_pieces, stream_pieces
from engine.weights.tensor_index import CheckpointError, StoredTensor

_CPU: Final = torch.device("cpu")
_DTYPES: Final = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64, "U8": torch.uint8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A bf12 tensor without its words. `frames` are the bytes of the file with each piece's high words, where they are
    compressed."""

    name: str
    stored: StoredTensor
    escapes: Escapes
    frames: list[range] | None

    def pieces(self, target: Tensor) -> Iterator[FilePiece]:
        """The pieces that fill `target`, contiguous, with words, or with numbers where it has their shape."""
        outputs, inputs = self.stored.shape
        expands, sums = target.shape == self.stored.shape, self.stored.sums
        assert sums is not None
        row_bytes = 4 * words_of(inputs) if self.frames is None else inputs
        step = piece_rows(inputs)
        for index, start in enumerate(range(0, outputs, step)):
            rows = range(start, min(start + step, outputs))
            frame = None if self.frames is None else self.frames[index]
            escapes = self.escapes.rows(rows) if expands else None
            yield FilePiece(
                self.name, self.stored.path, self.stored.first + start * row_bytes, torch.int32,
                target[start : rows.stop].view(-1), sums[index], Bf12Rows(len(rows), inputs, frame, escapes),
            )  # fmt: skip


def plain_pieces(name: str, stored: StoredTensor, target: Tensor) -> Iterator[FilePiece]:
    """The pieces of a tensor as it is."""
    return split_pieces(name, stored.path, stored.first, _DTYPES[stored.dtype], target, stored.sums)


def read_matrices(stored: Mapping[str, StoredTensor], beat: Callable[[], None]) -> dict[str, StoredMatrix]:
    """Reads what bf12 tensors have beside their words. Raises CheckpointError."""
    small: dict[str, Tensor] = {}
    pieces: list[FilePiece] = []
    for name, tensor in stored.items():
        assert tensor.bf12 is not None
        for suffix, plane in tensor.bf12.items():
            if suffix != Plane.HIGH:
                small[name + suffix] = torch.empty(plane.shape, dtype=_DTYPES[plane.dtype])
                pieces += plain_pieces(name + suffix, plane, small[name + suffix])
    if pieces:
        stream_pieces(pieces, _CPU, lambda _: beat())
    return {name: _matrix(name, tensor, small) for name, tensor in stored.items()}


def _matrix(name: str, stored: StoredTensor, small: Mapping[str, Tensor]) -> StoredMatrix:
    bases_N, positions_E, values_E = (small[name + plane] for plane in (Plane.BASES, Plane.POSITIONS, Plane.VALUES))
    if bool(((bases_N != ZEROS) & ((bases_N < layout.BASES.start) | (bases_N >= layout.BASES.stop))).any()):
        raise CheckpointError(f"{stored.path}: {name} has bases that are none: compress its model anew")
    if len(positions_E) and not _ascend(positions_E, stored.numbers):
        raise CheckpointError(f"{stored.path}: {name} has escapes at no places of it: compress its model anew")
    escapes = Escapes(stored.shape[0], stored.shape[1], bases_N, positions_E, values_E)
    high = None if stored.bf12 is None else stored.bf12.get(Plane.HIGH)
    return StoredMatrix(name, stored, escapes, None if high is None else _frames(name, high, small))


def _ascend(positions_E: Tensor, numbers: int) -> bool:
    return bool(positions_E[0] >= 0 and positions_E[-1] < numbers and (positions_E[1:] > positions_E[:-1]).all())


def _frames(name: str, high: StoredTensor, small: Mapping[str, Tensor]) -> list[range]:
    ends = small[name + Plane.HIGH_ENDS].tolist()
    frames = [range(first, last) for first, last in zip([0, *ends], ends, strict=False)]
    fit = all(0 < len(frame) <= PIECE_BYTES for frame in frames)
    if not fit or not 0 <= high.bytes - ends[-1] < ALIGNED_BYTES:
        raise CheckpointError(f"{high.path}: {name} has frames that do not fit: get the file again")
    return [range(high.first + frame.start, high.first + frame.stop) for frame in frames]
