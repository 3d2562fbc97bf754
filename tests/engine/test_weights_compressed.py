"""engine/weights/compressed.py: its choice of kernels, expanding in chunks, and where it has the bits of bf16. What any
linear layer must do is tested in test_weights_resident.py."""

import pytest
import torch

from engine.kernels import choices
from engine.kernels.choices import choose_coded
from engine.kernels.coded import CodedTiling
from engine.weights import compressed
from engine.weights.compressed import Compressed
from engine.weights.resident import Resident
from tests.engine.kernels.coded_weights import coded, weights
from tests.engine.kernels.steps import DEVICE, error, random

BF16 = torch.bfloat16


@pytest.mark.parametrize("biased", [False, True])
def test_many_rows_have_the_bits_of_bf16_in_whatever_chunks(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight_NK, x_TK = weights(72, 128).to(DEVICE), random(150, 128, dtype=BF16, seed=1)
    weight_NK[::7, 3] = 0.0
    bias_N = random(72, dtype=BF16, seed=2) if biased else None
    linear = Compressed(coded(weight_NK.cpu()), bias_N)
    wanted_PTN = Resident(weight_NK, bias_N)(x_TK)
    assert torch.equal(linear(x_TK), wanted_PTN)
    monkeypatch.setattr(compressed, "CHUNK_BYTES", 33 * 128 * 2)
    assert error(linear(x_TK), wanted_PTN) < 8e-3


def test_it_takes_what_words_escapes_and_bias_take() -> None:
    weight_NK = weights(32, 256)
    weight_NK[0, :5] = 0.0
    weight = coded(weight_NK)
    index_bytes = 32 * 4 + 3 * 4 + len(weight.index.places_E) * 6
    assert Compressed(weight).bytes == 32 * 256 * 3 // 2 + index_bytes
    assert Compressed(weight, random(32, dtype=BF16)).bytes == 32 * 256 * 3 // 2 + index_bytes + 64


def test_the_table_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        "96x128": {"16": [32, 16, 2, 2, 4]},
        "96x128 bf12": {"8": [32, 1, 2, 2, 4, 8], "16": None},
        "96x128 gated bf12": {"8": None},
    }
    monkeypatch.setattr(choices, "table_of", lambda gpu: table)
    monkeypatch.setattr(choices, "_choose_coded", choices._choose_coded.__wrapped__)
    device = torch.device("cpu")
    assert choose_coded(96, 128, 2, False, device) == CodedTiling(32, 1, 2, 2, 4, 8)
    assert choose_coded(96, 128, 9, False, device) is None
    assert choose_coded(96, 128, 8, True, device) is None
    assert choose_coded(96, 128, 129, False, device) is None
    unknown = choose_coded(96, 128, 1, True, device)
    assert unknown is not None
    assert unknown.parts == 1


@pytest.mark.parametrize("outputs", [1024, 4096, 28672, 151936])
@pytest.mark.parametrize("inputs", [128, 896, 4096, 28672])
def test_what_nobody_measured_has_a_tiling_that_fits(outputs: int, inputs: int) -> None:
    for rows in range(1, 65):
        tiling = choose_coded(outputs, inputs, rows, False, torch.device("cpu"))
        assert tiling is not None
        assert tiling.block_n <= 32 * tiling.warps
        assert 1 <= tiling.parts <= max(1, inputs // 256)
        assert tiling.blocks == 1


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 64, 129, 2048])
def test_true_shapes(rows: int, biased: bool) -> None:
    weight_NK = weights(6144, 4096, 4096**-0.5)
    bias_N = random(6144, dtype=BF16, seed=2) if biased else None
    linear, plain = Compressed(coded(weight_NK), bias_N), Resident(weight_NK.to(DEVICE), bias_N)
    x_TK = random(rows, 4096, dtype=BF16, seed=1)
    assert error(linear.logits(x_TK), plain.logits(x_TK)) < 8e-3
    assert error(linear.gated(x_TK), plain.gated(x_TK)) < 1.2e-2
