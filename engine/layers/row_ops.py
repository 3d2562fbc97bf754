"""Norms, rotations, gates and copies of rows on a CPU: cpu_row.c's where it is compiled and rows are bfloat16, else
torch's. A row's bits depend on that row alone, and which of both computes it on the machine and the dtype.

T rows, H hidden size, D head size, W all heads of q, k and v, I inner size, L keys, B blocks.
"""

import torch
from torch import Tensor

from engine.kernels import reference
from engine.layers.cpu_row import HEAD_MULTIPLE, row_functions


def add_norm(sum_TH: Tensor, added_TH: Tensor | None, weight_H: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """Adds to the sum, float32, in place; its RMS norm in `dtype`, [T, H]."""
    functions = row_functions() if dtype is torch.bfloat16 else None
    if functions is None:
        if added_TH is not None:
            sum_TH.add_(added_TH)
        return reference.rms_norm(sum_TH, weight_H, epsilon, dtype)
    assert sum_TH.is_contiguous()
    normed_TH = sum_TH.new_empty(sum_TH.shape, dtype=dtype)
    added = 0 if added_TH is None else (added_TH := added_TH.contiguous()).data_ptr()
    functions.add_norm(
        sum_TH.data_ptr(), added, added_TH is not None and added_TH.dtype is torch.bfloat16, weight_H.data_ptr(),
        normed_TH.data_ptr(), *sum_TH.shape, epsilon, torch.get_num_threads(),
    )  # fmt: skip
    return normed_TH


def can_rotate_and_write(qkv_TW: Tensor, cache: Tensor, head_dim: int) -> bool:
    """Whether `rotate_and_write` takes such rows on this machine."""
    plain = qkv_TW.dtype is cache.dtype is torch.bfloat16 and qkv_TW.is_contiguous() and head_dim % HEAD_MULTIPLE == 0
    return plain and row_functions() is not None


def rotate_and_write(
    qkv_TW: Tensor, norm: Tensor | None, turns: tuple[Tensor, Tensor] | None, slots_T: Tensor, cache: Tensor,
    heads: tuple[int, int, int], epsilon: float,
) -> None:  # fmt: skip
    """Norms each head of q and k with its row of `norm`, rotates it by cos and sin [T, 1, D], and puts K and V into
    their slots (int64) of a layer's cache. `heads`: of q, of k, and their size."""
    functions = row_functions()
    assert functions is not None
    cos, sin = (0, 0) if turns is None else (turns[0].data_ptr(), turns[1].data_ptr())
    functions.rotate_and_write(
        qkv_TW.data_ptr(), 0 if norm is None else norm.data_ptr(), cos, sin, slots_T.data_ptr(), cache.data_ptr(),
        qkv_TW.shape[0], *heads, epsilon, torch.get_num_threads(),
    )  # fmt: skip


def silu_and_multiply(x_T2I: Tensor) -> Tensor:
    """silu of the first half of each row times its second half; the first half may be overwritten."""
    functions = row_functions() if x_T2I.dtype is torch.bfloat16 and x_T2I.is_contiguous() else None
    if functions is None:
        return reference.silu_and_multiply(x_T2I)
    rows, width = x_T2I.shape[0], x_T2I.shape[1] // 2
    gated_TI = x_T2I.new_empty(rows, width)
    functions.silu_and_multiply(x_T2I.data_ptr(), gated_TI.data_ptr(), rows, width, torch.get_num_threads())
    return gated_TI


def read_blocks(cache_LW: Tensor, blocks_B: Tensor, unwritten_U: Tensor, into_LW: Tensor) -> bool:
    """Copies whole blocks of a layer's cache, and clears the rows `unwritten_U` of these. False: nothing does."""
    functions = row_functions()
    if functions is None:
        return False
    blocks, (rows, width) = blocks_B.shape[0], into_LW.shape
    row_bytes = width * into_LW.itemsize
    functions.read_blocks(
        cache_LW.data_ptr(), blocks_B.data_ptr(), blocks, rows // blocks * row_bytes, into_LW.data_ptr(),
        unwritten_U.data_ptr(), unwritten_U.shape[0], row_bytes, torch.get_num_threads(),
    )  # fmt: skip
    return True
