"""What families of encoders of images share: typed reading of their entries, and the parameters of a layer. It knows no
family and no tensors.
"""

import math
from collections.abc import Container, Mapping
from typing import Any, Final, Protocol

from engine.models.decoder_config import ModelConfigError, VisionConfig, positive_int
from engine.models.parameter_entries import ParameterEntry, entry, linear_entries

Entries = Mapping[str, Any]
ACTIVATIONS: Final = ("gelu", "gelu_new", "gelu_pytorch_tanh")


class VisionFamily(Protocol):
    """One family of encoders."""

    def config(self, config: Entries, vision: Entries, processor: Entries) -> VisionConfig:
        """What config.json means, its vision_config and the image processor's file. Raises ModelConfigError for what
        this engine does not run, and names the entry."""
        ...

    def table(
        self, config: VisionConfig, decoder_hidden: int, stored: Container[str] | None
    ) -> list[ParameterEntry] | None:
        """Every parameter, as a checkpoint of these names has it, or as one that is made up has it where that is None.
        None where the checkpoint has no encoder, as those of a text alone."""
        ...


def head_count(vision: Entries, hidden: int, default: int) -> int:
    """Raises ModelConfigError where hidden is no multiple of it."""
    heads = positive_int(vision, "num_attention_heads", default)
    if hidden % heads:
        raise ModelConfigError(f"vision_config: hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    return heads


def activation_name(vision: Entries, default: str) -> str:
    """Raises ModelConfigError for any that is not in ACTIVATIONS."""
    activation = str(vision.get("hidden_act") or default)
    if activation not in ACTIVATIONS:
        raise ModelConfigError(f"vision_config: hidden_act {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    return activation


def require_colors(vision: Entries) -> None:
    if vision.get("num_channels", 3) != 3:
        raise ModelConfigError("vision_config: num_channels must be 3")


def channels(processor: Entries, name: str) -> tuple[float, ...]:
    """A number for each channel, 0.5 where the file has none. Raises ModelConfigError."""
    values = processor.get(name) or (0.5, 0.5, 0.5)
    if len(values) != 3 or not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        raise ModelConfigError(f"{name} must be three numbers, not {values!r}")
    if name == "image_std" and not all(values):
        raise ModelConfigError("image_std must have no 0")
    return tuple(map(float, values))


def layer_entries(
    config: VisionConfig, source: str, prefix: str, norms: tuple[str, str], output: str
) -> list[ParameterEntry]:
    """A layer whose two norms and whose attention's output have these names in the checkpoint."""
    hidden, attention = config.hidden, f"{source}self_attn."
    return [
        norm_entry(f"{prefix}attention_norm", f"{source}{norms[0]}", hidden),
        *linear_entries(f"{prefix}qkv", [(f"{attention}{part}_proj", hidden) for part in "qkv"], hidden),
        *linear_entries(f"{prefix}output", [(f"{attention}{output}", hidden)], hidden),
        norm_entry(f"{prefix}mlp_norm", f"{source}{norms[1]}", hidden),
        *linear_entries(f"{prefix}up", [(f"{source}mlp.fc1", config.intermediate)], hidden),
        *linear_entries(f"{prefix}down", [(f"{source}mlp.fc2", hidden)], config.intermediate),
    ]


def norm_entry(parameter: str, source: str, hidden: int) -> ParameterEntry:
    """A norm's weight and bias are one tensor, one behind the other."""
    return entry(parameter, (f"{source}.weight", (hidden,)), (f"{source}.bias", (hidden,)))
