"""An encoder's checkpoint names → its parameters. It reads no files.

BERT, RoBERTa and XLM-RoBERTa share one naming below a prefix of their own, which some checkpoints leave out.
"""

from collections.abc import Container
from typing import Final

from engine.models.config import ModelConfigError
from engine.models.encoder_config import EncoderConfig
from engine.models.weight_names import ParameterEntry, TensorSource

_PREFIXES: Final = ("", "bert.", "roberta.")
_HEADS: Final = ("cls.", "lm_head.")  # of what they were trained with


def encoder_prefix(names: Container[str]) -> str:
    """The prefix of the encoder's own names among these. Raises ModelConfigError where the names are no encoder's."""
    for prefix in _PREFIXES:
        if prefix + "embeddings.word_embeddings.weight" in names:
            return prefix
    raise ModelConfigError(
        "the checkpoint has no embeddings.word_embeddings.weight: it is not of the kind config.json says"
    )


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
        entries += _layer(config, f"{prefix}encoder.layer.{layer}.", f"layers.{layer}.")
    if config.scores:
        dense, out = ("classifier.dense", "classifier.out_proj") if config.roberta else (f"{prefix}pooler.dense", "")
        entries += _linear("pooler", [dense], hidden, hidden)
        entries += _linear("score", [out or "classifier"], hidden, 1)
    return entries


def is_unused_encoder_tensor(config: EncoderConfig, prefix: str, name: str) -> bool:
    """Tensors that checkpoints carry and this model has no use for: positions written out, and other heads."""
    unused_pooler = not config.scores and name.startswith(f"{prefix}pooler.")
    return name.endswith("embeddings.position_ids") or unused_pooler or name.startswith(_HEADS)


def _layer(config: EncoderConfig, source: str, prefix: str) -> list[ParameterEntry]:
    hidden, inner = config.hidden, config.intermediate
    heads = [f"{source}attention.self.{which}" for which in ("query", "key", "value")]
    return [
        *_linear(f"{prefix}qkv", heads, hidden, hidden),
        *_linear(f"{prefix}output", [f"{source}attention.output.dense"], hidden, hidden),
        _norm(f"{prefix}attention_norm", f"{source}attention.output.LayerNorm", hidden),
        *_linear(f"{prefix}up", [f"{source}intermediate.dense"], hidden, inner),
        *_linear(f"{prefix}down", [f"{source}output.dense"], inner, hidden),
        _norm(f"{prefix}norm", f"{source}output.LayerNorm", hidden),
    ]


def _entry(parameter: str, *sources: tuple[str, tuple[int, ...]]) -> ParameterEntry:
    return ParameterEntry(parameter, tuple(TensorSource(name, shape) for name, shape in sources))


def _norm(parameter: str, name: str, width: int) -> ParameterEntry:
    return _entry(parameter, (f"{name}.weight", (width,)), (f"{name}.bias", (width,)))


def _linear(parameter: str, parts: list[str], inputs: int, outputs: int) -> list[ParameterEntry]:
    return [
        _entry(f"{parameter}.weight", *((f"{name}.weight", (outputs, inputs)) for name in parts)),
        _entry(f"{parameter}.bias", *((f"{name}.bias", (outputs,)) for name in parts)),
    ]
