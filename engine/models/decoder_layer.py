"""The shapes a decoder is made of: what a linear weight is to the maths, one layer's parameters, rotary tables.

It knows no checkpoint names, no dtypes on disk, no sharding.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.bf12.codec import Bf12Weight
from engine.models.config import RopeConfig


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


class LMHead(Protocol):
    """What becomes of the last norm: [T, V] in float32 on a CPU. It takes `bytes`."""

    bytes: int

    def logits(self, x_TK: Tensor) -> Tensor: ...


class NoHead:
    """The head of a model that gives vectors: there is none, and what is normed is the result."""

    bytes = 0

    def logits(self, x_TK: Tensor) -> Tensor:
        return x_TK.float()


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
    kept = (rope.original_context_tokens / wavelength - rope.low_frequency_factor) / span
    blended = (1 - kept) * plain / rope.factor + kept * plain
    stretched = torch.where(wavelength > low_wavelength, plain / rope.factor, plain)
    between = (wavelength <= low_wavelength) & (wavelength >= high_wavelength)
    return torch.where(between, blended, stretched)


def rope_tables(rope: RopeConfig, head_dim: int, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [positions, head_dim], both halves written out; sin's first half is negated."""
    angles = torch.outer(torch.arange(positions).float(), inverse_frequencies(rope, head_dim))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
