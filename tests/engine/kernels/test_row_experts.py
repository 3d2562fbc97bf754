"""engine/kernels/experts/row_experts.py against the oracle in torch: what a row chooses, and what that gives."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.kernels.experts import reference
from engine.kernels.experts.grouped_linear import ExpertWeights
from engine.kernels.experts.routing_rule import RouterScores, RoutingRule
from engine.kernels.experts.row_experts import RowChoice, RowTiling, gate_row, multiply_row
from tests.support.steps import DEVICE, error, poisoned, random

TILING = RowTiling(16, 64, 2, 4)
RULES: dict[str, RoutingRule] = {
    "Mixtral's": RoutingRule(8, 2, normed=True),
    "Qwen 3's": RoutingRule(24, 5, normed=False),
    "Llama 4's": RoutingRule(8, 1, RouterScores.SIGMOID, scale=1.5, scales_inputs=True),
    "gpt-oss's": RoutingRule(6, 3, RouterScores.SOFTMAX_OF_CHOSEN),
    "all experts": RoutingRule(4, 4),
}
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def matrices(rule: RoutingRule, hidden: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    gate_up = random(rule.experts * 2 * inner, hidden, seed=1) * hidden**-0.5
    down = random(rule.experts * hidden, inner, seed=2) * inner**-0.5
    return gate_up.to(dtype), down.to(dtype)


def chosen(logits_PE: Tensor, rule: RoutingRule, choice_bias_E: Tensor | None = None) -> RowChoice:
    """By a row of few numbers, whose matmuls nobody looks at."""
    x_1K, weight = random(1, 64), random(rule.experts * 2 * 16, 64)
    out_CN = poisoned(rule.chosen, 16)
    return gate_row(x_1K, logits_PE[:, None], rule, choice_bias_E, ExpertWeights(weight), 0.0, out_CN, TILING)


def check_mixture(
    rule: RoutingRule, hidden: int, inner: int, dtype: torch.dtype, limit: float, biased: bool, added: int
) -> None:
    gate_up, down = matrices(rule, hidden, inner, dtype)
    up_bias = random(len(gate_up), dtype=dtype, seed=6) if biased else None
    down_bias = random(len(down), dtype=dtype, seed=7) if biased else None
    x_1K, logits_P1E = random(1, hidden, dtype=dtype, seed=3), random(2, 1, rule.experts, seed=4)
    added_P1N = random(added, 1, hidden, seed=5) if added else None
    inner_CI, out_C1N = poisoned(rule.chosen, inner, dtype=dtype), poisoned(rule.chosen, 1, hidden)
    choice = gate_row(x_1K, logits_P1E, rule, None, ExpertWeights(gate_up, None, up_bias), limit, inner_CI, TILING)
    stack = ExpertWeights(down, None, down_bias)
    multiply_row(inner_CI, choice, stack, added_P1N, not rule.scales_inputs, out_C1N, TILING)
    ids_TK, weights_TK = reference.route(logits_P1E.sum(0), rule)
    for place, (expert, weight) in enumerate(zip(ids_TK[0].tolist(), weights_TK[0].double(), strict=True)):
        y = x_1K.double() * (weight if rule.scales_inputs else 1.0) @ gate_up.double().chunk(rule.experts)[expert].T
        if up_bias is not None:
            y += up_bias.double().chunk(rule.experts)[expert]
        gated = reference.gate(y.float(), limit).double()
        assert error(inner_CI[place], gated[0]) < TOLERANCE[dtype]
        wanted = gated @ down.double().chunk(rule.experts)[expert].T
        if down_bias is not None:
            wanted += down_bias.double().chunk(rule.experts)[expert]
        wanted *= 1.0 if rule.scales_inputs else weight
        if place == 0 and added_P1N is not None:
            wanted += added_P1N.double().sum(0)
        assert error(out_C1N[place], wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("parts", [1, 3])
def test_a_row_chooses_as_the_reference_does(name: str, parts: int) -> None:
    rule = RULES[name]
    for biased, normed in ((False, False), (True, False), (False, True)):
        rule = replace(rule, normed=normed)
        bias_E = random(rule.experts, seed=8) if biased else None
        logits_PE = random(parts, rule.experts, seed=9)
        choice = chosen(logits_PE, rule, bias_E)
        ids_TK, weights_TK = reference.route(logits_PE.sum(0)[None], rule, bias_E)
        assert choice.ids_C.tolist() == ids_TK[0].tolist()
        assert error(choice.weights_C, weights_TK[0]) < 1e-6


def test_among_equal_experts_the_first_is_the_better_and_what_is_no_number_is_the_worst() -> None:
    rule = RoutingRule(6, 3, normed=True)
    equal = chosen(torch.zeros(1, 6, device=DEVICE), rule)
    assert equal.ids_C.tolist() == [0, 1, 2]
    some = torch.tensor([[1.0, float("nan"), 2.0, float("-inf"), 2.0, 0.0]], device=DEVICE)
    assert chosen(some, rule).ids_C.tolist() == [2, 4, 0]
    none = chosen(torch.full((1, 6), float("nan"), device=DEVICE), rule)
    assert none.ids_C.tolist() == [0, 1, 2]
    assert none.weights_C.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", RULES)
def test_the_chosen_experts_give_what_they_give_in_torch(name: str, dtype: torch.dtype) -> None:
    check_mixture(RULES[name], 128, 64, dtype, 0.0, biased=False, added=0)


@pytest.mark.parametrize(("hidden", "inner", "limit", "added"), [(90, 40, 7.0, 0), (100, 72, 0.0, 2)])
def test_odd_sizes_biases_limits_and_what_is_added(hidden: int, inner: int, limit: float, added: int) -> None:
    check_mixture(RULES["gpt-oss's"], hidden, inner, torch.float32, limit, biased=True, added=added)


def part_of(stack: Tensor, rule: RoutingRule, own: range) -> Tensor:
    return stack.unflatten(0, (rule.experts, -1))[own.start : own.stop].flatten(0, 1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", RULES)
def test_ranks_with_whole_experts_give_a_row_parts_of_the_same_sum(name: str, seed: int) -> None:
    """Whatever of its choices another rank has: what that gives is zero, and what is added is there."""
    rule, hidden, inner = RULES[name], 90, 40
    gate_up, down = matrices(rule, hidden, inner, torch.float32)
    biases = random(len(gate_up), seed=6), random(len(down), seed=7)
    x_1K, logits_P1E = random(1, hidden, seed=3), random(2, 1, rule.experts, seed=seed)
    added_P1N, parts = random(2, 1, hidden, seed=5), []
    halves = range(rule.experts // 2), range(rule.experts // 2, rule.experts)
    for own in (range(rule.experts), *halves):
        inner_CI, out_C1N = poisoned(rule.chosen, inner), poisoned(rule.chosen, 1, hidden)
        up, out = (
            ExpertWeights(part_of(weight, rule, own), None, part_of(bias, rule, own), own.start)
            for weight, bias in zip((gate_up, down), biases, strict=True)
        )
        choice = gate_row(x_1K, logits_P1E, rule, None, up, 0.6, inner_CI, TILING)
        some, more = len(own) < rule.experts, None if own is halves[1] else added_P1N
        multiply_row(inner_CI, choice, out, more, not rule.scales_inputs, out_C1N, TILING, some)
        for place, expert in enumerate(choice.ids_C.tolist()):
            wanted = added_P1N.sum(0) if more is not None and place == 0 else torch.zeros(1, hidden, device=DEVICE)
            assert expert in own or torch.equal(out_C1N[place], wanted)
        parts.append(out_C1N)
    assert error(parts[1] + parts[2], parts[0].double()) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rule", "hidden", "inner"),
    [(RoutingRule(128, 8, normed=True), 2048, 768), (RoutingRule(32, 4, RouterScores.SOFTMAX_OF_CHOSEN), 2880, 2880)],
)
def test_true_sizes(rule: RoutingRule, hidden: int, inner: int, dtype: torch.dtype) -> None:
    check_mixture(rule, hidden, inner, dtype, 0.0, biased=False, added=0)
