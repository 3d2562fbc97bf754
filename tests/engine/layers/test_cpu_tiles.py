"""engine/layers/cpu_tiles.py: rows multiplied in tiles are right, and each has the same bits in any company; on a
processor with AMX by AVX2 too, which every such processor has."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from engine.layers import cpu_row, linear_cpu
from engine.layers.cpu_tiles import TileMatmul, has_tiles
from engine.layers.linear_cpu import ACTIVATION_FUNCTIONS, Activation, CpuLinear
from tests.support.processors import PROCESSORS, compute_as

SHAPES = [(64, 64), (1, 1), (7, 33), (33, 31), (96, 47), (576, 960), (1030, 100), (8192, 70), (33_000, 40)]


@pytest.fixture(autouse=True, params=PROCESSORS)
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    compute_as(request.param, monkeypatch)
    if not has_tiles():
        pytest.skip("a processor whose library multiplies any number of rows alike")
    return str(request.param)


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest, processor: str) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    with torch.inference_mode():
        yield request.param
    torch.set_num_threads(before)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def cancelling(inputs: int, outputs: int, rows: int) -> tuple[Tensor, Tensor]:
    """Rows and a weight whose sums are nearly 0, so that any other order of adding up shows in bfloat16 too."""
    half, order = inputs // 2, torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    u, w, rest = random(rows, half), random(outputs, half), inputs % 2
    x = torch.cat((u, u, u.new_zeros(rows, rest)), 1)[:, order]
    return x, torch.cat((w, -w, w.new_zeros(outputs, rest)), 1)[:, order]


@pytest.mark.parametrize("rows", [1, 16, 17, 33, 70])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_agrees_with_float64_to_one_rounding(inputs: int, outputs: int, rows: int) -> None:
    weight, bias, x = random(outputs, inputs), random(outputs), random(rows, inputs)
    exact = x.double() @ weight.double().T
    tolerance = {"rtol": 2**-8, "atol": 2e-5 * inputs}
    torch.testing.assert_close(TileMatmul(weight, None)(x).double(), exact, **tolerance)
    torch.testing.assert_close(TileMatmul(weight, bias)(x).double(), exact + bias.double(), **tolerance)


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_row_has_the_same_bits_alone_and_at_any_place(inputs: int, outputs: int) -> None:
    x, weight = cancelling(inputs, outputs, 600)
    matmul = TileMatmul(weight, None)
    full = matmul(x)
    for rows in [*range(1, 36), 48, 63, 64, 65, 129, 511, 512, 513]:
        assert torch.equal(matmul(x[:rows]), full[:rows]), rows
        assert torch.equal(matmul(x[-rows:]), full[-rows:]), rows
        first = (37 * rows) % (600 - rows)
        assert torch.equal(matmul(x[first : first + rows]), full[first : first + rows]), rows


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_row_has_the_same_bits_with_any_number_of_threads(inputs: int, outputs: int) -> None:
    x, weight = cancelling(inputs, outputs, 40)
    matmul = TileMatmul(weight, random(outputs))
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        results += [matmul(x), TileMatmul(weight, random(outputs))(x)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_what_is_not_finite_spoils_no_other_row() -> None:
    x, weight = cancelling(100, 70, 50)
    matmul = TileMatmul(weight, None)
    clean = matmul(x)
    spoiled = x.clone()
    spoiled[3], spoiled[20, -1], spoiled[49, 0] = float("nan"), float("inf"), float("nan")
    rows = torch.ones(50, dtype=torch.bool)
    rows[[3, 20, 49]] = False
    result = matmul(spoiled)
    assert torch.equal(result[rows], clean[rows])
    assert result[3].isnan().all()
    assert not result[20].isfinite().any()
    assert result[49].isnan().all()


def test_a_weight_that_is_not_finite_spoils_its_own_output_alone() -> None:
    weight, x = random(33, 47), random(5, 47)
    clean = TileMatmul(weight, None)(x)
    weight[32, 46] = float("inf")
    result = TileMatmul(weight, None)(x)
    assert torch.equal(result[:, :32], clean[:, :32])
    assert not result[:, 32].isfinite().any()


def test_rows_that_do_not_lie_beside_each_other_are_taken() -> None:
    weight, x = random(40, 64), random(64, 9)
    matmul = TileMatmul(weight, None)
    assert torch.equal(matmul(x.T), matmul(x.T.contiguous()))
    assert matmul(x.T[:0]).shape == (0, 40)


def test_the_librarys_own_matmuls_in_between_stay_right() -> None:
    """With AMX both configure a core's tiles, each for itself."""
    if not linear_cpu._LIBRARY_HAS[torch.bfloat16]():
        pytest.skip("the library has no bfloat16 for this processor")
    weight, x = random(96, 128), random(40, 128)
    matmul, packed = TileMatmul(weight, None), linear_cpu._pack(weight)
    ours, theirs = matmul(x), linear_cpu._multiply(x, packed, None)
    for rows in (40, 1, 17, 33, 40):
        assert torch.equal(matmul(x[:rows]), ours[:rows])
        assert torch.equal(linear_cpu._multiply(x, packed, None), theirs)
        torch.testing.assert_close(torch.mm(x, weight.T), theirs, rtol=2**-7, atol=0.1)


@pytest.mark.parametrize("activation", list(Activation))
def test_linear_layers_in_bfloat16_are_in_tiles_whatever_their_activation(activation: Activation) -> None:
    weight, bias, x = random(97, 64), random(97), random(40, 64)
    linear = CpuLinear(weight, bias, activation)
    assert linear._tiles is not None
    wanted = ACTIVATION_FUNCTIONS[activation](torch.nn.functional.linear(x.double(), weight.double(), bias.double()))
    torch.testing.assert_close(linear(x).double(), wanted, rtol=2**-6, atol=2e-2)
    for rows in (slice(0, 1), slice(7, 24), slice(39, 40)):
        assert torch.equal(linear(x[rows]), linear(x)[rows])


def test_a_row_alone_has_neither_bias_nor_activation() -> None:
    weight, bias = random(96, 64), random(96)
    assert CpuLinear(weight).row_alone is not None
    for other in (CpuLinear(weight, bias), CpuLinear(weight, None, Activation.RELU), CpuLinear(weight.float())):
        assert other.row_alone is None


def test_a_system_that_gives_no_tiles_leaves_bfloat16_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def hearth_allow_tiles(self) -> int:
            return -1

    assert cpu_row._tile_functions(Library()) is None  # type: ignore[arg-type]
    monkeypatch.setattr(linear_cpu, "has_tiles", lambda: False)
    weight, x = random(96, 64), random(40, 64)
    if not linear_cpu._LIBRARY_HAS[torch.bfloat16]():
        with pytest.raises(linear_cpu.NotBatchInvariant, match=r"no matmul in torch\.bfloat16"):
            CpuLinear(weight)
        return
    linear = CpuLinear(weight)
    assert linear._tiles is None
    torch.testing.assert_close(linear(x), TileMatmul(weight, None)(x), rtol=2**-7, atol=1e-2)
