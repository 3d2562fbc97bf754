"""The families of decoders: what each one's config.json leaves unsaid, and what its checkpoints call a layer's tensors.

A family is one class over what they share. It knows no tensors: llama.py and gemma.py compute them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Protocol

from engine.models.decoder_config import ModelConfig, QueryTemperature, number, positive_int
from engine.models.family_parts import (
    FULL_KIND,
    SLIDING_KIND,
    Entries,
    alternating_spans,
    gemma_config,
    head_norm_entries,
    mlp_entries,
    optional_cap,
    output_entries,
    qkv_entries,
    qwen_spans,
    shared_config,
    spans_by_kind,
    whole_rope,
    window_span,
)
from engine.models.mixture_families import GptOss, Llama4, Mixtral, Qwen3Moe
from engine.models.parameter_entries import ParameterEntry, entry, fused_entry, head_order, linear_entries
from engine.models.rope_config import rope_config, rope_entry
from engine.step.key_span import FULL

# What the smaller ones' files leave out.
_GEMMA3_UNSAID: Final = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
}


class DecoderFamily(Protocol):
    """One family.

    norm_offset   what is added to the weights of its norms as they are stored.
    """

    norm_offset: float

    def config(self, config: Entries) -> ModelConfig:
        """What config.json means. Raises ModelConfigError for what this engine does not run, and names the entry."""
        ...

    def layer(self, config: ModelConfig, index: int, source: str, prefix: str) -> list[ParameterEntry]:
        """The parameters of a layer, whose tensors' names begin with `source`, in the order of their use."""
        ...


class _PreNorm:
    """Norms before attention and before a gated MLP, each part of a layer a tensor of its own."""

    norm_offset = 0.0

    def layer(self, config: ModelConfig, index: int, source: str, prefix: str) -> list[ParameterEntry]:
        return [
            entry(f"{prefix}attention_norm", (f"{source}input_layernorm.weight", (config.hidden,))),
            *qkv_entries(config, index, source, prefix),
            *head_norm_entries(config, source, prefix, 0.0),
            *output_entries(config, source, prefix),
            entry(f"{prefix}mlp_norm", (f"{source}post_attention_layernorm.weight", (config.hidden,))),
            *mlp_entries(config, f"{source}mlp.", prefix),
        ]


class _NormsAround:
    """Norms before and behind attention and MLP; their weights are stored less 1."""

    norm_offset = 1.0

    def layer(self, config: ModelConfig, index: int, source: str, prefix: str) -> list[ParameterEntry]:
        def norm(parameter: str, name: str) -> ParameterEntry:
            return entry(f"{prefix}{parameter}", (f"{source}{name}.weight", (config.hidden,)), offset=1.0)

        return [
            norm("attention_norm", "input_layernorm"),
            *qkv_entries(config, index, source, prefix),
            *head_norm_entries(config, source, prefix, 1.0),
            *output_entries(config, source, prefix),
            norm("behind_attention_norm", "post_attention_layernorm"),
            norm("mlp_norm", "pre_feedforward_layernorm"),
            *mlp_entries(config, f"{source}mlp.", prefix),
            norm("behind_mlp_norm", "post_feedforward_layernorm"),
        ]


class Llama(_PreNorm):
    """Llama 2 to 3.3, and what was made in their shape."""

    def config(self, config: Entries) -> ModelConfig:
        biased = bool(config.get("attention_bias", False))
        shared = shared_config(config)
        return replace(shared, qkv_bias=biased, output_bias=biased, mlp_bias=bool(config.get("mlp_bias", False)))


class Mistral(_PreNorm):
    """Mistral: a window in every layer, or in none."""

    def config(self, config: Entries) -> ModelConfig:
        shared = shared_config(config)
        return replace(shared, spans=(window_span(config),) * shared.layers)


class Ministral(_PreNorm):
    """Ministral: layer_types says which layers have the window."""

    def config(self, config: Entries) -> ModelConfig:
        shared, window = shared_config(config), window_span(config)
        kind = FULL_KIND if window == FULL else SLIDING_KIND
        return replace(
            shared, spans=spans_by_kind(config, {FULL_KIND: FULL, SLIDING_KIND: window}, [kind] * shared.layers)
        )


class Ministral3(_PreNorm):
    """Mistral's third models and Ministral 3, by themselves or as the text of one that also sees: as Mistral, and where
    the rope says so the queries grow with their position."""

    def config(self, config: Entries) -> ModelConfig:
        shared, rope, temperature = shared_config(config), rope_entry(config), None
        if rope.get("llama_4_scaling_beta") is not None:
            unit, gain = positive_int(rope, "original_max_position_embeddings"), number(rope, "llama_4_scaling_beta")
            temperature = QueryTemperature(unit, gain, ahead=0, rotating=True)
        return replace(shared, spans=(window_span(config),) * shared.layers, temperature=temperature)


