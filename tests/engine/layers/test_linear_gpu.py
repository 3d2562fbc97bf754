"""engine/layers/linear_gpu.py: whichever kernel is chosen, a row's result is the same maths; in 12 bits its choice of
kernels, expanding in chunks, and where it has the bits of bf16."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.bf12.codec import Bf12Weight
from engine.bf12.layout import lanes_of
from engine.kernels import bf12_hopper_layout, bf12_linear_hopper, tuning
from engine.kernels.bf12_linear import Bf12Tiling
from engine.kernels.bf12_linear_hopper import HopperTiling
from engine.kernels.linear import LinearTiling
from engine.kernels.tuning import BF12_ROW_BUCKETS, fastest_tiling, select_bf12_tiling
from engine.layers import linear_gpu
from engine.layers.linear_gpu import Bf12Linear, GpuLinear, multiply_expanded
from engine.models.llama import Linear
from tests.support.bf12_weights import coded, weights
from tests.support.gluon_in_torch import in_torch
from tests.support.steps import DEVICE, error, random

BF16 = torch.bfloat16
CPU = torch.device("cpu")


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


# In 12 bits a number


@pytest.mark.parametrize("biased", [False, True])
def test_many_rows_have_the_bits_of_bf16_in_whatever_chunks(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight_NK, x_TK = weights(72, 128).to(DEVICE), random(150, 128, dtype=BF16, seed=1)
    weight_NK[::7, 3] = 0.0
    bias_N = random(72, dtype=BF16, seed=2) if biased else None
    linear = Bf12Linear(coded(weight_NK.cpu()), bias_N)
    wanted_PTN = GpuLinear(weight_NK, bias_N)(x_TK)
    assert torch.equal(linear(x_TK), wanted_PTN)
    monkeypatch.setattr(linear_gpu, "CHUNK_BYTES", 33 * 128 * 2)
    assert error(linear(x_TK), wanted_PTN) < 8e-3


def test_12_bits_take_what_words_escapes_and_bias_take() -> None:
    weight_NK = weights(32, 256)
    weight_NK[0, :5] = 0.0
    weight = coded(weight_NK)
    index_bytes = 32 * 4 + 3 * 4 + len(weight.index.places_E) * 6
    assert Bf12Linear(weight).bytes == 32 * 256 * 3 // 2 + index_bytes
    assert Bf12Linear(weight, random(32, dtype=BF16)).bytes == 32 * 256 * 3 // 2 + index_bytes + 64


def follow(monkeypatch: pytest.MonkeyPatch, table: dict[str, dict[str, Any]]) -> None:
    monkeypatch.setattr(tuning, "load_table", lambda gpu: table)
    monkeypatch.setattr(tuning, "_select_bf12_tiling", tuning._select_bf12_tiling.__wrapped__)


def test_the_table_of_12_bits_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, {
        "96x128": {"16": [32, 16, 2, 2, 4]},
        "96x128 bf12": {
            "8": ["coded", 32, 1, 2, 2, 4, 8], "16": None, "256": ["coded_hopper", 128, 4],
            "8192": ["coded_hopper", 256, 1],
        },
        "96x128 gated bf12": {"8": None},
    })  # fmt: skip
    for rows, wanted in {
        2: Bf12Tiling(32, 1, 2, 2, 4, 8), 9: None, 129: HopperTiling(128, 4), 256: HopperTiling(128, 4), 257: None,
        4097: HopperTiling(256, 1), 100_000: HopperTiling(256, 1),
    }.items():  # fmt: skip
        assert select_bf12_tiling(96, 128, rows, False, CPU) == wanted
    assert select_bf12_tiling(96, 128, 8, True, CPU) is None
    unknown = select_bf12_tiling(96, 128, 1, True, CPU)
    assert unknown is not None
    assert unknown.parts == 1


@pytest.mark.parametrize("outputs", [64, 1024, 4096, 28672, 151936])
@pytest.mark.parametrize("inputs", [128, 896, 4096, 28672])
def test_what_nobody_measured_has_a_tiling_that_fits(outputs: int, inputs: int) -> None:
    for rows, gated in product((*range(1, 65), 4096), (False, True)):
        tiling = select_bf12_tiling(outputs, inputs, rows, gated, CPU)
        if tiling is None:
            assert rows > 32
            continue
        assert isinstance(tiling, Bf12Tiling)
        assert tiling.block_n * tiling.blocks * lanes_of(inputs) >= 64 * tiling.warps
        assert 1 <= tiling.parts <= (1 if gated else max(1, inputs // 256))
        assert inputs % (8 * lanes_of(inputs) * tiling.blocks) == 0


def test_on_hopper_many_rows_that_nobody_measured_are_multiplied_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, {"4096x4096 bf12": {"1": ["coded", 16, 2, 1, 4, 4, 0]}})
    monkeypatch.setattr(bf12_linear_hopper, "serves", lambda outputs, gated, device: not gated or outputs == 4096)
    monkeypatch.setattr(bf12_linear_hopper, "multiprocessors_of", lambda device: 132)
    assert select_bf12_tiling(4096, 4096, 1, False, CPU) == Bf12Tiling(16, 2, 1, 4, 4, 0)
    assert select_bf12_tiling(6144, 4096, 1, False, CPU) == Bf12Tiling(16, 2, 1, 4, 4, 0)
    assert select_bf12_tiling(4096, 4096, 33, False, CPU) == Bf12Tiling(64, 1, 4, 4, 4, 4)
    assert select_bf12_tiling(4096, 4096, 64, True, CPU) == Bf12Tiling(64, 1, 1, 2, 4, 4)
    for rows, bucket in ((65, 128), (100, 128), (1000, 1024)):
        assert select_bf12_tiling(4096, 4096, rows, False, CPU) == fastest_tiling(4096, 4096, bucket, False, 132)
        assert select_bf12_tiling(4096, 4096, rows, True, CPU) == fastest_tiling(4096, 4096, bucket, True, 132)
    assert select_bf12_tiling(4096, 4096, 1025, False, CPU) is None
    assert isinstance(select_bf12_tiling(4112, 4096, 8, True, CPU), Bf12Tiling)
    assert select_bf12_tiling(4112, 4096, 64, True, CPU) is None


TILING = Bf12Tiling(32, 1, 1, 2, 4, 4)


@pytest.mark.parametrize(
    ("plain", "gated"), [(TILING, TILING), (TILING, None), (None, None), ("tile", "tile"), ("tile", None)]
)
def test_each_kind_of_choice_is_taken(plain: Any, gated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU tiles by their simulation, in bfloat16, which the interpreter does not multiply right."""
    weight_NK, x_TK = weights(96, 128), random(5, 128, dtype=BF16 if plain == "tile" else torch.float32, seed=1).cpu()
    weight_NK[::7, 3] = 0.0
    wanted_TN = x_TK.double() @ weight_NK.double().T
    gate, up = wanted_TN.chunk(2, -1)
    x_TK, taken = x_TK.to(DEVICE), []

    def choice(outputs: int, inputs: int, rows: int, is_gated: bool, device: torch.device) -> Any:
        assert (outputs, inputs, rows, device) == (96, 128, 5, x_TK.device)
        chosen = gated if is_gated else plain
        taken.append(chosen)
        return tiles.HopperTiling(128, 1) if chosen == "tile" else chosen

    with (
        in_torch(bf12_hopper_layout, bf12_linear_hopper)
        if DEVICE.type == "cpu"
        else nullcontext(bf12_linear_hopper) as tiles
    ):
        monkeypatch.setattr(tiles, "multiprocessors_of", lambda _: 2)
        monkeypatch.setattr(linear_gpu, "bf12_linear_hopper", tiles)
        monkeypatch.setattr(linear_gpu, "select_bf12_tiling", choice)
        linear = Bf12Linear(coded(weight_NK))
        assert error(linear.logits(x_TK).cpu(), wanted_TN) < 8e-3
        assert error(linear.swiglu(x_TK).cpu(), torch.nn.functional.silu(gate) * up) < 1.2e-2
        assert taken == [plain, gated, *([plain] if gated is None else [])]


