"""Checkpoint name → parameter. It reads no files.

Decoders (Llama, Mistral, Qwen2, Qwen3) share one naming, to which a config's switches add. Encoders (BERT, RoBERTa,
XLM-RoBERTa) share another below a prefix of their own, which some checkpoints leave out.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Final

from engine.models.config import EncoderConfig, ModelConfig, ModelConfigError

_PREFIX: Final = "model."
_ENCODER_PREFIXES: Final = ("", "bert.", "roberta.")
_ENCODER_HEADS: Final = ("cls.", "lm_head.")  # of what they were trained with


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


def decoder_entries(config: ModelConfig, prefix: str = _PREFIX) -> list[ParameterEntry]:
    """Every parameter of the model, in the order in which the layers use them."""
    hidden = config.hidden
    table = [_entry("embedding", (f"{prefix}embed_tokens.weight", (config.vocabulary, hidden)))]
    for layer in range(config.layers):
        table += _decoder_layer(config, f"{prefix}layers.{layer}.", f"layers.{layer}.")
    table.append(_entry("norm", (f"{prefix}norm.weight", (hidden,))))
    if not (config.tied_head or config.vectors):
        table.append(_entry("head.weight", ("lm_head.weight", (config.vocabulary, hidden))))
    return table


def is_unused_tensor(config: ModelConfig, name: str) -> bool:
    """Tensors that checkpoints carry and this model computes itself or needs not: rotary tables, the copy of a tied
    head, and the head of one that gives vectors."""
    return name.endswith("rotary_emb.inv_freq") or ((config.tied_head or config.vectors) and name == "lm_head.weight")


def encoder_entries(config: EncoderConfig, prefix: str) -> list[ParameterEntry]:
    """Every parameter. A norm's weight and bias are one tensor, one behind the other."""
    hidden, tables = config.hidden, prefix + "embeddings."
    entries = [
        _entry("words", (f"{tables}word_embeddings.weight", (config.vocabulary, hidden))),
        _entry("positions", (f"{tables}position_embeddings.weight", (config.positions, hidden))),
        _entry("types", (f"{tables}token_type_embeddings.weight", (config.types, hidden))),
        _norm("norm", f"{tables}LayerNorm", hidden),
    ]
    for layer in range(config.layers):
        entries += _encoder_layer(config, f"{prefix}encoder.layer.{layer}.", f"layers.{layer}.")
    if config.scores:
        dense, out = f"{prefix}pooler.dense", "classifier"
        if config.roberta:
            dense, out = "classifier.dense", "classifier.out_proj"
        entries += _linear("pooler", [(dense, hidden)], hidden)
        entries += _linear("score", [(out, 1)], hidden)
    return entries


def required_tensors(
    config: ModelConfig | EncoderConfig, stored: Container[str]
) -> tuple[list[ParameterEntry], Callable[[str], bool]]:
    """Every parameter with its tensors, as a checkpoint of these names has them, and which other names may be stored.
    Raises ModelConfigError where the names are of another architecture."""
    if isinstance(config, EncoderConfig):
        prefix = _encoder_prefix(stored)
        return encoder_entries(config, prefix), lambda name: _is_unused_encoder_tensor(config, prefix, name)
    prefix = "" if "embed_tokens.weight" in stored else _PREFIX  # where it was stored without its head
    return decoder_entries(config, prefix), lambda name: is_unused_tensor(config, name)


def _encoder_prefix(names: Container[str]) -> str:
    """The prefix of the encoder's own names among these. Raises ModelConfigError where the names are no encoder's."""
    for prefix in _ENCODER_PREFIXES:
        if prefix + "embeddings.word_embeddings.weight" in names:
            return prefix
    raise ModelConfigError(
        "the checkpoint has no embeddings.word_embeddings.weight: it is not of the kind config.json says"
    )


def _is_unused_encoder_tensor(config: EncoderConfig, prefix: str, name: str) -> bool:
    """Tensors that checkpoints carry and this model has no use for: positions written out, and other heads."""
    unused_pooler = not config.scores and name.startswith(f"{prefix}pooler.")
    return name.endswith("embeddings.position_ids") or unused_pooler or name.startswith(_ENCODER_HEADS)


def _decoder_layer(config: ModelConfig, source: str, prefix: str) -> list[ParameterEntry]:
    hidden, inner, head = config.hidden, config.intermediate, config.head_dim
    q, kv = config.heads * head, config.kv_heads * head
    attention = [(f"{source}self_attn.{part}_proj", width) for part, width in (("q", q), ("k", kv), ("v", kv))]
    gated = [(f"{source}mlp.{part}_proj", inner) for part in ("gate", "up")]
    head_norms = ("q_norm", "k_norm") if config.qk_norm else ()
    return [
        _entry(f"{prefix}attention_norm", (f"{source}input_layernorm.weight", (hidden,))),
        *_linear(f"{prefix}qkv", attention, hidden, config.qkv_bias),
        *(_entry(f"{prefix}{norm}", (f"{source}self_attn.{norm}.weight", (head,))) for norm in head_norms),
        *_linear(f"{prefix}output", [(f"{source}self_attn.o_proj", hidden)], q, config.output_bias),
        _entry(f"{prefix}mlp_norm", (f"{source}post_attention_layernorm.weight", (hidden,))),
        *_linear(f"{prefix}gate_up", gated, hidden, config.mlp_bias),
        *_linear(f"{prefix}down", [(f"{source}mlp.down_proj", hidden)], inner, config.mlp_bias),
    ]


def _encoder_layer(config: EncoderConfig, source: str, prefix: str) -> list[ParameterEntry]:
    hidden, inner = config.hidden, config.intermediate
    heads = [(f"{source}attention.self.{part}", hidden) for part in ("query", "key", "value")]
    return [
        *_linear(f"{prefix}qkv", heads, hidden),
        *_linear(f"{prefix}output", [(f"{source}attention.output.dense", hidden)], hidden),
        _norm(f"{prefix}attention_norm", f"{source}attention.output.LayerNorm", hidden),
        *_linear(f"{prefix}up", [(f"{source}intermediate.dense", inner)], hidden),
        *_linear(f"{prefix}down", [(f"{source}output.dense", hidden)], inner),
        _norm(f"{prefix}norm", f"{source}output.LayerNorm", hidden),
    ]


def _entry(parameter: str, *sources: tuple[str, tuple[int, ...]]) -> ParameterEntry:
    return ParameterEntry(parameter, tuple(TensorSource(name, shape) for name, shape in sources))


def _norm(parameter: str, name: str, width: int) -> ParameterEntry:
    return _entry(parameter, (f"{name}.weight", (width,)), (f"{name}.bias", (width,)))


def _linear(parameter: str, parts: list[tuple[str, int]], inputs: int, bias: bool = True) -> list[ParameterEntry]:
    """A weight [outputs, inputs] stacked from (name, outputs) and, where the model has one, its bias."""
    weight = _entry(f"{parameter}.weight", *((f"{name}.weight", (outputs, inputs)) for name, outputs in parts))
    if not bias:
        return [weight]
    return [weight, _entry(f"{parameter}.bias", *((f"{name}.bias", (outputs,)) for name, outputs in parts))]
