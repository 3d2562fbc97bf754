"""The sizes of the 12-bit code (codec.py): which matrices have one, and how many lanes and words a row has.

It needs no torch, so that headers can be checked without it.
"""

from typing import Final

LANES: Final = (32, 16)  # a row has the first whose blocks divide it
INPUTS_MAX: Final = 1 << 16  # the escape index has 16 bits for the input
GROUP_OUTPUTS: Final = 16  # outputs whose escapes are listed together
CODES: Final = 16  # exponents that have a code
BASES: Final = range(2, 240)  # so that neither subnormals nor infinities have a code, and scales are normal numbers
ZEROS: Final = 0  # the base of a row in which zeros alone have a code


def is_encodable(outputs: int, inputs: int) -> bool:
    """Whether matrices of this shape have a code."""
    return outputs > 0 and 0 < inputs <= INPUTS_MAX and inputs % (8 * LANES[-1]) == 0


def lanes_of(inputs: int) -> int:
    return next(lanes for lanes in LANES if inputs % (8 * lanes) == 0)


def block_of(inputs: int) -> int:
    """How many numbers of a row make a block."""
    return 8 * lanes_of(inputs)


def words_of(inputs: int) -> int:
    """How many words a row has."""
    return inputs // 8 * 3
