"""Tiles of keys and values for attention_hopper.py: fetched into rings in shared memory, weighed by the running
softmax, and zeroed past the last key. It knows no queries and no results.

D head size, N KV heads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from engine.step.attention_plan import ENTRY_WORDS

WORDS = gl.constexpr(ENTRY_WORDS)
PANEL = gl.constexpr(64)  # columns of a tile that lie together in shared memory: 128 bytes
# The name differs between the supported versions of Triton.
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def _panel(ring, place, low: gl.constexpr, count: gl.constexpr, nth: gl.constexpr):
    """Rows low … low+count−1 of the tile in a place of a ring, columns of panel nth: what one copy fills."""
    return ring.index(place).slice(low, count, 0).slice(nth * PANEL, PANEL, 1)


@gluon.jit
def _fetch_tile(
    pool, table, start, last, column, ring, ready, free, place, phase, D: gl.constexpr, KEYS: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """Fetches keys from `start` on into a place of the ring once that is free; past the last one, its unit again."""
    mbarrier.wait(free.index(place), phase)
    mbarrier.expect(ready.index(place), KEYS * D * 2)
    for low in gl.static_range(0, KEYS, UNIT):
        key = gl.minimum(start + low, (last - 1) // UNIT * UNIT)
        slot = gl.load(table + key // BLOCK_TOKENS) * BLOCK_TOKENS + key % BLOCK_TOKENS
        for panel in gl.static_range(D // PANEL):
            part = _panel(ring, place, low, UNIT, panel)
            _copy(pool, [slot, column + panel * PANEL], ready.index(place), part)


@gluon.jit
def fetch(
    step, pool, keys, values, keys_ready, values_ready, keys_free, values_free, WIDE: gl.constexpr,
    HEADER_WORD: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr, UNIT: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """One warp: fetches the tiles of all entries in turn, as soon as their places in the rings are free."""
    tiles = step + gl.load(step + HEADER_WORD)
    entries, count = entries_of(step, tiles, WIDE)
    fetched = 0
    for item in range(gl.program_id(0), count * KV_HEADS, gl.num_programs(0)):
        entry = entries + item // KV_HEADS * WORDS + (1 if WIDE else 0)
        column = item % KV_HEADS * D
        table = step + gl.load(entry + 1)
        first, last = gl.load(entry + 2), gl.load(entry + 3)
        gdc_wait()
        for start in range(first, last, KEYS):
            place = fetched % RING
            phase = fetched // RING % 2 ^ 1
            _fetch_tile(
                pool, table, start, last, column, keys, keys_ready, keys_free, place, phase, D, KEYS, BLOCK_TOKENS, UNIT
            )
            _fetch_tile(
                pool, table, start, last, KV_HEADS * D + column, values, values_ready, values_free, place, phase, D,
                KEYS, BLOCK_TOKENS, UNIT,
            )  # fmt: skip
            fetched += 1


@gluon.jit
def entries_of(step, tiles, WIDE: gl.constexpr):
    """Where the entries begin and how many there are."""
    if WIDE:
        return step + gl.load(tiles + 4), gl.load(tiles + 1)
    else:
        return step + gl.load(tiles + 3), gl.load(tiles)


@gluon.jit
def weigh(
    logits, at, limit, below, scale, softcap, masked, peak, total, KEYS: gl.constexpr,
    WINDOWED: gl.constexpr, CAPPED: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """The running softmax's weights of a tile of logits: (weights, factor for what was summed before, peak, total)."""
    unit = scale
    if CAPPED:  # cap · tanh(x ÷ cap), by way of the exponential
        logits = softcap * (1.0 - 2.0 / (gl.exp2(logits * (scale * 2.0 / softcap)) + 1.0))
        unit = 1.4426950408889634
    if WINDOWED or masked:
        keys = at + gl.arange(0, KEYS, gl.SliceLayout(0, TILE))
        logits = gl.where(keys[None, :] <= limit[:, None], logits, float("-inf"))
        if WINDOWED:
            logits = gl.where(keys[None, :] > below[:, None], logits, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(logits, 1) * unit)
    base = gl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = gl.exp2(logits * unit - base[:, None])
    shrink = gl.exp2(peak - base)
    return weights, shrink, new_peak, total * shrink + gl.sum(weights, 1)


@gluon.jit
def zero_past(values, place, at, last, KEYS: gl.constexpr, D: gl.constexpr):
    """Zeroes what lies past the last key: its weight is 0, but 0 times NaN is not."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for low in gl.static_range(0, KEYS, 16):
        if at + low + 16 > last:
            keys = at + low + gl.arange(0, 16, gl.SliceLayout(1, layout))
            for panel in gl.static_range(D // PANEL):
                part = _panel(values, place, low, 16, panel)
                part.store(gl.where((keys < last)[:, None], part.load(layout), 0.0))
    fence_async_shared()
