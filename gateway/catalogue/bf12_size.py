"""Sizes in the headers of a compressed folder's files; engine.bf12.metadata has all metadata. It checks nothing."""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

_KEY: Final = "hearth.compressed"
_LEVELS: Final = {1: "device", 2: "distribution"}
_HEADER_BYTES_MAX: Final = 100_000_000
_CODED_BYTES: Final = 1.5  # a number; what has no code adds less than a thousandth


@dataclass(frozen=True, slots=True)
class Bf12Size:
    """Sizes of a folder's weights, compressed and original, and how many of the `numbers` of compressed files are in 12
    bits. The weights take `coded_bytes` on a device that computes with 12 bits, and `original_bytes` on others."""

    level: str
    stored_bytes: int
    original_bytes: int
    numbers: int
    coded_numbers: int

    @property
    def coded_bytes(self) -> int:
        return self.original_bytes - int((2 - _CODED_BYTES) * self.coded_numbers)

    @property
    def kind(self) -> str:
        return f"12 bits, {self.coded_numbers / max(1, self.numbers):.1%} of the numbers"


def read_bf12_size(folder: Path) -> Bf12Size | None:
    """Reads the headers; None for a folder that is not compressed, or whose files cannot be read."""
    level, stored, original, numbers, coded = 0, 0, 0, 0, 0
    try:
        for path in sorted(folder.glob("*.safetensors")):
            size = path.stat().st_size
            header = _header(path)
            metadata_text = header.get("__metadata__", {}).get(_KEY)
            if metadata_text is None:  # a file that stayed as it was beside compressed ones
                stored, original = stored + size, original + size
                continue
            metadata = msgspec.json.decode(metadata_text, type=_Metadata)
            shapes = {
                name: math.prod(entry["shape"])
                for name, entry in msgspec.json.decode(metadata.original.header).items()
                if name != "__metadata__"
            }
            level, stored, original = max(level, metadata.level), stored + size, original + metadata.original.bytes
            numbers, coded = numbers + sum(shapes.values()), coded + sum(shapes[name] for name in metadata.codes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error):
        return None
    return Bf12Size(_LEVELS.get(level, str(level)), stored, original, numbers, coded) if level else None


class _Original(msgspec.Struct):
    header: str
    bytes: int


class _Metadata(msgspec.Struct):
    level: int
    original: _Original
    codes: dict[str, object]


def _header(path: Path) -> dict[str, dict[str, str]]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        text = file.read(length) if length <= _HEADER_BYTES_MAX else b""
    if f'"{_KEY}"'.encode() not in text:  # most files: nothing of them is parsed
        return {}
    header: dict[str, dict[str, str]] = msgspec.json.decode(text)
    return header
