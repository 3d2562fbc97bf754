"""One rank's part of a model on a CPU: which layers of it and what of these are its own, loaded and ready to compute.
It knows no commands."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import msgspec

from engine.execution.cpu_model import CpuModel, plan_blocks
from engine.execution.cpu_runner import CpuStage
from engine.models.decoder_config import ModelConfig
from engine.models.decoders import DecoderParameters
from engine.models.sharding import shard_config, stage_layers
from engine.protocol.specs import ModelSpec
from engine.ranks.board import RankBoard
from engine.ranks.exchange import HostExchange, StageLink, Wait
from engine.weights.assembly import weights_bytes
from engine.weights.source import WeightSource


@dataclass(frozen=True, slots=True)
class CpuRankPart:
    """What a rank has of a model.

    share   what the spec means for one rank that has all layers,
    config  the layers of its stage, cut for the ranks of that; whole_config all layers, cut so.
    link    to the stages around, None where there is one.
    load    reads the parameters again.
    """

    share: ModelSpec
    config: ModelConfig
    whole_config: ModelConfig
    source: WeightSource
    parameters: DecoderParameters
    load: Callable[[], DecoderParameters]
    link: StageLink | None

    @classmethod
    def read(
        cls, model: ModelSpec, source: WeightSource, board: RankBoard, number: int, parts: int, wait: Wait,
        beat: Callable[[], None], reread: Callable[[Callable[[], DecoderParameters]], DecoderParameters],
    ) -> Self:  # fmt: skip
        """Reads the parameters of the rank of this number on the board, which says what they take. `reread` is what
        later reads go through. Raises CannotShard, CheckpointError."""
        config, ranks = source.config, board.ranks // board.stages
        link = StageLink(board, number, config.hidden, wait) if board.stages > 1 else None
        own = source if link is None else source.stage(stage_layers(config, board.stages)[link.stage])
        if parts > 1:
            exchange = HostExchange(board, number, parts, wait)
            shard = own.cut(exchange.shard, parts=parts)

        def load() -> DecoderParameters:
            return shard.load(exchange, beat) if parts > 1 else own.load(beat)

        parameters = load()
        board.weights_bytes_W[number] = weights_bytes(parameters)
        return cls(
            share_of(model, ranks), shard.config if parts > 1 else own.config, shard_config(config, ranks), source,
            parameters, lambda: reread(load), link,
        )  # fmt: skip

    def blocks(self, tokens: int, free_bytes: int) -> list[int]:
        """How many blocks each group's pool has, where so many bytes are free for all ranks that have the same heads.
        Raises DoesNotFit."""
        return plan_blocks(self.share, self.whole_config, self.source.dtype, tokens, free_bytes)

    def open(self, blocks: list[int], tokens: int, extents: list[int] | None = None) -> CpuModel:
        """The model of these parameters. `extents`: how many blocks each extent of a group has, as rank 0 says."""
        layers = self.config.layers, self.whole_config.layers
        return CpuModel(
            _of_layers(self.share, *layers), self.config, self.parameters, self.load, blocks, self.source.dtype, tokens,
            extents=extents,
        )  # fmt: skip

    def stage_of(self, opened: CpuModel, tokens: int, beat: Callable[[], None]) -> CpuStage:
        """What computes its layers, where there are several stages."""
        assert self.link is not None
        return CpuStage(self.config, opened.memory, tokens, self.link.is_last, beat)


def share_of(model: ModelSpec, ranks: int) -> ModelSpec:
    """What the spec means for one rank of so many that have the same layers."""
    kv_bytes = None if model.kv_bytes is None else model.kv_bytes // ranks
    kept_bytes, host_bytes = model.kept_kv_bytes // ranks, model.host_kv_bytes // ranks
    return msgspec.structs.replace(model, kv_bytes=kv_bytes, kept_kv_bytes=kept_bytes, host_kv_bytes=host_bytes)


def _of_layers(share: ModelSpec, own: int, whole: int) -> ModelSpec:
    """The same for a stage of some of the layers."""
    kv_bytes = None if share.kv_bytes is None else share.kv_bytes * own // whole
    return msgspec.structs.replace(share, kv_bytes=kv_bytes, kept_kv_bytes=share.kept_kv_bytes * own // whole)
