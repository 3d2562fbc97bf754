"""A linear layer's weight on a CPU, and its matmul for any number of rows. It knows no names and no architecture.

On a CPU the weight lies in the blocked order of oneDNN, packed once: the same matmul from a plain weight takes
about twice as long for one row. A row's result must not depend on how many rows come with it. oneDNN keeps that
for most shapes and row counts, but not for all: with one row and many inputs it adds up in another order. So the
first weight of each shape is probed: `min_invariant_rows` finds the number of rows from which on each row comes out
bit for bit the same, and `CpuLinear` pads up to that. One row alone, which is what decoding for one caller is, goes
through a function of our own (layers/cpu_row.py) wherever that gives the bits which the row has among others.

With AMX there often is no such number, for inputs are divided by the number of rows, and without AVX-512 oneDNN has no
bfloat16: there, and wherever AVX-512 has no instructions for it, bfloat16 has a matmul of our own for any number of
rows (layers/cpu_tiles.py), and a packed weight of its order. Where that is not compiled, rows are multiplied in pieces
of one number of them, or in float32.

T rows, K inputs, N outputs.
"""

import enum
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.reference import gelu_and_multiply
from engine.layers import cpu_row
from engine.layers.cpu_tiles import TileMatmul, has_tiles
from engine.layers.row_ops import silu_and_multiply

_ROWS_HINT = 64  # the row count for which oneDNN chooses the order of a packed weight
_ROWS_TRIED = (1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64)
_PIECE_ROWS: Final = _ROWS_TRIED[-1]  # of matmuls whose order of adding up depends on how many rows there are
_QUICK_ROWS = 4  # oneDNN reads a weight a third faster for four rows than for one or two
_LIBRARY_HAS: Final[dict[torch.dtype, Callable[[], bool]]] = {  # with AVX2 alone oneDNN has float32 and no more
    torch.float32: lambda: True,
    torch.bfloat16: lambda: bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    torch.float16: lambda: bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()),
}
_PROBE_OUTPUTS_MAX = 1024  # enough: a matmul is divided along its inputs where outputs are few


class NotBatchInvariant(RuntimeError):
    """This machine's matrix library gives a row other results with other row counts, at every size tried, or has no
    matmul in this dtype at all. Another dtype may do better."""


class Activation(enum.StrEnum):
    """The function of a linear layer's results, and its formula."""

    NONE = "none"
    GELU = "gelu none"
    GELU_TANH = "gelu tanh"
    RELU = "relu"
    TANH = "tanh"


ACTIVATION_FUNCTIONS: Final[dict[Activation, Callable[[Tensor], Tensor]]] = {
    Activation.NONE: lambda y_TN: y_TN,
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: partial(functional.gelu, approximate="tanh"),
    Activation.RELU: torch.relu,
    Activation.TANH: torch.tanh,
}


