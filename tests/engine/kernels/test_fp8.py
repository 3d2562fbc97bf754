"""engine/kernels/fp8 interpreted: packed rows are what quantize_rows gives, and tiles multiply as numbers times factors
do."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.kernels import elementwise, linear, reference, rms_norm, tuning_tables
from engine.kernels.experts.quantize_rows import quantize_rows
from engine.kernels.fp8 import tiles, tuning
from engine.kernels.fp8.tiles import Fp8Tiling
from engine.kernels.fp8.tuning import (
    LibraryMatmul,
    PackingRow,
    kernel_entry,
    kernel_of,
    select_fp8_kernel,
    select_gated_tiling,
)
from engine.kernels.linear import LinearScales, LinearTiling
from engine.kernels.packed_rows import factors_of, is_packed, new_packed, numbers_of
from engine.layers import linear_fp8
from engine.layers.fp8_weight import Fp8Weight
from engine.layers.linear_fp8 import Fp8Linear
from engine.weights import fp8
from tests.support.steps import DEVICE, error, random

TILINGS = [
    Fp8Tiling(32, 32, 64, 1, 2, 4, True),
    Fp8Tiling(16, 64, 64, 2, 3, 4, False),
    Fp8Tiling(16, 256, 64, 1, 2, 4, False),
]


def expanded(packed_TP: Tensor) -> Tensor:
    return fp8.expand(numbers_of(packed_TP), factors_of(packed_TP), torch.float64)


def nearly_all_alike(packed_TP: Tensor, x_TK: Tensor) -> bool:
    """Whether the numbers are those that quantize_rows gives, but for what rounds to a neighbour."""
    own = quantize_rows(x_TK, 1)
    assert own.scales is not None
    assert error(factors_of(packed_TP), own.scales) < 1e-5
    alike = numbers_of(packed_TP).view(torch.uint8) == own.rows.view(torch.uint8)
    return float(alike.float().mean()) > 0.99


@pytest.mark.parametrize(
    ("rows", "hidden", "parts", "behind"), [(1, 64, 0, False), (3, 80, 1, False), (5, 48, 4, True)]
)
def test_normed_rows_are_packed(rows: int, hidden: int, parts: int, behind: bool) -> None:
    sum_TH, weight_H, behind_H = random(rows, hidden, seed=1), random(hidden, seed=2), random(hidden, seed=4)
    parts_PTH = random(parts, rows, hidden, seed=3) if parts else None
    packed_TP, plain_TH, sums_TH = new_packed(rows, hidden, DEVICE), torch.empty_like(sum_TH), sum_TH.clone()
    norms = (weight_H, 1e-5)
    rms_norm.add_norm(sum_TH, parts_PTH, *norms, packed_TP, behind_H if behind else None)
    rms_norm.add_norm(sums_TH, parts_PTH, *norms, plain_TH, behind_H if behind else None)
    assert is_packed(packed_TP)
    assert not is_packed(plain_TH)
    assert torch.equal(sum_TH, sums_TH)
    assert nearly_all_alike(packed_TP, plain_TH)


@pytest.mark.parametrize(("rows", "inner"), [(1, 96), (5, 40), (3, 2100)])
def test_gated_rows_are_packed(rows: int, inner: int) -> None:
    x_T2I = random(rows, 2 * inner)
    assert nearly_all_alike(elementwise.silu_and_pack(x_T2I), reference.silu_and_multiply(x_T2I.clone()))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_row_with_what_is_not_finite_is_not_and_others_are(number: float) -> None:
    x_T2I = random(3, 128)
    wanted = expanded(elementwise.silu_and_pack(x_T2I))
    x_T2I[1, 70] = number
    found = expanded(elementwise.silu_and_pack(x_T2I))
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], wanted[[0, 2]])


def test_a_row_of_zeros_stays_one() -> None:
    packed_TP = elementwise.silu_and_pack(torch.zeros(2, 64, device=DEVICE))
    assert not expanded(packed_TP).any()


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 48, 256), (70, 100, 208), (20, 300, 512)])
def test_tiles_multiply_numbers_times_factors(rows: int, outputs: int, inputs: int, tiling: Fp8Tiling) -> None:
    (x, x_scales), (w, w_scales) = (fp8.quantize(random(n, inputs, seed=n)) for n in (rows, outputs))
    found = tiles.multiply(x, w, tiling, LinearScales(w_scales, x_scales), torch.float32)
    assert found.shape == (tiling.parts, rows, outputs)
    wanted = fp8.expand(x, x_scales, torch.float64) @ fp8.expand(w, w_scales, torch.float64).T
    assert error(found.double().sum(0), wanted) < 1e-6


def test_a_row_has_the_same_bits_whatever_lies_beside_it() -> None:
    tiling = Fp8Tiling(16, 32, 64, 2, 2, 4, False)
    (x, x_scales), (w, w_scales) = (fp8.quantize(random(n, 256, seed=n)) for n in (40, 64))
    whole = tiles.multiply(x, w, tiling, LinearScales(w_scales, x_scales), torch.float32)
    other, other_scales = fp8.quantize(random(40, 256, seed=9))
    other[7], other_scales[7] = x[7], x_scales[7]
    beside = tiles.multiply(other, w, tiling, LinearScales(w_scales, other_scales), torch.float32)
    assert torch.equal(whole[:, 7], beside[:, 7])
    assert not torch.equal(whole[:, 8], beside[:, 8])


@pytest.mark.parametrize("rows", [3, 150])
def test_a_layer_gives_for_packed_rows_what_it_gives_for_the_same_in_bfloat16(rows: int) -> None:
    layer, x_TK = Fp8Linear(Fp8Weight(*fp8.quantize(random(96, 256, seed=2)))), random(rows, 256, seed=3)
    x_TK = x_TK.bfloat16()
    own, packed_TP = quantize_rows(x_TK, 1), new_packed(rows, 256, DEVICE)
    assert own.scales is not None
    numbers_of(packed_TP).copy_(own.rows)
    factors_of(packed_TP).copy_(own.scales)
    assert layer.takes_packed
    assert torch.equal(layer(packed_TP), layer(x_TK))
    assert torch.equal(layer.swiglu(packed_TP), layer.swiglu(x_TK))
    layer.packs_gated = True
    assert is_packed(layer.swiglu(packed_TP)) == (rows > 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs", "parts"), [(64, 256, 1), (100, 200, 1), (64, 512, 4)])
def test_a_row_that_is_packed_on_the_way_gives_what_a_packed_one_gives(
    outputs: int, inputs: int, parts: int, dtype: torch.dtype
) -> None:
    numbers_NK, scales_NB = fp8.quantize(random(outputs, inputs, seed=2))
    x_1K, tiling = random(1, inputs, dtype=dtype, seed=3), LinearTiling(32, 128, parts, 2, 4)
    own = quantize_rows(x_1K, 1)
    found = linear.multiply(x_1K, numbers_NK, tiling, LinearScales(scales_NB, None), torch.float32)
    wanted = linear.multiply(own.rows, numbers_NK, tiling, LinearScales(scales_NB, own.scales), torch.float32)
    assert torch.equal(found, wanted)
    x_1K[0, 7] = float("nan")
    found = linear.multiply(x_1K, numbers_NK, tiling, LinearScales(scales_NB, None), torch.float32)
    assert not found.isfinite().any()


def test_a_layer_leaves_packing_to_the_kernel_that_does_it_and_packs_no_packed_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, x_1K = Fp8Linear(Fp8Weight(*fp8.quantize(random(96, 256, seed=2)))), random(1, 256, seed=3).bfloat16()
    wanted = layer(x_1K)
    tiling = tuning.rule_tiling(96, 256, 1, gated=False)
    monkeypatch.setattr(linear_fp8, "select_fp8_kernel", lambda *_: PackingRow(tiling))
    own, packed_TP = quantize_rows(x_1K, 1), new_packed(1, 256, DEVICE)
    assert own.scales is not None
    numbers_of(packed_TP).copy_(own.rows)
    factors_of(packed_TP).copy_(own.scales)
    assert torch.equal(layer(packed_TP), wanted)
    monkeypatch.setattr(linear_fp8, "quantize_rows", None)
    assert torch.equal(layer(x_1K), wanted)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A table that knows one shape."""
    name = tuning.device_name(DEVICE)
    monkeypatch.setattr(tuning_tables, "_TABLES", tmp_path)
    entries = {
        "256": ["tiles", 128, 256, 128, 2, 3, 8, False],
        "512": ["library", False],
        "16": ["rows", 64, 128, 1, 5, 4],
    }
    gated = {"1": ["rows", 32, 128, 1, 4, 4], "64": ["library", True]}
    (tmp_path / f"{name}.json").write_text(json.dumps({"96x256 fp8": entries, "192x256 gated fp8": gated}))
    for cache in (tuning_tables.load_table, tuning._measured):
        cache.cache_clear()
    yield
    for cache in (tuning_tables.load_table, tuning._measured):
        cache.cache_clear()


