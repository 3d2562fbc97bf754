"""Forks the ranks of a model before anything of it is opened. It loads nothing."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from engine.execution.cpu_model import SEQUENCES, STEP_TOKENS
from engine.execution.memory_plan import DoesNotFit, bounce_bytes, context_tokens
from engine.hostinfo.gpus import VISIBLE_DEVICES_VARIABLE, visible_gpus
from engine.layers.cpu_row import row_functions
from engine.models.config import is_encoder, read_decoder_config
from engine.models.decoder_config import ModelConfig
from engine.models.sharding import shard_config, stage_layers
from engine.protocol.specs import ModelSpec
from engine.ranks.board import RankBoard
from engine.ranks.channel import RankChannel
from engine.ranks.command_ring import ring_bytes
from engine.ranks.follow import follow_rank
from engine.ranks.group import STALL_S, RankGroup


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a model that is to be opened: the followers wait for what they open.

    parts     of each sum over the ranks, on a CPU.
    channels  to each follower, on GPUs.
    """

    group: RankGroup
    parts: int
    channels: tuple[RankChannel, ...] = ()


def fork_ranks(
    model: ModelSpec, device: str, threads: int | None, parts: int | None = None, stall_s: float = STALL_S
) -> Ranks | None:
    """Forks the followers of a model of several ranks: before any thread starts. None where it has one, unless sums are
    to have several `parts`. It asks no driver: what a driver gave would be of no use in the forks. Raises DoesNotFit
    and CannotShard."""
    if model.gpus <= 1 and model.stages <= 1 and parts is None:
        return None
    if is_encoder(Path(model.folder)):
        raise DoesNotFit(
            f"{model.name}: gpus = {model.gpus} and stages = {model.stages} are for decoders: leave them out, and set "
            "replicas to 2 for twice the calls"
        )
    config = read_decoder_config(Path(model.folder), vectors=model.vectors)
    shard_config(config, model.gpus)
    stage_layers(config, model.stages)
    if device != "cpu" and torch.version.cuda and (names := visible_gpus(os.environ)):
        return _fork_on_gpus(model, config, names, stall_s)
    row_functions()  # compiled now, they are there in all ranks: one that compiles looks as if it were frozen
    parts = parts or model.gpus
    board = RankBoard(
        model.gpus * model.stages, ring_bytes(_table_words(model, config, SEQUENCES)),
        _exchange_bytes(model, config, parts), model.stages, _mail_bytes(model, config), bounce_bytes(model, config),
    )  # fmt: skip
    return Ranks(RankGroup.fork(board, partial(follow_rank, model, threads, board, parts), stall_s), parts)


def _fork_on_gpus(model: ModelSpec, config: ModelConfig, names: list[str], stall_s: float) -> Ranks:
    """Rank r is on the r-th GPU that this process sees."""
    count, asked = model.gpus * model.stages, f"gpus = {model.gpus}"
    if model.stages > 1:
        asked = f"stages = {model.stages} of {asked}"
    if len(names) < count:
        raise DoesNotFit(
            f"{model.name}: {asked}, and {len(names)} can be seen: set "
            f"{'fewer' if model.stages > 1 else 'gpus to fewer'}, or show it more ({VISIBLE_DEVICES_VARIABLE})"
        )
    from engine.execution.gpu_memory import SEQUENCES as GPU_SEQUENCES  # only here: a CPU needs no Triton
    from engine.ranks.gpu_follow import follow_on_gpu

    ring = ring_bytes(_table_words(model, config, GPU_SEQUENCES))
    board = RankBoard(count, ring, 1, bounce_bytes=bounce_bytes(model, config))
    pairs = [RankChannel.pair() for _ in range(1, count)]

    def follow(rank: int, waker: int) -> None:
        follow_on_gpu(model, torch.device("cuda", rank), board, pairs[rank - 1][1], rank, waker)

    return Ranks(RankGroup.fork(board, follow, stall_s), model.gpus, tuple(leader for leader, _ in pairs))


def _table_words(model: ModelSpec, config: ModelConfig, sequences: int) -> int:
    """The block tables of the largest step, in words: all are as wide as the longest sequence's. `sequences`: where the
    spec says nothing of them. Raises DoesNotFit."""
    blocks = -(-context_tokens(model, config.context_tokens) // model.block_tokens)
    return len(config.kv_groups) * (model.sequences or sequences) * blocks


def _exchange_bytes(model: ModelSpec, config: ModelConfig, parts: int) -> int:
    """What the largest step exchanges at once: a sum's parts of all rows, or the logits of all that are sampled."""
    return 4 * max(parts * _rows(model) * config.hidden, (model.sequences or SEQUENCES) * config.vocabulary)


def _mail_bytes(model: ModelSpec, config: ModelConfig) -> int:
    """What the largest micro-batch is as it goes from stage to stage."""
    return 4 * _rows(model) * config.hidden


def _rows(model: ModelSpec) -> int:
    """The most rows of a step."""
    return (model.step_tokens or STEP_TOKENS) + (model.sequences or SEQUENCES)
