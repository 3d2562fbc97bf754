"""A packed step on a CPU: its tensors, which of its rows read which slots together, and the reading itself.

A step mixes prompt chunks and single tokens. Single tokens are computed together, one group per span of keys; a
chunk is a group, or several where its rows' spans differ. It knows no sequences, no scheduling, no kernels' insides.

T rows, S slices of a group, Q query rows of one small matmul (whole tiles), L keys of a slice, B blocks, N KV heads,
G heads per KV head, H = N·G heads, D head size, W slot width.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.bf12.codec import Bf12Weight
from engine.kernels import reference as ops
from engine.kvcache.tensors import KVPool
from engine.models.config import ModelConfig
from engine.step.layout import Int32s, StepBatch


class CpuStep:
    """A step on its way through the layers (a ForwardStep): tensors made once and used by each layer.

    Making it costs some 100 µs and, per chunk, a mask of its tokens × context.
    """

    def __init__(self, batch: StepBatch, config: ModelConfig, rotary: tuple[Tensor, Tensor], pool: KVPool) -> None:
        positions_T = torch.from_numpy(batch.positions_T).long()
        self._tokens_T = torch.from_numpy(batch.tokens_T)
        self._slots_T = torch.from_numpy(batch.slots_T).long()
        self._rows_R = torch.from_numpy(batch.rows_R).long()
        self._cos_T1D, self._sin_T1D = (table_PD[positions_T, None] for table_PD in rotary)
        self._config = config
        self._pool = pool
        fold = config.heads // config.kv_heads
        self._groups = {window: _groups(batch, window, pool, fold) for window in set(config.windows)}

    def embed(self, embedding: Tensor | Bf12Weight) -> None:
        assert isinstance(embedding, Tensor)  # coded ones are expanded while they are loaded
        self._sum_TH = torch.nn.functional.embedding(self._tokens_T, embedding).float()
        self._dtype = embedding.dtype

    def add_norm(self, added_TH: Tensor | None, weight_H: Tensor) -> Tensor:
        if added_TH is not None:
            self._sum_TH.add_(added_TH)
        return self._norm(self._sum_TH, weight_H)

    def rotate_and_write(self, qkv_TW: Tensor, qk_norm: Tensor | None, layer: int) -> Tensor:
        heads, kv_heads, head_dim = self._config.heads, self._config.kv_heads, self._config.head_dim
        qkv_THD = qkv_TW.view(len(qkv_TW), -1, head_dim)
        qk_THD = qkv_THD[:, : heads + kv_heads]
        if qk_norm is not None:
            qk_THD.copy_(self._norm(qk_THD, qk_norm))
        ops.rotate_(qk_THD, self._cos_T1D, self._sin_T1D)
        self._pool.write(layer, self._slots_T, qkv_TW[:, heads * head_dim :])
        return qkv_THD[:, :heads]

    def attend(self, q_THD: Tensor, layer: int) -> Tensor:
        t, h, d = q_THD.shape
        n = self._pool.shape.kv_heads
        groups = self._groups[self._config.windows[layer]]
        q_TNGD = q_THD.view(t, n, h // n, d)
        if len(groups) == 1:
            out_TNGD = _attend(q_TNGD, layer, groups[0], self._pool)
        else:
            out_TNGD = q_THD.new_empty(t, n, h // n, d)
            for group in groups:
                if isinstance(group.rows, slice):
                    out_TNGD[group.rows] = _attend(q_TNGD[group.rows], layer, group, self._pool)
                else:
                    rows_TNGD = q_TNGD.index_select(0, group.rows)
                    out_TNGD.index_copy_(0, group.rows, _attend(rows_TNGD, layer, group, self._pool))
        self._attended_TW = out_TNGD.reshape(t, h * d)
        return self._attended_TW

    def narrow(self) -> Tensor:
        self._sum_TH = self._sum_TH.index_select(0, self._rows_R)
        return self._attended_TW.index_select(0, self._rows_R)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.rms_norm(x, weight, self._config.norm_epsilon, self._dtype)


class _Keys:
    """Keys first … last−1 of S slices, of which each sees those up to its own position: where they are, and the memory
    that each layer's blocks are read into.

    blocks_B     int64; blocks after the last row's position are the pool's empty block.
    unwritten_U  int64, rows of memory_LW that lie in a real block, but after the last row's position.
    """

    def __init__(
        self, batch: StepBatch, slices_S: NDArray[np.int64], positions_S: Int32s, span: tuple[int, int], pool: KVPool
    ) -> None:
        shape, (first, last) = pool.shape, span
        columns_B = np.arange(first // shape.block_tokens, last // shape.block_tokens)
        in_table_B = np.minimum(columns_B, batch.tables_SW.shape[1] - 1)
        blocks_SB = batch.tables_SW[slices_S[:, None], in_table_B].astype(np.int64)
        ends_S1 = positions_S[:, None] // shape.block_tokens
        blocks_SB[columns_B > ends_S1] = pool.empty
        self.keys_L = np.arange(first, last)
        unwritten_SL = (self.keys_L > positions_S[:, None]) & (self.keys_L // shape.block_tokens == ends_S1)
        self.unwritten_U = torch.from_numpy(np.flatnonzero(unwritten_SL))
        self.blocks_B = torch.from_numpy(blocks_SB.reshape(-1))
        self.memory_LW = torch.empty(unwritten_SL.size, shape.slot_width, dtype=shape.dtype)
        kv = self.memory_LW.view(len(slices_S), last - first, 2, shape.kv_heads, shape.head_dim)
        self.k_SNLD, self.v_SNLD = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _AttentionGroup:
    """Rows that attend together over equally many keys: one row of each of several slices, or a run of one slice.

    Its tensors are used by one layer after the other. `q` is what the kernel takes, `q_TNGD` the same memory seen as
    the step's rows; padding rows stay zero. `k` and `v` look into the memory of the keys.
    """

    rows: slice | Tensor  # in T: a run, or single rows
    keys: _Keys
    q: Tensor
    q_TNGD: Tensor
    k: Tensor
    v: Tensor
    mask_S1QL: Tensor  # 0 or −inf, in the dtype of q


def _attend(q_TNGD: Tensor, layer: int, group: _AttentionGroup, pool: KVPool) -> Tensor:
    pool.read(layer, group.keys.blocks_B, group.keys.unwritten_U, group.keys.memory_LW)
    group.q_TNGD.copy_(q_TNGD)
    out = ops.attend(group.q, group.k, group.v, group.mask_S1QL, pool.shape.head_dim**-0.5)
    count, _, fold, _ = q_TNGD.shape  # padding is left out
    return out[:, :, :count].permute(2, 0, 1, 3) if isinstance(group.rows, slice) else out[:, :, :fold]


def _groups(batch: StepBatch, window: int | None, pool: KVPool, fold: int) -> list[_AttentionGroup]:
    """Rows are cut where their slice or their span of keys changes, so that a row's span depends on its position only.

    Runs of one row, from whatever slices, are put together by span; longer runs stay alone.
    """
    slice_T = np.repeat(np.arange(len(batch.contexts_S)), np.diff(batch.query_starts_S1))
    first_T, last_T = ops.key_spans(batch.positions_T, window)
    cut_T = (np.diff(slice_T) != 0) | (np.diff(first_T) != 0) | (np.diff(last_T) != 0)
    edges = [0, *(np.flatnonzero(cut_T) + 1).tolist(), len(slice_T)]
    singles: dict[tuple[int, int], list[int]] = defaultdict(list)
    groups = []
    for start, end in pairwise(edges):
        span = int(first_T[start]), int(last_T[start])
        if end - start == 1:
            singles[span].append(start)
        else:
            keys = _Keys(batch, slice_T[start : start + 1], batch.positions_T[end - 1 : end], span, pool)
            groups.append(_run(batch.positions_T[start:end], slice(start, end), keys, window, fold))
    for span, rows in singles.items():
        keys = _Keys(batch, slice_T[rows], batch.positions_T[rows], span, pool)
        groups.append(_singles(batch.positions_T[rows], torch.tensor(rows), keys, window, fold))
    return groups


def _singles(positions_S: Int32s, rows: Tensor, keys: _Keys, window: int | None, fold: int) -> _AttentionGroup:
    """One row of each slice: the heads that share a KV head are the rows of one small matmul."""
    slices, kv_heads, _, head_dim = keys.k_SNLD.shape
    padded = -(-fold // ops.ROW_TILE) * ops.ROW_TILE
    q_SNQD = torch.zeros(slices, kv_heads, padded, head_dim, dtype=keys.memory_LW.dtype)
    mask_S1QL = _mask(np.repeat(positions_S[:, None], padded, 1), keys, window)
    return _AttentionGroup(rows, keys, q_SNQD, q_SNQD[:, :, :fold], keys.k_SNLD, keys.v_SNLD, mask_S1QL)


def _run(positions_T: Int32s, rows: slice, keys: _Keys, window: int | None, fold: int) -> _AttentionGroup:
    """A run of one slice's rows: KV heads take the batch's place, so that G heads read one K without a copy."""
    _, kv_heads, length, head_dim = keys.k_SNLD.shape
    count = len(positions_T)
    padded_Q = np.pad(positions_T, (0, -count % ops.ROW_TILE), mode="edge")
    q_NGQD = torch.zeros(kv_heads, fold, len(padded_Q), head_dim, dtype=keys.memory_LW.dtype)
    k_NGLD, v_NGLD = (
        kv_1NLD.transpose(0, 1).expand(kv_heads, fold, length, head_dim) for kv_1NLD in (keys.k_SNLD, keys.v_SNLD)
    )
    return _AttentionGroup(
        rows, keys, q_NGQD, q_NGQD[:, :, :count].permute(2, 0, 1, 3), k_NGLD, v_NGLD,
        _mask(padded_Q[None], keys, window),
    )  # fmt: skip


def _mask(positions_SQ: Int32s, keys: _Keys, window: int | None) -> Tensor:
    positions_SQ1 = torch.from_numpy(positions_SQ)[:, None, :, None]
    keys_L = torch.from_numpy(keys.keys_L)
    hidden = keys_L > positions_SQ1
    if window is not None:
        hidden |= keys_L <= positions_SQ1 - window
    return torch.zeros(hidden.shape, dtype=keys.memory_LW.dtype).masked_fill_(hidden, float("-inf"))
