"""What each stage of a model has on its GPUs, as headers and config alone say it: its layers, its weights, and blocks
of KV that have the same numbers in all stages. It loads nothing.

Stages are as unlike as their layers are many: a block takes other bytes in each. How many blocks there are, and how
many of them come and go at once, is what suits all of them.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import msgspec
import torch

from engine.execution.gpu_memory import SEQUENCES
from engine.execution.memory_plan import kv_blocks
from engine.kvcache.layer_pools import group_shapes
from engine.kvcache.tensors import extent_blocks
from engine.layers.rank_shard import RankShard
from engine.models.llama import kv_shape
from engine.models.sharding import stage_layers
from engine.protocol.specs import ModelSpec
from engine.weights.source import ShardSource, WeightSource

PoolSizes = tuple[tuple[int, int], ...]
"""Of each group's pool: its blocks, and those of an extent."""


@dataclass(frozen=True, slots=True)
class StageShare:
    """What a rank of one stage has: `source` are its parameters' own, `model` what the spec means for it alone, and
    block_bytes what a block takes there, in each group."""

    source: ShardSource | WeightSource
    model: ModelSpec
    block_bytes: tuple[int, ...]


def stage_shares(model: ModelSpec, source: WeightSource, rank: int = 0) -> list[StageShare]:
    """The stages' shares, of the rank of this number in each; one of all layers without stages. Raises CannotShard."""
    whole, shares = source.config.layers, []
    for layers in stage_layers(source.config, model.stages):
        own: ShardSource | WeightSource = source.stage(layers) if model.stages > 1 else source
        if model.gpus > 1 and isinstance(own, WeightSource):
            own = own.cut(RankShard(rank, model.gpus), cut_embedding=True)
        kv_bytes = None if model.kv_bytes is None else model.kv_bytes // model.gpus * len(layers) // whole
        spec = msgspec.structs.replace(
            model, kv_bytes=kv_bytes, kept_kv_bytes=model.kept_kv_bytes // model.gpus * len(layers) // whole,
            host_kv_bytes=model.host_kv_bytes // model.gpus,
        )  # fmt: skip
        dtype = torch.float8_e4m3fn if model.kv_dtype == "fp8" else source.dtype
        shapes = group_shapes(kv_shape(own.config, model.block_tokens, dtype), own.config.kv_groups)
        shares.append(StageShare(own, spec, tuple(shape.block_bytes for shape in shapes)))
    return shares


def pool_sizes(
    shares: Items[StageShare], dtype: torch.dtype, tokens: int, arena_bytes: int, granularity: int
) -> PoolSizes:
    """The pools that suit all stages, where each of their GPUs may map arena_bytes, in pieces of whole `granularity`.
    Raises DoesNotFit."""
    sizes = []
    for share in shares:
        config, model = share.source.config, share.model
        dtype_ = torch.float8_e4m3fn if model.kv_dtype == "fp8" else dtype
        shapes = group_shapes(kv_shape(config, model.block_tokens, dtype_), config.kv_groups)
        room_bytes = arena_bytes - share.source.bytes
        sizes.append((shapes, kv_blocks(model, shapes, tokens, model.sequences or SEQUENCES, room_bytes, room_bytes)))
    blocks = [min(counts) for counts in zip(*(counts for _, counts in sizes), strict=True)]
    at_once = [
        min(extent_blocks(shapes[group], count, granularity) for shapes, _ in sizes)
        for group, count in enumerate(blocks)
    ]
    return tuple(zip(blocks, at_once, strict=True))


@dataclass(frozen=True, slots=True)
class StageRoom:
    """What the GPU of another rank has beside that of rank 0: so many bytes more free, and more of weights; and what a
    block takes there and here."""

    more_free_bytes: int
    more_weights_bytes: int
    block_bytes: int
    own_block_bytes: int

    def of(self, room_bytes: int) -> int:
        """What of so many bytes for KV on rank 0 the other rank has blocks for too, if it is to keep to as much."""
        return (room_bytes - self.more_weights_bytes) * self.own_block_bytes // self.block_bytes

    def of_free(self, free_bytes: int) -> int:
        """The same of what is free."""
        return self.of(free_bytes + self.more_free_bytes)
