"""engine/kernels/experts against their oracle in torch, for choices of all kinds: even ones, all rows on one expert."""

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.bf12.codec import choose_bases, encode, stack_matrices
from engine.kernels.experts import grouped_bf12, grouped_linear, reference
from engine.kernels.experts.absent_experts import fill_absent
from engine.kernels.experts.grouped_bf12 import GroupedBf12Tiling
from engine.kernels.experts.grouped_linear import ExpertRows, ExpertWeights, GroupedTiling
from engine.kernels.experts.route import ExpertPlan, route, tiles_most
from engine.kernels.experts.routing_rule import RouterScores, RoutingRule
from tests.support.steps import DEVICE, error, poisoned, random

TILE = 16
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3}
RULES: dict[str, RoutingRule] = {
    "Mixtral's": RoutingRule(8, 2, normed=True),
    "Qwen 3's": RoutingRule(24, 5, normed=False),
    "Llama 4's": RoutingRule(8, 1, RouterScores.SIGMOID, scales_inputs=True),
    "gpt-oss's": RoutingRule(6, 3, RouterScores.SOFTMAX_OF_CHOSEN),
    "DeepSeek's": RoutingRule(16, 3, RouterScores.SIGMOID, True, 2.5, groups=4, chosen_groups=2),
    "all experts": RoutingRule(4, 4),
}


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write is NaN, or a number that is no index."""

    def empty(*shape: Any, dtype: torch.dtype, **_: Any) -> Tensor:
        fill = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
        return torch.full(shape, fill, dtype=dtype, device=DEVICE)

    monkeypatch.setattr(torch, "empty", empty)


def counted(rows: int) -> Tensor:
    return torch.tensor([rows], dtype=torch.int32, device=DEVICE)


def ids_of(plan: ExpertPlan) -> Tensor:
    """Each row's experts, as the plan lists them, in order."""
    rows, choices = plan.weights_TK.shape
    expert_S = torch.bucketize(torch.arange(rows * choices), plan.ends_H.cpu(), right=True)
    ids = torch.full((rows * choices,), -1)
    ids[plan.order_S.cpu().long()] = expert_S
    return ids.view(rows, choices)


def check_tiles(plan: ExpertPlan) -> None:
    """Every entry lies in exactly one tile, of its own expert, and tiles end where the experts do."""
    seen = []
    tiles, ends = plan.tiles_L2.tolist(), plan.ends_H.tolist()
    order = plan.order_S.tolist()[: ends[-1]]
    listed = [tile for tile in tiles if tile[0] >= 0]
    assert tiles[: len(listed)] == listed
    for expert, first in listed:
        start = ends[expert - 1] if expert else 0
        assert start <= first < ends[expert]
        seen += range(first, min(first + plan.rows, ends[expert]))
    assert sorted(seen) == list(range(len(order)))
    assert len(set(order)) == len(order) <= len(plan.order_S)
    assert all(expert == -1 for expert, _ in tiles[len(listed) :])
    if plan.absent_TK is None:
        assert sorted(order) == list(range(plan.weights_TK.numel()))


@pytest.mark.parametrize("rows", [1, 3, 32, 33, 100])
@pytest.mark.parametrize("name", RULES)
def test_rows_are_routed_as_the_reference_routes_them(name: str, rows: int) -> None:
    rule = RULES[name]
    bias = random(rule.experts, seed=4) if rule.groups > 1 else None
    logits_PTE = random(2, rows, rule.experts, seed=3)
    plan = route(logits_PTE, counted(rows), rule, bias, TILE)
    ids_TK, weights_TK = reference.route(logits_PTE.sum(0), rule, bias)
    assert torch.equal(ids_of(plan), ids_TK.cpu())
    assert error(plan.weights_TK, weights_TK) < 1e-6
    check_tiles(plan)


