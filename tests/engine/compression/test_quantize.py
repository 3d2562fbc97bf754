"""engine/compression/quantize.py: a folder in fp8 that is served, close to the one it was made of, and the report."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.compression.quantize import QuantizationReport, quantize_folder
from engine.compression.target import TargetError
from engine.models.config import read_decoder_config
from engine.models.decoder_config import Fp8Scales
from engine.protocol.specs import ModelSpec
from engine.protocol.types import SamplingParams
from engine.weights import fp8
from engine.weights.tensor_index import CheckpointError
from engine.weights.validate import inspect_weights
from tests.support.small_models import Text, logits, open_small, reference_model, saved, shuffled_tables

CPU = torch.device("cpu")
IDS = list(range(3, 60))


def made(family: str, folder: Path, shard: str = "1GB") -> tuple[Path, Path, QuantizationReport]:
    source = saved(reference_model(family).bfloat16(), folder / "source", shard=shard)
    return source, folder / "target", quantize_folder(source, folder / "target", CPU)


def answer(folder: Path) -> torch.Tensor:
    model = open_small(folder)
    return logits(model, [Text(IDS, shuffled_tables(model, [64], seed=1)[0]).slice(len(IDS), SamplingParams())])[0]


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize(("family", "shard"), [("qwen3", "60KB"), ("mixtral", "1GB")])
def test_the_folder_is_served_and_its_answers_are_near(family: str, shard: str, tmp_path: Path) -> None:
    source, target, report = made(family, tmp_path, shard)
    assert read_decoder_config(target).fp8 is Fp8Scales.CHANNEL
    inspect_weights(ModelSpec(name="model", folder=str(target)))
    wanted, found = answer(source), answer(target)
    assert 0 < (found - wanted).norm() / wanted.norm() < 0.2
    coded = [tensor for tensor in report.tensors if tensor.kind == "F8_E4M3"]
    assert all(0.01 < tensor.error < 0.04 and tensor.error <= tensor.worst < 0.06 for tensor in coded)
    assert not any("gate.weight" in tensor.name or "embed" in tensor.name for tensor in coded)
    assert report.bytes_after < 0.75 * report.bytes_before
    assert "tensors in 8 bits" in list(report.lines())[-2]


def test_numbers_are_the_nearest_and_the_report_says_how_near(tmp_path: Path) -> None:
    source, target, report = made("llama 2", tmp_path)
    before, after = load_file(source / "model.safetensors"), load_file(target / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    numbers, scales = fp8.quantize(before[name])
    assert torch.equal(after[name].view(torch.uint8), numbers.view(torch.uint8))
    assert torch.equal(after[f"{name}_scale"], scales)
    error = (fp8.expand(numbers, scales, torch.float64) - before[name].double()).norm() / before[name].double().norm()
    assert next(tensor.error for tensor in report.tensors if tensor.name == name) == pytest.approx(error.item())
    assert all(torch.equal(after[kept], before[kept]) for kept in before if f"{kept}_scale" not in after)
    ignored = json.loads((target / "config.json").read_text())["quantization_config"]["ignore"]
    assert "lm_head" in ignored


def test_what_is_quantised_already_or_damaged_or_there_is_refused(tmp_path: Path) -> None:
    source, target, _ = made("llama 2", tmp_path)
    with pytest.raises(CheckpointError, match="quantised or compressed already"):
        quantize_folder(target, tmp_path / "again", CPU)
    with pytest.raises(TargetError, match="exists"):
        quantize_folder(source, target, CPU)
    tensors = {name: tensor.clone() for name, tensor in load_file(source / "model.safetensors").items()}
    tensors["model.layers.0.self_attn.q_proj.weight"][3, 3] = float("nan")
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"q_proj\.weight has values that are not finite"):
        quantize_folder(source, tmp_path / "damaged", CPU)
    assert not (tmp_path / "damaged").exists()
