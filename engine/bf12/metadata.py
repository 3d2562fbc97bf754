"""What a compressed safetensors file says of itself and of the file that it was made of. It reads no weights.

A folder that `hearth models compress` wrote has the original's files under their names; only the *.safetensors differ.
For a tensor NAME in 12 bits (codec.py) such a file has

    NAME                    I32 [outputs, words]    its words; at level DISTRIBUTION the low ones alone
    NAME.high               U8  [bytes]             at level DISTRIBUTION: the high ones, a zstd frame for each piece
                                                    (zstd_plane.py), then zeros up to a multiple of ALIGNED_BYTES
    NAME.high_ends          I64 [pieces]            where each frame ends in NAME.high
    NAME.bases              U8  [outputs]           the rows' bases
    NAME.escape_positions   I64 [escapes]           output · inputs + input, ascending
    NAME.escape_values      BF16 [escapes]

and every other tensor as it was. Words begin at multiples of ALIGNED_BYTES, all else at those of its numbers. The
header's metadata describes them as JSON, with a sum of its own.

A piece is what is read, checked and sent at once: as many whole rows of words as PIECE_BYTES hold, or PIECE_BYTES of
any other tensor; the last one is shorter. Its sum is that of the words as a GPU has them, whatever the level.
"""

import enum
from collections.abc import Mapping
from typing import Final

import msgspec
import xxhash

from engine.bf12.layout import words_of

VERSION: Final = 1
PIECE_BYTES: Final = 4 << 20
ALIGNED_BYTES: Final = 64
METADATA_KEY: Final = "hearth.compressed"
METADATA_SUM_KEY: Final = "hearth.compressed.xxh3_128"


class Bf12MetadataError(ValueError):
    """A file's metadata is not that of a compressed file which this version reads."""


class Plane(enum.StrEnum):
    """A further tensor of a compressed one, by what its name ends in."""

    HIGH = ".high"
    HIGH_ENDS = ".high_ends"
    BASES = ".bases"
    POSITIONS = ".escape_positions"
    VALUES = ".escape_values"


class CompressionLevel(enum.IntEnum):
    """How far a folder is compressed: as a GPU reads it, or further, for its way to other machines."""

    DEVICE = 1
    DISTRIBUTION = 2


class OriginalFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file that a compressed one was made of."""

    header: str  # its header as it was, blanks included
    bytes: int
    xxh3_128: str


class Bf12Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The metadata, by tensors' names: `codes` has the sum (xxh3_128) of the bf16 numbers of each tensor in 12 bits,
    `pieces` the sums (xxh3_64) of the pieces of each stored one except `.high` and `.high_ends`."""

    version: int
    level: CompressionLevel
    original: OriginalFile
    codes: dict[str, str]
    pieces: dict[str, list[int]]


def encode_metadata(metadata: Bf12Metadata) -> dict[str, str]:
    """The entries of a header's metadata."""
    text = msgspec.json.encode(metadata)
    return {METADATA_KEY: text.decode(), METADATA_SUM_KEY: xxhash.xxh3_128_hexdigest(text)}


def parse_metadata(metadata: Mapping[str, str]) -> Bf12Metadata | None:
    """The metadata of a header; None where the file is not compressed. Raises Bf12MetadataError."""
    text = metadata.get(METADATA_KEY)
    if text is None:
        return None
    if xxhash.xxh3_128_hexdigest(text.encode()) != metadata.get(METADATA_SUM_KEY):
        raise Bf12MetadataError("its metadata were altered: get the file again")
    try:
        version = msgspec.json.decode(text, type=_Version).version
        if version != VERSION:
            raise Bf12MetadataError(f"it is of version {version} of the format, this Hearth reads version {VERSION}")
        return msgspec.json.decode(text, type=Bf12Metadata)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Bf12MetadataError(f"its metadata cannot be understood: {error}") from error


def piece_rows(inputs: int) -> int:
    """How many rows of words a piece has at most."""
    return max(1, PIECE_BYTES // (4 * words_of(inputs)))


class _Version(msgspec.Struct):
    version: int
