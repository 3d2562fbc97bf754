"""engine/layers/linear_cpu.py: a stored weight multiplies right, and a row's bits do not depend on its company."""

import ctypes

import pytest
import torch

from engine.layers import cpu_row, linear_cpu
from engine.layers.cpu_row import RowFunctions
from engine.layers.cpu_tiles import has_tiles
from engine.layers.linear_cpu import CpuLinear, NotBatchInvariant, _min_rows, min_invariant_rows, row_chunk
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


def test_where_bits_depend_on_the_number_of_rows_they_come_in_pieces_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_so_many(x_TK: torch.Tensor, weight_NK: torch.Tensor, *_: object) -> torch.Tensor:
        return (x_TK[:, None] * weight_NK).sum(2) * len(x_TK)

    monkeypatch.setattr(linear_cpu, "_pack", lambda weight_NK: weight_NK)
    monkeypatch.setattr(linear_cpu, "_multiply", of_so_many)
    for probe in ("min_invariant_rows", "piece_rows"):
        monkeypatch.setattr(linear_cpu, probe, getattr(linear_cpu, probe).__wrapped__)
    linear, x_TK = CpuLinear(torch.eye(6)), torch.arange(6.0 * 150).view(150, 6)
    for rows in (1, 5, 64, 65, 150):
        assert torch.equal(linear(x_TK[:rows]), 64 * x_TK[:rows]), rows


def test_probing_a_shape_is_done_once() -> None:
    before = min_invariant_rows.cache_info().hits
    with torch.inference_mode():
        CpuLinear(torch.randn(40, 24))
        CpuLinear(torch.randn(40, 24))
    assert min_invariant_rows.cache_info().hits > before


needs_compiled_rows = pytest.mark.skipif(cpu_row.row_functions() is None, reason="no compiler, or no such processor")
not_in_tiles = pytest.mark.skipif(has_tiles(), reason="any number of rows of any size is multiplied in tiles")


@needs_compiled_rows
@not_in_tiles
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 128), (576, 960), (1536, 576), (2048, 4096), (4096, 64)])
def test_one_row_alone_is_multiplied_by_our_own_function_with_the_bits_of_many(inputs: int, outputs: int) -> None:
    torch.manual_seed(2)
    half, order = inputs // 2, torch.randperm(inputs)
    u, w = torch.randn(64, half), torch.randn(outputs, half)
    x = torch.cat((u, u), 1)[:, order].bfloat16()
    with torch.inference_mode():
        linear = CpuLinear(torch.cat((w, -w), 1)[:, order].bfloat16())
        full = linear(x)
        assert linear.row_alone is not None
        for row in range(64):
            assert torch.equal(linear.row_alone(x[row : row + 1]), full[row : row + 1]), row
            assert torch.equal(linear(x[row : row + 1]), full[row : row + 1]), row


@needs_compiled_rows
@not_in_tiles
@pytest.mark.parametrize(("inputs", "outputs"), [(33, 64), (48, 64), (64, 47), (64, 96)])
def test_shapes_that_our_own_function_does_not_take_are_left_to_the_library(inputs: int, outputs: int) -> None:
    with torch.inference_mode():
        linear = CpuLinear(torch.randn(outputs, inputs).bfloat16())
        assert linear.row_alone is None
        assert linear(torch.randn(1, inputs).bfloat16()).shape == (1, outputs)


@skip_if_bfloat16_varies()
def test_a_function_that_adds_up_in_another_order_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(weight: int, x: int, y: int, *_: int) -> None:
        ctypes.memset(y, 0x3C, 2)  # one result that rounding alone does not give

    functions = RowFunctions(*[multiply] * (len(RowFunctions._fields) - 1), tiles=None)
    monkeypatch.setattr(cpu_row, "row_functions", lambda: functions)
    row_chunk.cache_clear()
    try:
        with torch.inference_mode():
            assert CpuLinear(torch.randn(64, 64).bfloat16()).row_alone is None
    finally:
        row_chunk.cache_clear()
