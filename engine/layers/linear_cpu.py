"""A linear layer's weight on a CPU, and its matmul for any number of rows. It knows no names and no architecture.

On a CPU the weight lies in the blocked order of oneDNN, packed once: the same matmul from a plain weight takes
about twice as long for one row. A row's result must not depend on how many rows come with it. oneDNN keeps that
for most shapes and row counts, but not for all: with one row and many inputs it adds up in another order. So the
first weight of each shape is probed: `min_invariant_rows` finds the number of rows from which on each row comes out
bit for bit the same, and `CpuLinear` pads up to that.

T rows, K inputs, N outputs.
"""

import enum
from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor

from engine.kernels.reference import silu_and_multiply

_ROWS_HINT = 64  # the row count for which oneDNN chooses the order of a packed weight
_ROWS_TRIED = (1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64)
_PROBE_OUTPUTS_MAX = 1024  # enough: a matmul is divided along its inputs where outputs are few


class NotBatchInvariant(RuntimeError):
    """This machine's matrix library gives a row other results with other row counts, at every size tried. Another dtype
    may do better."""


class Activation(enum.StrEnum):
    """The function of a linear layer's results, and its formula."""

    NONE = "none"
    GELU = "gelu none"
    GELU_TANH = "gelu tanh"
    RELU = "relu"
    TANH = "tanh"


class CpuLinear:
    """weight_NK (float32, bfloat16 or float16) with an optional bias_N of the same dtype. `bytes` is what they occupy.

    Called with x_TK it returns [T, N] in the same dtype, accumulated in float32, through the `activation`, which takes
    no time of its own.
    """

    def __init__(
        self, weight_NK: Tensor, bias_N: Tensor | None = None, activation: Activation = Activation.NONE
    ) -> None:
        assert weight_NK.ndim == 2
        self.outputs, self.inputs = weight_NK.shape
        self.bytes = weight_NK.nbytes + (0 if bias_N is None else bias_N.nbytes)
        self._bias = bias_N
        self._activation = activation
        self._packed = _pack(weight_NK)
        probed = min(self.outputs, _PROBE_OUTPUTS_MAX)
        self._min_rows = min_invariant_rows(self.inputs, probed, weight_NK.dtype, torch.get_num_threads())

    def __call__(self, x_TK: Tensor) -> Tensor:
        rows = x_TK.shape[0]
        if rows >= self._min_rows:
            return _multiply(x_TK, self._packed, self._bias, self._activation)
        copies = -(-self._min_rows // rows)
        return _multiply(torch.cat([x_TK] * copies), self._packed, self._bias, self._activation)[:rows]

    def swiglu(self, x_TK: Tensor) -> Tensor:
        return silu_and_multiply(self(x_TK))

    def logits(self, x_TK: Tensor) -> Tensor:
        return self(x_TK).float()


def _pack(weight_NK: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), _ROWS_HINT)
    return packed


def _multiply(x_TK: Tensor, packed: Tensor, bias_N: Tensor | None, activation: Activation = Activation.NONE) -> Tensor:
    name, _, algorithm = activation.partition(" ")
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x_TK, packed, bias_N, name, [], algorithm)
    return result


def is_batch_invariant(shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> bool:
    """Whether matmuls of these (inputs, outputs) can give a row the same bits whatever rows come with it."""
    try:
        for inputs, outputs in shapes:
            min_invariant_rows(inputs, min(outputs, _PROBE_OUTPUTS_MAX), dtype, torch.get_num_threads())
    except NotBatchInvariant:
        return False
    return True


@cache
def min_invariant_rows(inputs: int, outputs: int, dtype: torch.dtype, threads: int) -> int:
    """The smallest number of rows from which on a matmul gives a row the same bits whatever rows come with it.

    The probe's exact results are all 0: it sees nothing but the rounding of partial sums, which another order of
    adding up changes. With ordinary numbers, bfloat16 results would nearly always hide that. Raises NotBatchInvariant.
    """
    generator = torch.Generator().manual_seed(inputs)
    half = inputs // 2
    order = torch.randperm(inputs, generator=generator)
    u_TK = torch.randn(_ROWS_TRIED[-1], half, generator=generator)
    w_NK = torch.randn(outputs, half, generator=generator)
    rest_TK, rest_NK = u_TK.new_zeros(len(u_TK), inputs - 2 * half), w_NK.new_zeros(outputs, inputs - 2 * half)
    x_TK = torch.cat((u_TK, u_TK, rest_TK), 1)[:, order].to(dtype)
    packed = _pack(torch.cat((w_NK, -w_NK, rest_NK), 1)[:, order].to(dtype))
    return _min_rows(lambda rows_TK: _multiply(rows_TK, packed, None), x_TK)


def _min_rows(multiply: Callable[[Tensor], Tensor], x_TK: Tensor) -> int:
    full_TN = multiply(x_TK)
    min_rows = 1
    for rows in _ROWS_TRIED[:-1]:
        first = torch.equal(multiply(x_TK[:rows]), full_TN[:rows])
        last = torch.equal(multiply(x_TK[-rows:]), full_TN[-rows:])
        if not (first and last):
            min_rows = rows + 1
    if min_rows > _ROWS_TRIED[-2]:
        raise NotBatchInvariant(
            f"no row count makes a matmul over {x_TK.shape[1]} inputs in {x_TK.dtype} independent of it on this "
            "processor: set the model's dtype to another one"
        )
    return min_rows
