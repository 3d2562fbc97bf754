"""engine/execution/gpu_sampler.py: what a batch wants, and the log probabilities that rows ask for. What it draws:
tests/engine/kernels/sampling/test_draw.py."""

import pytest
import torch

from engine.execution.gpu_sampler import TEMPERATURE_ONLY, LogprobTensors, SamplingFeatures
from engine.protocol.types import SamplingParams
from engine.step.layout import SequenceSlice, pack_step, unpack_step


def wants(*samplings: SamplingParams) -> SamplingFeatures:
    return SamplingFeatures.of(
        unpack_step(pack_step([SequenceSlice([5], 3, [[index]], asked) for index, asked in enumerate(samplings)], 16))
    )


def test_temperatures_alone_are_plain() -> None:
    assert wants(SamplingParams(), SamplingParams(temperature=0.5)) == TEMPERATURE_ONLY
    greedy = wants(SamplingParams(top_k=5, top_p=0.5, min_p=0.5))
    assert greedy == TEMPERATURE_ONLY, "greedy takes the greatest whatever is left"


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_one_row_that_filters_is_enough(filters: dict[str, float]) -> None:
    assert wants(SamplingParams(), SamplingParams(temperature=1.0, **filters)).filters


def test_of_equally_likely_alternatives_the_lowest_ids_are_reported() -> None:
    torch.manual_seed(0)
    logits_RV = torch.randint(0, 4, (6, 300)).to(torch.bfloat16)
    logits_RV[0] = 1.5
    logits_RV[1, 100:110] = 9.0
    logits_RV[2, 7] = float("-inf")
    tokens_R = torch.arange(6, dtype=torch.int32)
    reports = LogprobTensors.of(logits_RV, tokens_R)
    exact_RV = logits_RV.double().log_softmax(-1)
    for row in range(6):
        chosen, ids, best = reports.read(row, 12)
        wanted = exact_RV[row].sort(descending=True, stable=True)
        assert ids == wanted.indices[:12].tolist()
        assert best == pytest.approx(wanted.values[:12].tolist(), abs=1e-5)
        assert chosen == pytest.approx(exact_RV[row, row].item(), abs=1e-5)
