"""From the qkv matmul to attention in one pass: parts are added up, q and k normed and rotated as the layer does, K and
V written into their slots.

P parts, T rows of a bucket, W = (H + 2·N)·D, H heads, N KV heads, D head size, S slots.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.pdl import release, supports_pdl, wait
from engine.kernels.step_layout import POSITIONS, ROWS, word
from engine.step.layout import GroupWord, group_word

_HEADS_PER_PROGRAM = 16
_FP8_MAX = tl.constexpr(448.0)  # the largest finite float8_e4m3fn


@triton.jit
def _half(parts, offset, part_stride, inside, P: tl.constexpr):
    x = tl.load(parts + offset, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, P):
        x += tl.load(parts + part * part_stride + offset, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _stored(x, FP8: tl.constexpr):
    return tl.minimum(tl.maximum(x, -_FP8_MAX), _FP8_MAX) if FP8 else x


@triton.jit
def _rotate_and_write(
    step, parts, qk_norm, cos, sin, q, kv, part_stride, epsilon, SLOTS: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr,
    BLOCK_H: tl.constexpr, HALF_D: tl.constexpr, ROTATED: tl.constexpr, PERIOD: tl.constexpr,
    ROTATED_NORM: tl.constexpr, UNIT: tl.constexpr, GAIN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    release()
    row = tl.program_id(0)
    if row < tl.load(step + ROWS):
        heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        first = tl.arange(0, HALF_D)[None, :]  # columns of a head's first half; the second's are D ÷ 2 further
        inside = (heads < HEADS + 2 * KV_HEADS) & (first < D // 2)
        turned = inside & (heads < HEADS + KV_HEADS)
        position = word(step, POSITIONS, row).to(tl.int64)
        slot = word(step, SLOTS, row).to(tl.int64)
        if ROTATED:
            place = position % PERIOD if PERIOD else position
            c = tl.load(cos + place * D + first, mask=first < D // 2, other=0.0)
            s = tl.load(sin + place * D + first + D // 2, mask=first < D // 2, other=0.0)
        wait()  # for the parts: all above depends on the step and the tables alone
        offset = row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * D) + heads * D + first
        x1 = _half(parts, offset, part_stride, inside, P)
        x2 = _half(parts, offset + D // 2, part_stride, inside, P)
        if NORM:
            scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + epsilon)[:, None]
            x1 = tl.where(turned, x1 * scale * tl.load(qk_norm + heads * D + first, mask=turned, other=0.0), x1)
            x2 = tl.where(
                turned, x2 * scale * tl.load(qk_norm + heads * D + first + D // 2, mask=turned, other=0.0), x2
            )
            # Rounded as the unfused operations round between them.
            x1 = x1.to(q.dtype.element_ty).to(tl.float32)
            x2 = x2.to(q.dtype.element_ty).to(tl.float32)
        y1, y2 = x1, x2
        if ROTATED:
            y1 = tl.where(turned, x1 * c - x2 * s, x1)
            y2 = tl.where(turned, x2 * c + x1 * s, x2)
        if ROTATED_NORM:
            y1 = y1.to(q.dtype.element_ty).to(tl.float32)
            y2 = y2.to(q.dtype.element_ty).to(tl.float32)
            scale = tl.rsqrt((tl.sum(y1 * y1, 1) + tl.sum(y2 * y2, 1)) / D + epsilon)[:, None]
            y1 = tl.where(turned, y1 * scale, y1)
            y2 = tl.where(turned, y2 * scale, y2)
        if UNIT:
            heat = tl.log(tl.floor((position + AHEAD).to(tl.float32) / UNIT) + 1.0) * GAIN + 1.0
            y1 = tl.where(heads < HEADS, y1 * heat, y1)
            y2 = tl.where(heads < HEADS, y2 * heat, y2)
        is_q = inside & (heads < HEADS)
        at = q + row.to(tl.int64) * (HEADS * D) + heads * D + first
        tl.store(at, y1.to(q.dtype.element_ty), mask=is_q)
        tl.store(at + D // 2, y2.to(q.dtype.element_ty), mask=is_q)
        is_kv = inside & (heads >= HEADS)
        at = kv + slot * (2 * KV_HEADS * D) + (heads - HEADS) * D + first
        tl.store(at, _stored(y1, FP8).to(kv.dtype.element_ty), mask=is_kv)
        tl.store(at + D // 2, _stored(y2, FP8).to(kv.dtype.element_ty), mask=is_kv)
    wait()  # without a row too: the next kernel that waits for this one waits for all before it


@dataclass(frozen=True, slots=True)
class Rotation:
    """How a layer turns q and k, by the tables of models/rope.py: float32, the first half of sin negated.

    tables     cos and sin, [P, D]; None: nothing turns.
    period     positions repeat after so many in the tables; 0: they never do.
    normed     each head is normed after it is turned.
    unit …     queries are multiplied by 1 + gain · log(1 + ⌊(position + ahead) ÷ unit⌋), unless unit is 0.
    """

    tables: tuple[Tensor, Tensor] | None
    period: int = 0
    normed: bool = False
    unit: int = 0
    gain: float = 0.0
    ahead: int = 1


def rotate_and_write(
    step: Tensor, parts_PTW: Tensor, qk_norm_HD: Tensor | None, epsilon: float, rotation: Rotation, q_THD: Tensor,
    kv_SW: Tensor, group: int,
) -> None:  # fmt: skip
    """Adds up the parts, writes q rotated, and K rotated and V into the group's slots of the step's rows; later rows
    stay.

    qk_norm_HD, float32, has a row for each head of q and of k. kv_SW is one layer of the pool, of q's dtype or
    float8_e4m3fn, which saturates.
    """
    count, rows, width = parts_PTW.shape
    heads, head_dim = q_THD.shape[1:]
    kv_heads = (width // head_dim - heads) // 2
    fp8 = kv_SW.dtype == torch.float8_e4m3fn
    assert width == (heads + 2 * kv_heads) * head_dim
    assert q_THD.shape[0] == rows
    assert kv_SW.shape[1] == 2 * kv_heads * head_dim
    assert kv_SW.dtype == q_THD.dtype or fp8
    assert step.dtype == torch.int32
    assert parts_PTW.stride()[1:] == (width, 1)
    assert q_THD.is_contiguous()
    assert kv_SW.is_contiguous()
    for table_PD in rotation.tables or ():
        assert table_PD.dtype == torch.float32
        assert table_PD.shape[1] == head_dim
        assert table_PD.is_contiguous()
    cos_PD, sin_PD = rotation.tables or (None, None)
    if qk_norm_HD is not None:
        assert qk_norm_HD.shape == (heads + kv_heads, head_dim)
        assert qk_norm_HD.dtype == torch.float32
    block = min(_HEADS_PER_PROGRAM, triton.next_power_of_2(heads + 2 * kv_heads))
    _rotate_and_write[rows, triton.cdiv(heads + 2 * kv_heads, block)](
        step, parts_PTW, cos_PD if qk_norm_HD is None else qk_norm_HD, cos_PD, sin_PD, q_THD, kv_SW,
        parts_PTW.stride(0), epsilon, SLOTS=group_word(group, GroupWord.SLOTS), HEADS=heads, KV_HEADS=kv_heads,
        D=head_dim, P=count, NORM=qk_norm_HD is not None, FP8=fp8, BLOCK_H=block,
        HALF_D=triton.next_power_of_2(head_dim // 2), ROTATED=rotation.tables is not None, PERIOD=rotation.period,
        ROTATED_NORM=rotation.normed, UNIT=rotation.unit, GAIN=rotation.gain, AHEAD=rotation.ahead,
        launch_pdl=supports_pdl(q_THD.device),
    )  # fmt: skip
