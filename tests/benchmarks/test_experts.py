"""benchmarks/engine/experts.py without a GPU: its oracle agrees with the kernels, and its bounds are those by hand."""

import pytest
import torch

from benchmarks.engine.experts import FORMS, ExpertsWork, error_of, logits_of
from engine.kernels.experts.routing_rule import RoutingRule

SMALL = ExpertsWork(128, 128, RoutingRule(3, 2, normed=True), 0.0)
CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_its_oracle_agrees_with_the_kernels(form: str, rows: int) -> None:
    off = error_of(SMALL, form, "skewed", rows, CPU, torch.float32)
    assert off < (0.08 if form == "fp8" else 1e-5)


def test_bounds_are_those_by_hand() -> None:
    work = ExpertsWork.of("qwen3-30b")
    one = logits_of(work, 1, "skewed", CPU)
    assert work.bound_us(one, "bf16") == pytest.approx(1e6 * 8 * 3 * 2048 * 768 * 2 / 4.3e12)
    many = logits_of(work, 4096, "skewed", CPU)
    assert work.bound_us(many, "fp8") == pytest.approx(1e6 * 2 * 4096 * 8 * 3 * 2048 * 768 / (2 * 790e12))
