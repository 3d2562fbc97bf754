"""Safetensors files → parameters: every tensor's name, shape, dtype and place is checked before a byte is used.

It follows the name table and knows no architecture beyond it.
"""

import hashlib
import json
import logging
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.layers import Layer, Parameters
from engine.weights.names import Entry, Source, entries, ignored
from engine.weights.storage import Dense

log = logging.getLogger(__name__)

_DTYPES: Final = {"F32": 4, "BF16": 2, "F16": 2}
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
        self._open: dict[Path, Any] = {}

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
        for problem, names in (("lacks", missing), ("has tensors that the model has no place for:", extra)):
            if names:
                raise CheckpointError(f"{self.folder} {problem} {_listed(names)}")
        if wrong:
            raise CheckpointError(f"{self.folder}: {_listed(wrong)}")

    def read(self, name: str) -> Tensor:
        """The tensor as it is stored, on the CPU."""
        path = self.tensors[name].path
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise CheckpointError(f"{path}: {error}") from error
        tensor: Tensor = self._open[path].get_tensor(name)
        return tensor

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


def load(checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, beat: Callable[[], None]) -> Parameters:
    """All parameters in `dtype`, the norms in float32. Calls `beat` after each; logs how fast it went.

    Raises CheckpointError before it reads a tensor if one is missing, has no place or has the wrong shape.
    """
    started = time.monotonic()
    table = entries(config)
    checkpoint.require((source for entry in table for source in entry.sources), lambda name: ignored(config, name))
    held: dict[str, Tensor] = {}
    linears: dict[str, Dense] = {}
    for entry in table:
        is_norm = entry.parameter.endswith("norm")
        tensor = _stack(checkpoint, entry, torch.float32 if is_norm else dtype)
        linear, _, part = entry.parameter.rpartition(".")
        if part == "weight" and not _has_bias(table, linear):
            linears[linear] = Dense(tensor)
        elif part == "bias":
            linears[linear] = Dense(held.pop(linear + ".weight"), tensor)
        else:
            held[entry.parameter] = tensor
        beat()
    if config.tied_head:
        linears["head"] = Dense(held["embedding"])
        beat()
    seconds = max(time.monotonic() - started, 1e-9)
    log.info(
        "loaded %d tensors, %.1f MB in %.2f s (%.0f MB/s) as %s",
        len(checkpoint.tensors), checkpoint.bytes / 1e6, seconds, checkpoint.bytes / 1e6 / seconds, dtype,
    )  # fmt: skip
    return _assemble(config, held, linears)


def weights_bytes(parameters: Parameters) -> int:
    """What the parameters occupy in memory; a tied head's packed copy counts, for it is one."""
    linears = [parameters.head]
    for layer in parameters.layers:
        linears += [layer.qkv, layer.output, layer.gate_up, layer.down]
    return parameters.embedding.nbytes + sum(linear.bytes for linear in linears if isinstance(linear, Dense))


def _has_bias(table: list[Entry], linear: str) -> bool:
    return any(entry.parameter == linear + ".bias" for entry in table)


def _stack(checkpoint: Checkpoint, entry: Entry, dtype: torch.dtype) -> Tensor:
    """The entry's sources below each other, in memory of its own."""
    rows = sum(source.shape[0] for source in entry.sources)
    stacked = torch.empty((rows, *entry.sources[0].shape[1:]), dtype=dtype)
    first = 0
    for source in entry.sources:
        stacked[first : first + source.shape[0]] = checkpoint.read(source.name)
        first += source.shape[0]
    return stacked


def _assemble(config: ModelConfig, held: dict[str, Tensor], linears: dict[str, Dense]) -> Parameters:
    layers = []
    for index in range(config.layers):
        ours = f"layers.{index}."
        layers.append(
            Layer(
                attention_norm=held[ours + "attention_norm"],
                qkv=linears[ours + "qkv"],
                qk_norm=_each_head(config, held, ours) if config.qk_norm else None,
                output=linears[ours + "output"],
                mlp_norm=held[ours + "mlp_norm"],
                gate_up=linears[ours + "gate_up"],
                down=linears[ours + "down"],
            )
        )
    return Parameters(held["embedding"], layers, held["norm"], linears["head"])


def _each_head(config: ModelConfig, held: dict[str, Tensor], ours: str) -> Tensor:
    return torch.cat(
        (held[ours + "q_norm"].expand(config.heads, -1), held[ours + "k_norm"].expand(config.kv_heads, -1))
    )


def _paths(folder: Path) -> list[Path]:
    """The one file, or those that the index names, in order. Names that leave the folder are refused."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        if not single.exists():
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
    if dtype not in _DTYPES:
        raise CheckpointError(f"{path}: {name} has dtype {dtype}; {', '.join(_DTYPES)} are supported")
    elements = 1
    for length in shape:
        elements *= length
    if not whole or last - first != elements * _DTYPES[dtype]:
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
