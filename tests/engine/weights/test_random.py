"""engine/weights/random.py: made-up parameters fit any config, are the same each time, and have a name of their own."""

import json
from pathlib import Path

import pytest
import torch

from engine.bench.geometries import write_folder
from engine.models.config import ModelConfig, read_decoder_config
from engine.models.llama import DecoderParameters
from engine.models.weight_names import decoder_entries
from engine.weights import mxfp4
from engine.weights.assembly import assemble_decoder
from engine.weights.formats import Mxfp4Format, WeightFormats, random_formats
from engine.weights.random import random_revision, random_tensors
from engine.weights.source import WeightSource
from tests.support.small_models import FAMILIES, open_small, spec

CPU = torch.device("cpu")


def config_of(family: str, folder: Path) -> ModelConfig:
    FAMILIES[family]().save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    kinds = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    said["architectures"] = [f"{kinds[said['model_type']]}ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(said))
    return read_decoder_config(folder)


def made(config: ModelConfig, seed: int = 0, beats: list[int] | None = None) -> DecoderParameters:
    with torch.inference_mode():
        beat = (lambda: None) if beats is None else lambda: beats.append(1)
        table = decoder_entries(config)
        tensors = random_tensors(table, random_formats(table, torch.float32, CPU), CPU, beat, seed)
        return assemble_decoder(config, tensors, beat)


@pytest.mark.parametrize("family", ["llama 3.1", "llama biases", "qwen2", "qwen3 biases window"])
def test_a_config_alone_makes_a_model_that_runs(family: str, tmp_path: Path) -> None:
    config_of(family, tmp_path)
    runner = open_small(tmp_path, random_weights=True)
    assert runner.revision == random_revision(tmp_path)
    assert spec(tmp_path, random_weights=True).random_weights


def test_norms_are_one_and_the_rest_is_narrow(tmp_path: Path) -> None:
    beats: list[int] = []
    parameters = made(config_of("qwen3", tmp_path), beats=beats)
    assert torch.equal(parameters.norm, torch.ones(64))
    assert all(
        torch.equal(layer.qk_norm, torch.ones(6, 32)) for layer in parameters.layers if layer.qk_norm is not None
    )
    assert parameters.norm.dtype is torch.float32
    assert float(parameters.embedding.std()) == pytest.approx(0.02, rel=0.05)
    assert abs(float(parameters.embedding.mean())) < 1e-3
    assert len(beats) > len(parameters.layers)


def test_seeds_differ_and_equal_ones_do_not(tmp_path: Path) -> None:
    config = config_of("llama 3.1", tmp_path)
    one, again, other = made(config, 1), made(config, 1), made(config, 2)
    assert torch.equal(one.embedding, again.embedding)
    assert not torch.equal(one.embedding, other.embedding)


def test_what_is_published_in_4_bits_is_made_up_so_where_a_gpu_multiplies_it(tmp_path: Path) -> None:
    table = decoder_entries(read_decoder_config(write_folder("gpt-oss-20b-mxfp4", tmp_path)))
    own = [entry for entry in table if entry.parameter.startswith("layers.0.") and ".experts." in entry.parameter]
    on_cpu, on_gpu = (random_formats(own, torch.bfloat16, torch.device(device)) for device in ("cpu", "cuda"))
    packed = {name for name, format_ in on_gpu.items() if isinstance(format_, Mxfp4Format)}
    assert packed == {entry.parameter for entry in own if entry.parameter.endswith("weight")}
    assert not any(isinstance(format_, Mxfp4Format) for format_ in on_cpu.values())
    down = next(entry for entry in own if entry.parameter.endswith("down.weight"))
    smaller: WeightFormats = {down.parameter: Mxfp4Format(64, 4096)}
    bytes_NH, exponents_NB = random_tensors([down], smaller, CPU, lambda: None).values()
    numbers = mxfp4.expand(bytes_NH.view(-1, mxfp4.BLOCK_BYTES), exponents_NB.view(-1), torch.float32)
    assert float(numbers.std()) == pytest.approx(0.02, rel=0.2)


def test_revisions_name_config_and_seed(tmp_path: Path) -> None:
    config_of("llama 3.1", tmp_path)
    first, second = random_revision(tmp_path), random_revision(tmp_path, 1)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {"rms_norm_eps": 1e-3}))
    assert len({first, second, random_revision(tmp_path)}) == 3
    assert first.startswith("random-")


@pytest.mark.gpu
def test_sixteen_gigabytes_are_made_within_a_second(tmp_path: Path) -> None:
    import time

    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    gpu = torch.device("cuda", 0)
    source = WeightSource.open(tmp_path, read_decoder_config(tmp_path), torch.bfloat16, gpu, random=True)
    torch.zeros(1, device=gpu)
    began = time.monotonic()
    with torch.inference_mode():
        parameters = source.load(lambda: None)
    assert time.monotonic() - began < 1.0
    assert source.bytes > 16e9
    assert float(parameters.embedding.float().std()) == pytest.approx(0.02, rel=0.01)
