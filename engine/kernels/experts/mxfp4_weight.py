"""A matrix in 4 bits a number, of which 32 inputs share a power of two (OCP Microscaling Formats 1.0), as GPUs have it.
It multiplies nothing.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """N outputs of K inputs, a multiple of 64. Each 64 inputs are 32 bytes: byte j has input j in its lower half and
    input 32 + j in its upper one, so that each half of them is a block of inputs in their order, with one power of two.

    pairs_NH      uint8 [N, K / 2].
    exponents_NB  uint8 [N, K / 32], each 127 more than the power's exponent.
    """

    pairs_NH: Tensor
    exponents_NB: Tensor

    @property
    def bytes(self) -> int:
        return self.pairs_NH.nbytes + self.exponents_NB.nbytes

    @property
    def shape(self) -> tuple[int, int]:
        """N, K."""
        outputs, half = self.pairs_NH.shape
        return outputs, 2 * half
