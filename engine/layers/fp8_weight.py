"""A matrix in 8 bits a number (e4m3), each output with a factor or with one for each 128 inputs. It multiplies
nothing.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """numbers_NK, float8_e4m3fn, times scales_NB, float32."""

    numbers_NK: Tensor
    scales_NB: Tensor

    @property
    def bytes(self) -> int:
        return self.numbers_NK.nbytes + self.scales_NB.nbytes
