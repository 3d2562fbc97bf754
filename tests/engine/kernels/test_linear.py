"""engine/kernels/linear.py against plain torch: odd shapes, parts, gating; and at true shapes against float64."""

import pytest
import torch

from engine.kernels.linear import LinearTiling, multiply, multiply_gated
from engine.kernels.tuning import ROW_BUCKETS, select_tiling
from tests.support.steps import DEVICE, error, poisoned, random

SMALL = [LinearTiling(16, 32, 1, 2, 4), LinearTiling(32, 16, 3, 2, 4)]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write is NaN."""
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: poisoned(*shape, dtype=dtype))


def silu_and_multiply(y: torch.Tensor) -> torch.Tensor:
    gate, up = y.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tiling", SMALL)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 48, 64), (1, 50, 72), (3, 33, 40), (16, 64, 96), (17, 40, 100)]
)
def test_few_rows(rows: int, outputs: int, inputs: int, tiling: LinearTiling, dtype: torch.dtype) -> None:
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


@pytest.mark.parametrize("gated", [False, True])
def test_a_row_has_the_same_bits_in_any_company(gated: bool) -> None:
    x_TK, weight_NK = random(16, 72, seed=1), random(48, 72, seed=2)
    kernel = multiply_gated if gated else multiply
    full = kernel(x_TK, weight_NK, SMALL[0]).view(16, -1)
    for rows in (2, 5, 11):
        assert torch.equal(kernel(x_TK[:rows], weight_NK, SMALL[0]).view(rows, -1), full[:rows])
        assert torch.equal(kernel(x_TK[-rows:], weight_NK, SMALL[0]).view(rows, -1), full[-rows:])


@pytest.mark.gpu
@pytest.mark.parametrize("bucket", ROW_BUCKETS[1:])
@pytest.mark.parametrize(
    ("outputs", "inputs", "gated"), [(6144, 4096, False), (4096, 14336, False), (28672, 4096, True)]
)
def test_the_chosen_kernels_give_a_row_the_same_bits_within_a_bucket(
    outputs: int, inputs: int, gated: bool, bucket: int
) -> None:
    tiling = select_tiling(outputs, inputs, bucket, gated, DEVICE)
    if tiling is None:
        pytest.skip("cuBLAS")
    x_TK, weight_NK = random(bucket, inputs, dtype=torch.bfloat16), random(outputs, inputs, dtype=torch.bfloat16)
    kernel = multiply_gated if gated else multiply
    full = kernel(x_TK, weight_NK, tiling)
    for rows in (bucket // 2 + 1, bucket - 1):
        assert torch.equal(kernel(x_TK[-rows:], weight_NK, tiling), full[..., -rows:, :])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33, 64, 100])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (128256, 4096), (34816, 5120)])
def test_true_shapes(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x_TK = random(rows, inputs, dtype=dtype, seed=1)
    weight_NK = (random(outputs, inputs, seed=2) * inputs**-0.5).to(dtype)  # results near 1: float16 ends at 65,504
    wanted_TN = x_TK.double() @ weight_NK.double().T
    for tiling in (
        (LinearTiling(64, 64, 1, 3, 4), LinearTiling(64, 128, 3, 3, 4))
        if rows > 1
        else (LinearTiling(8, 512, 2, 3, 4),)
    ):
        assert error(multiply(x_TK, weight_NK, tiling).double().sum(0), wanted_TN) < TOLERANCE[dtype]
    if rows > 1:
        gated_TI = multiply_gated(x_TK, weight_NK, LinearTiling(64, 64, 1, 3, 4))
        assert error(gated_TI, silu_and_multiply(wanted_TN)) < TOLERANCE[dtype]
