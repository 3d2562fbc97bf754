"""One compressed file as it is written, and what it says of itself (notes.py). It codes nothing and reads nothing.

Where a tensor begins is known once all before it are written, and the sums at the end alone. So room for the longest
header there may be is left at the start, which no reader takes for a header while it is zeros; what is not needed of it
are blanks. Tensors that would leave the next one unaligned, and escapes, come last.
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
    BASES,
    HIGH,
    HIGH_ENDS,
    PIECE_BYTES,
    POSITIONS,
    VALUES,
    VERSION,
    Bf12Metadata,
    CompressionLevel,
    OriginalFile,
    encode_metadata,
    piece_rows,
)
from engine.compression.survey import ESCAPE_RATE_MAX, shape_reason
from engine.weights.safetensors_header import HEADER_BYTES_MAX, SafetensorsHeader, TensorSpan, encode_header
from engine.weights.tensor_index import CheckpointError

_FAR: Final = 10**15  # no file reaches so far, and no number in a header is longer
_SUM_MAX: Final = (1 << 64) - 1
_HEX: Final = "0" * 32


class EncodedPiece(NamedTuple):
    """What became of a piece: the bytes that it was, what is written for it, and the sum that is said of it. One that
    was coded has its bases and escapes, at level DISTRIBUTION the low words as `stored` and the high ones' frame."""

    raw: bytearray
    stored: memoryview
    sum: int
    bases_N: Tensor | None = None
    positions_E: Tensor | None = None
    values_E: Tensor | None = None
    frame: bytes = b""


class Bf12Writer:
    """A new file at `path` of an original with this header, whose tensors it is given in the order of their bytes.
    Where there is a `digest`, it is given all bytes of the original."""

    def __init__(
        self, path: Path, original: SafetensorsHeader, level: CompressionLevel, digest: "hashlib._Hash | None"
    ) -> None:
        self._digest = digest
        self._original = original
        self._level = level
        self._sum = xxhash.xxh3_128()
        self._first = self._end = _room_for(path, original, level)
        self._tensors: list[TensorSpan] = []
        self._codes: dict[str, str] = {}
        self._pieces: dict[str, list[int]] = {}
        self._late: list[tuple[TensorSpan, memoryview | None]] = []
        text = original.text.encode()
        self._take(len(text).to_bytes(8, "little") + text)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def close(self) -> None:
        os.close(self._file)

    def code(self, tensor: TensorSpan, pieces: Iterable[EncodedPiece]) -> int:
        """Writes a tensor that is coded, as its pieces come; how many bytes it takes."""
        outputs, inputs = tensor.shape
        words = words_of(inputs) if self._level is CompressionLevel.DEVICE else words_of(inputs) // 3 * 2
        first = low = self._end
        first_high = high = first + 4 * outputs * words
        whole, sums, ends = xxhash.xxh3_128(), [], []
        bases, positions, values = [], [], []
        for made in pieces:
            assert made.bases_N is not None
            assert made.positions_E is not None
            assert made.values_E is not None
            self._take(made.raw)
            whole.update(made.raw)
            low = write_at(self._file, low, made.stored)
            high = write_at(self._file, high, memoryview(made.frame))
            sums.append(made.sum)
            ends.append(high - first_high)
            bases.append(made.bases_N)
            positions.append(made.positions_E)
            values.append(made.values_E)
        assert low == first_high
        self._place(tensor.name, "I32", (outputs, words), first, low)
        self._codes[tensor.name] = whole.hexdigest()
        self._pieces[tensor.name] = sums
        if self._level is CompressionLevel.DISTRIBUTION:
            high = write_at(self._file, high, memoryview(bytes(-high % ALIGNED_BYTES)))
            self._place(tensor.name + HIGH, "U8", (high - first_high,), first_high, high)
            self._later(tensor.name + HIGH_ENDS, "I64", torch.tensor(ends))
        self._later(tensor.name + BASES, "U8", torch.cat(bases))
        self._later(tensor.name + POSITIONS, "I64", torch.cat(positions))
        self._later(tensor.name + VALUES, "BF16", torch.cat(values))
        self._end = high
        ends_bytes = 8 * len(ends) if self._level is CompressionLevel.DISTRIBUTION else 0
        return high - first + outputs + 10 * sum(map(len, positions)) + ends_bytes

    def keep(self, tensor: TensorSpan, pieces: Iterable[EncodedPiece]) -> None:
        """Writes a tensor as it is, or leaves it for the end."""
        if tensor.bytes % ALIGNED_BYTES:
            for made in pieces:
                self._take(made.raw)
            self._late.append((tensor, None))
            return
        first, sums = self._end, []
        for made in pieces:
            self._take(made.raw)
            self._end = write_at(self._file, self._end, made.stored)
            sums.append(made.sum)
        self._pieces[tensor.name] = sums
        self._place(tensor.name, tensor.dtype, tensor.shape, first, self._end)

    def finish(self, read: Callable[[int, int], bytearray]) -> None:
        """Writes what was left for the end, of which `read` gives so many bytes of the original from one on, and the
        header. The file is on the disk for good then."""
        for tensor, content in sorted(self._late, key=lambda late: -late[0].item_bytes):
            first, sums = self._end, []
            for begin in range(0, tensor.bytes, PIECE_BYTES):
                count = min(PIECE_BYTES, tensor.bytes - begin)
                piece = read(tensor.first + begin, count) if content is None else content[begin : begin + count]
                self._end = write_at(self._file, self._end, memoryview(piece))
                sums.append(xxhash.xxh3_64_intdigest(piece))
            self._place(tensor.name, tensor.dtype, tensor.shape, first, self._end)
            if not tensor.name.endswith(HIGH_ENDS):
                self._pieces[tensor.name] = sums
        original = OriginalFile(self._original.text, self._original.bytes, self._sum.hexdigest())
        said = encode_metadata(Bf12Metadata(VERSION, self._level, original, self._codes, self._pieces))
        start = encode_header(self._tensors, {**self._original.metadata, **said}, self._first)
        write_at(self._file, 0, memoryview(start))
        os.fsync(self._file)

    def _take(self, raw: bytes | bytearray) -> None:
        self._sum.update(raw)
        if self._digest is not None:
            self._digest.update(raw)

    def _place(self, name: str, dtype: str, shape: tuple[int, ...], first: int, last: int) -> None:
        self._tensors.append(TensorSpan(name, dtype, shape, first, last))

    def _later(self, name: str, dtype: str, numbers: Tensor) -> None:
        content = tensor_bytes(numbers)
        self._late.append((TensorSpan(name, dtype, (len(numbers),), 0, len(content)), content))


