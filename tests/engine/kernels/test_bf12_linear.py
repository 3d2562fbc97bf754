"""engine/kernels/bf12_linear.py against plain torch: odd shapes, parts, gating, escapes of all kinds; to the bit where
it is promised."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.bf12.codec import Bf12Weight
from engine.bf12.layout import lanes_of
from engine.kernels import bf12_linear as kernels
from engine.kernels import linear
from engine.kernels.bf12_linear import Bf12Tiling, multiply, multiply_gated
from engine.kernels.linear import LinearTiling
from engine.kernels.tuning import select_bf12_tiling
from tests.support.bf12_weights import coded, every_value, weights, without_escapes
from tests.support.steps import DEVICE, error, random

WHOLE, PARTED = Bf12Tiling(16, 1, 1, 2, 4, 4), Bf12Tiling(32, 1, 3, 2, 4, 8)
ALONE, APART = Bf12Tiling(64, 1, 1, 2, 4, 1), Bf12Tiling(64, 1, 1, 2, 4, 2)
ONE_ROW = Bf12Tiling(16, 1, 1, 2, 4, 0)
SHAPES = [(1, 48, 256), (1, 50, 384), (2, 33, 128), (3, 20, 1024), (17, 40, 640), (100, 16, 128)]
BF16 = torch.bfloat16
TRUE = [(6144, 4096), (4096, 14336), (128256, 4096)]


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write is NaN."""
    empty = torch.empty

    def poisoned(*arguments: Any, **options: Any) -> Tensor:
        made = empty(*arguments, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)


