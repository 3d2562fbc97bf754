"""Checkpoint name → parameter. It reads no files.

Decoders share one naming of what is around their layers, below a prefix; what is in a layer is its family's business.
Encoders (BERT, RoBERTa, XLM-RoBERTa) share another below a prefix of their own, which some checkpoints leave out.
"""

from collections.abc import Callable, Container
from typing import Final

from engine.models.config import EncoderConfig
from engine.models.decoder_config import ModelConfig, ModelConfigError
from engine.models.families import FAMILIES
from engine.models.parameter_entries import ParameterEntry, TensorSource, entry, linear_entries
from engine.models.quantization import is_unused_scale, packed_entries

__all__ = ["ParameterEntry", "TensorSource"]

_PREFIX: Final = "model."
# In the order in which they are looked for; without any where a decoder was stored without its head.
_NESTED_PREFIX: Final = "language_model.model."
_DECODER_PREFIXES: Final = ("", _PREFIX, "model.language_model.", _NESTED_PREFIX)
_SEEING: Final = ("vision_tower.", "vision_model.", "multi_modal_projector.")
_ENCODER_PREFIXES: Final = ("", "bert.", "roberta.")
_ENCODER_HEADS: Final = ("cls.", "lm_head.")  # of what they were trained with


def decoder_entries(config: ModelConfig, prefix: str = _PREFIX) -> list[ParameterEntry]:
    """Every parameter of the model, in the order in which the layers use them."""
    hidden, family = config.hidden, FAMILIES[config.architecture]
    table = [entry("embedding", (f"{prefix}embed_tokens.weight", (config.vocabulary, hidden)))]
    for layer in range(config.layers):
        table += family.layer(config, layer, f"{prefix}layers.{layer}.", f"layers.{layer}.")
    table.append(entry("norm", (f"{prefix}norm.weight", (hidden,)), offset=family.norm_offset))
    if not (config.tied_head or config.vectors):
        # Beside what a model of several modalities has of its decoder lies the head; where that has its own, within it.
        nested = prefix.removesuffix(_PREFIX) if prefix == _NESTED_PREFIX else ""
        table.append(entry("head.weight", (f"{nested}lm_head.weight", (config.vocabulary, hidden))))
    return table


def is_unused_tensor(config: ModelConfig, name: str) -> bool:
    """Tensors that checkpoints carry and this model computes itself or needs not: rotary tables, the copy of a tied
    head, the head of one that gives vectors, and what sees."""
    if name.endswith("rotary_emb.inv_freq"):
        return True
    if config.architecture.endswith("ForConditionalGeneration") and name.removeprefix(_PREFIX).startswith(_SEEING):
        return True
    return (config.tied_head or config.vectors) and name.removeprefix("language_model.") == "lm_head.weight"


def encoder_entries(config: EncoderConfig, prefix: str) -> list[ParameterEntry]:
    """Every parameter. A norm's weight and bias are one tensor, one behind the other."""
    hidden, tables = config.hidden, prefix + "embeddings."
    entries = [
        entry("words", (f"{tables}word_embeddings.weight", (config.vocabulary, hidden))),
        entry("positions", (f"{tables}position_embeddings.weight", (config.positions, hidden))),
        entry("types", (f"{tables}token_type_embeddings.weight", (config.types, hidden))),
        _norm("norm", f"{tables}LayerNorm", hidden),
    ]
    for layer in range(config.layers):
        entries += _encoder_layer(config, f"{prefix}encoder.layer.{layer}.", f"layers.{layer}.")
    if config.scores:
        dense, out = f"{prefix}pooler.dense", "classifier"
        if config.roberta:
            dense, out = "classifier.dense", "classifier.out_proj"
        entries += linear_entries("pooler", [(dense, hidden)], hidden)
        entries += linear_entries("score", [(out, 1)], hidden)
    return entries


def required_tensors(
    config: ModelConfig | EncoderConfig, stored: Container[str]
) -> tuple[list[ParameterEntry], Callable[[str], bool]]:
    """Every parameter with its tensors, as a checkpoint of these names has them, and which other names may be stored.
    Raises ModelConfigError where the names are of another architecture."""
    if isinstance(config, EncoderConfig):
        prefix = _encoder_prefix(stored)
        return encoder_entries(config, prefix), lambda name: _is_unused_encoder_tensor(config, prefix, name)
    prefix = next((prefix for prefix in _DECODER_PREFIXES if f"{prefix}embed_tokens.weight" in stored), _PREFIX)
    table = decoder_entries(config, prefix)
    if config.fp8 is None:
        return table, lambda name: is_unused_tensor(config, name)
    packed = packed_entries(table, stored, config.fp8)
    return packed, lambda name: is_unused_tensor(config, name) or is_unused_scale(name)


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


def _encoder_layer(config: EncoderConfig, source: str, prefix: str) -> list[ParameterEntry]:
    hidden, inner = config.hidden, config.intermediate
    heads = [(f"{source}attention.self.{part}", hidden) for part in ("query", "key", "value")]
    return [
        *linear_entries(f"{prefix}qkv", heads, hidden),
        *linear_entries(f"{prefix}output", [(f"{source}attention.output.dense", hidden)], hidden),
        _norm(f"{prefix}attention_norm", f"{source}attention.output.LayerNorm", hidden),
        *linear_entries(f"{prefix}up", [(f"{source}intermediate.dense", inner)], hidden),
        *linear_entries(f"{prefix}down", [(f"{source}output.dense", hidden)], inner),
        _norm(f"{prefix}norm", f"{source}output.LayerNorm", hidden),
    ]


def _norm(parameter: str, name: str, width: int) -> ParameterEntry:
    return entry(parameter, (f"{name}.weight", (width,)), (f"{name}.bias", (width,)))
