"""Rows in 8 bits a number (e4m3), each with a factor, in one tensor [T, K + 4] of such numbers: what a kernel that has
a whole row at hand writes for a matmul that would bring it to 8 bits otherwise.

The memory is that of the rows' numbers one behind the other, and then of their factors in float32.

T rows, K inputs.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

PACKED_MULTIPLE: Final = 4  # of inputs, so that factors are aligned
_FACTOR_BYTES: Final = 4
MAX = tl.constexpr(448.0)  # the largest finite float8_e4m3fn
LEAST = tl.constexpr(1e-12)  # the largest of a row of zeros counts as this


def new_packed(rows: int, inputs: int, device: torch.device) -> Tensor:
    """Memory for packed rows, which nobody has written yet."""
    assert inputs % PACKED_MULTIPLE == 0
    return torch.empty(rows, inputs + _FACTOR_BYTES, dtype=torch.float8_e4m3fn, device=device)


def is_packed(x_TK: Tensor) -> bool:
    """Whether rows are packed rather than in a model's dtype."""
    return x_TK.dtype == torch.float8_e4m3fn


def numbers_of(packed_TP: Tensor) -> Tensor:
    """The numbers, [T, K], in the same memory."""
    rows, inputs = len(packed_TP), packed_TP.shape[1] - _FACTOR_BYTES
    assert packed_TP.is_contiguous()
    return packed_TP.view(-1)[: rows * inputs].view(rows, inputs)


def factors_of(packed_TP: Tensor) -> Tensor:
    """The factors, float32 [T, 1], in the same memory."""
    rows, inputs = len(packed_TP), packed_TP.shape[1] - _FACTOR_BYTES
    assert packed_TP.is_contiguous()
    return packed_TP.view(-1)[rows * inputs :].view(torch.float32).view(rows, 1)


@triton.jit
def fitting(numbers, scale):
    """Float32 numbers ÷ their factor, no larger than 8 bits have them."""
    return tl.minimum(tl.maximum(numbers / scale, -MAX), MAX)


@triton.jit
def in_8_bits(row):
    """A row's float32 numbers as they fit 8 bits, and its factor. What is no number leaves its row none."""
    largest = tl.max(tl.where(row == row, tl.abs(row), float("inf")), 0)
    scale = tl.maximum(largest, LEAST) / MAX
    return fitting(row, scale), scale
