"""Rank 0's part of a model on several GPUs, and what the others are told before they follow."""

from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from engine.execution.gpu_memory import GpuMemory
from engine.execution.open_gpu import device_exchange
from engine.memory.symmetric import window_driver
from engine.pipeline.pipeline_runner import PipelineRunner
from engine.pipeline.stage_plan import PoolSizes, StageRoom, pool_sizes, stage_shares
from engine.protocol.specs import ModelSpec
from engine.ranks.block_exchange import RankBlocks, RankedExchange
from engine.ranks.channel import swap_as_leader
from engine.ranks.command_ring import CommandKind
from engine.ranks.fork import Ranks
from engine.ranks.gpu_executor import GpuAnnouncer
from engine.ranks.gpu_part import (
    GpuRankPart,
    RankFacts,
    facts_of,
    open_part,
    require_alike,
    require_room,
    window_bytes,
)
from engine.ranks.leader import RankCommands, RankedMemory, StageBytes
from engine.ranks.software import software_of
from engine.weights.source import WeightSource


def lead_part(
    model: ModelSpec, source: WeightSource, ranks: Ranks, commands: RankCommands, announcer: GpuAnnouncer,
    context_tokens: int,
) -> GpuRankPart:  # fmt: skip
    """Rank 0's part, when all ranks said what they run on. Raises DoesNotFit, CannotShard and RankLost."""
    group, count = ranks.group, ranks.group.board.ranks
    facts = [facts_of(0, count, source.device)]
    facts += [msgspec.convert(channel.receive(group.wait)[0], RankFacts) for channel in ranks.channels]
    require_alike(model.name, facts)
    shares = stage_shares(model, source)
    weights = [share.source.bytes for share in shares for _ in range(model.gpus)]
    weights[0] += source.vision_bytes  # rank 0 alone encodes images
    require_room(model.name, facts, weights, window_bytes(model, source.config.hidden))
    arena_bytes = min(each.total_bytes for each in facts)
    dtype, software = str(source.dtype).removeprefix("torch."), software_of(source.device)
    sizes: PoolSizes = ()
    if model.stages > 1:
        granularity = window_driver(source.device).granularity
        sizes = pool_sizes(shares, source.dtype, context_tokens, arena_bytes, granularity)
    commands.say(CommandKind.OPEN, dtype, arena_bytes, software, sizes)

    def begin(memory: GpuMemory, segments: Sequence[int]) -> RankedMemory:
        commands.wait(commands.say(CommandKind.OPEN, list(segments)))
        stages = [StageBytes(share.source.bytes, share.block_bytes) for share in shares]
        layouts = memory.pools.shape.whole_layouts(source.config.kv_heads, source.config.kv_groups)
        return RankedMemory(memory, commands, layouts, stages=stages)

    def lead(runner: PipelineRunner) -> None:
        commands.begin_launched = runner.begin_all

    part = open_part(model, source, 0, arena_bytes, swap_as_leader(ranks.channels, group.wait), sizes)
    blocks = [sum(share.block_bytes) or 1 for share in shares for _ in range(model.gpus)]
    part.rooms = [
        StageRoom(each.free_bytes - facts[0].free_bytes, weights[rank] - weights[0], blocks[rank], blocks[0])
        for rank, each in enumerate(facts)
    ]
    part.announcer, part.begin_following, part.lead = announcer, begin, lead
    return part


def lead_exchange(memory: RankedMemory, commands: RankCommands, resources: ExitStack) -> RankedExchange | None:
    """How the blocks of all ranks go to other replicas, where they do. `resources` closes it before the memory."""
    own, board = memory.local, commands.group.board
    if not board.bounces:
        return None
    assert isinstance(own, GpuMemory)
    device = device_exchange(own, resources)
    exchange = RankedExchange(RankBlocks(board, 0, own.pools.shape, device, device.attach), commands)
    resources.callback(exchange.close)
    return exchange
