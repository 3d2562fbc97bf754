"""Copies whole KV blocks between a pool and memory where they lie one behind the other, and sums up what they hold: on
the way, so that a block is read once. That memory may be another GPU's, or the host's pinned.

A checksum is the sum, modulo 2⁶⁴, of every word mixed with its place (splitmix64, Steele 2014, which maps words one to
one): one word that changed is always noticed, several are missed once in 2⁶⁴ times, as are words that swapped places.
It is no defence against somebody who means it.

L layers, B blocks, W words (int64) of a block in one layer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # words at once, 8 for each thread
_WARPS = 8


@triton.jit
def _mix(words, places):
    """A number for each word at its place, which no other word there has."""
    mixed = words.to(tl.uint64, bitcast=True) + (places + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return mixed ^ (mixed >> 31)


@triton.jit
def _copy(
    source, target, sums, source_ids, target_ids, source_layer, source_block, target_layer, target_block,
    W: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    from_block = block if source_ids is None else tl.load(source_ids + block)
    to_block = block if target_ids is None else tl.load(target_ids + block)
    source += layer * source_layer + from_block * source_block
    total = tl.zeros([BLOCK], tl.uint64)
    for start in range(0, W, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < W
        words = tl.load(source + places, mask=inside, other=0)
        if target is not None:
            at = target + layer * target_layer + to_block * target_block
            tl.store(at + places, words, mask=inside)
        if sums is not None:
            total += tl.where(inside, _mix(words, layer * W + places), 0)
    if sums is not None:
        tl.store(sums + block * L + layer, tl.sum(total).to(tl.int64, bitcast=True))


def gather_blocks(words_LNW: Tensor, ids_B: Tensor, into_BLW: Tensor, sums_BL: Tensor) -> None:
    """Queues the copy of the pool's blocks `ids_B`, and what each holds of each layer, summed up. The caller keeps all
    of it until that is done."""
    _check(into_BLW, sums_BL)
    _check_pool(words_LNW, ids_B, into_BLW)
    _copy[tuple(into_BLW.shape[:2])](
        words_LNW, into_BLW, sums_BL, ids_B, None, *words_LNW.stride()[:2], into_BLW.stride(1), into_BLW.stride(0),
        W=into_BLW.shape[2], L=into_BLW.shape[1], BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


def sum_blocks(blocks_BLW: Tensor, sums_BL: Tensor) -> None:
    """Queues what `gather_blocks` sums up, of blocks that it copied."""
    _check(blocks_BLW, sums_BL)
    _copy[tuple(sums_BL.shape)](
        blocks_BLW, None, sums_BL, None, None, blocks_BLW.stride(1), blocks_BLW.stride(0), 0, 0,
        W=blocks_BLW.shape[2], L=blocks_BLW.shape[1], BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


def scatter_blocks(blocks_BLW: Tensor, words_LNW: Tensor, ids_B: Tensor) -> None:
    """Queues the way back into the pool's blocks `ids_B`."""
    _check_pool(words_LNW, ids_B, blocks_BLW)
    _copy[tuple(blocks_BLW.shape[:2])](
        blocks_BLW, words_LNW, None, None, ids_B, blocks_BLW.stride(1), blocks_BLW.stride(0), *words_LNW.stride()[:2],
        W=blocks_BLW.shape[2], L=blocks_BLW.shape[1], BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


def _check(blocks_BLW: Tensor, sums_BL: Tensor) -> None:
    assert blocks_BLW.dtype == sums_BL.dtype == torch.int64
    assert blocks_BLW.is_contiguous()
    assert sums_BL.is_contiguous()
    assert blocks_BLW.shape[:2] == sums_BL.shape


def _check_pool(words_LNW: Tensor, ids_B: Tensor, blocks_BLW: Tensor) -> None:
    assert words_LNW.dtype == ids_B.dtype == blocks_BLW.dtype == torch.int64
    assert words_LNW.stride(2) == 1
    assert blocks_BLW.is_contiguous()
    assert blocks_BLW.shape == (len(ids_B), words_LNW.shape[0], words_LNW.shape[2])
