"""How large a model is, from its folder's config.json, its files and the catalogue's settings. It reads no weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from gateway.catalogue.bf12_size import Bf12Size, read_bf12_size
from gateway.catalogue.catalogue import folder_of
from gateway.catalogue.model_config import context_of, expanded_bytes, geometry_of, is_encoder, read_model_config
from gateway.settings.config import Config, ModelEntryConfig
from gateway.text.tokenizer import ModelFolderError

_RANDOM_NUMBER_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes by a folder's config.json and weights and the entry's settings.

    weights_bytes        on a GPU, and on a CPU where the folder is not `compressed`.
    parameters_type      that the weights are stored as; empty for random ones.
    kv_bytes_per_token   at 2 bytes a number, with fp8 at one, while no layer's window is full,
    kv_bytes_of          and of a context of so many tokens.
    """

    weights_bytes: int
    compressed: Bf12Size | None
    parameters_type: str
    context_tokens: int
    layers: int
    kv_bytes_per_token: int
    kv_bytes_of: Callable[[int], int]

    @property
    def kv_bytes_of_a_context(self) -> int:
        return self.kv_bytes_of(self.context_tokens)

    @property
    def memory_bytes(self) -> int:
        """Weights, and the KV of one full context."""
        return self.weights_bytes + self.kv_bytes_of_a_context

    @property
    def stored_bytes(self) -> int:
        """What the weights' files take."""
        return self.weights_bytes if self.compressed is None else self.compressed.stored_bytes

    @property
    def on_a_cpu(self) -> Self:
        """The sizes on a CPU, which expands compressed weights."""
        return self if self.compressed is None else replace(self, weights_bytes=self.compressed.original_bytes)

    @property
    def could_be_compressed(self) -> bool:
        return self.compressed is None and self.parameters_type == "bfloat16"


def sizes_of(config: Config, entry: ModelEntryConfig) -> ModelSizes | None:
    """None where the entry's folder is no model."""
    folder = folder_of(config, entry)
    try:
        model_config = read_model_config(folder)
        geometry = geometry_of(model_config)
        random_bytes = _RANDOM_NUMBER_BYTES * geometry.parameters(model_config) if entry.random_weights else None
        expanded = expanded_bytes(model_config, on_cpu=False)
        context = context_of(model_config)
    except (ModelFolderError, ValueError):
        return None
    compressed = None if entry.random_weights else read_bf12_size(folder)
    generates = not is_encoder(model_config)
    tokens, number_bytes = min(context, entry.context_tokens or context), 1 if entry.kv_dtype == "fp8" else 2
    stored_type = str(model_config.get("torch_dtype") or model_config.get("dtype") or "float32")
    return ModelSizes(
        weights_bytes=random_bytes or expanded or _weights_bytes(folder, entry, compressed, generates),
        compressed=compressed,
        parameters_type="" if entry.random_weights else stored_type,
        context_tokens=tokens,
        layers=geometry.layers,
        kv_bytes_per_token=generates * geometry.kv_numbers_per_token * number_bytes,
        kv_bytes_of=lambda tokens: generates * geometry.kv_numbers(tokens) * number_bytes,
    )


def _weights_bytes(folder: Path, entry: ModelEntryConfig, compressed: Bf12Size | None, generates: bool) -> int:
    """Bytes on a GPU, which computes with 12 bits a number only for models that generate text in bfloat16."""
    if compressed is not None:
        coded = generates and entry.dtype in ("auto", "bfloat16")
        return compressed.coded_bytes if coded else compressed.original_bytes
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
