"""attention.py's two kernels on Hopper, with matmuls and loads in warps of their own.

Written in Gluon, since plain Triton neither gives the copies to the tensor memory accelerator nor a warp one task. A
warp fetches tiles of keys and values, a block or 16 keys at a time through a tensor map, into rings in shared memory,
and runs ahead from one entry into the next.

Two warpgroups share the rows of a wide entry, half each. Each begins the logits of the next tile before it multiplies
the weights of this one with the values, so that tensor cores work while exponentials are computed (FlashAttention-3,
Shah et al., 2024), and the two drift apart until one's matmuls fall into the other's exponentials. A narrow entry's few
rows leave most of a warpgroup's matmul empty: what counts there is that reading never pauses.

S slots of the pool, W words of a slot, T rows, H query heads, D head size, P partial results.
"""

from typing import Final

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels import step_layout
from engine.kernels.attention_hopper_tiles import PANEL, WORDS, entries_of, fetch, weigh, zero_past

ROWS: Final = 128  # stacked rows of an entry: two warpgroups of 64
_KEYS: Final = 128
_RING: Final = 2
NARROW_PROGRAMS: Final = 2  # per multiprocessor, which share its memory and registers
_NARROW_KEYS: Final = 64
_NARROW_RING: Final = 3
_NARROW_REGISTERS: Final = 128  # of a thread, before the consumer takes over the producer's
_UNIT_MAX: Final = 16  # keys that one copy takes; entries begin at multiples
_HEAD_DIMS: Final = (64, 128)
_BLOCK_MIN: Final = 8  # rows that swizzled shared memory takes together
_POSITIONS = gl.constexpr(step_layout.POSITIONS.value)
_HALF = gl.constexpr(ROWS // 2)


@gluon.jit
def _consume_wide(
    step, q, result, partial, peaks, totals, scale, softcap, window, sinks, queries, keys, values, keys_ready,
    values_ready, keys_free, values_free, FIRST: gl.constexpr, HEADER_WORD: gl.constexpr, HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr, G: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, WINDOWED: gl.constexpr,
    CAPPED: gl.constexpr, SINKS: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """One warpgroup: rows FIRST … FIRST+63 of every entry."""
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    LOADED_ROW: gl.constexpr = gl.SliceLayout(1, LOADED)
    ROW: gl.constexpr = gl.SliceLayout(1, TILE)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    tiles = step + gl.load(step + HEADER_WORD)
    entries, entry_count = entries_of(step, tiles, True)
    positions = step + gl.load(step + _POSITIONS)
    taken = 0
    for item in range(gl.program_id(0), entry_count * KV_HEADS, gl.num_programs(0)):
        entry = entries + item // KV_HEADS * WORDS
        head = item % KV_HEADS
        members, count = step + gl.load(entry), gl.load(entry + 1)
        first, last, hidden = gl.load(entry + 3), gl.load(entry + 4), gl.load(entry + 5)

        stacked = FIRST + gl.arange(0, _HALF, LOADED_ROW)
        row = gl.load(members + 2 * (stacked // G), mask=stacked // G < count, other=0).to(gl.int64)
        at = row * (HEADS * D) + (head * G + stacked % G) * D
        gdc_wait()
        loaded = gl.load(
            q + at[:, None] + gl.arange(0, D, gl.SliceLayout(0, LOADED))[None, :],
            mask=(stacked // G < count)[:, None], other=0.0,
        )  # fmt: skip
        queries.store(loaded)
        fence_async_shared()

        stacked = FIRST + gl.arange(0, _HALF, ROW)
        present = stacked // G < count
        limit = gl.where(present, last - 1, -1)
        plain = last  # keys below it are seen by every row
        below = limit - window  # keys up to it are outside of a window
        if hidden > 0:
            row_of = gl.load(members + 2 * (stacked // G), mask=present, other=0)
            position = gl.load(positions + row_of, mask=present, other=-1)
            limit = gl.minimum(limit, position)
            below = position - window
            plain = gl.minimum(last, gl.load(positions + gl.load(members)) + 1)

        peak = gl.full([_HALF], float("-inf"), gl.float32, ROW)
        total = gl.zeros([_HALF], gl.float32, ROW)
        if SINKS:
            alone = present & (gl.load(members + 2 * (stacked // G) + 1, mask=present, other=0) < 0)
            peak, total = _sinks_of(sinks, head * G + stacked % G, alone)
        out = gl.zeros([_HALF, D], gl.float32, OUT)
        zero = gl.zeros([_HALF, KEYS], gl.float32, TILE)

        place = taken % RING
        mbarrier.wait(keys_ready.index(place), taken // RING % 2)
        k = keys.index(place)
        logits = warpgroup_mma(queries, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        logits = warpgroup_mma_wait(0, [logits])
        debug_barrier()
        mbarrier.arrive(keys_free.index(place))
        weights, shrink, peak, total = weigh(
            logits, first, limit, below, scale, softcap, first + KEYS > plain, peak, total, KEYS,
            WINDOWED, CAPPED, TILE,
        )  # fmt: skip
        operand = gl.convert_layout(weights.to(q.dtype.element_ty), OPERAND)
        for start in range(first + KEYS, last, KEYS):
            next_place = (taken + 1) % RING
            mbarrier.wait(keys_ready.index(next_place), (taken + 1) // RING % 2)
            k = keys.index(next_place)
            pending = warpgroup_mma(queries, k.permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(values_ready.index(place), taken // RING % 2)
            v = values.index(place)
            out_pending = warpgroup_mma(operand, v, out, is_async=True)
            logits = warpgroup_mma_wait(1, [pending])
            debug_barrier()
            mbarrier.arrive(keys_free.index(next_place))
            weights, shrink, peak, total = weigh(
                logits, start, limit, below, scale, softcap, start + KEYS > plain, peak, total,
                KEYS, WINDOWED, CAPPED, TILE,
            )  # fmt: skip
            out, operand = warpgroup_mma_wait(0, [out_pending, operand])
            debug_barrier()
            mbarrier.arrive(values_free.index(place))
            out = out * gl.convert_layout(shrink, OUT_ROW)[:, None]
            operand = gl.convert_layout(weights.to(q.dtype.element_ty), OPERAND)
            place = next_place
            taken += 1
        mbarrier.wait(values_ready.index(place), taken // RING % 2)
        tail = first + (last - first - 1) // KEYS * KEYS
        if tail + KEYS > last:
            zero_past(values, place, tail, last, KEYS, D)
        v = values.index(place)
        out_pending = warpgroup_mma(operand, v, out, is_async=True)
        out, operand = warpgroup_mma_wait(0, [out_pending, operand])
        debug_barrier()
        mbarrier.arrive(values_free.index(place))
        taken += 1

        peak, total = gl.convert_layout(peak, OUT_ROW), gl.convert_layout(total, OUT_ROW)
        stacked = FIRST + gl.arange(0, _HALF, OUT_ROW)
        present = stacked // G < count
        d = gl.arange(0, D, gl.SliceLayout(0, OUT))
        query_head = head * G + stacked % G
        slot = gl.load(members + 2 * (stacked // G) + 1, mask=present, other=-1).to(gl.int64)
        whole, part = present & (slot < 0), present & (slot >= 0)
        row = gl.load(members + 2 * (stacked // G), mask=present, other=0).to(gl.int64)
        normed = out / gl.where(total > 0, total, 1.0)[:, None]
        at = row * (HEADS * D) + query_head * D
        gl.store(
            result + at[:, None] + d[None, :], normed.to(result.dtype.element_ty),
            mask=whole[:, None] & (d < D)[None, :],
        )  # fmt: skip
        part_at = slot * HEADS + query_head
        gl.store(peaks + part_at, peak, mask=part)
        gl.store(totals + part_at, total, mask=part)
        gl.store(partial + part_at[:, None] * D + d[None, :], out, mask=part[:, None] & (d < D)[None, :])
    gdc_wait()  # without an entry too, as in attention.py


@gluon.jit
def _wide(
    step, pool, q, result, partial, peaks, totals, scale, softcap, window, sinks, HEADER_WORD: gl.constexpr,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, G: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr, UNIT: gl.constexpr, WINDOWED: gl.constexpr, CAPPED: gl.constexpr,
    SINKS: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    panel: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    queries_low = gl.allocate_shared_memory(q.dtype.element_ty, [_HALF, D], panel)
    queries_high = gl.allocate_shared_memory(q.dtype.element_ty, [_HALF, D], panel)
    keys = gl.allocate_shared_memory(q.dtype.element_ty, [RING, KEYS, D], panel)
    values = gl.allocate_shared_memory(q.dtype.element_ty, [RING, KEYS, D], panel)
    keys_ready = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(RING):
        mbarrier.init(keys_ready.index(place), count=1)
        mbarrier.init(values_ready.index(place), count=1)
        mbarrier.init(keys_free.index(place), count=2)
        mbarrier.init(values_free.index(place), count=2)
    gl.warp_specialize(
        [
            (_consume_wide, (
                step, q, result, partial, peaks, totals, scale, softcap, window, sinks, queries_low, keys, values,
                keys_ready, values_ready, keys_free, values_free, 0, HEADER_WORD, HEADS, KV_HEADS, G, D, KEYS,
                WINDOWED, CAPPED, SINKS, RING,
            )),
            (_consume_wide, (
                step, q, result, partial, peaks, totals, scale, softcap, window, sinks, queries_high, keys, values,
                keys_ready, values_ready, keys_free, values_free, _HALF, HEADER_WORD, HEADS, KV_HEADS, G, D, KEYS,
                WINDOWED, CAPPED, SINKS, RING,
            )),
            (fetch, (
                step, pool, keys, values, keys_ready, values_ready, keys_free, values_free, True, HEADER_WORD, KV_HEADS,
                D, KEYS, BLOCK_TOKENS, UNIT, RING,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


@gluon.jit
def _sinks_of(sinks, heads, present):
    """What the running softmax of these heads begins with: peak and total."""
    sink = gl.load(sinks + heads, mask=present, other=float("-inf")) * 1.4426950408889634
    return sink, gl.where(present, 1.0, 0.0)


@gluon.jit
def _merge(
    partial, peaks, totals, result, sinks, row, head, first, count, HEADS: gl.constexpr, G: gl.constexpr,
    MERGED_G: gl.constexpr, D: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """Merges the row's partial results for the query heads of one KV head into its result, one after the other."""
    layout: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [4, 1], [1, 0])
    g = gl.arange(0, MERGED_G, gl.SliceLayout(1, layout))
    d = gl.arange(0, D, gl.SliceLayout(0, layout))
    inside = (g < G)[:, None] & (d < D)[None, :]
    peak = gl.full([MERGED_G], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    total = gl.zeros([MERGED_G], gl.float32, gl.SliceLayout(1, layout))
    if SINKS:
        peak, total = _sinks_of(sinks, head * G + g, g < G)
    out = gl.zeros([MERGED_G, D], gl.float32, layout)
    for nth in range(count):
        at = (first.to(gl.int64) + nth) * HEADS + head * G + g
        next_peak = gl.load(peaks + at, mask=g < G, other=float("-inf"), cache_modifier=".cg")
        next_total = gl.load(totals + at, mask=g < G, other=0.0, cache_modifier=".cg")
        values = gl.load(partial + at[:, None] * D + d[None, :], mask=inside, other=0.0, cache_modifier=".cg")
        new_peak = gl.maximum(peak, next_peak)
        base = gl.where(new_peak == float("-inf"), 0.0, new_peak)
        shrink, share = gl.exp2(peak - base), gl.exp2(next_peak - base)
        total = total * shrink + next_total * share
        out = out * shrink[:, None] + values * share[:, None]
        peak = new_peak
    out = out / gl.where(total > 0, total, 1.0)[:, None]
    at = result + row.to(gl.int64) * (HEADS * D) + (head * G + g)[:, None] * D + d[None, :]
    gl.store(at, out.to(result.dtype.element_ty), mask=inside)


@gluon.jit
def _consume_narrow(
    step, q, result, partial, peaks, totals, counters, scale, softcap, window, sinks, queries, keys, values,
    keys_ready, values_ready, keys_free, values_free, HEADER_WORD: gl.constexpr, HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr, G: gl.constexpr, MERGED_G: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr,
    WINDOWED: gl.constexpr, CAPPED: gl.constexpr, SINKS: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """One warpgroup: one row's query heads of one KV head, the rest of its 64 rows empty."""
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, TILE)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    tiles = step + gl.load(step + HEADER_WORD)
    entries, entry_count = entries_of(step, tiles, False)
    positions = step + gl.load(step + _POSITIONS)
    taken = 0
    for item in range(gl.program_id(0), entry_count * KV_HEADS, gl.num_programs(0)):
        entry = entries + item // KV_HEADS * WORDS
        head = item % KV_HEADS
        row = gl.load(entry).to(gl.int64)
        first, last, slot = gl.load(entry + 2), gl.load(entry + 3), gl.load(entry + 4)
        stacked = gl.arange(0, _HALF, gl.SliceLayout(1, LOADED))
        d = gl.arange(0, D, gl.SliceLayout(0, LOADED))
        at = row * (HEADS * D) + (head * G + stacked)[:, None] * D + d[None, :]
        gdc_wait()
        queries.store(gl.load(q + at, mask=(stacked < G)[:, None] & (d < D)[None, :], other=0.0))
        fence_async_shared()
        limit = gl.full([_HALF], 0, gl.int32, ROW) + (last - 1)
        below = limit
        if WINDOWED:
            below = limit * 0 + (gl.load(positions + row) - window)
        peak = gl.full([_HALF], float("-inf"), gl.float32, ROW)
        total = gl.zeros([_HALF], gl.float32, ROW)
        if SINKS:
            g = gl.arange(0, _HALF, ROW)
            peak, total = _sinks_of(sinks, head * G + g, g < gl.where(slot < 0, G, 0))
        out = gl.zeros([_HALF, D], gl.float32, OUT)
        zero = gl.zeros([_HALF, KEYS], gl.float32, TILE)
        for start in range(first, last, KEYS):
            place = taken % RING
            mbarrier.wait(keys_ready.index(place), taken // RING % 2)
            logits = warpgroup_mma(queries, keys.index(place).permute((1, 0)), zero, use_acc=False, is_async=True)
            logits = warpgroup_mma_wait(0, [logits])
            debug_barrier()
            mbarrier.arrive(keys_free.index(place))
            weights, shrink, peak, total = weigh(
                logits, start, limit, below, scale, softcap, start + KEYS > last, peak, total, KEYS, WINDOWED, CAPPED,
                TILE,
            )  # fmt: skip
            out = out * gl.convert_layout(shrink, OUT_ROW)[:, None]
            operand = gl.convert_layout(weights.to(q.dtype.element_ty), OPERAND)
            mbarrier.wait(values_ready.index(place), taken // RING % 2)
            if start + KEYS > last:
                zero_past(values, place, start, last, KEYS, D)
            out = warpgroup_mma(operand, values.index(place), out, is_async=True)
            out, operand = warpgroup_mma_wait(0, [out, operand])
            debug_barrier()
            mbarrier.arrive(values_free.index(place))
            taken += 1

        peak, total = gl.convert_layout(peak, OUT_ROW), gl.convert_layout(total, OUT_ROW)
        g = gl.arange(0, _HALF, OUT_ROW)
        d = gl.arange(0, D, gl.SliceLayout(0, OUT))
        inside = (g < G)[:, None] & (d < D)[None, :]
        if slot < 0:
            whole_at = row * (HEADS * D) + (head * G + g)[:, None] * D + d[None, :]
            normed = out / gl.where(total > 0, total, 1.0)[:, None]
            gl.store(result + whole_at, normed.to(result.dtype.element_ty), mask=inside)
        else:
            part = slot.to(gl.int64) * HEADS + head * G + g
            gl.store(peaks + part, peak, mask=g < G)
            gl.store(totals + part, total, mask=g < G)
            gl.store(partial + part[:, None] * D + d[None, :], out, mask=inside)
            narrow_slots = gl.load(entry + 7)
            if narrow_slots > 0:
                debug_barrier()
                arrived = gl.atomic_add(counters + row * KV_HEADS + head, 1, sem="acq_rel")
                if arrived == narrow_slots - 1:
                    _merge(
                        partial, peaks, totals, result, sinks, row, head, gl.load(entry + 5), gl.load(entry + 6),
                        HEADS, G, MERGED_G, D, SINKS,
                    )  # fmt: skip
                    gl.atomic_xchg(counters + row * KV_HEADS + head, 0)
    gdc_wait()  # without an entry too, as in attention.py


@gluon.jit
def _narrow(
    step, pool, q, result, partial, peaks, totals, counters, scale, softcap, window, sinks, HEADER_WORD: gl.constexpr,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, G: gl.constexpr, MERGED_G: gl.constexpr, D: gl.constexpr,
    KEYS: gl.constexpr, BLOCK_TOKENS: gl.constexpr, UNIT: gl.constexpr, WINDOWED: gl.constexpr,
    CAPPED: gl.constexpr, SINKS: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    panel: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    queries = gl.allocate_shared_memory(q.dtype.element_ty, [_HALF, D], panel)
    keys = gl.allocate_shared_memory(q.dtype.element_ty, [RING, KEYS, D], panel)
    values = gl.allocate_shared_memory(q.dtype.element_ty, [RING, KEYS, D], panel)
    keys_ready = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(RING):
        mbarrier.init(keys_ready.index(place), count=1)
        mbarrier.init(values_ready.index(place), count=1)
        mbarrier.init(keys_free.index(place), count=1)
        mbarrier.init(values_free.index(place), count=1)
    gl.warp_specialize(
        [
            (_consume_narrow, (
                step, q, result, partial, peaks, totals, counters, scale, softcap, window, sinks, queries, keys,
                values, keys_ready, values_ready, keys_free, values_free, HEADER_WORD, HEADS, KV_HEADS, G, MERGED_G, D,
                KEYS, WINDOWED, CAPPED, SINKS, RING,
            )),
            (fetch, (
                step, pool, keys, values, keys_ready, values_ready, keys_free, values_free, False, HEADER_WORD,
                KV_HEADS, D, KEYS, BLOCK_TOKENS, UNIT, RING,
            )),
        ],
        [1], [24],
    )  # fmt: skip


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def serves(q_THD: Tensor, kv_SW: Tensor, kv_heads: int, block_tokens: int) -> bool:
    """Whether the kernels here take these tensors."""
    if not is_hopper(q_THD.device):
        return False
    _, heads, head_dim = q_THD.shape
    fits = head_dim in _HEAD_DIMS and block_tokens >= _BLOCK_MIN and heads // kv_heads <= _HALF.value
    return fits and q_THD.element_size() == 2 and kv_SW.dtype == q_THD.dtype


def attend_wide(
    step: Tensor, q_THD: Tensor, kv_SW: Tensor, out_THD: Tensor, partial_PHD: Tensor, peak_PH: Tensor,
    total_PH: Tensor, scale: float, softcap: float, window: int | None, sinks_H: Tensor | None, kv_heads: int,
    block_tokens: int, header_word: int, programs: int,
) -> None:  # fmt: skip
    """Computes attention.py's `_wide`, for tensors that `serves` accepts."""
    heads, head_dim = q_THD.shape[1:]
    unit = min(block_tokens, _UNIT_MAX)
    _wide[(programs,)](
        step, _tensor_map(kv_SW, unit), q_THD, out_THD, partial_PHD, peak_PH, total_PH, scale, softcap, window or 0,
        sinks_H, HEADER_WORD=header_word, HEADS=heads, KV_HEADS=kv_heads, G=heads // kv_heads, D=head_dim, KEYS=_KEYS,
        BLOCK_TOKENS=block_tokens, UNIT=unit, WINDOWED=window is not None, CAPPED=softcap > 0,
        SINKS=sinks_H is not None, RING=_RING, num_warps=4, launch_pdl=True,
    )  # fmt: skip


def attend_narrow(
    step: Tensor, q_THD: Tensor, kv_SW: Tensor, out_THD: Tensor, partial_PHD: Tensor, peak_PH: Tensor,
    total_PH: Tensor, counters: Tensor, scale: float, softcap: float, window: int | None, sinks_H: Tensor | None,
    kv_heads: int, block_tokens: int, header_word: int, programs: int,
) -> None:  # fmt: skip
    """Computes attention.py's `_narrow`, for tensors that `serves` accepts."""
    heads, head_dim = q_THD.shape[1:]
    unit, fold = min(block_tokens, _UNIT_MAX), heads // kv_heads
    _narrow[(programs,)](
        step, _tensor_map(kv_SW, unit), q_THD, out_THD, partial_PHD, peak_PH, total_PH, counters, scale, softcap,
        window or 0, sinks_H, HEADER_WORD=header_word, HEADS=heads, KV_HEADS=kv_heads, G=fold,
        MERGED_G=max(4, triton.next_power_of_2(fold)), D=head_dim, KEYS=_NARROW_KEYS, BLOCK_TOKENS=block_tokens,
        UNIT=unit, WINDOWED=window is not None, CAPPED=softcap > 0, SINKS=sinks_H is not None,
        RING=_NARROW_RING, num_warps=4, maxnreg=_NARROW_REGISTERS, launch_pdl=True,
    )  # fmt: skip


def _tensor_map(kv_SW: Tensor, unit: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(kv_SW, [unit, PANEL.value], gl.NVMMASharedLayout(128, 16, rank=2))
