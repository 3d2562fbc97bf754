"""A decoder-only transformer: its parameters, and embedding, layers, norm, head as plain maths over a packed step.

It does not know how a linear weight is stored, nor where a step's rows and keys lie and what computes them: a
ForwardStep does. It knows no checkpoint names and no dtypes on disk.

T rows of the step, R rows whose logits are wanted, H hidden size, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.bf12.codec import Bf12Weight
from engine.kvcache.tensors import KVShape
from engine.models.config import ModelConfig, RopeConfig


class Linear(Protocol):
    """A stored weight that can multiply: x_TK → [T, N], or parts [P, T, N] that whoever takes them adds up.

    How it is stored is its own business; it takes `bytes`.
    """

    bytes: int

    def __call__(self, x_TK: Tensor) -> Tensor: ...

    def swiglu(self, x_TK: Tensor) -> Tensor:
        """silu of the first half of the outputs times the second half, [T, N ÷ 2]."""
        ...

    def logits(self, x_TK: Tensor) -> Tensor:
        """[T, N], in one part, as sampling takes it."""
        ...


class NoHead:
    """The head of a model that gives vectors: there is none, and what is normed is the result."""

    bytes = 0

    def logits(self, x_TK: Tensor) -> Tensor:
        return x_TK.float()


LMHead = Linear | NoHead
"""What becomes of the last norm: [T, V] in float32 on a CPU."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One block's parameters. q, k and v are one matmul, gate and up another; the norms' weights are float32.

    `qk_norm` is [heads + KV heads, head size]: each head's row, so that q and k are normed at once.
    """

    attention_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class DecoderParameters:
    """All parameters of a decoder: `embedding` is [vocabulary, hidden], on a GPU in 12 bits a number where its file
    has it so; `head` multiplies to the vocabulary where there is one."""

    embedding: Tensor | Bf12Weight
    layers: list[DecoderLayer]
    norm: Tensor
    head: LMHead


class ForwardStep(Protocol):
    """A packed step on its way through the layers, on some device: a sum of T rows in float32, and what is done to it.

    What a linear layer gives need not be summed up yet (gpu_step.py): it is only ever handed on to the step.
    """

    def embed(self, embedding: Tensor | Bf12Weight) -> None:
        """Begins the sum with the tokens' embeddings."""
        ...

    def add_norm(self, added: Tensor | None, weight_H: Tensor) -> Tensor:
        """Adds to the sum, and gives its RMS norm in the model's dtype, [T, H]."""
        ...

    def rotate_and_write(self, qkv: Tensor, qk_norm: Tensor | None, layer: int) -> Tensor:
        """Norms (where the model does) and rotates q and k, writes K and V of the layer, gives q, [T, heads, D]."""
        ...

    def attend(self, q_THD: Tensor, layer: int) -> Tensor:
        """Each row's attention over its context, [T, heads · D]; the last layer's stays until the rows are narrowed."""
        ...

    def narrow(self) -> Tensor:
        """Goes on with the R wanted rows alone, of the sum and of the last layer's attention, which it gives."""
        ...


class LlamaDecoder:
    """The model's forward pass."""

    def __init__(self, parameters: DecoderParameters) -> None:
        self.parameters = parameters

    def body(self, step: ForwardStep, beat: Callable[[], None]) -> None:
        """Computes every layer, of the last one what writes K and V, and its attention. Calls `beat` after each."""
        step.embed(self.parameters.embedding)
        added, last = None, len(self.parameters.layers) - 1
        for index, layer in enumerate(self.parameters.layers):
            q_THD = step.rotate_and_write(layer.qkv(step.add_norm(added, layer.attention_norm)), layer.qk_norm, index)
            attended_TW = step.attend(q_THD, index)
            if index < last:
                added = self._behind_attention(step, layer, attended_TW)
            beat()

    def head(self, step: ForwardStep) -> Tensor:
        """The wanted rows' logits, [R, V]: what is left of the last layer is of use to them alone."""
        added = self._behind_attention(step, self.parameters.layers[-1], step.narrow())
        return self.parameters.head.logits(step.add_norm(added, self.parameters.norm))

    def _behind_attention(self, step: ForwardStep, layer: DecoderLayer, attended_TW: Tensor) -> Tensor:
        added = layer.output(attended_TW)
        return layer.down(layer.gate_up.swiglu(step.add_norm(added, layer.mlp_norm)))


def kv_shape(config: ModelConfig, block_tokens: int, dtype: torch.dtype) -> KVShape:
    """What each slot of the model's KV cache holds."""
    return KVShape(config.layers, config.kv_heads, config.head_dim, block_tokens, dtype)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """float32 [head_dim ÷ 2]: how fast each pair turns per position."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "default":
        return plain
    # llama3: long waves are stretched by the factor, short ones kept, those between blended.
    wavelength = 2 * math.pi / plain
    low_wavelength = rope.original_context_tokens / rope.low_frequency_factor
    high_wavelength = rope.original_context_tokens / rope.high_frequency_factor
    span = rope.high_frequency_factor - rope.low_frequency_factor
    smooth = (rope.original_context_tokens / wavelength - rope.low_frequency_factor) / span
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    stretched = torch.where(wavelength > low_wavelength, plain / rope.factor, plain)
    between = (wavelength <= low_wavelength) & (wavelength >= high_wavelength)
    return torch.where(between, blended, stretched)


def rope_tables(rope: RopeConfig, head_dim: int, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [positions, head_dim], both halves written out; sin's first half is negated."""
    angles = torch.outer(torch.arange(positions).float(), inverse_frequencies(rope, head_dim))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