@pytest.mark.usefixtures("measured")
def test_a_measured_shape_gets_what_was_fastest_and_others_what_the_rule_says() -> None:
    tiled = select_fp8_kernel(96, 256, 129, DEVICE)
    assert tiled == Fp8Tiling(128, 256, 128, 2, 3, 8, False)
    for kernel in (tiled, LibraryMatmul(True), LinearTiling(1, 2, 3, 4, 5), PackingRow(LinearTiling(1, 2, 3, 4, 5))):
        assert kernel_of(kernel_entry(kernel)) == kernel
    assert select_fp8_kernel(96, 256, 512, DEVICE) == LibraryMatmul(exact=False)
    assert select_fp8_kernel(96, 256, 9, DEVICE) == LinearTiling(64, 128, 1, 5, 4)
    assert isinstance(select_fp8_kernel(96, 256, 17, DEVICE), LinearTiling)
    assert select_fp8_kernel(96, 256, 100_000, DEVICE) == LibraryMatmul(exact=True)
    assert select_gated_tiling(192, 256, 1, DEVICE) == LinearTiling(32, 128, 1, 4, 4)
    assert select_gated_tiling(192, 256, 33, DEVICE) is None
    assert select_gated_tiling(192, 256, 129, DEVICE) is None
    assert select_gated_tiling(192, 256, 100, DEVICE) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 200, 256, 1000])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336)])
def test_tiles_at_true_sizes(outputs: int, inputs: int, rows: int) -> None:
    (x, x_scales), (w, w_scales) = (fp8.quantize(random(n, inputs, seed=n)) for n in (rows, outputs))
    wanted = fp8.expand(x, x_scales, torch.float64) @ fp8.expand(w, w_scales, torch.float64).T
    for tiling in (Fp8Tiling(128, 256, 128, 2, 4, 8, False), Fp8Tiling(128, 128, 128, 1, 4, 8, True)):
        found = tiles.multiply(x, w, tiling, LinearScales(w_scales, x_scales), torch.bfloat16)
        assert error(found.double().sum(0), wanted) < (4e-3 if tiling.exact else 2e-2)
