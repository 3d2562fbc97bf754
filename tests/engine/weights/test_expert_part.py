"""Whole experts, read by the ranks that have them: each byte by one rank, in whatever format and stack; and which of
the two cuts a model's formats mean."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from engine.bf12.metadata import CompressionLevel
from engine.models.decoder_config import ModelConfig
from engine.protocol.expert_cut import ExpertCut
from engine.weights import formats as weights_formats
from engine.weights import streaming
from engine.weights.formats import SCALES, Bf12Format, Fp8Format, Mxfp4Format, PlainFormat, WeightFormat
from engine.weights.source import ShardSource, WeightSource
from tests.engine.weights.test_experts import write_packed
from tests.engine.weights.test_fp8 import quantized
from tests.engine.weights.test_shard_load import cuts, numbers, opened, packed_source
from tests.support.bf12_files import compressed
from tests.support.small_models import reference_model, saved

pytestmark = pytest.mark.usefixtures("inference")


def coded(folder: Path, level: CompressionLevel = CompressionLevel.DISTRIBUTION, inner: int = 384) -> WeightSource:
    """A mixture of which all is in 12 bits; half of its inner size has a block and a half."""
    torch.manual_seed(5)
    config = MixtralConfig(
        vocab_size=96, hidden_size=128, intermediate_size=inner, num_hidden_layers=1, num_attention_heads=4,
        head_dim=64, num_key_value_heads=4, num_local_experts=4, max_position_embeddings=256, initializer_range=0.05,
        pad_token_id=None,
    )  # fmt: skip
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "plain", save_original_format=True)
    return packed_source(compressed(folder / "plain", folder / "coded", level))


def one_by_one(folder: Path) -> WeightSource:
    return opened(saved(reference_model("qwen3moe", num_key_value_heads=4, moe_intermediate_size=33), folder))


def stacked(folder: Path) -> WeightSource:
    return opened(saved(reference_model("gpt-oss", num_key_value_heads=4), folder))


def in_4_bits(folder: Path) -> WeightSource:
    model = reference_model("gpt-oss", hidden_size=128, intermediate_size=192, num_key_value_heads=4)
    return packed_source(write_packed(folder, model))


def in_8_bits(folder: Path) -> WeightSource:
    sizes = {"num_key_value_heads": 4, "moe_intermediate_size": 192}
    return packed_source(quantized("qwen3moe", "blocks", folder, **sizes)[0])


MADE = {
    "one by one": (one_by_one, PlainFormat),
    "stacks": (stacked, PlainFormat),
    "4 bits": (in_4_bits, Mxfp4Format),
    "8 bits": (in_8_bits, Fp8Format),
    "12 bits": (coded, Bf12Format),
}


def shards(source: WeightSource, ranks: int) -> list[ShardSource]:
    """Each with whole experts, also where they would be cut inside."""
    with patch.object(weights_formats, "expert_cut", lambda *_: ExpertCut.EXPERTS):
        return cuts(source, ranks)


def as_numbers(tensors: dict[str, Tensor], parameter: str, kind: WeightFormat) -> Tensor:
    """The numbers, or what stands for them in 4 bits."""
    if isinstance(kind, Mxfp4Format):
        return torch.cat((tensors[parameter], tensors[parameter + SCALES]), 1)
    return numbers(tensors, parameter)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("form", MADE)
def test_the_experts_of_all_ranks_are_those_of_the_model(form: str, ranks: int, tmp_path: Path) -> None:
    make, kind = MADE[form]
    source = make(tmp_path)
    whole, given = source.load_all(lambda: None), []
    for shard in shards(source, ranks):
        read = shard._tensors(lambda: None, None)
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in read.items()} == shard.shapes
        given.append((shard, read))
    for entry in source.table:
        name = entry.parameter
        if not entry.is_of_experts:
            continue
        if name.endswith(".weight"):
            assert {type(shard.formats[name]) for shard, _ in given} == {kind}
        together = torch.cat([as_numbers(read, name, shard.formats[name]) for shard, read in given])
        assert torch.equal(together.float(), as_numbers(whole, name, source.formats[name]).float()), name


@pytest.mark.parametrize("form", MADE)
def test_no_byte_of_an_expert_is_read_by_two_ranks(form: str, tmp_path: Path) -> None:
    source = MADE[form][0](tmp_path)
    assert source.checkpoint is not None
    read_into, read = streaming.SourceFiles.read_into, []

    def counting(self: Any, path: Path, first: int, into: memoryview) -> None:
        read.append(range(first, first + len(into)))
        read_into(self, path, first, into)

    with patch.object(streaming.SourceFiles, "read_into", counting):
        by_rank = []
        for shard in shards(source, 4):
            read.clear()
            shard._tensors(lambda: None, None)
            by_rank.append(list(read))
    stored = source.checkpoint.tensors
    forms = [form for entry in source.table if entry.is_of_experts for own in entry.sources for form in own.stored]
    for tensor in [stored[form.name] for form in forms]:
        taken = [
            range(max(each.start, tensor.first), min(each.stop, tensor.last)) for ranges in by_rank for each in ranges
        ]
        assert sum(map(len, taken)) == tensor.last - tensor.first


def cut_of(source: WeightSource, ranks: int) -> ExpertCut:
    config: ModelConfig = cuts(source, ranks)[0].config
    assert config.mixture is not None
    return ExpertCut.INSIDE if config.mixture.local is None else ExpertCut.EXPERTS


def test_the_cut_follows_from_the_formats(tmp_path: Path) -> None:
    assert cut_of(in_4_bits(tmp_path / "4"), 2) is ExpertCut.EXPERTS
    assert cut_of(opened(tmp_path / "4"), 2) is ExpertCut.INSIDE  # where a CPU expands them
    assert cut_of(in_8_bits(tmp_path / "8"), 2) is ExpertCut.EXPERTS
    assert cut_of(coded(tmp_path / "12"), 2) is ExpertCut.EXPERTS
    assert cut_of(coded(tmp_path / "even", inner=512), 2) is ExpertCut.INSIDE
    assert cut_of(one_by_one(tmp_path / "odd"), 2) is ExpertCut.EXPERTS
    assert cut_of(stacked(tmp_path / "stacks"), 2) is ExpertCut.INSIDE


def test_gpt_oss_in_4_bits_takes_half_of_its_memory_on_each_of_two_ranks(tmp_path: Path) -> None:
    source = in_4_bits(tmp_path)
    names = [
        name for entry in source.table if entry.is_of_experts for name in (entry.parameter, entry.parameter + SCALES)
    ]
    whole = sum(shape.numel() * dtype.itemsize for name, (shape, dtype) in source.shapes.items() if name in names)
    for shard in cuts(source, 2):
        own = sum(shape.numel() * dtype.itemsize for name, (shape, dtype) in shard.shapes.items() if name in names)
        assert 2 * own == whole
