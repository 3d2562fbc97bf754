"""A packed step on a GPU: the kernels it goes through, and the memory that stays in its place from step to step.

Everything is made for a number of rows, its bucket; the step that lies in `words` has as many or fewer. So what is
captured once in a CUDA graph computes any step of that size. What comes after a step's own rows is never read.

A linear layer's result comes in parts, [P, T, N], which whoever takes it adds up.

T rows of the bucket, R wanted rows, H hidden size, W width of all heads or words of a bit mask, P positions, D head
size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from engine.bf12.codec import Bf12Weight
from engine.kernels.attention import AttentionScratch, attend, attention_layout
from engine.kernels.embedding import embed
from engine.kernels.rms_norm import add_norm, gather
from engine.kernels.rope import rotate_and_write
from engine.kvcache.tensors import KVPool
from engine.models.config import ModelConfig
from engine.models.llama import rope_tables
from engine.step.attention_plan import AttentionLayout


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Memory that outlives a graph: the packed step with its attention plan, the sum of its rows and their last
    attention; the tokens sampled from them, to which the next step may point, with their masks, or their vectors."""

    words: Tensor  # int32
    sum_TH: Tensor  # float32
    attended_TW: Tensor  # in the last layer
    sampled_R: Tensor  # int32
    masks_RW: Tensor  # int32: of the masked rows, in their order
    vectors_RH: Tensor  # float32, of no width where the model gives text
    cos_PD: Tensor
    sin_PD: Tensor
    layout: AttentionLayout
    scratch: AttentionScratch
    tables: tuple[Tensor, Tensor]  # cos and sin in host memory

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return self.attended_TW.dtype

    @classmethod
    def make(
        cls, config: ModelConfig, dtype: torch.dtype, device: torch.device, words: int, rows: int, sampled: int,
        context_tokens: int,
    ) -> Self:  # fmt: skip
        cos_PD, sin_PD = rope_tables(config.rope, config.head_dim, context_tokens)
        layout = attention_layout(tuple(dict.fromkeys(config.windows)), config.heads, config.kv_heads, sampled, device)
        return cls(
            torch.zeros(words, dtype=torch.int32, device=device),
            torch.zeros(rows, config.hidden, device=device),
            torch.zeros(rows, config.heads * config.head_dim, dtype=dtype, device=device),
            torch.zeros(sampled, dtype=torch.int32, device=device),
            torch.zeros(sampled, -(-config.vocabulary // 32), dtype=torch.int32, device=device),
            torch.zeros(sampled, config.hidden if config.vectors else 0, device=device),
            cos_PD.to(device, copy=True),
            sin_PD.to(device, copy=True),
            layout,
            AttentionScratch.make(layout, config.heads, config.head_dim, rows, device),
            (cos_PD.pin_memory(), sin_PD.pin_memory()) if device.type == "cuda" else (cos_PD, sin_PD),
        )

    def renew(self) -> None:
        """Queues what makes the buffers as new, whatever lies in their memory."""
        scratch = self.scratch
        for tensor in (
            self.words, self.sum_TH, self.attended_TW, self.sampled_R, self.masks_RW, self.vectors_RH,
            scratch.partial_PHD, scratch.peak_PH, scratch.total_PH, scratch.counters,
        ):  # fmt: skip
            tensor.zero_()
        for tensor, table in zip((self.cos_PD, self.sin_PD), self.tables, strict=True):
            tensor.copy_(table, non_blocking=True)


class GpuStep:
    """The step in the buffers' words, on its way through the layers (a ForwardStep) in a bucket of `rows` rows:
    those of the step for its body, the sampled ones for its head. `wide` says whether it may have wide tiles."""

    def __init__(self, config: ModelConfig, space: StepBuffers, pool: KVPool, rows: int, wide: bool = False) -> None:
        self._config = config
        self._space = space
        self._pool = pool
        self._rows = rows
        self._sum_TH = space.sum_TH[:rows]
        self._dtype = space.dtype
        self._wide = wide

    def embed(self, embedding: Tensor | Bf12Weight) -> None:
        embed(self._space.words, self._space.sampled_R, embedding, self._sum_TH)

    def add_norm(self, added: Tensor | None, weight_H: Tensor) -> Tensor:
        normed_TH = self._sum_TH.new_empty(self._sum_TH.shape, dtype=self._dtype)
        add_norm(self._sum_TH, added, weight_H, self._config.norm_epsilon, normed_TH)
        return normed_TH

    def rotate_and_write(self, qkv: Tensor, qk_norm: Tensor | None, layer: int) -> Tensor:
        space, config = self._space, self._config
        q_THD = qkv.new_empty(self._rows, config.heads, config.head_dim, dtype=self._dtype)
        kv_SW = self._pool.layers[layer]
        rotate_and_write(space.words, qkv, qk_norm, config.norm_epsilon, space.cos_PD, space.sin_PD, q_THD, kv_SW)
        return q_THD

    def attend(self, q_THD: Tensor, layer: int) -> Tensor:
        space, out_THD = self._space, torch.empty_like(q_THD)
        if layer == self._config.layers - 1:
            out_THD = space.attended_TW[: self._rows].view(q_THD.shape)
        attend(
            space.words, q_THD, self._pool.layers[layer], out_THD, space.scratch, space.layout,
            self._config.windows[layer], self._pool.shape.block_tokens, self._wide,
        )  # fmt: skip
        return out_THD.view(self._rows, -1)

    def narrow(self) -> Tensor:
        space, rows = self._space, self._rows
        self._sum_TH = space.sum_TH.new_empty(rows, self._config.hidden)
        attended_RW = space.attended_TW.new_empty(rows, space.attended_TW.shape[1])
        gather(space.words, space.sum_TH, space.attended_TW, self._sum_TH, attended_RW)
        return attended_RW
