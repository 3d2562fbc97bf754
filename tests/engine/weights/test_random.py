"""engine/weights/random.py: made-up parameters fit any config, are the same each time, and have a name of their own."""

import json
from pathlib import Path

import pytest
import torch

from engine.models.config import ModelConfig, read_decoder_config
from engine.models.llama import DecoderParameters
from engine.models.weight_names import decoder_entries
from engine.weights.assembly import assemble_decoder
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
        return assemble_decoder(config, random_tensors(decoder_entries(config), torch.float32, CPU, beat, seed), beat)


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
