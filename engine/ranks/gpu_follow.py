"""A follower of a decoder on GPUs: it opens its part as rank 0 says, and launches what rank 0 launches."""

from contextlib import ExitStack

import torch

from engine.execution.gpu_model import GpuModel
from engine.execution.gpu_runner import GRAPH_ROWS_MAX
from engine.execution.memory_plan import context_tokens
from engine.execution.open import open_follower_source
from engine.execution.open_gpu import device_exchange
from engine.protocol.specs import ModelSpec
from engine.ranks.block_exchange import RankBlocks
from engine.ranks.board import RankBoard
from engine.ranks.channel import RankChannel, swap_as_follower
from engine.ranks.command_ring import CommandKind
from engine.ranks.exchange import wait_for_others
from engine.ranks.follower import Follower, FollowerModel
from engine.ranks.gpu_executor import unpack_order
from engine.ranks.gpu_part import facts_of, open_part
from engine.ranks.software import require_like, software_of


def follow_on_gpu(
    model: ModelSpec, device: torch.device, board: RankBoard, channel: RankChannel, rank: int, waker: int
) -> None:
    """A follower's life: loads its part as rank 0 says, and follows until it is told to end."""
    follower, wait = Follower(board, rank, waker), wait_for_others(board)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with torch.inference_mode(), ExitStack() as resources:
        channel.send(facts_of(rank, board.ranks, device))
        dtype, arena_bytes, software, sizes = follower.read(
            CommandKind.OPEN, lambda said: (getattr(torch, said[0]), said[1], said[2], said[3])
        )
        require_like(rank, software_of(device), software)
        source = open_follower_source(model, dtype, device)
        config = source.config
        part = open_part(model, source, rank, arena_bytes, swap_as_follower(channel, wait), sizes)
        opened = GpuModel(
            model, config, source, context_tokens(model, config.context_tokens), follower.beat, part, resources
        )

        def begin(said: list[list[int]]) -> FollowerModel:
            with opened.memory.stream.entered():
                opened.memory.workspace.grow(said[0])
            blocks = None
            if board.bounces:
                exchange = device_exchange(opened.memory, resources)
                blocks = RankBlocks(board, rank, opened.memory.pools.shape, exchange, exchange.attach)
                resources.callback(blocks.close)
            graph_rows = GRAPH_ROWS_MAX if device.type == "cuda" else 0
            staged = None if part.stages is None else part.stages.runner(opened, graph_rows)
            runner = opened.runner(graph_rows) if staged is None else staged
            resources.callback(runner.close)

            def head(_: bytes) -> None:
                assert staged is not None
                staged.follow_head()

            def launch(payload: bytes) -> None:
                runner.follow(*unpack_order(payload))

            return FollowerModel(launch, opened.memory, runner, head, blocks)

        follower.follow(follower.read(CommandKind.OPEN, begin))
