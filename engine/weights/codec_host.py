"""The 12-bit code on a CPU, as codec.py has it with tensors, for a part of a matrix at a time that the caches hold.

Two numbers of neighbouring lanes are one integer X of 32 bits, and so are the four bytes of (q, j): of two such, the
pair of number 2q below that of 2q+1. So bytes need not be moved one by one: a product with 2^8 + 2^16 or 2^0 + 2^8
brings both bytes of an X next to each other.

A core codes four times as much and expands three times as much as with tensors.

M blocks, J pairs of lanes; a block's numbers are [8, J] of X, its words [3, J, 2].
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.uint32]
Positions = NDArray[np.int64]

_CHUNK: Final = 1 << 17  # numbers at a time
_U32, _U64 = np.uint32, np.uint64
_LOW, _HIGH = _U32(0x00FF00FF), _U32(0xFF00FF00)
_LOWER, _UPPER = _U32(0x0000FFFF), _U32(0xFFFF0000)
_JOIN_LOW, _JOIN_HIGH = _U32(0x00010100), _U32(0x00000101)
_SECOND: Final = _U32(0x0000FF00)
_CODES: Final = _U32(0x87878787)
_ONES: Final = 0x0101010101010101  # of each byte the lowest bit
_SIGNS, _EXPONENTS, _OUTSIDE = _U64(0x80 * _ONES), _U64(0x7F * _ONES), _U64(0xF8 * _ONES)


def encode(numbers_M8J: Integers, words_M3J2: Integers, base: int) -> Positions:
    """Writes the words. Gives where escapes are, counted through the blocks, ascending."""
    found = [np.empty(0, np.int64)]
    for start, stop, scratch in _chunks(numbers_M8J):
        places = _encode(numbers_M8J[start:stop], words_M3J2[start:stop], base, scratch)
        found.append(places + start * numbers_M8J[0].size * 2)
    return np.concatenate(found)


def expand(numbers_M8J: Integers, words_M3J2: Integers, base: int) -> None:
    """Writes the numbers, of escapes what stands in their places."""
    for start, stop, scratch in _chunks(numbers_M8J):
        _expand(numbers_M8J[start:stop], words_M3J2[start:stop], base, scratch)


def _chunks(numbers_M8J: Integers) -> Iterator[tuple[int, int, Integers]]:
    """Ranges of blocks, each with memory [3, 8, blocks, J], which is used again."""
    blocks, _, pairs = numbers_M8J.shape
    step = _CHUNK // (16 * pairs)
    memory = np.empty(3 * 8 * min(step, blocks) * pairs, _U32)
    for start in range(0, blocks, step):
        count = min(step, blocks - start)
        yield start, start + count, memory[: 3 * 8 * count * pairs].reshape(3, 8, count, pairs)


def _encode(numbers_M8J: Integers, words_M3J2: Integers, base: int, scratch: Integers) -> Positions:
    x_8MJ, spare_8MJ = scratch[0], scratch[1]
    low_4MJ, high_4MJ = scratch[2, :4], scratch[2, 4:]
    np.copyto(x_8MJ, numbers_M8J.transpose(1, 0, 2))
    _join(x_8MJ, _LOW, _JOIN_LOW, low_4MJ, spare_8MJ[:4])
    _join(x_8MJ, _HIGH, _JOIN_HIGH, high_4MJ, spare_8MJ[:4])
    places = _take_codes(high_4MJ, low_4MJ, base, spare_8MJ[:4], spare_8MJ[4:])
    turned_2MJ, rest_2MJ = spare_8MJ[:2], spare_8MJ[2:4]
    np.left_shift(high_4MJ[1::2], 4, out=turned_2MJ)
    np.right_shift(high_4MJ[1::2], 28, out=rest_2MJ)
    np.bitwise_or(turned_2MJ, rest_2MJ, out=turned_2MJ)
    np.bitwise_or(turned_2MJ, high_4MJ[0::2], out=turned_2MJ)
    for plane, two_2MJ in enumerate((turned_2MJ, low_4MJ[:2], low_4MJ[2:])):
        words_M3J2[:, plane, :, 0] = two_2MJ[0]
        words_M3J2[:, plane, :, 1] = two_2MJ[1]
    return places


def _join(x_8MJ: Integers, mask: np.uint32, factor: np.uint32, into_4MJ: Integers, spare_4MJ: Integers) -> None:
    """Of each X the two bytes in the mask: those of even numbers below those of odd ones."""
    np.bitwise_and(x_8MJ[0::2], mask, out=into_4MJ)
    np.multiply(into_4MJ, factor, out=into_4MJ)
    np.right_shift(into_4MJ, 16, out=into_4MJ)
    np.bitwise_and(x_8MJ[1::2], mask, out=spare_4MJ)
    np.multiply(spare_4MJ, factor, out=spare_4MJ)
    np.bitwise_and(spare_4MJ, _UPPER, out=spare_4MJ)
    np.bitwise_or(into_4MJ, spare_4MJ, out=into_4MJ)


def _take_codes(
    high_4MJ: Integers, low_4MJ: Integers, base: int, code_4MJ: Integers, outside_4MJ: Integers
) -> Positions:
    """Of high bytes sign and code, eight at a time; where there is no code 0, and 0 below it. Gives these places."""
    high, code, outside = (part.reshape(-1).view(_U64) for part in (high_4MJ, code_4MJ, outside_4MJ))
    np.bitwise_and(high, _EXPONENTS, out=code)
    np.add(code, _U64((0x80 - base) * _ONES), out=code)  # of each byte without a carry: bit 7 is set from the base on
    np.bitwise_xor(code, _SIGNS, out=code)
    np.bitwise_and(high, _SIGNS, out=high)
    np.bitwise_or(high, code, out=high)
    np.bitwise_and(code, _OUTSIDE, out=outside)
    eights = np.flatnonzero(outside)
    if not len(eights):
        return eights
    bytes_at = np.flatnonzero(outside[eights].view(np.uint8))
    bytes_at = eights[bytes_at // 8] * 8 + bytes_at % 8
    high_4MJ.reshape(-1).view(np.uint8)[bytes_at] = 0
    low_4MJ.reshape(-1).view(np.uint8)[bytes_at] = 0
    return _places(bytes_at, high_4MJ.shape)


def _places(bytes_at: Positions, shape: tuple[int, ...]) -> Positions:
    """Bytes of [4, M, J] → the numbers that they are of, ascending."""
    _, blocks, pairs = shape
    at, byte = np.divmod(bytes_at, 4)
    at, pair = np.divmod(at, pairs)
    two, block = np.divmod(at, blocks)
    return np.sort((block * 8 + 2 * two + byte // 2) * (2 * pairs) + 2 * pair + byte % 2)


def _expand(numbers_M8J: Integers, words_M3J2: Integers, base: int, scratch: Integers) -> None:
    high_4MJ, low_4MJ = scratch[0, :4], scratch[0, 4:]
    np.copyto(high_4MJ[0::2], words_M3J2[:, 0].transpose(2, 0, 1))
    np.copyto(low_4MJ[:2], words_M3J2[:, 1].transpose(2, 0, 1))
    np.copyto(low_4MJ[2:], words_M3J2[:, 2].transpose(2, 0, 1))
    spare_4MJ, x_8MJ = scratch[1, :4], scratch[2]
    np.right_shift(high_4MJ[0::2], 4, out=high_4MJ[1::2])
    np.left_shift(high_4MJ[0::2], 28, out=spare_4MJ[:2])
    np.bitwise_or(high_4MJ[1::2], spare_4MJ[:2], out=high_4MJ[1::2])
    np.bitwise_and(high_4MJ, _CODES, out=high_4MJ)
    np.add(high_4MJ, _U32(base * (_ONES & 0xFFFFFFFF)), out=high_4MJ)
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
    np.copyto(numbers_M8J, x_8MJ.transpose(1, 0, 2))
