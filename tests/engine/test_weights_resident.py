"""engine/weights/resident.py: whichever kernel is chosen, a row's result is the same maths."""

import pytest
import torch

from engine.kernels import choices
from engine.kernels.linear import Tiling
from engine.weights.resident import Resident
from tests.engine.kernels.steps import error, random


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 70])
def test_every_number_of_rows(rows: int, biased: bool) -> None:
    weight_NK, bias_N = random(96, 80, seed=1), random(96, seed=2) if biased else None
    resident, x_TK = Resident(weight_NK, bias_N), random(rows, 80, seed=3)
    wanted_TN = torch.nn.functional.linear(x_TK, weight_NK, bias_N)
    assert error(resident(x_TK).sum(0), wanted_TN) < 1e-6
    assert error(resident.logits(x_TK), wanted_TN) < 1e-6
    gate, up = wanted_TN.chunk(2, -1)
    assert error(resident.gated(x_TK), torch.nn.functional.silu(gate) * up) < 1e-6
    assert resident.bytes == 96 * 80 * 4 + (96 * 4 if biased else 0)


def test_the_table_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"96x80": {"16": [32, 16, 2, 2, 4], "32": None}}
    monkeypatch.setattr(choices, "table_of", lambda gpu: table)
    monkeypatch.setattr(choices, "_choose", choices._choose.__wrapped__)
    device = torch.device("cpu")
    assert choices.choose(96, 80, 3, False, device) == Tiling(32, 16, 2, 2, 4)
    assert choices.choose(96, 80, 17, False, device) is None
    assert choices.choose(96, 80, 129, False, device) is None
    unknown = choices.choose(96, 80, 3, True, device)
    assert unknown is not None
    assert unknown.parts == 1
