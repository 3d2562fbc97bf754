"""Weights of 8 bits a number in engine/kernels/experts and the layers over it, with factors of outputs and of blocks,
beside what the same numbers give in float64."""

import pytest
import torch
from torch import Tensor

from engine.kernels.experts import grouped_linear, reference
from engine.kernels.experts.grouped_linear import ExpertRows, ExpertWeights, GroupedTiling
from engine.kernels.experts.quantize_rows import quantize_rows
from engine.kernels.experts.route import route
from engine.kernels.experts.routing_rule import RoutingRule
from engine.layers.fp8_weight import Fp8Weight
from engine.layers.linear_fp8 import Fp8Linear
from engine.layers.mixture_gpu import GpuExperts
from engine.weights import fp8
from tests.support.steps import DEVICE, error, poisoned, random

FORMS = ["outputs", "blocks"]


def packed(outputs: int, inputs: int, form: str, seed: int) -> tuple[Fp8Weight, Tensor]:
    """A weight, and its numbers in float64."""
    weight_NK = random(outputs, inputs, seed=seed) * inputs**-0.5
    numbers_NK, scales_NB = fp8.quantize(weight_NK)
    if form == "blocks":
        blocks = -(-inputs // 128)
        scales_NB = scales_NB * (
            1 + torch.arange(blocks, device=DEVICE) + torch.arange(outputs, device=DEVICE)[:, None] % 3
        )
    scales_NB = scales_NB.contiguous()
    return Fp8Weight(numbers_NK, scales_NB), fp8.expand(numbers_NK, scales_NB, torch.float64)


@pytest.mark.parametrize("blocks", [1, 2])
def test_rows_are_as_near_as_8_bits_have_them(blocks: int) -> None:
    x_TK = random(3, 200, seed=1) * torch.tensor([1.0, 1e-4, 300.0], device=DEVICE)[:, None]
    x_TK[1] = 0.0
    found = quantize_rows(x_TK, blocks)
    assert found.scales is not None
    expanded = fp8.expand(found.rows, found.scales, torch.float32)
    if blocks == 1:
        nearest, _ = fp8.quantize(x_TK)
        alike = (found.rows.view(torch.uint8) == nearest.view(torch.uint8)).float().mean()
        assert alike >= (1.0 if DEVICE.type == "cuda" else 0.96), "the interpreter rounds some to half of them"
    else:
        assert found.scales.shape == (3, 2)
    assert ((expanded - x_TK).abs() <= x_TK.abs() / 16 + 1e-9).float().mean() > 0.96
    assert not expanded[1].any()


def in_8_bits(x_TK: Tensor, blocks: int) -> Tensor:
    """The rows as they are multiplied, in float64."""
    own = quantize_rows(x_TK, blocks)
    assert own.scales is not None
    return fp8.expand(own.rows, own.scales, torch.float64)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 48, 256), (5, 48, 200), (44, 48, 256), (150, 48, 256), (3, 64, 2048)]
)
def test_a_layer_multiplies_rows_by_numbers_times_factors(
    rows: int, outputs: int, inputs: int, biased: bool, form: str
) -> None:
    """Hopper's tensor cores add up products with 14 bits of each."""
    weight, wide_NK = packed(outputs, inputs, form, seed=2)
    bias_N = random(outputs, seed=4) if biased else None
    linear, x_TK = Fp8Linear(weight, bias_N), random(rows, inputs, seed=3)
    wanted_TN = in_8_bits(x_TK, weight.scales_NB.shape[1]) @ wide_NK.T
    if bias_N is not None:
        wanted_TN += bias_N.double()
    most = 3e-4 if DEVICE.type == "cuda" else 1e-5
    assert error(linear(x_TK).double().sum(0), wanted_TN) < most
    assert error(linear.swiglu(x_TK), reference.gate(wanted_TN.clone(), 0.0)) < most
    assert linear.bytes == weight.bytes + (0 if bias_N is None else bias_N.nbytes)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 20, 150])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_is_in_all_of_its_own_row_and_in_no_other(number: float, rows: int, form: str) -> None:
    linear, x_TK = Fp8Linear(packed(48, 256, form, seed=2)[0]), random(rows, 256, seed=3)
    wanted_TN = linear.logits(x_TK)
    x_TK[0, 7] = number
    found_TN = linear.logits(x_TK)
    assert not found_TN[0].isfinite().any()
    assert torch.equal(found_TN[1:], wanted_TN[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 16, 33, 100, 128, 129, 1000])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)])
def test_true_shapes(rows: int, outputs: int, inputs: int, biased: bool) -> None:
    weight, wide_NK = packed(outputs, inputs, "outputs", seed=2)
    bias_N = random(outputs, dtype=torch.bfloat16, seed=4) if biased else None
    linear, x_TK = Fp8Linear(weight, bias_N), random(rows, inputs, dtype=torch.bfloat16, seed=3)
    wanted_TN = in_8_bits(x_TK, 1) @ wide_NK.T + (0.0 if bias_N is None else bias_N.double())
    assert error(linear(x_TK).double().sum(0), wanted_TN) < 4e-3
    assert error(linear.swiglu(x_TK), reference.gate(wanted_TN.clone(), 0.0)) < 8e-3


@pytest.mark.parametrize("form", FORMS)
def test_experts_multiply_by_numbers_times_factors(form: str) -> None:
    rule, rows, hidden, inner = RoutingRule(3, 2, normed=True), 4, 256, 384
    gate_up, wide_up = packed(rule.experts * 2 * inner, hidden, form, seed=5)
    down, wide_down = packed(rule.experts * hidden, inner, form, seed=6)
    up_blocks, down_blocks = (weight.scales_NB.shape[1] for weight in (gate_up, down))
    assert (up_blocks, down_blocks) == ((1, 1) if form == "outputs" else (2, 3))
    x_TK, logits_TE = random(rows, hidden, seed=7), random(rows, rule.experts, seed=8)
    plan = route(logits_TE[None], torch.tensor([rows], dtype=torch.int32, device=DEVICE), rule, None, 16)
    experts = GpuExperts((gate_up, None), (down, None), rule, 0.0)
    found = experts(x_TK, plan, None, torch.float32).double().sum(0)
    ids_TK, weights_TK = reference.route(logits_TE, rule)
    wanted, seen_TK = torch.zeros(rows, hidden, dtype=torch.float64, device=DEVICE), in_8_bits(x_TK, up_blocks)
    for row in range(rows):
        for expert, weight in zip(ids_TK[row].tolist(), weights_TK[row].double(), strict=True):
            y = reference.gate(seen_TK[row : row + 1] @ wide_up.chunk(3)[expert].T, 0.0)
            wanted[row] += weight * (in_8_bits(y.float(), down_blocks) @ wide_down.chunk(3)[expert].T)[0]
    assert error(found, wanted) < 3e-3, "an inner number may round to its other neighbour"
    assert experts.bytes == gate_up.bytes + down.bytes


def test_rows_and_weights_of_8_bits_meet_in_one_product() -> None:
    weight, wide_NK = packed(32, 128, "outputs", seed=9)
    own = quantize_rows(random(20, 128, seed=10), 1)
    assert own.scales is not None
    out_PTN = poisoned(1, 20, 32)
    stack = ExpertWeights(weight.numbers_NK, weight.scales_NB)
    grouped_linear.multiply_alone(ExpertRows(own.rows, own.scales), stack, 32, GroupedTiling(32, 64, 1, 2, 4), out_PTN)
    assert error(out_PTN[0], fp8.expand(own.rows, own.scales, torch.float64) @ wide_NK.T) < 1e-5
