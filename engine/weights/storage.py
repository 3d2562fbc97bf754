"""What a linear layer's weight is, and its matmul. It knows no checkpoint names and no architecture.

On a CPU the weight lies in the blocked order of oneDNN, packed once: the same matmul from a plain weight takes
about twice as long for one row. A row's result must not depend on how many rows come with it. oneDNN keeps that
promise for most shapes and does not document it, so `Dense` asks once, when it is made: it finds the least number
of rows from which on a row comes out bit for bit the same, and pads up to that.

T rows, K inputs, N outputs.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_ROWS_HINT = 64  # the row count for which oneDNN chooses the order of a packed weight
_ROWS_TRIED = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 31, 32, 33, 48, 64, 65, 100, 128)


class Dense:
    """weight_NK as it was given (float32, bfloat16 or float16), with an optional bias_N of the same dtype.

    Called with x_TK it returns [T, N] in the same dtype, accumulated in float32. `bytes` is what it occupies.
    """

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        assert weight_NK.ndim == 2
        self.outputs, self.inputs = weight_NK.shape
        self.bytes = weight_NK.nbytes + (0 if bias_N is None else bias_N.nbytes)
        self._bias = bias_N
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), _ROWS_HINT)
        self._rows_least = _rows_least(self._multiply, self.inputs, weight_NK.dtype)

    def __call__(self, x_TK: Tensor) -> Tensor:
        rows = x_TK.shape[0]
        if rows >= self._rows_least:
            return self._multiply(x_TK)
        padded = x_TK.new_zeros(self._rows_least, self.inputs)
        padded[:rows] = x_TK
        return self._multiply(padded)[:rows]

    def _multiply(self, x_TK: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x_TK, self._packed, self._bias, "none", [], "")


class RowsDiffer(RuntimeError):
    """This machine's matrix library gives a row another result in other company, at every size tried."""


def _rows_least(multiply: Callable[[Tensor], Tensor], inputs: int, dtype: torch.dtype) -> int:
    """The least number of rows from which on `multiply` gives each row the same bits as it does in a full batch."""
    generator = torch.Generator().manual_seed(inputs)
    x_TK = torch.randn(_ROWS_TRIED[-1], inputs, generator=generator).to(dtype)
    full_TN = multiply(x_TK)
    least = 1
    for rows in _ROWS_TRIED[:-1]:
        first = torch.equal(multiply(x_TK[:rows]), full_TN[:rows])
        last = torch.equal(multiply(x_TK[-rows:]), full_TN[-rows:])
        if not (first and last):
            least = rows + 1
    if least > _ROWS_TRIED[-2]:
        raise RowsDiffer(f"no number of rows makes a matmul over {inputs} inputs in {dtype} independent of its company")
    return least
