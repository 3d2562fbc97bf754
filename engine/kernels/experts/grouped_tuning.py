"""How the matmuls of experts go through their matrices: chosen from sizes alone, since what a step's rows choose is
never known on the host. It measures nothing.
"""

import functools
from typing import Final

import torch

from engine.kernels.experts.grouped_bf12 import GroupedBf12Tiling
from engine.kernels.experts.grouped_linear import GroupedTiling

_TILE_ROWS: Final = (16, 32, 64, 128)
_SPREAD: Final = 1.5  # a tile holds so many times the entries of an expert on average: few experts need a second one
_PROGRAMS: Final = 264  # that keep a large GPU reading
_PARTS_MAX: Final = 4
_WIDE_BLOCK_K: Final = 128
_SHARED_BYTES: Final = 224 << 10  # of a multiprocessor, that the largest blocks need: Hopper and its successors


@functools.cache
def has_large_blocks(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a multiprocessor's shared memory holds the largest blocks of numbers of `dtype`."""
    if dtype.itemsize > 2 or device.type != "cuda":
        return dtype.itemsize <= 2
    properties = torch.cuda.get_device_properties(device)
    return bool(getattr(properties, "shared_memory_per_block_optin", 0) >= _SHARED_BYTES)


def tile_rows(entries: int, experts: int) -> int:
    """How many entries a tile has."""
    wanted = _SPREAD * entries / experts
    return next((rows for rows in _TILE_ROWS if rows >= wanted), _TILE_ROWS[-1])


def tiling_for(
    outputs: int, inputs: int, entries: int, experts: int, rows: int, gated: bool, blocks: int = 1, large: bool = True
) -> GroupedTiling:
    """The tiling for matrices of so many outputs (a half of them where they are gated) for tiles of `rows` entries.

    Few rows are read-bound: blocks are as narrow as keeps all multiprocessors reading, and inputs are divided where
    that is not enough. Many are bound by tensor cores, which want large blocks. Where an output has several factors,
    `blocks`, a block of inputs has one of them. `large`: has_large_blocks. Blocks, stages and warps are the fastest of
    a sweep over Qwen3-30B's and Scout's sizes on an H200."""
    block_k = _WIDE_BLOCK_K if blocks > 1 else 64
    largest = large and blocks == 1
    if rows >= 128:
        if largest:
            return GroupedTiling(128, block_k, 1, 4, 8) if gated else GroupedTiling(128, block_k, 1, 3, 4)
        return GroupedTiling(64 if gated else 128, block_k, 1, 3, 8)
    if rows == 64:
        return GroupedTiling(128 if largest and not gated else 64, block_k, 1, 3, 4)
    tiles = min(entries, experts)
    block_n = next((block for block in (64, 32) if tiles * (outputs // block) >= _PROGRAMS), 32 if gated else 64)
    parts = 1 if gated else _parts(tiles * -(-outputs // block_n), inputs)
    return GroupedTiling(block_n, _WIDE_BLOCK_K, parts, 3 if gated and block_n > 32 else 4, 2 if block_n == 32 else 4)


def bf12_tiling_for(outputs: int, inputs: int, entries: int, experts: int, gated: bool) -> GroupedBf12Tiling:
    """The same for matrices in 12 bits a number and few rows, whose blocks divide the outputs."""
    tiles = min(entries, experts)
    fitting = [block for block in (64, 32, 16) if outputs % block == 0]
    block_n = next((block for block in fitting if tiles * (outputs // block) >= _PROGRAMS), fitting[-1])
    block_n = max(block_n, min(32, fitting[0]))  # narrower blocks decode one word a thread
    parts = 1 if gated else _parts(tiles * (outputs // block_n), inputs)
    return GroupedBf12Tiling(block_n, parts, stages=2 if gated else 4, warps=block_n // 16)


def mxfp4_tiling_for(outputs: int, inputs: int, entries: int, experts: int, rows: int, gated: bool) -> GroupedTiling:
    """The same for matrices in 4 bits a number, of which a step takes 64 inputs: the fastest of a sweep over gpt-oss's
    sizes on an H200. Unpacking binds it, so that it wants more programs."""
    tiles, block_n = min(entries, experts), 32 if gated and rows <= 16 else 64
    parts = 1 if gated or rows > 16 else _parts(tiles * -(-outputs // block_n), inputs, 2 * _PROGRAMS, 256)
    return GroupedTiling(block_n, 64, parts, 3, 4 if rows >= 64 else 2)


def _parts(programs: int, inputs: int, wanted: int = _PROGRAMS, inputs_least: int = 4 * _WIDE_BLOCK_K) -> int:
    parts = 1
    while parts < _PARTS_MAX and programs * parts < wanted and inputs // (2 * parts) >= inputs_least:
        parts *= 2
    return parts