class Qwen2(_PreNorm):
    """Qwen 2 and 2.5: q, k and v are biased."""

    def config(self, config: Entries) -> ModelConfig:
        shared = shared_config(config)
        return replace(shared, spans=qwen_spans(config, shared.layers), qkv_bias=True)


class Qwen3(_PreNorm):
    """Qwen 3 without experts: q and k are normed."""

    def config(self, config: Entries) -> ModelConfig:
        shared, biased = shared_config(config, head_dim=128), bool(config.get("attention_bias", False))
        spans = qwen_spans(config, shared.layers)
        return replace(shared, spans=spans, qkv_bias=biased, output_bias=biased, qk_norm=True)


class Phi3:
    """Phi 3 and 4 and their minis: q, k and v are one tensor, gate and up another, and some of a head may not turn."""

    norm_offset = 0.0

    def config(self, config: Entries) -> ModelConfig:
        scaling = rope_entry(config)
        if scaling.get("rope_type", scaling.get("type")) == "yarn":  # what the first of them called longrope
            config = {**config, "rope_parameters": {**scaling, "rope_type": "longrope"}}
        shared = shared_config(config, partial=True)
        return replace(shared, spans=(window_span(config),) * shared.layers)

    def layer(self, config: ModelConfig, index: int, source: str, prefix: str) -> list[ParameterEntry]:
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        order = head_order(config.ropes[index], config.heads + config.kv_heads, config.head_dim)
        hidden = config.hidden
        return [
            entry(f"{prefix}attention_norm", (f"{source}input_layernorm.weight", (hidden,))),
            fused_entry(f"{prefix}qkv.weight", f"{source}self_attn.qkv_proj", (q, kv, kv), hidden, order),
            *output_entries(config, source, prefix),
            entry(f"{prefix}mlp_norm", (f"{source}post_attention_layernorm.weight", (hidden,))),
            fused_entry(f"{prefix}gate_up.weight", f"{source}mlp.gate_up_proj", (config.intermediate,) * 2, hidden),
            *linear_entries(f"{prefix}down", [(f"{source}mlp.down_proj", hidden)], config.intermediate, False),
        ]


class Gemma2(_NormsAround):
    """Gemma 2: a window in every other layer, logits capped, norms before and behind attention and MLP."""

    def config(self, config: Entries) -> ModelConfig:
        shared = gemma_config(config)
        rope = whole_rope(config, shared.head_dim)
        return replace(
            shared, spans=alternating_spans(config, 2, 4096), ropes=(rope,) * shared.layers,
            attention_cap=optional_cap(config, "attn_logit_softcapping", 50.0),
            logits_cap=optional_cap(config, "final_logit_softcapping", 30.0),
        )  # fmt: skip


class Gemma3(_NormsAround):
    """Gemma 3's text: a window in five of six layers, which rotate by another base than the full ones; q and k are
    normed."""

    def config(self, config: Entries) -> ModelConfig:
        config = {**_GEMMA3_UNSAID, **config}
        shared, spans = (
            gemma_config(config),
            alternating_spans(config, positive_int(config, "sliding_window_pattern", 6), 4096),
        )
        nested = rope_entry({"rope_parameters": config.get("rope_parameters")})
        entries = {kind: nested.get(kind) or {} for kind in (FULL_KIND, SLIDING_KIND)}
        if not nested:  # the older spelling scales the full layers alone
            entries[FULL_KIND] = config.get("rope_scaling") or {}
        local = {**config, "rope_theta": config.get("rope_local_base_freq")}
        full = rope_config(config, shared.head_dim, entries[FULL_KIND], 1_000_000.0)
        sliding = rope_config(local, shared.head_dim, entries[SLIDING_KIND], 10_000.0)
        return replace(
            shared, spans=spans, ropes=tuple(full if span == FULL else sliding for span in spans), qk_norm=True,
            attention_cap=optional_cap(config, "attn_logit_softcapping", 0.0),
            logits_cap=optional_cap(config, "final_logit_softcapping", 0.0),
        )  # fmt: skip


FAMILIES: Final[Mapping[str, DecoderFamily]] = {
    "LlamaForCausalLM": Llama(),
    "MistralForCausalLM": Mistral(),
    "MinistralForCausalLM": Ministral(),
    "Ministral3ForCausalLM": Ministral3(),
    "Mistral3ForConditionalGeneration": Ministral3(),  # its text
    "Qwen2ForCausalLM": Qwen2(),
    "Qwen3ForCausalLM": Qwen3(),
    "Phi3ForCausalLM": Phi3(),
    "Gemma2ForCausalLM": Gemma2(),
    "Gemma3ForCausalLM": Gemma3(),
    "Gemma3ForConditionalGeneration": Gemma3(),  # its text
    "MixtralForCausalLM": Mixtral(),
    "Qwen3MoeForCausalLM": Qwen3Moe(),
    "Llama4ForCausalLM": Llama4(),
    "Llama4ForConditionalGeneration": Llama4(),  # its text
    "GptOssForCausalLM": GptOss(),
}