@pytest.mark.parametrize("tiling", [TILING, replace(TILING, parts=2), None], ids=["whole", "parts", "expanded"])
def test_a_bias_is_added_once(tiling: Bf12Tiling | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_gpu, "select_bf12_tiling", lambda *_: tiling)
    weight_NK, bias_N, x_TK = weights(96, 512), random(96, seed=2) * 10, random(5, 512, seed=1)
    linear = Bf12Linear(coded(weight_NK), bias_N)
    wanted_TN = x_TK.double() @ weight_NK.to(DEVICE).double().T + bias_N.double()
    assert error(linear.logits(x_TK), wanted_TN) < 1e-5
    gate, up = wanted_TN.chunk(2, -1)
    assert error(linear.swiglu(x_TK), torch.nn.functional.silu(gate) * up) < 1e-5


def test_of_the_expanded_matrix_there_is_a_chunk_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_gpu, "CHUNK_BYTES", 32 * 128 * 2)
    copies = set()

    def expand(weight: Bf12Weight, out_NK: Tensor, outputs: range) -> None:
        copies.add(out_NK.untyped_storage().data_ptr())
        assert out_NK.untyped_storage().nbytes() <= linear_gpu.CHUNK_BYTES

    monkeypatch.setattr(linear_gpu, "expand", expand)
    multiply_expanded(random(5, 128, dtype=BF16), coded(weights(144, 128)))
    assert len(copies) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 64, 129, 500, 2048])
def test_true_shapes(rows: int, biased: bool) -> None:
    weight_NK = weights(6144, 4096, 4096**-0.5)
    bias_N = random(6144, dtype=BF16, seed=2) if biased else None
    linear, plain = Bf12Linear(coded(weight_NK), bias_N), GpuLinear(weight_NK.to(DEVICE), bias_N)
    x_TK = random(rows, 4096, dtype=BF16, seed=1)
    assert error(linear.logits(x_TK), plain.logits(x_TK)) < 8e-3
    assert error(linear.swiglu(x_TK), plain.swiglu(x_TK)) < 1.2e-2


@cache
def true_weight(outputs: int, inputs: int) -> Bf12Linear:
    return Bf12Linear(coded(weights(outputs, inputs, inputs**-0.5)))


@pytest.mark.gpu
@pytest.mark.parametrize("bucket", BF12_ROW_BUCKETS[1:])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336)])
def test_what_is_chosen_gives_a_row_the_same_bits_within_a_bucket(outputs: int, inputs: int, bucket: int) -> None:
    if select_bf12_tiling(outputs, inputs, bucket, False, DEVICE) is None:
        pytest.skip("cuBLAS")
    x_TK, linear = random(bucket, inputs, dtype=BF16), true_weight(outputs, inputs)
    full = linear(x_TK)
    for rows in (max(2, bucket // 2 + 1), bucket - 1):
        assert torch.equal(linear(x_TK[-rows:]), full[..., -rows:, :])
