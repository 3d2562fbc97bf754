"""Every operation in plain torch: the CPU's path, and the oracle that faster kernels are tested against.

A row's result depends on that row alone, to the last bit, however many rows come with it: reductions run along
fixed lengths. How many keys attention gets for a row follows from the row's position (`key_tiles`), not from its chunk
or the rows beside it, and rows come in multiples of ROW_TILE: below that the matrix library picks kernels that add up
in another order.

T rows, H heads, G heads per KV head, N KV heads, D head size, S sequences, Q rows per sequence, L keys, I inner size.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

KEY_TILE = 512  # keys that the attention below takes at once
KEY_STEP, LONG_KEY_STEP = 64, 256  # tiles grow by the one up to a whole tile, by the other after it
ROW_TILE = 4
_VECTOR = 64  # elements that no processor's vectors, some at once, are more than
UNDIVIDED_ELEMENTS = 32768  # at::internal::GRAIN_SIZE: up to here an elementwise call stays on one thread


def rms_norm(x_TH: Tensor, weight_H: Tensor | None, epsilon: float, dtype: torch.dtype) -> Tensor:
    """x ÷ its root mean square · weight, computed in float32, returned in `dtype`. `weight_H` is float32; None: 1."""
    x32_TH = x_TH.float()
    scale_T1 = torch.linalg.vector_norm(x32_TH, 2, -1, True).square_().mul_(1 / x_TH.shape[-1]).add_(epsilon).rsqrt_()
    if weight_H is None:
        return torch.mul(x32_TH, scale_T1, out=x_TH.new_empty(x_TH.shape, dtype=dtype))
    return torch.mul(x32_TH * scale_T1, weight_H, out=x_TH.new_empty(x_TH.shape, dtype=dtype))


def sum_parts(parts_PTN: Tensor) -> Tensor:
    """The parts added up in float32, one after the other: the sum's bits do not depend on who computed which."""
    sum_TN = parts_PTN[0].float()
    for part_TN in parts_PTN[1:]:
        sum_TN = sum_TN + part_TN
    return sum_TN


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


def gelu_and_multiply(x_T2I: Tensor) -> Tensor:
    """gelu, as tanh approximates it, of the first half of each row times its second half; the first is overwritten."""
    gate_TI, up_TI = x_T2I.chunk(2, -1)
    rows = max(1, UNDIVIDED_ELEMENTS // gate_TI.shape[1])
    for first in range(0, len(gate_TI), rows):
        some_TI = gate_TI[first : first + rows]
        some_TI.copy_(torch.nn.functional.gelu(some_TI.contiguous(), approximate="tanh"))
    return gate_TI * up_TI


def cap_(x: Tensor, cap: float) -> Tensor:
    """cap · tanh(x ÷ cap), in place, for so few numbers at once that no call is divided. x is contiguous."""
    flat = x.view(-1)
    for first in range(0, len(flat), UNDIVIDED_ELEMENTS):
        flat[first : first + UNDIVIDED_ELEMENTS].div_(cap).tanh_().mul_(cap)
    return x


def key_tiles(positions_T: NDArray[np.int32], seen_T: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """For each position, which sees keys from seen_T on, the keys first … last−1 that attention gets; a mask hides the
    others."""
    step_T = np.where(positions_T < KEY_TILE, KEY_STEP, LONG_KEY_STEP).astype(np.int32)
    return seen_T // KEY_TILE * KEY_TILE, -(-(positions_T + 1) // step_T) * step_T


def attend(
    q_SHQD: Tensor, k_SHLD: Tensor, v_SHLD: Tensor, mask_S1QL: Tensor, scale: float, cap: float = 0.0,
    sinks_SHQ: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax(q·kᵀ·scale + mask)·v → [S, H, Q, D]. L is a length that key_tiles gives, Q a multiple of ROW_TILE.

    Where cap is not 0, logits are capped: cap · tanh(logit ÷ cap). Sinks, float32, broadcast to [S, H, Q], are logits
    of keys beside the others that have no value.
    """
    assert k_SHLD.shape[2] % KEY_STEP == 0
    assert q_SHQD.shape[2] % ROW_TILE == 0
    if cap:
        return _attend_capped(q_SHQD, k_SHLD, v_SHLD, mask_S1QL, scale, cap)
    attended: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_SHQD, k_SHLD, v_SHLD, 0.0, False, attn_mask=mask_S1QL, scale=scale
    )
    out_SHQD, total_SHQ = attended  # the logarithm of each row's sum of weights
    if sinks_SHQ is None:
        return out_SHQD
    share_SHQ = whole_vectors(torch.sigmoid_, total_SHQ.float() - sinks_SHQ)
    return (out_SHQD * share_SHQ[..., None]).to(out_SHQD.dtype)


def _attend_capped(
    q_SHQD: Tensor, k_SHLD: Tensor, v_SHLD: Tensor, mask_S1QL: Tensor, scale: float, cap: float
) -> Tensor:
    """In float32, one slice after the other, since many slices at once are multiplied in another order than few."""
    out_SHQD = torch.empty(q_SHQD.shape, dtype=q_SHQD.dtype)
    masks_S1QL = mask_S1QL.expand(len(q_SHQD), -1, -1, -1)
    for out_HQD, q_HQD, k_HLD, v_HLD, mask_1QL in zip(out_SHQD, q_SHQD, k_SHLD, v_SHLD, masks_S1QL, strict=True):
        logits_HQL = torch.matmul(q_HQD.float() * scale, k_HLD.float().transpose(1, 2))
        weights_HQL = cap_(logits_HQL, cap).add_(mask_1QL).softmax(-1)
        out_HQD.copy_(torch.matmul(weights_HQL, v_HLD.float()))
    return out_SHQD


def whole_vectors(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise call in place of whole vectors alone: torch computes what is left of one in another way."""
    padded = x.new_zeros(-(-x.numel() // _VECTOR) * _VECTOR)
    flat = padded[: x.numel()].copy_(x.reshape(-1))
    for first in range(0, len(padded), UNDIVIDED_ELEMENTS):
        call(padded[first : first + UNDIVIDED_ELEMENTS])
    return flat.view(x.shape)


def gather_blocks(words_LNW: Tensor, ids_B: Tensor, into_BLW: Tensor, sums_BL: Tensor) -> None:
    """As in engine/kernels/ranks/block_copies.py."""
    torch.index_select(words_LNW.transpose(0, 1), 0, ids_B, out=into_BLW)
    sum_blocks(into_BLW, sums_BL)


def scatter_blocks(blocks_BLW: Tensor, words_LNW: Tensor, ids_B: Tensor) -> None:
    """As in engine/kernels/ranks/block_copies.py."""
    words_LNW.transpose(0, 1).index_copy_(0, ids_B, blocks_BLW)


def sum_blocks(blocks_BLW: Tensor, sums_BL: Tensor) -> None:
    """As in engine/kernels/ranks/block_copies.py: int64 wraps round as uint64 does, but for its shifts."""
    places_LW = torch.arange(1, blocks_BLW[0].numel() + 1, device=blocks_BLW.device).view(blocks_BLW.shape[1:])
    mixed_BLW = blocks_BLW + places_LW * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed_BLW ^= (mixed_BLW >> shift) & ((1 << (64 - shift)) - 1)
        mixed_BLW *= _signed(factor)
    mixed_BLW ^= (mixed_BLW >> 31) & ((1 << 33) - 1)
    torch.sum(mixed_BLW, 2, out=sums_BL)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
