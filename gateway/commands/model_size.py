"""How large a model is, from its folder's config.json, its files and the catalogue's settings. It reads no weights."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from gateway.catalogue.bf12_size import Bf12Size, read_bf12_size
from gateway.catalogue.catalogue import folder_of
from gateway.catalogue.tasks import context_of, is_encoder
from gateway.config import Config, ModelEntryConfig


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What a folder's config.json and weights and the entry's settings say. `weights_bytes` are on a GPU, and on a CPU
    where the folder is not `compressed`. `kv_bytes_per_token` is at 2 bytes a number, with fp8 at one. Weights that are
    made up have no type that they are stored as."""

    weights_bytes: int
    compressed: Bf12Size | None
    parameters_type: str
    context_tokens: int
    layers: int
    kv_bytes_per_token: int

    @property
    def kv_bytes_of_a_context(self) -> int:
        return self.context_tokens * self.kv_bytes_per_token

    @property
    def memory_bytes(self) -> int:
        """Weights, and the KV of one full context."""
        return self.weights_bytes + self.kv_bytes_of_a_context

    @property
    def stored_bytes(self) -> int:
        """Of the weights' files."""
        return self.weights_bytes if self.compressed is None else self.compressed.stored_bytes

    @property
    def on_a_cpu(self) -> Self:
        """A CPU expands what is compressed."""
        return self if self.compressed is None else replace(self, weights_bytes=self.compressed.original_bytes)

    @property
    def could_be_compressed(self) -> bool:
        return self.compressed is None and self.parameters_type == "bfloat16"


def sizes_of(config: Config, entry: ModelEntryConfig) -> ModelSizes | None:
    """None where the entry's folder is no model."""
    folder = folder_of(config, entry)
    said = read_config(folder)
    try:
        heads = int(said["num_attention_heads"])
        width = int(said.get("head_dim") or said["hidden_size"] // heads)
        layers = int(said["num_hidden_layers"])
        kv_heads = int(said.get("num_key_value_heads") or heads)
        made_up = _made_up_bytes(said, layers, width * heads, width * kv_heads) if entry.random_weights else None
    except (ValueError, KeyError, TypeError, ArithmeticError):
        return None
    compressed = None if entry.random_weights else read_bf12_size(folder)
    context, keeps = context_of(said), not is_encoder(said)
    return ModelSizes(
        weights_bytes=_weights_bytes(folder, entry, compressed, keeps) if made_up is None else made_up,
        compressed=compressed,
        parameters_type="" if entry.random_weights else str(said.get("torch_dtype") or said.get("dtype") or "float32"),
        context_tokens=min(context, entry.context_tokens or context),
        layers=layers,
        kv_bytes_per_token=keeps * 2 * layers * kv_heads * width * (1 if entry.kv_dtype == "fp8" else 2),
    )


def _weights_bytes(folder: Path, entry: ModelEntryConfig, compressed: Bf12Size | None, generates: bool) -> int:
    """On a GPU, which computes with 12 bits a number in models that generate, and beside others in bfloat16."""
    if compressed is not None:
        coded = generates and entry.dtype in ("auto", "bfloat16")
        return compressed.coded_bytes if coded else compressed.original_bytes
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json; empty where there is none that can be read."""
    try:
        said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _made_up_bytes(said: dict[str, Any], layers: int, q: int, kv: int) -> int:
    """At 2 bytes a number: the layers' linear weights, the embedding, and a head of its own."""
    hidden, inner = int(said["hidden_size"]), int(said["intermediate_size"])
    tables = int(said["vocab_size"]) * hidden * (1 if said.get("tie_word_embeddings") else 2)
    return 2 * (tables + layers * hidden * (2 * q + 2 * kv + 3 * inner))
