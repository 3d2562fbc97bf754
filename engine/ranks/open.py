"""Opens a decoder on a CPU in several processes: rank 0 decides dtype and sizes, the followers take them over.

It knows neither what commands look like nor how a step is computed.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

import msgspec
import torch

from engine.execution.cpu_model import CpuModel
from engine.execution.open import DecoderParts, loaded_decoder, read_decoder
from engine.hostinfo.memory import available_memory_bytes
from engine.protocol.specs import ModelSpec
from engine.ranks.block_exchange import RankBlocks, RankedExchange
from engine.ranks.command_ring import CommandKind
from engine.ranks.cpu_part import CpuRankPart
from engine.ranks.fork import Ranks
from engine.ranks.leader import RankCommands, RankedExecutor, RankedMemory, ranked_model
from engine.ranks.software import software_of
from engine.ranks.staged_executor import StagedExecutor
from engine.step.executor import DecoderExecutor, LoadedModel
from engine.weights.load import ModelFiles
from engine.weights.source import WeightSource

_CPU: Final = torch.device("cpu")


def open_ranked_model(
    model: ModelSpec, ranks: Ranks, threads: int | None, beat: Callable[[], None], device_bytes: int | None = None,
    standby: bool = False,
) -> LoadedModel:  # fmt: skip
    """Opens a model as rank 0 of several, as `open_model` opens one of one rank. Raises RankLost beside what that
    raises."""
    if ranks.channels:
        from engine.ranks.gpu_open import open_on_gpus  # only here: a CPU needs no Triton

        return open_on_gpus(model, ranks, beat, device_bytes, standby)
    if threads is not None:
        torch.set_num_threads(threads)
    with ExitStack() as resources:
        resources.callback(ranks.group.close)
        config, tokens, files, source = read_decoder(model, _CPU)
        parts, exchange = _open_parts(model, source, files, tokens, beat, device_bytes, ranks, resources)
        return ranked_model(loaded_decoder(model, config, tokens, files, parts, resources), exchange, ranks.parts)


def _open_parts(
    model: ModelSpec, source: WeightSource, files: ModelFiles, tokens: int,
    beat: Callable[[], None], device_bytes: int | None, ranks: Ranks, resources: ExitStack,
) -> tuple[DecoderParts, RankedExchange | None]:  # fmt: skip
    """Rank 0's side, and how its blocks go to other replicas. `resources` tells the followers to end."""
    group, commands, board = ranks.group, RankCommands(ranks.group), ranks.group.board
    loading = commands.say(CommandKind.OPEN, str(source.dtype).removeprefix("torch."), software_of(_CPU))
    beat = group.watched(beat)
    with group.working():
        part = CpuRankPart.read(model, source, board, 0, ranks.parts, group.wait, beat, files.reread)
    commands.wait(loading)
    free_bytes = available_memory_bytes()
    opened = part.open(part.blocks(tokens, free_bytes * board.stages // board.ranks), tokens)
    resources.callback(opened.memory.close)
    resources.callback(commands.close)
    exchange = None
    if board.bounces:
        exchange = RankedExchange(RankBlocks(board, 0, opened.pools[0].shape, opened.groups[0]), commands)
        resources.callback(exchange.close)
    sizes = [pool.blocks for pool in opened.pools], [pool.extent_blocks for pool in opened.pools]
    commands.wait(commands.say(CommandKind.OPEN, *sizes))
    shared_bytes = _shared_block_bytes(part, opened, board.ranks // board.stages)
    layouts = opened.pools[0].shape.whole_layouts(source.config.kv_heads, source.config.kv_groups)
    memory = RankedMemory(opened.memory, commands, layouts, shared_bytes)
    _map_first(opened, memory, device_bytes, free_bytes)
    executor: DecoderExecutor
    if part.link is None:
        executor = RankedExecutor(opened.runner(beat), commands)
    else:
        stage = part.stage_of(opened, tokens, beat)
        limits = replace(opened.runner(beat).limits, depth=2)
        executor = staged = StagedExecutor(stage, part.link, commands, limits, part.config.vectors)
        commands.begin_launched = staged.begin_all
    weights_bytes = int(board.weights_bytes_W.sum())
    kv_bytes = max(memory.layout.blocks * memory.layout.block_bytes for memory in memory.memories)
    report = msgspec.structs.replace(
        opened.report(free_bytes), weights_bytes=weights_bytes, kv_bytes=kv_bytes,
        free_bytes=max(0, free_bytes - kv_bytes),
    )  # fmt: skip
    return (executor, memory, report), exchange


def _shared_block_bytes(part: CpuRankPart, opened: CpuModel, ranks: int) -> list[int]:
    """What a block of each of the model's memories takes on so many ranks, those of a stage."""
    layers = [len(group.layers) for group in part.whole_config.kv_groups]
    shared = [ranks * count * pool.shape.layer_block_bytes for count, pool in zip(layers, opened.pools, strict=True)]
    return [0] * (len(opened.memory.memories) - len(shared)) + shared


def _map_first(opened: CpuModel, memory: RankedMemory, device_bytes: int | None, free_bytes: int) -> None:
    """Gives the first extents memory on all ranks: rank 0 plans its part of it."""
    own, whole = (sum(each.layout.block_bytes for each in held.memories) for held in (opened.memory, memory))
    own_bytes = None
    if device_bytes is not None:
        own_bytes = opened.memory.weights_bytes + (device_bytes - memory.usage().weights_bytes) * own // whole
    extents = opened.initial_extents(own_bytes, free_bytes * own // whole)
    for paged, mapped in zip(memory.memories[-len(extents) :], extents, strict=True):
        paged.map(range(mapped))
