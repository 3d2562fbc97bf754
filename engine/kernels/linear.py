"""y = x·Wᵀ for few rows, where reading the weights takes all the time.

With one row each weight is used once: multiply and add. With more, tensor cores take the weights as first operand
and the rows as the narrow second one. Where the outputs are too few to keep every multiprocessor reading, the inputs
are divided as well, and the float32 parts are added up by the kernel that reads the result.

W and the rows may be in 8 bits a number (e4m3), each output and each row with a factor. One row goes to tensor cores
then as well, and may be brought to 8 bits by every program for itself, which costs less than a kernel before.

T rows, K inputs, N outputs, P parts, I inner size.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.packed_rows import fitting, in_8_bits
from engine.kernels.pdl import release, supports_pdl, wait

LINEAR_ROWS_MAX = 128  # of the kernels here


@dataclass(frozen=True, slots=True)
class LinearTiling:
    """How a kernel goes through W: block_n outputs × block_k inputs at once, the inputs in `parts` parts."""

    block_n: int
    block_k: int
    parts: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class LinearScales:
    """The factors of outputs and rows in 8 bits a number, float32. A row without one is brought to 8 bits here."""

    weight_N1: Tensor
    row_T1: Tensor | None


@triton.jit
def _weights(w, outputs, inputs, N, K, MASKED: tl.constexpr):
    at = w + outputs.to(tl.int64)[:, None] * K + inputs[None, :]
    if MASKED:
        return tl.load(
            at, mask=(outputs < N)[:, None] & (inputs < K)[None, :], other=0.0, eviction_policy="evict_first"
        )
    return tl.load(at, eviction_policy="evict_first")


@triton.jit
def _row(x, inputs, K, MASKED: tl.constexpr):
    values = tl.load(x + inputs, mask=inputs < K, other=0.0) if MASKED else tl.load(x + inputs)
    return values.to(tl.float32)[None, :]


@triton.jit
def _rows(x, rows, inputs, T, K, MASKED: tl.constexpr):
    inside = (rows < T)[None, :] & (inputs < K)[:, None] if MASKED else (rows < T)[None, :]
    return tl.load(x + rows[None, :] * K + inputs[:, None], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["parts"])
def _multiply_row(
    x, w, out, N, K, parts, GATED: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    wait()
    part = tl.program_id(1)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    blocks = tl.cdiv(K, BLOCK_K)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    total_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for block in tl.range(part * blocks // parts, (part + 1) * blocks // parts, num_stages=STAGES):
        inputs = block * BLOCK_K + tl.arange(0, BLOCK_K)
        values = _row(x, inputs, K, MASKED)
        total += _weights(w, outputs, inputs, N, K, MASKED).to(tl.float32) * values
        if GATED:
            total_up += _weights(w + N.to(tl.int64) * K, outputs, inputs, N, K, MASKED).to(tl.float32) * values
    release()
    y = tl.sum(total, 1)
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * tl.sum(total_up, 1)
    tl.store(out + part * N + outputs, y.to(out.dtype.element_ty), mask=outputs < N)


@triton.jit
def _packing_scale(x, K, WIDTH: tl.constexpr):
    """The factor of the only row."""
    inputs = tl.arange(0, WIDTH)
    _, scale = in_8_bits(tl.load(x + inputs, mask=inputs < K, other=0.0).to(tl.float32))
    return scale


@triton.jit(do_not_specialize=["T", "parts"])
def _multiply_rows(
    x, x_scales, w, w_scales, out, T, N, K, parts, GATED: tl.constexpr, MASKED: tl.constexpr, SCALED: tl.constexpr,
    PACKS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Tensor cores add up products of 8 bits in fewer bits than float32 has: only those of 128 inputs at a time.
    PACKS: there is one row, which is not in 8 bits yet, of at most WIDTH inputs."""
    IMPRECISE: tl.constexpr = 128 if SCALED else None
    wait()
    part = tl.program_id(1)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_T)
    blocks = tl.cdiv(K, BLOCK_K)
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    total_up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    if PACKS:
        packing_scale = _packing_scale(x, K, WIDTH)
    for block in tl.range(part * blocks // parts, (part + 1) * blocks // parts, num_stages=STAGES):
        inputs = block * BLOCK_K + tl.arange(0, BLOCK_K)
        values, weights = _rows(x, rows, inputs, T, K, MASKED), _weights(w, outputs, inputs, N, K, MASKED)
        if PACKS:
            values = fitting(values.to(tl.float32), packing_scale).to(weights.dtype)
        total = tl.dot(weights, values, total, input_precision="ieee", max_num_imprecise_acc=IMPRECISE)
        if GATED:
            up = _weights(w + N.to(tl.int64) * K, outputs, inputs, N, K, MASKED)
            total_up = tl.dot(up, values, total_up, input_precision="ieee", max_num_imprecise_acc=IMPRECISE)
    release()
    if SCALED:
        row_factors = packing_scale if PACKS else tl.load(x_scales + rows, mask=rows < T, other=0.0)[None, :]
        total *= tl.load(w_scales + outputs, mask=outputs < N, other=0.0)[:, None] * row_factors
        if GATED:
            total_up *= tl.load(w_scales + N + outputs, mask=outputs < N, other=0.0)[:, None] * row_factors
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * total_up
    at = out + (part * T + rows[:, None]) * N + outputs[None, :]
    tl.store(at, tl.trans(total).to(out.dtype.element_ty), mask=(rows < T)[:, None] & (outputs < N)[None, :])


def multiply(
    x_TK: Tensor, weight_NK: Tensor, tiling: LinearTiling, scales: LinearScales | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """x·Wᵀ as [P, T, N]: in `dtype`, or x's, where P is 1, else float32 parts. Numbers in 8 bits have `scales`; one row
    may be in bfloat16 beside weights in 8 bits."""
    dtype = torch.float32 if tiling.parts > 1 else dtype or x_TK.dtype
    out_PTN = torch.empty(tiling.parts, len(x_TK), len(weight_NK), dtype=dtype, device=x_TK.device)
    _launch(x_TK, weight_NK, scales, out_PTN, len(weight_NK), tiling, gated=False)
    return out_PTN


def multiply_gated(
    x_TK: Tensor, weight_NK: Tensor, tiling: LinearTiling, scales: LinearScales | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """silu(x·Gᵀ)·(x·Uᵀ) as [T, I], where W is G above U; as `multiply`. The tiling has one part."""
    assert tiling.parts == 1
    inner = len(weight_NK) // 2
    out_TI = torch.empty(len(x_TK), inner, dtype=dtype or x_TK.dtype, device=x_TK.device)
    _launch(x_TK, weight_NK, scales, out_TI, inner, tiling, gated=True)
    return out_TI


def _launch(
    x_TK: Tensor, weight_NK: Tensor, scales: LinearScales | None, out: Tensor, outputs: int, tiling: LinearTiling,
    gated: bool,
) -> None:  # fmt: skip
    rows, inputs = x_TK.shape
    assert 1 <= rows <= LINEAR_ROWS_MAX
    assert weight_NK.shape[1] == inputs
    packs = scales is not None and scales.row_T1 is None
    assert weight_NK.dtype == (torch.float8_e4m3fn if packs else x_TK.dtype)
    assert rows == 1 or not packs
    assert x_TK.is_contiguous()
    assert weight_NK.is_contiguous()
    masked = bool(outputs % tiling.block_n or inputs % tiling.block_k)
    grid = (triton.cdiv(outputs, tiling.block_n), tiling.parts)
    if rows == 1 and scales is None:
        _multiply_row[grid](
            x_TK, weight_NK, out, outputs, inputs, tiling.parts, GATED=gated, MASKED=masked,
            BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k, STAGES=tiling.stages, num_warps=tiling.warps,
            launch_pdl=supports_pdl(x_TK.device),
        )  # fmt: skip
        return
    row_scales, weight_scales = x_TK, x_TK
    if scales is not None:
        row_scales, weight_scales = x_TK if scales.row_T1 is None else scales.row_T1, scales.weight_N1
        assert packs or row_scales.shape == (rows, 1)
        assert weight_scales.shape == (len(weight_NK), 1)
    assert row_scales.is_contiguous()
    assert weight_scales.is_contiguous()
    _multiply_rows[grid](
        x_TK, row_scales, weight_NK, weight_scales, out, rows, outputs, inputs, tiling.parts, GATED=gated,
        MASKED=masked, SCALED=scales is not None, PACKS=packs, WIDTH=triton.next_power_of_2(inputs) if packs else 1,
        BLOCK_T=max(16, triton.next_power_of_2(rows)),
        BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k, STAGES=tiling.stages, num_warps=tiling.warps,
        launch_pdl=supports_pdl(x_TK.device),
    )  # fmt: skip