class CpuLinear:
    """weight_NK (float32, bfloat16 or float16) with an optional bias_N of the same dtype. `bytes` is what they occupy;
    `row_alone` multiplies one row, where it can.

    Called with x_TK it returns [T, N] in the same dtype, accumulated in float32, through the `activation`, which takes
    no time of its own but behind tiles.
    """

    def __init__(
        self, weight_NK: Tensor, bias_N: Tensor | None = None, activation: Activation = Activation.NONE
    ) -> None:
        assert weight_NK.ndim == 2
        self.outputs, self.inputs = weight_NK.shape
        self.bytes = weight_NK.nbytes + (0 if bias_N is None else bias_N.nbytes)
        self.row_alone: TileMatmul | _RowMatmul | None = None
        self._tiles: TileMatmul | None = None
        self._activation = activation
        plain = bias_N is None and activation is Activation.NONE
        if weight_NK.dtype is torch.bfloat16 and has_tiles():
            self._tiles = TileMatmul(weight_NK, bias_N)
            self.row_alone = self._tiles if plain else None
            return
        self._bias = bias_N
        self._packed = _pack(weight_NK)
        probed = min(self.outputs, _PROBE_OUTPUTS_MAX)
        self._piece = piece_rows(self.inputs, probed, weight_NK.dtype, torch.get_num_threads())
        if self._piece is not None:
            return
        invariant = min_invariant_rows(self.inputs, probed, weight_NK.dtype, torch.get_num_threads())
        self._min_rows = max(invariant, _QUICK_ROWS)
        if plain and weight_NK.dtype is torch.bfloat16:
            self.row_alone = _row_matmul(self._packed, self.inputs, self.outputs, self._min_rows)

    def __call__(self, x_TK: Tensor) -> Tensor:
        if self._tiles is not None:
            return ACTIVATION_FUNCTIONS[self._activation](self._tiles(x_TK))
        rows = x_TK.shape[0]
        if rows == 1 and self.row_alone is not None:
            return self.row_alone(x_TK)
        if self._piece is not None:
            pieces = [self._padded(piece_TK, self._piece) for piece_TK in x_TK.split(self._piece)]
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if rows >= self._min_rows:
            return _multiply(x_TK, self._packed, self._bias, self._activation)
        return self._padded(x_TK, self._min_rows)

    def _padded(self, x_TK: Tensor, count: int) -> Tensor:
        """The rows' results among `count` rows, where they are fewer."""
        rows = x_TK.shape[0]
        if rows < count:
            x_TK = x_TK.repeat(-(-count // rows), 1)[:count]
        return _multiply(x_TK, self._packed, self._bias, self._activation)[:rows]

    def swiglu(self, x_TK: Tensor) -> Tensor:
        return silu_and_multiply(self(x_TK))

    def geglu(self, x_TK: Tensor) -> Tensor:
        return gelu_and_multiply(self(x_TK))

    def logits(self, x_TK: Tensor) -> Tensor:
        return self(x_TK).float()


def _pack(weight_NK: Tensor) -> Tensor:
    if not _LIBRARY_HAS[weight_NK.dtype]():
        raise NotBatchInvariant(
            f"this processor has no matmul in {weight_NK.dtype}: set the model's dtype to another one"
        )
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), _ROWS_HINT)
    return packed


def _multiply(x_TK: Tensor, packed: Tensor, bias_N: Tensor | None, activation: Activation = Activation.NONE) -> Tensor:
    name, _, algorithm = activation.partition(" ")
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x_TK, packed, bias_N, name, [], algorithm)
    return result


class _RowMatmul:
    """A packed weight's matmul for one row, in sums of so many inputs each. It holds the weight."""

    def __init__(self, multiply: Callable[..., None], packed: Tensor, shape: tuple[int, int], chunk: int) -> None:
        self._multiply = multiply
        self._packed = packed
        self._address: int = torch.ops.mkldnn.data_ptr(packed)
        self._inputs, self._outputs = shape
        self._chunk = chunk

    @property
    def matrix(self) -> cpu_row.Matrix:
        """It as cpu_row.c takes it, for as long as this is held."""
        return cpu_row.Matrix(self._address, self._inputs, self._outputs, self._chunk)

    def __call__(self, x_1K: Tensor) -> Tensor:
        x_1K, y_1N = x_1K.contiguous(), x_1K.new_empty(1, self._outputs)
        self._multiply(
            self._address, x_1K.data_ptr(), y_1N.data_ptr(), self._inputs, self._outputs, self._chunk,
            torch.get_num_threads(),
        )  # fmt: skip
        return y_1N


def _row_matmul(packed: Tensor, inputs: int, outputs: int, rows: int) -> _RowMatmul | None:
    """None where there is no such function, or it does not give the bits of a matmul of `rows` rows."""
    if (chunk := row_chunk(inputs, min(outputs, _PROBE_OUTPUTS_MAX))) is None:
        return None
    functions = cpu_row.row_functions()
    if functions is None or functions.multiply_row is None or outputs % cpu_row.OUTPUTS_MULTIPLE:
        return None
    matmul = _RowMatmul(functions.multiply_row, packed, (inputs, outputs), chunk)
    x_TK = torch.randn(1, inputs, generator=torch.Generator().manual_seed(inputs)).bfloat16().repeat(rows, 1)
    return matmul if torch.equal(matmul(x_TK[:1]), _multiply(x_TK, packed, None)[:1]) else None


