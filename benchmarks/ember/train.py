"""Trains Ember on generated text and writes the model folder. It knows tokens and weights, not what the text means.

Many processes generate and pack documents while one GPU learns. Matrices learn by Muon (momentum, orthogonalised),
the embedding and the norms by AdamW; the learning rate follows the clock, so that a run ends when its minutes do.

Shapes: T tokens of one packed batch · D hidden · H query heads · K key-value heads · S head size · V vocabulary.
"""

import argparse
import collections
import inspect
import json
import math
import multiprocessing
import os
import queue
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from benchmarks.ember import corpus
from benchmarks.ember.tokenizer import BEGIN, CONTEXT_TOKENS, END, PAD, SPECIALS, VOCABULARY
from benchmarks.ember.values import Draw

PROMPT_WEIGHT: Final = 0.05  # of a token that Ember reads, against 1 for one that it says
BATCH_TOKENS: Final = 131_072
SLOTS: Final = 1024  # documents in a batch
SHORT, LONG = 3072, CONTEXT_TOKENS  # the longest document of a usual batch, and of a long one
LONG_EVERY: Final = 16
READ, SAID, NOTHING = 0, 1, 2
QUEUED: Final = 64  # batches waiting for the GPU
KEPT: Final = 512  # batches kept to learn from again when no fresh one is ready


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
    said: np.ndarray  # uint8 [T]: SAID where the assistant says the token, READ or NOTHING elsewhere
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
    q_HTS, k_HTS, v_HTS = (x.transpose(0, 1) for x in (q_THS, k_THS, v_THS))
    return F.scaled_dot_product_attention(q_HTS[None], k_HTS[None], v_HTS[None], attn_mask=mask)[0].transpose(0, 1)


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

    def forward(
        self, tokens_T: Tensor, places_T: Tensor, starts: Tensor, longest: int, cos: Tensor, sin: Tensor
    ) -> Tensor:
        x_TD: Tensor = self.embed_tokens(tokens_T)
        cos_TS, sin_TS = cos[places_T], sin[places_T]
        for layer in self.layers:
            x_TD = layer(x_TD, cos_TS, sin_TS, starts, longest)
        out: Tensor = self.norm(x_TD)
        return out

    def loss(
        self, tokens_T: Tensor, said_T: Tensor, starts: Tensor, longest: int, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(the weighted loss that is learnt from, the plain loss of what the assistant says), both per token."""
        total = tokens_T.shape[0]
        place = torch.arange(total, device=tokens_T.device)
        document = torch.bucketize(place, starts[1:].long(), right=True)
        places_T = place - starts[document].long()
        x_TD = self(tokens_T, places_T.clamp(max=cos.shape[0] - 1), starts, longest, cos, sin)
        logits_TV = F.linear(x_TD, self.embed_tokens.weight).float()
        follows = torch.roll(tokens_T, -1)
        same = torch.roll(document, -1) == document
        following = torch.roll(said_T, -1)
        said, read = (following == SAID).float(), (following == READ).float()
        losses_T = F.cross_entropy(logits_TV, follows, reduction="none")
        weights_T = (said + PROMPT_WEIGHT * read) * same
        said = said * same
        weighted = (losses_T * weights_T).sum() / weights_T.sum().clamp(min=1)
        return weighted, (losses_T.detach() * said).sum() / said.sum().clamp(min=1)


def orthogonalise(steps_NRC: Tensor) -> Tensor:
    """Five Newton–Schulz steps toward the nearest matrix with orthonormal rows or columns (Jordan et al., Muon, 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x: Tensor = steps_NRC.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    out: Tensor = x.mT if tall else x
    return out


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
    weights = {
        f"model.{name}": value.detach().bfloat16().cpu().contiguous() for name, value in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def read_weights(model: Ember, folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): value.float() for name, value in stored.items()})


# -- batches --------------------------------------------------------------------------------------------------------


def encoded(tokenizer: Tokenizer, conversation: corpus.Conversation) -> tuple[list[int], list[int]]:
    """Token ids and, for each, READ or SAID. Control tokens and contents are encoded apart, as the gateway does."""
    ids, said = [SPECIALS.index(BEGIN)], [READ]
    if conversation.plain:
        body = [*tokenizer.encode(conversation.plain, add_special_tokens=False).ids, SPECIALS.index(END)]
        return ids + body, said + [SAID] * len(body)
    turns = list(corpus.segments(conversation))
    contents = tokenizer.encode_batch([content for _, content, _ in turns], add_special_tokens=False)
    for (control, _, speaks), content in zip(turns, contents, strict=True):
        ids += [SPECIALS.index(control), *content.ids, SPECIALS.index(END)]
        said += [READ] + [SAID if speaks else READ] * (len(content.ids) + 1)
    return ids, said


def pack(tokenizer: Tokenizer, seed: str, reach: int, longest: int, total: int = BATCH_TOKENS) -> Batch:
    """A batch of fresh documents. The last is cut; where the slots run out, the rest is PAD."""
    tokens = np.full(total, SPECIALS.index(PAD), dtype=np.uint16)
    said = np.full(total, NOTHING, dtype=np.uint8)
    starts, filled, number = [0], 0, 0
    padding = total // longest + 1
    while filled < total and len(starts) < SLOTS - padding:
        document = corpus.document(Draw(f"{seed} {number}"), reach)
        number += 1
        ids, speaks = encoded(tokenizer, document)
        if len(ids) > longest:
            continue
        fits = min(len(ids), total - filled)
        tokens[filled : filled + fits] = ids[:fits]
        said[filled : filled + fits] = speaks[:fits]
        filled += fits
        starts.append(filled)
    while filled < total:
        filled = min(filled + longest, total)
        starts.append(filled)
    starts += [total] * (SLOTS + 1 - len(starts))
    return Batch(tokens, said, np.array(starts, dtype=np.int32), longest)


def produce(folder: Path, seed: str, reach: Any, made: Any) -> None:
    """One process's life: batches into the queue until it is ended. `reach` is shared and grows with the training."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    number = 0
    while True:
        number += 1
        long = number % LONG_EVERY == 0 and reach.value > 1000
        made.put(pack(tokenizer, f"{seed} {number}", 4 * reach.value if long else reach.value, LONG if long else SHORT))


# -- the run --------------------------------------------------------------------------------------------------------


def rate(progress: float, falls: float, warm: float = 0.01) -> float:
    """The share of the full learning rate: rises at first, holds until `falls`, and falls in a line to nothing."""
    return min(1.0, progress / warm, max(0.0, (1 - progress) / (1 - falls)))


def reach_at(progress: float, begin: int, end: int) -> int:
    """The longest system prompts of the moment: they grow over the first part of the run."""
    return int(begin + (end - begin) * min(1.0, progress / 0.35))


def train(model: Ember, folder: Path, asked: argparse.Namespace) -> dict[str, float]:
    """Trains for asked.minutes on the GPU; the figures of the run. The producers end with it."""
    context = multiprocessing.get_context("fork")
    reach, made = context.Value("i", asked.reach_first), context.Queue(QUEUED)
    producers = [
        context.Process(target=produce, args=(folder, f"{asked.seed} {number}", reach, made), daemon=True)
        for number in range(asked.producers)
    ]
    for producer in producers:
        producer.start()
    try:
        return learn(model, asked, reach, made)
    finally:
        for producer in producers:
            producer.terminate()


def learn(model: Ember, asked: argparse.Namespace, reach: Any, made: Any) -> dict[str, float]:
    device = torch.device("cuda")
    model.to(device)
    cos, sin = rope_tables(model.shape, CONTEXT_TOKENS, device)
    loss_of = torch.compile(model.loss, dynamic=False)
    named = dict(model.named_parameters())
    muon = Muon(
        [parameter for name, parameter in named.items() if parameter.dim() == 2 and name != "embed_tokens.weight"]
    )
    rest = [parameter for name, parameter in named.items() if parameter.dim() == 1 or name == "embed_tokens.weight"]
    adam = torch.optim.AdamW(rest, lr=asked.adam_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    kept: collections.deque[Batch] = collections.deque(maxlen=KEPT)
    chance = random.Random(asked.seed)
    step, fresh, began, told, seconds = 0, 0, time.monotonic(), 0.0, asked.minutes * 60
    recent: list[Tensor] = []
    while True:
        now = time.monotonic()
        if step == 3:
            began = now
        progress = (now - began) / seconds
        if progress >= 1:
            break
        reach.value = reach_at(progress, asked.reach_first, asked.reach_last)
        try:
            batch = made.get(block=len(kept) < 8)
            kept.append(batch)
            fresh += 1
        except queue.Empty:
            batch = chance.choice(kept)
        tokens = torch.from_numpy(batch.tokens.astype(np.int64)).to(device, non_blocking=True)
        said = torch.from_numpy(batch.said).to(device, non_blocking=True)
        starts = torch.from_numpy(batch.starts).to(device, non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            weighted, plain = loss_of(tokens, said, starts, batch.longest, cos, sin)
        weighted.backward()
        share = rate(progress, asked.falls)
        muon.step(asked.muon_rate * share)
        for group in adam.param_groups:
            group["lr"] = asked.adam_rate * share
        adam.step()
        model.zero_grad(set_to_none=True)
        recent.append(plain)
        step += 1
        if now - told > 10:
            told = now
            loss = torch.stack(recent[-50:]).mean().item()
            speed = step * BATCH_TOKENS / max(1e-9, time.monotonic() - began)
            print(
                f"{progress:6.1%}  step {step}  loss {loss:.4f}  {speed / 1e6:.2f} M tokens/s  fresh {fresh / step:.0%}  prompts to {reach.value}",
                flush=True,
            )
    loss = torch.stack(recent[-100:]).mean().item()
    return {
        "steps": step,
        "tokens": step * BATCH_TOKENS,
        "fresh": fresh / max(1, step),
        "seconds": time.monotonic() - began,
        "loss": loss,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ember.train",
        description="Trains Ember on generated text on one GPU and writes config.json, generation_config.json and model.safetensors. "
        "The folder must hold tokenizer.json (python -m benchmarks.ember.tokenizer). With --minutes 0 it only writes initial weights.",
    )
    parser.add_argument(
        "folder", type=Path, help="the model folder: the tokenizer is read from it, the model written into it"
    )
    parser.add_argument(
        "--minutes", type=float, default=8, help="how long to learn; the learning rate falls to nothing at the end"
    )
    parser.add_argument("--begin", type=Path, help="begin with the weights of this model folder instead of random ones")
    parser.add_argument("--producers", type=int, default=15, help="processes that generate text")
    parser.add_argument("--muon-rate", type=float, default=0.02, help="learning rate of the matrices")
    parser.add_argument("--adam-rate", type=float, default=0.003, help="learning rate of the embedding and the norms")
    parser.add_argument(
        "--falls", type=float, default=0.45, help="after which share of the run the learning rate begins to fall"
    )
    parser.add_argument(
        "--reach-first", type=int, default=150, help="longest system prompts at the beginning, in tokens"
    )
    parser.add_argument(
        "--reach-last", type=int, default=1700, help="longest system prompts after a third of the run, in tokens"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the text")
    asked = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    model = Ember(Shape())
    model.initialise(torch.Generator().manual_seed(asked.seed))
    if asked.begin is not None:
        read_weights(model, asked.begin)
    print(f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    if asked.minutes > 0:
        figures = train(model, asked.folder, asked)
        print(json.dumps(figures))
    write_model(model, asked.folder)
    print(f"wrote {asked.folder / 'model.safetensors'}")


if __name__ == "__main__":
    main()
