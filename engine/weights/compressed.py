"""A linear layer's weight on a GPU in 12 bits a number, and its matmul for any number of rows.

As resident.py. Few rows are multiplied by the numbers as they are decoded; many by the expanded matrix, a chunk of it
at a time.

T rows, K inputs, N outputs, P parts, I inner size.
"""

from typing import Final

import torch
from torch import Tensor

from engine.kernels.choices import choose_coded
from engine.kernels.coded import multiply, multiply_gated
from engine.kernels.expand import expand
from engine.kernels.gated import silu_and_multiply
from engine.weights.codec import Bf12
from engine.weights.lanes import GROUP_OUTPUTS

CHUNK_BYTES: Final = 256 << 20  # of the expanded matrix at once: all but heads are multiplied as one


class Compressed:
    """A Bf12 with an optional bias_N of the rows' dtype. `bytes` is what they occupy.

    What it returns is new memory; in a CUDA graph's capture it is the graph's.
    """

    def __init__(self, weight: Bf12, bias_N: Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.outputs, weight.inputs
        self.bytes = weight.bytes + (0 if bias_N is None else bias_N.nbytes)
        self._weight = weight
        self._bias_N = bias_N

    def __call__(self, x_TK: Tensor) -> Tensor:
        """[P, T, N]: in x's dtype if P is 1, else float32 parts that sum up to the result."""
        if self._bias_N is None:
            tiling = choose_coded(self.outputs, self.inputs, len(x_TK), False, x_TK.device)
            if tiling is not None:
                return multiply(x_TK, self._weight, tiling)
        return self._expanded(x_TK)[None]

    def gated(self, x_TK: Tensor) -> Tensor:
        """silu of the first half of the outputs · the second half, [T, I]."""
        if self._bias_N is None:
            tiling = choose_coded(self.outputs, self.inputs, len(x_TK), True, x_TK.device)
            if tiling is not None:
                return multiply_gated(x_TK, self._weight, tiling)
        x_T2I = self.logits(x_TK)
        out_TI = x_T2I.new_empty(len(x_TK), self.outputs // 2)
        silu_and_multiply(x_T2I, out_TI)
        return out_TI

    def logits(self, x_TK: Tensor) -> Tensor:
        """[T, N] in one part, as the head's logits are wanted."""
        parts_PTN = self(x_TK)
        return parts_PTN[0] if len(parts_PTN) == 1 else parts_PTN.sum(0).to(x_TK.dtype)

    def _expanded(self, x_TK: Tensor) -> Tensor:
        """By the library, from a copy of the matrix in x's dtype."""
        out_TN = x_TK.new_empty(len(x_TK), self.outputs)
        outputs = CHUNK_BYTES // (self.inputs * x_TK.itemsize) // GROUP_OUTPUTS * GROUP_OUTPUTS
        for first in range(0, self.outputs, outputs):
            chunk = range(first, min(first + outputs, self.outputs))
            weight_NK = x_TK.new_empty(len(chunk), self.inputs)
            expand(self._weight, weight_NK, chunk)
            part_TN = out_TN[:, chunk.start : chunk.stop]
            if self._bias_N is None:
                torch.mm(x_TK, weight_NK.T, out=part_TN)
            else:
                torch.addmm(self._bias_N[chunk.start : chunk.stop], x_TK, weight_NK.T, out=part_TN)
        return out_TN
