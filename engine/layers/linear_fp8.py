"""A linear layer's weight in 8 bits a number on a GPU, and its matmul for any number of rows.

Rows are brought to 8 bits themselves, each with a factor or with one for each 128 inputs, as checkpoints of this kind
mean it: tensor cores multiply such numbers at twice the rate of bfloat16's (weights/fp8.py says where they do).

T rows, K inputs, N outputs, P parts, I inner size.
"""

from typing import Final

import torch
from torch import Tensor

from engine.kernels import linear
from engine.kernels.elementwise import gelu_and_multiply, silu_and_multiply
from engine.kernels.experts import grouped_linear
from engine.kernels.experts.grouped_linear import ExpertRows, ExpertWeights
from engine.kernels.experts.grouped_tuning import has_large_blocks, tile_rows, tiling_for
from engine.kernels.experts.quantize_rows import quantize_rows
from engine.kernels.linear import LINEAR_ROWS_MAX, LinearScales
from engine.kernels.tuning import select_fp8_tiling
from engine.layers.fp8_weight import Fp8Weight
from engine.layers.linear_gpu import in_one_part

_LIBRARY_MULTIPLE: Final = 16  # of the sizes of a matrix that the library multiplies


class Fp8Linear:
    """An Fp8Weight with an optional bias_N; linear_gpu.GpuLinear says what its methods return."""

    def __init__(self, weight: Fp8Weight, bias_N: Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.numbers_NK.shape
        self.bytes = weight.bytes + (0 if bias_N is None else bias_N.nbytes)
        self._weight = weight
        self._blocks = weight.scales_NB.shape[1]
        self._bias_N = bias_N

    def __call__(self, x_TK: Tensor) -> Tensor:
        own = quantize_rows(x_TK, self._blocks)
        if self._blocks == 1 and len(x_TK) <= LINEAR_ROWS_MAX:
            tiling = select_fp8_tiling(self.outputs, self.inputs, len(x_TK), gated=False)
            parts_PTN = linear.multiply(own.rows, self._weight.numbers_NK, tiling, self._scales(own), x_TK.dtype)
        elif self._by_library(x_TK):
            parts_PTN = self._multiply_by_library(own.rows, self._scales(own), x_TK.dtype)[None]
        else:
            parts_PTN = self._multiply_in_blocks(own, x_TK)
        if self._bias_N is not None:
            parts_PTN[0] += self._bias_N
        return parts_PTN

    def swiglu(self, x_TK: Tensor) -> Tensor:
        """Few rows without a bias are gated by the kernel."""
        if self._bias_N is not None or self._blocks > 1 or len(x_TK) > LINEAR_ROWS_MAX:
            return silu_and_multiply(self.logits(x_TK))
        own = quantize_rows(x_TK, 1)
        tiling = select_fp8_tiling(self.outputs, self.inputs, len(x_TK), gated=True)
        return linear.multiply_gated(own.rows, self._weight.numbers_NK, tiling, self._scales(own), x_TK.dtype)

    def geglu(self, x_TK: Tensor) -> Tensor:
        return gelu_and_multiply(self(x_TK), x_TK.dtype)

    def logits(self, x_TK: Tensor) -> Tensor:
        return in_one_part(self(x_TK), x_TK.dtype)

    def _scales(self, own: ExpertRows) -> LinearScales:
        assert own.scales is not None
        return LinearScales(self._weight.scales_NB, own.scales)

    def _by_library(self, x_TK: Tensor) -> bool:
        """Whether the library multiplies them: it knows a factor for each output, and gives bfloat16."""
        fits = self.outputs % _LIBRARY_MULTIPLE == 0 and self.inputs % _LIBRARY_MULTIPLE == 0
        return fits and self._blocks == 1 and x_TK.is_cuda and x_TK.dtype == torch.bfloat16

    def _multiply_by_library(self, rows_TK: Tensor, scales: LinearScales, dtype: torch.dtype) -> Tensor:
        """[T, N]. Sums are brought to float32 again and again: tensor cores alone keep fewer bits of them."""
        out_TN: Tensor = torch._scaled_mm(
            rows_TK, self._weight.numbers_NK.T, scales.row_T1, scales.weight_N1.T, out_dtype=dtype, use_fast_accum=False
        )
        return out_TN

    def _multiply_in_blocks(self, own: ExpertRows, x_TK: Tensor) -> Tensor:
        """[P, T, N]: for factors of 128 inputs, and what the library does not multiply."""
        tile = tile_rows(len(x_TK), 1)
        tiling = tiling_for(
            self.outputs, self.inputs, len(x_TK), 1, tile, gated=False, blocks=self._blocks,
            large=has_large_blocks(x_TK.device, x_TK.dtype),
        )  # fmt: skip
        dtype = x_TK.dtype if tiling.parts == 1 else torch.float32
        out_PTN = x_TK.new_empty(tiling.parts, len(x_TK), self.outputs, dtype=dtype)
        weight = ExpertWeights(self._weight.numbers_NK, self._weight.scales_NB)
        return grouped_linear.multiply_alone(own, weight, tile, tiling, out_PTN)
