"""A checkpoint's tensors → the pieces that carry them to a device, and all that has to be known of bf12 ones before:
their escapes, and where their compressed high words lie. These are small, and read first.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from engine.bf12 import layout
from engine.bf12.codec import Escapes
from engine.bf12.layout import ZEROS, words_of
from engine.bf12.metadata import ALIGNED_BYTES, PIECE_BYTES, Plane, piece_rows
from engine.weights import fp8, mxfp4
from engine.weights.streaming import (
    SLAB_BYTES,
    Bf12Rows,
    ColumnRange,
    FilePiece,
    PackedNumbers,
    column_pieces,
    split_pieces,
    stream_pieces,
)
from engine.weights.tensor_index import CheckpointError, StoredTensor

_CPU: Final = torch.device("cpu")
_DTYPES: Final = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
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


def part_pieces(
    name: str, stored: StoredTensor, target: Tensor, rows: range, columns: range | None
) -> Iterator[FilePiece]:
    """The pieces of some rows of a tensor as it is, and of some of their columns. Sums are compared of whole tensors
    alone."""
    dtype = _DTYPES[stored.dtype]
    first = stored.first + rows.start * math.prod(stored.shape[1:]) * dtype.itemsize
    if columns is None:
        sums = stored.sums if len(rows) == stored.shape[0] else None
        return split_pieces(name, stored.path, first, dtype, target, sums)
    return column_pieces(name, stored.path, first, dtype, target, ColumnRange(stored.shape[1], columns))


def mxfp4_pieces(name: str, stored: StoredTensor, exponents: Tensor, target: Tensor) -> Iterator[FilePiece]:
    """The pieces of a tensor of pairs of 4 bits. `exponents`, uint8, lie as in the file; `target` is contiguous."""
    flat, exponents_B = target.view(-1, mxfp4.BLOCK), exponents.view(-1)
    blocks = SLAB_BYTES // mxfp4.BLOCK_BYTES
    for first in range(0, len(flat), blocks):
        into, own = flat[first : first + blocks], exponents_B[first : first + blocks]
        packed = PackedNumbers(own.numel() * mxfp4.BLOCK_BYTES, partial(_expand_mxfp4, own, into.dtype))
        yield FilePiece(
            name, stored.path, stored.first + first * mxfp4.BLOCK_BYTES, torch.uint8, into.view(-1), packed=packed
        )


def paired_mxfp4_pieces(name: str, stored: StoredTensor, target: Tensor) -> Iterator[FilePiece]:
    """The pieces of the same where they stay pairs of 4 bits: `target` has a file's bytes in another order."""
    flat = target.view(-1)
    step = SLAB_BYTES // (2 * mxfp4.BLOCK_BYTES) * (2 * mxfp4.BLOCK_BYTES)
    for first in range(0, len(flat), step):
        into = flat[first : first + step]
        packed = PackedNumbers(len(into), _pair_mxfp4)
        yield FilePiece(name, stored.path, stored.first + first, torch.uint8, into, packed=packed)


def _pair_mxfp4(bytes_N: Tensor) -> Tensor:
    return mxfp4.pair(bytes_N.view(-1, mxfp4.BLOCK_BYTES)).view(-1)


def _expand_mxfp4(exponents_B: Tensor, dtype: torch.dtype, bytes_N: Tensor) -> Tensor:
    return mxfp4.expand(bytes_N.view(-1, mxfp4.BLOCK_BYTES), exponents_B.to(bytes_N.device), dtype).view(-1)


def fp8_pieces(name: str, stored: StoredTensor, scales_NB: Tensor, target_NK: Tensor) -> Iterator[FilePiece]:
    """The pieces of a tensor of 8 bits a number that becomes numbers of another dtype."""
    outputs, inputs = target_NK.shape
    together = max(1, SLAB_BYTES // inputs)
    for first in range(0, outputs, together):
        into, own = target_NK[first : first + together], scales_NB[first : first + together]
        packed = PackedNumbers(into.numel(), partial(_expand_fp8, own, into.dtype))
        yield FilePiece(name, stored.path, stored.first + first * inputs, fp8.DTYPE, into.view(-1), packed=packed)


def _expand_fp8(scales_NB: Tensor, dtype: torch.dtype, numbers: Tensor) -> Tensor:
    return fp8.expand(numbers.view(len(scales_NB), -1), scales_NB, dtype).view(-1)


def read_small(stored: Mapping[str, StoredTensor], beat: Callable[[], None]) -> dict[str, Tensor]:
    """Reads whole tensors into host memory, as they are. Raises CheckpointError."""
    tensors = {name: torch.empty(tensor.shape, dtype=_DTYPES[tensor.dtype]) for name, tensor in stored.items()}
    pieces = [piece for name, tensor in stored.items() for piece in plain_pieces(name, tensor, tensors[name])]
    if pieces:
        stream_pieces(pieces, _CPU, lambda _: beat())
    return tensors


def read_matrices(stored: Mapping[str, StoredTensor], beat: Callable[[], None]) -> dict[str, StoredMatrix]:
    """Reads what bf12 tensors have beside their words. Raises CheckpointError."""
    planes = {
        name + suffix: plane
        for name, tensor in stored.items()
        for suffix, plane in (tensor.bf12 or {}).items()
        if suffix != Plane.HIGH
    }
    small = read_small(planes, beat)
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
