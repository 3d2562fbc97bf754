"""A linear layer's weight on a GPU, as it is, and its matmul for any number of rows.

Its results come in parts, so that a kernel may leave the last additions to the kernel that reads them
(kernels/linear.py).

T rows, K inputs, N outputs, P parts, I inner size.
"""

import torch
from torch import Tensor

from engine.kernels.linear import multiply, multiply_gated
from engine.kernels.swiglu import silu_and_multiply
from engine.kernels.tuning import select_tiling


class GpuLinear:
    """weight_NK (contiguous) with an optional bias_N of the same dtype. `bytes` is what they occupy.

    Results are new memory; in a CUDA graph's capture they are the graph's.
    """

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        assert weight_NK.ndim == 2
        assert weight_NK.is_contiguous()
        self.outputs, self.inputs = weight_NK.shape
        self.bytes = weight_NK.nbytes + (0 if bias_N is None else bias_N.nbytes)
        self._weight_NK = weight_NK
        self._bias_N = bias_N

    def __call__(self, x_TK: Tensor) -> Tensor:
        """[P, T, N]: in x's dtype if P is 1, else float32 parts that sum up to the result."""
        if self._bias_N is None:
            tiling = select_tiling(self.outputs, self.inputs, len(x_TK), False, x_TK.device)
            if tiling is not None:
                return multiply(x_TK, self._weight_NK, tiling)
        return torch.nn.functional.linear(x_TK, self._weight_NK, self._bias_N)[None]

    def swiglu(self, x_TK: Tensor) -> Tensor:
        """silu of the first half of the outputs · the second half, [T, I]."""
        if self._bias_N is None:
            tiling = select_tiling(self.outputs, self.inputs, len(x_TK), True, x_TK.device)
            if tiling is not None:
                return multiply_gated(x_TK, self._weight_NK, tiling)
        return silu_and_multiply(torch.nn.functional.linear(x_TK, self._weight_NK, self._bias_N))

    def logits(self, x_TK: Tensor) -> Tensor:
        """[T, N] in one part, as the head's logits are wanted."""
        parts_PTN = self(x_TK)
        return parts_PTN[0] if len(parts_PTN) == 1 else parts_PTN.sum(0).to(x_TK.dtype)
