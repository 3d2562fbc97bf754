"""A linear layer's weight on a GPU, as it is or in 12 bits a number, and its matmul for any number of rows.

Its results come in parts, so that a kernel may leave the last additions to the kernel that reads them
(kernels/linear.py). Results are new memory; in a CUDA graph's capture they are the graph's.

T rows, K inputs, N outputs, P parts, I inner size.
"""

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from engine.bf12.codec import Bf12Weight
from engine.bf12.layout import GROUP_OUTPUTS
from engine.kernels import bf12_linear, bf12_linear_hopper, linear
from engine.kernels.bf12_decode import expand
from engine.kernels.bf12_linear import Bf12Tiling
from engine.kernels.bf12_linear_hopper import HopperTiling
from engine.kernels.elementwise import gelu_and_multiply, silu_and_multiply
from engine.kernels.linear import LinearTiling
from engine.kernels.tuning import select_bf12_tiling, select_tiling

CHUNK_BYTES: Final = 256 << 20  # of the expanded matrix: all but heads are one chunk


class GpuLinear:
    """weight_NK (contiguous) with an optional bias_N of the same dtype. `bytes` is what they occupy."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        assert weight_NK.ndim == 2
        assert weight_NK.is_contiguous()
        self.outputs, self.inputs = weight_NK.shape
        self.bytes = weight_NK.nbytes + (0 if bias_N is None else bias_N.nbytes)
        self._weight_NK = weight_NK
        self._bias_N = bias_N

    def __call__(self, x_TK: Tensor) -> Tensor:
        """[P, T, N]: in x's dtype if P is 1, else float32 parts that sum up to the result."""
        tiling = self._tiling(x_TK, gated=False)
        if tiling is not None:
            return linear.multiply(x_TK, self._weight_NK, tiling)
        return functional.linear(x_TK, self._weight_NK, self._bias_N)[None]

    def swiglu(self, x_TK: Tensor) -> Tensor:
        """silu of the first half of the outputs · the second half, [T, I]."""
        tiling = self._tiling(x_TK, gated=True)
        if tiling is not None:
            return linear.multiply_gated(x_TK, self._weight_NK, tiling)
        return silu_and_multiply(functional.linear(x_TK, self._weight_NK, self._bias_N))

    def geglu(self, x_TK: Tensor) -> Tensor:
        """gelu of the first half of the outputs · the second half, [T, I]."""
        return gelu_and_multiply(self(x_TK), x_TK.dtype)

    def logits(self, x_TK: Tensor) -> Tensor:
        """[T, N] in one part, as the head's logits are wanted."""
        return in_one_part(self(x_TK), x_TK.dtype)

    def _tiling(self, x_TK: Tensor, gated: bool) -> LinearTiling | None:
        """The kernel's, None for the library's matmul: no kernel adds a bias."""
        if self._bias_N is not None:
            return None
        return select_tiling(self.outputs, self.inputs, len(x_TK), gated, x_TK.device)


class Bf12Linear:
    """A Bf12Weight with an optional bias_N of the rows' dtype; GpuLinear says what its methods return. Rows are
    multiplied by the numbers as these are decoded, or, where there are very many rows, by the expanded matrix."""

    def __init__(self, weight: Bf12Weight, bias_N: Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.outputs, weight.inputs
        self.bytes = weight.bytes + (0 if bias_N is None else bias_N.nbytes)
        self._weight = weight
        self._bias_N = bias_N

    def __call__(self, x_TK: Tensor) -> Tensor:
        match self._tiling(x_TK, gated=False):
            case None:
                return multiply_expanded(x_TK, self._weight, self._bias_N)[None]
            case Bf12Tiling() as tiling:
                parts_PTN = bf12_linear.multiply(x_TK, self._weight, tiling)
            case tiling:
                parts_PTN = bf12_linear_hopper.multiply(x_TK, self._weight, tiling)
        if self._bias_N is not None:
            parts_PTN[0] += self._bias_N
        return parts_PTN

    def swiglu(self, x_TK: Tensor) -> Tensor:
        """No kernel gates what has a bias."""
        match None if self._bias_N is not None else self._tiling(x_TK, gated=True):
            case None:
                return silu_and_multiply(self.logits(x_TK))
            case Bf12Tiling() as tiling:
                return bf12_linear.multiply_gated(x_TK, self._weight, tiling)
            case tiling:
                return bf12_linear_hopper.multiply_gated(x_TK, self._weight, tiling)

    def geglu(self, x_TK: Tensor) -> Tensor:
        return gelu_and_multiply(self(x_TK), x_TK.dtype)

    def logits(self, x_TK: Tensor) -> Tensor:
        return in_one_part(self(x_TK), x_TK.dtype)

    def _tiling(self, x_TK: Tensor, gated: bool) -> Bf12Tiling | HopperTiling | None:
        return select_bf12_tiling(self.outputs, self.inputs, len(x_TK), gated, x_TK.device)


def multiply_expanded(x_TK: Tensor, weight: Bf12Weight, bias_N: Tensor | None = None) -> Tensor:
    """[T, N] by the library, from a copy of the matrix in x's dtype, of which one chunk exists at a time."""
    out_TN = x_TK.new_empty(len(x_TK), weight.outputs)
    outputs = CHUNK_BYTES // (weight.inputs * x_TK.itemsize) // GROUP_OUTPUTS * GROUP_OUTPUTS
    copy_NK = x_TK.new_empty(min(outputs, weight.outputs), weight.inputs)
    for first in range(0, weight.outputs, outputs):
        chunk = range(first, min(first + outputs, weight.outputs))
        chunk_NK, part_TN = copy_NK[: len(chunk)], out_TN[:, chunk.start : chunk.stop]
        expand(weight, chunk_NK, chunk)
        if bias_N is None:
            torch.mm(x_TK, chunk_NK.T, out=part_TN)
        else:
            torch.addmm(bias_N[chunk.start : chunk.stop], x_TK, chunk_NK.T, out=part_TN)
    return out_TN


def in_one_part(parts_PTN: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, N] in `dtype`, of parts [P, T, N]."""
    return parts_PTN[0] if len(parts_PTN) == 1 else parts_PTN.sum(0).to(dtype)
