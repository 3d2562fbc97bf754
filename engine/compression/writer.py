"""One compressed file as it is written, with its metadata. It encodes nothing and reads nothing.

The offset of a tensor is known once all before it are written, and the sums only at the end. So room for the longest
possible header is left at the start, zeros, which no reader takes for a header; blanks fill what the header leaves of
it. Tensors that would leave the next one unaligned, and escapes, come last.
"""

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

import torch
import xxhash
from torch import Tensor

from engine.bf12.layout import words_of
from engine.bf12.metadata import (
    ALIGNED_BYTES,
    PIECE_BYTES,
    VERSION,
    Bf12Metadata,
    CompressionLevel,
    OriginalFile,
    Plane,
    encode_metadata,
    piece_rows,
)
from engine.compression.survey import ESCAPE_RATE_MAX, shape_reason
from engine.weights.safetensors_header import HEADER_BYTES_MAX, SafetensorsHeader, TensorSpan, encode_header
from engine.weights.tensor_index import CheckpointError

_OFFSET_MAX: Final = 10**15  # no file is so long, and no number in a header longer
_SUM_MAX: Final = (1 << 64) - 1
_HEX: Final = "0" * 32


class EncodedPiece(NamedTuple):
    """A piece as it was (`raw`), and what is written for it, with its checksum. A piece in 12 bits has its bases and
    escapes, and at level DISTRIBUTION the low words as `stored` and a frame of the high ones."""

    raw: bytearray
    stored: memoryview
    checksum: int
    bases_N: Tensor | None = None
    positions_E: Tensor | None = None
    values_E: Tensor | None = None
    frame: bytes = b""


class Bf12Writer:
    """A new file at `path` for an original with this header, whose tensors come in the order of their bytes. All bytes
    of the original go through `digest`, where there is one."""

    def __init__(
        self, path: Path, original: SafetensorsHeader, level: CompressionLevel, digest: "hashlib._Hash | None"
    ) -> None:
        self._digest = digest
        self._original = original
        self._level = level
        self._sum = xxhash.xxh3_128()
        self._first = self._end = _max_header_bytes(path, original, level)
        self._tensors: list[TensorSpan] = []
        self._codes: dict[str, str] = {}
        self._pieces: dict[str, list[int]] = {}
        self._deferred: list[tuple[TensorSpan, memoryview | None]] = []
        text = original.text.encode()
        self._hash(len(text).to_bytes(8, "little") + text)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def close(self) -> None:
        os.close(self._file)

    def write_bf12(self, tensor: TensorSpan, pieces: Iterable[EncodedPiece]) -> int:
        """Writes a tensor in 12 bits as its pieces come. Returns the bytes that it takes."""
        outputs, inputs = tensor.shape
        words = words_of(inputs) if self._level is CompressionLevel.DEVICE else words_of(inputs) // 3 * 2
        first = low = self._end
        first_high = high = first + 4 * outputs * words
        whole, sums, ends = xxhash.xxh3_128(), [], []
        bases, positions, values = [], [], []
        for piece in pieces:
            assert piece.bases_N is not None
            assert piece.positions_E is not None
            assert piece.values_E is not None
            self._hash(piece.raw)
            whole.update(piece.raw)
            low = write_at(self._file, low, piece.stored)
            high = write_at(self._file, high, memoryview(piece.frame))
            sums.append(piece.checksum)
            ends.append(high - first_high)
            bases.append(piece.bases_N)
            positions.append(piece.positions_E)
            values.append(piece.values_E)
        assert low == first_high
        self._add(tensor.name, "I32", (outputs, words), first, low)
        self._codes[tensor.name] = whole.hexdigest()
        self._pieces[tensor.name] = sums
        if self._level is CompressionLevel.DISTRIBUTION:
            high = write_at(self._file, high, memoryview(bytes(-high % ALIGNED_BYTES)))
            self._add(tensor.name + Plane.HIGH, "U8", (high - first_high,), first_high, high)
            self._defer(tensor.name + Plane.HIGH_ENDS, "I64", torch.tensor(ends))
        self._defer(tensor.name + Plane.BASES, "U8", torch.cat(bases))
        self._defer(tensor.name + Plane.POSITIONS, "I64", torch.cat(positions))
        self._defer(tensor.name + Plane.VALUES, "BF16", torch.cat(values))
        self._end = high
        ends_bytes = 8 * len(ends) if self._level is CompressionLevel.DISTRIBUTION else 0
        return high - first + outputs + 10 * sum(map(len, positions)) + ends_bytes

    def write_plain(self, tensor: TensorSpan, pieces: Iterable[EncodedPiece]) -> None:
        """Writes a tensor as it is, or defers it to the end."""
        if tensor.bytes % ALIGNED_BYTES:
            for piece in pieces:
                self._hash(piece.raw)
            self._deferred.append((tensor, None))
            return
        first, sums = self._end, []
        for piece in pieces:
            self._hash(piece.raw)
            self._end = write_at(self._file, self._end, piece.stored)
            sums.append(piece.checksum)
        self._pieces[tensor.name] = sums
        self._add(tensor.name, tensor.dtype, tensor.shape, first, self._end)

    def finish(self, read: Callable[[int, int], bytearray]) -> None:
        """Writes the deferred tensors and the header, and synchronises the file. `read(first, count)` gives bytes of
        the original."""
        for tensor, content in sorted(self._deferred, key=lambda deferred: -deferred[0].item_bytes):
            first, sums = self._end, []
            for begin in range(0, tensor.bytes, PIECE_BYTES):
                count = min(PIECE_BYTES, tensor.bytes - begin)
                part = read(tensor.first + begin, count) if content is None else content[begin : begin + count]
                self._end = write_at(self._file, self._end, memoryview(part))
                sums.append(xxhash.xxh3_64_intdigest(part))
            self._add(tensor.name, tensor.dtype, tensor.shape, first, self._end)
            if not tensor.name.endswith(Plane.HIGH_ENDS):
                self._pieces[tensor.name] = sums
        original = OriginalFile(self._original.text, self._original.bytes, self._sum.hexdigest())
        metadata = encode_metadata(Bf12Metadata(VERSION, self._level, original, self._codes, self._pieces))
        start = encode_header(self._tensors, {**self._original.metadata, **metadata}, self._first)
        write_at(self._file, 0, memoryview(start))
        os.fsync(self._file)

    def _hash(self, raw: bytes | bytearray) -> None:
        self._sum.update(raw)
        if self._digest is not None:
            self._digest.update(raw)

    def _add(self, name: str, dtype: str, shape: tuple[int, ...], first: int, last: int) -> None:
        self._tensors.append(TensorSpan(name, dtype, shape, first, last))

    def _defer(self, name: str, dtype: str, numbers: Tensor) -> None:
        content = tensor_bytes(numbers)
        self._deferred.append((TensorSpan(name, dtype, (len(numbers),), 0, len(content)), content))


