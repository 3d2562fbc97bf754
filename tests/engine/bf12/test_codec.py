"""engine/bf12/codec.py: every bit comes back, wherever the matrix is cut, in the format that is written down."""

import pytest
import torch
from torch import Tensor

from engine.bf12.codec import (
    Bf12Matrix,
    choose_bases,
    count_code_use,
    decode,
    encode,
    exponents_of,
    index_escapes,
    stack_matrices,
)
from engine.bf12.layout import BASES, INPUTS_MAX, is_encodable, lanes_of

SHAPES = [(1, 128), (7, 128), (16, 384), (48, 1024), (33, 256)]


def gaussian(outputs: int, inputs: int, sigma: float = 0.02, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(outputs, inputs, generator=generator) * sigma).bfloat16()


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def based(weight_NK: Tensor, base: int) -> Tensor:
    """The same for each row."""
    return torch.full((len(weight_NK),), base, dtype=torch.uint8)


def escape_rate(matrix: Bf12Matrix) -> float:
    """Escapes per number."""
    return len(matrix.escapes.positions_E) / (matrix.escapes.outputs * matrix.escapes.inputs)


def every_value() -> Tensor:
    """All 65,536 bit patterns, [256, 256]."""
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(256, 256).view(torch.bfloat16)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("base", [2, 80, 111, 112, 239])
def test_decoding_gives_every_bit_back(shape: tuple[int, int], base: int) -> None:
    weight_NK = gaussian(*shape)
    assert same_bits(decode(encode(weight_NK, based(weight_NK, base))), weight_NK)


@pytest.mark.parametrize("base", BASES)
def test_each_of_all_values_comes_back_from_every_base(base: int) -> None:
    values = every_value()
    coded = encode(values, based(values, base))
    assert same_bits(decode(coded), values)
    assert len(coded.escapes.positions_E) == 65536 - 2 * 16 * 128  # 16 exponents of both signs have a code


@pytest.mark.parametrize("sigma", [1e-6, 0.01, 0.014, 0.02, 0.028, 0.04, 1.0, 3e4])
def test_gaussian_numbers_of_any_width_leave_few_escapes(sigma: float) -> None:
    weight_NK = gaussian(512, 1024, sigma)
    assert escape_rate(encode(weight_NK, choose_bases(weight_NK))) < 0.00012


def test_rows_of_any_size_beside_each_other_leave_few_escapes() -> None:
    weight_NK = gaussian(512, 1024) * torch.logspace(-30, 30, 512, dtype=torch.bfloat16)[:, None]
    coded = encode(weight_NK, choose_bases(weight_NK))
    assert escape_rate(coded) < 0.00012
    assert same_bits(decode(coded), weight_NK)


def test_rows_of_zeros_leave_no_escapes_and_keep_their_signs() -> None:
    weight_NK = gaussian(32, 256)
    weight_NK[::2] = 0.0
    weight_NK[4, ::3] = -0.0
    weight_NK[6, 7] = 1e-40  # a subnormal, which is none
    coded = encode(weight_NK, choose_bases(weight_NK))
    outputs_E = coded.escapes.positions_E // 256
    assert [output for output in outputs_E.tolist() if output % 2 == 0] == [6]
    assert same_bits(decode(coded), weight_NK)
    assert index_escapes([coded.escapes]).scales_N[::2].eq(0).all()


def test_no_other_base_of_a_row_leaves_fewer_escapes() -> None:
    sparse = gaussian(4, 512)
    sparse[:2, 200:] = 0.0  # more than half, and less
    sparse[2:, 300:] = -0.0
    weight_NK = torch.cat((gaussian(4, 512), gaussian(4, 512, 1e-3), every_value().view(128, 512)[::9], sparse))
    chosen = choose_bases(weight_NK)
    assert chosen[-4:].gt(0).tolist() == [False, False, True, True]
    for row, base in zip(weight_NK.split(1), chosen.split(1), strict=True):
        least = min(len(encode(row, based(row, other)).escapes.positions_E) for other in (0, *BASES))
        assert len(encode(row, base).escapes.positions_E) == least


def test_counted_exponents_say_how_many_have_each_code() -> None:
    weight_NK = torch.cat((gaussian(8, 512), torch.zeros(2, 512).bfloat16(), every_value().view(128, 512)[:5]))
    counts_NX, bases_N = exponents_of(weight_NK), choose_bases(weight_NK)
    codes = count_code_use(counts_NX, bases_N)
    coded = encode(weight_NK, bases_N)
    assert int(codes.sum()) == weight_NK.numel()
    assert int(codes[-1]) == len(coded.escapes.positions_E)
    held = torch.ones(weight_NK.numel(), dtype=torch.bool)
    held[coded.escapes.positions_E] = False
    exponents = (weight_NK.view(torch.int16).int() >> 7 & 0xFF) - bases_N.int()[:, None]
    assert torch.equal(torch.bincount(exponents.view(-1)[held], minlength=16), codes[:16])


