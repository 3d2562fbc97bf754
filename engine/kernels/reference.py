"""Every operation in plain torch: the CPU's path, and the oracle that faster kernels are tested against.

A row's result depends on that row alone, to the last bit, however many rows come with it: reductions run along
fixed lengths. Attention reduces over keys in tiles of KEY_TILE at fixed positions, and hands its rows over in
multiples of ROW_TILE, because below that the matrix library picks kernels that add up in another order.

T rows, H heads, G heads per KV head, N KV heads, D head size, S sequences, Q rows per sequence, L keys, I inner size.
"""

import torch
from torch import Tensor

KEY_TILE = 512
ROW_TILE = 4


def rms_norm(x_TH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """x ÷ its root mean square · weight, computed in float32, in x's dtype. `weight_H` is float32."""
    x32_TH = x_TH.float()
    scale_T1 = torch.rsqrt(x32_TH.square().mean(-1, keepdim=True) + epsilon)
    return ((x32_TH * scale_T1) * weight_H).to(x_TH.dtype)


def rotate(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotary embedding by halves. The tables are float32; `sin` has its first half negated already."""
    half = x_THD.shape[-1] // 2
    swapped_THD = torch.cat((x_THD[..., half:], x_THD[..., :half]), -1)
    return torch.addcmul(x_THD * cos_T1D, swapped_THD, sin_T1D).to(x_THD.dtype)


def silu_and_multiply(x_T2I: Tensor) -> Tensor:
    """silu of the first half of each row times its second half."""
    gate_TI, up_TI = x_T2I.chunk(2, -1)
    return torch.nn.functional.silu(gate_TI) * up_TI


def attend(q_SHQD: Tensor, k_SHLD: Tensor, v_SHLD: Tensor, mask_S1QL: Tensor, scale: float) -> Tensor:
    """softmax(q·kᵀ·scale + mask)·v → [S, H, Q, D]. L is a multiple of KEY_TILE and Q of ROW_TILE."""
    assert k_SHLD.shape[2] % KEY_TILE == 0
    assert q_SHQD.shape[2] % ROW_TILE == 0
    out_SHQD, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_SHQD, k_SHLD, v_SHLD, 0.0, False, attn_mask=mask_S1QL, scale=scale
    )
    return out_SHQD
