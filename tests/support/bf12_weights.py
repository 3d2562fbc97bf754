"""What tests of coded weights share: matrices that a GPU would read in 12 bits, with and without what has no code."""

import torch
from torch import Tensor

from engine.bf12.codec import Bf12Weight, choose_bases, encode, stack_matrices
from engine.bf12.layout import CODES
from tests.support.steps import DEVICE, random


def weights(outputs: int, inputs: int, sigma: float = 0.02, seed: int = 0) -> Tensor:
    """bfloat16, on the CPU."""
    return (random(outputs, inputs, seed=seed) * sigma).bfloat16().cpu()


def coded(*weights_NK: Tensor, base: int | None = None) -> Bf12Weight:
    """Below each other, each row with this base or the one that suits it, on the device."""
    weight = stack_matrices([encode(weight_NK, _bases(weight_NK, base)) for weight_NK in weights_NK])
    index = weight.index
    return Bf12Weight(
        weight.words_NW.to(DEVICE),
        type(index)(*(getattr(index, name).to(DEVICE) for name in ("scales_N", "firsts_G", "places_E", "values_E"))),
    )


def without_escapes(weight_NK: Tensor) -> Tensor:
    """The same where all numbers have codes: what is too small or too large is made the nearest that has one."""
    exponents_N1 = choose_bases(weight_NK).float()[:, None] - 127
    least_N1 = torch.exp2(exponents_N1).bfloat16()
    greatest_N1 = (torch.exp2(exponents_N1 + (CODES - 1)) * (2 - 2**-7)).bfloat16()
    return weight_NK.abs().clamp(least_N1, greatest_N1).copysign(weight_NK)


def _bases(weight_NK: Tensor, base: int | None) -> Tensor:
    return choose_bases(weight_NK) if base is None else torch.full((len(weight_NK),), base, dtype=torch.uint8)


def every_value() -> Tensor:
    """All of bfloat16, [512, 128]."""
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).view(512, 128)


def same_bits(one: Tensor, other: Tensor) -> bool:
    assert one.dtype == other.dtype == torch.bfloat16
    return torch.equal(one.cpu().view(torch.int16), other.cpu().view(torch.int16))
