"""engine/weights/formats.py: what lies on a device is known from headers, and parts of it give what the whole does."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.bf12.codec import choose_bases, decode, encode, stack_matrices
from engine.bf12.metadata import CompressionLevel
from engine.models.config import read_decoder_config
from engine.models.weight_names import ParameterEntry, ShardAxis, TensorSource, decoder_entries
from engine.weights.checkpoint import Checkpoint
from engine.weights.formats import (
    Bf12Format,
    NotShardable,
    PlainFormat,
    WeightFormat,
    allocate,
    bf12_formats_bytes,
    formats_bytes,
    plain_formats,
    select_formats,
    shard_ranges,
    tensor_shapes,
    uncompressed_bytes,
)
from tests.engine.bf12.test_codec import gaussian
from tests.support.bf12_files import compressed, small_llama

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = small_llama(tmp_path_factory.mktemp("source"))
    return compressed(source, tmp_path_factory.mktemp("compressed"), CompressionLevel.DEVICE)


def test_matrices_stay_coded_on_a_gpu_in_bfloat16_alone(folder: Path) -> None:
    table, stored = decoder_entries(read_decoder_config(folder)), Checkpoint(folder).tensors
    forms = select_formats(table, stored, torch.bfloat16, GPU)
    coded = {parameter for parameter, form in forms.items() if form.coded}
    assert coded == {entry.parameter for entry in table if len(entry.sources[0].shape) == 2}
    for dtype, device in ((torch.bfloat16, CPU), (torch.float16, GPU), (torch.float32, GPU)):
        assert select_formats(table, stored, dtype, device) == plain_formats(table, dtype)


def test_bytes_are_those_of_the_tensors(folder: Path) -> None:
    table, stored = decoder_entries(read_decoder_config(folder)), Checkpoint(folder).tensors
    forms = select_formats(table, stored, torch.bfloat16, GPU)
    tensors = allocate(forms, CPU)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} == dict(tensor_shapes(forms))
    assert formats_bytes(forms) == sum(tensor.nbytes for tensor in tensors.values())
    norms = sum(tensor.nbytes for name, tensor in tensors.items() if name.endswith("norm"))
    assert bf12_formats_bytes(forms) == formats_bytes(forms) - norms
    as_bf16 = plain_formats(table, torch.bfloat16)
    assert uncompressed_bytes(forms) == uncompressed_bytes(as_bf16) == formats_bytes(as_bf16)
    assert bf12_formats_bytes(as_bf16) == 0
    assert formats_bytes(forms) < 0.77 * formats_bytes(as_bf16)


def test_a_form_is_what_becomes_of_the_coded_matrices() -> None:
    parts = [gaussian(rows, 256, seed=rows) for rows in (40, 24)]
    for part in parts:
        part.view(-1)[::1000] = 0.0
    weight = stack_matrices([encode(part, choose_bases(part)) for part in parts])
    shapes = Bf12Format(64, 256, len(weight.index.places_E)).tensors("p")
    index = weight.index
    tensors = (weight.words_NW, index.scales_N, index.firsts_G, index.places_E, index.values_E)
    assert list(shapes.values()) == [(tensor.shape, tensor.dtype) for tensor in tensors]


def test_sources_of_which_one_is_not_coded_are_expanded(folder: Path) -> None:
    table, stored = decoder_entries(read_decoder_config(folder)), dict(Checkpoint(folder).tensors)
    name = "model.layers.1.self_attn.k_proj.weight"
    stored[name] = replace(stored[name], dtype="BF16", code=None)
    forms = select_formats(table, stored, torch.bfloat16, GPU)
    assert forms["layers.1.qkv.weight"] == PlainFormat(torch.Size((512, 256)), torch.bfloat16)
    assert forms["layers.0.qkv.weight"].coded
    assert uncompressed_bytes(forms) == formats_bytes(plain_formats(table, torch.bfloat16))


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 0.05).bfloat16()


def cut(weight_NK: Tensor, entry: ParameterEntry, form: WeightFormat, rank: int, ranks: int) -> list[Tensor]:
    """What a rank computes with of each source."""
    sources = weight_NK.split([source.shape[0] for source in entry.sources])
    parts = shard_ranges(entry, form, rank, ranks)
    if not form.coded:
        return [part.of(source) for part, source in zip(parts, sources, strict=True)]
    return [
        decode(encode(source, choose_bases(source)).cut(part.outputs, part.inputs))
        for part, source in zip(parts, sources, strict=True)
    ]


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_ranks_compute_with_parts_is_what_one_computes_with_the_whole(ranks: int, coded: bool) -> None:
    hidden, rows = 1024, {"q": 64, "k": 16, "v": 16}
    qkv = ParameterEntry(
        "qkv", tuple(TensorSource(name, (count, hidden)) for name, count in rows.items()), ShardAxis.OUTPUTS
    )
    bias = ParameterEntry(
        "bias", tuple(TensorSource(name, (count,)) for name, count in rows.items()), ShardAxis.OUTPUTS
    )
    output = ParameterEntry("output", (TensorSource("o", (48, hidden)),), ShardAxis.INPUTS)
    form = Bf12Format(96, hidden, 0) if coded else PlainFormat(torch.Size((96, hidden)), torch.bfloat16)
    x_TK = drawn((3, hidden), 1).double()
    weight_NK, bias_N, output_NK = drawn((96, hidden), 2), drawn((96,), 3), drawn((48, hidden), 4)
    whole_TN = linear(x_TK, weight_NK.double(), bias_N.double())
    ours: list[list[Tensor]] = [[], [], []]
    total_TN = torch.zeros(3, 48, dtype=torch.float64)
    for rank in range(ranks):
        biases = cut(bias_N, bias, PlainFormat(bias_N.shape, torch.bfloat16), rank, ranks)
        for mine, part, added in zip(ours, cut(weight_NK, qkv, form, rank, ranks), biases, strict=True):
            mine.append(linear(x_TK, part.double(), added.double()))
        (columns,) = shard_ranges(output, form, rank, ranks)
        (part,) = cut(output_NK, output, form, rank, ranks)
        total_TN += linear(x_TK[:, columns.inputs.start : columns.inputs.stop], part.double())
    torch.testing.assert_close(torch.cat([torch.cat(mine, 1) for mine in ours], 1), whole_TN)
    torch.testing.assert_close(total_TN, linear(x_TK, output_NK.double()))


def test_a_rank_has_its_share_of_each_source_and_all_of_what_is_whole() -> None:
    form = PlainFormat(torch.Size((12,)), torch.float32)
    both = ParameterEntry("gate_up", (TensorSource("gate", (8, 4)), TensorSource("up", (4, 4))), ShardAxis.OUTPUTS)
    assert [part.outputs for part in shard_ranges(both, form, 1, 2)] == [range(4, 8), range(2, 4)]
    (norm,) = shard_ranges(ParameterEntry("norm", (TensorSource("norm", (12,)),), ShardAxis.WHOLE), form, 1, 2)
    assert norm.of(torch.arange(12.0)).tolist() == list(range(12))


def test_ranks_that_do_not_divide_a_parameter_are_refused() -> None:
    form = Bf12Format(8, 768, 0)
    with pytest.raises(NotShardable, match=r"v has 6 outputs, which 4 ranks do not divide"):
        shard_ranges(ParameterEntry("v", (TensorSource("v", (6, 768)),), ShardAxis.OUTPUTS), form, 0, 4)
    down = ParameterEntry("down", (TensorSource("down", (8, 768)),), ShardAxis.INPUTS)
    assert [part.inputs for part in shard_ranges(down, form, 2, 3)] == [range(512, 768)]
    with pytest.raises(NotShardable, match=r"down has 768 inputs in runs of 256, which 2 ranks do not divide"):
        shard_ranges(down, form, 0, 2)
    assert shard_ranges(down, PlainFormat(torch.Size((8, 768)), torch.bfloat16), 1, 2)[0].inputs == range(384, 768)
