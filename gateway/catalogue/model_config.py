"""config.json of a model's folder, as the gateway reads it: architecture, context, sizes. It knows no settings."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from gateway.text.tokenizer import ModelFolderError

_ENCODERS: Final = ("Bert", "Roberta", "XLMRoberta")


def read_json(path: Path, default: Any) -> Any:
    """The file's JSON; `default` where there is no such file. Raises ModelFolderError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return default
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path} is not readable as JSON: {error}") from error


def read_model_config(folder: Path) -> dict[str, Any]:
    """Raises ModelFolderError."""
    path = folder / "config.json"
    document = read_json(path, None)
    if document is None and not path.exists():
        raise ModelFolderError(f"{folder} has no config.json")
    if not isinstance(document, dict):
        raise ModelFolderError(f"{path} is no JSON object")
    return document


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first architecture, like `XLMRobertaForMaskedLM`; empty without one."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether the model reads a whole text at once, and keeps nothing of it."""
    return architecture_of(config).partition("For")[0].removesuffix("Model") in _ENCODERS


def context_of(config: Mapping[str, Any]) -> int:
    """Tokens of the longest text. RoBERTa's positions begin behind that of its padding."""
    context = int(config.get("max_position_embeddings") or 2048)
    if "Roberta" in architecture_of(config):
        context -= int(config.get("pad_token_id", 1)) + 1
    return context


class ModelGeometry(NamedTuple):
    """The sizes of a model's layers."""

    layers: int
    heads: int
    kv_heads: int
    head_width: int

    @property
    def kv_numbers_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_width

    def parameters(self, config: Mapping[str, Any]) -> int:
        """Counts the layers' linear weights, the embedding, and an untied head. Raises ModelFolderError."""
        try:
            hidden, inner, vocabulary = (
                int(config[name]) for name in ("hidden_size", "intermediate_size", "vocab_size")
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ModelFolderError(f"config.json does not say how large the model is: {error}") from error
        query, kv = self.head_width * self.heads, self.head_width * self.kv_heads
        tables = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
        return tables + self.layers * hidden * (2 * query + 2 * kv + 3 * inner)


def geometry_of(config: Mapping[str, Any]) -> ModelGeometry:
    """Raises ModelFolderError."""
    try:
        heads = int(config["num_attention_heads"])
        return ModelGeometry(
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_width=int(config.get("head_dim") or config["hidden_size"] // heads),
        )
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise ModelFolderError(f"config.json does not say how large the model is: {error}") from error
