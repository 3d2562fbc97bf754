"""What a decoder is, as one frozen value that the rest can trust, and typed reading of config.json's entries. It knows
no families and no tensor names.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from engine.kernels.experts.routing_rule import RoutingRule
from engine.step.key_span import KeySpan, LayerGroup, group_layers


class ModelConfigError(ValueError):
    """A config.json that this engine cannot run; the message names the entry and what would do."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding.

    kind              default; linear (positions ÷ factor); llama3 (low frequencies ÷ factor); yarn (from low to high
                      frequencies ever less of the factor, between as many turns of the original context as
                      ramp_turns); longrope (each frequency ÷ its own of the short factors, and in contexts longer than
                      the original one of the long factors).
    attention_factor  what is rotated is multiplied by.
    rotary_dim        so many of a head's numbers turn, the first; None: all do.
    interleaved       in the checkpoint the two numbers of a pair lie side by side, else half of what turns apart.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context_tokens: int = 8192
    ramp_turns: tuple[float, float] = (1.0, 32.0)
    ramp_whole: bool = True  # the ramp begins and ends at whole pairs
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    rotary_dim: int | None = None
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Queries grow with their position: · (1 + gain · log(1 + ⌊(position + ahead) ÷ unit⌋)), either in the layers that
    rotate, or in the others."""

    unit: int
    gain: float
    ahead: int = 1
    rotating: bool = False


class Fp8Scales(enum.StrEnum):
    """What has a factor of its own where weights are in 8 bits a number: a tensor, an output, or a block."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """MLPs that are several experts, of which each row takes some.

    layers        which layers have them; the MLPs of the others are dense.
    rule          how experts are chosen.
    intermediate  the inner size of each.
    shared        the inner size of one more that all rows take; 0: there is none.
    biased        the router and the experts' linear layers add a bias.
    limit         gate and up are clamped to it, and gated as gpt-oss does; 0: silu(gate) · up.
    local         how many experts a rank has that has whole ones of the rule's; None: all, or a part of each.
    """

    layers: tuple[bool, ...]
    rule: RoutingRule
    intermediate: int
    shared: int = 0
    biased: bool = False
    limit: float = 0.0
    local: int | None = None

    @property
    def held(self) -> int:
        """How many experts have weights here."""
        return self.rule.experts if self.local is None else self.local


@dataclass(frozen=True, slots=True)
class PixelShuffleConfig:
    """How patches become tokens in Llama 4, and the encoder's rotations.

    square      so many patches in each direction are put side by side to be a token,
    width       and go through a linear layer of so many outputs, a second one, and one to the decoder's size.
    rope_theta  of a patch's row and column, each of which turns half of a head.
    """

    square: int
    width: int
    rope_theta: float


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """An encoder of images, and how its patches become tokens of the decoder.

    side           of an image in pixels, which has three channels; of a patch: `patch`.
    tokens         of the decoder that an image becomes, each a square of patches.
    image_token    the id that stands for them in a prompt.
    mean, std      of each channel, whose numbers are 0 … 1 before: (number − mean) ÷ std.
    activation     gelu or gelu_tanh.
    bidirectional  in the decoder the tokens of an image see each other; else those before them, as a text's do.
    shuffle        as Llama 4 makes tokens of patches; None: as Gemma 3 does, of SigLIP's.
    """

    side: int
    patch: int
    hidden: int
    layers: int
    heads: int
    intermediate: int
    norm_epsilon: float
    activation: str
    tokens: int
    image_token: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    bidirectional: bool = True
    shuffle: PixelShuffleConfig | None = None

    @property
    def grid(self) -> int:
        """Patches in a row."""
        return self.side // self.patch


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer.

    spans            which keys each layer's rows see.
    ropes            how each layer rotates q and k; None: not at all.
    temperature      of the queries; `temperature_of` says in which layers.
    attention_scale  what logits of attention are multiplied by.
    attention_cap …  where logits, those of attention or the model's, are capped: cap · tanh(logit ÷ cap); 0: nowhere.
    sinks            each head has a logit of its own that takes its share of each softmax.
    qkv_bias …       which linear layers add a bias.
    qk_norm          RMS norm with weights over each head of q and k before the rotation.
    rotated_norm     RMS norm without weights over each head of q and k after the rotation, where there is one.
    embedding_scale  what embeddings are multiplied by, rounded to the dtype of the weights.
    activation       of the gate of the MLP: silu or gelu_tanh.
    tied_head        the output head is the embedding table.
    vectors          there is no head: what the last norm gives is the result.
    dtype            the weights', as the file says: float32, bfloat16 or float16; bfloat16 where it is silent.
    intermediate     the inner size of dense MLPs.
    mixture          of experts, where some layers have one.
    mxfp4            the checkpoint has experts in 4 bits a number, 32 of which share a power of two.
    fp8              the checkpoint has weights in 8 bits a number, with such factors.
    vision           what encodes images for it, where something does.
    """

    architecture: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_epsilon: float
    context_tokens: int
    spans: tuple[KeySpan, ...]
    ropes: tuple[RopeConfig | None, ...]
    attention_scale: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_head: bool
    stop_ids: tuple[int, ...]
    dtype: str
    temperature: QueryTemperature | None = None
    attention_cap: float = 0.0
    logits_cap: float = 0.0
    sinks: bool = False
    rotated_norm: bool = False
    embedding_scale: float = 1.0
    activation: str = "silu"
    vectors: bool = False
    mixture: MixtureConfig | None = None
    mxfp4: bool = False
    fp8: Fp8Scales | None = None
    vision: VisionConfig | None = None

    def with_vision(self, vision: VisionConfig | None) -> "ModelConfig":
        """The config with this encoder: windowed layers keep what rows of an image see of it behind themselves."""
        ahead = vision.tokens if vision is not None and vision.bidirectional else 0
        spans = tuple(replace(span, ahead=ahead) if span.window is not None else span for span in self.spans)
        return replace(self, spans=spans, vision=vision)

    def has_experts(self, layer: int) -> bool:
        return self.mixture is not None and self.mixture.layers[layer]

    @property
    def inner_sizes(self) -> tuple[int, ...]:
        """The inner size of each kind of MLP that the model has."""
        if self.mixture is None:
            return (self.intermediate,)
        dense = () if all(self.mixture.layers) else (self.intermediate,)
        return tuple(size for size in (*dense, self.mixture.intermediate, self.mixture.shared) if size)

    @property
    def kv_groups(self) -> tuple[LayerGroup, ...]:
        """The layers by what of their keys has to be kept, the full ones first."""
        return group_layers(self.spans)

    @property
    def windows(self) -> tuple[tuple[int, float], ...]:
        """The most keys that a row sees, and the share of the layers, of each group that does not see everything."""
        counts = [(group.span.tokens, len(group.layers)) for group in self.kv_groups]
        return tuple((tokens, count / self.layers) for tokens, count in counts if tokens is not None)

    def temperature_of(self, layer: int) -> QueryTemperature | None:
        """What the layer's queries are multiplied by."""
        heat = self.temperature
        return heat if heat is not None and heat.rotating == (self.ropes[layer] is not None) else None

    @property
    def outputs(self) -> int:
        """How many numbers a sampled row gives: a logit for each token, or a vector."""
        return self.hidden if self.vectors else self.vocabulary


ROPE_KINDS: Final = ("default", "linear", "llama3", "yarn", "longrope")


def positive_int(config: Mapping[str, Any], entry: str, default: int | None = None) -> int:
    """Raises ModelConfigError where the entry is anything else, or missing without a default."""
    value = config.get(entry)
    value = default if value is None else value
    if type(value) is not int or value <= 0:
        raise ModelConfigError(f"{entry} must be a positive integer, not {value!r}")
    return value


def number(config: Mapping[str, Any], entry: str, default: float | None = None) -> float:
    """A number of 0 or more. Raises ModelConfigError where the entry is anything else, or missing without a default."""
    value = config.get(entry)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ModelConfigError(f"{entry} must be a number of 0 or more, not {value!r}")
    return float(value)
