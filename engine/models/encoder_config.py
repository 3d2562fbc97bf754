"""What an encoder's config.json says, as one frozen value. It knows the families by their `architectures` entry.

It knows no tensor names, and nothing of how texts are chosen for a step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.models.config import ModelConfigError, positive_entry, read_json

_SCORING: Final = ("BertForSequenceClassification", *(f"{x}RobertaForSequenceClassification" for x in ("", "XLM")))
ENCODER_ARCHITECTURES: Final = (
    *("BertModel", "BertForMaskedLM", "RobertaModel", "RobertaForMaskedLM", "XLMRobertaModel", "XLMRobertaForMaskedLM"),
    *_SCORING,
)
ACTIVATIONS: Final = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """An encoder of the BERT kind.

    first_position  of a text's first token, in the table of positions: RoBERTa's count from behind the padding's.
    positions       rows of that table.
    types           rows of the table that says which of two texts a token is of.
    activation      of ACTIVATIONS.
    scores          it ends in a head that gives one number for a pair of texts.
    dtype           the weights', as the file says.
    """

    roberta: bool
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    intermediate: int
    norm_epsilon: float
    first_position: int
    positions: int
    types: int
    activation: str
    scores: bool
    dtype: str

    @property
    def context_tokens(self) -> int:
        """The longest text, control tokens included."""
        return self.positions - self.first_position


def is_encoder(folder: Path) -> bool:
    """Whether the folder's config.json names one of ENCODER_ARCHITECTURES. Raises ModelConfigError where there is
    none."""
    named = read_json(folder / "config.json").get("architectures") or []
    return bool(named) and named[0] in ENCODER_ARCHITECTURES


def read_encoder_config(folder: Path) -> EncoderConfig:
    """Raises ModelConfigError."""
    return parse_encoder_config(read_json(folder / "config.json"))


def parse_encoder_config(config: Mapping[str, Any]) -> EncoderConfig:
    """Raises ModelConfigError for what this engine does not run, and says what would do."""
    named = config.get("architectures") or []
    if len(named) != 1 or named[0] not in ENCODER_ARCHITECTURES:
        raise ModelConfigError(
            f"architectures {named!r} is not supported; one of {', '.join(ENCODER_ARCHITECTURES)} is"
        )
    if config.get("quantization_config"):
        raise ModelConfigError(
            "quantization_config is set: quantised checkpoints are not supported, bf16, f16 and f32 are"
        )
    architecture = str(named[0])
    roberta, scores = "Roberta" in architecture, architecture in _SCORING
    for entry, served in (("position_embedding_type", "absolute"), ("is_decoder", False)):
        if config.get(entry, served) != served:
            raise ModelConfigError(f"{entry} {config[entry]!r} is not supported; {served!r} is")
    activation = str(config.get("hidden_act", "gelu"))
    if activation not in ACTIVATIONS:
        raise ModelConfigError(f"hidden_act {activation!r} is not supported; one of {', '.join(ACTIVATIONS)} is")
    labels = len(config["id2label"]) if config.get("id2label") else int(config.get("num_labels") or 2)
    if scores and labels != 1:
        raise ModelConfigError(f"the model has {labels} labels; a model that scores pairs of texts has one")
    hidden, heads = positive_entry(config, "hidden_size"), positive_entry(config, "num_attention_heads")
    if hidden % heads:
        raise ModelConfigError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    first_position = _padding(config) + 1 if roberta else 0
    positions = positive_entry(config, "max_position_embeddings")
    if positions <= first_position:
        raise ModelConfigError(f"max_position_embeddings {positions} leaves no place behind pad_token_id")
    return EncoderConfig(
        roberta=roberta,
        vocabulary=positive_entry(config, "vocab_size"),
        hidden=hidden,
        layers=positive_entry(config, "num_hidden_layers"),
        heads=heads,
        intermediate=positive_entry(config, "intermediate_size"),
        norm_epsilon=float(config.get("layer_norm_eps", 1e-12)),
        first_position=first_position,
        positions=positions,
        types=positive_entry(config, "type_vocab_size", 2),
        activation=activation,
        scores=scores,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def _padding(config: Mapping[str, Any]) -> int:
    padding = config.get("pad_token_id", 1)
    if not isinstance(padding, int) or isinstance(padding, bool) or padding < 0:
        raise ModelConfigError(f"pad_token_id must be a token id, not {padding!r}")
    return padding
