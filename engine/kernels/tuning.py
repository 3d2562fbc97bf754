"""Which kernel multiplies a weight of some shape with some rows: measured by benchmarks/engine/linear, in the tables of
tuning_tables.py.

A GPU or a shape that was not measured gets a choice that is seldom bad: for bf16 the kernels of linear.py for few rows
and cuBLAS for more; for 12 bits a number the kernels of bf12_linear.py for few rows, for more the tiles of
bf12_linear_hopper.py where they run, and cuBLAS for still more. For 8 bits, fp8/tuning.py chooses.
"""

from bisect import bisect_left
from dataclasses import replace
from functools import cache
from typing import Final

import torch
import triton

from engine.bf12.layout import lanes_of
from engine.kernels import bf12_linear_hopper, linear
from engine.kernels.bf12_linear import Bf12Tiling
from engine.kernels.bf12_linear_hopper import HopperTiling
from engine.kernels.linear import LinearTiling
from engine.kernels.tuning_tables import load_table, tiling_key

ROW_BUCKETS: Final = (1, 16, 32, 64, 128)  # rows for which a table has a choice; others take the next larger bucket
BF12_ROW_BUCKETS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # larger counts take the last one
BF12_KERNELS: Final[dict[str, type[Bf12Tiling | HopperTiling]]] = {"coded": Bf12Tiling, "coded_hopper": HopperTiling}
_DEFAULT_ROW: Final = LinearTiling(16, 512, 1, 3, 4)
_DEFAULT_ROWS: Final = LinearTiling(64, 128, 1, 4, 4)
_DEFAULT_ROWS_MAX: Final = 16
_DEFAULT_BF12_ROW: Final = Bf12Tiling(16, 2, 1, 4, 4, 0)
_DEFAULT_BF12_ROW_OF_ODD_BLOCKS: Final = Bf12Tiling(32, 1, 1, 4, 4, 0)
_DEFAULT_BF12_ROWS: Final = Bf12Tiling(64, 1, 1, 4, 4, 4)
_DEFAULT_BF12_ROWS_MAX: Final = 64  # sums of more rows leave few registers for the weights
_TILES_ROWS_MAX: Final = 1024  # above it expanding a matrix takes little time beside its product
_WAVE: Final = 264  # programs that keep a large GPU reading
_SPLIT_PARTS_MAX: Final = 8
_HOPPER_PARTS_MAX: Final = 8
_WORTH: Final = 1.5  # times the fewest cycles: worth measuring too
_CANDIDATES_MAX: Final = 6


def select_tiling(outputs: int, inputs: int, rows: int, gated: bool, device: torch.device) -> LinearTiling | None:
    """The tiling, or None: cuBLAS."""
    if rows > linear.LINEAR_ROWS_MAX:
        return None
    bucket = next(bucket for bucket in ROW_BUCKETS if rows <= bucket)
    return _select_tiling(outputs, inputs, bucket, gated, device_name(device))


def select_bf12_tiling(
    outputs: int, inputs: int, rows: int, gated: bool, device: torch.device
) -> Bf12Tiling | HopperTiling | None:
    """The tiling for a weight in 12 bits. None: it is expanded for cuBLAS, and gating comes after the product."""
    bucket = BF12_ROW_BUCKETS[min(bisect_left(BF12_ROW_BUCKETS, rows), len(BF12_ROW_BUCKETS) - 1)]
    return _select_bf12_tiling(outputs, inputs, bucket, gated, device)


@cache
def device_name(device: torch.device) -> str:
    """The device's name in the tables: NVIDIA H200 → h200."""
    if device.type != "cuda":
        return device.type
    return torch.cuda.get_device_name(device).removeprefix("NVIDIA ").lower().replace(" ", "-")