@pytest.mark.parametrize("fill", [0.0, -0.0, float("nan"), float("inf"), 1e-40])
def test_a_matrix_of_what_has_no_code_is_all_escapes_and_comes_back(fill: float) -> None:
    weight_NK = torch.full((16, 128), fill, dtype=torch.bfloat16)
    coded = encode(weight_NK, choose_bases(weight_NK))
    assert escape_rate(coded) == (0.0 if fill == 0.0 else 1.0)
    assert same_bits(decode(coded), weight_NK)


def test_words_are_laid_out_as_the_format_says() -> None:
    weight_NK = gaussian(3, 512)
    base = 107
    coded = encode(weight_NK, based(weight_NK, base))
    lanes, bits = lanes_of(512), weight_NK.view(torch.int16).int() & 0xFFFF
    for output, place in ((0, 0), (1, 300), (2, 511)):
        block, within = divmod(place, 8 * lanes)
        number, lane = divmod(within, lanes)
        q, j, byte = number // 2, lane // 2, 2 * (number % 2) + lane % 2
        word = coded.words_NW[output, block * 3 * lanes :]
        low = int(word[lanes * (1 + q // 2) + 2 * j + q % 2]) >> 8 * byte & 0xFF
        high = int(word[2 * j + q // 2]) & 0xFFFFFFFF
        high = high if q % 2 == 0 else (high >> 4 | high << 28) & 0xFFFFFFFF
        high = high >> 8 * byte & 0x87
        assert (high & 0x80) << 8 | ((high & 7) << 8 | low) + (base << 7) == bits[output, place]


@pytest.mark.parametrize("outputs", [range(0, 33), range(8, 9), range(20, 33)], ids=str)
def test_the_escapes_of_rows_are_those_of_their_part(outputs: range) -> None:
    weight_NK = gaussian(33, 256)
    weight_NK.view(-1)[::97] = 0.0
    weight_NK[::5] *= 1e-3
    bases_N = choose_bases(weight_NK)
    escapes = encode(weight_NK, bases_N).escapes
    found = escapes.rows(outputs)
    inside_E = (escapes.positions_E >= outputs.start * 256) & (escapes.positions_E < outputs.stop * 256)
    assert (found.outputs, found.inputs) == (len(outputs), 256)
    assert torch.equal(found.bases_N, bases_N[outputs.start : outputs.stop])
    assert torch.equal(found.positions_E, escapes.positions_E[inside_E] - outputs.start * 256)
    assert same_bits(found.values_E, escapes.values_E[inside_E])


def test_the_index_finds_each_escape_in_its_group() -> None:
    parts = [gaussian(20, 128, seed=1), gaussian(13, 128, 3.0, seed=2)]
    for part in parts:
        part.view(-1)[::41] = 0.0
    coded = [encode(part, choose_bases(part)) for part in parts]
    found, below = index_escapes([one.escapes for one in coded]), torch.cat(parts)
    groups = -(-len(below) // 16)
    assert len(found.firsts_G) == groups + 1
    assert found.firsts_G[-1] == len(found.places_E) == sum(len(one.escapes.positions_E) for one in coded)
    for group in range(groups):
        for escape in range(int(found.firsts_G[group]), int(found.firsts_G[group + 1])):
            output, place = divmod(int(found.places_E[escape]), INPUTS_MAX)
            assert output // 16 == group
            assert same_bits(found.values_E[escape : escape + 1], below[output, place : place + 1])
    assert found.scales_N.tolist() == [2.0 ** (base - 128) for one in coded for base in one.escapes.bases_N.tolist()]


def test_matrices_below_each_other_take_three_quarters() -> None:
    parts = [gaussian(256, 1024, seed=seed) for seed in (1, 2)]
    weight = stack_matrices([encode(part, choose_bases(part)) for part in parts])
    assert (weight.outputs, weight.inputs) == (512, 1024)
    assert weight.bytes < 0.755 * sum(part.nbytes for part in parts)


def test_shapes_that_have_no_code_are_told() -> None:
    assert all(is_encodable(*shape) for shape in SHAPES)
    assert not any(is_encodable(*shape) for shape in ((8, 100), (0, 128), (8, 0), (8, INPUTS_MAX + 128)))
