"""Rows in 8 bits a number (e4m3), each with a factor, or with one for each 128 inputs: what tensor cores take beside
weights of 8 bits. Factors follow from the row alone; a row with a number that is not finite gives nothing that is.

T rows, K inputs, B blocks of 128 inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.experts.grouped_linear import SCALE_INPUTS, ExpertRows
from engine.kernels.packed_rows import LEAST, MAX, fitting
from engine.kernels.pdl import release, supports_pdl, wait


@triton.jit
def _quantize(x, out, scales, K, B, WHOLE: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr):
    release()
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCKS)
    inputs = blocks[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    wait()
    values = tl.load(x + row * K + inputs, mask=inputs < K, other=0.0).to(tl.float32)
    # What is no number leaves its row none: a maximum alone would drop it.
    largest = tl.maximum(tl.max(tl.where(values == values, tl.abs(values), float("inf")), 1), LEAST)
    if WHOLE:
        scale = tl.max(largest, 0) / MAX
        values = fitting(values, scale)
        tl.store(scales + row, scale)
    else:
        block_scales = largest / MAX
        values = fitting(values, block_scales[:, None])
        tl.store(scales + row * B + blocks, block_scales, mask=blocks < B)
    tl.store(out + row * K + inputs, values.to(out.dtype.element_ty), mask=inputs < K)


def quantize_rows(x_TK: Tensor, blocks: int) -> ExpertRows:
    """The rows in 8 bits. `blocks` is how many factors a row has: 1, or one for each 128 inputs."""
    rows, inputs = x_TK.shape
    assert x_TK.is_contiguous()
    assert blocks in (1, triton.cdiv(inputs, SCALE_INPUTS))
    out_TK = torch.empty(rows, inputs, dtype=torch.float8_e4m3fn, device=x_TK.device)
    scales_TB = torch.empty(rows, blocks, dtype=torch.float32, device=x_TK.device)
    _quantize[(rows,)](
        x_TK, out_TK, scales_TB, inputs, blocks, WHOLE=blocks == 1, WIDTH=SCALE_INPUTS,
        BLOCKS=triton.next_power_of_2(triton.cdiv(inputs, SCALE_INPUTS)), num_warps=4,
        launch_pdl=supports_pdl(x_TK.device),
    )  # fmt: skip
    return ExpertRows(out_TK, scales_TB)
