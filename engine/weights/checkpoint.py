"""A folder's safetensors files: where each tensor lies, with every name, shape, dtype and offset checked before use.

Some of the files, or all, may be compressed. It reads headers and moves no weights. It knows no architecture.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from engine.models.weight_names import ParameterEntry
from engine.weights.bf12_reader import read_compressed
from engine.weights.safetensors_header import read_header, tensors_in
from engine.weights.tensor_index import BF12, ITEM_BYTES, CheckpointError, StoredTensor, abbreviate_names

__all__ = ["Checkpoint", "CheckpointError", "StoredTensor"]

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
_COUNTS: Final = ("I64",)  # positions that some encoders' files carry, never a weight
_PACKED: Final = ("U8", "F8_E4M3")  # where config.json says what they are
_SMALL_BYTES: Final = 64 << 20  # checkpoints up to this size are digested whole
_SAMPLE_BYTES: Final = 4096


class Checkpoint:
    """A folder's safetensors files, their headers read and checked: no overlap, no gap, nothing past the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = _paths(folder)
        self.tensors: dict[str, StoredTensor] = {}
        for path in self.paths:
            for name, stored in _read(path).items():
                if name in self.tensors:
                    raise CheckpointError(f"{name} is in {self.tensors[name].path.name} and again in {path.name}")
                self.tensors[name] = stored

    @property
    def bytes(self) -> int:
        return sum(stored.bytes for stored in self.tensors.values())

    def require(self, table: Iterable[ParameterEntry], is_unused: Callable[[str], bool]) -> None:
        """Raises CheckpointError unless the tensors are exactly the table's, apart from names that `is_unused`."""
        forms = {form.name: form for entry in table for source in entry.sources for form in source.stored}
        missing = [name for name in forms if name not in self.tensors]
        extra = [name for name in self.tensors if name not in forms and not is_unused(name)]
        required = {name: self.tensors[name] for name in forms if name in self.tensors}
        wrong = [
            f"{name} is {list(stored.shape)}, config.json means {list(forms[name].shapes[0])}"
            for name, stored in required.items()
            if stored.shape not in forms[name].shapes
        ]
        for name, stored in required.items():
            if stored.dtype not in (forms[name].dtypes or (*ITEM_BYTES, BF12)):
                meant = ", ".join(forms[name].dtypes or ITEM_BYTES)
                wrong.append(
                    f"{name} has dtype {stored.dtype}; {meant} {'is' if ',' not in meant else 'are'} supported"
                )
        for problem, names in (("lacks", missing), ("has tensors that the model has no place for:", extra)):
            if names:
                raise CheckpointError(f"{self.folder} {problem} {abbreviate_names(names)}")
        if wrong:
            raise CheckpointError(f"{self.folder}: {abbreviate_names(wrong)}")

    def revision(self) -> str:
        """A digest that names these weights: of config.json, headers, and small files or samples of large tensors. A
        compressed file's header has sums of all its bytes, which are compared as they are read."""
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        small = self.bytes <= _SMALL_BYTES
        for path in self.paths:
            unsummed = [stored for stored in self.tensors.values() if stored.path == path and stored.sums is None]
            with path.open("rb") as file:
                if unsummed and small:
                    digest.update(file.read())
                    continue
                length = file.read(8)
                digest.update(length + file.read(struct.unpack("<Q", length)[0]))
                for stored in unsummed:
                    file.seek((stored.first + stored.last) // 2)
                    digest.update(file.read(min(_SAMPLE_BYTES, stored.last - stored.first)))
        return digest.hexdigest()[:32]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_index(index: Path) -> set[str]:
    """The files that an index of safetensors files names. Raises CheckpointError."""
    try:
        return set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{index} is no index of safetensors files: {error!r}") from error


def _paths(folder: Path) -> list[Path]:
    """The one file, or those that the index names, in order. Refuses names that leave the folder."""
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if not index.exists():
        if not single.exists():
            if any(folder.glob("*.bin")):
                raise CheckpointError(
                    f"{folder} has its weights only as pickle files, which can run code when they are opened: "
                    "Hearth reads safetensors. Look for a converted checkpoint"
                )
            raise CheckpointError(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}")
        return [single]
    names = sorted(read_index(index))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise CheckpointError(f"{index.name} names {name!r}, which is no file of {folder}")
    if not names:
        raise CheckpointError(f"{index.name} names no files")
    return [folder / name for name in names]


def _read(path: Path) -> dict[str, StoredTensor]:
    header = read_header(path)
    compressed = read_compressed(path, header)
    tensors = tensors_in(path, header) if compressed is None else compressed.tensors
    for name, tensor in tensors.items():
        if tensor.bf12 is None and tensor.dtype not in (*ITEM_BYTES, *_COUNTS, *_PACKED):
            raise CheckpointError(f"{path}: {name} has dtype {tensor.dtype}; {', '.join(ITEM_BYTES)} are supported")
    return tensors
