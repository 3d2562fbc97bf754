"""Trains Ember on generated text and writes the model folder. It knows tokens and weights, not what the text means.

Many processes generate and pack documents while one GPU learns. Matrices learn by Muon (momentum, orthogonalised),
the embedding and the norms by AdamW; the learning rate follows the clock, so that a run ends when its minutes do.

Shapes: T tokens of one packed batch · D hidden · H query heads · K key-value heads · S head size · V vocabulary.
"""

import argparse
import inspect
import json
import math
import multiprocessing
import queue
import time
from dataclasses import asdict, dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .tokenizer import BEGIN, CONTEXT_TOKENS, END, PAD, SPECIALS, VOCABULARY

PROMPT_WEIGHT: Final = 0.05  # of a token that Ember reads, against 1 for one that it says


@dataclass(frozen=True, slots=True)
class Shape:
    """The geometry of Ember; what config.json says."""

    vocab_size: int = VOCABULARY
    hidden_size: int = 384
    num_hidden_layers: int = 8
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 1024
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5


class Batch(NamedTuple):
    """Documents laid end to end. `starts` has one entry per slot and one more; unused slots are empty at the end."""

    tokens: np.ndarray  # uint16 [T]
    weights: np.ndarray  # uint8 [T]: 1 where the token is said by the assistant
    starts: np.ndarray  # int32 [slots + 1]
    longest: int


def rope_tables(shape: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [length, S] of the half-split rotation."""
    exponents = torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim
    angles = torch.outer(torch.arange(length, device=device).float(), shape.rope_theta**-exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x_THS: Tensor, cos_TS: Tensor, sin_TS: Tensor) -> Tensor:
    first, second = x_THS.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x_THS * cos_TS[:, None] + turned * sin_TS[:, None]).to(x_THS.dtype)


def attend(q_THS: Tensor, k_THS: Tensor, v_THS: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Causal attention inside each document."""
    if q_THS.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        named = inspect.signature(varlen_attn).parameters
        causal: dict[str, Any] = {"is_causal": True} if "is_causal" in named else {"window_size": (-1, 0)}
        mixed = varlen_attn(q_THS, k_THS, v_THS, starts, starts, longest, longest, **causal)
        assert isinstance(mixed, Tensor)
        return mixed
    total = q_THS.shape[0]
    place = torch.arange(total)
    document = torch.bucketize(place, starts[1:].long(), right=True)
    mask = (document[:, None] == document[None]) & (place[:, None] >= place[None])
    heads_first = [x.transpose(0, 1)[None] for x in (q_THS, k_THS, v_THS)]
    return F.scaled_dot_product_attention(*heads_first, attn_mask=mask)[0].transpose(0, 1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor, starts: Tensor, longest: int) -> Tensor:
        total, size = x_TD.shape[0], self.shape.head_dim
        q = rotate(self.q_proj(x_TD).view(total, -1, size), cos, sin)
        k = rotate(self.k_proj(x_TD).view(total, -1, size), cos, sin)
        v = self.v_proj(x_TD).view(total, -1, size)
        share = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        out: Tensor = self.o_proj(attend(q, k, v, starts, longest).reshape(total, -1))
        return out


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor, starts: Tensor, longest: int) -> Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), cos, sin, starts, longest)
        out: Tensor = x_TD + self.mlp(self.post_attention_layernorm(x_TD))
        return out


class Ember(nn.Module):
    """A Llama decoder whose parameters carry the checkpoint's names (below `model.`); the head is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def initialise(self, generator: torch.Generator) -> None:
        deep = 0.02 / math.sqrt(2 * self.shape.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                spread = deep if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
                nn.init.normal_(parameter, std=spread, generator=generator)

    def forward(self, tokens_T: Tensor, places_T: Tensor, starts: Tensor, longest: int, cos: Tensor, sin: Tensor) -> Tensor:
        x_TD: Tensor = self.embed_tokens(tokens_T)
        cos_TS, sin_TS = cos[places_T], sin[places_T]
        for layer in self.layers:
            x_TD = layer(x_TD, cos_TS, sin_TS, starts, longest)
        out: Tensor = self.norm(x_TD)
        return out

    def loss(self, tokens_T: Tensor, said_T: Tensor, starts: Tensor, longest: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """(the weighted loss that is learnt from, the plain loss of what the assistant says), both per token."""
        total = tokens_T.shape[0]
        place = torch.arange(total, device=tokens_T.device)
        document = torch.bucketize(place, starts[1:].long(), right=True)
        places_T = place - starts[document].long()
        x_TD = self(tokens_T, places_T.clamp(max=cos.shape[0] - 1), starts, longest, cos, sin)
        logits_TV = F.linear(x_TD, self.embed_tokens.weight).float()
        follows = torch.roll(tokens_T, -1)
        same = torch.roll(document, -1) == document
        said = torch.roll(said_T, -1).float()
        losses_T = F.cross_entropy(logits_TV, follows, reduction="none")
        weights_T = (said + PROMPT_WEIGHT * (1 - said)) * same
        said = said * same
        weighted = (losses_T * weights_T).sum() / weights_T.sum().clamp(min=1)
        return weighted, (losses_T.detach() * said).sum() / said.sum().clamp(min=1)


def orthogonalise(steps_NRC: Tensor) -> Tensor:
    """Five Newton–Schulz steps toward the nearest matrix with orthonormal rows or columns (Jordan et al., Muon, 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = steps_NRC.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


class Muon:
    """Momentum on matrices, orthogonalised; matrices of one shape take the step together."""

    def __init__(self, matrices: list[nn.Parameter], momentum: float = 0.95, decay: float = 0.05) -> None:
        self.momentum, self.decay = momentum, decay
        shapes = sorted({tuple(matrix.shape) for matrix in matrices})
        self.groups = [[matrix for matrix in matrices if tuple(matrix.shape) == shape] for shape in shapes]
        self.speeds = [torch.zeros(len(group), *group[0].shape, device=group[0].device) for group in self.groups]
        self.orthogonalise = torch.compile(orthogonalise) if matrices[0].is_cuda else orthogonalise

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group, speed in zip(self.groups, self.speeds, strict=True):
            slope = torch.stack([matrix.grad for matrix in group])  # type: ignore[misc]
            speed.lerp_(slope, 1 - self.momentum)
            turn = self.orthogonalise(slope.lerp(speed, self.momentum)).float()
            scale = rate * max(1.0, speed.shape[-2] / speed.shape[-1]) ** 0.5
            for matrix, change in zip(group, turn, strict=True):
                matrix.mul_(1 - rate * self.decay).add_(change, alpha=-scale)


def write_model(model: Ember, folder: Path) -> None:
    """config.json, generation_config.json and model.safetensors (bf16) in the Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    begin, end, pad = (SPECIALS.index(token) for token in (BEGIN, END, PAD))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(model.shape),
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_TOKENS,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": begin,
        "eos_token_id": end,
        "pad_token_id": pad,
        "torch_dtype": "bfloat16",
    }
    generation = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": pad, "do_sample": False}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    weights = {f"model.{name}": value.detach().bfloat16().cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def read_weights(model: Ember, folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): value.float() for name, value in stored.items()})
