"""What tests of coded weights share: matrices that a GPU would read in 12 bits, with and without what has no code."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.weights.codec import Bf12, choose_base, encode, stack
from tests.engine.kernels.steps import DEVICE, random


def weights(outputs: int, inputs: int, sigma: float = 0.02, seed: int = 0) -> Tensor:
    """bfloat16, on the CPU."""
    return (random(outputs, inputs, seed=seed) * sigma).bfloat16().cpu()


def coded(*weights_NK: Tensor, bases: Sequence[int] = ()) -> Bf12:
    """Below each other, with these bases or those that suit them, on the device."""
    bases = bases or [choose_base(weight_NK) for weight_NK in weights_NK]
    weight = stack([encode(weight_NK.to(DEVICE), base) for weight_NK, base in zip(weights_NK, bases, strict=True)])
    index = weight.index
    return Bf12(
        weight.words_NW.to(DEVICE),
        type(index)(*(getattr(index, name).to(DEVICE) for name in ("scales_N", "firsts_G", "places_E", "values_E"))),
    )


def without_escapes(weight_NK: Tensor) -> Tensor:
    """The same where all numbers have codes: what is too small is made the least that has one."""
    least = 2.0 ** (2 * choose_base(weight_NK) - 127)
    small = weight_NK.abs() < least
    return torch.where(small, torch.full_like(weight_NK, least), weight_NK)


def every_value() -> Tensor:
    """All of bfloat16, [512, 128]."""
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).view(512, 128)


def same_bits(one: Tensor, other: Tensor) -> bool:
    assert one.dtype == other.dtype == torch.bfloat16
    return torch.equal(one.cpu().view(torch.int16), other.cpu().view(torch.int16))
