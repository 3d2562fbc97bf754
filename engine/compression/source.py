"""What there is to compress in a model's folder, from headers alone, and why a folder has nothing of it. It reads no
weights.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.bf12 import metadata
from engine.bf12.metadata import Bf12MetadataError
from engine.compression import checksums
from engine.compression.survey import shape_reason
from engine.compression.target import list_files
from engine.weights.safetensors_header import SafetensorsHeader, TensorSpan, read_header
from engine.weights.tensor_index import CheckpointError, abbreviate_names

_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_SUFFIX: Final = ".safetensors"
_PICKLES: Final = frozenset((".bin", ".pt", ".pth", ".ckpt", ".pkl"))
_PLANES: Final = (metadata.HIGH, metadata.HIGH_ENDS, metadata.BASES, metadata.POSITIONS, metadata.VALUES)


@dataclass(frozen=True, slots=True)
class SourceFolder:
    """`weights` are its safetensors files, all else is copied. Names are below `path`; `sums` is its SHA256SUMS, empty
    where it has none."""

    path: Path
    weights: dict[Path, SafetensorsHeader]
    others: tuple[Path, ...]
    sums: str

    @property
    def weights_bytes(self) -> int:
        return sum(header.bytes for header in self.weights.values())

    @property
    def others_bytes(self) -> int:
        return sum((self.path / name).stat().st_size for name in self.others)

    @property
    def tensors(self) -> dict[str, tuple[Path, TensorSpan]]:
        """By their names, with the file that each lies in."""
        return {
            tensor.name: (self.path / name, tensor)
            for name, header in self.weights.items()
            for tensor in header.tensors
        }


def scan_folder(path: Path) -> SourceFolder:
    """Raises CheckpointError where nothing of it can be compressed, TargetError where it has what cannot be copied."""
    if not path.is_dir():
        raise CheckpointError(f"there is no folder {path}")
    names = [name for name in list_files(path) if name != Path(checksums.SUMS_NAME)]
    if Path(checksums.ORIGINAL_SUMS_NAME) in names:
        raise CheckpointError(
            f"{path} has a {checksums.ORIGINAL_SUMS_NAME}, which is what its {checksums.SUMS_NAME} would become: "
            f"rename it"
        )
    weights = {name: read_header(path / name) for name in weight_files(path, names)}
    _require_names(path, weights)
    _require_coded(path, weights)
    said = path / checksums.SUMS_NAME
    return SourceFolder(
        path=path,
        weights=weights,
        others=tuple(name for name in names if name not in weights),
        sums=said.read_bytes().decode("utf-8", "surrogateescape") if said.is_file() else "",
    )


def weight_files(folder: Path, names: list[Path]) -> list[Path]:
    """Of a folder's files those that the index names, or the one; where there is neither, all safetensors at its top.
    Raises CheckpointError."""
    found = [name for name in names if name.parent == Path() and name.suffix == _SUFFIX]
    if Path(_INDEX) in names:
        try:
            said = set(json.loads((folder / _INDEX).read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder / _INDEX} is no index of safetensors files: {error!r}") from error
        if missing := said.difference(map(str, found)):
            raise CheckpointError(
                f"{folder} lacks {abbreviate_names(map(str, missing))}, which {_INDEX} names: get it again"
            )
        found = [name for name in found if str(name) in said]
    elif Path(_SINGLE) in names:
        found = [Path(_SINGLE)]
    if not found:
        pickles = any(name.suffix in _PICKLES for name in names)
        raise CheckpointError(
            f"{folder} has no *.safetensors"
            + (", only pickle files, which can run code when they are opened: convert it first" if pickles else "")
        )
    return found


def _require_names(folder: Path, weights: dict[Path, SafetensorsHeader]) -> None:
    seen: dict[str, Path] = {}
    for name, header in weights.items():
        _require_original(folder / name, header)
        for tensor in header.tensors:
            if tensor.name in seen:
                raise CheckpointError(f"{folder}: {tensor.name} is in {seen[tensor.name]} and again in {name}")
            if tensor.name.endswith(_PLANES):
                raise CheckpointError(
                    f"{folder / name}: a compressed file has tensors with names like {tensor.name} beside what it "
                    "codes: this model cannot be compressed"
                )
            seen[tensor.name] = name


def _require_original(path: Path, header: SafetensorsHeader) -> None:
    try:
        said = metadata.parse_metadata(header.metadata)
    except Bf12MetadataError as error:
        raise CheckpointError(f"{path} was compressed, and {error}") from error
    if said is not None:
        raise CheckpointError(
            f"{path} is compressed already, at level {said.level.name.lower()}: `hearth models expand` gives the "
            "original, which can be compressed at another one"
        )


def _require_coded(folder: Path, weights: dict[Path, SafetensorsHeader]) -> None:
    tensors = [tensor for header in weights.values() for tensor in header.tensors]
    if all(shape_reason(tensor) for tensor in tensors):
        dtypes = sorted({tensor.dtype for tensor in tensors if len(tensor.shape) > 1}) or ["none"]
        raise CheckpointError(
            f"{folder} has nothing to compress: only bf16 matrices whose rows are multiples of 128 have a code, and "
            f"its matrices are {', '.join(dtypes)}"
            + ("" if "BF16" in dtypes else ". Convert it to bf16 first, if its numbers may be rounded")
        )
