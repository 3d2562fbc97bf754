"""Every operation in plain torch: the CPU's path, and the oracle that faster kernels are tested against.

A row's result depends on that row alone, to the last bit, however many rows come with it: reductions run along
fixed lengths. How many keys attention gets for a row follows from the row's position (`key_spans`), not from its chunk
or the rows beside it, and rows come in multiples of ROW_TILE: below that the matrix library picks kernels that add up
in another order.

T rows, H heads, G heads per KV head, N KV heads, D head size, S sequences, Q rows per sequence, L keys, I inner size.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

KEY_TILE = 512  # keys that the attention below takes at once
KEY_STEP, LONG_KEY_STEP = 64, 256  # spans grow by the one up to a whole tile, by the other after it
ROW_TILE = 4
UNDIVIDED_ELEMENTS = 32768  # at::internal::GRAIN_SIZE: up to here an elementwise call stays on one thread


def rms_norm(x_TH: Tensor, weight_H: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """x ÷ its root mean square · weight, computed in float32, returned in `dtype`. `weight_H` is float32."""
    x32_TH = x_TH.float()
    scale_T1 = torch.linalg.vector_norm(x32_TH, 2, -1, True).square_().mul_(1 / x_TH.shape[-1]).add_(epsilon).rsqrt_()
    return torch.mul(x32_TH * scale_T1, weight_H, out=x_TH.new_empty(x_TH.shape, dtype=dtype))


def rotate_(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> None:
    """Rotates by halves, in place (rotary embedding). The tables are float32; `sin` has its first half negated."""
    x32_THD = x_THD.float()
    swapped_THD = x32_THD.roll(x_THD.shape[-1] // 2, -1)
    x_THD.copy_((x32_THD * cos_T1D).add_(swapped_THD.mul_(sin_T1D)))


def silu_and_multiply(x_T2I: Tensor) -> Tensor:
    """silu of the first half of each row times its second half; the first half is overwritten.

    torch divides a long elementwise call between threads at any element, and computes what is left of a vector with
    another exp than whole vectors. So silu is called for so few rows that it is never divided.
    """
    gate_TI, up_TI = x_T2I.chunk(2, -1)
    rows = max(1, UNDIVIDED_ELEMENTS // gate_TI.shape[1])
    for first in range(0, len(gate_TI), rows):
        torch.nn.functional.silu(gate_TI[first : first + rows], inplace=True)
    return gate_TI * up_TI


def key_spans(positions_T: NDArray[np.int32], window: int | None) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """For each position the keys first … last−1 that attention gets; a mask hides those that it must not see."""
    step_T = np.where(positions_T < KEY_TILE, KEY_STEP, LONG_KEY_STEP).astype(np.int32)
    last_T = -(-(positions_T + 1) // step_T) * step_T
    if window is None:
        return np.zeros_like(last_T), last_T
    return np.maximum(0, positions_T + 1 - window) // KEY_TILE * KEY_TILE, last_T


def attend(q_SHQD: Tensor, k_SHLD: Tensor, v_SHLD: Tensor, mask_S1QL: Tensor, scale: float) -> Tensor:
    """softmax(q·kᵀ·scale + mask)·v → [S, H, Q, D]. L is a length that key_spans gives, Q a multiple of ROW_TILE."""
    assert k_SHLD.shape[2] % KEY_STEP == 0
    assert q_SHQD.shape[2] % ROW_TILE == 0
    out_SHQD: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_SHQD, k_SHLD, v_SHLD, 0.0, False, attn_mask=mask_S1QL, scale=scale
    )[0]
    return out_SHQD
