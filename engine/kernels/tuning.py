"""Which kernel multiplies a weight of some shape with some rows: measured by benchmarks/linear, kept in tables
(measured.py).

For a GPU or a shape that nobody has measured it gives what is seldom bad: for bf16 the kernels of linear.py for few
rows and cuBLAS for more; for 12 bits a number coded.py's kernels for few rows, for more the tiles of coded_hopper.py
where they run, and cuBLAS for yet more.
"""

from bisect import bisect_left
from dataclasses import replace
from functools import cache
from typing import Final

import torch

from engine.bf12.layout import lanes_of
from engine.kernels import bf12_linear_hopper, linear
from engine.kernels.bf12_linear import CodedTiling
from engine.kernels.bf12_linear_hopper import Tile
from engine.kernels.linear import Tiling
from engine.kernels.tuning_tables import key_of, table_of

BUCKETS: Final = (1, 16, 32, 64, 128)  # rows for which a table has a choice: the next larger one is taken
CODED_BUCKETS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # or the last one, for any more
CODED_KERNELS: Final[dict[str, type[CodedTiling | Tile]]] = {"coded": CodedTiling, "coded_hopper": Tile}
_DEFAULT_ROW: Final = Tiling(16, 512, 1, 3, 4)
_DEFAULT_ROWS: Final = Tiling(64, 128, 1, 4, 4)
_DEFAULT_ROWS_MOST: Final = 16
_DEFAULT_CODED_ROW: Final = CodedTiling(16, 2, 1, 4, 4, 0)
_DEFAULT_CODED_ROW_OF_ODD_BLOCKS: Final = CodedTiling(32, 1, 1, 4, 4, 0)
_DEFAULT_CODED_ROWS: Final = CodedTiling(64, 1, 1, 4, 4, 4)
_DEFAULT_CODED_ROWS_MOST: Final = 64  # sums of more rows leave few registers for the weights
_TILES_ROWS_MOST: Final = 1024  # above it the time to expand a matrix is little beside that of its product
_WAVE: Final = 264  # programs that keep a large GPU reading
_PARTS_MOST: Final = 8


def choose(outputs: int, inputs: int, rows: int, gated: bool, device: torch.device) -> Tiling | None:
    """The tiling, or None: cuBLAS."""
    if rows > linear.ROWS_MOST:
        return None
    bucket = next(bucket for bucket in BUCKETS if rows <= bucket)
    return _choose(outputs, inputs, bucket, gated, device_name(device))


def choose_coded(outputs: int, inputs: int, rows: int, gated: bool, device: torch.device) -> CodedTiling | Tile | None:
    """As `choose`. None: what is to be gated is gated after its product, and what is only to be multiplied is expanded
    for cuBLAS."""
    bucket = CODED_BUCKETS[min(bisect_left(CODED_BUCKETS, rows), len(CODED_BUCKETS) - 1)]
    return _choose_coded(outputs, inputs, bucket, gated, device)


@cache
def device_name(device: torch.device) -> str:
    """As the tables name it: NVIDIA H200 → h200."""
    if device.type != "cuda":
        return device.type
    return torch.cuda.get_device_name(device).removeprefix("NVIDIA ").lower().replace(" ", "-")


@cache
def _choose(outputs: int, inputs: int, bucket: int, gated: bool, name: str) -> Tiling | None:
    measured = table_of(name).get(key_of(outputs, inputs, gated, False), {})
    if str(bucket) in measured:
        chosen = measured[str(bucket)]
        return None if chosen is None else Tiling(*chosen)
    if bucket > _DEFAULT_ROWS_MOST:
        return None
    tiling = _DEFAULT_ROW if bucket == 1 else _DEFAULT_ROWS
    parts = 1 if gated else min(_parts(outputs, tiling.block_n), max(1, inputs // tiling.block_k))
    return Tiling(tiling.block_n, tiling.block_k, parts, tiling.stages, tiling.warps)


@cache
def _choose_coded(
    outputs: int, inputs: int, bucket: int, gated: bool, device: torch.device
) -> CodedTiling | Tile | None:  # fmt: skip
    measured = table_of(device_name(device)).get(key_of(outputs, inputs, gated, True), {})
    if str(bucket) in measured:
        if measured[str(bucket)] is None:
            return None
        kernel, *numbers = measured[str(bucket)]
        return CODED_KERNELS[kernel](*numbers)
    if bf12_linear_hopper.serves(outputs, gated, device):
        if bucket > _TILES_ROWS_MOST:
            return None
        if bucket > _DEFAULT_CODED_ROWS_MOST:
            return bf12_linear_hopper.tile_of(
                outputs, inputs, bucket, gated, bf12_linear_hopper.multiprocessors_of(device)
            )
        return _default_coded(outputs, inputs, bucket, gated, stages=2 if gated else 4)
    if bucket > (32 if gated else _DEFAULT_CODED_ROWS_MOST):
        return None
    return _default_coded(outputs, inputs, bucket, gated, stages=2 if gated or bucket == 64 else 3)


def _default_coded(outputs: int, inputs: int, bucket: int, gated: bool, stages: int) -> CodedTiling:
    """`stages` for more than one row, which take much shared memory."""
    blocks = inputs // (8 * lanes_of(inputs))
    if bucket > 1:
        tiling = replace(_DEFAULT_CODED_ROWS, stages=stages)
    else:
        tiling = _DEFAULT_CODED_ROW_OF_ODD_BLOCKS if blocks % 2 else _DEFAULT_CODED_ROW
    turns = blocks // tiling.blocks
    return replace(tiling, parts=1 if gated else max(1, min(_parts(outputs, tiling.block_n), turns // 2)))


def _parts(outputs: int, block_n: int) -> int:
    return min(_PARTS_MOST, max(1, _WAVE * block_n // outputs))