@pytest.mark.parametrize("rows", [20, 70])
def test_equal_logits_and_those_that_are_no_numbers_choose_valid_experts(rows: int) -> None:
    rule = RULES["Qwen 3's"]
    logits_PTE = torch.zeros(1, rows, rule.experts, device=DEVICE)
    logits_PTE[0, 1] = float("nan")
    logits_PTE[0, 2, ::2] = float("nan")
    logits_PTE[0, 3] = float("-inf")
    logits_PTE[0, 4, 7] = float("inf")
    plan = route(logits_PTE, counted(rows), rule, None, TILE)
    ids_TK, weights_TK = reference.route(logits_PTE[0], rule)
    assert torch.equal(ids_of(plan), ids_TK.cpu())
    assert torch.equal(plan.weights_TK.isnan(), weights_TK.isnan())
    check_tiles(plan)


@pytest.mark.parametrize("rows", [8, 48])
def test_rows_behind_the_steps_own_choose_as_the_first_one(rows: int) -> None:
    rule = RULES["Mixtral's"]
    logits_PTE = random(1, rows, rule.experts, seed=5)
    plan = route(logits_PTE, counted(rows - 5), rule, None, TILE)
    logits_PTE[0, rows - 5 :] = logits_PTE[0, 0]
    assert torch.equal(ids_of(plan), reference.route(logits_PTE[0], rule)[0].cpu())


