"""A small random Gemma 3 that sees, made with the reference library, and what that says of prompts with images."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from tests.support.model_folders import byte_level, special
from tests.support.small_models import FAMILIES

SIDE, TOKENS, IMAGE_TOKEN = 84, 36, 150
Image = NDArray[np.uint8]


def seeing_model(
    side: int = SIDE, first_token: int = IMAGE_TOKEN - 2, **text: object
) -> Gemma3ForConditionalGeneration:
    """Images of `side` pixels become 36 tokens. Windows are shorter than two images. What begins and ends an image and
    stands for it are three tokens from first_token on."""
    torch.manual_seed(7)
    sizes = FAMILIES["gemma3"]()
    sizes.update({"initializer_range": 0.2, "num_hidden_layers": 7, **text})
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "image_size": side, "patch_size": side // 12, "initializer_range": 0.2,
    }  # fmt: skip
    config = Gemma3Config(
        text_config=sizes.to_dict(), vision_config=vision, mm_tokens_per_image=TOKENS, attn_implementation="eager",
        boi_token_index=first_token, eoi_token_index=first_token + 1, image_token_index=first_token + 2,
    )  # fmt: skip
    model = Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif parameter.ndim == 1:
                parameter.normal_(1, 0.2)
            elif "mm_input" in name or "patch_embedding" in name:
                parameter.normal_(0, 0.3)
    return model


_TURN: Final = (
    "{% for part in ([m.content] if m.content is string else m.content) %}{% if part is string %}{{ part | trim }}"
    "{% elif part.type == 'image' %}<start_of_image>{% elif part.type == 'text' %}{{ part.text | trim }}{% endif %}"
    "{% endfor %}"
)
TEMPLATE: Final = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) }}\n"
    + _TURN
    + "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_ADDED: Final = (
    *("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
)


def write_seeing_folder(folder: Path) -> tuple[Path, Gemma3ForConditionalGeneration]:
    """A whole folder as such models are published: tokenizer, chat template, processor and tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level([special(text) for text in _ADDED])
    first = tokenizer.token_to_id("<start_of_image>")
    model = seeing_model(first_token=first, vocab_size=first + 3, eos_token_id=tokenizer.token_to_id("<eos>"))
    saved_seeing(model, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    processor = {"image_processor": {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2}}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder, model


def saved_seeing(model: Gemma3ForConditionalGeneration, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def random_image(seed: int, side: int = SIDE) -> Image:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)


def reference_pixels(images: Sequence[Image]) -> Tensor:
    """As the library's processor gives them: rescaled, normalised by 0.5, channels first."""
    scaled = torch.from_numpy(np.stack(images)).float() / 255
    return ((scaled - 0.5) / 0.5).permute(0, 3, 1, 2)


def greedy_seeing(
    model: Gemma3ForConditionalGeneration,
    prompt: Sequence[int],
    images: Sequence[Image] | Tensor,
    written: Sequence[int],
) -> list[int]:
    """What the reference library's greedy decoding writes behind the prompt, in which the image token stands for
    images, and behind each part of what was `written`: a text is its text where the two are equal."""
    logits_TV = reference_logits(model, [*prompt, *written[:-1]], images)
    ids: list[int] = logits_TV[len(prompt) - 1 :].argmax(-1).tolist()
    return ids


def reference_logits(
    model: Gemma3ForConditionalGeneration, ids: Sequence[int], images: Sequence[Image] | Tensor
) -> Tensor:
    """The library's logits behind each of these ids."""
    pixels = images if isinstance(images, Tensor) else reference_pixels(images) if images else None
    input_ids = torch.tensor([ids])
    seen = (input_ids == model.config.image_token_id).long()
    output = model(input_ids, pixel_values=pixels, token_type_ids=seen, attention_mask=torch.ones_like(input_ids))
    return output.logits[0].clone()
