"""Tensors by name → the parameters of a decoder, in whichever format. It knows no files."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.bf12.codec import Bf12Weight, EscapeIndex
from engine.layers.linear_cpu import CpuLinear
from engine.models.config import ModelConfig
from engine.models.llama import DecoderLayer, DecoderParameters, Linear, LMHead, NoHead
from engine.weights.formats import FIRSTS, PLACES, SCALES, VALUES, WORDS


def assemble_decoder(config: ModelConfig, tensors: dict[str, Tensor], beat: Callable[[], None]) -> DecoderParameters:
    """Takes the tensors out of `tensors` one by one, so that the source of a repacked weight is freed at once. Calls
    `beat` after each layer."""
    embedding = _weight(tensors, "embedding")
    layers = []
    for index in range(config.layers):
        layers.append(_layer(config, tensors, f"layers.{index}."))
        beat()
    return DecoderParameters(embedding, layers, tensors.pop("norm"), _head(config, embedding, tensors))


def weights_bytes(parameters: DecoderParameters) -> int:
    """What the parameters occupy in memory; a tied head's copy counts where it is one."""
    embedding = parameters.embedding
    tensors = [parameters.norm]
    linears: list[LMHead] = [parameters.head]
    for layer in parameters.layers:
        tensors += [layer.attention_norm, layer.mlp_norm]
        tensors += [] if layer.qk_norm is None else [layer.qk_norm]
        linears += [layer.qkv, layer.output, layer.gate_up, layer.down]
    table_bytes = embedding.bytes if isinstance(embedding, Bf12Weight) else embedding.nbytes
    return table_bytes + sum(tensor.nbytes for tensor in tensors) + sum(linear.bytes for linear in linears)


def _layer(config: ModelConfig, tensors: dict[str, Tensor], prefix: str) -> DecoderLayer:
    return DecoderLayer(
        attention_norm=tensors.pop(prefix + "attention_norm"),
        qkv=_linear(tensors, prefix + "qkv"),
        qk_norm=_stack_norms(config, tensors, prefix) if config.qk_norm else None,
        output=_linear(tensors, prefix + "output"),
        mlp_norm=tensors.pop(prefix + "mlp_norm"),
        gate_up=_linear(tensors, prefix + "gate_up"),
        down=_linear(tensors, prefix + "down"),
    )


def _linear(tensors: dict[str, Tensor], name: str) -> Linear:
    return _linear_of(_weight(tensors, name + ".weight"), tensors.pop(name + ".bias", None))


def _weight(tensors: dict[str, Tensor], name: str) -> Tensor | Bf12Weight:
    """The tensors of one weight put together, in whichever format (formats.py)."""
    if name in tensors:
        return tensors.pop(name)
    index = EscapeIndex(*(tensors.pop(name + part) for part in (SCALES, FIRSTS, PLACES, VALUES)))
    return Bf12Weight(tensors.pop(name + WORDS), index)


def _head(config: ModelConfig, embedding: Tensor | Bf12Weight, tensors: dict[str, Tensor]) -> LMHead:
    if config.vectors:
        return NoHead()
    if not config.tied_head:
        return _linear(tensors, "head")
    head = _linear_of(embedding, None)
    if isinstance(embedding, Bf12Weight) or embedding.is_cuda:
        head.bytes = 0  # the embedding itself, counted already; on a CPU it is a packed copy
    return head


def _linear_of(weight_NK: Tensor | Bf12Weight, bias_N: Tensor | None) -> Linear:
    if isinstance(weight_NK, Bf12Weight) or weight_NK.is_cuda:
        from engine.layers import linear_gpu  # only here: a CPU needs no Triton

        if isinstance(weight_NK, Bf12Weight):
            return linear_gpu.Bf12Linear(weight_NK, bias_N)
        return linear_gpu.GpuLinear(weight_NK, bias_N)
    return CpuLinear(weight_NK, bias_N)


def _stack_norms(config: ModelConfig, tensors: dict[str, Tensor], prefix: str) -> Tensor:
    q_norm, k_norm = tensors.pop(prefix + "q_norm"), tensors.pop(prefix + "k_norm")
    return torch.cat((q_norm.expand(config.heads, -1), k_norm.expand(config.kv_heads, -1)))
