"""What families of decoders share: how entries of config.json are read, and the parameters of a layer's parts.

It knows no family.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from engine.models.decoder_config import ModelConfig, ModelConfigError, RopeConfig, number, positive_int
from engine.models.parameter_entries import ParameterEntry, entry, head_order, linear_entries
from engine.models.rope_config import rope_config, rope_entry
from engine.step.key_span import FULL, KeySpan

Entries = Mapping[str, Any]
FULL_KIND: Final = "full_attention"
SLIDING_KIND: Final = "sliding_attention"
CHUNKED_KIND: Final = "chunked_attention"
GELU_TANH: Final = "gelu_pytorch_tanh"


def shared_config(config: Entries, head_dim: int | None = None, partial: bool = False) -> ModelConfig:
    """What all families read alike, as a model of full attention without extras. `head_dim` is what is meant where the
    file has none; `partial` permits that some of a head does not turn."""
    hidden, heads = positive_int(config, "hidden_size"), positive_int(config, "num_attention_heads")
    kv_heads, layers = positive_int(config, "num_key_value_heads", heads), positive_int(config, "num_hidden_layers")
    size = positive_int(config, "head_dim", head_dim or hidden // heads)
    if heads % kv_heads:
        raise ModelConfigError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if size % 2:
        raise ModelConfigError(f"head_dim {size} is odd, so it cannot be rotated")
    activation = config.get("hidden_activation") or config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelConfigError(f"hidden_act {activation!r} is not supported; silu is")
    rope = whole_rope(config, size, partial)
    return ModelConfig(
        architecture=str(config["architectures"][0]),
        vocabulary=positive_int(config, "vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size,
        intermediate=positive_int(config, "intermediate_size"),
        norm_epsilon=number(config, "rms_norm_eps", 1e-6),
        context_tokens=positive_int(config, "max_position_embeddings"),
        spans=(FULL,) * layers,
        ropes=(rope,) * layers,
        attention_scale=size**-0.5,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tied_head=bool(config.get("tie_word_embeddings", False)),
        stop_ids=(),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
    )


def gemma_config(config: Entries) -> ModelConfig:
    """What both Gemmas share, but for their spans and ropes."""
    if config.get("use_bidirectional_attention"):
        raise ModelConfigError("use_bidirectional_attention is not supported; false is")
    activation = config.get("hidden_activation") or config.get("hidden_act") or GELU_TANH
    if activation != GELU_TANH:
        raise ModelConfigError(f"hidden_activation {activation!r} is not supported; {GELU_TANH} is")
    plain = {name: value for name, value in config.items() if not name.startswith(("rope_", "hidden_act"))}
    shared = shared_config({"tie_word_embeddings": True, **plain}, head_dim=256)
    biased, scalar = bool(config.get("attention_bias", False)), number(config, "query_pre_attn_scalar", 256)
    if not scalar:
        raise ModelConfigError("query_pre_attn_scalar must be more than 0")
    return replace(
        shared, attention_scale=scalar**-0.5, qkv_bias=biased, output_bias=biased, embedding_scale=shared.hidden**0.5,
        activation="gelu_tanh",
    )  # fmt: skip


def optional_cap(config: Entries, name: str, default: float) -> float:
    """0 where the file says null: nothing is capped."""
    return 0.0 if name in config and config[name] is None else number(config, name, default)


def whole_rope(config: Entries, head_dim: int, partial: bool = False) -> RopeConfig:
    rope = rope_config(config, head_dim, rope_entry(config), 10_000.0)
    if rope.rotary_dim and not partial:
        raise ModelConfigError(f"partial_rotary_factor rotates {rope.rotary_dim} of {head_dim} numbers; 1.0 is served")
    return rope


def window_span(config: Entries) -> KeySpan:
    return FULL if config.get("sliding_window") is None else KeySpan(window=positive_int(config, "sliding_window"))


def alternating_spans(config: Entries, period: int, window: int) -> tuple[KeySpan, ...]:
    """A window in all layers but each `period`-th, unless layer_types says so otherwise."""
    layers = positive_int(config, "num_hidden_layers")
    kinds = [SLIDING_KIND if (layer + 1) % period else FULL_KIND for layer in range(layers)]
    spans = {FULL_KIND: FULL, SLIDING_KIND: KeySpan(window=positive_int(config, "sliding_window", window))}
    return spans_by_kind(config, spans, kinds)


def qwen_spans(config: Entries, layers: int) -> tuple[KeySpan, ...]:
    """Windows where they are switched on, in the layers that layer_types names, or from max_window_layers on."""
    if config.get("sliding_window") is None or not config.get("use_sliding_window", False):
        return (FULL,) * layers
    first = number(config, "max_window_layers", 28)
    kinds = [SLIDING_KIND if layer >= first else FULL_KIND for layer in range(layers)]
    return spans_by_kind(config, {FULL_KIND: FULL, SLIDING_KIND: window_span(config)}, kinds)


def spans_by_kind(config: Entries, spans: Mapping[str, KeySpan], kinds: list[str]) -> tuple[KeySpan, ...]:
    """What layer_types means; `kinds` where there is none. Raises ModelConfigError where it and the layers disagree."""
    listed = config.get("layer_types")
    listed = kinds if listed is None else listed
    if not isinstance(listed, list) or len(listed) != len(kinds) or not all(kind in spans for kind in listed):
        raise ModelConfigError(
            f"layer_types must name {' or '.join(spans)} for each of {len(kinds)} layers, not {listed!r}"
        )
    return tuple(spans[kind] for kind in listed)


def qkv_entries(config: ModelConfig, index: int, source: str, prefix: str) -> list[ParameterEntry]:
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    parts = [(f"{source}self_attn.{part}_proj", width) for part, width in (("q", q), ("k", kv), ("v", kv))]
    order = head_order(config.ropes[index], config.heads + config.kv_heads, config.head_dim)
    return linear_entries(f"{prefix}qkv", parts, config.hidden, config.qkv_bias, order)


def output_entries(config: ModelConfig, source: str, prefix: str) -> list[ParameterEntry]:
    heads = config.heads * config.head_dim
    return linear_entries(f"{prefix}output", [(f"{source}self_attn.o_proj", config.hidden)], heads, config.output_bias)


def mlp_entries(config: ModelConfig, source: str, prefix: str, intermediate: int = 0) -> list[ParameterEntry]:
    """`source` and `prefix` are those of the MLP itself. Its inner size is the config's where no other is given."""
    inner = intermediate or config.intermediate
    gated = [(f"{source}{part}_proj", inner) for part in ("gate", "up")]
    return [
        *linear_entries(f"{prefix}gate_up", gated, config.hidden, config.mlp_bias),
        *linear_entries(f"{prefix}down", [(f"{source}down_proj", config.hidden)], inner, config.mlp_bias),
    ]


def head_norm_entries(config: ModelConfig, source: str, prefix: str, offset: float) -> list[ParameterEntry]:
    names = ("q_norm", "k_norm") if config.qk_norm else ()
    shape = (config.head_dim,)
    return [entry(f"{prefix}{name}", (f"{source}self_attn.{name}.weight", shape), offset=offset) for name in names]
