"""Llama 4's encoder of images computes what the reference library does, from its checkpoint's names, for each tile by
itself; what it does not compute is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Llama4ForConditionalGeneration, Llama4VisionConfig
from transformers.models.llama4.modeling_llama4 import Llama4VisionRotaryEmbedding

from engine.models.config import read_decoder_config
from engine.models.decoder_config import ModelConfigError
from engine.vision.families import read_vision_config
from engine.vision.llama4_encoder import patch_turns
from engine.weights.checkpoint import CheckpointError
from engine.weights.source import WeightSource
from tests.support.seeing_models import SIDE, TOKENS, random_image
from tests.support.tiling_models import VISION, tile_pixels, tiling_model

pytestmark = pytest.mark.usefixtures("inference")

CONFIGS: dict[str, dict[str, Any]] = {
    "scout's shape": {},
    "three layers": {"num_hidden_layers": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    "one head": {"num_attention_heads": 1},
    "squares of 3": {"pixel_shuffle_ratio": 1 / 3, "intermediate_size": 9 * 32},
    "squares of 1": {"pixel_shuffle_ratio": 1.0, "intermediate_size": 32},
    "small patches": {"image_size": 20, "patch_size": 2},
}
Writer = Callable[..., Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Writer:
    def write(model: Llama4ForConditionalGeneration, **processor: object) -> Path:
        folder = tmp_path_factory.mktemp("tiling")
        model.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
        return folder

    return write


def source(folder: Path, dtype: torch.dtype = torch.float32) -> WeightSource:
    config = read_decoder_config(folder)
    opened = WeightSource.open(folder, config, dtype, torch.device("cpu"), False)
    return opened.with_vision(folder)


def encoded(folder: Path, images: list[np.ndarray], dtype: torch.dtype = torch.float32) -> Tensor:
    encoder = source(folder, dtype).load_vision(lambda: None)
    return encoder.embeddings(torch.from_numpy(np.stack(images)))


def reference_rows(model: Llama4ForConditionalGeneration, images: list[np.ndarray]) -> Tensor:
    rows: Tensor = model.multi_modal_projector(model.vision_model(tile_pixels(images)).last_hidden_state)
    return rows


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_rows_are_those_of_the_reference_library(changes: dict[str, Any], written: Writer) -> None:
    model = tiling_model(vision=changes)
    images = [random_image(seed, changes.get("image_size", SIDE)) for seed in range(3)]
    rows, wanted = encoded(written(model), images), reference_rows(model, images)
    assert wanted.std() > 0.05, "all rows are alike"
    torch.testing.assert_close(rows, wanted, atol=2e-5, rtol=1e-4)


def test_rows_in_bfloat16_are_near_those_in_float32(written: Writer) -> None:
    model = tiling_model()
    images = [random_image(1)]
    rows = encoded(written(model), images, torch.bfloat16).float()
    wanted = reference_rows(model, images)
    assert (rows - wanted).norm() < 0.03 * wanted.norm()


def test_a_tile_s_rows_do_not_depend_on_other_tiles(written: Writer) -> None:
    folder = written(tiling_model())
    first, second, third = (random_image(seed) for seed in range(3))
    alone, among = encoded(folder, [second]), encoded(folder, [first, second, third])
    assert torch.equal(alone[0], among[1])
    assert not torch.equal(among[0], among[1])


def test_patches_turn_as_in_the_reference_library(written: Writer) -> None:
    rope = {"rope_type": "default", "rope_theta": 700.0}
    vision = read_vision_config(written(tiling_model(vision={"rope_parameters": rope})))
    assert vision is not None
    theirs = Llama4VisionRotaryEmbedding(Llama4VisionConfig(**VISION, rope_parameters=rope)).freqs_ci
    torch.testing.assert_close(patch_turns(vision), theirs[:, 0])


def test_numbers_are_normalised_as_the_processor_s_file_says(written: Writer) -> None:
    model = tiling_model()
    mean, std = [0.25, 0.5, 0.75], [0.5, 0.25, 1.0]
    image = random_image(1)
    rows = encoded(written(model, image_mean=mean, image_std=std), [image])
    scaled = torch.from_numpy(image).bfloat16() * (1 / 255)
    pixels = ((scaled - torch.tensor(mean).bfloat16()) / torch.tensor(std).bfloat16()).permute(2, 0, 1)[None]
    wanted = model.multi_modal_projector(model.vision_model(pixels.float()).last_hidden_state)
    torch.testing.assert_close(rows, wanted, atol=2e-5, rtol=1e-4)
    assert not torch.allclose(rows, reference_rows(model, [image]), atol=1e-2)


def test_a_checkpoint_says_by_name_what_it_lacks(written: Writer) -> None:
    folder = written(tiling_model())
    path = folder / "model.safetensors"
    tensors = load_file(path)
    seeing = {name for name in tensors if name.startswith(("vision_model.", "multi_modal_projector."))}
    assert {each.name for entry in source(folder).vision_table for each in entry.sources} == seeing
    lacking = "vision_model.vision_adapter.mlp.fc2.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != lacking}, path)
    with pytest.raises(CheckpointError, match=f"lacks {lacking}"):
        source(folder)
    save_file({name: tensor for name, tensor in tensors.items() if name not in seeing}, path)
    assert source(folder).config.vision is None, "a text alone"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"image_size": 85}, "12 patches of 7 pixels a row are no squares"),
        ({"pixel_shuffle_ratio": 0.4}, "pixel_shuffle_ratio must be 1 divided by an integer"),
        ({"pixel_shuffle_ratio": 0}, "pixel_shuffle_ratio must be 1 divided by an integer"),
        ({"intermediate_size": 64}, "intermediate_size 64 must be that of 2² patches, 128"),
        ({"num_attention_heads": 5}, "hidden_size 32 is no multiple of num_attention_heads 5"),
        ({"num_attention_heads": 16}, "heads of 2 do not turn in two dimensions"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; 'gelu' is"),
        ({"multi_modal_projector_bias": True}, "multi_modal_projector_bias True is not supported"),
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy 'full' is not supported"),
        ({"projector_output_dim": 41}, "projector_output_dim 41 must be projector_input_dim, 40"),
        ({"num_channels": 1}, "num_channels must be 3"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' must be 'default'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    names = {"architectures": ["Llama4ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps({**names, "vision_config": VISION}))
    vision = read_vision_config(tmp_path)
    assert vision is not None
    assert (vision.tokens, vision.image_token, vision.bidirectional) == (TOKENS, 200_092, False)
    (tmp_path / "config.json").write_text(json.dumps({**names, "vision_config": {**VISION, **changes}}))
    with pytest.raises(ModelConfigError, match=why):
        read_vision_config(tmp_path)
