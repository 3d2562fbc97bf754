"""A packed step on a GPU: the kernels it goes through, and the memory that stays in its place from step to step.

Everything is made for a number of rows, its bucket; the step that lies in `words` has as many or fewer. So what is
captured once in a CUDA graph computes any step of that size. What comes after a step's own rows is never read.

A linear layer's result comes in parts, [P, T, N], which whoever takes it adds up.

T rows of the bucket, R wanted rows, H hidden size, W width of all heads or words of a bit mask, P positions, D head
size, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from engine.bf12.codec import Bf12Weight
from engine.kernels.attention import AttentionScratch, attend, attention_layout
from engine.kernels.elementwise import cap_logits
from engine.kernels.embedding import embed
from engine.kernels.packed_rows import new_packed
from engine.kernels.ranks.exchange import RankWindows, add_norm_ranks, share_tokens
from engine.kernels.ranks.handover import StageWindows, hand_on, take_over
from engine.kernels.rms_norm import add_norm, gather
from engine.kernels.rope import Rotation, rotate_and_write
from engine.kvcache.layer_pools import LayerPools
from engine.layers.rank_shard import RankShard
from engine.models.decoder_config import ModelConfig
from engine.models.rope import RopeKind, rope_kinds
from engine.step.attention_plan import AttentionLayout

__all__ = ["GpuStep", "RankWindows", "StageWindows", "StepBuffers"]
from engine.step.layout import Count


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Memory that outlives a graph: the packed step with its attention plan, the sum of its rows and their last
    attention; the tokens sampled from them, to which the next step may point, with their masks, or their vectors; and
    embeddings that are no token's but an image's."""

    words: Tensor  # int32
    sum_TH: Tensor  # float32
    attended_TW: Tensor  # in the last layer
    sampled_R: Tensor  # int32
    masks_RW: Tensor  # int32: of the masked rows, in their order
    embeddings_EH: Tensor  # that tokens may name
    vectors_RH: Tensor  # float32, of no width where the model gives text
    rotations: tuple[Rotation, ...]  # of each layer
    layout: AttentionLayout
    scratch: AttentionScratch
    tables: tuple[tuple[Tensor, Tensor], ...]  # those of the rotations and their like in host memory

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return self.attended_TW.dtype

    @classmethod
    def make(
        cls, config: ModelConfig, dtype: torch.dtype, device: torch.device, words: int, rows: int, sampled: int,
        context_tokens: int, kept: int = 0, embedding_rows: int = 0,
    ) -> Self:  # fmt: skip
        """`kept`: how many tokens there is room for behind those that a step samples; embedding_rows: for how many
        embeddings."""
        kinds = rope_kinds(config)
        tables = {
            kind: kind.tables(config.head_dim, context_tokens) for kind in dict.fromkeys(kinds) if kind is not None
        }
        placed = {kind: _placed(pair, device) for kind, pair in tables.items()}
        spans = tuple(group.span for group in config.kv_groups)
        layout = attention_layout(spans, config.heads, config.kv_heads, sampled, device)
        return cls(
            torch.zeros(words, dtype=torch.int32, device=device),
            torch.zeros(rows, config.hidden, device=device),
            torch.zeros(rows, config.heads * config.head_dim, dtype=dtype, device=device),
            torch.zeros(sampled + kept, dtype=torch.int32, device=device),
            torch.zeros(sampled, -(-config.vocabulary // 32), dtype=torch.int32, device=device),
            torch.zeros(embedding_rows, config.hidden, dtype=dtype, device=device),
            torch.zeros(sampled, config.hidden if config.vectors else 0, device=device),
            tuple(_rotation(config, layer, kind, placed) for layer, kind in enumerate(kinds)),
            layout,
            AttentionScratch.make(layout, config.heads, config.head_dim, rows, device),
            tuple(
                (target, table.pin_memory() if device.type == "cuda" else table)
                for kind, pair in tables.items()
                for target, table in zip(placed[kind], pair, strict=True)
            ),
        )

    def share_sampled(self, windows: RankWindows) -> None:
        """Queues what gives all ranks the tokens that rank 0 sampled."""
        share_tokens(windows, self.sampled_R)

    def renew(self) -> None:
        """Queues what makes the buffers as new, whatever lies in their memory."""
        scratch = self.scratch
        for tensor in (
            self.words, self.sum_TH, self.attended_TW, self.sampled_R, self.masks_RW, self.embeddings_EH,
            self.vectors_RH, scratch.partial_PHD, scratch.peak_PH, scratch.total_PH, scratch.counters,
        ):  # fmt: skip
            tensor.zero_()
        for tensor, table in self.tables:
            tensor.copy_(table, non_blocking=True)


def _placed(tables: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    cos_PD, sin_PD = tables
    return cos_PD.to(device, copy=True), sin_PD.to(device, copy=True)


def _rotation(
    config: ModelConfig, layer: int, kind: RopeKind | None, tables: Mapping[RopeKind, tuple[Tensor, Tensor]]
) -> Rotation:
    rotation = Rotation(None) if kind is None else Rotation(tables[kind], kind.period or 0, config.rotated_norm)
    heat = config.temperature_of(layer)
    return rotation if heat is None else replace(rotation, unit=heat.unit, gain=heat.gain, ahead=heat.ahead)


class GpuStep:
    """The step in the buffers' words, on its way through the layers (a ForwardStep) in a bucket of `rows` rows:
    those of the step for its body, the sampled ones for its head. `wide` says whether it may have wide tiles."""

    def __init__(
        self, config: ModelConfig, space: StepBuffers, pools: LayerPools, rows: int, wide: bool = False,
        windows: RankWindows | None = None, stages: StageWindows | None = None,
    ) -> None:  # fmt: skip
        """With the `windows` of several ranks, what is added is this rank's part, and so is the embedding; with those
        of `stages` the sum comes from the stage before, but for the first one's, and goes on to the next."""
        self._config = config
        self._windows = windows
        self._stages = stages
        self._embedded_1TH: Tensor | None = None
        self._space = space
        self._pools = pools
        self._rows = rows
        self._sum_TH = space.sum_TH[:rows]
        self.count: Tensor | None = space.words[Count.TOKENS : Count.TOKENS + 1]
        self._dtype = space.dtype
        self._wide = wide

    def embed(self, embedding: Tensor | Bf12Weight) -> None:
        space, scale = self._space, self._config.embedding_scale
        if scale != 1.0:
            scale = torch.tensor(scale, dtype=self._dtype).item()
        if self._windows is None:
            embed(space.words, space.sampled_R, embedding, space.embeddings_EH, self._sum_TH, scale)
            return
        shard = RankShard(self._windows.rank, self._windows.ranks)
        self._sum_TH.zero_()
        self._embedded_1TH = self._sum_TH.new_empty(1, *self._sum_TH.shape)
        embed(
            space.words, space.sampled_R, embedding, space.embeddings_EH, self._embedded_1TH[0], scale,
            shard.of(self._config.vocabulary).start,
        )  # fmt: skip

    def add_norm(
        self, added: Tensor | None, weight_H: Tensor, behind_H: Tensor | None = None, packs: bool = False
    ) -> Tensor:
        if packs and self._windows is None and self._dtype == torch.bfloat16:
            packed_TP = new_packed(len(self._sum_TH), self._config.hidden, self._sum_TH.device)
            add_norm(self._sum_TH, added, weight_H, self._config.norm_epsilon, packed_TP, behind_H)
            return packed_TP
        normed_TH = self._sum_TH.new_empty(self._sum_TH.shape, dtype=self._dtype)
        if self._windows is None:
            add_norm(self._sum_TH, added, weight_H, self._config.norm_epsilon, normed_TH, behind_H)
            return normed_TH
        parts_PTH, self._embedded_1TH = self._embedded_1TH if added is None else added, None
        if parts_PTH is None:  # the sum is whole on each rank, as another stage gave it
            add_norm(self._sum_TH, None, weight_H, self._config.norm_epsilon, normed_TH)
            return normed_TH
        add_norm_ranks(self._windows, self._sum_TH, parts_PTH, weight_H, self._config.norm_epsilon, normed_TH, behind_H)
        return normed_TH

    def resume(self) -> None:
        """Goes on with the sum that the stage before hands on, of as many rows."""
        assert self._stages is not None
        take_over(self._stages, self._sum_TH)

    def resume_rows(self) -> None:
        """The same of the wanted rows alone, which come back from the last stage."""
        self._sum_TH = self._space.sum_TH.new_empty(self._rows, self._config.hidden)
        self.count = self._space.words[Count.ROWS : Count.ROWS + 1]
        self.resume()

    def add(self, added: Tensor, behind_H: Tensor | None = None) -> None:
        """Completes the sum, and hands it on to the next stage."""
        assert self._stages is not None
        epsilon = self._config.norm_epsilon
        if self._windows is None:
            hand_on(self._stages, self._sum_TH, added, epsilon, behind_H)
            return
        unused_TH = self._sum_TH.new_empty(self._sum_TH.shape, dtype=self._dtype)
        ones_H = self._sum_TH.new_ones(self._config.hidden)
        add_norm_ranks(self._windows, self._sum_TH, added, ones_H, epsilon, unused_TH, behind_H)
        hand_on(self._stages, self._sum_TH, None, epsilon)

    def rotate_and_write(self, qkv: Tensor, qk_norm: Tensor | None, layer: int) -> Tensor:
        space, config = self._space, self._config
        q_THD = qkv.new_empty(self._rows, config.heads, config.head_dim, dtype=self._dtype)
        rotate_and_write(
            space.words, qkv, qk_norm, config.norm_epsilon, space.rotations[layer], q_THD, self._pools.layers[layer],
            space.layout.spans.index(config.spans[layer]),
        )  # fmt: skip
        return q_THD

    def attend(self, q_THD: Tensor, layer: int, sinks_H: Tensor | None = None) -> Tensor:
        config = self._config
        space, out_THD = self._space, torch.empty_like(q_THD)
        if layer == config.layers - 1:
            out_THD = space.attended_TW[: self._rows].view(q_THD.shape)
        attend(
            space.words, q_THD, self._pools.layers[layer], out_THD, space.scratch, space.layout,
            config.spans[layer], self._pools.shape.block_tokens, self._wide, config.attention_scale,
            config.attention_cap, sinks_H,
        )  # fmt: skip
        return out_THD.view(self._rows, -1)

    def narrow(self) -> Tensor:
        space, rows = self._space, self._rows
        self._sum_TH = space.sum_TH.new_empty(rows, self._config.hidden)
        self.count = space.words[Count.ROWS : Count.ROWS + 1]
        attended_RW = space.attended_TW.new_empty(rows, space.attended_TW.shape[1])
        gather(space.words, space.sum_TH, space.attended_TW, self._sum_TH, attended_RW)
        return attended_RW

    def cap(self, logits_RV: Tensor) -> Tensor:
        return cap_logits(logits_RV, self._config.logits_cap) if self._config.logits_cap else logits_RV
