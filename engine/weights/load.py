"""A checkpoint's tensors → those of a device, with what it tells meanwhile, and whether it is still the same later.

It follows the name table and knows no architecture beyond it. How bytes get there is transfer.py's business.
"""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from engine.models.weight_names import ParameterEntry
from engine.weights.checkpoint import Checkpoint, CheckpointError
from engine.weights.formats import WeightFormats, allocate, bf12_formats_bytes, formats_bytes
from engine.weights.pieces import CodedMatrix, plain_pieces, read_matrices
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
        self._stamps = self._look()
        self.revision = self._name()

    def again(self, read: Callable[[], Loaded]) -> Loaded:
        """What `read` makes of them. Raises CheckpointError where they are gone or hold something else by now. Costs a
        look at each of them beside the reading, and a digest where one was written since."""
        try:
            self._require_same()
            return read()
        except OSError as error:
            raise CheckpointError(f"{self._folder} cannot be read any more: {error}") from error

    def _require_same(self) -> None:
        stamps = self._look()
        if stamps == self._stamps:
            return
        if self._name() != self.revision:
            raise CheckpointError(f"{self._folder} was changed while its model was loaded: start it anew to use it so")
        self._stamps = stamps

    def _look(self) -> dict[Path, tuple[int, int, int]]:
        found = {path: path.stat() for path in self._folder.iterdir() if path.suffix in _READ}
        return {path: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}

    def _name(self) -> str:
        return random_revision(self._folder) if self._random else Checkpoint(self._folder).revision()


def load_tensors(
    checkpoint: Checkpoint, table: list[ParameterEntry], forms: WeightFormats, device: torch.device,
    beat: Callable[[], None],
    into: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """The tensors of each entry of the table in its form, from a checkpoint that has all sources: those of `into`, or
    new ones. Calls `beat` whenever more has arrived.

    Beside the tensors it takes transfer.host_bytes of memory, 10 bytes for each escape, and some three slabs for each
    reader that unpacks or expands words. Raises CheckpointError where files change while they are read, are not as they
    were written, or have a value that is not finite.
    """
    started = time.monotonic()
    tensors = allocate(forms, device) if into is None else into
    parts = _parts(checkpoint, table, forms, tensors)
    matrices = read_matrices({part.name: part.stored for part in parts if part.stored.code is not None}, beat)
    pieces = [piece for part in parts for piece in _pieces(part, matrices)]
    with ProgressBar("loading", sum(piece.bytes for piece in pieces)) as progress:

        def moved(count: int) -> None:
            beat()
            progress.reached(count)

        stream_pieces(pieces, device, moved)
    _write_beside(table, forms, matrices, tensors)
    _require_finite([part for part in parts if part.rows.is_floating_point()])
    beat()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of what converted on the way
    _tell(parts, forms, device, time.monotonic() - started)
    return tensors


def _parts(
    checkpoint: Checkpoint, table: list[ParameterEntry], forms: WeightFormats, tensors: dict[str, Tensor]
) -> list[TensorLoad]:
    parts = []
    for entry in table:
        body, first = tensors[forms[entry.parameter].body(entry.parameter)], 0
        for source in entry.sources:
            parts.append(
                TensorLoad(source.name, checkpoint.tensors[source.name], body[first : first + source.shape[0]])
            )
            first += source.shape[0]
    return parts


def _pieces(part: TensorLoad, matrices: dict[str, CodedMatrix]) -> Iterator[FilePiece]:
    matrix = matrices.get(part.name)
    return plain_pieces(part.name, part.stored, part.rows) if matrix is None else matrix.pieces(part.rows)


def _write_beside(
    table: list[ParameterEntry], forms: WeightFormats, matrices: dict[str, CodedMatrix], tensors: dict[str, Tensor]
) -> None:
    for entry in table:
        coded = [matrices[source.name].escapes for source in entry.sources if source.name in matrices]
        forms[entry.parameter].write_beside(entry.parameter, tensors, coded)


def _tell(parts: list[TensorLoad], forms: WeightFormats, device: torch.device, seconds: float) -> None:
    read, seconds = sum(part.stored.bytes for part in parts) / 1e6, max(seconds, 1e-9)
    kept, coded = formats_bytes(forms) / 1e6, bf12_formats_bytes(forms) / 1e6
    _log.info(
        "loaded %d tensors, %.1f MB in %.2f s (%.0f MB/s): %.1f MB on %s, %.1f of them in 12 bits a number",
        len(parts), read, seconds, read / seconds, kept, device, coded,
    )  # fmt: skip


def _require_finite(parts: list[TensorLoad]) -> None:
    """NaN and infinity show in the least or the greatest value, which are found without writing memory."""
    bounds = torch.stack([bound.float() for part in parts for bound in torch.aminmax(part.rows)])
    finite = bounds.view(-1, 2).isfinite().all(1).tolist()
    for part, good in zip(parts, finite, strict=True):
        if not good:
            count = int((~part.rows.isfinite()).sum())
            raise CheckpointError(
                f"{part.stored.path}: {part.name}, stored as {part.stored.dtype}, has {count} values that are not "
                f"finite as {part.rows.dtype}: the file is damaged, or needs a dtype of a wider range"
            )
