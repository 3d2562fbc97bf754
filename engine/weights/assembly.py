"""Tensors by parameter name → the parameters of a decoder. It knows the name table, and no files."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.layers import Bare, Head, Layer, Linear, Parameters
from engine.weights.names import Entry, entries
from engine.weights.storage import Dense


def allocate(table: Iterable[Entry], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """A tensor per entry of a name table, not yet written."""
    return {
        name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes(table, dtype).items()
    }


def shapes(table: Iterable[Entry], dtype: torch.dtype) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """What the entries of a name table become: their sources below each other. Norms are float32."""
    return {entry.parameter: (_shape(entry), _dtype(entry, dtype)) for entry in table}


def assemble(config: ModelConfig, tensors: dict[str, Tensor], beat: Callable[[], None]) -> Parameters:
    """Takes the tensors out of `tensors` one by one, so that what a linear layer packs anew is let go at once. Calls
    `beat` after each layer."""
    embedding = tensors.pop("embedding")
    layers = []
    for index in range(config.layers):
        layers.append(_layer(config, tensors, f"layers.{index}."))
        beat()
    return Parameters(embedding, layers, tensors.pop("norm"), _head(config, embedding, tensors))


def planned_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """What the tensors of a decoder will occupy."""
    return sum(shape.numel() * dtype.itemsize for shape, dtype in shapes(entries(config), dtype).values())


def weights_bytes(parameters: Parameters) -> int:
    """What the parameters occupy in memory; a tied head's copy counts where it is one."""
    tensors = [parameters.embedding, parameters.norm]
    linears: list[Head] = [parameters.head]
    for layer in parameters.layers:
        tensors += [layer.attention_norm, layer.mlp_norm]
        tensors += [] if layer.qk_norm is None else [layer.qk_norm]
        linears += [layer.qkv, layer.output, layer.gate_up, layer.down]
    return sum(tensor.nbytes for tensor in tensors) + sum(linear.bytes for linear in linears)


def is_norm(entry: Entry) -> bool:
    return entry.parameter.endswith("norm")


def _dtype(entry: Entry, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if is_norm(entry) else dtype


def _shape(entry: Entry) -> torch.Size:
    rows = sum(source.shape[0] for source in entry.sources)
    return torch.Size((rows, *entry.sources[0].shape[1:]))


def _layer(config: ModelConfig, tensors: dict[str, Tensor], ours: str) -> Layer:
    return Layer(
        attention_norm=tensors.pop(ours + "attention_norm"),
        qkv=_linear(tensors, ours + "qkv"),
        qk_norm=_each_head(config, tensors, ours) if config.qk_norm else None,
        output=_linear(tensors, ours + "output"),
        mlp_norm=tensors.pop(ours + "mlp_norm"),
        gate_up=_linear(tensors, ours + "gate_up"),
        down=_linear(tensors, ours + "down"),
    )


def _linear(tensors: dict[str, Tensor], name: str) -> Linear:
    return _stored(tensors.pop(name + ".weight"), tensors.pop(name + ".bias", None))


def _head(config: ModelConfig, embedding: Tensor, tensors: dict[str, Tensor]) -> Head:
    if config.vectors:
        return Bare()
    return _tied(embedding) if config.tied_head else _linear(tensors, "head")


def _tied(embedding: Tensor) -> Linear:
    """A GPU multiplies by the embedding itself, which is counted already; a CPU by a packed copy."""
    head = _stored(embedding, None)
    if embedding.is_cuda:
        head.bytes = 0
    return head


def _stored(weight_NK: Tensor, bias_N: Tensor | None) -> Linear:
    if weight_NK.is_cuda:
        from engine.weights.resident import Resident  # only here: a CPU needs no Triton

        return Resident(weight_NK, bias_N)
    return Dense(weight_NK, bias_N)


def _each_head(config: ModelConfig, tensors: dict[str, Tensor], ours: str) -> Tensor:
    q_norm, k_norm = tensors.pop(ours + "q_norm"), tensors.pop(ours + "k_norm")
    return torch.cat((q_norm.expand(config.heads, -1), k_norm.expand(config.kv_heads, -1)))
