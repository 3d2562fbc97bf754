"""A checkpoint's tensors → those of a device, with a log of it, and whether the folder is still the same later.

It follows the name table and knows no architecture beyond it. streaming.py brings the bytes.
"""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from engine.models.parameter_entries import ExpertStack, ParameterEntry, TensorSource
from engine.models.sharding import ParameterShard
from engine.weights import fp8, mxfp4
from engine.weights.checkpoint import Checkpoint, CheckpointError
from engine.weights.expert_part import expert_part, source_at
from engine.weights.formats import (
    SCALES,
    Fp8Format,
    Mxfp4Format,
    WeightFormats,
    allocate,
    bf12_formats_bytes,
    formats_bytes,
)
from engine.weights.pieces import (
    fp8_pieces,
    mxfp4_pieces,
    paired_mxfp4_pieces,
    part_pieces,
    plain_pieces,
    read_matrices,
    read_small,
)
from engine.weights.progress import ProgressBar
from engine.weights.random import random_revision
from engine.weights.streaming import FilePiece, stream_pieces
from engine.weights.tensor_index import StoredTensor

_log = logging.getLogger(__name__)

__all__ = ["CheckpointError", "ModelFiles", "TensorLoad", "load_experts", "load_shard", "load_tensors"]

_READ: Final = (".json", ".safetensors")
Loaded = TypeVar("Loaded")


class TensorLoad(NamedTuple):
    """One tensor of the checkpoint and the rows of a parameter that it becomes, numbers or words; of a `part` where
    only some of it is taken."""

    source: TensorSource
    stored: StoredTensor
    rows: Tensor
    part: ParameterShard | None = None

    @property
    def name(self) -> str:
        return self.source.name


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
    stored: Mapping[str, StoredTensor], table: list[ParameterEntry], formats: WeightFormats, device: torch.device,
    beat: Callable[[], None],
    into: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """The tensors of each entry of the table in its format, from what a checkpoint has `stored`, which has all sources:
    those of `into`, or new ones. Calls `beat` whenever more has arrived.

    Beside the tensors it takes streaming.host_bytes of memory, 10 bytes for each escape, and some three slabs for each
    reader that unpacks or expands words. Raises CheckpointError where files change while they are read, are not as they
    were written, or have a value that is not finite.
    """
    tensors = allocate(formats, device) if into is None else into
    _fill(stored, _loads(stored, table, formats, tensors), table, formats, tensors, device, beat)
    return tensors


