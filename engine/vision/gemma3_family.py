"""Gemma 3's encoder of images as its files have it: SigLIP, whose patches are averaged, normed and projected.

It reads no tensors; siglip.py computes it.
"""

import math
from collections.abc import Container
from typing import Final

from engine.models.decoder_config import ModelConfigError, VisionConfig, number, positive_int
from engine.models.parameter_entries import ParameterEntry, entry
from engine.vision.family_parts import (
    Entries,
    activation_name,
    channels,
    head_count,
    layer_entries,
    norm_entry,
    require_colors,
)

_PATCHES: Final = "embeddings.patch_embedding.weight"
_TOWERS: Final = ("vision_tower.vision_model.", "vision_tower.")
_BASES: Final = ("", "model.")


class Gemma3Vision:
    """A VisionFamily. The rows of an image see each other in the decoder, too."""

    def config(self, config: Entries, vision: Entries, processor: Entries) -> VisionConfig:
        side, patch = positive_int(vision, "image_size", 224), positive_int(vision, "patch_size", 16)
        tokens, hidden = positive_int(config, "mm_tokens_per_image", 256), positive_int(vision, "hidden_size", 768)
        if side % patch or math.isqrt(tokens) ** 2 != tokens or side // patch % math.isqrt(tokens):
            raise ModelConfigError(
                f"vision_config: {side // patch} patches of {patch} pixels a row become no {tokens} tokens of equal "
                "squares"
            )
        require_colors(vision)
        return VisionConfig(
            side=side, patch=patch, hidden=hidden, layers=positive_int(vision, "num_hidden_layers", 12),
            heads=head_count(vision, hidden, 12), intermediate=positive_int(vision, "intermediate_size", 3072),
            norm_epsilon=number(vision, "layer_norm_eps", 1e-6),
            activation=activation_name(vision, "gelu_pytorch_tanh"), tokens=tokens,
            image_token=positive_int(config, "image_token_index", config.get("image_token_id") or 262_144),
            mean=channels(processor, "image_mean"), std=channels(processor, "image_std"),
        )  # fmt: skip

    def table(
        self, config: VisionConfig, decoder_hidden: int, stored: Container[str] | None
    ) -> list[ParameterEntry] | None:
        prefixes = [(f"{base}multi_modal_projector.", base + tower) for base in _BASES for tower in _TOWERS]
        if stored is not None:
            prefixes = [each for each in prefixes if each[1] + _PATCHES in stored]
        return _entries(config, decoder_hidden, *prefixes[0]) if prefixes else None


def _entries(config: VisionConfig, decoder_hidden: int, projector: str, tower: str) -> list[ParameterEntry]:
    hidden = config.hidden
    table = [
        entry("patches.weight", (tower + _PATCHES, (hidden, 3, config.patch, config.patch))),
        entry("patches.bias", (f"{tower}embeddings.patch_embedding.bias", (hidden,))),
        entry("positions", (f"{tower}embeddings.position_embedding.weight", (config.grid**2, hidden))),
    ]
    for layer in range(config.layers):
        source, norms = f"{tower}encoder.layers.{layer}.", ("layer_norm1", "layer_norm2")
        table += layer_entries(config, source, f"layers.{layer}.", norms, "out_proj")
    return [
        *table,
        norm_entry("norm", f"{tower}post_layernorm", hidden),
        entry("tokens_norm", (f"{projector}mm_soft_emb_norm.weight", (hidden,)), offset=1.0),
        entry("projection", (f"{projector}mm_input_projection_weight", (hidden, decoder_hidden))),
    ]
