"""What config.json and the file beside it say of an encoder of images, and its parameters' names in checkpoints.

It knows Gemma 3's: SigLIP, whose patches are averaged, normed and projected. siglip.py computes it.
"""

import math
from collections.abc import Container, Mapping
from typing import Any, Final

from engine.models.decoder_config import ModelConfigError, VisionConfig, number, positive_int
from engine.models.parameter_entries import ParameterEntry, entry, linear_entries

SEEING_ARCHITECTURES: Final = ("Gemma3ForConditionalGeneration",)
PREPROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json")
_PATCHES: Final = "embeddings.patch_embedding.weight"
_TOWERS: Final = ("vision_tower.vision_model.", "vision_tower.")
_BASES: Final = ("", "model.")
PLAIN_PREFIXES: Final = ("multi_modal_projector.", _TOWERS[0])
_ACTIVATIONS: Final = ("gelu", "gelu_new", "gelu_pytorch_tanh")


def parse_vision_config(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> VisionConfig | None:
    """The encoder of a model of SEEING_ARCHITECTURES; None where config.json has none. Raises ModelConfigError for what
    this engine does not run, and names the entry."""
    entries = config.get("vision_config")
    if entries is None:
        return None
    if not isinstance(entries, Mapping):
        raise ModelConfigError(f"vision_config must be an object, not {entries!r}")
    processor = preprocessor.get("image_processor") or preprocessor
    side, patch = positive_int(entries, "image_size", 224), positive_int(entries, "patch_size", 16)
    tokens = positive_int(config, "mm_tokens_per_image", 256)
    hidden, heads = positive_int(entries, "hidden_size", 768), positive_int(entries, "num_attention_heads", 12)
    activation = str(entries.get("hidden_act", "gelu_pytorch_tanh"))
    if hidden % heads:
        raise ModelConfigError(f"vision_config: hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    if side % patch or math.isqrt(tokens) ** 2 != tokens or side // patch % math.isqrt(tokens):
        raise ModelConfigError(
            f"vision_config: {side // patch} patches of {patch} pixels a row become no {tokens} tokens of equal squares"
        )
    if activation not in _ACTIVATIONS:
        raise ModelConfigError(f"vision_config: hidden_act {activation!r} is not one of {', '.join(_ACTIVATIONS)}")
    if entries.get("num_channels", 3) != 3:
        raise ModelConfigError("vision_config: num_channels must be 3")
    return VisionConfig(
        side=side, patch=patch, hidden=hidden, layers=positive_int(entries, "num_hidden_layers", 12), heads=heads,
        intermediate=positive_int(entries, "intermediate_size", 3072),
        norm_epsilon=number(entries, "layer_norm_eps", 1e-6), activation=activation, tokens=tokens,
        image_token=positive_int(config, "image_token_index", config.get("image_token_id") or 262_144),
        mean=_channels(processor, "image_mean"), std=_channels(processor, "image_std"),
    )  # fmt: skip


def _channels(processor: Mapping[str, Any], name: str) -> tuple[float, ...]:
    values = processor.get(name) or (0.5, 0.5, 0.5)
    if len(values) != 3 or not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        raise ModelConfigError(f"{name} must be three numbers, not {values!r}")
    if name == "image_std" and not all(values):
        raise ModelConfigError("image_std must have no 0")
    return tuple(map(float, values))


def vision_prefixes(stored: Container[str]) -> tuple[str, str] | None:
    """What the names of the projector and of the encoder begin with among these; None where there is no encoder, as in
    checkpoints of a text alone."""
    towers = [(f"{base}multi_modal_projector.", base + tower) for base in _BASES for tower in _TOWERS]
    return next((names for names in towers if names[1] + _PATCHES in stored), None)


def vision_entries(config: VisionConfig, decoder_hidden: int, prefixes: tuple[str, str]) -> list[ParameterEntry]:
    """Every parameter, by names that begin as vision_prefixes found them. A norm's weight and bias are one tensor, one
    behind the other."""
    hidden, (projector, tower) = config.hidden, prefixes
    table = [
        entry("patches.weight", (tower + _PATCHES, (hidden, 3, config.patch, config.patch))),
        entry("patches.bias", (f"{tower}embeddings.patch_embedding.bias", (hidden,))),
        entry("positions", (f"{tower}embeddings.position_embedding.weight", (config.grid**2, hidden))),
    ]
    for layer in range(config.layers):
        table += _layer(config, f"{tower}encoder.layers.{layer}.", f"layers.{layer}.")
    return [
        *table,
        _norm("norm", f"{tower}post_layernorm", hidden),
        entry("tokens_norm", (f"{projector}mm_soft_emb_norm.weight", (hidden,)), offset=1.0),
        entry("projection", (f"{projector}mm_input_projection_weight", (hidden, decoder_hidden))),
    ]


def _layer(config: VisionConfig, source: str, prefix: str) -> list[ParameterEntry]:
    hidden, attention = config.hidden, f"{source}self_attn."
    return [
        _norm(f"{prefix}attention_norm", f"{source}layer_norm1", hidden),
        *linear_entries(f"{prefix}qkv", [(f"{attention}{part}_proj", hidden) for part in "qkv"], hidden),
        *linear_entries(f"{prefix}output", [(f"{attention}out_proj", hidden)], hidden),
        _norm(f"{prefix}mlp_norm", f"{source}layer_norm2", hidden),
        *linear_entries(f"{prefix}up", [(f"{source}mlp.fc1", config.intermediate)], hidden),
        *linear_entries(f"{prefix}down", [(f"{source}mlp.fc2", hidden)], config.intermediate),
    ]


def _norm(parameter: str, source: str, hidden: int) -> ParameterEntry:
    return entry(parameter, (f"{source}.weight", (hidden,)), (f"{source}.bias", (hidden,)))