def load_shard(
    stored: Mapping[str, StoredTensor], table: list[ParameterEntry], own: list[ParameterEntry],
    parts: Mapping[str, ParameterShard], formats: WeightFormats, device: torch.device, beat: Callable[[], None],
    into: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """As `load_tensors`, the parts of one rank, where sources are weights as they are. `own` says what becomes of rows,
    `formats` are the parts'. Rows that are not its own are not read; of a matrix that is cut along its inputs each row
    is."""
    tensors = allocate(formats, device) if into is None else into
    loads = []
    for entry in table:
        part, target, first = parts[entry.parameter], tensors[entry.parameter], 0
        for run in part.rows:
            source, start = source_at(entry, run.start)
            rows = target[first : first + len(run)]
            within = ParameterShard((range(run.start - start, run.stop - start),), part.columns)
            loads.append(TensorLoad(source, stored[source.name], rows, within))
            first += len(run)
    _fill(stored, loads, own, formats, tensors, device, beat)
    return tensors


def load_experts(
    stored: Mapping[str, StoredTensor], table: list[ParameterEntry], parts: Mapping[str, ParameterShard],
    formats: WeightFormats, device: torch.device, beat: Callable[[], None], into: dict[str, Tensor],
) -> None:  # fmt: skip
    """As `load_tensors`, of one rank's whole experts, where the table has all. No others are read."""
    if table:
        own, tensors = expert_part(table, stored, parts)
        load_tensors(tensors, own, {entry.parameter: formats[entry.parameter] for entry in own}, device, beat, into)


def _fill(
    stored: Mapping[str, StoredTensor], loads: list[TensorLoad], table: list[ParameterEntry], formats: WeightFormats,
    tensors: dict[str, Tensor], device: torch.device, beat: Callable[[], None],
) -> None:  # fmt: skip
    started = time.monotonic()
    matrices = read_matrices({load.name: load.stored for load in loads if load.stored.bf12 is not None}, beat)
    for name, matrix in matrices.items():
        if count := int((~matrix.escapes.values_E.isfinite()).sum()):
            path = matrix.stored.path
            raise CheckpointError(f"{path}: {name} has {count} values that are not finite: the file is damaged")
    packed = {load.name: load.source.scales.name for load in loads if load.source.scales is not None}
    scales = read_small({name: stored[own] for name, own in packed.items()}, beat)
    pieces: list[FilePiece] = []
    for load in loads:
        if load.part is not None:
            pieces += part_pieces(load.name, load.stored, load.rows, load.part.rows[0], load.part.columns)
        elif load.name in matrices:
            pieces += matrices[load.name].pieces(load.rows)
        elif load.source.is_mxfp4 and load.rows.dtype is torch.uint8:
            pieces += paired_mxfp4_pieces(load.name, load.stored, load.rows)
        elif load.source.is_mxfp4:
            pieces += mxfp4_pieces(load.name, load.stored, scales[load.name], load.rows)
        elif load.source.is_fp8 and load.rows.dtype is not fp8.DTYPE:
            own = fp8.output_scales(scales[load.name], load.source.shape[0])
            pieces += fp8_pieces(load.name, load.stored, own, load.rows)
        else:
            pieces += plain_pieces(load.name, load.stored, load.rows)
    with ProgressBar("loading", sum(piece.bytes for piece in pieces)) as progress:

        def on_bytes(count: int) -> None:
            beat()
            progress.advance_to(count)

        stream_pieces(pieces, device, on_bytes)
    for entry in table:
        escapes = [matrices[source.name].escapes for source in entry.sources if source.name in matrices]
        formats[entry.parameter].write_index(entry.parameter, tensors, escapes)
        if isinstance(formats[entry.parameter], Fp8Format):
            own_scales = [fp8.output_scales(scales[source.name], source.shape[0]) for source in entry.sources]
            tensors[entry.parameter + SCALES].copy_(torch.cat(own_scales))
        if isinstance(formats[entry.parameter], Mxfp4Format):
            target = tensors[entry.parameter + SCALES]
            target.copy_(torch.cat([scales[source.name] for source in entry.sources]).view(target.shape))
    _require_sound(scales, packed, loads)
    _require_finite([load for load in loads if load.rows.is_floating_point() and load.rows.dtype is not fp8.DTYPE])
    for entry in table:
        _finish(entry, tensors)
    beat()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of what converted on the way
    _log_load(loads, formats, device, time.monotonic() - started)


def _loads(
    stored: Mapping[str, StoredTensor], table: list[ParameterEntry], formats: WeightFormats, tensors: dict[str, Tensor]
) -> list[TensorLoad]:
    loads = []
    for entry in table:
        target, first = tensors[formats[entry.parameter].main_tensor(entry.parameter)], 0
        for source in entry.sources:
            rows = target[first : first + source.placed[0]]
            loads.append(TensorLoad(source, stored[source.name], rows))
            first += source.placed[0]
    return loads


def _finish(entry: ParameterEntry, tensors: dict[str, Tensor]) -> None:
    """Does to a parameter whose numbers are all there what its entry says. It takes the parameter's memory once more
    where rows change places."""
    for source in entry.sources:
        for name in (entry.parameter, entry.parameter + SCALES):
            if source.stack is not None and name in tensors:
                _place_experts(source, source.stack, tensors[name])
    if entry.order is not None:
        for name in (entry.parameter, entry.parameter + SCALES):
            if name in tensors:
                rows = tensors[name].view(torch.uint8) if tensors[name].dtype is fp8.DTYPE else tensors[name]
                rows.copy_(rows[torch.tensor(entry.order.rows(len(rows)), device=rows.device)])
    if entry.offset:
        tensors[entry.parameter].add_(entry.offset)


def _place_experts(source: TensorSource, stack: ExpertStack, tensor: Tensor) -> None:
    """Turns each expert where it lies, and puts gates above ups. It takes an expert's memory once more."""
    experts, outputs = source.shape[0], source.placed[0] // source.shape[0]
    for own in tensor.view(experts, outputs, *tensor.shape[1:]):
        if stack.transposed:
            own.copy_(own.view(-1, outputs).T.contiguous())
        if stack.interleaved:
            own.copy_(torch.cat((own[::2], own[1::2])))


def _log_load(loads: list[TensorLoad], formats: WeightFormats, device: torch.device, seconds: float) -> None:
    read, seconds = sum(load.stored.bytes for load in loads) / 1e6, max(seconds, 1e-9)
    total, bf12 = formats_bytes(formats) / 1e6, bf12_formats_bytes(formats) / 1e6
    _log.info(
        "loaded %d tensors, %.1f MB in %.2f s (%.0f MB/s): %.1f MB on %s, %.1f of them in 12 bits a number",
        len(loads), read, seconds, read / seconds, total, device, bf12,
    )  # fmt: skip


def _require_sound(scales: Mapping[str, Tensor], names: Mapping[str, str], loads: list[TensorLoad]) -> None:
    """Raises CheckpointError for factors, or numbers in 8 bits, that have no value."""
    for load in loads:
        if load.rows.dtype is fp8.DTYPE and (count := fp8.count_not_finite(load.rows)):
            raise CheckpointError(f"{load.stored.path}: {load.name} has {count} values that are no numbers")
        own = scales.get(load.name)
        if load.rows.dtype is torch.uint8 and own is not None and (count := mxfp4.count_not_finite(own)):
            said = f"{names[load.name]} has {count} powers of two that are no numbers"
            raise CheckpointError(f"{load.stored.path}: {said}: the file is damaged, get it again")
        if own is not None and own.is_floating_point() and not bool(own.isfinite().all()):
            raise CheckpointError(f"{load.stored.path}: {names[load.name]} has factors that are not finite")


def _require_finite(loads: list[TensorLoad]) -> None:
    """NaN and infinity show in the smallest or the largest value, which are found without writing memory."""
    if not loads:
        return
    bounds = torch.stack([bound.float() for load in loads for bound in torch.aminmax(load.rows)])
    finite = bounds.view(-1, 2).isfinite().all(1).tolist()
    for load, good in zip(loads, finite, strict=True):
        if not good:
            count = int((~load.rows.isfinite()).sum())
            raise CheckpointError(
                f"{load.stored.path}: {load.name}, stored as {load.stored.dtype}, has {count} values that are not "
                f"finite as {load.rows.dtype}: the file is damaged, or needs a dtype of a wider range"
            )
