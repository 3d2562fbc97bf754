"""RMSNorm, fused with adding up the parts of the linear layer before it, the sum in float32, where families do so with
a norm of what is added; and the gathering of the rows of a step whose logits are needed. Rows go to 8 bits a number at
once where a matmul takes them so.

P parts of one result, T rows of a bucket, R gathered rows, H hidden size, W width of all heads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.packed_rows import factors_of, in_8_bits, is_packed, numbers_of
from engine.kernels.pdl import release, supports_pdl, wait
from engine.kernels.step_layout import LOGITS_ROWS, SAMPLED, word

_LATENCY_WARPS = 16  # one row on one SM is bound by latency: more threads, fewer steps for each
_LATENCY_ROWS_MAX = 32
_GATHERED = 1024  # columns at once


@triton.jit
def _add(total, parts, offset, part_stride, columns, inside, P: tl.constexpr):
    x = tl.load(total + offset + columns, mask=inside, other=0.0)
    for part in tl.static_range(P):
        x += tl.load(parts + part * part_stride + offset + columns, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _add_normed(
    total, parts, behind, offset, part_stride, columns, inside, hidden, epsilon, P: tl.constexpr
):  # fmt: skip
    x = tl.load(parts + offset + columns, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, P):
        x += tl.load(parts + part * part_stride + offset + columns, mask=inside, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / hidden + epsilon) * tl.load(behind + columns, mask=inside, other=0.0)
    return x + tl.load(total + offset + columns, mask=inside, other=0.0)


@triton.jit
def _add_norm(
    total, parts, weight, behind, out, factors, hidden, part_stride, epsilon, P: tl.constexpr, BEHIND: tl.constexpr,
    PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    release()
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    offset = tl.program_id(0).to(tl.int64) * hidden
    scale = tl.load(weight + columns, mask=inside, other=0.0)
    wait()
    if BEHIND:
        x = _add_normed(total, parts, behind, offset, part_stride, columns, inside, hidden, epsilon, P)
    else:
        x = _add(total, parts, offset, part_stride, columns, inside, P)
    if P > 0:
        tl.store(total + offset + columns, x, mask=inside)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / hidden + epsilon) * scale
    if PACKED:
        y, factor = in_8_bits(y)
        tl.store(factors + tl.program_id(0), factor)
    tl.store(out + offset + columns, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gather(step, total, attended, total_out, attended_out, hidden, width, BLOCK: tl.constexpr):
    release()
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0)
    if row < tl.load(step + SAMPLED):
        wanted = word(step, LOGITS_ROWS, row).to(tl.int64)
        wait()
        x = tl.load(total + wanted * hidden + columns, mask=columns < hidden, other=0.0)
        tl.store(total_out + row.to(tl.int64) * hidden + columns, x, mask=columns < hidden)
        y = tl.load(attended + wanted * width + columns, mask=columns < width, other=0.0)
        tl.store(attended_out + row.to(tl.int64) * width + columns, y, mask=columns < width)
    wait()  # without a row too: the next kernel that waits for this one waits for all before it


def add_norm(
    sum_TH: Tensor, parts_PTH: Tensor | None, weight_H: Tensor, epsilon: float, out_TH: Tensor,
    behind_H: Tensor | None = None,
) -> None:  # fmt: skip
    """Adds the parts to the sum, in place, and writes sum ÷ its root mean square · weight, into packed rows
    (packed_rows.py) too. With `behind_H`, what the parts add up to is normed by that weight before it is added."""
    rows, hidden = sum_TH.shape
    assert sum_TH.dtype == weight_H.dtype == torch.float32
    assert weight_H.shape == (hidden,)
    if behind_H is not None:
        assert behind_H.shape == weight_H.shape
        assert behind_H.dtype == torch.float32
        assert parts_PTH is not None
    packed = is_packed(out_TH)
    numbers_TH, factors_T1 = (numbers_of(out_TH), factors_of(out_TH)) if packed else (out_TH, sum_TH)
    assert numbers_TH.shape == sum_TH.shape
    for each in (sum_TH, weight_H, out_TH):
        assert each.is_contiguous()
    count, stride = 0, 0
    if parts_PTH is not None:
        count, stride = len(parts_PTH), parts_PTH.stride(0)
        assert parts_PTH.shape[1:] == sum_TH.shape
        assert parts_PTH.stride()[1:] == (hidden, 1)
    block = triton.next_power_of_2(hidden)
    _add_norm[(rows,)](
        sum_TH, sum_TH if parts_PTH is None else parts_PTH, weight_H, behind_H, numbers_TH, factors_T1,
        hidden, stride, epsilon, P=count, BEHIND=behind_H is not None, PACKED=packed, BLOCK=block,
        num_warps=_warps(rows, block), launch_pdl=supports_pdl(sum_TH.device),
    )  # fmt: skip


def gather(step: Tensor, sum_TH: Tensor, attended_TW: Tensor, sum_RH: Tensor, attended_RW: Tensor) -> None:
    """Copies the rows of both whose logits the step needs; later rows stay as they are."""
    rows, hidden = sum_RH.shape
    width = attended_RW.shape[1]
    assert step.dtype == torch.int32
    assert sum_TH.dtype == sum_RH.dtype
    assert attended_TW.dtype == attended_RW.dtype
    assert sum_TH.shape[1] == hidden
    assert attended_TW.shape[1] == width
    for each in (sum_TH, attended_TW, sum_RH, attended_RW):
        assert each.is_contiguous()
    block = min(_GATHERED, triton.next_power_of_2(max(hidden, width)))
    _gather[rows, triton.cdiv(max(hidden, width), block)](
        step, sum_TH, attended_TW, sum_RH, attended_RW, hidden, width, BLOCK=block,
        launch_pdl=supports_pdl(sum_TH.device),
    )  # fmt: skip


def _warps(rows: int, block: int) -> int:
    max_warps = _LATENCY_WARPS if rows <= _LATENCY_ROWS_MAX else 4
    return max(1, min(max_warps, block // 128))
