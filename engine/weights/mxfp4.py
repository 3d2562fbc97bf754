"""Numbers of 4 bits, 32 of which share a power of two (OCP Microscaling Formats 1.0) → numbers of any other dtype, or
as GPUs multiply them (kernels/experts/mxfp4_weight.py).

A file's byte has two numbers, the first in its lower half. It knows no files.
"""

from typing import Final

import torch
from torch import Tensor

BLOCK: Final = 32
BLOCK_BYTES: Final = BLOCK // 2
PAIR: Final = 2 * BLOCK
_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the three bits below the sign
_BIAS: Final = 127
_NAN: Final = 255
_FINITE_MOST: Final = 252  # the largest exponent with which all numbers are finite in bfloat16


def expand(bytes_BH: Tensor, exponents_B: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 32] of B blocks of 16 bytes, whose powers of two have these exponents, uint8. A power that is not a number
    makes its block so. Exact in bfloat16 and float32."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.float32, device=bytes_BH.device)
    pairs_BHP = torch.stack((values[(bytes_BH & 0xF).int()], values[(bytes_BH >> 4).int()]), -1)
    numbers_BN = torch.ldexp(pairs_BHP.flatten(1), exponents_B.int()[:, None] - _BIAS)
    return numbers_BN.masked_fill_((exponents_B == _NAN)[:, None], float("nan")).to(dtype)


def pair(bytes_BH: Tensor) -> Tensor:
    """[B / 2, 32] of B blocks of 16 bytes: two blocks side by side in the halves of each byte."""
    nibbles_GBI = torch.stack((bytes_BH & 0xF, bytes_BH >> 4), -1).view(-1, 2, BLOCK)
    return nibbles_GBI[:, 0] | (nibbles_GBI[:, 1] << 4)


def count_not_finite(exponents: Tensor) -> int:
    """How many powers are no numbers, or too large for some of the numbers that may have them."""
    return int((exponents > _FINITE_MOST).sum())
