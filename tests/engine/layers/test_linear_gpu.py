"""engine/layers/linear_gpu.py, and linear_bf12.py beside it: whichever kernel is chosen, a row's result is the same
maths."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.kernels import tuning
from engine.kernels.linear import LinearTiling
from engine.layers.linear_bf12 import Bf12Linear
from engine.layers.linear_gpu import GpuLinear
from engine.models.llama import Linear
from tests.support.bf12_weights import coded, weights
from tests.support.steps import DEVICE, error, random


def as_it_is(weight_NK: Tensor, bias_N: Tensor | None) -> Linear:
    return GpuLinear(weight_NK, bias_N)


def in_12_bits(weight_NK: Tensor, bias_N: Tensor | None) -> Linear:
    return Bf12Linear(coded(weight_NK.bfloat16()), bias_N)


@pytest.mark.parametrize("stored", [as_it_is, in_12_bits])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 17, 140])
def test_every_number_of_rows(rows: int, biased: bool, stored: Callable[[Tensor, Tensor | None], Linear]) -> None:
    tiled = stored is in_12_bits and DEVICE.type == "cuda"  # which is for bfloat16 alone
    dtype, most = (torch.bfloat16, 1.2e-2) if tiled else (torch.float32, 1e-6)
    weight_NK, bias_N = weights(96, 128, 1.0, seed=1).to(dtype), random(96, dtype=dtype, seed=2) if biased else None
    weight_NK[5, 7] = weight_NK[95, 127] = 1e-20
    linear, x_TK = stored(weight_NK.to(DEVICE), bias_N), random(rows, 128, dtype=dtype, seed=3)
    wanted_TN = torch.nn.functional.linear(x_TK, weight_NK.to(DEVICE), bias_N)
    assert error(linear(x_TK).sum(0), wanted_TN) < most
    assert error(linear.logits(x_TK), wanted_TN) < most
    gate, up = wanted_TN.chunk(2, -1)
    assert error(linear.swiglu(x_TK), torch.nn.functional.silu(gate) * up) < most


@pytest.mark.parametrize("biased", [False, True])
def test_its_bytes_are_those_of_its_tensors(biased: bool) -> None:
    bias_N = random(96) if biased else None
    assert GpuLinear(random(96, 80), bias_N).bytes == 96 * 80 * 4 + (96 * 4 if biased else 0)


def test_the_table_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"96x80": {"16": [32, 16, 2, 2, 4], "32": None}}
    monkeypatch.setattr(tuning, "load_table", lambda gpu: table)
    monkeypatch.setattr(tuning, "_select_tiling", tuning._select_tiling.__wrapped__)
    device = torch.device("cpu")
    assert tuning.select_tiling(96, 80, 3, False, device) == LinearTiling(32, 16, 2, 2, 4)
    assert tuning.select_tiling(96, 80, 17, False, device) is None
    assert tuning.select_tiling(96, 80, 129, False, device) is None
    unknown = tuning.select_tiling(96, 80, 3, True, device)
    assert unknown is not None
    assert unknown.parts == 1
