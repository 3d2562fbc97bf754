"""Tensors made up on the device, of any config's shapes, for measuring without weights: models of them write nonsense.

It reads no weights and knows no checkpoint names.
"""

import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from engine.models.weight_names import ParameterEntry
from engine.weights.formats import SCALES, Mxfp4Format, WeightFormats, allocate, is_norm

log = logging.getLogger(__name__)

_SIGMA: Final = 0.02
_MXFP4_EXPONENT: Final = 120  # 2⁻⁷ times numbers of 2.8 on average


def random_tensors(
    table: list[ParameterEntry], formats: WeightFormats, device: torch.device, beat: Callable[[], None], seed: int = 0,
    into: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Norms are 1, all else is drawn from N(0, 0.02), or is as large on average in 4 bits, into the tensors of `into`,
    or new ones. Equal arguments on equal hardware give equal tensors. Calls `beat` after each parameter."""
    started = time.monotonic()
    tensors = allocate(formats, device) if into is None else into
    total = sum(tensor.nbytes for tensor in tensors.values())
    generator = torch.Generator(device).manual_seed(seed)
    for entry in table:
        tensor = tensors[entry.parameter]
        if is_norm(entry):
            tensor.fill_(1.0)
        elif isinstance(formats[entry.parameter], Mxfp4Format):
            tensor.random_(0, 256, generator=generator)
            tensors[entry.parameter + SCALES].fill_(_MXFP4_EXPONENT)
        else:
            tensor.normal_(0.0, _SIGMA, generator=generator)
        beat()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    log.info("made %.1f MB of random weights in %.2f s", total / 1e6, time.monotonic() - started)
    return tensors


def random_revision(folder: Path, seed: int = 0) -> str:
    """A name for what `random_tensors` makes of the folder's config.json."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    digest.update(seed.to_bytes(8, "little"))
    return f"random-{digest.hexdigest()[:32]}"
