"""Goes on training Ember on a CPU: fresh conversations with businesses and some of the earlier corpus. It knows no questions
that Ember is judged by.

Two processes of one thread each learn from text of their own and average their weights every few seconds, so that a busy
machine holds up neither for long. Only what Ember says is learnt from, so that the head is computed there alone.

Shapes: B documents · T tokens of the longest · D hidden · S head size.
"""

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.ember import corpus
from benchmarks.ember.tokenizer import CONTEXT_TOKENS, PAD, SPECIALS
from benchmarks.ember.train import SAID, Ember, Layer, Shape, encoded, read_weights, rope_tables, write_model
from benchmarks.ember.values import Draw

POOL: Final = 48  # documents sorted by length before they are cut into batches
LONGEST: Final = 800


def document(draw: Draw, asked: argparse.Namespace) -> corpus.Conversation:
    """A conversation with a business, or one of the earlier corpus."""
    if draw.maybe(asked.share):
        size = draw.pick(corpus.BUSINESS_SIZES[:-2])
        return corpus.about_business(draw, size, asked.more_facts, asked.times)
    return corpus.document(draw, 120)


def batches(tokenizer: Tokenizer, seed: str, asked: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids, which of them Ember says), both [B, T], of about `tokens` tokens; documents of like lengths stand together."""
    number = 0
    while True:
        pool: list[tuple[list[int], list[int]]] = []
        while len(pool) < POOL:
            ids, said = encoded(tokenizer, document(Draw(f"{seed} {number}"), asked))
            number += 1
            if len(ids) <= LONGEST:
                pool.append((ids, said))
        pool.sort(key=lambda one: len(one[0]))
        packs: list[list[tuple[list[int], list[int]]]] = [[]]
        for one in pool:
            if packs[-1] and (len(packs[-1]) + 1) * len(one[0]) > asked.tokens:
                packs.append([])
            packs[-1].append(one)
        for place in torch.randperm(len(packs)).tolist():
            longest = len(packs[place][-1][0])
            ids_BT = torch.full((len(packs[place]), longest), SPECIALS.index(PAD))
            said_BT = torch.zeros((len(packs[place]), longest), dtype=torch.bool)
            for row, (ids, said) in enumerate(packs[place]):
                ids_BT[row, : len(ids)] = torch.tensor(ids)
                said_BT[row, : len(ids)] = torch.tensor(said) == SAID
            yield ids_BT, said_BT


def rotate(x_BHTS: Tensor, cos_TS: Tensor, sin_TS: Tensor) -> Tensor:
    first, second = x_BHTS.chunk(2, dim=-1)
    return (x_BHTS * cos_TS + torch.cat([-second, first], dim=-1) * sin_TS).to(x_BHTS.dtype)


def loss_of(model: Ember, ids_BT: Tensor, said_BT: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The mean loss of what Ember says. Padding stands behind every document, where no token sees it."""
    count, length = ids_BT.shape
    size = model.shape.head_dim
    x_BTD = model.embed_tokens(ids_BT)
    for layer in (cast(Layer, one) for one in model.layers):
        attention = layer.self_attn
        normed = layer.input_layernorm(x_BTD)
        q, k, v = (
            project(normed).view(count, length, -1, size).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = rotate(q, cos[:length], sin[:length]), rotate(k, cos[:length], sin[:length])
        share = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + attention.o_proj(mixed.transpose(1, 2).reshape(count, length, -1))
        x_BTD = x_BTD + layer.mlp(layer.post_attention_layernorm(x_BTD))
    spoken = model.norm(x_BTD)[:, :-1][said_BT[:, 1:]]
    logits = F.linear(spoken, model.embed_tokens.weight)
    return F.cross_entropy(logits.float(), ids_BT[:, 1:][said_BT[:, 1:]])


def average(model: Ember) -> None:
    """Gives each process the mean of all processes' weights."""
    flat = torch.cat([parameter.data.flatten() for parameter in model.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    start = 0
    for parameter in model.parameters():
        parameter.data.copy_(flat[start : start + parameter.numel()].view_as(parameter))
        start += parameter.numel()


def learn(rank: int, asked: argparse.Namespace, begun: float) -> None:
    """One process's life, until its minutes are over."""
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    dist.init_process_group(
        "gloo", init_method=f"file://{asked.folder}/rendezvous", rank=rank, world_size=asked.processes
    )
    model = Ember(Shape())
    read_weights(model, asked.begin)
    tokenizer = Tokenizer.from_file(str(asked.begin / "tokenizer.json"))
    cos, sin = rope_tables(model.shape, CONTEXT_TOKENS, torch.device("cpu"))
    adam = torch.optim.AdamW(model.parameters(), lr=asked.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    seconds, step, tokens, turn, recent, kept = asked.minutes * 60, 0, 0, 0, [], begun
    for ids_BT, said_BT in batches(tokenizer, f"{asked.seed} {rank}", asked):
        progress = (time.time() - begun) / seconds
        falls = (1 - progress) / (1 - asked.falls) if asked.falls < 1 else 1.0
        for group in adam.param_groups:
            group["lr"] = asked.rate * max(0.0, min(1.0, (step + 1) / asked.warm, falls))
        with torch.autocast("cpu", torch.bfloat16, enabled=asked.dtype == "bfloat16"):
            loss = loss_of(model, ids_BT, said_BT, cos, sin)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + ids_BT.numel()
        recent.append(loss.item())
        now = time.time() - begun
        if now // asked.every > turn:
            turn = now // asked.every
            average(model)
            if rank == 0:
                print(
                    f"{progress:6.1%}  step {step}  loss {sum(recent[-60:]) / len(recent[-60:]):.4f}  {tokens / now:.0f} tokens/s",
                    flush=True,
                )
                if time.time() - kept > 60 * asked.keep:
                    kept = time.time()
                    write_model(model, asked.folder)
            if now > seconds:
                break
    if rank == 0:
        write_model(model, asked.folder)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ember.finetune",
        description="Goes on training a model folder on a CPU and writes config.json, generation_config.json and model.safetensors into another.",
    )
    parser.add_argument("folder", type=Path, help="where the model is written, every few minutes and at the end")
    parser.add_argument("--begin", type=Path, required=True, help="the model folder to begin with")
    parser.add_argument("--minutes", type=float, default=60, help="how long to learn")
    parser.add_argument("--rate", type=float, default=5e-4, help="the learning rate at its highest")
    parser.add_argument("--warm", type=int, default=40, help="steps in which the rate rises")
    parser.add_argument(
        "--falls", type=float, default=0.4, help="after which share of the run the rate begins to fall; 1: never"
    )
    parser.add_argument("--share", type=float, default=0.72, help="of the conversations that are with a business")
    parser.add_argument(
        "--more-facts",
        type=float,
        default=0.0,
        help="share of a business's sections that are written facts, beside those that are anyway",
    )
    parser.add_argument("--times", type=int, default=1, help="so many times as many questions to a business as usual")
    parser.add_argument("--tokens", type=int, default=2048, help="of a batch")
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        default="bfloat16",
        help="of the products; float32 is faster where the processor has neither AMX nor AVX-512 for bfloat16",
    )
    parser.add_argument("--processes", type=int, default=2, help="of one thread each")
    parser.add_argument(
        "--every", type=float, default=15, help="seconds after which the processes average their weights"
    )
    parser.add_argument("--keep", type=float, default=3, help="minutes after which the model is written")
    parser.add_argument("--seed", type=int, default=1, help="of the text")
    asked = parser.parse_args()
    asked.folder = asked.folder.absolute()
    asked.folder.mkdir(parents=True, exist_ok=True)
    (asked.folder / "rendezvous").unlink(missing_ok=True)
    context, begun = multiprocessing.get_context("spawn"), time.time()
    processes = [context.Process(target=learn, args=(rank, asked, begun)) for rank in range(asked.processes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
