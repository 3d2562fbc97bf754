"""Numbers of 4 bits, 32 of which share a power of two (OCP Microscaling Formats 1.0) → numbers of any other dtype.

A byte has two numbers, the first in its lower half. It knows no files.
"""

from typing import Final

import torch
from torch import Tensor

BLOCK: Final = 32
BLOCK_BYTES: Final = BLOCK // 2
_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the three bits below the sign
_BIAS: Final = 127
_NAN: Final = 255


def expand(bytes_BH: Tensor, exponents_B: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 32] of B blocks of 16 bytes, whose powers of two have these exponents, uint8. A power that is not a number
    makes its block so. Exact in bfloat16 and float32."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.float32, device=bytes_BH.device)
    pairs_BHP = torch.stack((values[(bytes_BH & 0xF).int()], values[(bytes_BH >> 4).int()]), -1)
    numbers_BN = torch.ldexp(pairs_BHP.flatten(1), exponents_B.int()[:, None] - _BIAS)
    return numbers_BN.masked_fill_((exponents_B == _NAN)[:, None], float("nan")).to(dtype)
