"""The 12-bit code on a CPU, as codec.py has it with tensors, in chunks of a matrix that fit the caches.

Two numbers of neighbouring lanes are one integer X of 32 bits, and so are the four bytes of (q, j): the pair of number
2q below the pair of 2q+1. So bytes need not be moved one by one: a product with 2^8 + 2^16 or 2^0 + 2^8 brings both
bytes of an X next to each other. Exponents need not be counted one by one either: a sum does it for both halves of an
X, and the highest bit of a half says whether the exponent is below the base.

A core does about three times as much as with tensors.

M blocks, J pairs of lanes; a block's numbers are [8, J] of X, its words [3, J, 2].
"""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine.bf12.layout import ZEROS

Integers = NDArray[np.uint32]
Bases = NDArray[np.uint8]  # of each block's row
Positions = NDArray[np.int64]

_CHUNK: Final = 1 << 17  # numbers
_U32: Final = np.uint32
_LOW, _HIGH = _U32(0x00FF00FF), _U32(0xFF00FF00)
_LOWER, _UPPER = _U32(0x0000FFFF), _U32(0xFFFF0000)
_JOIN_LOW, _JOIN_HIGH = _U32(0x00010100), _U32(0x00000101)
_SECOND: Final = _U32(0x0000FF00)
_CODES: Final = _U32(0x87878787)
_BOTH: Final = _U32(0x00010001)
_SIGNS, _NUMBERS, _CODED = _U32(0x80008000), _U32(0x7FFF7FFF), _U32(0x07FF07FF)
_OUTSIDE: Final = _U32(0xF800F800)  # bits that are set below the base, or too far above it


def encode(numbers_M8J: Integers, words_M3J2: Integers, bases_M: Bases) -> Positions:
    """Writes the words. Returns the positions of escapes, counted through the blocks, ascending."""
    positions = [np.empty(0, np.int64)]
    for start, stop, scratch in _chunks(numbers_M8J):
        within = _encode(numbers_M8J[start:stop], words_M3J2[start:stop], bases_M[start:stop], scratch)
        positions.append(within + start * numbers_M8J[0].size * 2)
    return np.concatenate(positions)


def expand(numbers_M8J: Integers, words_M3J2: Integers, bases_M: Bases) -> None:
    """Writes the numbers; an escape becomes the number that its placeholder stands for."""
    for start, stop, scratch in _chunks(numbers_M8J):
        _expand(numbers_M8J[start:stop], words_M3J2[start:stop], bases_M[start:stop], scratch)


def _chunks(numbers_M8J: Integers) -> Iterator[tuple[int, int, Integers]]:
    """Ranges of blocks, each with scratch memory [3, 8, blocks, J], the same for all."""
    blocks, _, pairs = numbers_M8J.shape
    step = _CHUNK // (16 * pairs)
    memory = np.empty(3 * 8 * min(step, blocks) * pairs, _U32)
    for start in range(0, blocks, step):
        count = min(step, blocks - start)
        yield start, start + count, memory[: 3 * 8 * count * pairs].reshape(3, 8, count, pairs)


def _encode(numbers_M8J: Integers, words_M3J2: Integers, bases_M: Bases, scratch: Integers) -> Positions:
    x_8MJ, spare_8MJ = scratch[0], scratch[1]
    low_4MJ, high_4MJ = scratch[2, :4], scratch[2, 4:]
    np.copyto(x_8MJ, numbers_M8J.transpose(1, 0, 2))
    positions = _count(x_8MJ, bases_M, scratch[1], scratch[2])
    _join(x_8MJ, _LOW, _JOIN_LOW, low_4MJ, spare_8MJ[:4])
    _join(x_8MJ, _HIGH, _JOIN_HIGH, high_4MJ, spare_8MJ[:4])
    rotated_2MJ, rest_2MJ = spare_8MJ[:2], spare_8MJ[2:4]
    np.left_shift(high_4MJ[1::2], 4, out=rotated_2MJ)
    np.right_shift(high_4MJ[1::2], 28, out=rest_2MJ)
    np.bitwise_or(rotated_2MJ, rest_2MJ, out=rotated_2MJ)
    np.bitwise_or(rotated_2MJ, high_4MJ[0::2], out=rotated_2MJ)
    for plane, two_2MJ in enumerate((rotated_2MJ, low_4MJ[:2], low_4MJ[2:])):
        words_M3J2[:, plane, :, 0] = two_2MJ[0]
        words_M3J2[:, plane, :, 1] = two_2MJ[1]
    return positions


def _join(x_8MJ: Integers, mask: np.uint32, factor: np.uint32, into_4MJ: Integers, spare_4MJ: Integers) -> None:
    """The two bytes in the mask of each X, even numbers' below odd numbers'."""
    np.bitwise_and(x_8MJ[0::2], mask, out=into_4MJ)
    np.multiply(into_4MJ, factor, out=into_4MJ)
    np.right_shift(into_4MJ, 16, out=into_4MJ)
    np.bitwise_and(x_8MJ[1::2], mask, out=spare_4MJ)
    np.multiply(spare_4MJ, factor, out=spare_4MJ)
    np.bitwise_and(spare_4MJ, _UPPER, out=spare_4MJ)
    np.bitwise_or(into_4MJ, spare_4MJ, out=into_4MJ)


