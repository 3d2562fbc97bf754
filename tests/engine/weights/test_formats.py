"""engine/weights/formats.py: what lies on a device is known from headers, and parts of it give what the whole does."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.bf12.codec import choose_bases, encode, stack_matrices
from engine.bf12.metadata import CompressionLevel
from engine.models.config import read_decoder_config
from engine.models.weight_names import decoder_entries
from engine.weights.checkpoint import Checkpoint
from engine.weights.formats import (
    Bf12Format,
    PlainFormat,
    allocate,
    bf12_formats_bytes,
    formats_bytes,
    plain_formats,
    select_formats,
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
    formats = select_formats(table, stored, torch.bfloat16, GPU)
    coded = {parameter for parameter, format_ in formats.items() if format_.is_bf12}
    assert coded == {entry.parameter for entry in table if len(entry.sources[0].shape) == 2}
    for dtype, device in ((torch.bfloat16, CPU), (torch.float16, GPU), (torch.float32, GPU)):
        assert select_formats(table, stored, dtype, device) == plain_formats(table, dtype)


def test_bytes_are_those_of_the_tensors(folder: Path) -> None:
    table, stored = decoder_entries(read_decoder_config(folder)), Checkpoint(folder).tensors
    formats = select_formats(table, stored, torch.bfloat16, GPU)
    tensors = allocate(formats, CPU)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} == dict(tensor_shapes(formats))
    assert formats_bytes(formats) == sum(tensor.nbytes for tensor in tensors.values())
    norms = sum(tensor.nbytes for name, tensor in tensors.items() if name.endswith("norm"))
    assert bf12_formats_bytes(formats) == formats_bytes(formats) - norms
    as_bf16 = plain_formats(table, torch.bfloat16)
    assert uncompressed_bytes(formats) == uncompressed_bytes(as_bf16) == formats_bytes(as_bf16)
    assert bf12_formats_bytes(as_bf16) == 0
    assert formats_bytes(formats) < 0.77 * formats_bytes(as_bf16)


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
    stored[name] = replace(stored[name], dtype="BF16", bf12=None)
    formats = select_formats(table, stored, torch.bfloat16, GPU)
    assert formats["layers.1.qkv.weight"] == PlainFormat(torch.Size((512, 256)), torch.bfloat16)
    assert formats["layers.0.qkv.weight"].is_bf12
    assert uncompressed_bytes(formats) == formats_bytes(plain_formats(table, torch.bfloat16))
