"""RMSNorm, fused with adding up what the linear layer before it left in parts. The sum stays float32.

P parts of one result, T rows of a bucket, R wanted rows, H hidden size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.overlap import overlaps, release, wait
from engine.kernels.packed import SAMPLED, WANTED, word

_LATENCY_WARPS = 16  # one row on one SM is bound by latency: more threads, fewer steps for each
_ROWS_OF_LATENCY = 32


@triton.jit
def _normed(x, weight, hidden, epsilon):
    return x * tl.rsqrt(tl.sum(x * x, 0) / hidden + epsilon) * weight


@triton.jit
def _add(total, parts, offset, part_stride, columns, inside, P: tl.constexpr):
    x = tl.load(total + offset + columns, mask=inside, other=0.0)
    for part in tl.static_range(P):
        x += tl.load(parts + part * part_stride + offset + columns, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _add_norm(
    total, parts, weight, out, hidden, part_stride, epsilon, P: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr
):
    release()
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    offset = tl.program_id(0).to(tl.int64) * hidden
    if NORM:
        scale = tl.load(weight + columns, mask=inside, other=0.0)
    wait()
    x = _add(total, parts, offset, part_stride, columns, inside, P)
    if P > 0:
        tl.store(total + offset + columns, x, mask=inside)
    if NORM:
        y = _normed(x, scale, hidden, epsilon)
        tl.store(out + offset + columns, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gather_norm(step, total, weight, out, hidden, epsilon, BLOCK: tl.constexpr):
    release()
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    row = tl.program_id(0)
    scale = tl.load(weight + columns, mask=inside, other=0.0)
    wait()
    if row < tl.load(step + SAMPLED):
        x = tl.load(total + word(step, WANTED, row).to(tl.int64) * hidden + columns, mask=inside, other=0.0)
        y = _normed(x, scale, hidden, epsilon)
        tl.store(out + row.to(tl.int64) * hidden + columns, y.to(out.dtype.element_ty), mask=inside)


def add_norm(sum_TH: Tensor, parts_PTH: Tensor | None, weight_H: Tensor, epsilon: float, out_TH: Tensor) -> None:
    """sum += Σ parts, in place; out = sum ÷ its root mean square · weight."""
    _check(sum_TH, weight_H, out_TH)
    assert out_TH.shape == sum_TH.shape
    _launch_add(sum_TH, parts_PTH, weight_H, epsilon, out_TH, norm=True)


def add(sum_TH: Tensor, parts_PTH: Tensor) -> None:
    """sum += Σ parts, in place."""
    _launch_add(sum_TH, parts_PTH, sum_TH, 0.0, sum_TH, norm=False)


def gather_norm(step: Tensor, sum_TH: Tensor, weight_H: Tensor, epsilon: float, out_RH: Tensor) -> None:
    """The norm of the step's wanted rows; rows of `out` past their number stay as they are."""
    _check(sum_TH, weight_H, out_RH)
    assert step.dtype == torch.int32
    rows, hidden = out_RH.shape
    block = triton.next_power_of_2(hidden)
    _gather_norm[(rows,)](
        step,
        sum_TH,
        weight_H,
        out_RH,
        hidden,
        epsilon,
        BLOCK=block,
        num_warps=_warps(rows, block),
        launch_pdl=overlaps(sum_TH.device),
    )


def _launch_add(
    sum_TH: Tensor, parts_PTH: Tensor | None, weight_H: Tensor, epsilon: float, out_TH: Tensor, norm: bool
) -> None:
    rows, hidden = sum_TH.shape
    assert sum_TH.dtype == torch.float32
    count, stride = 0, 0
    if parts_PTH is not None:
        count, stride = len(parts_PTH), parts_PTH.stride(0)
        assert parts_PTH.shape[1:] == sum_TH.shape
        assert parts_PTH.stride()[1:] == (hidden, 1)
    block = triton.next_power_of_2(hidden)
    _add_norm[(rows,)](
        sum_TH, sum_TH if parts_PTH is None else parts_PTH, weight_H, out_TH, hidden, stride, epsilon,
        P=count, NORM=norm, BLOCK=block, num_warps=_warps(rows, block), launch_pdl=overlaps(sum_TH.device),
    )  # fmt: skip


def _check(sum_TH: Tensor, weight_H: Tensor, out: Tensor) -> None:
    assert sum_TH.dtype == weight_H.dtype == torch.float32
    assert weight_H.shape == sum_TH.shape[1:] == out.shape[1:]
    assert sum_TH.is_contiguous()
    assert weight_H.is_contiguous()
    assert out.is_contiguous()


def _warps(rows: int, block: int) -> int:
    most = _LATENCY_WARPS if rows <= _ROWS_OF_LATENCY else 4
    return max(1, min(most, block // 128))
