"""What each rank loads of a model's files is together what the model has, each number once; rows that are not a rank's
own are not read."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from engine.bf12.codec import Escapes, choose_bases, expand
from engine.bf12.layout import BASES
from engine.bf12.metadata import CompressionLevel
from engine.bf12.shard import can_cut
from engine.layers.rank_shard import RankShard
from engine.models.config import read_decoder_config
from engine.weights import fp8, streaming
from engine.weights import source as weights_source
from engine.weights.formats import FIRSTS, PLACES, SCALES, VALUES, WORDS, Fp8Format
from engine.weights.source import ShardSource, WeightSource
from tests.engine.weights.test_fp8 import FORMS, quantized
from tests.support.bf12_files import compressed, small_llama
from tests.support.small_models import reference_model, saved

pytestmark = pytest.mark.usefixtures("inference")
CPU = torch.device("cpu")


def opened(folder: Path, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> WeightSource:
    return WeightSource.open(folder, read_decoder_config(folder), dtype, device, random=False)


def cuts(source: WeightSource, ranks: int, cut_embedding: bool = True) -> list[ShardSource]:
    return [source.cut(RankShard(rank, ranks), cut_embedding) for rank in range(ranks)]


@pytest.mark.parametrize("family", ["llama biases", "phi4 mini", "qwen3", "gemma3", "qwen2"])
@pytest.mark.parametrize("slab_bytes", [streaming.SLAB_BYTES, 1000], ids=["whole", "pieces"])
def test_ranks_read_what_is_cut_from_the_whole(
    family: str, slab_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = opened(saved(reference_model(family, num_key_value_heads=4), tmp_path))
    whole = source.load_all(lambda: None)
    monkeypatch.setattr(streaming, "SLAB_BYTES", slab_bytes)
    for shard in cuts(source, 2):
        read = shard._tensors(lambda: None, None)
        expected = shard._cut(dict(whole), None)
        assert read.keys() == expected.keys() == shard.shapes.keys()
        for name, tensor in read.items():
            assert torch.equal(tensor, expected[name]), name
            assert (tensor.shape, tensor.dtype) == shard.shapes[name]


def test_what_ranks_have_is_together_what_the_model_has(tmp_path: Path) -> None:
    source = opened(saved(reference_model("qwen2", num_key_value_heads=4), tmp_path))
    whole, parts = source.load_all(lambda: None), [shard._tensors(lambda: None, None) for shard in cuts(source, 4)]
    for name, tensor in whole.items():
        own = [part[name] for part in parts]
        if own[0].shape != tensor.shape:
            numbers = torch.cat([each.flatten() for each in own])
            assert torch.equal(numbers.sort().values, tensor.flatten().sort().values), name
        else:
            assert all(torch.equal(each, tensor) for each in own), name


def test_rows_of_other_ranks_are_not_read(tmp_path: Path) -> None:
    source = opened(saved(reference_model("qwen2", num_key_value_heads=4), tmp_path))
    read_into, counted = streaming.SourceFiles.read_into, []

    def counting(self: Any, path: Path, first: int, into: memoryview) -> None:
        counted.append(len(into))
        read_into(self, path, first, into)

    with patch.object(streaming.SourceFiles, "read_into", counting):
        cuts(source, 4)[1]._tensors(lambda: None, None)
    config, size = source.config, os.path.getsize(tmp_path / "model.safetensors")
    by_inputs = config.layers * 4 * config.hidden * (config.intermediate + config.heads * config.head_dim)
    assert by_inputs < sum(counted) < by_inputs + (size - by_inputs) * 0.35


def packed_source(folder: Path) -> WeightSource:
    """As on a GPU, in host memory."""
    on_gpu = opened(folder, torch.device("cuda"), torch.bfloat16)
    return replace(on_gpu, device=CPU)


def numbers(tensors: dict[str, Tensor], parameter: str) -> Tensor:
    """A parameter as numbers, whatever it lies in."""
    if parameter + WORDS in tensors:
        words_NW, scales_N = tensors[parameter + WORDS], tensors[parameter + SCALES]
        firsts_G, places_E = tensors[parameter + FIRSTS], tensors[parameter + PLACES]
        inputs, count = words_NW.shape[1] * 8 // 3, int(firsts_G[-1])
        bases_N = (scales_N.log2() + 128).where(scales_N > 0, 0).to(torch.uint8)
        first_E = 16 * torch.arange(len(firsts_G) - 1).repeat_interleave(firsts_G.diff())
        positions_E = (first_E + (places_E[:count] >> 16) % 16) * inputs + (places_E[:count] & 0xFFFF)
        escapes = Escapes(len(words_NW), inputs, bases_N, positions_E, tensors[parameter + VALUES][:count])
        assert (tensors[parameter + PLACES][count:] == 0).all()
        return expand(words_NW, escapes)
    if parameter + SCALES in tensors:
        return fp8.expand(tensors[parameter], tensors[parameter + SCALES], torch.float32)
    return tensors[parameter]


def rarer_bases(weight_NK: Tensor) -> Tensor:
    """Bases that leave each row many escapes."""
    return (choose_bases(weight_NK) - 2).clamp_min(BASES.start)


@pytest.mark.parametrize("level", list(CompressionLevel))
@pytest.mark.parametrize("tied", [False, True])
def test_weights_in_12_bits_are_cut_without_expanding_them(
    level: CompressionLevel, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_source, "_WHOLE_BYTES", 1 << 18)  # so that some are read together, and some alone
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 333}
    plain = small_llama(tmp_path / "plain", tied=tied, **sizes)
    source = packed_source(compressed(plain, tmp_path / "coded", level, bases=rarer_bases))
    expected = cuts(opened(plain, dtype=torch.bfloat16), 2)
    for shard, whole in zip(cuts(source, 2), expected, strict=True):
        assert all(format_.is_bf12 for name, format_ in shard.formats.items() if not name.endswith("norm"))
        read, wanted = shard._tensors(lambda: None, None), whole._tensors(lambda: None, None)
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in read.items()} == shard.shapes
        for name, tensor in wanted.items():
            own = numbers(read, name)
            assert own.dtype == tensor.dtype
            assert torch.equal(own.view(torch.uint8), tensor.view(torch.uint8)), name


def test_what_cannot_be_cut_in_12_bits_becomes_numbers(tmp_path: Path) -> None:
    plain = small_llama(tmp_path / "plain", num_hidden_layers=1)  # its MLP has three blocks of inputs
    source = packed_source(compressed(plain, tmp_path / "coded", CompressionLevel.DEVICE))
    expected = cuts(opened(plain, dtype=torch.bfloat16), 2)
    for shard, whole in zip(cuts(source, 2), expected, strict=True):
        apart = {name for name, format_ in shard.formats.items() if not format_.is_bf12 and "norm" not in name}
        assert apart == {"layers.0.output.weight", "layers.0.down.weight"}
        read, wanted = shard._tensors(lambda: None, None), whole._tensors(lambda: None, None)
        assert all(torch.equal(numbers(read, name), tensor) for name, tensor in wanted.items())


def test_rows_below_others_are_cut_in_12_bits_by_whole_groups_of_escapes() -> None:
    assert can_cut(512, [range(7)], None)
    assert can_cut(512, [range(16), range(32, 64)], range(256, 512))
    assert not can_cut(512, [range(16), range(32, 40)], None)
    assert not can_cut(512, [range(16)], range(128, 384))
    assert not can_cut(768, [range(16)], range(256, 640))  # of other lanes


@pytest.mark.parametrize("form", list(FORMS))
def test_weights_in_8_bits_are_cut_with_their_factors(form: str, tmp_path: Path) -> None:
    folder, plain = quantized("qwen2", form, tmp_path, num_key_value_heads=4, intermediate_size=384)
    expected = cuts(opened(plain), 2)
    for shard, whole in zip(cuts(packed_source(folder), 2), expected, strict=True):
        read, wanted = shard._tensors(lambda: None, None), whole._tensors(lambda: None, None)
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in read.items()} == shard.shapes
        packed = {
            name.rpartition("layers.0.")[2] for name, kind in shard.formats.items() if isinstance(kind, Fp8Format)
        }
        assert packed >= {"qkv.weight", "gate_up.weight", "output.weight"}
        assert ("down.weight" in packed) == (form != "blocks")  # a rank has a block and a half of its inputs
        for name, tensor in wanted.items():
            rounded = 0 if "norm" in name or name in packed else 2**-8
            torch.testing.assert_close(numbers(read, name).float(), tensor, rtol=rounded, atol=0)
