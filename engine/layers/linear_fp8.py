"""A linear layer's weight in 8 bits a number on a GPU, and its matmul for any number of rows.

Rows are brought to 8 bits themselves, each with a factor or with one for each 128 inputs, as checkpoints of this kind
mean it: tensor cores multiply such numbers at twice the rate of bfloat16's (weights/fp8.py says where they do). Rows
may come so already, packed by whoever wrote them (kernels/packed_rows.py): what they give is bfloat16 then.

T rows, K inputs, N outputs, P parts, I inner size.
"""

from typing import Final

import torch
from torch import Tensor

from engine.kernels import linear
from engine.kernels.elementwise import gelu_and_multiply, silu_and_multiply, silu_and_pack
from engine.kernels.experts import grouped_linear
from engine.kernels.experts.grouped_linear import ExpertRows, ExpertWeights
from engine.kernels.experts.grouped_tuning import has_large_blocks, tile_rows, tiling_for
from engine.kernels.experts.quantize_rows import quantize_rows
from engine.kernels.fp8 import tiles
from engine.kernels.fp8.tiles import Fp8Tiling
from engine.kernels.fp8.tuning import Fp8Kernel, LibraryMatmul, PackingRow, select_fp8_kernel, select_gated_tiling
from engine.kernels.linear import LinearScales, LinearTiling
from engine.kernels.packed_rows import PACKED_MULTIPLE, factors_of, is_packed, numbers_of
from engine.layers.fp8_weight import Fp8Weight
from engine.layers.linear_gpu import in_one_part

PACKED_DTYPE: Final = torch.bfloat16  # of models whose rows may be packed
_LIBRARY_MULTIPLE: Final = 16  # of the sizes of a matrix that the library multiplies


class Fp8Linear:
    """An Fp8Weight with an optional bias_N; linear_gpu.GpuLinear says what its methods return.

    takes_packed  whether rows may be packed.
    packs_gated   whether `swiglu` may give packed rows: where what takes them does.
    """

    def __init__(self, weight: Fp8Weight, bias_N: Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.numbers_NK.shape
        self.bytes = weight.bytes + (0 if bias_N is None else bias_N.nbytes)
        self._weight = weight
        self._blocks = weight.scales_NB.shape[1]
        self._bias_N = bias_N
        self.takes_packed = self._blocks == 1 and self.inputs % PACKED_MULTIPLE == 0
        self.packs_gated = False

    def __call__(self, x_TK: Tensor) -> Tensor:
        kernel, dtype = self._kernel(x_TK), _dtype_of(x_TK)
        numbers_NK, scales_NB = self._weight.numbers_NK, self._weight.scales_NB
        if isinstance(kernel, PackingRow):
            if not is_packed(x_TK):
                parts_PTN = linear.multiply(x_TK, numbers_NK, kernel.tiling, LinearScales(scales_NB, None), dtype)
                return self._biased(parts_PTN)
            kernel = kernel.tiling
        own = self._rows_of(x_TK)
        match kernel:
            case LinearTiling() as tiling:
                parts_PTN = linear.multiply(own.rows, numbers_NK, tiling, self._scales(own), dtype)
            case Fp8Tiling() as tiling:
                parts_PTN = tiles.multiply(own.rows, numbers_NK, tiling, self._scales(own), dtype)
            case LibraryMatmul(exact):
                parts_PTN = self._multiply_by_library(own, dtype, exact)[None]
            case None:
                parts_PTN = self._multiply_in_blocks(own, dtype)
        return self._biased(parts_PTN)

    def swiglu(self, x_TK: Tensor) -> Tensor:
        """Few rows without a bias are gated by the kernel."""
        tiling = None
        if self._bias_N is None and self._blocks == 1:
            tiling = select_gated_tiling(self.outputs, self.inputs, len(x_TK), x_TK.device)
        if tiling is not None:
            own, dtype = self._rows_of(x_TK), _dtype_of(x_TK)
            return linear.multiply_gated(own.rows, self._weight.numbers_NK, tiling, self._scales(own), dtype)
        gate_up_TN = self.logits(x_TK)
        packs = self.packs_gated and gate_up_TN.dtype == PACKED_DTYPE
        return silu_and_pack(gate_up_TN) if packs else silu_and_multiply(gate_up_TN)

    def geglu(self, x_TK: Tensor) -> Tensor:
        return gelu_and_multiply(self(x_TK), _dtype_of(x_TK))

    def logits(self, x_TK: Tensor) -> Tensor:
        return in_one_part(self(x_TK), _dtype_of(x_TK))

    def _biased(self, parts_PTN: Tensor) -> Tensor:
        if self._bias_N is not None:
            parts_PTN[0] += self._bias_N
        return parts_PTN

    def _rows_of(self, x_TK: Tensor) -> ExpertRows:
        """The rows in 8 bits."""
        if not is_packed(x_TK):
            return quantize_rows(x_TK, self._blocks)
        assert self.takes_packed
        return ExpertRows(numbers_of(x_TK), factors_of(x_TK))

    def _scales(self, own: ExpertRows) -> LinearScales:
        assert own.scales is not None
        return LinearScales(self._weight.scales_NB, own.scales)

    def _kernel(self, x_TK: Tensor) -> Fp8Kernel | None:
        """None: for factors of 128 inputs, and what the library, which gives bfloat16, does not multiply."""
        if self._blocks > 1:
            return None
        kernel = select_fp8_kernel(self.outputs, self.inputs, len(x_TK), x_TK.device)
        fits = self.outputs % _LIBRARY_MULTIPLE == 0 and self.inputs % _LIBRARY_MULTIPLE == 0
        by_library = fits and x_TK.is_cuda and _dtype_of(x_TK) == torch.bfloat16
        return None if isinstance(kernel, LibraryMatmul) and not by_library else kernel

    def _multiply_by_library(self, own: ExpertRows, dtype: torch.dtype, exact: bool) -> Tensor:
        """[T, N]."""
        assert own.scales is not None
        numbers_NK, scales_NB = self._weight.numbers_NK, self._weight.scales_NB
        out_TN: Tensor = torch._scaled_mm(
            own.rows, numbers_NK.T, own.scales, scales_NB.T, out_dtype=dtype, use_fast_accum=not exact
        )
        return out_TN

    def _multiply_in_blocks(self, own: ExpertRows, dtype: torch.dtype) -> Tensor:
        """[P, T, N]."""
        rows, device = len(own.rows), own.rows.device
        tile = tile_rows(rows, 1)
        tiling = tiling_for(
            self.outputs, self.inputs, rows, 1, tile, gated=False, blocks=self._blocks,
            large=has_large_blocks(device, dtype),
        )  # fmt: skip
        dtype = dtype if tiling.parts == 1 else torch.float32
        out_PTN = torch.empty(tiling.parts, rows, self.outputs, dtype=dtype, device=device)
        weight = ExpertWeights(self._weight.numbers_NK, self._weight.scales_NB)
        return grouped_linear.multiply_alone(own, weight, tile, tiling, out_PTN)


def _dtype_of(x_TK: Tensor) -> torch.dtype:
    return PACKED_DTYPE if is_packed(x_TK) else x_TK.dtype