@cache
def _select_tiling(outputs: int, inputs: int, bucket: int, gated: bool, name: str) -> LinearTiling | None:
    measured = load_table(name).get(tiling_key(outputs, inputs, gated, False), {})
    if str(bucket) in measured:
        numbers = measured[str(bucket)]
        return None if numbers is None else LinearTiling(*numbers)
    if bucket > _DEFAULT_ROWS_MAX:
        return None
    tiling = _DEFAULT_ROW if bucket == 1 else _DEFAULT_ROWS
    parts = 1 if gated else min(_parts(outputs, tiling.block_n), max(1, inputs // tiling.block_k))
    return LinearTiling(tiling.block_n, tiling.block_k, parts, tiling.stages, tiling.warps)


@cache
def _select_bf12_tiling(
    outputs: int, inputs: int, bucket: int, gated: bool, device: torch.device
) -> Bf12Tiling | HopperTiling | None:  # fmt: skip
    measured = load_table(device_name(device)).get(tiling_key(outputs, inputs, gated, True), {})
    if str(bucket) in measured:
        if measured[str(bucket)] is None:
            return None
        kernel, *numbers = measured[str(bucket)]
        return BF12_KERNELS[kernel](*numbers)
    if bf12_linear_hopper.serves(outputs, gated, device):
        if bucket > _TILES_ROWS_MAX:
            return None
        if bucket > _DEFAULT_BF12_ROWS_MAX:
            return fastest_tiling(outputs, inputs, bucket, gated, bf12_linear_hopper.multiprocessors_of(device))
        return _default_bf12(outputs, inputs, bucket, gated, stages=2 if gated else 4)
    if bucket > (32 if gated else _DEFAULT_BF12_ROWS_MAX):
        return None
    return _default_bf12(outputs, inputs, bucket, gated, stages=2 if gated or bucket == 64 else 3)


def _default_bf12(outputs: int, inputs: int, bucket: int, gated: bool, stages: int) -> Bf12Tiling:
    """A tiling for shapes that were not measured; `stages` for more than one row, which take much shared memory."""
    blocks = inputs // (8 * lanes_of(inputs))
    if bucket > 1:
        tiling = replace(_DEFAULT_BF12_ROWS, stages=stages)
    else:
        tiling = _DEFAULT_BF12_ROW_OF_ODD_BLOCKS if blocks % 2 else _DEFAULT_BF12_ROW
    turns = blocks // tiling.blocks
    return replace(tiling, parts=1 if gated else max(1, min(_parts(outputs, tiling.block_n), turns // 2)))


def _parts(outputs: int, block_n: int) -> int:
    return min(_SPLIT_PARTS_MAX, max(1, _WAVE * block_n // outputs))


def candidate_tilings(outputs: int, inputs: int, rows: int, gated: bool, multiprocessors: int) -> list[HopperTiling]:
    """The tilings that are worth measuring, the most promising first."""
    max_parts = 1 if gated else min(_HOPPER_PARTS_MAX, inputs // (8 * lanes_of(inputs)))
    tiles = [HopperTiling(size, parts) for size in bf12_linear_hopper.ROWS for parts in range(1, max_parts + 1)]
    cycles = {tile: _cycles(tile, outputs, inputs, rows, multiprocessors) for tile in tiles}
    tiles = sorted(tiles, key=lambda tile: cycles[tile])
    return [tile for tile in tiles if cycles[tile] <= _WORTH * cycles[tiles[0]]][:_CANDIDATES_MAX]


def fastest_tiling(outputs: int, inputs: int, rows: int, gated: bool, multiprocessors: int) -> HopperTiling:
    """The tiling that should take the fewest cycles, for shapes that were not measured."""
    return candidate_tilings(outputs, inputs, rows, gated, multiprocessors)[0]


def _cycles(tile: HopperTiling, outputs: int, inputs: int, rows: int, multiprocessors: int) -> int:
    """The larger of the cycles of multiprocessors and of memory, which gives 2,450 bytes a cycle. Tensor cores take 4
    cycles a row and stage, and each tile a constant more. The last wave of tiles counts as a full one. Parts are
    written and read."""
    row_tiles = triton.cdiv(rows, tile.rows)
    items = row_tiles * triton.cdiv(outputs, bf12_linear_hopper.OUTPUTS) * tile.parts
    blocks = triton.cdiv(inputs // (8 * lanes_of(inputs)), tile.parts)
    stages = blocks * 8 * lanes_of(inputs) // bf12_linear_hopper.STAGE_INPUTS.value
    busy = triton.cdiv(items, multiprocessors) * (stages * 4 * tile.rows + 1500 + 10 * tile.rows)
    memory = triton.cdiv(row_tiles, bf12_linear_hopper.TOGETHER) * outputs * inputs * 3 // 2 // 2450
    parts_bytes = 8 * tile.parts * rows * outputs if tile.parts > 1 else 0
    cycles: int = max(busy, memory) + parts_bytes // 2450
    return cycles
