"""Llama 4's encoder of images as its files have it: a transformer with rotations in two dimensions, whose patches are
put together in squares and go through three linear layers.

An image is a tile here: how a picture becomes tiles is its sender's business. It reads no tensors; llama4_encoder.py
computes it.
"""

from collections.abc import Container
from typing import Final

from engine.models.decoder_config import ModelConfigError, PixelShuffleConfig, VisionConfig, number, positive_int
from engine.models.parameter_entries import ParameterEntry, entry, linear_entries
from engine.vision.family_parts import (
    Entries,
    channels,
    head_count,
    layer_entries,
    norm_entry,
    require_colors,
)

_TOWER: Final = "vision_model."
_PROJECTOR: Final = "multi_modal_projector.linear_1"
_PATCHES: Final = f"{_TOWER}patch_embedding.linear"
_SERVED: Final = {
    "hidden_act": "gelu",
    "multi_modal_projector_bias": False,
    "vision_feature_select_strategy": "default",
}
_NORM_EPSILON: Final = 1e-5  # the reference library computes with this one, whatever `norm_eps` says


class Llama4Vision:
    """A VisionFamily. In the decoder the rows of an image see what rows of text see."""

    def config(self, config: Entries, vision: Entries, processor: Entries) -> VisionConfig:
        side, patch = positive_int(vision, "image_size", 448), positive_int(vision, "patch_size", 14)
        hidden = positive_int(vision, "hidden_size", 768)
        intermediate, square = positive_int(vision, "intermediate_size", 5632), _square(vision)
        heads = head_count(vision, hidden, 16)
        if side % patch or side // patch % square:
            raise ModelConfigError(
                f"vision_config: {side // patch} patches of {patch} pixels a row are no squares of {square}"
            )
        if hidden // heads % 4:
            raise ModelConfigError(f"vision_config: heads of {hidden // heads} do not turn in two dimensions")
        if intermediate != hidden * square**2:
            raise ModelConfigError(
                f"vision_config: intermediate_size {intermediate} must be that of {square}² patches, "
                f"{hidden * square**2}"
            )
        for name, served in _SERVED.items():
            if vision.get(name, served) != served:
                raise ModelConfigError(f"vision_config: {name} {vision[name]!r} is not supported; {served!r} is")
        require_colors(vision)
        width = positive_int(vision, "projector_input_dim", 4096)
        for name in ("projector_output_dim", "vision_output_dim"):
            if positive_int(vision, name, width) != width:
                raise ModelConfigError(f"vision_config: {name} {vision[name]} must be projector_input_dim, {width}")
        return VisionConfig(
            side=side, patch=patch, hidden=hidden, layers=positive_int(vision, "num_hidden_layers", 34), heads=heads,
            intermediate=intermediate, norm_epsilon=_NORM_EPSILON, activation="gelu",
            tokens=(side // patch // square) ** 2,
            image_token=positive_int(config, "image_token_index", config.get("image_token_id") or 200_092),
            mean=channels(processor, "image_mean"), std=channels(processor, "image_std"), bidirectional=False,
            shuffle=PixelShuffleConfig(square, width, _rope_theta(vision)),
        )  # fmt: skip

    def table(
        self, config: VisionConfig, decoder_hidden: int, stored: Container[str] | None
    ) -> list[ParameterEntry] | None:
        if stored is not None and f"{_PATCHES}.weight" not in stored:
            return None
        return _entries(config, decoder_hidden)


def _entries(config: VisionConfig, decoder_hidden: int) -> list[ParameterEntry]:
    hidden, shuffle, adapter = config.hidden, config.shuffle, f"{_TOWER}vision_adapter.mlp."
    assert shuffle is not None
    table = [
        *linear_entries("patches", [(_PATCHES, hidden)], 3 * config.patch**2, False),
        entry("class", (f"{_TOWER}class_embedding", (hidden,))),
        entry("positions", (f"{_TOWER}positional_embedding_vlm", (config.grid**2 + 1, hidden))),
        norm_entry("first_norm", f"{_TOWER}layernorm_pre", hidden),
    ]
    for layer in range(config.layers):
        source, norms = f"{_TOWER}model.layers.{layer}.", ("input_layernorm", "post_attention_layernorm")
        table += layer_entries(config, source, f"layers.{layer}.", norms, "o_proj")
    return [
        *table,
        norm_entry("norm", f"{_TOWER}layernorm_post", hidden),
        *linear_entries("adapter_up", [(f"{adapter}fc1", shuffle.width)], hidden * shuffle.square**2, False),
        *linear_entries("adapter_down", [(f"{adapter}fc2", shuffle.width)], shuffle.width, False),
        *linear_entries("projection", [(_PROJECTOR, decoder_hidden)], shuffle.width, False),
    ]


def _square(vision: Entries) -> int:
    """How many patches lie side by side in a token, by a ratio that is 1 ÷ that."""
    ratio = number(vision, "pixel_shuffle_ratio", 0.5)
    square = round(1 / ratio) if ratio else 0
    if square < 1 or abs(square * ratio - 1) > 1e-6:
        raise ModelConfigError(f"vision_config: pixel_shuffle_ratio must be 1 divided by an integer, not {ratio!r}")
    return square


def _rope_theta(vision: Entries) -> float:
    rope = vision.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ModelConfigError(f"vision_config: rope_type {rope['rope_type']!r} must be 'default'")
    return number(vision if rope.get("rope_theta") is None else rope, "rope_theta", 10_000.0)