def write_at(file: int, place: int, content: memoryview) -> int:
    """Writes all of it from that byte on; where the next byte goes."""
    while content:
        count = os.pwrite(file, content, place)
        place, content = place + count, content[count:]
    return place


def tensor_bytes(numbers: Tensor) -> memoryview:
    """Of a tensor in host memory, the same memory."""
    return numbers.view(-1).view(torch.uint8).numpy().data


def _room_for(path: Path, original: SafetensorsHeader, level: CompressionLevel) -> int:
    """The bytes that the longest header takes. Raises CheckpointError where it is too long for a header."""
    tensors, codes, pieces = [], {}, {}

    def say(name: str, dtype: str, shape: tuple[int, ...], count: int) -> None:
        tensors.append(TensorSpan(name, dtype, shape, _FAR, _FAR))
        pieces[name] = [_SUM_MAX] * count

    for tensor in original.tensors:
        say(tensor.name, tensor.dtype, tensor.shape, 1 + tensor.bytes // PIECE_BYTES)
        if shape_reason(tensor):
            continue
        outputs, inputs = tensor.shape
        codes[tensor.name] = _HEX
        pieces[tensor.name] += [_SUM_MAX] * (1 + outputs // piece_rows(inputs))
        escapes = int(ESCAPE_RATE_MAX * outputs * inputs)
        say(tensor.name + BASES, "U8", (_FAR,), 1 + outputs // PIECE_BYTES)
        say(tensor.name + POSITIONS, "I64", (_FAR,), 1 + 8 * escapes // PIECE_BYTES)
        say(tensor.name + VALUES, "BF16", (_FAR,), 1 + 2 * escapes // PIECE_BYTES)
        if level is CompressionLevel.DISTRIBUTION:
            say(tensor.name + HIGH, "U8", (_FAR,), 0)
            say(tensor.name + HIGH_ENDS, "I64", (_FAR,), 0)
    said = encode_metadata(
        Bf12Metadata(VERSION, level, OriginalFile(original.text, original.bytes, _HEX), codes, pieces)
    )
    room = len(encode_header(tensors, {**original.metadata, **said}))
    if room > HEADER_BYTES_MAX:
        raise CheckpointError(
            f"{path.name} has so many tensors that its header would be longer than {HEADER_BYTES_MAX} bytes"
        )
    return room
