"""y = x·Wᵀ of numbers in 8 bits (e4m3), each output and each row with a factor, in tiles that keep tensor cores
busy: for rows too many for kernels/linear.py and too few for the library to have a tile for every multiprocessor.

Programs go through their tiles one after the other and load the next tile's numbers while they write one. The inputs
may be divided: the float32 parts are added up by the kernel that reads the result. Tensor cores add up products of 8
bits in fewer bits than float32 has: `exact` brings sums to float32 every 128 inputs, else only a part's whole sum is.

T rows, K inputs, N outputs, P parts.
"""

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.linear import LinearScales
from engine.kernels.pdl import release, supports_pdl, wait

SIZE_MULTIPLE: Final = 16  # of inputs, by which a tile's rows lie apart
_TOGETHER = tl.constexpr(8)  # tiles of rows that go with one tile of outputs before the next comes
_PROGRAMS: Final = 2  # without a GPU, in the interpreter


@dataclass(frozen=True, slots=True)
class Fp8Tiling:
    """How the kernel goes through a product: block_t rows × block_n outputs, block_k inputs at once, the inputs in
    `parts` parts."""

    block_t: int
    block_n: int
    block_k: int
    parts: int
    stages: int
    warps: int
    exact: bool


@triton.jit
def _halves(total):
    """The left and the right half of a tile's outputs."""
    return tl.split(tl.permute(tl.reshape(total, [total.shape[0], 2, total.shape[1] // 2]), [0, 2, 1]))


@triton.jit
def _store(total, w_scales, out, part, rows, first_output, T, N):
    """A narrow piece of a tile: a whole one would take as much shared memory as a stage on its way to rows."""
    outputs = first_output + tl.arange(0, total.shape[1])
    total *= tl.load(w_scales + outputs, mask=outputs < N, other=0.0)[None, :]
    at = out + (part * T + rows[:, None]).to(tl.int64) * N + outputs[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(rows < T)[:, None] & (outputs < N)[None, :])


@triton.jit(do_not_specialize=["T", "row_tiles", "parts"])
def _multiply_tiles(
    x, x_scales, w, w_scales, out, T, N, K, row_tiles, output_tiles, parts, EXACT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    IMPRECISE: tl.constexpr = min(128, BLOCK_K) if EXACT else None
    release()
    wait()
    steps = tl.cdiv(K, BLOCK_K) // parts
    for item in tl.range(tl.program_id(0), row_tiles * output_tiles * parts, tl.num_programs(0), flatten=True):
        part, tile = item % parts, item // parts
        chunk = tile // (_TOGETHER * output_tiles)
        together = tl.minimum(_TOGETHER, row_tiles - chunk * _TOGETHER)
        within = tile % (_TOGETHER * output_tiles)
        first_row = (chunk * _TOGETHER + within % together) * BLOCK_T
        first_output = within // together * BLOCK_N
        total = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        for step in range(steps):
            first_input = (part * steps + step) * BLOCK_K
            values = x.load([first_row, first_input])
            weights = w.load([first_output, first_input])
            total = tl.dot(values, weights.T, total, max_num_imprecise_acc=IMPRECISE)
        rows = first_row + tl.arange(0, BLOCK_T)
        total *= tl.load(x_scales + rows, mask=rows < T, other=0.0)[:, None]
        left, right = _halves(total)
        if BLOCK_N > 128:
            piece, other = _halves(left)
            _store(piece, w_scales, out, part, rows, first_output, T, N)
            _store(other, w_scales, out, part, rows, first_output + BLOCK_N // 4, T, N)
            piece, other = _halves(right)
            _store(piece, w_scales, out, part, rows, first_output + BLOCK_N // 2, T, N)
            _store(other, w_scales, out, part, rows, first_output + 3 * BLOCK_N // 4, T, N)
        else:
            _store(left, w_scales, out, part, rows, first_output, T, N)
            _store(right, w_scales, out, part, rows, first_output + BLOCK_N // 2, T, N)


def multiply(x_TK: Tensor, weight_NK: Tensor, tiling: Fp8Tiling, scales: LinearScales, dtype: torch.dtype) -> Tensor:
    """x·Wᵀ as [P, T, N]: in `dtype` where P is 1, else float32 parts."""
    (rows, inputs), outputs = x_TK.shape, len(weight_NK)
    assert weight_NK.shape[1] == inputs
    assert inputs % SIZE_MULTIPLE == 0
    assert x_TK.dtype == weight_NK.dtype == torch.float8_e4m3fn
    assert triton.cdiv(inputs, tiling.block_k) % tiling.parts == 0, "parts are equal"
    assert scales.row_T1 is not None
    for each in (x_TK, weight_NK, scales.row_T1, scales.weight_N1):
        assert each.is_contiguous()
    assert scales.row_T1.shape == (rows, 1)
    assert scales.weight_N1.shape == (outputs, 1)
    dtype = torch.float32 if tiling.parts > 1 else dtype
    out_PTN = torch.empty(tiling.parts, rows, outputs, dtype=dtype, device=x_TK.device)
    row_tiles, output_tiles = triton.cdiv(rows, tiling.block_t), triton.cdiv(outputs, tiling.block_n)
    programs = min(_multiprocessors(x_TK.device), row_tiles * output_tiles * tiling.parts)
    _multiply_tiles[(programs,)](
        _tensor_map(x_TK, tiling.block_t, tiling.block_k), scales.row_T1,
        _tensor_map(weight_NK, tiling.block_n, tiling.block_k), scales.weight_N1, out_PTN, rows, outputs, inputs,
        row_tiles, output_tiles, tiling.parts, EXACT=tiling.exact, BLOCK_T=tiling.block_t, BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k, num_warps=tiling.warps, num_stages=tiling.stages,
        launch_pdl=supports_pdl(x_TK.device),
    )  # fmt: skip
    return out_PTN


def _tensor_map(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """The map of a contiguous matrix, with strides of its shape: torch gives any stride for a single row."""
    return TensorDescriptor(tensor, list(tensor.shape), [tensor.shape[1], 1], [rows, columns])


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count
