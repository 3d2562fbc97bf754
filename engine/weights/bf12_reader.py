"""A compressed file's planes → the tensors that they are, each checked against the file's metadata.

It reads no weights: whether the bytes are those that were written, only the sums of their pieces say.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from engine.bf12.layout import is_encodable
from engine.bf12.metadata import (
    PIECE_BYTES,
    Bf12Metadata,
    Bf12MetadataError,
    CompressionLevel,
    Plane,
    parse_metadata,
    piece_rows,
)
from engine.weights.safetensors_header import SafetensorsHeader, parse_header, tensors_in
from engine.weights.tensor_index import BF12, CheckpointError, StoredTensor, abbreviate_names

# The dtypes of planes.
_SUMMED_PLANES: Final[dict[str, str]] = {Plane.BASES: "U8", Plane.POSITIONS: "I64", Plane.VALUES: "BF16"}
_ZSTD_PLANES: Final[dict[str, str]] = {Plane.HIGH: "U8", Plane.HIGH_ENDS: "I64"}
_RECOMPRESS_HINT: Final = "get the file again, or compress its model anew"


@dataclass(frozen=True, slots=True)
class CompressedFile:
    """A compressed file: the header of the original, and the original's tensors by name, where they lie in this one."""

    path: Path
    metadata: Bf12Metadata
    original: SafetensorsHeader
    tensors: dict[str, StoredTensor]


def read_metadata(path: Path, header: SafetensorsHeader) -> Bf12Metadata | None:
    """What the file's header says of its compression; None where it is not compressed. Raises CheckpointError."""
    try:
        return parse_metadata(header.metadata)
    except Bf12MetadataError as error:
        raise CheckpointError(f"{path} is a compressed file, and {error}") from error


def read_compressed(path: Path, header: SafetensorsHeader) -> CompressedFile | None:
    """The file of this header; None where it is not compressed. Raises CheckpointError unless it has the tensors of the
    original, or their planes, and nothing else, each of its dtype and shape, with a sum of each piece."""
    metadata = read_metadata(path, header)
    if metadata is None:
        return None
    try:
        original = parse_header(metadata.original.header, metadata.original.bytes)
    except ValueError as error:
        raise CheckpointError(f"{path} is a compressed file, and {error}: {_RECOMPRESS_HINT}") from error
    return CompressedFile(
        path, metadata, original, _Gatherer(path, metadata, tensors_in(path, header)).tensors(original)
    )


@dataclass(frozen=True, slots=True)
class _Gatherer:
    """Puts the stored tensors of one file together, and checks them on the way."""

    path: Path
    metadata: Bf12Metadata
    stored: Mapping[str, StoredTensor]

    def tensors(self, header: SafetensorsHeader) -> dict[str, StoredTensor]:
        """The tensors of the original, whose header this is."""
        stored, codes = self.stored, self.metadata.codes
        planes = {name + suffix: None for name in codes for suffix in ("", *self._plane_dtypes)}
        original = {tensor.name: tensor for tensor in header.tensors}
        self._require_none("lacks", (name for name in original if name not in stored))
        self._require_none("lacks", (name for name in planes if name not in stored))
        matrices = {name: self._matrix(name) for name in codes}
        plain = {name: tensor for name, tensor in stored.items() if name not in planes}
        self._require_none("has planes of no coded tensor:", (name for name in plain if name not in original))
        for name, tensor in (plain | matrices).items():
            dtype = "BF16" if name in matrices else tensor.dtype
            if name not in original or (original[name].dtype, original[name].shape) != (dtype, tensor.shape):
                raise self._error(f": {name}, {dtype} {list(tensor.shape)}, is not what was compressed")
        summed = {name + suffix for name in codes for suffix in ("", *_SUMMED_PLANES)} | plain.keys()
        unknown = (name for name in self.metadata.pieces if name not in summed)
        self._require_none("has sums of tensors that are not there:", unknown)
        return matrices | {name: self._with_sums(name, tensor) for name, tensor in plain.items()}

    @property
    def _is_distribution(self) -> bool:
        return self.metadata.level is CompressionLevel.DISTRIBUTION

    @property
    def _plane_dtypes(self) -> dict[str, str]:
        return _SUMMED_PLANES | (_ZSTD_PLANES if self._is_distribution else {})

    def _matrix(self, name: str) -> StoredTensor:
        shape = self._shape(name)
        planes = {suffix: self._plane(name + suffix, dtype) for suffix, dtype in self._plane_dtypes.items()}
        bases, positions, values = (planes[suffix].numbers for suffix in _SUMMED_PLANES)
        if bases != shape[0]:
            raise self._error(f": {name}, {list(shape)}, has {bases} bases")
        if positions != values or positions > shape[0] * shape[1]:
            raise self._error(f": {name}, {list(shape)}, has {positions} positions and {values} values of escapes")
        pieces = -(-shape[0] // piece_rows(shape[1]))
        if self._is_distribution and planes[Plane.HIGH_ENDS].numbers != pieces:
            raise self._error(f": {name} has {planes[Plane.HIGH_ENDS].numbers} frames for {pieces} pieces")
        planes |= {suffix: self._with_sums(name + suffix, planes[suffix]) for suffix in _SUMMED_PLANES}
        return replace(self.stored[name], dtype=BF12, shape=shape, sums=self._sums(name, pieces), bf12=planes)

    def _shape(self, name: str) -> tuple[int, int]:
        """The matrix's shape: a row has 3 words for 8 numbers, 2 of them low."""
        words = self.stored[name]
        if words.dtype == "I32" and len(words.shape) == 2:
            outputs, width = words.shape
            words_of_eight = 2 if self._is_distribution else 3
            if width % words_of_eight == 0 and is_encodable(outputs, width // words_of_eight * 8):
                return outputs, width // words_of_eight * 8
        raise self._error(f": {name} is {words.dtype} {list(words.shape)}, which are no words")

    def _plane(self, name: str, dtype: str) -> StoredTensor:
        plane = self.stored[name]
        if plane.dtype != dtype or len(plane.shape) != 1:
            raise self._error(f": {name} is {plane.dtype} {list(plane.shape)}, a row of {dtype} is due")
        return plane

    def _with_sums(self, name: str, tensor: StoredTensor) -> StoredTensor:
        """A tensor that is no matrix of words, with the sums of its pieces."""
        return replace(tensor, sums=self._sums(name, -(-(tensor.last - tensor.first) // PIECE_BYTES)))

    def _sums(self, name: str, pieces: int) -> tuple[int, ...]:
        sums = tuple(self.metadata.pieces.get(name, ()))
        if len(sums) != pieces:
            raise self._error(f" has {len(sums)} sums of {name}, which has {pieces} pieces")
        return sums

    def _require_none(self, problem: str, names: Iterable[str]) -> None:
        if problem_names := list(names):
            raise self._error(f" {problem} {abbreviate_names(problem_names)}, unlike what its metadata say")

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}{problem}: {_RECOMPRESS_HINT}")
