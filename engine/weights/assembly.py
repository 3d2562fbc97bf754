"""Tensors by name → the parameters of a decoder, in whichever format. It knows no files."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.bf12.codec import Bf12Weight, EscapeIndex
from engine.kernels.experts.mxfp4_weight import Mxfp4Weight
from engine.layers.fp8_weight import Fp8Weight
from engine.layers.linear_cpu import CpuLinear
from engine.layers.linear_ranks import FusedRankExchange, InputShardLinear, RankExchange, VocabularyShardHead
from engine.layers.mixture_cpu import CpuExperts, CpuMixture
from engine.models.decoder_config import ModelConfig
from engine.models.gemma import NORMS_BEHIND, GemmaLayer
from engine.models.llama import DecoderLayer, DecoderParameters, GatedMlp, Linear, LMHead, Mlp, NoHead, Projection
from engine.weights.formats import FIRSTS, PLACES, SCALES, VALUES, WORDS

AnyExchange = RankExchange | FusedRankExchange


def assemble_decoder(
    config: ModelConfig, tensors: dict[str, Tensor], beat: Callable[[], None], exchange: AnyExchange | None = None
) -> DecoderParameters:
    """Takes the tensors out of `tensors` one by one, so that the source of a repacked weight is freed at once. Calls
    `beat` after each layer. With an `exchange` the tensors are one rank's of several. A stage behind the first has
    layers alone: its embedding and its norm are empty."""
    is_first = "norm" in tensors
    embedding = _weight(tensors, "embedding") if is_first else torch.empty(0)
    layers = []
    for index in range(config.layers):
        layers.append(_layer(config, tensors, index, exchange))
        beat()
    if not is_first:
        return DecoderParameters(embedding, layers, torch.empty(0), NoHead())
    return DecoderParameters(embedding, layers, tensors.pop("norm"), _head(config, embedding, tensors, exchange))


def weights_bytes(parameters: DecoderParameters) -> int:
    """What the parameters occupy in memory; a tied head's copy counts where it is one."""
    embedding = parameters.embedding
    tensors = [parameters.norm]
    linears: list[LMHead | Projection | Mlp] = [parameters.head]
    for layer in parameters.layers:
        tensors += [layer.attention_norm, layer.mlp_norm]
        tensors += [] if layer.qk_norm is None else [layer.qk_norm]
        tensors += [getattr(layer, name) for name in NORMS_BEHIND if isinstance(layer, GemmaLayer)]
        tensors += [] if layer.sinks is None else [layer.sinks]
        linears += [layer.qkv, layer.output, layer.mlp]
    table_bytes = embedding.bytes if isinstance(embedding, Bf12Weight) else embedding.nbytes
    return table_bytes + sum(tensor.nbytes for tensor in tensors) + sum(linear.bytes for linear in linears)


def _layer(config: ModelConfig, tensors: dict[str, Tensor], index: int, exchange: AnyExchange | None) -> DecoderLayer:
    prefix = f"layers.{index}."
    parts: dict[str, Any] = {
        "attention_norm": tensors.pop(prefix + "attention_norm"),
        "qkv": _linear(tensors, prefix + "qkv"),
        "qk_norm": _stack_norms(config, tensors, prefix) if config.qk_norm else None,
        "output": _projection(tensors, prefix + "output", exchange),
        "mlp_norm": tensors.pop(prefix + "mlp_norm"),
        "mlp": (_mixture if config.has_experts(index) else _dense_mlp)(config, tensors, prefix, exchange),
        "sinks": tensors.pop(prefix + "sinks", None),
    }
    parts["packs"] = (_takes_packed(parts["qkv"]), _takes_packed(parts["mlp"]))
    norms_behind = {name: tensors.pop(prefix + name) for name in NORMS_BEHIND if prefix + name in tensors}
    return GemmaLayer(**(parts | norms_behind)) if norms_behind else DecoderLayer(**parts)


def _dense_mlp(config: ModelConfig, tensors: dict[str, Tensor], prefix: str, exchange: AnyExchange | None) -> GatedMlp:
    gate_up, down = _linear(tensors, prefix + "gate_up"), _projection(tensors, prefix + "down", exchange)
    if _takes_packed(gate_up) and _takes_packed(down):
        from engine.layers import linear_fp8  # only here: a CPU needs no Triton

        assert isinstance(gate_up, linear_fp8.Fp8Linear)
        gate_up.packs_gated = True
    return GatedMlp(gate_up, down, config.activation)


def _takes_packed(layer: object) -> bool:
    """Whether the rows of a layer of matmuls may be packed (kernels/packed_rows.py)."""
    first = layer.gate_up if isinstance(layer, GatedMlp) else layer
    return bool(getattr(first, "takes_packed", False))


