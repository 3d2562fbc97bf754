"""engine/layers/linear_cpu.py: a stored weight multiplies right, and a row's bits do not depend on its company."""

import pytest
import torch

from engine.layers.linear_cpu import CpuLinear, NotBatchInvariant, _min_rows, min_invariant_rows
from tests.support.batch_invariance import skip_if_bfloat16_varies

SHAPES = [(64, 128), (47, 33), (96, 64), (384, 640), (1024, 384), (1536, 576), (2048, 300)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@skip_if_bfloat16_varies()
def test_agrees_with_a_plain_matmul(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(5, inputs)
    exact = x.to(dtype).double() @ weight.to(dtype).double().T
    tolerance = {"rtol": 1e-2, "atol": 0.3} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-3}
    with torch.inference_mode():
        torch.testing.assert_close(CpuLinear(weight.to(dtype))(x.to(dtype)).double(), exact, **tolerance)
        biased = CpuLinear(weight.to(dtype), bias.to(dtype))(x.to(dtype)).double()
        torch.testing.assert_close(biased, exact + bias.to(dtype).double(), **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@skip_if_bfloat16_varies()
def test_a_row_has_the_same_bits_in_any_company(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    """With inputs whose sums cancel, so that any other order of adding up shows, in bfloat16 too."""
    torch.manual_seed(1)
    half = inputs // 2
    u, w, order = torch.randn(300, half), torch.randn(outputs, half), torch.randperm(2 * half)
    weight = torch.cat((w, -w), 1)[:, order].to(dtype)
    x = torch.cat((u, u), 1)[:, order].to(dtype)
    with torch.inference_mode():
        linear = CpuLinear(weight)
        full = linear(x)
        for rows in [*range(1, 40), 63, 64, 65, 100, 128, 129, 200, 256, 299]:
            assert torch.equal(linear(x[:rows]), full[:rows]), rows
            assert torch.equal(linear(x[-rows:]), full[-rows:]), rows


def test_the_probe_notices_a_matmul_that_treats_few_rows_otherwise() -> None:
    def multiply(x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1, keepdim=True) if len(x) > 3 else x.flip(-1).cumsum(-1)[:, -1:]

    x = torch.randn(64, 999)
    assert _min_rows(multiply, x) == 4


def test_a_library_that_never_agrees_is_refused() -> None:
    with pytest.raises(NotBatchInvariant, match="inputs"):
        _min_rows(lambda x: x * len(x), torch.ones(64, 3))


def test_probing_a_shape_is_done_once() -> None:
    before = min_invariant_rows.cache_info().hits
    with torch.inference_mode():
        CpuLinear(torch.randn(40, 24))
        CpuLinear(torch.randn(40, 24))
    assert min_invariant_rows.cache_info().hits > before