def is_batch_invariant(shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> bool:
    """Whether matmuls of these (inputs, outputs) can give a row the same bits whatever rows come with it."""
    if dtype is torch.bfloat16 and has_tiles():
        return True
    try:
        for inputs, outputs in shapes:
            piece_rows(inputs, min(outputs, _PROBE_OUTPUTS_MAX), dtype, torch.get_num_threads())
    except NotBatchInvariant:
        return False
    return True


@cache
def min_invariant_rows(inputs: int, outputs: int, dtype: torch.dtype, threads: int) -> int:
    """The smallest number of rows from which on a matmul gives a row the same bits whatever rows come with it.

    The probe's exact results are all 0: it sees nothing but the rounding of partial sums, which another order of
    adding up changes. With ordinary numbers, bfloat16 results would nearly always hide that. Raises NotBatchInvariant.
    """
    x_TK, packed = _probe(inputs, outputs, dtype)
    return _min_rows(lambda rows_TK: _multiply(rows_TK, packed, None), x_TK)


@cache
def piece_rows(inputs: int, outputs: int, dtype: torch.dtype, threads: int) -> int | None:
    """In matmuls of how many rows each row has the same bits whatever rows come with it and wherever it lies; None
    where min_invariant_rows has an answer, which is quicker. Raises NotBatchInvariant where there is neither."""
    try:
        min_invariant_rows(inputs, outputs, dtype, threads)
        return None
    except NotBatchInvariant:
        x_TK, packed = _probe(inputs, outputs, dtype)
        full_TN = _multiply(x_TK, packed, None)
        for turn in (1, 7, 16, 33):
            others_TK = torch.cat((x_TK[:turn].roll(1, 1), x_TK[: _PIECE_ROWS - turn]))
            if not torch.equal(_multiply(others_TK, packed, None)[turn:], full_TN[: _PIECE_ROWS - turn]):
                raise
        return _PIECE_ROWS


@cache
def row_chunk(inputs: int, outputs: int) -> int | None:
    """How many inputs oneDNN sums up apart in a bfloat16 matmul: with that, one row alone has the bits that it has in a
    matmul of many. None where that is not found, or nothing multiplies one row alone."""
    functions = cpu_row.row_functions()
    if functions is None or functions.multiply_row is None:
        return None
    if inputs % cpu_row.INPUTS_MULTIPLE or outputs % cpu_row.OUTPUTS_MULTIPLE:
        return None
    x_TK, packed = _probe(inputs, outputs, torch.bfloat16)
    full_TN = _multiply(x_TK, packed, None)
    for chunk in cpu_row.CHUNKS:
        matmul = _RowMatmul(functions.multiply_row, packed, (inputs, outputs), chunk)
        if torch.equal(torch.cat([matmul(x_1K) for x_1K in x_TK.split(1)]), full_TN):
            return chunk
    return None


def _probe(inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows and a packed weight whose products are all 0 but for rounding."""
    generator = torch.Generator().manual_seed(inputs)
    half = inputs // 2
    order = torch.randperm(inputs, generator=generator)
    u_TK = torch.randn(_ROWS_TRIED[-1], half, generator=generator)
    w_NK = torch.randn(outputs, half, generator=generator)
    rest_TK, rest_NK = u_TK.new_zeros(len(u_TK), inputs - 2 * half), w_NK.new_zeros(outputs, inputs - 2 * half)
    x_TK = torch.cat((u_TK, u_TK, rest_TK), 1)[:, order].to(dtype)
    return x_TK, _pack(torch.cat((w_NK, -w_NK, rest_NK), 1)[:, order].to(dtype))


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
