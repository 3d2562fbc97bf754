"""What a rank computes with, beside its weights: ranks of one model must have the same. It compares, and ends
nobody."""

import hashlib
from pathlib import Path
from typing import Final

import torch

_ENGINE: Final = Path(__file__).parents[1]


class UnlikeRanks(RuntimeError):
    """A rank computes with something else than rank 0; the message names it."""


def software_of(device: torch.device) -> dict[str, str]:
    """The versions of torch, CUDA and driver, and a digest of the engine's code as it lies on the disk now. Costs some
    10 ms."""
    versions = {"torch": str(torch.__version__), "CUDA": str(torch.version.cuda), "code": _code_digest(_ENGINE)}
    if device.type == "cuda":
        from cuda.bindings import driver  # only here: torch for CUDA brings it, torch for a CPU does not

        versions["driver"] = str(driver.cuDriverGetVersion()[1])
    return versions


def require_like(rank: int, own: dict[str, str], leader: dict[str, str]) -> None:
    """Raises UnlikeRanks."""
    for name in sorted({*own, *leader}):
        if own.get(name) != leader.get(name):
            raise UnlikeRanks(
                f"rank {rank} has {name} {own.get(name)}, rank 0 {leader.get(name)}: a model's ranks must compute "
                "alike; was something installed while it started? Start it again"
            )


def _code_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
