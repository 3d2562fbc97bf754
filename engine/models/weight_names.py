"""Checkpoint name → parameter. It reads no files.

The families this engine runs (Llama, Mistral, Qwen2, Qwen3) share one naming; what a config switches on adds names.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import Final

from engine.models.config import ModelConfig

_PREFIX: Final = "model."


@dataclass(frozen=True, slots=True)
class TensorSource:
    """One tensor of the checkpoint and the shape it must have."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterEntry:
    """One parameter: its sources stacked along their first dimension in this order."""

    parameter: str
    sources: tuple[TensorSource, ...]


def decoder_prefix(names: Container[str]) -> str:
    """The prefix of a decoder's names among these: empty where it was stored without its head."""
    return "" if "embed_tokens.weight" in names else _PREFIX


def decoder_entries(config: ModelConfig, prefix: str = _PREFIX) -> list[ParameterEntry]:
    """Every parameter of the model, in the order in which the layers use them."""
    hidden = config.hidden
    table = [_entry("embedding", (f"{prefix}embed_tokens.weight", (config.vocabulary, hidden)))]
    for layer in range(config.layers):
        table += _layer(config, f"{prefix}layers.{layer}.", f"layers.{layer}.")
    table.append(_entry("norm", (f"{prefix}norm.weight", (hidden,))))
    if not (config.tied_head or config.vectors):
        table.append(_entry("head.weight", ("lm_head.weight", (config.vocabulary, hidden))))
    return table


def is_unused_tensor(config: ModelConfig, name: str) -> bool:
    """Tensors that checkpoints carry and this model computes itself or needs not: rotary tables, the copy of a tied
    head, and the head of one that gives vectors."""
    return name.endswith("rotary_emb.inv_freq") or ((config.tied_head or config.vectors) and name == "lm_head.weight")


def _entry(parameter: str, *sources: tuple[str, tuple[int, ...]]) -> ParameterEntry:
    return ParameterEntry(parameter, tuple(TensorSource(name, shape) for name, shape in sources))


def _layer(config: ModelConfig, source: str, prefix: str) -> list[ParameterEntry]:
    hidden, inner, head = config.hidden, config.intermediate, config.head_dim
    q, kv = config.heads * head, config.kv_heads * head
    attention = [(source + "self_attn.q_proj", q), (source + "self_attn.k_proj", kv), (source + "self_attn.v_proj", kv)]
    gated = [(source + "mlp.gate_proj", inner), (source + "mlp.up_proj", inner)]

    table = [_entry(prefix + "attention_norm", (source + "input_layernorm.weight", (hidden,)))]
    table += _linear(prefix + "qkv", attention, hidden, config.qkv_bias)
    if config.qk_norm:
        table += [
            _entry(prefix + f"{which}_norm", (source + f"self_attn.{which}_norm.weight", (head,)))
            for which in ("q", "k")
        ]
    table += _linear(prefix + "output", [(source + "self_attn.o_proj", hidden)], q, config.output_bias)
    table.append(_entry(prefix + "mlp_norm", (source + "post_attention_layernorm.weight", (hidden,))))
    table += _linear(prefix + "gate_up", gated, hidden, config.mlp_bias)
    table += _linear(prefix + "down", [(source + "mlp.down_proj", hidden)], inner, config.mlp_bias)
    return table


def _linear(parameter: str, parts: list[tuple[str, int]], inputs: int, bias: bool) -> list[ParameterEntry]:
    """A weight [outputs, inputs] and, where the config has one, its bias."""
    weight = _entry(parameter + ".weight", *((name + ".weight", (outputs, inputs)) for name, outputs in parts))
    if not bias:
        return [weight]
    return [weight, _entry(parameter + ".bias", *((name + ".bias", (outputs,)) for name, outputs in parts))]
