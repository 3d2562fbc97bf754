"""Attention over paged KV for any mixture of prompts and single rows, from the entries of
engine/step/attention_plan.py.

All query heads of one KV head are rows of one small matmul; a wide entry stacks several rows of the step as well. The
softmax is the online one of FlashAttention (Dao et al., 2022), partial results are merged by log-sum-exp: exact. The
programs walk lists in device memory, so that one CUDA graph serves any lengths. Keys that a row must not see are not
loaded or are masked, whatever lies there. A head's sink is what the sum of a row's weights begins with, in a row's only
entry or as its partial results are merged.

T rows, H query heads, N KV heads, G = H ÷ N, D head size, S slots of the pool, P partial results.
"""

from dataclasses import dataclass
from typing import Final, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import attention_hopper
from engine.kernels.pdl import release, supports_pdl, wait
from engine.kernels.step_layout import POSITIONS, word
from engine.step.attention_plan import ENTRY_WORDS, HEAD_WORDS, AttentionLayout
from engine.step.key_span import KeySpan
from engine.step.layout import SEGMENTS_MAX, GroupWord, group_word

_WORDS = tl.constexpr(ENTRY_WORDS)
_HEAD = tl.constexpr(HEAD_WORDS)  # narrow entries follow at once: one load fewer before the first key is known
_LOG2_E: Final = 1.4426950408889634
_MULTIPROCESSORS: Final = 2  # without a GPU, in the interpreter
_SLOTS_MIN: Final = 4096
_MERGED_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class TileShape:
    """How a kernel is cut: stacked rows × keys of a tile, and programs per multiprocessor."""

    rows: int
    keys: int
    stages: int
    warps: int
    programs: int


# For head sizes up to 128; larger ones take half the keys.
NARROW: Final = TileShape(16, 32, 5, 4, 4)
NARROW_FEW: Final = TileShape(16, 64, 6, 2, 2)  # up to _FEW_ROWS rows in the step
WIDE: Final = TileShape(128, 128, 2, 8, 1)
_FEW_ROWS: Final = 32
_MERGE_PROGRAMS: Final = 16
_MERGE_WARPS: Final = 1


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """Memory for partial results, used by one layer after the other. `counters` are 0 between launches."""

    partial_PHD: Tensor  # float32
    peak_PH: Tensor  # float32, of the scaled logits, base 2
    total_PH: Tensor  # float32
    counters: Tensor  # int32, a row's KV head each

    @classmethod
    def make(cls, layout: AttentionLayout, heads: int, head_dim: int, rows: int, device: torch.device) -> Self:
        return cls(
            torch.zeros(layout.slots, heads, head_dim, device=device),
            torch.zeros(layout.slots, heads, device=device),
            torch.zeros(layout.slots, heads, device=device),
            torch.zeros(rows * layout.kv_heads, dtype=torch.int32, device=device),
        )


