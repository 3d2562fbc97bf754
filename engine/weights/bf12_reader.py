"""A compressed file's planes → the tensors that they are, each checked against the file's metadata.

It reads no weights: whether the bytes are those that were written, only the sums of their pieces say.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from engine.bf12.layout import is_encodable
from engine.bf12.metadata import (
    BASES,
    HIGH,
    HIGH_ENDS,
    PIECE_BYTES,
    POSITIONS,
    VALUES,
    Bf12Metadata,
    Bf12MetadataError,
    CompressionLevel,
    parse_metadata,
    piece_rows,
)
from engine.weights.safetensors_header import SafetensorsHeader, parse_header
from engine.weights.tensor_index import BF12, Bf12Planes, CheckpointError, StoredTensor, ZstdPlane, abbreviate_names

_RECOMPRESS_HINT: Final = "get the file again, or compress its model anew"


def read_metadata(path: Path, header: SafetensorsHeader) -> Bf12Metadata | None:
    """What the file's header says of its compression; None where it is not compressed. Raises CheckpointError."""
    try:
        return parse_metadata(header.metadata)
    except Bf12MetadataError as error:
        raise CheckpointError(f"{path} is a compressed file, and {error}") from error


def original_header(path: Path, metadata: Bf12Metadata) -> SafetensorsHeader:
    """The header of the file that was compressed. Raises CheckpointError."""
    try:
        return parse_header(metadata.original.header, metadata.original.bytes)
    except ValueError as error:
        raise CheckpointError(f"{path} is a compressed file, and {error}: {_RECOMPRESS_HINT}") from error


def gather_tensors(path: Path, stored: Mapping[str, StoredTensor], metadata: Bf12Metadata) -> dict[str, StoredTensor]:
    """The tensors that the file had before it was compressed. Raises CheckpointError unless `stored` has them, or their
    planes, and nothing else, each of its dtype and shape, with a sum of each piece."""
    summed_planes = ("", BASES, POSITIONS, VALUES)
    zstd_planes = (HIGH, HIGH_ENDS) if metadata.level is CompressionLevel.DISTRIBUTION else ()
    planes = {name + suffix: None for name in metadata.codes for suffix in (*summed_planes, *zstd_planes)}
    original = {tensor.name: tensor for tensor in original_header(path, metadata).tensors}
    _require_none(path, "lacks", (name for name in original if name not in stored))
    _require_none(path, "lacks", (name for name in planes if name not in stored))
    matrices = {name: _bf12(path, name, stored, metadata) for name in metadata.codes}
    plain = {name: tensor for name, tensor in stored.items() if name not in planes}
    _require_none(path, "has planes of no coded tensor:", (name for name in plain if name not in original))
    for name, tensor in (plain | matrices).items():
        dtype = "BF16" if name in matrices else tensor.dtype
        if name not in original or (original[name].dtype, original[name].shape) != (dtype, tensor.shape):
            raise CheckpointError(
                f"{path}: {name}, {dtype} {list(tensor.shape)}, is not what was compressed: {_RECOMPRESS_HINT}"
            )
    summed = {name + suffix for name in metadata.codes for suffix in summed_planes} | plain.keys()
    unknown = (name for name in metadata.pieces if name not in summed)
    _require_none(path, "has sums of tensors that are not there:", unknown)
    return matrices | {name: _with_sums(path, name, tensor, metadata) for name, tensor in plain.items()}


def _bf12(path: Path, name: str, stored: Mapping[str, StoredTensor], metadata: Bf12Metadata) -> StoredTensor:
    words = stored[name]
    shape = _shape(path, name, words, metadata.level)
    bases = _plane(path, name + BASES, stored, "U8")
    if bases.numbers != shape[0]:
        raise CheckpointError(f"{path}: {name}, {list(shape)}, has {bases.numbers} bases: {_RECOMPRESS_HINT}")
    positions = _plane(path, name + POSITIONS, stored, "I64")
    values = _plane(path, name + VALUES, stored, "BF16")
    if positions.shape != values.shape or positions.numbers > shape[0] * shape[1]:
        counts = f"{positions.numbers} positions and {values.numbers} values"
        raise CheckpointError(f"{path}: {name}, {list(shape)}, has {counts} of escapes: {_RECOMPRESS_HINT}")
    pieces = -(-shape[0] // piece_rows(shape[1]))
    return replace(
        words,
        dtype=BF12,
        shape=shape,
        sums=_sums(path, name, metadata, pieces),
        bf12=Bf12Planes(
            _with_sums(path, name + BASES, bases, metadata),
            _with_sums(path, name + POSITIONS, positions, metadata),
            _with_sums(path, name + VALUES, values, metadata),
            _zstd(path, name, stored, pieces) if metadata.level is CompressionLevel.DISTRIBUTION else None,
        ),
    )


def _shape(path: Path, name: str, words: StoredTensor, level: CompressionLevel) -> tuple[int, int]:
    """The matrix's shape: a row has 3 words for 8 numbers, 2 of them low."""
    if words.dtype == "I32" and len(words.shape) == 2:
        outputs, width = words.shape
        words_of_eight = 2 if level is CompressionLevel.DISTRIBUTION else 3
        if width % words_of_eight == 0 and is_encodable(outputs, width // words_of_eight * 8):
            return outputs, width // words_of_eight * 8
    raise CheckpointError(
        f"{path}: {name} is {words.dtype} {list(words.shape)}, which are no words: {_RECOMPRESS_HINT}"
    )


def _zstd(path: Path, name: str, stored: Mapping[str, StoredTensor], pieces: int) -> ZstdPlane:
    frames, ends = _plane(path, name + HIGH, stored, "U8"), _plane(path, name + HIGH_ENDS, stored, "I64")
    if ends.numbers != pieces:
        raise CheckpointError(f"{path}: {name} has {ends.numbers} frames for {pieces} pieces: {_RECOMPRESS_HINT}")
    return ZstdPlane(frames, ends)


def _plane(path: Path, name: str, stored: Mapping[str, StoredTensor], dtype: str) -> StoredTensor:
    plane = stored[name]
    if plane.dtype != dtype or len(plane.shape) != 1:
        raise CheckpointError(
            f"{path}: {name} is {plane.dtype} {list(plane.shape)}, a row of {dtype} is due: {_RECOMPRESS_HINT}"
        )
    return plane


def _with_sums(path: Path, name: str, tensor: StoredTensor, metadata: Bf12Metadata) -> StoredTensor:
    """A tensor that is no matrix of words, with the sums of its pieces."""
    return replace(tensor, sums=_sums(path, name, metadata, -(-(tensor.last - tensor.first) // PIECE_BYTES)))


def _sums(path: Path, name: str, metadata: Bf12Metadata, pieces: int) -> tuple[int, ...]:
    sums = tuple(metadata.pieces.get(name, ()))
    if len(sums) != pieces:
        raise CheckpointError(f"{path} has {len(sums)} sums of {name}, which has {pieces} pieces: {_RECOMPRESS_HINT}")
    return sums


def _require_none(path: Path, problem: str, names: Iterable[str]) -> None:
    if problem_names := list(names):
        raise CheckpointError(
            f"{path} {problem} {abbreviate_names(problem_names)}, unlike what its metadata say: {_RECOMPRESS_HINT}"
        )