def silu_and_multiply(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def fitting(tiling: Bf12Tiling, rows: int, inputs: int) -> Bf12Tiling:
    turns = inputs // (8 * lanes_of(inputs))
    return tiling if rows > 1 else replace(tiling, joined=0, parts=min(tiling.parts, turns))


def product(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    return x_TK.double() @ weight_NK.to(DEVICE).double().T


def pieces(outputs: int, inputs: int, sigmas: tuple[float, ...] = (0.02, 0.9, 30.0)) -> list[Tensor]:
    """As q, k and v: of different bases, with some numbers that have no code, the tiles' first and last among them."""
    sizes = (outputs // 2, outputs // 4, outputs - outputs // 2 - outputs // 4)
    parts = [weights(size, inputs, sigma, seed=size) for size, sigma in zip(sizes, sigmas, strict=True)]
    for part, sigma in zip(parts, sigmas, strict=True):
        part.view(-1)[::157] = 0.0
        part[0, -1] = part[-1, 0] = part[-1, -1] = 3e-30
        part[len(part) // 2, :7] = sigma * 300
    return parts


@pytest.mark.parametrize("tiling", [ALONE, PARTED], ids=str)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_few_rows(rows: int, outputs: int, inputs: int, tiling: Bf12Tiling) -> None:
    parts, x_TK = pieces(outputs, inputs), random(rows, inputs, seed=1)
    tiling = fitting(tiling, rows, inputs)
    found_PTN = multiply(x_TK, coded(*parts), tiling)
    assert found_PTN.shape == (tiling.parts, rows, outputs)
    for found_TN, wanted_TN in zip(
        found_PTN.double().sum(0).split([len(part) for part in parts], 1),
        (product(x_TK, part) for part in parts),
        strict=True,
    ):
        assert error(found_TN, wanted_TN) < 1e-6


@pytest.mark.parametrize("joined", [1, 2, 4, 8])
def test_any_number_joined(joined: int) -> None:
    weight_NK, x_TK = torch.cat(pieces(20, 256)), random(5, 256, seed=1)
    found_PTN = multiply(x_TK, coded(weight_NK), Bf12Tiling(32, 1, 1, 2, 4, joined))
    assert error(found_PTN[0], product(x_TK, weight_NK)) < 1e-6


@pytest.mark.parametrize("parts", [2, 4, 5, 8])  # of eight blocks
@pytest.mark.parametrize("rows", [1, 5])
def test_any_number_of_parts(rows: int, parts: int) -> None:
    weight_NK, x_TK = torch.cat(pieces(20, 2048)), random(rows, 2048, seed=1)
    found_PTN = multiply(x_TK, coded(weight_NK), fitting(Bf12Tiling(32, 1, parts, 2, 4, 4), rows, 2048))
    assert len(found_PTN) == parts
    assert error(found_PTN.double().sum(0), product(x_TK, weight_NK)) < 1e-6


@pytest.mark.parametrize(("inputs", "block_n", "blocks"), [(1024, 8, 2), (1024, 8, 4), (384, 16, 1)])
def test_one_row_takes_several_blocks_at_once(inputs: int, block_n: int, blocks: int) -> None:
    weight_NK, x_TK = torch.cat(pieces(20, inputs)), random(1, inputs, seed=1)
    found_PTN = multiply(x_TK, coded(weight_NK), Bf12Tiling(block_n, blocks, 1, 2, 4, 0))
    assert error(found_PTN[0], product(x_TK, weight_NK)) < 1e-6


@pytest.mark.parametrize(("rows", "joined"), [(1, 0), (2, 4)])
def test_a_tiling_that_leaves_a_thread_one_word_is_refused(rows: int, joined: int) -> None:
    weight, x_TK = coded(weights(16, 384)), random(rows, 384)
    with pytest.raises(AssertionError):
        multiply(x_TK, weight, Bf12Tiling(8, 1, 1, 2, 4, joined))


def test_a_part_of_one_row_without_a_turn_is_refused() -> None:
    with pytest.raises(AssertionError):
        multiply(random(1, 512), coded(weights(16, 512)), replace(ONE_ROW, parts=3))


@pytest.mark.parametrize("tiling", [WHOLE, ALONE], ids=str)
@pytest.mark.parametrize(("rows", "inner", "inputs"), [(1, 32, 256), (1, 24, 384), (5, 36, 128), (17, 40, 256)])
def test_gating_in_the_epilogue(rows: int, inner: int, inputs: int, tiling: Bf12Tiling) -> None:
    gate_NK, up_NK = (torch.cat(pieces(inner, inputs, sigmas)) for sigmas in ((0.01, 0.1, 0.02), (0.5, 3.0, 0.02)))
    x_TK = random(rows, inputs, seed=1)
    found_TI = multiply_gated(x_TK, coded(gate_NK, up_NK), fitting(tiling, rows, inputs))
    assert error(found_TI, silu_and_multiply(product(x_TK, torch.cat((gate_NK, up_NK))))) < 1e-6


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("parts", [1, 3])
def test_hundreds_of_escapes_in_one_group(rows: int, parts: int) -> None:
    weight_NK, x_TK = weights(48, 512), random(rows, 512, seed=1)
    weight_NK[16:32].view(-1)[torch.randperm(16 * 512, generator=torch.Generator().manual_seed(2))[:700]] = 1e20
    weight_NK[5], weight_NK[6, 100:] = 0.0, 0.0  # of the latter what is left has no code
    found_PTN = multiply(x_TK, coded(weight_NK), fitting(Bf12Tiling(32, 1, parts, 2, 4, 4), rows, 512))
    for group in (slice(0, 16), slice(16, 32), slice(32, 48)):
        assert error(found_PTN.double().sum(0)[:, group], product(x_TK, weight_NK[group])) < 1e-6


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("fill", [0.0, -0.0, 1e-40])
def test_a_matrix_without_codes(rows: int, fill: float) -> None:
    weight_NK, x_TK = torch.full((16, 128), fill, dtype=BF16), random(rows, 128, seed=1)
    assert error(multiply(x_TK, coded(weight_NK), fitting(WHOLE, rows, 128))[0], product(x_TK, weight_NK)) < 1e-6


@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_not_finite_is_only_in_its_own_output(rows: int) -> None:
    weight_NK, x_TK = weights(40, 256), random(rows, 256, seed=1).abs()
    weight_NK[3, 7], weight_NK[17, 255], weight_NK[18, 0] = float("nan"), float("inf"), -float("inf")
    found_TN = multiply(x_TK, coded(weight_NK), fitting(PARTED, rows, 256)).sum(0)
    assert found_TN[:, 3].isnan().all()
    assert (found_TN[:, 17] == float("inf")).all()
    assert (found_TN[:, 18] == -float("inf")).all()
    finite = [n for n in range(40) if n not in (3, 17, 18)]
    assert error(found_TN[:, finite], product(x_TK, weight_NK[finite])) < 1e-6


def with_and_without_codes(base: int) -> Tensor:
    """[48, 128]: each number that has a code, then four normal ones of each exponent that has none."""
    values = every_value().view(-1)
    bits = values.view(torch.int16).int()
    exponents, mantissas = bits >> 7 & 0xFF, bits & 0x7F
    has_code = (exponents >= base) & (exponents < base + 16)
    some = torch.isin(mantissas, torch.tensor([0, 1, 85, 127])) & (exponents > 0) & (exponents < 0xFF)
    others, padded = values[some & ~has_code], torch.zeros(2048, dtype=BF16)
    padded[: len(others)] = others
    return torch.cat((values[has_code], padded)).view(48, 128)


@pytest.mark.parametrize(("tiling", "base"), [(ALONE, 2), (APART, 112), (ALONE, 239)], ids=str)
def test_each_number_is_multiplied_as_itself(tiling: Bf12Tiling, base: int) -> None:
    weight_NK, x_TK = with_and_without_codes(base), torch.eye(128, device=DEVICE)
    weight = coded(weight_NK, base=base)
    assert len(weight.index.places_E) == 16 * 128
    found_TN = multiply(x_TK, weight, tiling)[0]
    assert torch.equal(found_TN.T.cpu(), weight_NK.float())
    for row in (0, 77, 127):
        assert torch.equal(multiply(x_TK[row : row + 1], weight, ONE_ROW)[0, 0].cpu(), weight_NK[:, row].float())


@pytest.mark.parametrize("gated", [False, True])
def test_a_row_has_the_same_bits_in_any_company(gated: bool) -> None:
    x_TK, weight = random(16, 256, seed=1), coded(torch.cat(pieces(48, 256)))
    kernel = multiply_gated if gated else multiply
    full = kernel(x_TK, weight, ALONE).view(16, -1)
    for rows in (2, 11):
        assert torch.equal(kernel(x_TK[:rows], weight, ALONE).view(rows, -1), full[:rows])
        assert torch.equal(kernel(x_TK[-rows:], weight, ALONE).view(rows, -1), full[-rows:])


@pytest.mark.parametrize(("rows", "parts", "inputs"), [(1, 1, 512), (1, 1, 384), (2, 1, 384), (16, 3, 1024)])
def test_without_escapes_sums_have_the_bits_of_bf16s_in_the_same_order(rows: int, parts: int, inputs: int) -> None:
    """One row adds up per lane, more of them a block after the other."""
    if DEVICE.type == "cuda":
        pytest.skip("in float32 a GPU's order is another; below it is tested in bf16")
    weight_NK, x_TK = without_escapes(weights(32, inputs)), random(rows, inputs, seed=1)
    weight = coded(weight_NK)
    assert not len(weight.index.places_E)
    lanes = lanes_of(inputs)
    wanted = linear.multiply(x_TK, weight_NK.float(), LinearTiling(32, lanes if rows == 1 else 8 * lanes, parts, 2, 4))
    assert torch.equal(multiply(x_TK, weight, fitting(Bf12Tiling(32, 1, parts, 2, 4, 8), rows, inputs)), wanted)


@lru_cache(1)
def true_weight(outputs: int, inputs: int) -> tuple[Tensor, Bf12Weight]:
    weight_NK = torch.randn(outputs, inputs, dtype=BF16, device=DEVICE).mul_(inputs**-0.5)
    return weight_NK, coded(weight_NK)


def tilings(outputs: int, inputs: int, rows: int) -> list[Bf12Tiling]:
    chosen = select_bf12_tiling(outputs, inputs, rows, False, DEVICE)
    fixed = [Bf12Tiling(16, 1, 1, 3, 4, 0), Bf12Tiling(8, 2, 2, 4, 4, 0), Bf12Tiling(64, 1, 1, 3, 4, 4)]
    if rows > 1:
        fixed = [Bf12Tiling(64, 1, parts, 3, 4, joined) for joined, parts in ((1, 1), (2, 3), (4, 1), (8, 2))]
    return [*fixed, chosen] if isinstance(chosen, Bf12Tiling) else fixed


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 33, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [*TRUE, (1024, 896)])
def test_true_shapes(outputs: int, inputs: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within bf16's error, and to the bit whichever way numbers are decoded."""
    weight_NK, weight = true_weight(outputs, inputs)
    x_TK = random(rows, inputs, dtype=BF16, seed=1)
    wanted_TN = product(x_TK, weight_NK)
    for tiling in tilings(outputs, inputs, rows):
        if inputs % (8 * lanes_of(inputs) * tiling.blocks):
            continue
        found = multiply(x_TK, weight, tiling)
        assert error(found.double().sum(0), wanted_TN) < 4e-3, tiling
        assert torch.equal(found, multiply(x_TK, weight, tiling)), tiling
    tiling = tilings(outputs, inputs, rows)[0]
    found = multiply(x_TK, weight, tiling)
    monkeypatch.setattr(kernels, "inline", lambda device: False)
    assert torch.equal(multiply(x_TK, weight, tiling), found)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 16, 32])
def test_true_shapes_gated(rows: int) -> None:
    weight_NK, weight = true_weight(28672, 4096)
    x_TK = random(rows, 4096, dtype=BF16, seed=1)
    for warps, joined in ((4, 0), (8, 0)) if rows == 1 else ((4, 2), (4, 4)):
        tiling = Bf12Tiling(16 if rows == 1 else 64, 1, 1, 3, warps, joined)
        found_TI = multiply_gated(x_TK, weight, tiling)
        assert error(found_TI, silu_and_multiply(product(x_TK, weight_NK))) < 8e-3


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16])
def test_each_of_all_values_is_multiplied_as_itself_on_a_gpu(rows: int) -> None:
    weight_NK = every_value()
    weight_NK[~(weight_NK.isfinite() & (weight_NK.abs() >= 2.0**-126))] = 0.0  # nothing is promised of subnormal sums
    weight, x_TK = coded(weight_NK, base=112), torch.eye(128, device=DEVICE, dtype=BF16)
    for first in range(0, 128, rows):
        found_TN = multiply(x_TK[first : first + rows], weight, fitting(Bf12Tiling(64, 1, 1, 2, 4, 4), rows, 128))[0]
        assert torch.equal(found_TN.T.cpu().float(), weight_NK[:, first : first + rows].float())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 16, 64])
