"""The start of a GGUF file: its metadata, and where each tensor lies, every number checked before it is used.

It knows no architectures and reads no weights. The library `gguf` has a reader too, which believes what a file claims:
a count of 2⁶³ keeps it busy for ever, and Llama 3's vocabulary takes it 14 s and 650 MB. What is that library's here:
the types of tensors, and the sizes of their blocks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.weights.tensor_index import CheckpointError

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_HEADER_BYTES_MAX: Final = 64 << 20  # Llama 3.1 has 8 MiB
_STRING_BYTES_MAX: Final = 8 << 20
_ITEMS_MAX: Final = 1 << 22  # of an array; the largest vocabularies have 2¹⁸ tokens and twice as many merges
_KEYS_MAX: Final = 1 << 16
_TENSORS_MAX: Final = 1 << 16
_DIMENSIONS_MAX: Final = 4
_ALIGNMENT: Final = 32  # of tensors, where the file names no other
_ALIGNMENT_MAX: Final = 1 << 20
_STRING: Final = 8
_ARRAY: Final = 9
_FLOAT: Final = 6
_NUMBERS: Final = {
    **dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))),
    **dict(enumerate(("<u8", "<i8", "<f8"), start=10)),
}

Scalar = int | float | bool | str
Value = Scalar | list[Scalar]


class GgufError(CheckpointError):
    """The file cannot be imported: it is no whole GGUF file, or of a kind that is not served. The message says what it
    has, and what would do."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor: bytes first … last−1 of the file, in blocks of `type`. The rows of `shape` are whole blocks."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What a file says of itself. `bytes` are the file's."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]
    bytes: int


def read_gguf(path: Path) -> GgufFile:
    """Reads all but the tensors. Takes memory for what is in the file, never for what it claims. Raises GgufError."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            return _read(path, _Header(path, file, size), size)
    except OSError as error:
        raise GgufError(f"{path} cannot be read: {error.strerror}") from error


class _Header:
    """Reads forwards, never past the file's end, nor further than headers are long."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.position = 0
        self._path = path
        self._file = file
        self._end = min(size, _HEADER_BYTES_MAX)

    def fail(self, problem: str) -> GgufError:
        return GgufError(f"{self._path} {problem}")

    def take(self, count: int, what: str) -> bytes:
        if count > self._end - self.position:
            raise self.fail(f"is cut short or damaged: {what} at byte {self.position} would end behind its end")
        self.position += count
        content = self._file.read(count)
        if len(content) < count:
            raise self.fail("was cut short while it was read")
        return content

    def number(self, bytes: int, what: str) -> int:
        return int.from_bytes(self.take(bytes, what), "little")

    def count(self, most: int, what: str) -> int:
        """A count of things that there may be so many of."""
        count = self.number(8, what)
        if count > most:
            raise self.fail(f"is damaged: it claims {count:,} {what}, and {most:,} is the most that is read")
        return count

    def string(self, what: str) -> str:
        length = self.number(8, what)
        if length > _STRING_BYTES_MAX:
            raise self.fail(f"is damaged: {what} at byte {self.position} claims {length:,} bytes")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError:
            raise self.fail(f"is damaged: {what} at byte {self.position - length} is no UTF-8 text") from None

    def value(self, key: str) -> Value:
        kind = self.number(4, key)
        if kind != _ARRAY:
            return self.string(key) if kind == _STRING else self.numbers(kind, 1, key)[0]
        kind, count = self.number(4, key), self.count(_ITEMS_MAX, f"items of {key}")
        return [self.string(key) for _ in range(count)] if kind == _STRING else self.numbers(kind, count, key)

    def numbers(self, kind: int, count: int, key: str) -> list[Scalar]:
        if kind not in _NUMBERS:
            raise self.fail(f"is damaged: {key} is of type {kind}, which GGUF does not have, or of arrays in arrays")
        dtype = np.dtype(_NUMBERS[kind])
        numbers_N = np.frombuffer(self.take(count * dtype.itemsize, key), dtype)
        if kind == _FLOAT:  # as its shortest spelling: 1e-5 and not 9.999999747378752e-06
            return [float(str(number)) for number in numbers_N]
        return list(numbers_N.tolist())


def _read(path: Path, header: _Header, size: int) -> GgufFile:
    if size < 4 or header.take(4, "its first bytes") != _MAGIC:
        raise header.fail("is no GGUF file: it does not begin with those letters")
    version = header.number(4, "its version")
    if version not in _VERSIONS:
        order = " (or of big-endian numbers)" if version & 0xFFFF == 0 else ""
        raise header.fail(f"is of GGUF version {version}{order}; 2 and 3 are read")
    tensors, keys = header.count(_TENSORS_MAX, "tensors"), header.count(_KEYS_MAX, "keys")
    metadata: dict[str, Value] = {}
    for _ in range(keys):
        key = header.string("a key")
        if key in metadata:
            raise header.fail(f"is damaged: it has {key} twice")
        metadata[key] = header.value(key)
    infos = [_tensor_info(header) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= _ALIGNMENT_MAX or alignment & (alignment - 1):
        raise header.fail(f"is damaged: general.alignment is {alignment!r}")
    first = header.position + -header.position % alignment
    placed = [_placed(header, info, first, alignment) for info in infos]
    _require_places(header, placed, size)
    return GgufFile(path, metadata, {tensor.name: tensor for tensor in placed}, size)


def _tensor_info(header: _Header) -> tuple[str, int, tuple[int, ...], int]:
    """Name, type, shape with rows last, and the offset from where tensors begin."""
    name = header.string("a tensor's name")
    dimensions = header.number(4, name)
    if not 1 <= dimensions <= _DIMENSIONS_MAX:
        raise header.fail(f"is damaged: {name} has {dimensions} dimensions")
    shape = [header.number(8, name) for _ in range(dimensions)]
    return name, header.number(4, name), tuple(reversed(shape)), header.number(8, name)


def _placed(header: _Header, info: tuple[str, int, tuple[int, ...], int], first: int, alignment: int) -> GgufTensor:
    name, number, shape, offset = info
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise header.fail(f"has {name} in a type of number {number}, which is not known here") from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if 0 in shape or shape[-1] % block:
        raise header.fail(f"is damaged: {name} of shape {list(shape)} is no whole blocks of {kind.name}")
    if offset % alignment:
        raise header.fail(f"is damaged: {name} lies at {offset}, which is no multiple of {alignment}")
    first += offset
    return GgufTensor(name, kind, shape, first, first + math.prod(shape) // block * block_bytes)


def _require_places(header: _Header, tensors: list[GgufTensor], size: int) -> None:
    """Raises GgufError where tensors have one name, lie on each other or behind the file's end."""
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise header.fail("is damaged: two of its tensors have one name")
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.first):
        if tensor.first < end:
            raise header.fail(f"is damaged: {tensor.name} lies on another tensor")
        end = tensor.last
        if end > size:
            raise header.fail(f"is cut short: {tensor.name} would end at byte {end:,} of {size:,}. Get the file again")
