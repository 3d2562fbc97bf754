"""engine/bf12/zstd_plane.py: packed high words come back, small enough, and what is no frame of theirs is told."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.bf12.codec import choose_bases, encode
from engine.bf12.layout import words_of
from engine.bf12.zstd_plane import ZstdPlaneError, pack_plane, unpack_plane
from tests.engine.bf12.test_codec import gaussian


def words_like(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    weight_NK = gaussian(outputs, inputs, seed=seed)
    return encode(weight_NK, choose_bases(weight_NK)).words_NW


def any_words(outputs: int, inputs: int) -> Tensor:
    generator = torch.Generator().manual_seed(outputs)
    shape = (outputs, words_of(inputs))
    return torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).to(torch.int32)


@pytest.mark.parametrize("shape", [(1, 128), (7, 256), (33, 384), (64, 1024)], ids=str)
@pytest.mark.parametrize("made", [words_like, any_words])
def test_every_word_comes_back(shape: tuple[int, int], made: Callable[[int, int], Tensor]) -> None:
    words_NW = made(*shape)
    frame, low_NV = pack_plane(words_NW)
    back_NW = torch.empty_like(words_NW)
    unpack_plane(frame, low_NV, back_NW)
    assert torch.equal(back_NW, words_NW)


@pytest.mark.parametrize("sigma", [1e-6, 0.02, 3e4])
def test_gaussian_weights_take_at_most_68_of_100_bytes(sigma: float) -> None:
    weight_NK = gaussian(512, 4096, sigma)
    coded = encode(weight_NK, choose_bases(weight_NK))
    frame, low_NV = pack_plane(coded.words_NW)
    escapes = 10 * len(coded.escapes.positions_E)
    assert len(frame) + low_NV.nbytes + escapes < 0.68 * weight_NK.nbytes


def test_a_damaged_frame_is_told_or_gives_other_words() -> None:
    """Its words' sum then says so."""
    words_NW = words_like(16, 512)
    frame, low_NV = pack_plane(words_NW)
    dice, told = random.Random(0), 0
    for _ in range(300):
        damaged = bytearray(frame)
        damaged[dice.randrange(len(frame))] ^= 1 << dice.randrange(8)
        try:
            unpack_plane(bytes(damaged), low_NV, torch.empty_like(words_NW))
        except ZstdPlaneError:
            told += 1
    assert told


def test_a_frame_of_another_length_is_told_before_it_takes_memory() -> None:
    words_NW = words_like(16, 512)
    frame, low_NV = pack_plane(words_NW)
    for wrong in (frame[:-1], frame + b"\0", b"", b"no frame", frame[:9]):
        with pytest.raises(ZstdPlaneError):
            unpack_plane(wrong, low_NV, torch.empty_like(words_NW))
    huge = frame[:4] + b"\xe0" + (1 << 60).to_bytes(8, "little") + frame[7:]
    with pytest.raises(ZstdPlaneError, match="1152921504606846976"):
        unpack_plane(huge, low_NV, torch.empty_like(words_NW))
    with pytest.raises(ZstdPlaneError):
        unpack_plane(frame, low_NV[:8], torch.empty_like(words_NW)[:8])
