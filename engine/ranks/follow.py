"""A follower of a decoder on a CPU: it opens its part with the dtype and sizes that rank 0 says, and computes it."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from engine.execution.cpu_runner import CpuRunner, CpuStage
from engine.execution.memory_plan import context_tokens
from engine.models.config import read_decoder_config
from engine.protocol.specs import ModelSpec
from engine.ranks.block_exchange import RankBlocks
from engine.ranks.board import RankBoard
from engine.ranks.command_ring import CommandKind
from engine.ranks.cpu_part import CpuRankPart
from engine.ranks.exchange import StageLink, wait_for_others
from engine.ranks.follower import Follower, FollowerModel
from engine.ranks.software import require_like, software_of
from engine.step.layout import StepBatch, unpack_step
from engine.weights.source import WeightSource

_CPU: Final = torch.device("cpu")


def follow_rank(model: ModelSpec, threads: int | None, board: RankBoard, parts: int, rank: int, waker: int) -> None:
    """A follower's life: loads its part as rank 0 says, and follows until it is told to end."""
    follower = Follower(board, rank, waker)
    if threads is not None:
        torch.set_num_threads(threads)  # rank 0 has as many
    with torch.inference_mode(), ExitStack() as resources:
        config = read_decoder_config(Path(model.folder), vectors=model.vectors)
        tokens = context_tokens(model, config.context_tokens)

        def load(dtype: torch.dtype, software: dict[str, str]) -> CpuRankPart:
            require_like(rank, software_of(_CPU), software)
            source = WeightSource.open(Path(model.folder), config, dtype, _CPU, model.random_weights)
            wait = wait_for_others(board)
            return CpuRankPart.read(model, source, board, rank, parts, wait, follower.beat, lambda load: load())

        part = follower.read(CommandKind.OPEN, lambda said: load(getattr(torch, said[0]), said[1]))

        def open_model(said: list[Any]) -> FollowerModel:
            opened = part.open(said[0], tokens, said[1])
            if part.link is None:
                blocks = None
                if board.bounces:
                    blocks = RankBlocks(board, rank, opened.pools[0].shape, opened.groups[0])
                    resources.callback(blocks.close)
                return FollowerModel(partial(_compute, opened.runner(follower.beat)), opened.memory, blocks=blocks)
            compute, head = _staged(part.stage_of(opened, tokens, follower.beat), part.link)
            return FollowerModel(compute, opened.memory, head=head)

        follower.follow(follower.read(CommandKind.OPEN, open_model))


def _staged(stage: CpuStage, link: StageLink) -> tuple[Callable[[bytes], object], Callable[[bytes], object] | None]:
    """What a follower does with a micro-batch, and in the first stage with those of its rows that come back."""

    def compute(payload: bytes) -> None:
        batch = _batch(payload)
        link.send(stage.compute(batch, link.receive(len(batch.tokens_T)) if link.stage else None))

    def head(payload: bytes) -> None:
        sum_RH = link.receive(int.from_bytes(payload, "little"))
        if len(sum_RH):
            stage.outputs(sum_RH)

    return compute, None if link.stage else head


def _compute(runner: CpuRunner, payload: bytes) -> None:
    runner.logits(_batch(payload))


def _batch(payload: bytes) -> StepBatch:
    return unpack_step(np.frombuffer(bytearray(payload), np.int32))  # writable, as tensors want it
