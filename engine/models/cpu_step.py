"""A packed step on a CPU: its tensors, which of its rows read which slots together, and the reading itself.

A step mixes runs of prompts and single tokens. Single tokens are computed together, one group for the same tiles of
keys; a run is a group, or several where its rows' tiles differ. It knows no sequences, no scheduling and no kernels'
insides.

T rows, S slices of a group, Q query rows of one small matmul (whole tiles), L keys of a slice, B blocks, N KV heads,
G heads per KV head, H = N·G heads, D head size, W slot width.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.bf12.codec import Bf12Weight
from engine.kernels import reference as ops
from engine.kvcache.layer_pools import LayerPools
from engine.kvcache.tensors import KVPool
from engine.layers import row_ops
from engine.models.decoder_config import ModelConfig
from engine.models.rope import query_temperatures, rope_kinds
from engine.step.key_span import KeySpan
from engine.step.layout import EMBEDDING_TOKEN, Int32s, StepBatch


class CpuLayers:
    """How a model's layers differ, found out once: whose keys they see, and the tables that they rotate by in contexts
    of so many tokens. Both are numbered; a layer that does not rotate has no table."""

    def __init__(self, config: ModelConfig, context_tokens: int) -> None:
        self.spans = [group.span for group in config.kv_groups]
        self.group_of = [self.spans.index(span) for span in config.spans]
        kinds = rope_kinds(config)
        distinct = [kind for kind in dict.fromkeys(kinds) if kind is not None]
        self._tables = [(*kind.tables(config.head_dim, context_tokens), kind.period) for kind in distinct]
        self.table_of = [None if kind is None else distinct.index(kind) for kind in kinds]

    def turns(self, positions_T: Tensor) -> list[tuple[Tensor, Tensor]]:
        """cos and sin of these positions, [T, 1, D], in each table."""
        turns = []
        for cos_PD, sin_PD, period in self._tables:
            places_T = positions_T if period is None else positions_T % period
            turns.append((cos_PD[places_T, None], sin_PD[places_T, None]))
        return turns


class CpuStep:
    """A step on its way through the layers (a ForwardStep): tensors made once and used by each layer.

    Making it costs some 100 µs and, per chunk, a mask of its tokens × context.

    count     None: its tensors have its own rows alone.
    sum_TH    of the rows, once they are embedded, float32.
    turns     cos and sin [T, 1, D] of the rows in each of the layers' tables.
    slots_GT  where each group's K and V of the rows go.
    groups    of rows that attend together, in each group of layers.
    """

    count: Tensor | None = None

    def __init__(
        self, batch: StepBatch, config: ModelConfig, layers: CpuLayers, pool: LayerPools, buffer_EH: Tensor
    ) -> None:
        """`buffer_EH` has the embeddings that tokens may name."""
        positions_T = torch.from_numpy(batch.positions_T).long()
        self._tokens_T = torch.from_numpy(batch.tokens_T)
        self.slots_GT = torch.from_numpy(batch.slots_GT).long()
        self._rows_R = torch.from_numpy(batch.rows_R).long()
        self._layers, self.turns = layers, layers.turns(positions_T)
        self._temperature_T11 = None
        if config.temperature is not None:
            self._temperature_T11 = query_temperatures(config.temperature, positions_T)[:, None, None]
        self._config = config
        self._pool = pool
        fold = config.heads // config.kv_heads
        ahead = config.vision is not None and config.vision.bidirectional
        ends_T = _seen_until(batch) if ahead else batch.positions_T
        self.groups = [
            _groups(batch, ends_T, group, span, pool.pools[group], fold) for group, span in enumerate(layers.spans)
        ]
        self._buffer_EH = buffer_EH

    def embed(self, embedding: Tensor | Bf12Weight) -> None:
        assert isinstance(embedding, Tensor)  # coded ones are expanded while they are loaded
        rows_T = self._tokens_T - EMBEDDING_TOKEN
        named_T = rows_T >= 0
        self.sum_TH = torch.nn.functional.embedding(self._tokens_T.masked_fill(named_T, 0), embedding).float()
        self._dtype = embedding.dtype
        if self._config.embedding_scale != 1.0:
            self.sum_TH.mul_(torch.tensor(self._config.embedding_scale, dtype=self._dtype).item())
        if named_T.any():  # these are as a layer takes them
            self.sum_TH[named_T] = self._buffer_EH[rows_T[named_T]].float()

    def resume(self, sum_TH: Tensor, dtype: torch.dtype) -> None:
        """Goes on with the sum that an earlier stage computed, in a model of this dtype; in the same memory."""
        self.sum_TH, self._dtype = sum_TH, dtype

    def add_norm(
        self, added_TH: Tensor | None, weight_H: Tensor, behind_H: Tensor | None = None, packs: bool = False
    ) -> Tensor:
        """Rows are never packed: no processor multiplies them so."""
        if added_TH is not None:
            added_TH = self._in_one_part(added_TH, behind_H)
        return row_ops.add_norm(self.sum_TH, added_TH, weight_H, self._config.norm_epsilon, self._dtype)

    def add(self, added_TH: Tensor, behind_H: Tensor | None = None) -> None:
        self.sum_TH.add_(self._in_one_part(added_TH, behind_H))

    def _in_one_part(self, added_TH: Tensor, behind_H: Tensor | None) -> Tensor:
        if added_TH.ndim == 3:  # the parts of all ranks
            added_TH = ops.sum_parts(added_TH)
        if behind_H is not None:
            added_TH = ops.rms_norm(added_TH, behind_H, self._config.norm_epsilon, torch.float32)
        return added_TH

    def rotate_and_write(self, qkv_TW: Tensor, qk_norm: Tensor | None, layer: int) -> Tensor:
        heads, kv_heads, head_dim = sizes = self._config.heads, self._config.kv_heads, self._config.head_dim
        cache, slots_T = self._pool.layers[layer], self.slots_GT[self._layers.group_of[layer]]
        plain = self._temperature_T11 is None and not self._config.rotated_norm
        if plain and row_ops.can_rotate_and_write(qkv_TW, cache, head_dim):
            table = self._layers.table_of[layer]
            turns = None if table is None else self.turns[table]
            row_ops.rotate_and_write(qkv_TW, qk_norm, turns, slots_T, cache, sizes, self._config.norm_epsilon)
            return qkv_TW.view(qkv_TW.shape[0], -1, head_dim)[:, :heads]
        qkv_THD = qkv_TW.view(len(qkv_TW), -1, head_dim)
        qk_THD = qkv_THD[:, : heads + kv_heads]
        if qk_norm is not None:
            qk_THD.copy_(self._norm(qk_THD, qk_norm))
        table = self._layers.table_of[layer]
        if table is not None:
            ops.rotate_(qk_THD, *self.turns[table])
            if self._config.rotated_norm:
                qk_THD.copy_(self._norm(qk_THD, None))
        if self._temperature_T11 is not None and self._config.temperature_of(layer) is not None:
            qk_THD[:, :heads].mul_(self._temperature_T11)
        self._pool.write(layer, slots_T, qkv_TW[:, heads * head_dim :])
        return qkv_THD[:, :heads]

    def attend(self, q_THD: Tensor, layer: int, sinks_H: Tensor | None = None) -> Tensor:
        t, h, d = q_THD.shape
        n = self._pool.shape.kv_heads
        softmax = _Softmax(self._config.attention_scale, self._config.attention_cap, sinks_H)
        groups = self.groups[self._layers.group_of[layer]]
        q_TNGD = q_THD.view(t, n, h // n, d)
        if len(groups) == 1:
            out_TNGD = _attend(q_TNGD, layer, groups[0], self._pool, softmax)
        else:
            out_TNGD = q_THD.new_empty(t, n, h // n, d)
            for group in groups:
                if isinstance(group.rows, slice):
                    out_TNGD[group.rows] = _attend(q_TNGD[group.rows], layer, group, self._pool, softmax)
                else:
                    rows_TNGD = q_TNGD.index_select(0, group.rows)
                    out_TNGD.index_copy_(0, group.rows, _attend(rows_TNGD, layer, group, self._pool, softmax))
        self._attended_TW = out_TNGD.reshape(t, h * d)
        return self._attended_TW

    def narrow(self) -> Tensor:
        self.sum_TH = self.sum_TH.index_select(0, self._rows_R)
        return self._attended_TW.index_select(0, self._rows_R)

    def cap(self, logits_RV: Tensor) -> Tensor:
        cap = self._config.logits_cap
        return ops.cap_(logits_RV.contiguous(), cap) if cap else logits_RV

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return ops.rms_norm(x, weight, self._config.norm_epsilon, self._dtype)


class _Keys:
    """Keys first … last−1 of S slices, of which each sees some up to its own end: where they are, and the memory that
    each layer's blocks are read into.

    blocks_B     int64; blocks that no row sees are the pool's empty block, for they need not be the slice's any more.
    unwritten_U  int64, rows of memory_LW that lie in a real block, but after the last key that a row sees.
    """

    def __init__(
        self, batch: StepBatch, group: int, slices_S: NDArray[np.int64], seen_S: NDArray[np.int64],
        last_S: Int32s, tiles: tuple[int, int], pool: KVPool,
    ) -> None:  # fmt: skip
        """A slice's rows see keys from seen_S up to last_S."""
        shape, (first, last) = pool.shape, tiles
        columns_B = np.arange(first // shape.block_tokens, last // shape.block_tokens)
        table_SW, starts_S = batch.tables_GSW[group], batch.table_starts_GS[group, slices_S]
        in_table_SB = np.clip(columns_B - starts_S[:, None], 0, table_SW.shape[1] - 1)
        blocks_SB = table_SW[slices_S[:, None], in_table_SB].astype(np.int64)
        ends_S1 = last_S[:, None] // shape.block_tokens
        blocks_SB[columns_B > ends_S1] = pool.empty
        if seen_S.any():
            blocks_SB[columns_B < seen_S[:, None] // shape.block_tokens] = pool.empty
        self.keys_L = np.arange(first, last)
        unwritten_SL = (self.keys_L > last_S[:, None]) & (self.keys_L // shape.block_tokens == ends_S1)
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


class _Softmax(NamedTuple):
    """How a layer weighs keys, as reference.attend takes it."""

    scale: float
    cap: float
    sinks_H: Tensor | None


def _attend(q_TNGD: Tensor, layer: int, group: _AttentionGroup, pool: LayerPools, softmax: _Softmax) -> Tensor:
    keys = group.keys
    if not row_ops.read_blocks(pool.layers[layer], keys.blocks_B, keys.unwritten_U, keys.memory_LW):
        pool.read(layer, keys.blocks_B, keys.unwritten_U, keys.memory_LW)
    group.q_TNGD.copy_(q_TNGD)
    count, kv_heads, fold, _ = q_TNGD.shape  # padding is left out
    run, sinks = isinstance(group.rows, slice), softmax.sinks_H
    if sinks is not None:
        # A run has a KV head's heads beside each other and its rows behind them, single rows have these in a row.
        sinks = sinks.view(kv_heads, fold, 1) if run else _padded(sinks.view(kv_heads, fold), group.q.shape[2])
    out = ops.attend(group.q, group.k, group.v, group.mask_S1QL, softmax.scale, softmax.cap, sinks)
    return out[:, :, :count].permute(2, 0, 1, 3) if run else out[:, :, :fold]


def _padded(sinks_NG: Tensor, rows: int) -> Tensor:
    return torch.nn.functional.pad(sinks_NG, (0, rows - sinks_NG.shape[1]))


def _seen_until(batch: StepBatch) -> Int32s:
    """The last key that each row sees: its own, or where it is of an image, which is one run of embeddings in its
    slice, that of the image's last row."""
    rows_T = np.arange(len(batch.tokens_T))
    is_image_T = batch.tokens_T >= EMBEDDING_TOKEN
    ends_T = ~is_image_T
    ends_T[batch.query_starts_S1[1:] - 1] = True
    ends_T[:-1] |= ~is_image_T[1:]
    lasts_T = np.flatnonzero(ends_T)[np.searchsorted(np.flatnonzero(ends_T), rows_T)]
    return np.asarray(batch.positions_T + (lasts_T - rows_T), np.int32)


def _groups(
    batch: StepBatch, ends_T: Int32s, group: int, span: KeySpan, pool: KVPool, fold: int
) -> list[_AttentionGroup]:
    """Rows are cut where their slice or their tiles of keys change, so that a row's tiles depend on its position only,
    and on the last key that it sees, ends_T.

    Runs of one row, from whatever slices, are put together by tiles; longer runs stay alone.
    """
    slice_T = np.repeat(np.arange(len(batch.contexts_S)), np.diff(batch.query_starts_S1))
    seen_T = span.firsts(batch.positions_T)
    first_T, last_T = ops.key_tiles(ends_T, seen_T)
    cut_T = (np.diff(slice_T) != 0) | (np.diff(first_T) != 0) | (np.diff(last_T) != 0)
    edges = [0, *(np.flatnonzero(cut_T) + 1).tolist(), len(slice_T)]
    singles: dict[tuple[int, int], list[int]] = defaultdict(list)
    groups = []
    for start, end in pairwise(edges):
        tiles = int(first_T[start]), int(last_T[start])
        if end - start == 1:
            singles[tiles].append(start)
        else:
            rows = slice(start, start + 1)
            keys = _Keys(batch, group, slice_T[rows], seen_T[rows], ends_T[end - 1 : end], tiles, pool)
            seen = _Seen(seen_T[start:end], ends_T[start:end])
            groups.append(_run(seen, slice(start, end), keys, fold))
    for tiles, singles_S in singles.items():
        seen = _Seen(seen_T[singles_S], ends_T[singles_S])
        keys = _Keys(batch, group, slice_T[singles_S], seen.first_Q, seen.last_Q, tiles, pool)
        groups.append(_singles(seen, torch.tensor(singles_S), keys, fold))
    return groups


class _Seen(NamedTuple):
    """The first and the last key that each of some rows sees."""

    first_Q: NDArray[np.int64]
    last_Q: Int32s


def _singles(seen: _Seen, rows: Tensor, keys: _Keys, fold: int) -> _AttentionGroup:
    """One row of each slice: the heads that share a KV head are the rows of one small matmul."""
    slices, kv_heads, _, head_dim = keys.k_SNLD.shape
    padded = -(-fold // ops.ROW_TILE) * ops.ROW_TILE
    q_SNQD = torch.zeros(slices, kv_heads, padded, head_dim, dtype=keys.memory_LW.dtype)
    mask_S1QL = _mask(np.repeat(seen.first_Q[:, None], padded, 1), np.repeat(seen.last_Q[:, None], padded, 1), keys)
    return _AttentionGroup(rows, keys, q_SNQD, q_SNQD[:, :, :fold], keys.k_SNLD, keys.v_SNLD, mask_S1QL)


def _run(seen: _Seen, rows: slice, keys: _Keys, fold: int) -> _AttentionGroup:
    """A run of one slice's rows: KV heads take the batch's place, so that G heads read one K without a copy."""
    _, kv_heads, length, head_dim = keys.k_SNLD.shape
    count = len(seen.last_Q)
    padding = (0, -count % ops.ROW_TILE)
    first_Q, last_Q = np.pad(seen.first_Q, padding, mode="edge"), np.pad(seen.last_Q, padding, mode="edge")
    q_NGQD = torch.zeros(kv_heads, fold, len(last_Q), head_dim, dtype=keys.memory_LW.dtype)
    k_NGLD, v_NGLD = (
        kv_1NLD.transpose(0, 1).expand(kv_heads, fold, length, head_dim) for kv_1NLD in (keys.k_SNLD, keys.v_SNLD)
    )
    return _AttentionGroup(
        rows, keys, q_NGQD, q_NGQD[:, :, :count].permute(2, 0, 1, 3), k_NGLD, v_NGLD,
        _mask(first_Q[None], last_Q[None], keys),
    )  # fmt: skip


def _mask(first_SQ: NDArray[np.int64], last_SQ: Int32s, keys: _Keys) -> Tensor:
    keys_L = torch.from_numpy(keys.keys_L)
    hidden = keys_L > torch.from_numpy(last_SQ)[:, None, :, None]
    if first_SQ.any():
        hidden |= keys_L < torch.from_numpy(first_SQ)[:, None, :, None]
    return torch.zeros(hidden.shape, dtype=keys.memory_LW.dtype).masked_fill_(hidden, float("-inf"))
