"""Rank 0's part of a model on several GPUs, and what the others are told before they follow."""

from collections.abc import Sequence

import msgspec

from engine.execution.gpu_memory import GpuMemory
from engine.layers.rank_shard import RankShard
from engine.protocol.specs import ModelSpec
from engine.ranks.channel import swap_as_leader
from engine.ranks.command_ring import CommandKind
from engine.ranks.cpu_part import share_of
from engine.ranks.fork import Ranks
from engine.ranks.gpu_executor import GpuAnnouncer
from engine.ranks.gpu_part import GpuRankPart, RankFacts, facts_of, open_part, require_alike, require_room
from engine.ranks.leader import RankCommands, RankedMemory
from engine.ranks.software import software_of
from engine.weights.source import WeightSource


def lead_part(
    model: ModelSpec, source: WeightSource, ranks: Ranks, commands: RankCommands, announcer: GpuAnnouncer
) -> GpuRankPart:
    """Rank 0's part, when all ranks said what they run on. Raises DoesNotFit, CannotShard and RankLost."""
    group, count = ranks.group, ranks.group.board.ranks
    facts = [facts_of(0, count, source.device)]
    facts += [msgspec.convert(channel.receive(group.wait)[0], RankFacts) for channel in ranks.channels]
    require_alike(model.name, facts)
    require_room(model.name, facts, source.cut(RankShard(0, count), cut_embedding=True).bytes)
    arena_bytes = min(each.total_bytes for each in facts)
    dtype, software = str(source.dtype).removeprefix("torch."), software_of(source.device)
    commands.say(CommandKind.OPEN, dtype, arena_bytes, software)

    def begin(memory: GpuMemory, segments: Sequence[int]) -> RankedMemory:
        commands.wait(commands.say(CommandKind.OPEN, list(segments)))
        return RankedMemory(memory, commands)

    return open_part(
        share_of(model, count), source, 0, count, arena_bytes, swap_as_leader(ranks.channels, group.wait), announcer,
        facts[0].free_bytes - min(each.free_bytes for each in facts), begin,
    )  # fmt: skip
