"""A folder's safetensors files: where each tensor lies, with every name, shape, dtype and place checked before its use.

It reads headers and moves no weights. It knows no architecture.
"""

import hashlib
import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.weights.names import Source

_ITEM_BYTES: Final = {"F32": 4, "BF16": 2, "F16": 2}  # of weights
_COUNTS: Final = {"I64": 8}  # positions that some encoders' files carry, never a weight
_HEADER_BYTES_MAX: Final = 100_000_000
_SMALL_BYTES: Final = 64 << 20  # checkpoints up to this size are digested whole
_SAMPLE_BYTES: Final = 4096
_LISTED_MAX: Final = 5


class CheckpointError(ValueError):
    """The folder's weights are not those of its config.json; the message names file and tensor."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Where one tensor lies: bytes first … last−1 of its file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int


class Checkpoint:
    """A folder's safetensors files, their headers read and checked: no overlap, no gap, nothing past the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = _paths(folder)
        self.tensors: dict[str, Stored] = {}
        for path in self.paths:
            for name, stored in _read_header(path).items():
                if name in self.tensors:
                    raise CheckpointError(f"{name} is in {self.tensors[name].path.name} and again in {path.name}")
                self.tensors[name] = stored

    @property
    def bytes(self) -> int:
        return sum(stored.last - stored.first for stored in self.tensors.values())

    def require(self, sources: Iterable[Source], spare: Callable[[str], bool]) -> None:
        """Raises CheckpointError unless the tensors are exactly `sources`, apart from names that are `spare`."""
        wanted = {source.name: source.shape for source in sources}
        missing = [name for name in wanted if name not in self.tensors]
        extra = [name for name in self.tensors if name not in wanted and not spare(name)]
        wrong = [
            f"{name} is {list(self.tensors[name].shape)}, config.json means {list(shape)}"
            for name, shape in wanted.items()
            if name in self.tensors and self.tensors[name].shape != shape
        ]
        wrong += [
            f"{name} has dtype {self.tensors[name].dtype}; {', '.join(_ITEM_BYTES)} are supported"
            for name in wanted
            if name in self.tensors and self.tensors[name].dtype not in _ITEM_BYTES
        ]
        for problem, names in (("lacks", missing), ("has tensors that the model has no place for:", extra)):
            if names:
                raise CheckpointError(f"{self.folder} {problem} {_listed(names)}")
        if wrong:
            raise CheckpointError(f"{self.folder}: {_listed(wrong)}")

    def revision(self) -> str:
        """Names these weights: a digest of config.json, headers and, of large tensors, a sample of their bytes."""
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        for path in self.paths:
            with path.open("rb") as file:
                if self.bytes <= _SMALL_BYTES:
                    digest.update(file.read())
                    continue
                digest.update(file.read(8 + struct.unpack("<Q", file.read(8))[0] - 8))
                for stored in self.tensors.values():
                    if stored.path == path:
                        file.seek((stored.first + stored.last) // 2)
                        digest.update(file.read(min(_SAMPLE_BYTES, stored.last - stored.first)))
        return digest.hexdigest()[:32]


def _paths(folder: Path) -> list[Path]:
    """The one file, or those that the index names, in order. Names that leave the folder are refused."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        if not single.exists():
            if any(folder.glob("*.bin")):
                raise CheckpointError(
                    f"{folder} has its weights only as pickle files, which can run code when they are opened: "
                    "Hearth reads safetensors. Look for a converted checkpoint"
                )
            raise CheckpointError(f"{folder} has neither model.safetensors nor {index.name}")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of safetensors files: {error!r}") from error
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise CheckpointError(f"{index.name} names {name!r}, which is no file of {folder}")
    if not names:
        raise CheckpointError(f"{index.name} names no files")
    return [folder / name for name in names]


def _read_header(path: Path) -> dict[str, Stored]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, _HEADER_BYTES_MAX):
            raise CheckpointError(f"{path} is no safetensors file: a header of {length} bytes in a file of {size}")
        try:
            header = json.loads(file.read(length))
            del_metadata = {name: entry for name, entry in header.items() if name != "__metadata__"}
        except (ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} is no safetensors file: {error}") from error
    stored = {name: _stored(path, name, entry, 8 + length) for name, entry in del_metadata.items()}
    _check_places(path, stored, 8 + length, size)
    return stored


def _stored(path: Path, name: str, entry: Any, base: int) -> Stored:
    try:
        dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(isinstance(number, int) and number >= 0 for number in (*shape, first, last))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the header's entry of {name} is malformed") from error
    item_bytes = (_ITEM_BYTES | _COUNTS).get(dtype)
    if item_bytes is None:
        raise CheckpointError(f"{path}: {name} has dtype {dtype}; {', '.join(_ITEM_BYTES)} are supported")
    elements = 1
    for length in shape:
        elements *= length
    if not whole or last - first != elements * item_bytes:
        raise CheckpointError(f"{path}: {name} with shape {list(shape)} in {dtype} does not fit its offsets")
    return Stored(path, dtype, shape, base + first, base + last)


def _check_places(path: Path, stored: dict[str, Stored], base: int, size: int) -> None:
    end = base
    for name, tensor in sorted(stored.items(), key=lambda item: (item[1].first, item[1].last)):
        if tensor.first != end:
            raise CheckpointError(f"{path}: {name} begins at byte {tensor.first}, where {end} is due")
        end = tensor.last
    if end != size:
        raise CheckpointError(f"{path}: {size} bytes long, its tensors end at {end}: cut short or added to")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_LISTED_MAX])
    return shown if len(names) <= _LISTED_MAX else f"{shown} and {len(names) - _LISTED_MAX} more"
