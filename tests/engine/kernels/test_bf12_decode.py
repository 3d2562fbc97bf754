"""engine/kernels/bf12_decode.py: every bit comes back, whichever outputs are asked for."""

import pytest
import torch

from engine.bf12.layout import BASES, GROUP_OUTPUTS
from engine.kernels.bf12_decode import expand
from tests.support.bf12_weights import coded, every_value, same_bits, weights
from tests.support.steps import DEVICE, poisoned

BF16 = torch.bfloat16


@pytest.mark.parametrize("inputs", [128, 256, 2304])
def test_any_outputs_of_several_matrices(inputs: int) -> None:
    weight_NK = torch.cat((weights(37, inputs), weights(20, inputs, 3.0, seed=1)))
    weight_NK[0, -1] = weight_NK[16, 0] = weight_NK[56, -1] = 0.0
    weight_NK[20] = -0.0
    weight = coded(weight_NK[:37], weight_NK[37:])
    for outputs in (range(0, 57), range(16, 50), range(48, 57)):
        out_NK = poisoned(len(outputs), inputs, dtype=BF16)
        expand(weight, out_NK, outputs)
        assert same_bits(out_NK, weight_NK[outputs.start : outputs.stop])


def test_all_values() -> None:
    """Values of 16 exponents at a time, with a base that has codes for most of them."""
    values = every_value().view(-1)
    exponents = values.view(torch.int16).int() >> 7 & 0xFF
    for first in range(0, 256, 16):
        weight_NK = values[(exponents >= first) & (exponents < first + 16)].view(32, 128)
        weight = coded(weight_NK, base=min(max(first, BASES.start), BASES.stop - 1))
        assert len(weight.index.places_E) == {0: 512, 240: 256}.get(first, 0)
        out_NK = poisoned(32, 128, dtype=BF16)
        expand(weight, out_NK, range(32))
        assert same_bits(out_NK, weight_NK)


def test_rows_of_zeros() -> None:
    weight_NK = weights(32, 128)
    weight_NK[3], weight_NK[17] = 0.0, -0.0
    weight_NK[17, ::3] = 0.0
    weight_NK[19, 40:] = 0.0  # the others have no code then
    weight = coded(weight_NK)
    assert weight.index.scales_N[[3, 17, 19]].eq(0.0).all()
    out_NK = poisoned(32, 128, dtype=BF16)
    expand(weight, out_NK, range(32))
    assert same_bits(out_NK, weight_NK)


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), [(28672, 4096), (4096, 14336), (40960, 896)])
def test_true_shapes(outputs: int, inputs: int) -> None:
    weight_NK = weights(outputs, inputs, inputs**-0.5)
    weight, half = coded(weight_NK), outputs // 2 // GROUP_OUTPUTS * GROUP_OUTPUTS
    out_NK = torch.zeros(outputs, inputs, dtype=BF16, device=DEVICE)
    expand(weight, out_NK[:half], range(half))
    expand(weight, out_NK[half:], range(half, outputs))
    assert same_bits(out_NK, weight_NK)