def _count(x_8MJ: Integers, bases_M: Bases, counted_8MJ: Integers, outside_8MJ: Integers) -> Positions:
    """Leaves each number its sign and its exponent counted from the base, and 0 where it has no code. Returns the
    positions of those without."""
    below_M = (_U32(0x8000) - (bases_M.astype(_U32) << 7)) * _BOTH
    outside_M = np.where(bases_M == ZEROS, _NUMBERS, _OUTSIDE)  # in a row of zeros nothing else has a code
    np.bitwise_and(x_8MJ, _NUMBERS, out=counted_8MJ)
    np.add(counted_8MJ, _wide(below_M, x_8MJ), out=counted_8MJ)
    np.bitwise_xor(counted_8MJ, _SIGNS, out=counted_8MJ)
    np.bitwise_and(counted_8MJ, _wide(outside_M, x_8MJ), out=outside_8MJ)
    np.bitwise_and(counted_8MJ, _CODED, out=counted_8MJ)
    np.bitwise_and(x_8MJ, _SIGNS, out=x_8MJ)
    np.bitwise_or(x_8MJ, counted_8MJ, out=x_8MJ)
    return _clear_escapes(x_8MJ, outside_8MJ)


def _clear_escapes(x_8MJ: Integers, outside_8MJ: Integers) -> Positions:
    """Writes 0 where there is no code. Returns these numbers' positions, ascending."""
    columns = np.flatnonzero(np.bitwise_or.reduce(outside_8MJ, 0))  # few, counted through blocks and pairs
    number, at = np.nonzero(outside_8MJ.reshape(8, -1).take(columns, 1).view(np.uint16))
    at = columns[at // 2] * 2 + at % 2
    x_8MJ.reshape(8, -1).view(np.uint16)[number, at] = 0
    block, lane = np.divmod(at, 2 * x_8MJ.shape[2])
    return np.sort((block * 8 + number) * (2 * x_8MJ.shape[2]) + lane)


def _wide(each_M: NDArray[Any], x_8MJ: Integers) -> Integers:
    """[M, J]: a block's value for each X of it, since broadcasting over a short dimension is slow."""
    return each_M.repeat(x_8MJ.shape[2]).reshape(x_8MJ.shape[1:])


def _expand(numbers_M8J: Integers, words_M3J2: Integers, bases_M: Bases, scratch: Integers) -> None:
    high_4MJ, low_4MJ = scratch[0, :4], scratch[0, 4:]
    np.copyto(high_4MJ[0::2], words_M3J2[:, 0].transpose(2, 0, 1))
    np.copyto(low_4MJ[:2], words_M3J2[:, 1].transpose(2, 0, 1))
    np.copyto(low_4MJ[2:], words_M3J2[:, 2].transpose(2, 0, 1))
    spare_4MJ, x_8MJ = scratch[1, :4], scratch[2]
    np.right_shift(high_4MJ[0::2], 4, out=high_4MJ[1::2])
    np.left_shift(high_4MJ[0::2], 28, out=spare_4MJ[:2])
    np.bitwise_or(high_4MJ[1::2], spare_4MJ[:2], out=high_4MJ[1::2])
    np.bitwise_and(high_4MJ, _CODES, out=high_4MJ)
    np.bitwise_and(low_4MJ, _LOWER, out=spare_4MJ)
    np.left_shift(high_4MJ, 16, out=x_8MJ[0::2])
    np.bitwise_or(x_8MJ[0::2], spare_4MJ, out=x_8MJ[0::2])
    np.right_shift(low_4MJ, 16, out=spare_4MJ)
    np.bitwise_and(high_4MJ, _UPPER, out=x_8MJ[1::2])
    np.bitwise_or(x_8MJ[1::2], spare_4MJ, out=x_8MJ[1::2])
    swapped_8MJ = scratch[0]
    np.right_shift(x_8MJ, 8, out=swapped_8MJ)  # the second byte of each four changes with the third
    np.bitwise_xor(swapped_8MJ, x_8MJ, out=swapped_8MJ)
    np.bitwise_and(swapped_8MJ, _SECOND, out=swapped_8MJ)
    np.bitwise_xor(x_8MJ, swapped_8MJ, out=x_8MJ)
    np.left_shift(swapped_8MJ, 8, out=swapped_8MJ)
    np.bitwise_xor(x_8MJ, swapped_8MJ, out=x_8MJ)
    np.add(x_8MJ, _wide((bases_M.astype(_U32) << 7) * _BOTH, x_8MJ), out=x_8MJ)
    np.copyto(numbers_M8J, x_8MJ.transpose(1, 0, 2))
