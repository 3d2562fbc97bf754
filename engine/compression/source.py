"""What can be compressed in a model's folder, from headers alone, and why a folder has nothing to compress. It reads no
weights.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.bf12 import metadata
from engine.compression import checksums
from engine.compression.survey import shape_reason
from engine.compression.target import list_files
from engine.weights.bf12_reader import read_metadata
from engine.weights.checkpoint import INDEX_NAME, SINGLE_NAME, read_index
from engine.weights.safetensors_header import SafetensorsHeader, TensorSpan, read_header
from engine.weights.tensor_index import CheckpointError, abbreviate_names

_SUFFIX: Final = ".safetensors"
_PICKLES: Final = frozenset((".bin", ".pt", ".pth", ".ckpt", ".pkl"))
_PLANES: Final = tuple(metadata.Plane)


@dataclass(frozen=True, slots=True)
class SourceFolder:
    """A folder to compress. `weights` are its safetensors files, all else is copied. Names are below `path`; `sums` is
    its SHA256SUMS, empty where it has none."""

    path: Path
    weights: dict[Path, SafetensorsHeader]
    other_files: tuple[Path, ...]
    sums: str

    @property
    def weights_bytes(self) -> int:
        return sum(header.bytes for header in self.weights.values())

    @property
    def other_bytes(self) -> int:
        return sum((self.path / name).stat().st_size for name in self.other_files)

    @property
    def tensors(self) -> dict[str, tuple[Path, TensorSpan]]:
        """The tensors by name, each with its file."""
        return {
            tensor.name: (self.path / name, tensor)
            for name, header in self.weights.items()
            for tensor in header.tensors
        }


def scan_folder(path: Path) -> SourceFolder:
    """Reads the folder's headers. Raises CheckpointError where nothing can be compressed, TargetError where
    something cannot be copied."""
    names = list_names(path)
    if Path(checksums.ORIGINAL_SUMS_NAME) in names:
        raise CheckpointError(
            f"{path} has a {checksums.ORIGINAL_SUMS_NAME}, which is what its {checksums.SUMS_NAME} would become: "
            f"rename it"
        )
    weights = {name: read_header(path / name) for name in weight_files(path, names)}
    _require_names(path, weights)
    _require_encodable(path, weights)
    sums = path / checksums.SUMS_NAME
    return SourceFolder(
        path=path,
        weights=weights,
        other_files=tuple(name for name in names if name not in weights),
        sums=sums.read_bytes().decode("utf-8", "surrogateescape") if sums.is_file() else "",
    )


def list_names(folder: Path) -> list[Path]:
    """All files of the folder except the sums. Raises CheckpointError where there is no folder."""
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}")
    return [name for name in list_files(folder) if name != Path(checksums.SUMS_NAME)]


def weight_files(folder: Path, names: list[Path]) -> list[Path]:
    """The files that the folder's index names, or the single one; without either, all safetensors files at its top.
    Raises CheckpointError."""
    files = [name for name in names if name.parent == Path() and name.suffix == _SUFFIX]
    if Path(INDEX_NAME) in names:
        indexed = read_index(folder / INDEX_NAME)
        if missing := indexed.difference(map(str, files)):
            raise CheckpointError(
                f"{folder} lacks {abbreviate_names(map(str, missing))}, which {INDEX_NAME} names: get it again"
            )
        files = [name for name in files if str(name) in indexed]
    elif Path(SINGLE_NAME) in names:
        files = [Path(SINGLE_NAME)]
    if not files:
        pickles = any(name.suffix in _PICKLES for name in names)
        raise CheckpointError(
            f"{folder} has no *.safetensors"
            + (", only pickle files, which can run code when they are opened: convert it first" if pickles else "")
        )
    return files


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
    compressed = read_metadata(path, header)
    if compressed is not None:
        raise CheckpointError(
            f"{path} is compressed already, at level {compressed.level.name.lower()}: `hearth models expand` gives the "
            "original, which can be compressed at another one"
        )


def _require_encodable(folder: Path, weights: dict[Path, SafetensorsHeader]) -> None:
    tensors = [tensor for header in weights.values() for tensor in header.tensors]
    if all(shape_reason(tensor) for tensor in tensors):
        dtypes = sorted({tensor.dtype for tensor in tensors if len(tensor.shape) > 1}) or ["none"]
        raise CheckpointError(
            f"{folder} has nothing to compress: only bf16 matrices whose rows are multiples of 128 have a code, and "
            f"its matrices are {', '.join(dtypes)}"
            + ("" if "BF16" in dtypes else ". Convert it to bf16 first, if its numbers may be rounded")
        )