@pytest.mark.parametrize("rows", [1, 3, 32, 33, 100])
@pytest.mark.parametrize("name", [name for name in RULES if RULES[name].experts % 2 == 0])
def test_a_rank_lists_its_own_experts_and_says_which_choices_are_absent(name: str, rows: int) -> None:
    rule = RULES[name]
    logits_PTE = random(2, rows, rule.experts, seed=3)
    ids_TK, weights_TK = (routed.cpu() for routed in reference.route(logits_PTE.sum(0), rule))
    for own in (range(rule.experts // 2), range(rule.experts // 2, rule.experts)):
        plan = route(logits_PTE, counted(rows), rule, None, TILE, own)
        entries = plan.ends_H.tolist()[-1]
        wanted = ((ids_TK >= own.start) & (ids_TK < own.stop)).flatten().nonzero().flatten().tolist()
        assert sorted(plan.order_S.tolist()[:entries]) == wanted
        for place, entry in enumerate(plan.order_S.tolist()[:entries]):
            expert = int(torch.bucketize(torch.tensor(place), plan.ends_H.cpu(), right=True))
            assert expert + own.start == ids_TK.flatten()[entry]
        assert plan.absent_TK is not None
        assert plan.absent_TK.flatten().tolist() == [int(entry not in wanted) for entry in range(ids_TK.numel())]
        assert error(plan.weights_TK, weights_TK.to(DEVICE)) < 1e-6
        check_tiles(plan)


@pytest.mark.parametrize(("entries", "experts"), [(1, 8), (7, 8), (8, 8), (100, 8), (4096, 128)])
def test_no_choice_has_more_tiles_than_there_is_room_for(entries: int, experts: int) -> None:
    touched = min(entries, experts)
    assert tiles_most(entries, experts, TILE) == touched - 1 + -(-(entries - touched + 1) // TILE)


# Which experts rows choose, as logits that leave no doubt.
CHOICES = {
    "evenly": lambda rows, experts: random(rows, experts, seed=6),
    "all the same": lambda rows, experts: torch.arange(experts, 0, -1.0, device=DEVICE).expand(rows, -1).contiguous(),
    "the last ones": lambda rows, experts: torch.arange(experts, device=DEVICE).float().expand(rows, -1).contiguous(),
}


def expected(
    x_TK: Tensor, gate_up: Tensor, down: Tensor, biases: tuple[Tensor, Tensor] | None, rule: RoutingRule, limit: float,
    routed: tuple[Tensor, Tensor],
) -> Tensor:  # fmt: skip
    """In float64, row by row."""
    ids_TK, weights_TK = routed
    gate_ups, downs = gate_up.double().chunk(rule.experts), down.double().chunk(rule.experts)
    out = torch.zeros(len(x_TK), len(downs[0]), dtype=torch.float64, device=DEVICE)
    for row, (ids, weights) in enumerate(zip(ids_TK.tolist(), weights_TK.double(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            x = x_TK[row].double() * (weight.to(x_TK.dtype) if rule.scales_inputs else 1.0)
            inner = gate_ups[expert] @ x
            if biases is not None:
                inner += biases[0].double().chunk(rule.experts)[expert]
            y = downs[expert] @ reference.gate(inner[None], limit).double()[0]
            if biases is not None:
                y += biases[1].double().chunk(rule.experts)[expert]
            out[row] += y if rule.scales_inputs else y * weight
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("name", "limit"), [("Mixtral's", 0.0), ("Llama 4's", 0.0), ("gpt-oss's", 0.6)])
def test_experts_compute_what_they_do_in_float64(name: str, limit: float, choice: str, dtype: torch.dtype) -> None:
    rule, rows, hidden, inner = RULES[name], 17, 40, 24
    x_TK = random(rows, hidden, dtype=dtype, seed=1)
    gate_up = (random(rule.experts * 2 * inner, hidden, seed=2) * hidden**-0.5).to(dtype)
    down = (random(rule.experts * hidden, inner, seed=3) * inner**-0.5).to(dtype)
    biases = None
    if limit:
        biases = random(len(gate_up), dtype=dtype, seed=7), random(len(down), dtype=dtype, seed=8)
    logits_TE = CHOICES[choice](rows, rule.experts)
    plan = route(logits_TE[None], counted(rows), rule, None, TILE)
    tilings = GroupedTiling(16, 32, 1, 2, 4), GroupedTiling(16, 16, 2, 2, 4)
    inner_SI = grouped_linear.multiply_gated(
        ExpertRows(x_TK), ExpertWeights(gate_up, None, biases and biases[0]), plan, tilings[0], limit,
        rule.scales_inputs, poisoned(rows * rule.chosen, inner, dtype=dtype),
    )  # fmt: skip
    added = random(2, rows, hidden, seed=9)
    parts_PTN = grouped_linear.multiply(
        ExpertRows(inner_SI), ExpertWeights(down, None, biases and biases[1]), plan, tilings[1], added,
        not rule.scales_inputs, poisoned(rule.chosen * 2, rows, hidden),
    )  # fmt: skip
    wanted = expected(x_TK, gate_up, down, biases, rule, limit, reference.route(logits_TE, rule)) + added.double().sum(
        0
    )
    assert error(parts_PTN.double().sum(0), wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", ["Mixtral's", "Llama 4's", "gpt-oss's", "all experts"])
def test_ranks_with_whole_experts_give_parts_of_the_same_sum(name: str, choice: str, rows: int) -> None:
    """All rows may be another rank's: then a rank gives zeros, and what is added to the first choice."""
    rule, hidden, inner = RULES[name], 40, 24
    x_TK, added = random(rows, hidden, seed=1), random(2, rows, hidden, seed=9)
    gate_up = random(rule.experts * 2 * inner, hidden, seed=2) * hidden**-0.5
    down = random(rule.experts * hidden, inner, seed=3) * inner**-0.5
    biases = random(len(gate_up), seed=7), random(len(down), seed=8)
    logits_TE = CHOICES[choice](rows, rule.experts)
    tilings = GroupedTiling(16, 32, 1, 2, 4), GroupedTiling(16, 16, 2, 2, 4)
    ids_TK, _ = reference.route(logits_TE, rule)
    parts = []
    for own in (range(rule.experts // 2), range(rule.experts // 2, rule.experts)):
        stacks = [
            ExpertWeights(*(each.chunk(2)[own.start > 0].contiguous() if each is not None else None for each in stack))
            for stack in ((gate_up, None, biases[0]), (down, None, biases[1]))
        ]
        plan = route(logits_TE[None], counted(rows), rule, None, TILE, own)
        inner_SI = grouped_linear.multiply_gated(
            ExpertRows(x_TK), stacks[0], plan, tilings[0], 0.6, rule.scales_inputs,
            poisoned(len(plan.order_S), inner),
        )  # fmt: skip
        out_PTN, more = poisoned(rule.chosen * 2, rows, hidden), None if own.start else added
        grouped_linear.multiply(
            ExpertRows(inner_SI), stacks[1], plan, tilings[1], more, not rule.scales_inputs, out_PTN
        )
        fill_absent(plan, more, out_PTN)
        absent_CT = ((ids_TK < own.start) | (ids_TK >= own.stop)).T
        given_CTN = out_PTN.view(rule.chosen, 2, rows, hidden).sum(1)
        if more is not None:
            given_CTN[0] -= more.sum(0)
        assert given_CTN[absent_CT].abs().max().item() < 1e-6 if absent_CT.any() else True
        parts.append(out_PTN.double().sum(0))
    routed = reference.route(logits_TE, rule)
    wanted = expected(x_TK, gate_up, down, biases, rule, 0.6, routed) + added.double().sum(0)
    assert error(parts[0] + parts[1], wanted) < 1e-6


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", ["Mixtral's", "Llama 4's"])
def test_experts_in_12_bits_compute_what_they_do_in_float64(name: str, choice: str) -> None:
    rule, rows, hidden, inner = RULES[name], 3, 128, 128
    x_TK = random(rows, hidden, seed=1)
    gate_up = (random(rule.experts * 2 * inner, hidden, seed=2) * hidden**-0.5).bfloat16()
    down = (random(rule.experts * hidden, inner, seed=3) * inner**-0.5).bfloat16()
    for weight in (gate_up, down):
        weight[::5, ::37] *= 2.0**-30  # escapes
    stacks = [
        stack_matrices([encode(part, choose_bases(part)) for part in weight.chunk(rule.experts)])
        for weight in (gate_up, down)
    ]
    logits_TE = CHOICES[choice](rows, rule.experts)
    plan = route(logits_TE[None], counted(rows), rule, None, TILE)
    inner_SI, tiling = poisoned(rows * rule.chosen, inner), GroupedBf12Tiling(64, 1, 2, 4)
    grouped_bf12.multiply_gated(x_TK, stacks[0], plan, tiling, rule.scales_inputs, inner_SI)
    added, out_PTN = random(1, rows, hidden, seed=9), poisoned(rule.chosen, rows, hidden)
    grouped_bf12.multiply(inner_SI, stacks[1], plan, tiling, added, not rule.scales_inputs, out_PTN)
    wanted = expected(x_TK, gate_up, down, None, rule, 0.0, reference.route(logits_TE, rule)) + added.double().sum(0)
    assert error(out_PTN.double().sum(0), wanted) < 1e-6


def test_a_row_has_the_same_bits_in_any_company() -> None:
    rule, hidden, inner = RULES["Mixtral's"], 32, 16
    x_TK, logits_TE = random(12, hidden, seed=1), random(12, rule.experts, seed=2)
    gate_up = ExpertWeights(random(rule.experts * 2 * inner, hidden, seed=3))
    down = ExpertWeights(random(rule.experts * hidden, inner, seed=4))

    def computed(rows: slice) -> Tensor:
        x, logits = x_TK[rows].contiguous(), logits_TE[rows].contiguous()
        plan = route(logits[None], counted(len(x)), rule, None, TILE)
        tiling = GroupedTiling(16, 16, 1, 2, 4)
        inner_SI = poisoned(2 * len(x), inner)
        grouped_linear.multiply_gated(ExpertRows(x), gate_up, plan, tiling, 0.0, False, inner_SI)
        out_PTN = poisoned(2, len(x), hidden)
        return grouped_linear.multiply(ExpertRows(inner_SI), down, plan, tiling, None, True, out_PTN)

    full = computed(slice(0, 12))
    for rows in (slice(0, 1), slice(3, 8), slice(5, 12)):
        assert torch.equal(computed(rows), full[:, rows])
