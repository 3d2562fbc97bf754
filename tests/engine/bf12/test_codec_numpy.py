"""engine/bf12/codec_numpy.py: a CPU codes and expands as a GPU does, to the bit, in however many chunks."""

import pytest
import torch

from engine.bf12 import codec, codec_numpy
from engine.bf12.codec import choose_bases, decode, encode
from tests.engine.bf12.test_codec import SHAPES, every_value, gaussian, same_bits


@pytest.fixture(params=[1 << 10, codec_numpy._CHUNK], autouse=True, ids=["many chunks", "one"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_numpy, "_CHUNK", request.param)


@pytest.mark.parametrize("zeros", [0, 1, 7, 1000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_words_and_escapes_are_those_of_a_gpu(shape: tuple[int, int], zeros: int) -> None:
    weight_NK = gaussian(*shape)
    weight_NK.view(-1)[torch.randperm(weight_NK.numel(), generator=torch.Generator().manual_seed(zeros))[:zeros]] = 0.0
    weight_NK[::3] *= 3e-5
    weight_NK[2::4] = -0.0
    bases_N = choose_bases(weight_NK)
    found = encode(weight_NK, bases_N)
    words_NW, positions_E = codec._encode(weight_NK, bases_N)
    assert torch.equal(found.words_NW, words_NW)
    assert torch.equal(found.escapes.positions_E, positions_E)
    numbers_NK = codec._expand(words_NW, found.escapes)
    numbers_NK.view(-1)[positions_E] = found.escapes.values_E
    assert same_bits(numbers_NK, weight_NK)
    assert same_bits(decode(found), weight_NK)


@pytest.mark.parametrize("base", [0, 2, 3, 126, 127, 128, 238, 239])
def test_all_values_are_coded_as_on_a_gpu(base: int) -> None:
    bases_N = torch.full((256,), base, dtype=torch.uint8)
    words_NW, positions_E = codec._encode(every_value(), bases_N)
    found = encode(every_value(), bases_N)
    assert torch.equal(found.words_NW, words_NW)
    assert torch.equal(found.escapes.positions_E, positions_E)
    assert same_bits(codec._expand(words_NW, found.escapes), codec._expand_on_host(words_NW, found.escapes))


def test_numbers_may_lie_anywhere_in_memory() -> None:
    weight_NK = gaussian(5, 256)
    bases_N = choose_bases(weight_NK)
    shifted = torch.empty(weight_NK.numel() + 1, dtype=torch.bfloat16)[1:].view_as(weight_NK).copy_(weight_NK)
    assert torch.equal(encode(shifted, bases_N).words_NW, encode(weight_NK, bases_N).words_NW)
    turned = weight_NK.T.contiguous().T
    assert torch.equal(encode(turned, bases_N).words_NW, encode(weight_NK, bases_N).words_NW)
