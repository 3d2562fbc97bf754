"""Checkpoints of mixtures as they are published, written here: experts one by one, all in one tensor, transposed, in 4
bits a number; and those that are not whole are refused by name."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.kernels.experts import grouped_mxfp4
from engine.kernels.experts.mxfp4_weight import Mxfp4Weight
from engine.models.config import ModelConfigError, read_decoder_config
from engine.models.sharding import ParameterShard
from engine.protocol.specs import ModelSpec
from engine.protocol.types import SamplingParams
from engine.weights import mxfp4
from engine.weights.checkpoint import Checkpoint, CheckpointError
from engine.weights.formats import SCALES, Mxfp4Format, allocate
from engine.weights.load import load_tensors
from engine.weights.source import WeightSource
from engine.weights.validate import inspect_weights
from tests.support.small_models import Text, logits, open_small, reference_model, saved, shuffled_tables

CPU = torch.device("cpu")
IDS = list(range(3, 90))


def answer(folder: Path) -> Tensor:
    model = open_small(folder)
    text = Text(IDS, shuffled_tables(model, [len(IDS)], seed=1)[0])
    return logits(model, [text.slice(len(IDS), SamplingParams())])[0]


def rewrite(folder: Path, change: Any, **config: Any) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file({name: tensor.contiguous() for name, tensor in change(tensors).items()}, path)
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(entries | config))


@pytest.mark.usefixtures("inference")
def test_llama_4_is_served_out_of_a_model_that_also_sees(tmp_path: Path) -> None:
    reference = reference_model("llama4 scout")
    folder = saved(reference, tmp_path)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["Llama4ForConditionalGeneration"], "text_config": text})
    )
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors |= {name: torch.ones(2, 2) for name in ("vision_model.class_embedding", "multi_modal_projector.weight")}
    save_file(tensors, folder / "model.safetensors")
    with torch.no_grad():
        wanted_V = reference(torch.tensor([IDS])).logits[0, -1]
    assert (answer(folder) - wanted_V).abs().max() < 1e-4


def packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[E, inputs, outputs] as nearly as 4 bits a number have it: blocks [E, outputs, inputs ÷ 32, 16] and exponents."""
    blocks = weight.transpose(1, 2).contiguous().unflatten(-1, (-1, 32))
    exponents = blocks.abs().amax(-1).log2().floor() - 1
    values = torch.tensor(mxfp4._VALUES)
    nearest = (blocks.abs() / exponents.exp2()[..., None]).unsqueeze(-1).sub(values).abs().argmin(-1)
    codes = nearest + 8 * (blocks < 0)
    return (codes[..., ::2] + 16 * codes[..., 1::2]).byte(), (exponents + 127).byte()


@pytest.mark.usefixtures("inference")
def test_gpt_oss_in_4_bits_is_what_the_reference_library_makes_of_it(tmp_path: Path) -> None:
    reference = reference_model("gpt-oss", intermediate_size=32)
    folder = write_packed(tmp_path, reference)
    with torch.no_grad():
        wanted_V = reference(torch.tensor([IDS])).logits[0, -1]
    assert (answer(folder) - wanted_V).abs().max() < 1e-4
    report = inspect_weights(ModelSpec(name="oss", folder=str(folder)))
    assert report.numbers == sum(parameter.numel() for parameter in reference.parameters())


def write_packed(folder: Path, reference: PreTrainedModel | None = None) -> Path:
    """A small gpt-oss in 4 bits. A `reference` that is given gets the numbers that these are."""
    model = reference or reference_model("gpt-oss", intermediate_size=64, hidden_size=128)
    folder = saved(model, folder)

    def pack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            blocks, scales = packed(tensors.pop(name))
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            with torch.no_grad():
                model.get_parameter(name).copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
        return tensors

    rewrite(folder, pack, quantization_config={"quant_method": "mxfp4"})
    return folder


def test_on_gpus_4_bits_stay_4_bits_of_the_same_numbers_whole_and_cut(tmp_path: Path) -> None:
    folder = write_packed(tmp_path)
    config, checkpoint = read_decoder_config(folder), Checkpoint(folder)
    kept = WeightSource.open(folder, config, torch.bfloat16, torch.device("cuda"), False)
    plain = WeightSource.open(folder, config, torch.float32, CPU, False)
    table = [entry for entry in kept.table if "experts." in entry.parameter and entry.parameter.endswith(".weight")][:2]
    formats, numbers_of = (
        {entry.parameter: source.formats[entry.parameter] for entry in table} for source in (kept, plain)
    )
    assert {type(each) for each in formats.values()} == {Mxfp4Format}
    tensors = load_tensors(checkpoint.tensors, table, formats, CPU, lambda: None)
    wanted = load_tensors(checkpoint.tensors, table, numbers_of, CPU, lambda: None)
    for name, numbers in wanted.items():
        assert torch.equal(expanded(tensors, name), numbers)
        whole, inputs = formats[name], numbers.shape[1]
        for rows, columns in (((range(3, 20), range(30, 31)), None), ((range(len(numbers)),), range(64, inputs))):
            part = ParameterShard(rows, columns if columns else None)
            own = whole.cut(part)
            assert own is not None
            cut = allocate({name: own}, CPU)
            whole.write_part(name, tensors, part, cut)
            taken = torch.cat([numbers[each.start : each.stop] for each in rows])
            assert torch.equal(expanded(cut, name), taken if not columns else taken[:, columns.start :])
        assert whole.cut(ParameterShard((range(4),), range(32))) is None
    assert sum(tensor.nbytes for tensor in tensors.values()) < sum(each.numel() for each in wanted.values()) * 0.54


