"""A checkpoint's tensors → those of a device, with a log of it, and whether the folder is still the same later.

It follows the name table and knows no architecture beyond it. streaming.py brings the bytes.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from engine.models.weight_names import ParameterEntry
from engine.weights.checkpoint import Checkpoint, CheckpointError
from engine.weights.formats import WeightFormats, allocate, bf12_formats_bytes, formats_bytes
from engine.weights.pieces import plain_pieces, read_matrices
from engine.weights.progress import ProgressBar
from engine.weights.random import random_revision
from engine.weights.streaming import FilePiece, stream_pieces
from engine.weights.tensor_index import StoredTensor

_log = logging.getLogger(__name__)

_READ: Final = (".json", ".safetensors")
Loaded = TypeVar("Loaded")


class TensorLoad(NamedTuple):
    """One tensor of the checkpoint and the rows of a parameter that it becomes, numbers or words."""

    name: str
    stored: StoredTensor
    rows: Tensor


class ModelFiles:
    """A model's folder, which is read, and read again later: then it has to be the same. `revision` names what its
    files hold, or what is made up of its config.json."""

    def __init__(self, folder: Path, random: bool) -> None:
        self._folder = folder
        self._random = random
        self._stamps = self._stat_files()
        self.revision = self._digest()

    def reread(self, read: Callable[[], Loaded]) -> Loaded:
        """What `read` makes of the files. Raises CheckpointError where they are gone or hold something else by now.
        Costs a stat of each of them beside the reading, and a digest where one was written since."""
        try:
            self._require_unchanged()
            return read()
        except OSError as error:
            raise CheckpointError(f"{self._folder} cannot be read any more: {error}") from error

    def _require_unchanged(self) -> None:
        stamps = self._stat_files()
        if stamps == self._stamps:
            return
        if self._digest() != self.revision:
            raise CheckpointError(f"{self._folder} was changed while its model was loaded: start it anew to use it so")
        self._stamps = stamps

    def _stat_files(self) -> dict[Path, tuple[int, int, int]]:
        stats = {path: path.stat() for path in self._folder.iterdir() if path.suffix in _READ}
        return {path: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}

    def _digest(self) -> str:
        return random_revision(self._folder) if self._random else Checkpoint(self._folder).revision()


def load_tensors(
    checkpoint: Checkpoint, table: list[ParameterEntry], formats: WeightFormats, device: torch.device,
    beat: Callable[[], None],
    into: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """The tensors of each entry of the table in its format, from a checkpoint that has all sources: those of `into`, or
    new ones. Calls `beat` whenever more has arrived.

    Beside the tensors it takes streaming.host_bytes of memory, 10 bytes for each escape, and some three slabs for each
    reader that unpacks or expands words. Raises CheckpointError where files change while they are read, are not as they
    were written, or have a value that is not finite.
    """
    started = time.monotonic()
    tensors = allocate(formats, device) if into is None else into
    loads = _loads(checkpoint, table, formats, tensors)
    matrices = read_matrices({load.name: load.stored for load in loads if load.stored.bf12 is not None}, beat)
    for name, matrix in matrices.items():
        if count := int((~matrix.escapes.values_E.isfinite()).sum()):
            path = matrix.stored.path
            raise CheckpointError(f"{path}: {name} has {count} values that are not finite: the file is damaged")
    pieces: list[FilePiece] = []
    for load in loads:
        pieces += matrices[load.name].pieces(load.rows) if load.name in matrices else plain_pieces(*load)
    with ProgressBar("loading", sum(piece.bytes for piece in pieces)) as progress:

        def on_bytes(count: int) -> None:
            beat()
            progress.advance_to(count)

        stream_pieces(pieces, device, on_bytes)
    for entry in table:
        escapes = [matrices[source.name].escapes for source in entry.sources if source.name in matrices]
        formats[entry.parameter].write_index(entry.parameter, tensors, escapes)
    _require_finite([load for load in loads if load.rows.is_floating_point()])
    beat()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of what converted on the way
    _log_load(loads, formats, device, time.monotonic() - started)
    return tensors


def _loads(
    checkpoint: Checkpoint, table: list[ParameterEntry], formats: WeightFormats, tensors: dict[str, Tensor]
) -> list[TensorLoad]:
    loads = []
    for entry in table:
        target, first = tensors[formats[entry.parameter].main_tensor(entry.parameter)], 0
        for source in entry.sources:
            rows = target[first : first + source.shape[0]]
            loads.append(TensorLoad(source.name, checkpoint.tensors[source.name], rows))
            first += source.shape[0]
    return loads


def _log_load(loads: list[TensorLoad], formats: WeightFormats, device: torch.device, seconds: float) -> None:
    read, seconds = sum(load.stored.bytes for load in loads) / 1e6, max(seconds, 1e-9)
    total, bf12 = formats_bytes(formats) / 1e6, bf12_formats_bytes(formats) / 1e6
    _log.info(
        "loaded %d tensors, %.1f MB in %.2f s (%.0f MB/s): %.1f MB on %s, %.1f of them in 12 bits a number",
        len(loads), read, seconds, read / seconds, total, device, bf12,
    )  # fmt: skip


def _require_finite(loads: list[TensorLoad]) -> None:
    """NaN and infinity show in the smallest or the largest value, which are found without writing memory."""
    bounds = torch.stack([bound.float() for load in loads for bound in torch.aminmax(load.rows)])
    finite = bounds.view(-1, 2).isfinite().all(1).tolist()
    for load, good in zip(loads, finite, strict=True):
        if not good:
            count = int((~load.rows.isfinite()).sum())
            raise CheckpointError(
                f"{load.stored.path}: {load.name}, stored as {load.stored.dtype}, has {count} values that are not "
                f"finite as {load.rows.dtype}: the file is damaged, or needs a dtype of a wider range"
            )
