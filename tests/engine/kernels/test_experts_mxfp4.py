"""engine/kernels/experts/grouped_mxfp4.py against the numbers that its bytes mean, for choices of all kinds."""

import pytest
import torch
from torch import Tensor

from engine.kernels.experts import grouped_mxfp4, reference
from engine.kernels.experts.grouped_linear import GroupedTiling
from engine.kernels.experts.grouped_tuning import mxfp4_tiling_for, tile_rows
from engine.kernels.experts.mxfp4_weight import Mxfp4Weight
from engine.kernels.experts.route import route
from engine.kernels.experts.routing_rule import RouterScores, RoutingRule
from engine.layers.mixture_gpu import GpuExperts
from engine.weights import mxfp4
from tests.engine.kernels.test_experts import CHOICES, RULES, TILE, TOLERANCE, counted, expected
from tests.support.steps import DEVICE, error, poisoned, random


def made(outputs: int, inputs: int, seed: int) -> tuple[Mxfp4Weight, Tensor]:
    """A weight of random bytes, and its numbers in float32."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    blocks = outputs * inputs // mxfp4.BLOCK
    bytes_BH = torch.randint(256, (blocks, mxfp4.BLOCK_BYTES), dtype=torch.uint8, generator=generator, device=DEVICE)
    exponents_B = torch.randint(118, 124, (blocks,), dtype=torch.uint8, generator=generator, device=DEVICE)
    weight = Mxfp4Weight(mxfp4.pair(bytes_BH).view(outputs, -1), exponents_B.view(outputs, -1))
    return weight, mxfp4.expand(bytes_BH, exponents_B, torch.float32).view(outputs, inputs)


def test_every_byte_and_power_becomes_the_numbers_that_it_means() -> None:
    bytes_BH = torch.arange(256, dtype=torch.uint8).repeat(2).view(32, 16)
    exponents_B = torch.tensor([0, 1, 2, 60, 126, 127, 128, 200, 251, 252] + [127] * 22, dtype=torch.uint8)
    weight = Mxfp4Weight(mxfp4.pair(bytes_BH).view(8, -1).to(DEVICE), exponents_B.view(8, -1).to(DEVICE))
    found = poisoned(8, 128)
    grouped_mxfp4.expand(weight, found, range(8))
    assert torch.equal(found.cpu(), mxfp4.expand(bytes_BH, exponents_B, torch.float32).view(8, 128))


def test_some_outputs_are_expanded_alone() -> None:
    weight, numbers = made(40, 192, seed=1)
    found = poisoned(21, 192)
    grouped_mxfp4.expand(weight, found, range(13, 34))
    assert torch.equal(found, numbers[13:34])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("name", "limit", "tile"), [("Llama 4's", 0.0, TILE), ("gpt-oss's", 0.6, 2 * TILE)])
def test_experts_compute_what_they_do_in_float64(
    name: str, limit: float, tile: int, choice: str, dtype: torch.dtype
) -> None:
    """Of the smallest tiles sums get the powers of two, of others numbers do."""
    rule, rows, hidden, inner = RULES[name], 17, 192, 64
    x_TK = random(rows, hidden, dtype=dtype, seed=1)
    gate_up, gate_up_numbers = made(rule.experts * 2 * inner, hidden, seed=2)
    down, down_numbers = made(rule.experts * hidden, inner, seed=3)
    biases = None
    if limit:
        biases = (random(len(gate_up_numbers), dtype=dtype, seed=7), random(len(down_numbers), dtype=dtype, seed=8))
    logits_TE = CHOICES[choice](rows, rule.experts)
    plan = route(logits_TE[None], counted(rows), rule, None, tile)
    inner_SI = grouped_mxfp4.multiply_gated(
        x_TK, gate_up, biases and biases[0], plan, GroupedTiling(32, 64, 1, 2, 4), limit, rule.scales_inputs,
        poisoned(rows * rule.chosen, inner, dtype=dtype),
    )  # fmt: skip
    added = random(2, rows, hidden, seed=9)
    parts_PTN = grouped_mxfp4.multiply(
        inner_SI, down, biases and biases[1], plan, GroupedTiling(16, 64, 2, 2, 4), added, not rule.scales_inputs,
        poisoned(rule.chosen * 2, rows, hidden),
    )  # fmt: skip
    routed = reference.route(logits_TE, rule)
    wanted = expected(x_TK, gate_up_numbers, down_numbers, biases, rule, limit, routed) + added.double().sum(0)
    assert error(parts_PTN.double().sum(0), wanted) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 16, 32, 64, 300])
def test_a_gpu_computes_what_it_does_with_the_numbers_at_gpt_oss_s_size(rows: int) -> None:
    """In bfloat16, where it unpacks numbers by instructions of its own, as many rows together as steps have."""
    rule, size = RoutingRule(8, 4, RouterScores.SOFTMAX_OF_CHOSEN), 2880
    gate_up, gate_up_numbers = made(rule.experts * 2 * size, size, seed=2)
    down, down_numbers = made(rule.experts * size, size, seed=3)
    biases = [random(rule.experts * outputs, dtype=torch.bfloat16, seed=7) for outputs in (2 * size, size)]
    x_TK, logits_TE = random(rows, size, dtype=torch.bfloat16, seed=1), random(rows, rule.experts, seed=4)
    plan = route(logits_TE[None], counted(rows), rule, None, tile_rows(4 * rows, rule.experts))
    packed, plain = (
        GpuExperts((up, biases[0]), (out, biases[1]), rule, 7.0)(x_TK, plan, None, torch.float32).sum(0)
        for up, out in ((gate_up, down), (gate_up_numbers.bfloat16(), down_numbers.bfloat16()))
    )
    assert error(packed, plain) < 0.01


@pytest.mark.gpu
def test_a_gpu_unpacks_every_byte_and_power() -> None:
    """A row of ones and many of zeros find each number again: of the lower halves and of the upper ones."""
    rule = RoutingRule(1, 1, RouterScores.SIGMOID)
    generator = torch.Generator().manual_seed(1)
    exponents_B = torch.randint(0, 253, (64 * 64 // 32,), dtype=torch.uint8, generator=generator)
    bytes_BH = torch.arange(256, dtype=torch.uint8).repeat(8)[torch.randperm(2048, generator=generator)].view(-1, 16)
    weight = Mxfp4Weight(mxfp4.pair(bytes_BH).view(64, -1).to(DEVICE), exponents_B.view(64, -1).to(DEVICE))
    numbers_NK = mxfp4.expand(bytes_BH, exponents_B, torch.float32).view(64, 64).to(DEVICE)
    eye_TK, ones = torch.eye(64, device=DEVICE, dtype=torch.bfloat16), torch.ones(64, 1, device=DEVICE)
    for tile in (16, 32, 64):
        plan = route(ones[None], counted(64), rule, None, tile)
        out_PTN = grouped_mxfp4.multiply(
            eye_TK, weight, None, plan, mxfp4_tiling_for(64, 64, 64, 1, tile, gated=False), None, False,
            poisoned(1, 64, 64),
        )  # fmt: skip
        assert torch.equal(out_PTN[0].T.contiguous(), numbers_NK), tile


def test_a_row_has_the_same_bits_in_any_company() -> None:
    rule, hidden, inner = RULES["gpt-oss's"], 128, 64
    x_TK, logits_TE = random(12, hidden, seed=1), random(12, rule.experts, seed=2)
    gate_up, _ = made(rule.experts * 2 * inner, hidden, seed=3)

    def computed(rows: slice) -> Tensor:
        x, logits = x_TK[rows].contiguous(), logits_TE[rows].contiguous()
        plan = route(logits[None], counted(len(x)), rule, None, TILE)
        out_SI, tiling = poisoned(len(plan.order_S), inner), GroupedTiling(16, 64, 1, 2, 4)
        grouped_mxfp4.multiply_gated(x, gate_up, None, plan, tiling, 0.6, False, out_SI)
        by_entry = torch.empty_like(out_SI)
        by_entry[plan.order_S.long()] = out_SI
        return by_entry.view(len(x), rule.chosen, inner)

    full = computed(slice(0, 12))
    for rows in (slice(0, 1), slice(3, 8), slice(5, 12)):
        assert torch.equal(computed(rows), full[rows])
