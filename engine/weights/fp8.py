"""Weights in 8 bits a number (e4m3) with factors → factors for each output, and numbers of any other dtype.

A file's factors are for a tensor, for each output, or for each block of 128 × 128. In memory each output has one, or
one for each 128 inputs: rows can then be put in any order, cut and stacked. It knows no files.

N outputs, K inputs, B blocks of 128 inputs, or 1.
"""

from typing import Final

import torch
from torch import Tensor

from engine.models.quantization import SCALE_BLOCK

DTYPE: Final = torch.float8_e4m3fn
MAX: Final = 448.0
_NAN_BITS: Final = 0x7F
_CAPABILITY: Final = (8, 9)  # from which on tensor cores multiply such numbers, and Triton reads them at all


def are_kept(device: torch.device) -> bool:
    """Whether a GPU computes with weights in 8 bits. One that is not there, and only meant, does."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= _CAPABILITY


def blocks_of(scales_shape: tuple[int, ...]) -> int:
    """How many factors an output has where a file's have this shape."""
    return scales_shape[1] if len(scales_shape) == 2 else 1


def output_scales(scales: Tensor, outputs: int) -> Tensor:
    """A file's factors as float32 [N, B]."""
    scales = scales.float()
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(outputs, 1)
    if scales.numel() == outputs and scales.shape[0] == outputs:
        return scales.reshape(outputs, 1)
    return scales.repeat_interleave(SCALE_BLOCK, 0)[:outputs]


def expand(numbers_NK: Tensor, scales_NB: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers times their factors, in `dtype`."""
    inputs, blocks = numbers_NK.shape[1], scales_NB.shape[1]
    factors = scales_NB if blocks == 1 else scales_NB.repeat_interleave(SCALE_BLOCK, 1)[:, :inputs]
    return (numbers_NK.float() * factors.to(numbers_NK.device)).to(dtype)


def quantize(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest numbers and float32 factors [N, 1]: the largest of each output becomes the largest number."""
    scales_N1 = (weight_NK.float().abs().amax(1, keepdim=True) / MAX).clamp_min(torch.finfo(torch.float32).tiny)
    return (weight_NK.float() / scales_N1).clamp(-MAX, MAX).to(DTYPE), scales_N1


def count_not_finite(numbers: Tensor) -> int:
    """How many have no value."""
    return int(((numbers.view(torch.uint8) & _NAN_BITS) == _NAN_BITS).sum())
