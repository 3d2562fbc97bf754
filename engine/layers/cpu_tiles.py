"""A bfloat16 weight in tiles on a CPU with AMX, or without AVX-512 for bfloat16, and its matmul for any number of rows:
cpu_tiles_amx.c's or cpu_tiles_avx2.c's, where compiled.

oneDNN's matmul with AMX adds up in an order that depends on how many rows there are, and without AVX-512 it has none of
bfloat16; the order of this one is always the same. It knows no names and no architecture.

T rows, K inputs, N outputs.
"""

from typing import Final

import torch
from torch import Tensor

from engine.layers import cpu_row

_MULTIPLE: Final = 32  # to which a packed weight's inputs and outputs are rounded up


class TileMatmul:
    """weight_NK, packed, and an optional bias_N. Called with x_TK it returns [T, N] in bfloat16, accumulated in float32
    and rounded once; a row's bits do not depend on the others."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        functions = cpu_row.row_functions()
        assert functions is not None
        assert functions.tiles is not None
        assert weight_NK.dtype is torch.bfloat16
        self._outputs, self._inputs = weight_NK.shape
        self._bias = None if bias_N is None else bias_N.contiguous()
        self._multiply = functions.tiles.multiply
        inputs, outputs = (-(-size // _MULTIPLE) * _MULTIPLE for size in (self._inputs, self._outputs))
        self._packed = torch.empty(outputs * inputs, dtype=torch.bfloat16)
        weight_NK = weight_NK.contiguous()
        functions.tiles.pack(
            weight_NK.data_ptr(), self._packed.data_ptr(), self._inputs, self._outputs, torch.get_num_threads()
        )

    @property
    def matrix(self) -> cpu_row.Matrix:
        """It without its bias as cpu_row.c takes it, for as long as this is held."""
        return cpu_row.Matrix(self._packed.data_ptr(), self._inputs, self._outputs, cpu_row.IN_TILES)

    def __call__(self, x_TK: Tensor) -> Tensor:
        assert x_TK.dtype is torch.bfloat16
        assert x_TK.shape[1] == self._inputs
        x_TK = x_TK.contiguous()
        y_TN = x_TK.new_empty(x_TK.shape[0], self._outputs)
        self._multiply(
            self._packed.data_ptr(), 0 if self._bias is None else self._bias.data_ptr(), x_TK.data_ptr(),
            y_TN.data_ptr(), x_TK.shape[0], self._inputs, self._outputs, torch.get_num_threads(),
        )  # fmt: skip
        return y_TN


def has_tiles() -> bool:
    """Whether there is a matmul of our own for this processor, and it is compiled."""
    functions = cpu_row.row_functions()
    return functions is not None and functions.tiles is not None
