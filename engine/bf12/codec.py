"""bf16 weights in 12 bits each, without loss: the code, and what it leaves out. It knows no files and no kernels.

A row of a trained matrix uses few exponents. Sixteen consecutive ones have a code, the first of which is the row's
base. The code of a number is its sign, its exponent counted from the base, and its mantissa: 12 bits. A number with
another exponent is an escape: its place holds the smallest code, and the number itself lies beside the matrix with its
position, whatever its bits are. A row of zeros has base 0, with which zeros alone have a code. A base for each row
costs a byte and pays: rows of tokens that were never trained, and of dead neurons, are far smaller than the others.

A row is divided into blocks of 8 · L numbers, L lanes: number i · L + c of a block is lane c's i-th. A block is 3 · L
words of 32 bits: L words of high halves, then twice L of low bytes. Each four bytes belong to two numbers of two lanes,
q counting pairs of numbers and j pairs of lanes:

    bytes of (q, j)   lane 2j of number 2q, lane 2j+1 of 2q, lane 2j of 2q+1, lane 2j+1 of 2q+1
    high              word 2j: those of q=0, and of q=1 rotated left by 4 bits; word 2j+1: of q=2, and of q=3 rotated
    low               words 2j and 2j+1 of the first L: of q=0 and q=1; of the second L: of q=2 and q=3

A high byte has the sign in bit 7 and the counted exponent's upper bits in 2, 1 and 0, so that two fit into one; a low
byte has the exponent's last bit above the mantissa. Two masks, a rotation and a byte permutation per pair of numbers
make bf16 of it: (high | 0x40) above low. That is the number times 2^(128 − base), which a matmul undoes on its float32
sums.

E escapes, N outputs, K inputs, W = 3 · K ÷ 8 words of a row, G groups of 16 outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from engine.bf12 import codec_numpy
from engine.bf12.layout import (
    BASES,
    CODES,
    GROUP_OUTPUTS,
    ZEROS,
    block_of,
    is_encodable,
    lanes_of,
    words_of,
)

_EXPONENTS: Final = 256


@dataclass(frozen=True, slots=True)
class Escapes:
    """The numbers of a matrix [outputs, inputs] that have no code. Positions are output · inputs + input, ascending."""

    outputs: int
    inputs: int
    bases_N: Tensor  # uint8
    positions_E: Tensor  # int64
    values_E: Tensor  # bfloat16

    def rows(self, outputs: range) -> Self:
        """The escapes of some whole rows, with positions counted within them. Costs a search and a copy of them."""
        ends = torch.tensor((outputs.start * self.inputs, outputs.stop * self.inputs), device=self.positions_E.device)
        first, last = torch.searchsorted(self.positions_E, ends).tolist()
        positions_E = self.positions_E[first:last] - outputs.start * self.inputs
        bases_N = self.bases_N[outputs.start : outputs.stop]
        return type(self)(len(outputs), self.inputs, bases_N, positions_E, self.values_E[first:last])

    def to(self, device: torch.device) -> Self:
        moved = (tensor.to(device) for tensor in (self.bases_N, self.positions_E, self.values_E))
        return type(self)(self.outputs, self.inputs, *moved)


@dataclass(frozen=True, slots=True)
class Bf12Matrix:
    """A bf16 matrix in 12 bits a number."""

    words_NW: Tensor  # int32
    escapes: Escapes


@dataclass(frozen=True, slots=True)
class EscapeIndex:
    """The escapes of several matrices of equal inputs below each other, as kernels look for them: by groups of 16
    outputs, one or more of which make a kernel's tile.

    scales_N    float32: the factor of each output's sums, 2^(base − 128); 0 for a row of zeros
    firsts_G    int32, G + 1 of them: the first escape of each group, and their number
    places_E    int32: the output's lowest 15 bits, then 16 bits of input
    values_E    bfloat16: the numbers themselves, not scaled
    """

    scales_N: Tensor
    firsts_G: Tensor
    places_E: Tensor
    values_E: Tensor


@dataclass(frozen=True, slots=True)
class Bf12Weight:
    """A weight in 12 bits a number as kernels take it: matrices of equal inputs below each other."""

    words_NW: Tensor  # int32, contiguous
    index: EscapeIndex

    @property
    def outputs(self) -> int:
        return len(self.words_NW)

    @property
    def inputs(self) -> int:
        return self.words_NW.shape[1] * 8 // 3

    @property
    def bytes(self) -> int:
        index = self.index
        tensors = (self.words_NW, index.scales_N, index.firsts_G, index.places_E, index.values_E)
        return sum(tensor.nbytes for tensor in tensors)


def stack_matrices(matrices: Sequence[Bf12Matrix]) -> Bf12Weight:
    """The matrices below each other in this order."""
    return Bf12Weight(
        torch.cat([matrix.words_NW for matrix in matrices]), index_escapes([matrix.escapes for matrix in matrices])
    )


def exponents_of(weight_NK: Tensor) -> Tensor:
    """int64 [N, 256]: how many numbers of each row have each exponent; 0 counts zeros alone, 1 subnormals too."""
    bits = weight_NK.contiguous().view(torch.int16)
    exponents = (bits >> 7).to(torch.uint8).int()
    exponents += torch.arange(len(bits), dtype=torch.int32, device=bits.device)[:, None] * _EXPONENTS
    counts_NX = torch.bincount(exponents.view(-1), minlength=len(bits) * _EXPONENTS).view(-1, _EXPONENTS)
    some_S = counts_NX[:, 0].nonzero().view(-1)  # few rows, whose zeros are told from subnormals
    zeros_S = (bits[some_S] & 0x7FFF == 0).sum(1)
    counts_NX[some_S, 1] += counts_NX[some_S, 0] - zeros_S
    counts_NX[some_S, 0] = zeros_S
    return counts_NX


def bases_for(counts_NX: Tensor) -> Tensor:
    """uint8 [N]: the base that leaves each row the fewest escapes, from the counts of `exponents_of`."""
    below_NX = torch.nn.functional.pad(counts_NX.cumsum(1), (1, 0))
    with_code_NB = below_NX[:, BASES.start + CODES : BASES.stop + CODES] - below_NX[:, BASES.start : BASES.stop]
    max_N, bases_N = with_code_NB.max(1)
    return (bases_N + BASES.start).where(max_N > counts_NX[:, 0], ZEROS).to(torch.uint8)


def choose_bases(weight_NK: Tensor) -> Tensor:
    """uint8 [N]: the base that leaves each row the fewest escapes; any base is right."""
    return bases_for(exponents_of(weight_NK))


def count_code_use(counts_NX: Tensor, bases_N: Tensor) -> Tensor:
    """int64 [17]: how many numbers have each code with these bases, and last how many are escapes."""
    codes_C = torch.arange(CODES, device=counts_NX.device)
    uses_C = counts_NX.gather(1, bases_N.long()[:, None] + codes_C)
    uses_C = uses_C.where((bases_N != ZEROS)[:, None] | (codes_C == 0), 0).sum(0)
    return torch.cat((uses_C, (counts_NX.sum() - uses_C.sum())[None]))


def encode(weight_NK: Tensor, bases_N: Tensor) -> Bf12Matrix:
    """The code of a matrix, on its device, where the bases lie too. On a GPU it takes some 6 bytes a number."""
    assert weight_NK.dtype == torch.bfloat16
    assert bases_N.dtype == torch.uint8
    outputs, inputs = weight_NK.shape
    assert is_encodable(outputs, inputs)
    encode_words = _encode_on_host if weight_NK.device.type == "cpu" else _encode
    words_NW, positions_E = encode_words(weight_NK.contiguous(), bases_N)
    return Bf12Matrix(words_NW, Escapes(outputs, inputs, bases_N, positions_E, weight_NK.reshape(-1)[positions_E]))


def _encode_on_host(weight_NK: Tensor, bases_N: Tensor) -> tuple[Tensor, Tensor]:
    outputs, inputs = weight_NK.shape
    words_NW = torch.empty(outputs, words_of(inputs), dtype=torch.int32)
    positions = codec_numpy.encode(*_on_host(weight_NK, words_NW, bases_N))
    return words_NW, torch.from_numpy(positions)


def _on_host(
    weight_NK: Tensor, words_NW: Tensor, bases_N: Tensor
) -> tuple[codec_numpy.Integers, codec_numpy.Integers, codec_numpy.Bases]:
    """The tensors' memory as codec_numpy.py takes it."""
    inputs = weight_NK.shape[1]
    pairs = lanes_of(inputs) // 2
    numbers, words = (tensor.numpy().view("u4") for tensor in (weight_NK.view(torch.int16), words_NW))
    bases_M = bases_N.numpy().repeat(inputs // block_of(inputs))
    return numbers.reshape(-1, 8, pairs), words.reshape(-1, 3, pairs, 2), bases_M


def _encode(weight_NK: Tensor, bases_N: Tensor) -> tuple[Tensor, Tensor]:
    bits = weight_NK.view(torch.int16)
    counted = (bits & 0x7FFF) - (bases_N.to(torch.int16) << 7)[:, None]
    max_N = (bases_N != ZEROS).to(torch.int16) * (CODES * 128 - 1)
    outside = (counted < 0) | (counted > max_N[:, None])
    counted.masked_fill_(outside, 0)
    high = ((bits >> 8 & 0x80) | counted >> 8).to(torch.uint8).masked_fill_(outside, 0)
    high_NBQJ, low_NBQJ = _fours(high), _fours(counted.to(torch.uint8))
    rotated = high_NBQJ[:, :, 1::2]
    rotated = (rotated << 4) | ((rotated >> 28) & 0xF)
    high_NBL = (high_NBQJ[:, :, 0::2] | rotated).transpose(2, 3)
    low_NBPL = low_NBQJ.unflatten(2, (2, 2)).transpose(3, 4)  # P halves, then lanes
    words_NW = torch.cat((high_NBL.unsqueeze(2), low_NBPL), 2).reshape(len(weight_NK), -1)
    return words_NW, outside.view(-1).nonzero().view(-1)


def decode(matrix: Bf12Matrix) -> Tensor:
    """The matrix again, bit for bit, on the device of its code."""
    return expand(matrix.words_NW, matrix.escapes)


def expand(words_NW: Tensor, escapes: Escapes) -> Tensor:
    """The matrix of these words and escapes, as `decode`."""
    expand_words = _expand_on_host if words_NW.device.type == "cpu" else _expand
    weight_NK = expand_words(words_NW.contiguous(), escapes)
    weight_NK.view(-1)[escapes.positions_E] = escapes.values_E
    return weight_NK


def _expand_on_host(words_NW: Tensor, escapes: Escapes) -> Tensor:
    weight_NK = torch.empty(len(words_NW), escapes.inputs, dtype=torch.bfloat16)
    codec_numpy.expand(*_on_host(weight_NK, words_NW, escapes.bases_N))
    return weight_NK


def _expand(words_NW: Tensor, escapes: Escapes) -> Tensor:
    lanes = lanes_of(escapes.inputs)
    words_NBSL = words_NW.view(len(words_NW), -1, 3, lanes)
    high, low = words_NBSL[:, :, 0].unflatten(2, (lanes // 2, 2)), words_NBSL[:, :, 1:]
    rotated = ((high >> 4) & 0x0FFFFFFF) | (high << 28)
    high_NBQJ = torch.stack((high, rotated), 4).flatten(3).transpose(2, 3) & _SIGNED  # lanes' pairs, then q
    low_NBQJ = low.unflatten(3, (lanes // 2, 2)).transpose(3, 4).flatten(2, 3)
    high_NK, low_NK = _rows(high_NBQJ), _rows(low_NBQJ)
    counted = (high_NK & 7).to(torch.int16) << 8 | low_NK
    counted += (escapes.bases_N.to(torch.int16) << 7)[:, None]
    return ((high_NK & 0x80).to(torch.int16) << 8 | counted).view(torch.bfloat16)


def index_escapes(escapes: Sequence[Escapes]) -> EscapeIndex:
    """The index of the escapes of matrices below each other in this order."""
    scales, places, values, counts = [], [], [], []
    first = 0
    for matrix in escapes:
        assert matrix.inputs == escapes[0].inputs
        scales_N = torch.ldexp(torch.ones(matrix.outputs), matrix.bases_N.cpu().int() - 128)
        scales.append(scales_N.to(matrix.bases_N.device).where(matrix.bases_N != ZEROS, 0.0))
        n_E, k_E = matrix.positions_E // matrix.inputs + first, matrix.positions_E % matrix.inputs
        places.append(((n_E & 0x7FFF) << 16 | k_E).int())
        values.append(matrix.values_E)
        counts.append(n_E // GROUP_OUTPUTS)
        first += matrix.outputs
    groups = -(-first // GROUP_OUTPUTS)
    ends = torch.bincount(torch.cat(counts), minlength=groups).cumsum(0)
    firsts_G = torch.cat((ends.new_zeros(1), ends)).int()
    return EscapeIndex(torch.cat(scales), firsts_G, torch.cat(places), torch.cat(values))


_SIGNED: Final = -0x78787879  # 0x87878787: the sign and the exponent's bits of each byte


def _fours(bytes_NK: Tensor) -> Tensor:
    """Bytes in the order of numbers → int32 [N, blocks, 4, L ÷ 2], the code's (q, j)."""
    outputs, inputs = bytes_NK.shape
    lanes = lanes_of(inputs)
    pairs = bytes_NK.view(torch.int16).view(outputs, -1, 4, 2, lanes // 2)  # number 2q or 2q+1, pairs of lanes
    return pairs.transpose(3, 4).contiguous().view(torch.int32).squeeze(4)


def _rows(fours_NBQJ: Tensor) -> Tensor:
    """The inverse of `_fours`."""
    pairs = fours_NBQJ.contiguous().unsqueeze(4).view(torch.int16).transpose(3, 4).contiguous()
    return pairs.view(torch.uint8).view(len(fours_NBQJ), -1)
