"""Reads what a model's config.json says, of a decoder or an encoder.

It knows the architectures by name, and leaves what each decoder's family means to families.py.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from engine.models.decoder_config import (
    ROPE_KINDS,
    ModelConfig,
    ModelConfigError,
    RopeConfig,
    positive_int,
)
from engine.models.families import FAMILIES
from engine.models.quantization import fp8_scales

__all__ = ["ROPE_KINDS", "ModelConfig", "ModelConfigError", "RopeConfig"]


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


DECODER_ARCHITECTURES: Final = tuple(FAMILIES)
HEADLESS: Final = {f"{family}Model": f"{family}ForCausalLM" for family in ("Llama", "Mistral", "Qwen2", "Qwen3")}
_SCORING: Final = ("BertForSequenceClassification", *(f"{x}RobertaForSequenceClassification" for x in ("", "XLM")))
ENCODER_ARCHITECTURES: Final = (
    *("BertModel", "BertForMaskedLM", "RobertaModel", "RobertaForMaskedLM", "XLMRobertaModel", "XLMRobertaForMaskedLM"),
    *_SCORING,
)
ACTIVATIONS: Final = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


def read_decoder_config(folder: Path, *, vectors: bool = False) -> ModelConfig:
    """Reads the folder's config.json, with stop ids from generation_config.json where it has them; without its head
    where the model is to give vectors. Raises ModelConfigError."""
    config = read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    stop = generation.get("eos_token_id")
    parsed = parse_decoder_config(config, stop)
    if parsed.vectors and not vectors:
        raise ModelConfigError(
            f"{folder} is a model without a head, which gives vectors: set its task to Text Embeddings"
        )
    return replace(parsed, vectors=vectors)


def parse_decoder_config(config: Mapping[str, Any], stop: int | list[int] | None = None) -> ModelConfig:
    """Stop ids are the config's where there are no others. Raises ModelConfigError for what this engine does not run,
    and names the entry."""
    architecture = _architecture(config, DECODER_ARCHITECTURES)
    entries = text_entries(config) | {"architectures": [architecture]}
    parsed = FAMILIES[architecture].config(entries)
    stop = entries.get("eos_token_id") if stop is None else stop
    return replace(
        parsed, stop_ids=_stop_ids(stop, parsed.vocabulary), vectors=config["architectures"][0] in HEADLESS,
        fp8=fp8_scales(entries, architecture),
    )  # fmt: skip


def text_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries with those of text_config, where a model of several modalities has its decoder's."""
    nested = config.get("text_config") or {}
    if not isinstance(nested, Mapping):
        raise ModelConfigError(f"text_config must be an object, not {nested!r}")
    return {**config, **{name: value for name, value in nested.items() if value is not None}}


def is_encoder(folder: Path) -> bool:
    """Whether config.json names one of ENCODER_ARCHITECTURES. Raises ModelConfigError where there is no such file."""
    named = read_json(folder / "config.json").get("architectures") or []
    return bool(named) and named[0] in ENCODER_ARCHITECTURES


def read_encoder_config(folder: Path) -> EncoderConfig:
    """Raises ModelConfigError."""
    return parse_encoder_config(read_json(folder / "config.json"))


def parse_encoder_config(config: Mapping[str, Any]) -> EncoderConfig:
    """Raises ModelConfigError for what this engine does not run, and says what would do."""
    architecture = _architecture(config, ENCODER_ARCHITECTURES)
    if config.get("quantization_config"):
        raise ModelConfigError("quantization_config is set: encoders are served in bf16, f16 and f32")
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
    hidden, heads = positive_int(config, "hidden_size"), positive_int(config, "num_attention_heads")
    if hidden % heads:
        raise ModelConfigError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    padding = config.get("pad_token_id", 1)
    if roberta and (type(padding) is not int or padding < 0):
        raise ModelConfigError(f"pad_token_id must be a token id, not {padding!r}")
    first_position = padding + 1 if roberta else 0
    positions = positive_int(config, "max_position_embeddings")
    if positions <= first_position:
        raise ModelConfigError(f"max_position_embeddings {positions} leaves no place behind pad_token_id")
    return EncoderConfig(
        roberta=roberta,
        vocabulary=positive_int(config, "vocab_size"),
        hidden=hidden,
        layers=positive_int(config, "num_hidden_layers"),
        heads=heads,
        intermediate=positive_int(config, "intermediate_size"),
        norm_epsilon=float(config.get("layer_norm_eps", 1e-12)),
        first_position=first_position,
        positions=positions,
        types=positive_int(config, "type_vocab_size", 2),
        activation=activation,
        scores=scores,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def _architecture(config: Mapping[str, Any], runnable: tuple[str, ...]) -> str:
    """The one of `runnable` that the file names; that of a model without its head is the whole family's."""
    named = [HEADLESS.get(name, name) for name in config.get("architectures") or []]
    if len(named) != 1 or named[0] not in runnable:
        raise ModelConfigError(f"architectures {named!r} is not supported; one of {', '.join(runnable)} is")
    return str(named[0])


def _stop_ids(stop: int | list[int] | None, vocabulary: int) -> tuple[int, ...]:
    listed = [] if stop is None else [stop] if isinstance(stop, int) else stop
    return tuple(token for token in listed if isinstance(token, int) and 0 <= token < vocabulary)


def read_json(path: Path) -> dict[str, Any]:
    """Raises ModelConfigError."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelConfigError(f"{path} is missing: a model folder holds config.json and safetensors files") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelConfigError(f"{path} holds no JSON object")
    return parsed