def attention_layout(
    spans: tuple[KeySpan, ...], heads: int, kv_heads: int, sequences: int, device: torch.device
) -> AttentionLayout:
    """The tiles of `attend` on this device, with room for the partial results of so many sequences."""
    narrow_programs = attention_hopper.NARROW_PROGRAMS if attention_hopper.is_hopper(device) else NARROW.programs
    count = _MULTIPROCESSORS
    if device.type == "cuda":
        count = torch.cuda.get_device_properties(device).multi_processor_count
    return AttentionLayout(
        spans=spans,
        kv_heads=kv_heads,
        wide_rows=max(1, WIDE.rows // (heads // kv_heads)),
        few_rows=_FEW_ROWS,
        few_programs=count * NARROW_FEW.programs,
        narrow_programs=count * narrow_programs,
        wide_programs=count * WIDE.programs,
        slots=max(_SLOTS_MIN, sequences * (SEGMENTS_MAX + 2)),
    )


@triton.jit
def _read_tile(  # one tile of keys for the rows of q, into the running softmax
    q, kv, table, at, last, limit, window, head, scale, softcap, peak, total, out, KV_HEADS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    ENDS: tl.constexpr, HIDDEN: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    keys = at + tl.arange(0, BLOCK_KEYS)
    d = tl.arange(0, BLOCK_D)
    inside = keys < last
    if ENDS:
        block = tl.load(table + keys // BLOCK_TOKENS, mask=inside, other=0)
    else:
        block = tl.load(table + keys // BLOCK_TOKENS)
    slot = block.to(tl.int64) * BLOCK_TOKENS + keys % BLOCK_TOKENS
    row = kv + slot * (2 * KV_HEADS * D) + head * D
    if ENDS:
        k = tl.load(row[None, :] + d[:, None], mask=inside[None, :] & (d < D)[:, None], other=0.0)
    elif D != BLOCK_D:
        k = tl.load(row[None, :] + d[:, None], mask=(d < D)[:, None], other=0.0)
    else:
        k = tl.load(row[None, :] + d[:, None])
    logits = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    if CAPPED:  # cap · tanh(x ÷ cap), by way of the exponential
        logits = softcap * (1.0 - 2.0 / (tl.exp2(logits * (scale * 2.0 / softcap)) + 1.0))
    if ENDS:
        logits = tl.where(inside[None, :], logits, float("-inf"))
    if HIDDEN:
        logits = tl.where(keys[None, :] <= limit[:, None], logits, float("-inf"))
    if WINDOWED:
        logits = tl.where(keys[None, :] > limit[:, None] - window, logits, float("-inf"))
    unit = 1.4426950408889634 if CAPPED else scale  # scale has the same factor: powers are of 2
    new_peak = tl.maximum(peak, tl.max(logits, 1) * unit)
    # A row that has seen no key yet has no peak to subtract.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(logits * unit - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(weights, 1)
    row += KV_HEADS * D
    if ENDS:
        v = tl.load(row[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
    elif D != BLOCK_D:
        v = tl.load(row[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)
    else:
        v = tl.load(row[:, None] + d[None, :])
    v = v.to(q.dtype)
    out = tl.dot(weights.to(q.dtype), v, out * shrink[:, None], input_precision="ieee")
    return new_peak, total, out


@triton.jit
def _sinks_of(sinks, heads, present):
    """What the running softmax of these heads begins with: peak and total."""
    sink = tl.load(sinks + heads, mask=present, other=float("-inf")) * 1.4426950408889634
    return sink, tl.where(present, 1.0, 0.0)


@triton.jit
def _merge(
    partial, peaks, totals, result, sinks, row, head, first, count, HEADS: tl.constexpr, G: tl.constexpr,
    MERGED_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SINKS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merges the row's partial results for the query heads of one KV head into its result, some slots at a time."""
    slots = tl.arange(0, AT_ONCE)
    g = tl.arange(0, MERGED_G)
    d = tl.arange(0, BLOCK_D)
    peak = tl.full([MERGED_G], float("-inf"), tl.float32)
    total = tl.zeros([MERGED_G], tl.float32)
    if SINKS:
        peak, total = _sinks_of(sinks, head * G + g, g < G)
    out = tl.zeros([MERGED_G, BLOCK_D], tl.float32)
    for start in range(0, count, AT_ONCE):
        present = (start + slots < count)[:, None] & (g < G)[None, :]
        at = (first + start + slots).to(tl.int64)[:, None] * HEADS + (head * G + g)[None, :]
        next_peak = tl.load(peaks + at, mask=present, other=float("-inf"), cache_modifier=".cg")
        next_total = tl.load(totals + at, mask=present, other=0.0, cache_modifier=".cg")
        inside = present[:, :, None] & (d < D)[None, None, :]
        values = tl.load(partial + at[:, :, None] * D + d[None, None, :], mask=inside, other=0.0, cache_modifier=".cg")
        new_peak = tl.maximum(peak, tl.max(next_peak, 0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        shrink, share = tl.exp2(peak - base), tl.exp2(next_peak - base[None, :])
        total = total * shrink + tl.sum(next_total * share, 0)
        out = out * shrink[:, None] + tl.sum(values * share[:, :, None], 0)
        peak = new_peak
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    at = result + row.to(tl.int64) * (HEADS * D) + (head * G + g)[:, None] * D + d[None, :]
    tl.store(at, out.to(result.dtype.element_ty), mask=(g < G)[:, None] & (d < D)[None, :])


@triton.jit
def _narrow(
    step, q, kv, result, partial, peaks, totals, counters, scale, softcap, window, sinks, HEADER_WORD: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, STAGES: tl.constexpr, MERGED_G: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    release()
    tiles = step + tl.load(step + HEADER_WORD)
    entries = tiles + _HEAD
    count = tl.load(tiles)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    inside = (g < G)[:, None] & (d < D)[None, :]
    for item in range(tl.program_id(0), count * KV_HEADS, tl.num_programs(0)):
        entry = entries + item // KV_HEADS * _WORDS
        head = item % KV_HEADS
        row = tl.load(entry).to(tl.int64)
        table = step + tl.load(entry + 1)
        first, last = tl.load(entry + 2), tl.load(entry + 3)
        slot = tl.load(entry + 4)
        at = row * (HEADS * D) + (head * G + g)[:, None] * D + d[None, :]
        limit = g  # of use in windows alone: all keys of an entry are the row's to see
        if WINDOWED:
            limit = g * 0 + word(step, POSITIONS, row)
        wait()  # for q and the newest keys; all above is the step's own and lies there since before its first kernel
        queries = tl.load(q + at, mask=inside, other=0.0)
        peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        if SINKS:
            peak, total = _sinks_of(sinks, head * G + g, g < tl.where(slot < 0, G, 0))
        out = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        for start in tl.range(first, last, BLOCK_KEYS, num_stages=STAGES):
            peak, total, out = _read_tile(
                queries, kv, table, start, last, limit, window, head, scale, softcap, peak, total, out, KV_HEADS, D,
                BLOCK_D, BLOCK_KEYS, BLOCK_TOKENS, True, False, WINDOWED, CAPPED,
            )  # fmt: skip
        if slot < 0:
            tl.store(
                result + at, (out / tl.where(total > 0, total, 1.0)[:, None]).to(result.dtype.element_ty), mask=inside
            )
        else:
            part = slot.to(tl.int64) * HEADS + head * G + g
            tl.store(peaks + part, peak, mask=g < G)
            tl.store(totals + part, total, mask=g < G)
            tl.store(partial + part[:, None] * D + d[None, :], out, mask=inside)
            narrow_slots = tl.load(entry + 7)
            if narrow_slots > 0:
                tl.debug_barrier()
                arrived = tl.atomic_add(counters + row * KV_HEADS + head, 1, sem="acq_rel")
                if arrived == narrow_slots - 1:
                    _merge(
                        partial, peaks, totals, result, sinks, row, head, tl.load(entry + 5), tl.load(entry + 6),
                        HEADS, G, MERGED_G, D, BLOCK_D, SINKS, AT_ONCE,
                    )  # fmt: skip
                    tl.atomic_xchg(counters + row * KV_HEADS + head, 0)
    wait()  # without an entry too: the next kernel that waits for this one waits for all before it


@triton.jit
def _wide(
    step, q, kv, result, partial, peaks, totals, scale, softcap, window, sinks, HEADER_WORD: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tiles = step + tl.load(step + HEADER_WORD)
    entries = step + tl.load(tiles + 4)
    stacked = tl.arange(0, BLOCK_ROWS)
    d = tl.arange(0, BLOCK_D)
    for item in range(tl.program_id(0), tl.load(tiles + 1) * KV_HEADS, tl.num_programs(0)):
        entry = entries + item // KV_HEADS * _WORDS
        head = item % KV_HEADS
        member = stacked // G
        present = member < tl.load(entry + 1)
        members = step + tl.load(entry) + 2 * member
        row = tl.load(members, mask=present, other=0).to(tl.int64)
        table = step + tl.load(entry + 2)
        first, last = tl.load(entry + 3), tl.load(entry + 4)
        query_head = head * G + stacked % G
        inside = present[:, None] & (d < D)[None, :]
        at = row * (HEADS * D) + query_head * D
        queries = tl.load(q + at[:, None] + d[None, :], mask=inside, other=0.0)
        # Keys below `plain` are seen by every row, so that they need no mask.
        limit = tl.load(step + tl.load(step + POSITIONS) + row, mask=present, other=0)
        plain = last
        if tl.load(entry + 5) > 0:
            plain = tl.minimum(last, word(step, POSITIONS, tl.load(step + tl.load(entry))) + 1)
        else:
            limit = tl.where(present, last, 0)
        plain = first + tl.maximum(0, plain - first) // BLOCK_KEYS * BLOCK_KEYS
        peak = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        if SINKS:
            alone = tl.load(members + 1, mask=present, other=0) < 0
            peak, total = _sinks_of(sinks, query_head, present & alone)
        out = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
        for start in tl.range(first, plain, BLOCK_KEYS, num_stages=STAGES):
            peak, total, out = _read_tile(
                queries, kv, table, start, last, limit, window, head, scale, softcap, peak, total, out, KV_HEADS, D,
                BLOCK_D, BLOCK_KEYS, BLOCK_TOKENS, False, False, WINDOWED, CAPPED,
            )  # fmt: skip
        for start in tl.range(plain, last, BLOCK_KEYS, num_stages=1):
            peak, total, out = _read_tile(
                queries, kv, table, start, last, limit, window, head, scale, softcap, peak, total, out, KV_HEADS, D,
                BLOCK_D, BLOCK_KEYS, BLOCK_TOKENS, True, True, WINDOWED, CAPPED,
            )  # fmt: skip
        slot = tl.load(members + 1, mask=present, other=-1)
        whole = inside & (slot < 0)[:, None]
        normed = out / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(result + at[:, None] + d[None, :], normed.to(result.dtype.element_ty), mask=whole)
        part = present & (slot >= 0)
        place = slot.to(tl.int64) * HEADS + query_head
        tl.store(peaks + place, peak, mask=part)
        tl.store(totals + place, total, mask=part)
        tl.store(partial + place[:, None] * D + d[None, :], out, mask=inside & part[:, None])


@triton.jit
def _merge_rows(
    step, result, partial, peaks, totals, sinks, HEADER_WORD: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, SINKS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    release()
    tiles = step + tl.load(step + HEADER_WORD)
    entries = step + tl.load(tiles + 5)
    count = tl.load(tiles + 2)
    wait()
    for item in range(tl.program_id(0), count * HEADS, tl.num_programs(0)):
        entry = entries + item // HEADS * 4
        _merge(
            partial, peaks, totals, result, sinks, tl.load(entry), item % HEADS, tl.load(entry + 1),
            tl.load(entry + 2), HEADS, 1, 1, D, BLOCK_D, SINKS, AT_ONCE,
        )  # fmt: skip


def attend(
    step: Tensor, q_THD: Tensor, kv_SW: Tensor, out_THD: Tensor, scratch: AttentionScratch, layout: AttentionLayout,
    span: KeySpan, block_tokens: int, wide: bool, scale: float | None = None, softcap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> None:  # fmt: skip
    """softmax(q·kᵀ · scale)·v of each row of the step over its context; rows past the step's stay as they are.

    Reads the entries for `span` from the words behind the step, wide ones only if `wide` says that there are any.
    kv_SW is one layer of the pool, of q's dtype or float8_e4m3fn. The scale is 1 ÷ √D where none is given. softcap > 0
    caps logits: cap · tanh(logit ÷ cap). Sinks, float32, are logits of keys beside the others that have no value.
    """
    heads, head_dim = q_THD.shape[1:]
    kv_heads = layout.kv_heads
    assert step.dtype == torch.int32
    assert q_THD.is_contiguous()
    assert out_THD.is_contiguous()
    assert out_THD.dtype == q_THD.dtype
    assert kv_SW.is_contiguous()
    assert kv_SW.shape[1] == 2 * kv_heads * head_dim
    assert len(scratch.counters) >= len(q_THD) * kv_heads
    fold = heads // kv_heads
    assert fold <= WIDE.rows, f"{fold} query heads share a KV head; a wide entry stacks {WIDE.rows} rows"
    block_g, block_d = max(16, triton.next_power_of_2(fold)), triton.next_power_of_2(head_dim)
    if sinks_H is not None:
        assert sinks_H.shape == (heads,)
        assert sinks_H.dtype == torch.float32
    scale = (head_dim**-0.5 if scale is None else scale) * _LOG2_E
    sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "G": fold, "D": head_dim, "BLOCK_D": block_d}
    sizes["HEADER_WORD"] = group_word(layout.spans.index(span), GroupWord.PLAN)
    window = span.window  # an entry's keys lie in one chunk: the kernels know of none
    memory = (scratch.partial_PHD, scratch.peak_PH, scratch.total_PH)
    overlap = supports_pdl(q_THD.device)
    keys_shrink = max(1, block_d * q_THD.element_size() // 256)
    served = attention_hopper.serves(q_THD, kv_SW, kv_heads, block_tokens)
    few = len(q_THD) <= layout.few_rows
    masks = {"WINDOWED": window is not None, "CAPPED": softcap > 0, "SINKS": sinks_H is not None}
    common = (scale, softcap, window or 0, sinks_H)
    if wide and served:
        attention_hopper.attend_wide(
            step, q_THD, kv_SW, out_THD, *memory, scale, softcap, window, sinks_H, kv_heads, block_tokens,
            sizes["HEADER_WORD"], layout.wide_programs,
        )  # fmt: skip
    elif wide:
        _wide[(layout.wide_programs,)](
            step, q_THD, kv_SW, out_THD, *memory, *common, BLOCK_ROWS=WIDE.rows, BLOCK_KEYS=WIDE.keys // keys_shrink,
            BLOCK_TOKENS=block_tokens, STAGES=WIDE.stages, num_warps=WIDE.warps, **masks, **sizes,
        )  # fmt: skip
    if served and not few:
        attention_hopper.attend_narrow(
            step, q_THD, kv_SW, out_THD, *memory, scratch.counters, scale, softcap, window, sinks_H, kv_heads,
            block_tokens, sizes["HEADER_WORD"], layout.narrow_programs,
        )  # fmt: skip
    else:
        narrow = NARROW_FEW if few else NARROW
        _narrow[(layout.programs_of(len(q_THD)),)](
            step, q_THD, kv_SW, out_THD, *memory, scratch.counters, *common, BLOCK_G=block_g,
            BLOCK_KEYS=narrow.keys // keys_shrink, BLOCK_TOKENS=block_tokens, STAGES=narrow.stages,
            MERGED_G=triton.next_power_of_2(fold), AT_ONCE=_MERGED_AT_ONCE, num_warps=narrow.warps,
            launch_pdl=overlap, **masks, **sizes,
        )  # fmt: skip
    if wide:
        _merge_rows[(layout.wide_programs * _MERGE_PROGRAMS,)](
            step, out_THD, *memory, sinks_H, HEADER_WORD=sizes["HEADER_WORD"], HEADS=heads, D=head_dim,
            BLOCK_D=block_d, SINKS=sinks_H is not None, AT_ONCE=_MERGED_AT_ONCE, num_warps=_MERGE_WARPS,
            launch_pdl=overlap,
        )  # fmt: skip
