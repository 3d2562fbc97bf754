"""Attention over paged KV: which rows of a packed step read which slots, and the reading itself.

A step mixes prompt chunks and single tokens. Single tokens are computed together, one group per span of keys; a
chunk is a group, or several where its rows' spans differ. It knows no sequences, no scheduling, no kernels' insides.

T rows of the step, S slices of a group, Q query rows per slice and KV head, L keys, G heads per KV head,
N KV heads, H = N·G heads, D head size, W slot width.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Batch, Int32s
from engine.kv import KvPool


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that attend together over equally many keys: one row of each of several slices, or a run of one slice."""

    rows: slice | Tensor
    slices: int
    slots_SL: Tensor  # int64, flat; keys after the last row's position point at the pool's empty slot
    mask_S1QL: Tensor  # 0 or −inf, in the dtype of q


@dataclass(frozen=True, slots=True)
class Step:
    """A batch on its way through the layers: tensors made once and used by each layer."""

    tokens_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    rows_R: Tensor
    groups: dict[int | None, list[Group]]  # by window


def plan(batch: Batch, windows: frozenset[int | None], pool: KvPool, heads_per_kv_head: int, ops: ModuleType) -> Step:
    """The step's tensors. Costs some 100 µs and, per chunk, a mask of its tokens × context."""
    return Step(
        tokens_T=torch.from_numpy(batch.tokens_T),
        positions_T=torch.from_numpy(batch.positions_T).long(),
        slots_T=torch.from_numpy(batch.slots_T).long(),
        rows_R=torch.from_numpy(batch.rows_R).long(),
        groups={window: _groups(batch, window, pool, heads_per_kv_head, ops) for window in windows},
    )


def _groups(batch: Batch, window: int | None, pool: KvPool, fold: int, ops: ModuleType) -> list[Group]:
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
            positions_SQ = _pad_rows(batch.positions_T[None, start:end], ops.ROW_TILE)
            groups.append(
                _group(batch, slice(start, end), slice_T[start : start + 1], positions_SQ, span, window, pool)
            )
    for span, rows in singles.items():
        positions_SQ = _pad_rows(np.repeat(batch.positions_T[rows, None], fold, 1), ops.ROW_TILE)
        groups.append(_group(batch, torch.tensor(rows), slice_T[rows], positions_SQ, span, window, pool))
    return groups


def _group(
    batch: Batch,
    rows: slice | Tensor,
    slices_S: NDArray[np.int64],
    positions_SQ: Int32s,
    span: tuple[int, int],
    window: int | None,
    pool: KvPool,
) -> Group:
    block_tokens = pool.shape.block_tokens
    keys_L = np.arange(*span)
    column_L = np.minimum(keys_L // block_tokens, batch.tables_SW.shape[1] - 1)
    slots_SL = batch.tables_SW[slices_S[:, None], column_L].astype(np.int64) * block_tokens + keys_L % block_tokens
    slots_SL[keys_L > positions_SQ[:, -1:]] = pool.empty
    mask_S1QL = _mask(positions_SQ, keys_L, window, pool)
    return Group(rows, len(slices_S), torch.from_numpy(slots_SL.reshape(-1)), mask_S1QL)


def _pad_rows(positions_SQ: Int32s, tile: int) -> Int32s:
    """Repeats the last row until there is a whole number of tiles; the copies' results are dropped."""
    missing = -positions_SQ.shape[1] % tile
    return np.concatenate((positions_SQ, np.repeat(positions_SQ[:, -1:], missing, 1)), 1)


def _mask(positions_SQ: Int32s, keys_L: NDArray[np.int64], window: int | None, pool: KvPool) -> Tensor:
    positions_SQ1 = torch.from_numpy(positions_SQ)[:, None, :, None]
    keys = torch.from_numpy(keys_L)
    hidden = keys > positions_SQ1
    if window is not None:
        hidden |= keys <= positions_SQ1 - window
    return torch.zeros(hidden.shape, dtype=pool.shape.dtype).masked_fill_(hidden, float("-inf"))


def attend(q_THD: Tensor, layer: int, groups: list[Group], pool: KvPool, scale: float, ops: ModuleType) -> Tensor:
    """[T, H·D]: each row's attention over the slots its group lists; K and V of the step are in the pool already."""
    t, h, d = q_THD.shape
    n = pool.shape.kv_heads
    out_THD = q_THD.new_empty(t, h, d)
    for group in groups:
        kv = pool.read(layer, group.slots_SL).view(group.slices, -1, 2, n, d)
        k_SNLD, v_SNLD = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
        if isinstance(group.rows, slice):
            out_THD[group.rows] = _chunk(q_THD[group.rows], k_SNLD, v_SNLD, group, scale, ops)
        else:
            out_THD[group.rows] = _singles(q_THD[group.rows], k_SNLD, v_SNLD, group, scale, ops)
    return out_THD.view(t, h * d)


def _singles(q_SHD: Tensor, k_SNLD: Tensor, v_SNLD: Tensor, group: Group, scale: float, ops: ModuleType) -> Tensor:
    """One token per slice: the heads that share a KV head are the rows of one small matmul."""
    s, h, d = q_SHD.shape
    n = k_SNLD.shape[1]
    q_SNQD = _pad(q_SHD.view(s, n, h // n, d), group.mask_S1QL.shape[2])
    return ops.attend(q_SNQD, k_SNLD, v_SNLD, group.mask_S1QL, scale)[:, :, : h // n].reshape(s, h, d)


def _chunk(q_THD: Tensor, k_1NLD: Tensor, v_1NLD: Tensor, group: Group, scale: float, ops: ModuleType) -> Tensor:
    """A run of one slice's tokens: KV heads take the batch's place, so that G heads read one K without a copy."""
    t, h, d = q_THD.shape
    n = k_1NLD.shape[1]
    q_NGQD = _pad(q_THD.view(t, n, h // n, d).permute(1, 2, 0, 3), group.mask_S1QL.shape[2])
    k_NGLD = k_1NLD.transpose(0, 1).expand(n, h // n, -1, d)
    v_NGLD = v_1NLD.transpose(0, 1).expand(n, h // n, -1, d)
    out_NGQD = ops.attend(q_NGQD, k_NGLD, v_NGLD, group.mask_S1QL, scale)
    return out_NGQD[:, :, :t].permute(2, 0, 1, 3).reshape(t, h, d)


def _pad(q: Tensor, rows: int) -> Tensor:
    missing = rows - q.shape[2]
    return q if missing == 0 else torch.cat((q, q[:, :, -1:].expand(-1, -1, missing, -1)), 2)
