"""What is done number by number: silu(gate) · up or gelu(gate) · up between the two matmuls of a gated MLP, silu's also
into rows in 8 bits a number, and the cap of logits.

P parts, T rows, I inner size, R wanted rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.packed_rows import factors_of, in_8_bits, new_packed, numbers_of
from engine.kernels.pdl import release, supports_pdl, wait

_CAPPED_AT_ONCE = 4096
_PACKED_WARPS_MAX = 16  # a program has a whole row


@triton.jit
def _silu_and_multiply(x, out, inner, BLOCK: tl.constexpr):
    release()
    wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < inner
    gate = tl.load(x + row * 2 * inner + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * inner + inner + columns, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * inner + columns, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_and_pack(x, out, factors, inner, BLOCK: tl.constexpr):
    release()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < inner
    wait()
    gate = tl.load(x + row * 2 * inner + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * inner + inner + columns, mask=inside, other=0.0).to(tl.float32)
    y, factor = in_8_bits(gate / (1.0 + tl.exp(-gate)) * up)
    tl.store(factors + row, factor)
    tl.store(out + row * inner + columns, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gelu_and_multiply(parts, out, inner, part_stride, P: tl.constexpr, BLOCK: tl.constexpr):
    release()
    wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < inner
    at = parts + row * 2 * inner + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + inner, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, P):
        gate += tl.load(at + part * part_stride, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(at + part * part_stride + inner, mask=inside, other=0.0).to(tl.float32)
    slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 · √(2 ÷ π): 1 + tanh by one exponential
    y = gate / (1.0 + tl.exp(-slope)) * up
    tl.store(out + row * inner + columns, y.to(out.dtype.element_ty), mask=inside)


def gelu_and_multiply(parts_PT2I: Tensor, dtype: torch.dtype) -> Tensor:
    """Adds up the parts; gelu, as tanh approximates it, of the first half of each row · its second half, [T, I]."""
    count, rows, width = parts_PT2I.shape
    assert width % 2 == 0
    assert parts_PT2I.stride()[1:] == (width, 1)
    inner = width // 2
    out_TI = torch.empty(rows, inner, dtype=dtype, device=parts_PT2I.device)
    block = min(2048, triton.next_power_of_2(inner))
    _gelu_and_multiply[rows, triton.cdiv(inner, block)](
        parts_PT2I, out_TI, inner, parts_PT2I.stride(0), P=count, BLOCK=block,
        launch_pdl=supports_pdl(out_TI.device),
    )  # fmt: skip
    return out_TI


def silu_and_multiply(x_T2I: Tensor) -> Tensor:
    """silu of the first half of each row · its second half, [T, I], in float32 between."""
    rows, width = x_T2I.shape
    assert width % 2 == 0
    assert x_T2I.is_contiguous()
    inner = width // 2
    out_TI = torch.empty(rows, inner, dtype=x_T2I.dtype, device=x_T2I.device)
    block = min(2048, triton.next_power_of_2(inner))
    _silu_and_multiply[rows, triton.cdiv(inner, block)](
        x_T2I, out_TI, inner, BLOCK=block, launch_pdl=supports_pdl(out_TI.device)
    )
    return out_TI


def silu_and_pack(x_T2I: Tensor) -> Tensor:
    """The same as packed rows (packed_rows.py)."""
    rows, width = x_T2I.shape
    assert width % 2 == 0
    assert x_T2I.is_contiguous()
    inner = width // 2
    packed_TP = new_packed(rows, inner, x_T2I.device)
    block = triton.next_power_of_2(inner)
    _silu_and_pack[(rows,)](
        x_T2I, numbers_of(packed_TP), factors_of(packed_TP), inner, BLOCK=block,
        num_warps=max(1, min(_PACKED_WARPS_MAX, block // 512)), launch_pdl=supports_pdl(x_T2I.device),
    )  # fmt: skip
    return packed_TP


@triton.jit
def _cap(logits, numbers, cap, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + at, mask=at < numbers, other=0.0).to(tl.float32)
    y = cap * (1.0 - 2.0 / (tl.exp(x * (2.0 / cap)) + 1.0))  # cap · tanh(x ÷ cap)
    tl.store(logits + at, y.to(logits.dtype.element_ty), mask=at < numbers)


def cap_logits(logits_RV: Tensor, cap: float) -> Tensor:
    """cap · tanh(logit ÷ cap), in place."""
    assert logits_RV.is_contiguous()
    assert logits_RV.dtype in (torch.float32, torch.bfloat16, torch.float16)
    assert cap > 0
    _cap[(triton.cdiv(logits_RV.numel(), _CAPPED_AT_ONCE),)](logits_RV, logits_RV.numel(), cap, BLOCK=_CAPPED_AT_ONCE)
    return logits_RV
