"""engine/layers/linear_cpu.py: a stored weight multiplies right, and a row's bits do not depend on its company."""

import pytest
import torch

from engine.layers.linear_cpu import Dense, RowsDiffer, _least, rows_least

SHAPES = [(64, 128), (47, 33), (96, 64), (384, 640), (1024, 384), (1536, 576), (2048, 300)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_agrees_with_a_plain_matmul(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(5, inputs)
    exact = x.to(dtype).double() @ weight.to(dtype).double().T
    tolerance = {"rtol": 1e-2, "atol": 0.3} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-3}
    with torch.inference_mode():
        torch.testing.assert_close(Dense(weight.to(dtype))(x.to(dtype)).double(), exact, **tolerance)
        biased = Dense(weight.to(dtype), bias.to(dtype))(x.to(dtype)).double()
        torch.testing.assert_close(biased, exact + bias.to(dtype).double(), **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_row_has_the_same_bits_in_any_company(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    """With inputs whose sums cancel, so that any other order of adding up shows, in bfloat16 too."""
    torch.manual_seed(1)
    half = inputs // 2
    u, w, order = torch.randn(300, half), torch.randn(outputs, half), torch.randperm(2 * half)
    weight = torch.cat((w, -w), 1)[:, order].to(dtype)
    x = torch.cat((u, u), 1)[:, order].to(dtype)
    with torch.inference_mode():
        linear = Dense(weight)
        full = linear(x)
        for rows in [*range(1, 40), 63, 64, 65, 100, 128, 129, 200, 256, 299]:
            assert torch.equal(linear(x[:rows]), full[:rows]), rows
            assert torch.equal(linear(x[-rows:]), full[-rows:]), rows


def test_the_probe_notices_a_matmul_that_treats_few_rows_otherwise() -> None:
    def multiply(x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1, keepdim=True) if len(x) > 3 else x.flip(-1).cumsum(-1)[:, -1:]

    x = torch.randn(64, 999)
    assert _least(multiply, x) == 4


def test_a_library_that_never_agrees_is_refused() -> None:
    with pytest.raises(RowsDiffer, match="inputs"):
        _least(lambda x: x * len(x), torch.ones(64, 3))


def test_probing_a_shape_is_done_once() -> None:
    before = rows_least.cache_info().hits
    with torch.inference_mode():
        Dense(torch.randn(40, 24))
        Dense(torch.randn(40, 24))
    assert rows_least.cache_info().hits > before
