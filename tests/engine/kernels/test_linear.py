"""engine/kernels/linear.py against plain torch: odd shapes, parts, gating; and at true shapes against float64."""

import pytest
import torch

from engine.kernels.linear import Tiling, multiply, multiply_gated
from tests.engine.kernels.steps import error, random

SMALL = [Tiling(16, 32, 1, 2, 4), Tiling(32, 16, 3, 2, 4)]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def silu_and_multiply(y: torch.Tensor) -> torch.Tensor:
    gate, up = y.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tiling", SMALL)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 48, 64), (1, 50, 72), (3, 33, 40), (16, 64, 96), (17, 40, 100)]
)
def test_few_rows(rows: int, outputs: int, inputs: int, tiling: Tiling, dtype: torch.dtype) -> None:
    x_TK, weight_NK = random(rows, inputs, dtype=dtype, seed=1), random(outputs, inputs, dtype=dtype, seed=2)
    parts_PTN = multiply(x_TK, weight_NK, tiling)
    assert parts_PTN.shape == (tiling.parts, rows, outputs)
    assert error(parts_PTN.double().sum(0), x_TK.double() @ weight_NK.double().T) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "inner", "inputs"), [(1, 32, 64), (1, 24, 40), (5, 36, 48)])
def test_gating_in_the_epilogue(rows: int, inner: int, inputs: int, dtype: torch.dtype) -> None:
    x_TK, weight_NK = random(rows, inputs, dtype=dtype, seed=1), random(2 * inner, inputs, dtype=dtype, seed=2)
    found_TI = multiply_gated(x_TK, weight_NK, SMALL[0])
    assert error(found_TI, silu_and_multiply(x_TK.double() @ weight_NK.double().T)) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (128256, 4096), (34816, 5120)])
def test_true_shapes(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x_TK = random(rows, inputs, dtype=dtype, seed=1)
    weight_NK = (random(outputs, inputs, seed=2) * inputs**-0.5).to(dtype)  # results near 1: float16 ends at 65,504
    wanted_TN = x_TK.double() @ weight_NK.double().T
    for tiling in (Tiling(64, 64, 1, 3, 4), Tiling(64, 128, 3, 3, 4)) if rows > 1 else (Tiling(8, 512, 2, 3, 4),):
        assert error(multiply(x_TK, weight_NK, tiling).double().sum(0), wanted_TN) < TOLERANCE[dtype]
    if rows > 1:
        gated_TI = multiply_gated(x_TK, weight_NK, Tiling(64, 64, 1, 3, 4))
        assert error(gated_TI, silu_and_multiply(wanted_TN)) < TOLERANCE[dtype]
