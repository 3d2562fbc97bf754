"""silu(gate) · up, between the two matmuls of a gated MLP. T rows, I inner size."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.pdl import release, supports_pdl, wait


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
