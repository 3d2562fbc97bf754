"""A linear layer's weight in 8 bits a number on a GPU, and its matmul for any number of rows.

Few rows are multiplied by the numbers as bfloat16: reading the weight takes all the time. More rows are brought to 8
bits themselves, which tensor cores multiply wherever weights are kept so (weights/fp8.py).

T rows, K inputs, N outputs, P parts, I inner size.
"""

from typing import Final

import torch
from torch import Tensor

from engine.kernels.elementwise import gelu_and_multiply
from engine.kernels.experts import grouped_linear
from engine.kernels.experts.grouped_linear import ExpertRows, ExpertWeights
from engine.kernels.experts.grouped_tuning import has_large_blocks, tile_rows, tiling_for
from engine.kernels.experts.quantize_rows import quantize_rows
from engine.layers.fp8_weight import Fp8Weight

QUANTIZED_ROWS_MIN: Final = 64  # of a tile


class Fp8Linear:
    """An Fp8Weight with an optional bias_N; linear_gpu.GpuLinear says what its methods return."""

    def __init__(self, weight: Fp8Weight, bias_N: Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.numbers_NK.shape
        self._weight = ExpertWeights(weight.numbers_NK, weight.scales_NB, bias_N)
        self._blocks = weight.scales_NB.shape[1]
        self.bytes = self._weight.bytes

    def __call__(self, x_TK: Tensor) -> Tensor:
        rows, tile = len(x_TK), tile_rows(len(x_TK), 1)
        tiling = tiling_for(
            self.outputs, self.inputs, rows, 1, tile, gated=False, blocks=self._blocks,
            large=has_large_blocks(x_TK.device, x_TK.dtype),
        )  # fmt: skip
        dtype = x_TK.dtype if tiling.parts == 1 else torch.float32
        out_PTN = x_TK.new_empty(tiling.parts, rows, self.outputs, dtype=dtype)
        return grouped_linear.multiply_alone(rows_for(x_TK, self._weight, tile), self._weight, tile, tiling, out_PTN)

    def swiglu(self, x_TK: Tensor) -> Tensor:
        tile, inner = tile_rows(len(x_TK), 1), self.outputs // 2
        tiling = tiling_for(
            inner, self.inputs, len(x_TK), 1, tile, gated=True, blocks=self._blocks,
            large=has_large_blocks(x_TK.device, x_TK.dtype),
        )  # fmt: skip
        out_TI, rows = x_TK.new_empty(len(x_TK), inner), rows_for(x_TK, self._weight, tile)
        return grouped_linear.multiply_gated_alone(rows, self._weight, tile, tiling, out_TI)

    def geglu(self, x_TK: Tensor) -> Tensor:
        return gelu_and_multiply(self(x_TK), x_TK.dtype)

    def logits(self, x_TK: Tensor) -> Tensor:
        parts_PTN = self(x_TK)
        return parts_PTN[0] if len(parts_PTN) == 1 else parts_PTN.sum(0).to(x_TK.dtype)


def rows_for(x_TK: Tensor, weight: ExpertWeights, tile: int) -> ExpertRows:
    """The rows as they are, or in 8 bits where the weight is and tiles have many of them."""
    if weight.scales is None or tile < QUANTIZED_ROWS_MIN:
        return ExpertRows(x_TK)
    return quantize_rows(x_TK, weight.scales.shape[1])
