"""Checkpoints in 8 bits a number, as they are published and written here, with a factor for each tensor, output or
block: what they are expanded to, and how they lie on a GPU."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.layers.linear_fp8 import Fp8Linear
from engine.models.config import ModelConfigError, read_decoder_config
from engine.models.decoder_config import Fp8Scales
from engine.models.llama import GatedMlp
from engine.protocol.specs import ModelSpec
from engine.protocol.types import SamplingParams
from engine.weights import fp8
from engine.weights.assembly import weights_bytes
from engine.weights.checkpoint import CheckpointError
from engine.weights.formats import Fp8Format, formats_bytes
from engine.weights.source import WeightSource
from engine.weights.validate import inspect_weights
from tests.support.batch_invariance import skip_if_bfloat16_varies
from tests.support.small_models import Text, logits, open_small, reference_model, saved, shuffled_tables

IDS = list(range(3, 90))
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LEFT = ("lm_head", "embed_tokens", "norm", "mlp.gate.", "block_sparse_moe.gate.", "bias")


def channels(strategy: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale"),
    "outputs": (channels("channel"), "weight_scale"),
    "blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "weight_scale_inv"),
}


def pack(weight: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """The numbers and the factors as a file of this form has them."""
    if form == "outputs":
        numbers, scales = fp8.quantize(weight)
        return numbers, scales.bfloat16()
    outputs, inputs = weight.shape
    if form == "tensor":
        scale = weight.abs().max() / fp8.MAX
        return (weight / scale).to(fp8.DTYPE), scale.reshape(())
    scales = torch.rand(-(-outputs // 128), -(-inputs // 128)) * 0.001 + 0.002
    wide = scales.repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
    return (weight / wide).clamp(-fp8.MAX, fp8.MAX).to(fp8.DTYPE), scales


def expanded(numbers: Tensor, scales: Tensor) -> Tensor:
    wide = scales.float()
    if scales.numel() > 1 and scales.shape[0] != numbers.shape[0]:
        wide = wide.repeat_interleave(128, 0)[: numbers.shape[0]].repeat_interleave(128, 1)[:, : numbers.shape[1]]
    return numbers.float() * wide


def quantized(family: str, form: str, folder: Path, **sizes: int) -> tuple[Path, Path]:
    """The model in 8 bits, and a folder of the numbers that these are."""
    config, suffix = FORMS[form]
    reference = reference_model(family, **sizes)
    packed, plain = saved(reference, folder / "packed"), saved(reference, folder / "plain")
    tensors: dict[str, Tensor] = {}
    wide: dict[str, Tensor] = {}
    for name, tensor in load_file(packed / "model.safetensors").items():
        tensors[name] = wide[name] = tensor
        if name.endswith(".weight") and not any(part in name for part in LEFT):
            numbers, scales = pack(tensor, form)
            tensors |= {name: numbers, f"{name.removesuffix('weight')}{suffix}": scales}
            wide[name] = expanded(numbers, scales)
            if form == "tensor":
                tensors[f"{name.removesuffix('weight')}input_scale"] = torch.ones(())
    save_file(tensors, packed / "model.safetensors")
    save_file(wide, plain / "model.safetensors")
    rewrite(packed, quantization_config=config)
    return packed, plain


def rewrite(folder: Path, **entries: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))


def answer(folder: Path) -> Tensor:
    model = open_small(folder)
    text = Text(IDS, shuffled_tables(model, [len(IDS)], seed=1)[0])
    return logits(model, [text.slice(len(IDS), SamplingParams())])[0]


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize(
    ("family", "form"),
    [("llama biases", "tensor"), ("qwen3", "blocks"), ("qwen3moe", "blocks"), ("mixtral", "outputs")],
)
def test_a_cpu_computes_with_numbers_times_factors(family: str, form: str, tmp_path: Path) -> None:
    packed, plain = quantized(family, form, tmp_path, hidden_size=192)
    assert torch.equal(answer(packed), answer(plain))
    report = inspect_weights(ModelSpec(name="model", folder=str(packed)))
    assert report.numbers == inspect_weights(ModelSpec(name="model", folder=str(plain))).numbers


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize("form", FORMS)
def test_a_gpu_holds_the_numbers_as_they_are(form: str, tmp_path: Path) -> None:
    packed, plain = quantized("qwen3moe", form, tmp_path, hidden_size=192)
    config = read_decoder_config(packed)
    source = WeightSource.open(packed, config, torch.bfloat16, GPU, random=False)
    report = inspect_weights(ModelSpec(name="model", folder=str(packed)))
    coded = {name: own for name, own in source.formats.items() if isinstance(own, Fp8Format)}
    assert report.coded_bytes == formats_bytes(coded)
    tensors = replace(source, device=CPU).load_all(lambda: None)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} == dict(source.shapes)
    wide = WeightSource.open(plain, read_decoder_config(plain), torch.float32, CPU, random=False).load_all(lambda: None)
    held = [name for name, tensor in tensors.items() if tensor.dtype is fp8.DTYPE]
    assert "layers.0.experts.down.weight" in held
    assert "layers.1.qkv.weight" in held
    for name in held:
        assert torch.equal(fp8.expand(tensors[name], tensors[f"{name}.scales"], torch.float32), wide[name])
    assert source.bytes < 0.62 * WeightSource.open(plain, read_decoder_config(plain), torch.bfloat16, GPU, False).bytes


@skip_if_bfloat16_varies()
@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize(("capability", "kept"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_that_has_no_such_numbers_expands_them(
    capability: tuple[int, int], kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, _ = quantized("llama 2", "blocks", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    source = WeightSource.open(packed, read_decoder_config(packed), torch.bfloat16, GPU, random=False)
    assert kept == any(isinstance(own, Fp8Format) for own in source.formats.values())


@skip_if_bfloat16_varies()
@pytest.mark.usefixtures("inference")
def test_a_gpus_dense_parameters_take_what_was_planned(tmp_path: Path) -> None:
    """Rows may be packed, since outputs of so few inputs have one factor each."""
    packed, _ = quantized("llama 2", "blocks", tmp_path)
    source = WeightSource.open(packed, read_decoder_config(packed), torch.bfloat16, GPU, random=False)
    parameters = replace(source, device=CPU).load(lambda: None)
    assert weights_bytes(parameters) == source.bytes + (parameters.head.bytes if source.config.tied_head else 0)
    layer = parameters.layers[0]
    assert isinstance(layer.qkv, Fp8Linear)
    assert isinstance(layer.mlp, GatedMlp)
    assert isinstance(layer.mlp.gate_up, Fp8Linear)
    assert layer.packs == (True, True)
    assert layer.mlp.gate_up.packs_gated


def test_rotated_rows_take_their_factors_along(tmp_path: Path) -> None:
    numbers = torch.arange(-8, 8).float().view(8, 2).to(fp8.DTYPE)
    scales = fp8.output_scales(torch.arange(8.0)[:, None], 8)
    order = torch.tensor([3, 1, 0, 2, 7, 6, 5, 4])
    whole = fp8.expand(numbers, scales, torch.float32)[order]
    moved = numbers.view(torch.uint8)[order].view(fp8.DTYPE)
    assert torch.equal(fp8.expand(moved, scales[order], torch.float32), whole)


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize(("name", "message"), [("weight", "2 values that are no numbers"), ("weight_scale", "factors")])
def test_what_has_no_value_is_refused_by_name(name: str, message: str, tmp_path: Path) -> None:
    packed, _ = quantized("llama 2", "outputs", tmp_path)
    path, own = packed / "model.safetensors", f"model.layers.1.mlp.up_proj.{name}"
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    if name == "weight":
        tensors[own].view(torch.uint8)[3, 4:6] = 0x7F
    else:
        tensors[own][2] = float("inf")
    save_file(tensors, path)
    source = WeightSource.open(packed, read_decoder_config(packed), torch.bfloat16, GPU, random=False)
    with pytest.raises(CheckpointError, match=rf"model\.layers\.1\.mlp\.up_proj.*{message}"):
        replace(source, device=CPU).load_all(lambda: None)


def test_a_lost_factor_is_named(tmp_path: Path) -> None:
    packed, _ = quantized("llama 2", "outputs", tmp_path)
    path = packed / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.up_proj\.weight has dtype F8_E4M3"):
        inspect_weights(ModelSpec(name="model", folder=str(packed)))


@pytest.mark.parametrize(
    "entry",
    [
        {"quant_method": "awq", "bits": 4}, {"quant_method": "fp8", "weight_block_size": [64, 64]}, "int8",
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}},
        {"quant_method": "compressed-tensors"}, channels("group"), {"quant_method": "mxfp4"},
    ],
)  # fmt: skip
def test_other_quantisations_are_refused_with_what_is_read(entry: Any, tmp_path: Path) -> None:
    folder = saved(reference_model("llama 2"), tmp_path)
    rewrite(folder, quantization_config=entry)
    with pytest.raises(
        ModelConfigError, match=r"quantization_config .* is not supported: bf16, f16 and f32 are, fp8 by"
    ):
        read_decoder_config(folder)


@pytest.mark.parametrize(("form", "scales"), [*zip(FORMS, Fp8Scales, strict=True)])
def test_published_forms_are_known(form: str, scales: Fp8Scales, tmp_path: Path) -> None:
    folder = saved(reference_model("llama 2"), tmp_path)
    rewrite(folder, quantization_config=FORMS[form][0])
    assert read_decoder_config(folder).fp8 is scales
