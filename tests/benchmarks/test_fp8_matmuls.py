"""benchmarks/engine/fp8_matmuls.py without a GPU: its kernels multiply what its oracle does."""

import math

import pytest

from benchmarks.engine.fp8_matmuls import ERROR_SHARE, ROWS, SHAPES, Numbers, Work, _shown, multiply, works
from engine.kernels.elementwise import silu_and_multiply
from engine.kernels.fp8.tiles import Fp8Tiling
from engine.kernels.fp8.tuning import FP8_ROW_BUCKETS, Fp8Kernel, LibraryMatmul, PackingRow, kernel_entry, kernel_of
from engine.kernels.linear import LinearTiling
from tests.support.steps import error

ROW = LinearTiling(32, 128, 2, 2, 4)
KERNELS = [ROW, PackingRow(ROW), Fp8Tiling(16, 32, 64, 2, 2, 4, False)]


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_each_kernel_multiplies_what_the_oracle_does(kernel: Fp8Kernel) -> None:
    numbers = Numbers.make(1, 64, 256, "cpu")
    exact_TN, plain_TN = numbers.products()
    found = multiply(kernel, numbers, numbers.numbers_NK, gated=False)
    assert error(found.float().sum(0), exact_TN) < 1e-5
    assert 0.01 < error(exact_TN, plain_TN) < 0.2, "what 8 bits lose, and interpreted rows lose more"


def test_a_gating_kernel_gates() -> None:
    numbers = Numbers.make(3, 64, 256, "cpu")
    found = multiply(LinearTiling(32, 128, 1, 2, 4), numbers, numbers.numbers_NK, gated=True)
    assert error(found[0], silu_and_multiply(numbers.products()[0])) < 4e-3


def test_each_shape_has_kernels_whose_parts_are_equal_and_that_a_table_can_hold() -> None:
    tried = list(works(FP8_ROW_BUCKETS))
    assert {(work.name, work.rows) for work in tried} == {(name, rows) for name in SHAPES for rows in FP8_ROW_BUCKETS}
    assert set(ROWS) <= set(FP8_ROW_BUCKETS)
    for work in tried:
        assert kernel_of(kernel_entry(work.kernel)) == work.kernel
        if isinstance(work.kernel, Fp8Tiling):
            assert math.ceil(work.shape[1] / work.kernel.block_k) % work.kernel.parts == 0


def test_the_fastest_whose_sums_are_near_enough_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    exact, fast = (Work("down", 256, False, LibraryMatmul(exact)) for exact in (True, False))
    lost = 0.04
    assert _shown([(10.0, ERROR_SHARE * lost * 1.5, lost, fast), (12.0, 0.001, lost, exact)]) == exact
    assert capsys.readouterr().out.startswith("!")
    assert _shown([(10.0, 0.002, lost, fast), (12.0, 0.001, lost, exact)]) == fast
    assert _shown([]) is None
    assert fast.bound_us == pytest.approx(1e6 * 4096 * 14336 * 256 / 790e12)
