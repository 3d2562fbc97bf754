"""engine/layers/mixture_gpu.py, its kernels interpreted, beside the CPU's mixture of the same weights."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.bf12.codec import choose_bases, encode, stack_matrices
from engine.kernels.experts.mxfp4_weight import Mxfp4Weight
from engine.kernels.experts.routing_rule import RouterScores, RoutingRule
from engine.layers import mixture_gpu
from engine.layers.linear_cpu import CpuLinear
from engine.layers.linear_gpu import GpuLinear
from engine.layers.mixture_cpu import CpuExperts, CpuMixture
from engine.layers.mixture_gpu import GpuExperts, GpuMixture, Weight
from engine.models.llama import GatedMlp
from tests.engine.kernels.test_experts_mxfp4 import made
from tests.support.steps import DEVICE, error, random

HIDDEN, INNER, SHARED = 128, 128, 24
RULES = {
    "several": RoutingRule(3, 2, normed=True),
    "one, and one that all take": RoutingRule(3, 1, RouterScores.SIGMOID, scales_inputs=True),
}


def weights(rule: RoutingRule) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The router's, the experts' and those of what all rows take, in numbers that bfloat16 has."""
    shapes = [
        (rule.experts, HIDDEN), (rule.experts * 2 * INNER, HIDDEN), (rule.experts * HIDDEN, INNER),
        (2 * SHARED, HIDDEN), (HIDDEN, SHARED),
    ]  # fmt: skip
    router, *others = (
        (random(*shape, seed=seed) * shape[1] ** -0.5).bfloat16().float() for seed, shape in enumerate(shapes)
    )
    return router * 4, *others


@pytest.mark.parametrize("stored", ["as they are", "12 bits", "4 bits"])
@pytest.mark.parametrize("rows", [1, 6, 17])
@pytest.mark.parametrize("name", RULES)
def test_ranks_with_whole_experts_give_parts_of_what_the_cpu_gives(
    name: str, rows: int, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixture_gpu, "_CODED_ROWS_MAX", 16)
    monkeypatch.setattr(mixture_gpu, "MXFP4_TILE_ROWS_MAX", 16)
    monkeypatch.setattr(mixture_gpu, "_CHUNK_BYTES", 2 * INNER * HIDDEN * 4)  # one expert at a time
    rule = replace(RULES[name], experts=4)
    router, gate_up, down, *shared = weights(rule)
    packed = [made(*weight.shape, seed) for seed, weight in enumerate((gate_up, down))]
    if stored == "4 bits":
        gate_up, down = (numbers for _, numbers in packed)
    experts = CpuExperts((gate_up, None), (down, None), rule, 0.0, None)
    both = GatedMlp(CpuLinear(shared[0]), CpuLinear(shared[1]), "silu") if rule.scales_inputs else None
    wanted = CpuMixture(CpuLinear(router), None, rule, experts, both, None)
    x_TH, total = random(rows, HIDDEN, seed=9), torch.zeros(rows, HIDDEN, dtype=torch.float64, device=DEVICE)
    count = torch.tensor([rows], dtype=torch.int32, device=DEVICE)
    for rank in range(2):
        stacks: list[tuple[Weight, None]] = [(weight.chunk(2)[rank].contiguous(), None) for weight in (gate_up, down)]
        if stored == "12 bits":
            parts = [[part.bfloat16() for part in weight.chunk(4)[2 * rank :][:2]] for weight in (gate_up, down)]
            stacks = [(stack_matrices([encode(part, choose_bases(part)) for part in each]), None) for each in parts]
        if stored == "4 bits":
            halves = [(w.pairs_NH.chunk(2)[rank], w.exponents_NB.chunk(2)[rank]) for w, _ in packed]
            stacks = [(Mxfp4Weight(pairs, exponents), None) for pairs, exponents in halves]
        own = GpuExperts(stacks[0], stacks[1], rule, 0.0, range(2 * rank, 2 * rank + 2))
        both_gpu = None
        if rule.scales_inputs and rank == 1:  # what all rows take is added on one of them here
            both_gpu = GatedMlp(GpuLinear(shared[0]), GpuLinear(shared[1]), "silu")
        total += GpuMixture(GpuLinear(router), None, rule, own, both_gpu)(x_TH, count).double().sum(0)
    assert error(total, wanted(x_TH, None)) < 1e-6


@pytest.mark.parametrize("stored", ["as they are", "12 bits", "4 bits"])
@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("name", RULES)
def test_it_gives_what_the_cpu_gives(name: str, rows: int, stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = RULES[name]
    monkeypatch.setattr(mixture_gpu, "_CODED_ROWS_MAX", 16)  # so that some are expanded
    monkeypatch.setattr(mixture_gpu, "_CHUNK_BYTES", 2 * 2 * INNER * HIDDEN * 4)  # two or more experts at a time
    router, gate_up, down, *shared = weights(rule)
    packed = []
    if stored == "4 bits":
        packed = [made(*weight.shape, seed) for seed, weight in enumerate((gate_up, down))]
        gate_up, down = (numbers for _, numbers in packed)
    plain = [(weight, None) for weight in (gate_up, down)]
    experts = CpuExperts(plain[0], plain[1], rule, 0.0, None)
    both = GatedMlp(CpuLinear(shared[0]), CpuLinear(shared[1]), "silu") if rule.scales_inputs else None
    wanted = CpuMixture(CpuLinear(router), None, rule, experts, both, None)
    stacks: list[tuple[Weight, None]] = list(plain)
    if packed:
        stacks = [(weight, None) for weight, _ in packed]
    if stored == "12 bits":
        parts = [[part.bfloat16() for part in weight.chunk(rule.experts)] for weight in (gate_up, down)]
        stacks = [(stack_matrices([encode(part, choose_bases(part)) for part in each]), None) for each in parts]
    on_gpu = GpuExperts(stacks[0], stacks[1], rule, 0.0)
    both_gpu = GatedMlp(GpuLinear(shared[0]), GpuLinear(shared[1]), "silu") if rule.scales_inputs else None
    found = GpuMixture(GpuLinear(router), None, rule, on_gpu, both_gpu)
    if stored != "as they are":
        assert found.bytes < wanted.bytes
    else:
        assert found.bytes == wanted.bytes
    x_TH = random(rows, HIDDEN, seed=9)
    count = torch.tensor([rows], dtype=torch.int32, device=DEVICE)
    assert error(found(x_TH, count).double().sum(0), wanted(x_TH, None)) < 1e-6
