"""Columns of all ranks that rank 0 needs, over the windows of windows.py.

W ranks, R rows, V columns of all.
"""

from itertools import pairwise
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.pdl import supports_pdl, wait
from engine.kernels.ranks.windows import (
    DATA_BEGINS,
    PER_LAUNCH,
    REGISTERS,
    RUNS,
    RankWindows,
    await_others,
    begin,
    count_in,
    max_programs,
    places_of,
    signal,
    views_of,
)

__all__ = ["DATA_BEGINS", "RankWindows", "gather_columns"]
_COLUMNS: Final = 2048


@triton.jit(do_not_specialize=PER_LAUNCH)
def _gather_columns(
    own, whole, words, data, rank, rows, width, first_columns, vocabulary, window, data_window, data_first, half,
    W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rank 0 gets the columns of all others. `width` is that of the widest, first_columns[W + 1] where each begins."""
    wait()
    epoch = begin(words, window, rank)
    inbox = data + data_first + (epoch % 2) * half
    blocks = tl.cdiv(width, BLOCK)
    first = tl.load(first_columns + rank)
    count = tl.load(first_columns + rank + 1) - first
    for item in tl.range(tl.program_id(0), rows * blocks, tl.num_programs(0), num_stages=1):
        row, columns = item // blocks, (item % blocks) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(own + tl.cast(row, tl.int64) * count + columns, mask=columns < count)
        if rank == 0:
            tl.store(whole + tl.cast(row, tl.int64) * vocabulary + first + columns, x, mask=columns < count)
        else:
            tl.store(inbox + (rank * rows + row) * width + columns, x, mask=columns < count)
    signal(words, window, rank, 0, epoch * RUNS, W)
    count_in(words, window, rank, epoch)
    await_others(words, window, rank, 0, epoch * RUNS, W)
    if rank == 0:
        for item in tl.range(tl.program_id(0), rows * blocks, tl.num_programs(0), num_stages=1):
            row, columns = item // blocks, (item % blocks) * BLOCK + tl.arange(0, BLOCK)
            for peer in tl.static_range(1, W):
                start = tl.load(first_columns + peer)
                inside = columns < tl.load(first_columns + peer + 1) - start
                x = tl.load(inbox + (peer * rows + row) * width + columns, mask=inside)
                tl.store(whole + tl.cast(row, tl.int64) * vocabulary + start + columns, x, mask=inside)


def gather_columns(windows: RankWindows, own_RV: Tensor, firsts_W1: Tensor, first_columns: list[int]) -> Tensor:
    """On rank 0 all columns [R, V], of which each rank has those from first_columns[rank] to first_columns[rank + 1];
    `firsts_W1` are these numbers, int32 on the device. On others their own."""
    rows, count = own_RV.shape
    rank, vocabulary = windows.rank, first_columns[-1]
    assert own_RV.is_contiguous()
    assert count == first_columns[rank + 1] - first_columns[rank]
    assert firsts_W1.dtype == torch.int32
    width = max(last - first for first, last in pairwise(first_columns))
    whole_RV = own_RV.new_empty(rows, vocabulary) if rank == 0 else own_RV
    run = windows.half_bytes // (windows.ranks * width * own_RV.itemsize)
    assert run > 0, "windows that hold no row of the logits"
    for first in range(0, rows, run):
        part = min(run, rows - first)
        programs = min(max_programs(own_RV.device), part * triton.cdiv(width, _COLUMNS))
        _gather_columns[(programs,)](
            own_RV[first:], whole_RV[first:], *views_of(windows, own_RV.dtype), rank, part, width, firsts_W1,
            vocabulary, *places_of(windows, own_RV.itemsize), W=windows.ranks, BLOCK=_COLUMNS, num_warps=8,
            maxnreg=2 * REGISTERS, launch_pdl=supports_pdl(own_RV.device),
        )  # fmt: skip
    return whole_RV
