"""Headers of safetensors files: what lies where, of any dtype, read and written. It knows no models.

Checkpoint decides which tensors can be served; this holds for every such file.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from engine.bf12.metadata import ALIGNED_BYTES
from engine.weights.tensor_index import CheckpointError, StoredTensor

HEADER_BYTES_MAX: Final = 100_000_000  # as the safetensors library has it
_METADATA: Final = "__metadata__"
_ITEM_BITS: Final = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """A tensor of a file: bytes first … last−1 of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int

    @property
    def bytes(self) -> int:
        return self.last - self.first

    @property
    def item_bytes(self) -> int:
        """At least 1, also of a dtype that is not known here."""
        return max(1, _ITEM_BITS.get(self.dtype, 8) // 8)


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """A parsed header. `text` is all of it, blanks included; `tensors` are in the order of their bytes, which lie
    without a gap from `first` to the file's end."""

    text: str
    metadata: dict[str, str]
    tensors: tuple[TensorSpan, ...]
    first: int
    bytes: int  # of the file


def read_header(path: Path) -> SafetensorsHeader:
    """Reads a file's header and checks it. Raises CheckpointError, which names file and tensor."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, HEADER_BYTES_MAX):
            raise CheckpointError(f"{path} is no safetensors file: a header of {length} bytes in a file of {size}")
        text = file.read(length)
    try:
        return parse_header(text.decode(), size)
    except ValueError as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}") from error


def parse_header(text: str, size: int) -> SafetensorsHeader:
    """The header of a file of so many bytes. Raises ValueError."""
    try:
        entries = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(entries.pop(_METADATA, msgspec.Raw(b"{}")), type=dict[str, str])
        parsed = {name: _entry(name, entry) for name, entry in entries.items()}
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"its header: {error}") from error
    first = 8 + len(text.encode())
    tensors = [
        TensorSpan(name, entry.dtype, entry.shape, first + entry.data_offsets[0], first + entry.data_offsets[1])
        for name, entry in parsed.items()
    ]
    tensors.sort(key=lambda tensor: (tensor.first, tensor.last))
    _require_offsets(tensors, first, size)
    return SafetensorsHeader(text, metadata, tuple(tensors), first, size)


def tensors_in(path: Path, header: SafetensorsHeader) -> dict[str, StoredTensor]:
    """The file's tensors by name."""
    return {span.name: StoredTensor(path, span.dtype, span.shape, span.first, span.last) for span in header.tensors}


def encode_header(tensors: Iterable[TensorSpan], metadata: Mapping[str, str], first: int = 0) -> bytes:
    """The start of a file whose tensors begin at byte `first`: the header's length, the header, and blanks up to there.
    With `first` 0 the blanks end at a multiple of ALIGNED_BYTES."""
    entries: dict[str, object] = {_METADATA: metadata} if metadata else {}
    for tensor in tensors:
        offsets = (tensor.first - first, tensor.last - first)
        entries[tensor.name] = _Entry(tensor.dtype, tensor.shape, offsets)
    text = msgspec.json.encode(entries)
    length = first - 8 if first else len(text) + -(len(text) + 8) % ALIGNED_BYTES
    assert len(text) <= length
    return struct.pack("<Q", length) + text.ljust(length)


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _entry(name: str, entry: msgspec.Raw) -> _Entry:
    try:
        return msgspec.json.decode(entry, type=_Entry)
    except msgspec.MsgspecError as error:
        raise ValueError(f"its entry of {name} is malformed: {error}") from error


def _require_offsets(tensors: list[TensorSpan], first: int, size: int) -> None:
    end = first
    for tensor in tensors:
        if tensor.first != end or tensor.last < end:
            raise ValueError(f"{tensor.name} is to lie from byte {tensor.first} to {tensor.last}, where {end} is due")
        end = tensor.last
        bits = _ITEM_BITS.get(tensor.dtype)
        for length in tensor.shape:
            if length < 0:
                raise ValueError(f"{tensor.name} has the shape {list(tensor.shape)}")
            bits = bits and bits * length
        if bits is not None and bits != 8 * tensor.bytes:
            raise ValueError(
                f"{tensor.name} with shape {list(tensor.shape)} in {tensor.dtype} does not fit its offsets"
            )
    if end != size:
        raise ValueError(f"{size} bytes long, its tensors end at {end}: cut short or added to")