def expanded(tensors: dict[str, Tensor], name: str) -> Tensor:
    weight = Mxfp4Weight(tensors[name], tensors[name + SCALES])
    numbers = torch.empty(weight.shape)
    grouped_mxfp4.expand(weight, numbers, range(len(numbers)))
    return numbers


def test_a_power_of_two_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_packed(tmp_path)
    name = "model.layers.1.mlp.experts.down_proj_scales"

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[name][0, 0, 0] = 255
        return tensors

    rewrite(folder, spoil)
    kept = WeightSource.open(folder, read_decoder_config(folder), torch.bfloat16, torch.device("cuda"), False)
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} has 1 powers of two"):
        load_tensors(Checkpoint(folder).tensors, kept.table, kept.formats, CPU, lambda: None)


def test_every_4_bit_number_is_expanded_as_the_format_says() -> None:
    bytes_BH = torch.arange(256, dtype=torch.uint8).view(16, 16)
    exponents = torch.tensor([0, 1, 100, 126, 127, 128, 200, 254, 255] + [127] * 7, dtype=torch.uint8)
    found = mxfp4.expand(bytes_BH, exponents, torch.float32)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for block, exponent in enumerate(exponents.tolist()):
        pairs = [(byte & 15, byte >> 4) for byte in range(16 * block, 16 * block + 16)]
        wanted = np.ldexp(values[np.array(pairs).ravel()], exponent - 127).astype(np.float32)
        if exponent == 255:
            assert found[block].isnan().all()
        else:
            np.testing.assert_array_equal(found[block].numpy(), wanted)


def test_a_checkpoint_without_an_expert_is_refused_by_name(tmp_path: Path) -> None:
    folder = saved(reference_model("mixtral"), tmp_path)
    rewrite(
        folder,
        lambda all_: {name: tensor for name, tensor in all_.items() if ".1.block_sparse_moe.experts.3." not in name},
    )
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.block_sparse_moe\.experts\.3\.w1\.weight"):
        inspect_weights(ModelSpec(name="mixtral", folder=str(folder)))


@pytest.mark.parametrize(
    ("family", "name", "shape"),
    [
        ("qwen3moe", "model.layers.0.mlp.gate.weight", (7, 64)),
        ("llama4 scout", "model.layers.0.feed_forward.experts.gate_up_proj", (3, 64, 192)),
        ("gpt-oss", "model.layers.2.mlp.experts.down_proj_bias", (8, 63)),
    ],
)
def test_a_wrong_shape_is_refused_by_name(family: str, name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    folder = saved(reference_model(family), tmp_path)
    rewrite(folder, lambda tensors: tensors | {name: torch.ones(shape)})
    with pytest.raises(CheckpointError, match=re.escape(f"{name} is {list(shape)}, config.json means")):
        inspect_weights(ModelSpec(name="model", folder=str(folder)))


@pytest.mark.usefixtures("inference")
def test_a_router_that_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    folder = saved(reference_model("qwen3moe"), tmp_path)
    name = "model.layers.1.mlp.gate.weight"
    rewrite(folder, lambda tensors: tensors | {name: tensors[name].index_fill(0, torch.tensor([2]), float("nan"))})
    with pytest.raises(CheckpointError, match=re.escape(f"{name}, stored as F32, has 64 values that are not finite")):
        open_small(folder)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 is more than num_local_experts 4"),
        ("qwen3moe", {"mlp_only_layers": 1}, "mlp_only_layers must list layers"),
        ("llama4 scout", {"moe_layers": [9]}, "moe_layers must list some of 4 layers"),
        (
            "mixtral",
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config 'awq' of MixtralForCausalLM is not supported",
        ),
        ("gpt-oss", {"quantization_config": {"quant_method": "gptq"}}, "mxfp4 for"),
    ],
)
def test_a_config_that_cannot_be_is_refused(family: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = saved(reference_model(family), tmp_path)
    rewrite(folder, lambda tensors: tensors, **changes)
    with pytest.raises(ModelConfigError, match=message):
        read_decoder_config(folder)