def _mixture(config: ModelConfig, tensors: dict[str, Tensor], prefix: str, exchange: AnyExchange | None) -> Mlp:
    """A layer's experts, with what all rows take."""
    mixture = config.mixture
    assert mixture is not None
    rule, router = mixture.rule, _linear(tensors, prefix + "router")
    choice_bias_E = tensors.pop(prefix + "router.choice_bias", None)
    shared = _dense_mlp(config, tensors, prefix + "shared.", exchange) if mixture.shared else None
    (gate_up, gate_up_bias), (down, down_bias) = (
        (_expert_matrix(tensors, f"{prefix}experts.{name}.weight"), tensors.pop(f"{prefix}experts.{name}.bias", None))
        for name in ("gate_up", "down")
    )
    own = None if mixture.local is None or exchange is None else exchange.shard.of(rule.experts)
    if isinstance(router, CpuLinear):
        assert exchange is None or not exchange.fused
        assert isinstance(gate_up, Tensor)
        assert isinstance(down, Tensor)
        experts = CpuExperts((gate_up, gate_up_bias), (down, down_bias), rule, mixture.limit, exchange, own)
        return CpuMixture(router, choice_bias_E, rule, experts, shared, exchange)
    from engine.layers import mixture_gpu  # only here: a CPU needs no Triton

    if exchange is not None and exchange.shard.rank and own is None:
        down_bias = None  # it is part of the first rank's part
    on_gpu = mixture_gpu.GpuExperts((gate_up, gate_up_bias), (down, down_bias), rule, mixture.limit, own)
    return mixture_gpu.GpuMixture(router, choice_bias_E, rule, on_gpu, shared)


def _projection(tensors: dict[str, Tensor], name: str, exchange: AnyExchange | None) -> Projection:
    """A layer whose inputs are cut where there are several ranks."""
    if exchange is None:
        return _linear(tensors, name)
    if exchange.fused:  # the bias is part of the first rank's part
        bias_N = tensors.pop(name + ".bias", None)
        return _linear_of(_matrix(tensors, name + ".weight"), bias_N if exchange.shard.rank == 0 else None)
    return InputShardLinear(tensors.pop(name + ".weight"), tensors.pop(name + ".bias", None), exchange)


def _linear(tensors: dict[str, Tensor], name: str) -> Linear:
    return _linear_of(_matrix(tensors, name + ".weight"), tensors.pop(name + ".bias", None))


def _expert_matrix(tensors: dict[str, Tensor], name: str) -> Tensor | Bf12Weight | Fp8Weight | Mxfp4Weight:
    """All experts' weights, which may be in 4 bits a number too."""
    if name in tensors and tensors[name].dtype is torch.uint8:
        return Mxfp4Weight(tensors.pop(name), tensors.pop(name + SCALES))
    return _matrix(tensors, name)


def _matrix(tensors: dict[str, Tensor], name: str) -> Tensor | Bf12Weight | Fp8Weight:
    """A linear layer's weight, which may be in 8 bits a number too."""
    if name in tensors and name + SCALES in tensors:
        return Fp8Weight(tensors.pop(name), tensors.pop(name + SCALES))
    return _weight(tensors, name)


def _weight(tensors: dict[str, Tensor], name: str) -> Tensor | Bf12Weight:
    """The tensors of one weight put together, in whichever format (formats.py)."""
    if name in tensors:
        return tensors.pop(name)
    index = EscapeIndex(*(tensors.pop(name + part) for part in (SCALES, FIRSTS, PLACES, VALUES)))
    return Bf12Weight(tensors.pop(name + WORDS), index)


def _head(
    config: ModelConfig, embedding: Tensor | Bf12Weight, tensors: dict[str, Tensor], exchange: AnyExchange | None
) -> LMHead:
    if config.vectors:
        return NoHead()
    if exchange is not None:
        head = _linear_of(_tied(config, embedding, exchange), None) if config.tied_head else _linear(tensors, "head")
        if config.tied_head and exchange.fused:
            head.bytes = 0  # the embedding itself
        return VocabularyShardHead(head, exchange, config.vocabulary)
    if not config.tied_head:
        return _linear(tensors, "head")
    head = _linear_of(embedding, None)
    if isinstance(embedding, Bf12Weight) or embedding.is_cuda:
        head.bytes = 0  # the embedding itself, counted already; on a CPU it is a packed copy
    return head


def _tied(config: ModelConfig, embedding: Tensor | Bf12Weight, exchange: AnyExchange) -> Tensor | Bf12Weight:
    """The embedding of this rank's part of the vocabulary."""
    if exchange.fused:
        return embedding
    assert isinstance(embedding, Tensor)
    own = exchange.shard.of(config.vocabulary)
    return embedding[own.start : own.stop]


def _linear_of(weight_NK: Tensor | Bf12Weight | Fp8Weight, bias_N: Tensor | None) -> Linear:
    if isinstance(weight_NK, Fp8Weight):
        from engine.layers import linear_fp8  # as below

        return linear_fp8.Fp8Linear(weight_NK, bias_N)
    if isinstance(weight_NK, Bf12Weight) or weight_NK.is_cuda:
        from engine.layers import linear_gpu  # only here: a CPU needs no Triton

        if isinstance(weight_NK, Bf12Weight):
            return linear_gpu.Bf12Linear(weight_NK, bias_N)
        return linear_gpu.GpuLinear(weight_NK, bias_N)
    return CpuLinear(weight_NK, bias_N)


def _stack_norms(config: ModelConfig, tensors: dict[str, Tensor], prefix: str) -> Tensor:
    q_norm, k_norm = tensors.pop(prefix + "q_norm"), tensors.pop(prefix + "k_norm")
    return torch.cat((q_norm.expand(config.heads, -1), k_norm.expand(config.kv_heads, -1)))
