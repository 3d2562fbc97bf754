"""A checked checkpoint → parameters on a device, with what it tells meanwhile, and whether it is still the same later.

It follows the name table and knows no architecture beyond it. How bytes get there is transfer.py's business.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from engine.log import log
from engine.model.config import ModelConfig
from engine.model.layers import Parameters
from engine.weights.assembly import allocate, assemble
from engine.weights.checkpoint import Checkpoint, CheckpointError, Stored
from engine.weights.names import Entry, entries, ignored, prefix_of
from engine.weights.random import random_revision
from engine.weights.transfer import pieces_of, transfer

_log = logging.getLogger(__name__)

_DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_TELL_S: Final = 1.0
_READ: Final = (".json", ".safetensors")
Loaded = TypeVar("Loaded")


class Part(NamedTuple):
    """One tensor of the checkpoint and the rows of a parameter that it becomes."""

    name: str
    stored: Stored
    rows: Tensor


class Files:
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


def load(
    checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, device: torch.device, beat: Callable[[], None],
    into: dict[str, Tensor] | None = None,
) -> Parameters:  # fmt: skip
    """All parameters on `device` in `dtype`, the norms in float32. On a CPU the largest takes its memory once more
    (packing). Else as `fetch`."""
    table = entries(config, prefix_of(checkpoint.tensors))
    tensors = fetch(checkpoint, table, lambda name: ignored(config, name), dtype, device, beat, into)
    return assemble(config, tensors, beat)


def fetch(
    checkpoint: Checkpoint, table: list[Entry], spare: Callable[[str], bool], dtype: torch.dtype, device: torch.device,
    beat: Callable[[], None], into: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """A tensor for each entry of the table, from a checkpoint that holds these and what is `spare`: those of `into`, or
    new ones. Calls `beat` whenever more has arrived.

    Beside the tensors it takes transfer.host_bytes of memory. Raises CheckpointError before it reads a tensor if one
    is missing, has no place or has the wrong shape; and where files change while they are read, or a value is not
    finite.
    """
    started = time.monotonic()
    checkpoint.require((source for entry in table for source in entry.sources), spare)
    tensors = allocate(table, dtype, device) if into is None else into
    parts = list(_parts(checkpoint, table, tensors))
    total = sum(part.stored.last - part.stored.first for part in parts)
    with Progress(total) as progress:

        def moved(count: int) -> None:
            beat()
            progress.moved(count)

        pieces = (
            piece
            for part in parts
            for piece in pieces_of(part.stored.path, part.stored.first, _DTYPES[part.stored.dtype], part.rows)
        )
        transfer(pieces, device, moved)
    _require_finite(parts)
    beat()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of what converted on the way
    seconds = max(time.monotonic() - started, 1e-9)
    count, rate = len(checkpoint.tensors), total / 1e6 / seconds
    _log.info("loaded %d tensors, %.1f MB in %.2f s (%.0f MB/s) as %s", count, total / 1e6, seconds, rate, dtype)
    return tensors


class Progress:
    """Tells how far it is: a bar where stderr is a terminal, else a line of the log every second."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._told_at = time.monotonic()
        self._bar = tqdm(total=total, desc="loading", unit="B", unit_scale=True) if sys.stderr.isatty() else None

    def moved(self, count: int) -> None:
        """`count` bytes so far."""
        if self._bar is not None:
            self._bar.update(count - self._bar.n)
        elif time.monotonic() - self._told_at >= _TELL_S:
            self._told_at = time.monotonic()
            log("loading", percent=100 * count // self._total)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _parts(checkpoint: Checkpoint, table: list[Entry], tensors: dict[str, Tensor]) -> Iterator[Part]:
    for entry in table:
        first = 0
        for source in entry.sources:
            rows = tensors[entry.parameter][first : first + source.shape[0]]
            yield Part(source.name, checkpoint.tensors[source.name], rows)
            first += source.shape[0]


def _require_finite(parts: list[Part]) -> None:
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
