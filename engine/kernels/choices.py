"""Which kernel multiplies a weight of some shape with some rows: measured by benchmarks/linear.py, kept in a table.

For a GPU or a shape that nobody has measured it gives what is seldom bad: the kernels of linear.py for few rows,
cuBLAS for more.
"""

import json
from functools import cache
from pathlib import Path
from typing import Final

import torch

from engine.kernels.linear import ROWS_MOST, Tiling

BUCKETS: Final = (1, 16, 32, 64, 128)  # rows for which the table has a choice: the next larger one is taken
_DEFAULT_ROW: Final = Tiling(16, 512, 1, 3, 4)
_DEFAULT_ROWS: Final = Tiling(64, 128, 1, 4, 4)
_DEFAULT_ROWS_MOST: Final = 16
_WAVE: Final = 264  # programs that keep a large GPU reading


def choose(outputs: int, inputs: int, rows: int, gated: bool, device: torch.device) -> Tiling | None:
    """The tiling, or None: cuBLAS."""
    if rows > ROWS_MOST:
        return None
    bucket = next(bucket for bucket in BUCKETS if rows <= bucket)
    return _choose(outputs, inputs, bucket, gated, device_name(device))


@cache
def device_name(device: torch.device) -> str:
    """As the tables name it: NVIDIA H200 → h200."""
    if device.type != "cuda":
        return device.type
    return torch.cuda.get_device_name(device).removeprefix("NVIDIA ").lower().replace(" ", "-")


def path_of(name: str) -> Path:
    return Path(__file__).parent / "tables" / f"{name}.json"


@cache
def _choose(outputs: int, inputs: int, bucket: int, gated: bool, name: str) -> Tiling | None:
    key = f"{outputs}x{inputs}{' gated' if gated else ''}"
    measured = _table(name).get(key, {})
    if str(bucket) in measured:
        chosen = measured[str(bucket)]
        return None if chosen is None else Tiling(*chosen)
    if bucket > _DEFAULT_ROWS_MOST:
        return None
    tiling = _DEFAULT_ROW if bucket == 1 else _DEFAULT_ROWS
    parts = 1 if gated else min(8, max(1, _WAVE * tiling.block_n // outputs), max(1, inputs // tiling.block_k))
    return Tiling(tiling.block_n, tiling.block_k, parts, tiling.stages, tiling.warps)


@cache
def _table(name: str) -> dict[str, dict[str, list[int] | None]]:
    """Shape → bucket → a Tiling's numbers, or null for cuBLAS."""
    path = path_of(name)
    table: dict[str, dict[str, list[int] | None]] = json.loads(path.read_text()) if path.exists() else {}
    return table