@pytest.mark.parametrize("joined", [1, 2, 4, 8])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (1024, 896)])
def test_without_escapes_tensor_cores_give_the_bits_of_bf16(outputs: int, inputs: int, joined: int, rows: int) -> None:
    weight_NK, x_TK = without_escapes(weights(outputs, inputs)), random(rows, inputs, dtype=BF16, seed=1)
    weight = coded(weight_NK)
    assert not len(weight.index.places_E)
    for parts in (1, 2):
        wanted = linear.multiply(x_TK, weight_NK.to(DEVICE), LinearTiling(64, 8 * lanes_of(inputs), parts, 3, 4))
        assert torch.equal(multiply(x_TK, weight, Bf12Tiling(64, 1, parts, 3, 4, joined)), wanted)


@pytest.mark.gpu
def test_a_captured_graph_gives_what_was_captured() -> None:
    weight_NK, weight = true_weight(4096, 4096)
    x_TK = random(16, 4096, dtype=BF16, seed=1)
    tiling = tilings(4096, 4096, 16)[0]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        multiply(x_TK, weight, tiling)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = multiply(x_TK, weight, tiling)
    x_TK.copy_(random(16, 4096, dtype=BF16, seed=2))
    graph.replay()
    assert torch.equal(found, multiply(x_TK, weight, tiling))
    assert error(found.sum(0), product(x_TK, weight_NK)) < 4e-3