def write_at(file: int, offset: int, content: memoryview) -> int:
    """Writes all of it at the offset. Returns the offset behind it."""
    while content:
        count = os.pwrite(file, content, offset)
        offset, content = offset + count, content[count:]
    return offset


def tensor_bytes(numbers: Tensor) -> memoryview:
    """The bytes of a tensor in host memory, in the same memory."""
    return numbers.view(-1).view(torch.uint8).numpy().data


def _max_header_bytes(path: Path, original: SafetensorsHeader, level: CompressionLevel) -> int:
    """The bytes of the longest possible header. Raises CheckpointError where it is too long for a header."""
    tensors, codes, pieces = [], {}, {}

    def add(name: str, dtype: str, shape: tuple[int, ...], count: int) -> None:
        tensors.append(TensorSpan(name, dtype, shape, _OFFSET_MAX, _OFFSET_MAX))
        pieces[name] = [_SUM_MAX] * count

    for tensor in original.tensors:
        add(tensor.name, tensor.dtype, tensor.shape, 1 + tensor.bytes // PIECE_BYTES)
        if shape_reason(tensor):
            continue
        outputs, inputs = tensor.shape
        codes[tensor.name] = _HEX
        pieces[tensor.name] += [_SUM_MAX] * (1 + outputs // piece_rows(inputs))
        escapes = int(ESCAPE_RATE_MAX * outputs * inputs)
        add(tensor.name + Plane.BASES, "U8", (_OFFSET_MAX,), 1 + outputs // PIECE_BYTES)
        add(tensor.name + Plane.POSITIONS, "I64", (_OFFSET_MAX,), 1 + 8 * escapes // PIECE_BYTES)
        add(tensor.name + Plane.VALUES, "BF16", (_OFFSET_MAX,), 1 + 2 * escapes // PIECE_BYTES)
        if level is CompressionLevel.DISTRIBUTION:
            add(tensor.name + Plane.HIGH, "U8", (_OFFSET_MAX,), 0)
            add(tensor.name + Plane.HIGH_ENDS, "I64", (_OFFSET_MAX,), 0)
    metadata = encode_metadata(
        Bf12Metadata(VERSION, level, OriginalFile(original.text, original.bytes, _HEX), codes, pieces)
    )
    size = len(encode_header(tensors, {**original.metadata, **metadata}))
    if size > HEADER_BYTES_MAX:
        raise CheckpointError(
            f"{path.name} has so many tensors that its header would be longer than {HEADER_BYTES_MAX} bytes"
        )
    return size
