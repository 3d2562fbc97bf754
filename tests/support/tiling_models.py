"""A small random Llama 4 that sees, made with the reference library, what that says of prompts with tiles, and what its
image processor makes of pictures.

That processor wants torchvision for two functions, which torch has under other names: they are put in its place, so
that its own code cuts the pictures.
"""

import json
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import Llama4Config, Llama4ForConditionalGeneration
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.llama4 import modeling_llama4
from transformers.models.llama4.processing_llama4 import Llama4Processor

from tests.support.model_folders import byte_level, special
from tests.support.seeing_models import IMAGE_TOKEN, SIDE, TOKENS, Image
from tests.support.small_models import FAMILIES

VISION: Final[dict[str, Any]] = {
    "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": SIDE,
    "patch_size": SIDE // 12, "projector_input_dim": 40, "projector_output_dim": 40, "vision_output_dim": 40,
}  # fmt: skip


def tiling_model(
    image_token: int = IMAGE_TOKEN, vision: dict[str, Any] | None = None, **text: object
) -> Llama4ForConditionalGeneration:
    """Tiles of 84 pixels become 36 tokens. A chunk of the layers that have any is longer than a tile, and shorter than
    two."""
    torch.manual_seed(8)
    sizes = FAMILIES["llama4 scout"]()
    sizes.update({"initializer_range": 0.2, **text})
    config = Llama4Config(
        text_config=sizes.to_dict(), vision_config={**VISION, "initializer_range": 0.2, **(vision or {})},
        image_token_index=image_token, attn_implementation="eager",
    )  # fmt: skip
    model = Llama4ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif parameter.ndim == 1 and "norm" in name:
                parameter.normal_(1, 0.2)
            elif "class_embedding" in name or "positional" in name or "patch_embedding" in name:
                parameter.normal_(0, 0.3)
    return model


def tile_pixels(tiles: Sequence[Image]) -> Tensor:
    """As the library's processor gives them: rescaled and normalised by 0.5 in bfloat16, channels first."""
    half = torch.tensor(0.5, dtype=torch.bfloat16)
    scaled = torch.from_numpy(np.stack(tiles)).bfloat16() * (1 / 255)
    return ((scaled - half) / half).permute(0, 3, 1, 2).float()


def tile_logits(model: Llama4ForConditionalGeneration, ids: Sequence[int], tiles: Sequence[Image]) -> Tensor:
    """The library's logits behind each of these ids. Version 5.24 asks its text model's output for a member that this
    does not have: it has one here."""
    pixels = tile_pixels(tiles) if tiles else None
    with patch.object(MoeCausalLMOutputWithPast, "image_outputs", None, create=True):
        return model(torch.tensor([ids]), pixel_values=pixels).logits[0].clone()


def greedy_tiling(
    model: Llama4ForConditionalGeneration, prompt: Sequence[int], tiles: Sequence[Image], written: Sequence[int]
) -> list[int]:
    """What the library's greedy decoding writes behind the prompt, in which the image token stands for tiles, and
    behind each part of what was `written`."""
    logits_TV = tile_logits(model, [*prompt, *written[:-1]], tiles)
    ids: list[int] = logits_TV[len(prompt) - 1 :].argmax(-1).tolist()
    return ids


@cache
def reference_processing() -> ModuleType:
    """The library's module that processes Llama 4's pictures, read from its file: by its name it is not given without
    torchvision."""
    transforms = ModuleType("torchvision.transforms.v2")
    transforms.functional = SimpleNamespace(pad=_pad)  # type: ignore[attr-defined]
    path = Path(modeling_llama4.__file__).with_name("image_processing_llama4.py")
    spec = spec_from_file_location("transformers.models.llama4.processing_of_tests", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    replaced = dict.fromkeys(("torchvision", "torchvision.transforms", transforms.__name__), transforms)
    with patch.dict(sys.modules, {**replaced, spec.name: module}):
        spec.loader.exec_module(module)
    return module


def _pad(images: Tensor, padding: list[int], fill: list[int]) -> Tensor:
    left, top, right, bottom = padding
    assert set(fill) == {0}
    return functional.pad(images, (left, right, top, bottom))


def reference_tiles(picture: Image, side: int, tiles_max: int, enlarges: bool = False) -> tuple[Image, list[int]]:
    """[tiles, side, side, 3] in 8 bits a number, and how many rows and columns there are."""

    def resize(images: Tensor, size: Any, resample: object) -> Tensor:
        return functional.interpolate(images, (size.height, size.width), mode="bilinear", antialias=True)

    processing = reference_processing()
    processor = SimpleNamespace(resize=resize, rescale_and_normalize=lambda images, *_: images)
    made = processing.Llama4ImageProcessor._preprocess(
        processor, [torch.from_numpy(picture.copy()).permute(2, 0, 1)], do_resize=True,
        size=processing.SizeDict(height=side, width=side), resample=2, do_rescale=False, rescale_factor=1.0,
        do_normalize=False, image_mean=None, image_std=None, max_patches=tiles_max, resize_to_max_canvas=enlarges,
        disable_grouping=False, return_tensors="pt",
    )  # fmt: skip
    tiles: NDArray[np.uint8] = made["pixel_values"].permute(0, 2, 3, 1).numpy()
    return tiles, made["aspect_ratios"][0].tolist()


TEMPLATE: Final = (
    "{{ bos_token }}{% for m in messages %}{{ '<|header_start|>' + m.role + '<|header_end|>\n\n' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|image|>{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n{% endif %}"
)
_ADDED: Final = (
    *("<|begin_of_text|>", "<|eot|>", "<|header_start|>", "<|header_end|>", "<|image_start|>", "<|image_end|>"),
    *("<|tile_x_separator|>", "<|tile_y_separator|>", "<|image|>", "<|patch|>"),
)


def write_tiling_folder(folder: Path, tiles_max: int = 6) -> tuple[Path, Llama4ForConditionalGeneration]:
    """A whole folder as such models are published: tokenizer, chat template, processor and tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level([special(text) for text in _ADDED])
    patch = tokenizer.token_to_id("<|patch|>")
    model = tiling_model(patch, vocab_size=patch + 1, eos_token_id=tokenizer.token_to_id("<|eot|>"))
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    processor = {"size": {"height": SIDE, "width": SIDE}, "max_patches": tiles_max, "resample": 2}
    processor |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resize_to_max_canvas": False}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder, model


def picture_text(rows: int, columns: int) -> str:
    """What the library's processor writes for a picture of so many tiles."""
    text: str = Llama4Processor._prompt_split_image(None, (rows, columns), TOKENS)
    return text
