"""y = x·Wᵀ on Hopper for many rows, straight from the 12 bits of W's numbers: its bf16 copy is never in memory.

It knows the code (bf12/codec.py), no layers, and not when it is faster than others. A program has a tile of 128
outputs × 128 or 256 rows and goes through the inputs; each of its warps keeps to one task (Gluon, as in
attention_hopper.py):

    fetch ×2    TMA: words 128 × L ───► ring of thirds of a block: high halves, low bytes, low bytes ──┐
                TMA: x  rows × 64 ────► ring of stages: 64 inputs ────────────────────────────┐        │
    gather ×2   x at 16 escapes' inputs ─► columns ──────────────────────────────────────┐    │        │
                                                                                         ▼    ▼        ▼
    multiply ×2 (a warpgroup, 64 outputs each)                        sums  +=  tensor cores ◄── registers: words → bf16

Weights are the matmul's first operand, in registers: what a thread decodes of its words are just the numbers that it
has to hold, in their order, so x stays as it is. Tensor cores work on a stage while the next one's weights are decoded;
where a block ends and they would wait, the other warpgroup has work for them: the two drift apart by themselves.

A number is decoded with its row's base, to the bits that it had, so the sums need no scale. An escape reads as the
smallest number of its row's code. For 16 escapes of a warpgroup's outputs a gatherer brings their columns of x, and the
warpgroup multiplies them by the escapes' values and by that number negated, as if the matrix had 32 more inputs.

T rows, K inputs, N outputs, P parts, I inner size, L lanes, M rows of a warpgroup's matmul.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.bf12.codec import Bf12Weight
from engine.bf12.layout import GROUP_OUTPUTS, lanes_of
from engine.kernels.attention_hopper import is_hopper
from engine.kernels.bf12_hopper_layout import (
    GROUP,
    PIECE,
    decoding,
    escapes_of,
    item_of,
    pieces_of,
    place_order,
    row_bits,
    share_of,
    stored_layout,
    words_layout,
)

OUTPUTS: Final = 128  # of a tile: two warpgroups'
TOGETHER: Final = 16  # tiles of rows that go with one tile of outputs before the next comes
_INNER_STEP: Final = GROUP_OUTPUTS  # so that up's escapes begin with a group
STAGE_INPUTS = gl.constexpr(64)  # inputs: 128 bytes of a row
_ROUND = gl.constexpr(16)  # escapes at once: a step of a matmul
_GATHERED = gl.constexpr(32)  # rows of x at once
_REGISTERS = gl.constexpr(224)  # of a thread that multiplies
_REGISTERS_OTHERS = gl.constexpr(56)
# The names differ between the supported versions of Triton.
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_seen_as = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


@dataclass(frozen=True, slots=True)
class HopperTiling:
    """How a kernel goes through x and W: `rows` of x at once, one of ROWS; the inputs in `parts` parts."""

    rows: int
    parts: int


# Rows of a tile → how many stages of x, and thirds of blocks of words, are in shared memory.
_RING: Final = {128: 6, 256: 4}
ROWS: Final = tuple(_RING)


@gluon.jit
def _fetch_words(
    words, ring, ready, free, blocks, row_tiles, output_tiles, together, parts, inner, GATED: gl.constexpr,
    LANES: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """One warp: fetches all items' words in turn, a third of a block at a time. No kernel writes them: the ring is
    filled while the kernel before this one ends. The next kernel may begin when nothing is left to fetch: its words
    come while the last programs multiply. Any earlier, they would compete with these."""
    thirds = 0
    for item in range(gl.program_id(0), row_tiles * output_tiles * parts, gl.num_programs(0)):
        _, output_tile, _, first, last = item_of(item, blocks, row_tiles, output_tiles, together, parts)
        for third in range(first * 3, last * 3):
            place = thirds % RING
            mbarrier.wait(free.index(place), thirds // RING % 2 ^ 1)
            mbarrier.expect(ready.index(place), 2 * GROUP * LANES * 4)
            for warpgroup in gl.static_range(2):
                start, second_start = pieces_of(output_tile, inner, warpgroup, GATED)
                part = ring.index(place * 2 + warpgroup)
                _copy(words, [start, third * LANES], ready.index(place), part.slice(0, PIECE))
                _copy(words, [second_start, third * LANES], ready.index(place), part.slice(PIECE, PIECE))
            thirds += 1
    gdc_launch_dependents()


@gluon.jit
def _fetch_x(
    x, ring, ready, free, blocks, row_tiles, output_tiles, together, parts, LANES: gl.constexpr, ROWS: gl.constexpr,
    RING: gl.constexpr,
):  # fmt: skip
    """One warp: fetches all items' x in turn, once the kernel before has written it."""
    STAGES: gl.constexpr = 8 * LANES // STAGE_INPUTS
    stages = 0
    gdc_wait()
    for item in range(gl.program_id(0), row_tiles * output_tiles * parts, gl.num_programs(0)):
        row_tile, _, _, first, last = item_of(item, blocks, row_tiles, output_tiles, together, parts)
        for stage in range(first * STAGES, last * STAGES):
            place = stages % RING
            mbarrier.wait(free.index(place), stages // RING % 2 ^ 1)
            mbarrier.expect(ready.index(place), ROWS * STAGE_INPUTS * 2)
            _copy(x, [row_tile * ROWS, stage * STAGE_INPUTS], ready.index(place), ring.index(place))
            stages += 1


@gluon.jit
def _gather(
    x, firsts, places, values, columns, outputs, replacements, ready, free, T, N, K, blocks, row_tiles, output_tiles,
    together, parts, inner, WARPGROUP: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """One warp: gathers a warpgroup's escapes, 16 at a time: the output of each, its value, its column of x."""
    LOADED: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [1, 1], [1, 0])
    e = gl.arange(0, _ROUND, gl.SliceLayout(0, LOADED))
    pieces = _seen_as(
        columns, gl.bfloat16, [2 * ROWS // _GATHERED, _GATHERED, _ROUND], gl.NVMMASharedLayout(32, 16, rank=2)
    )
    rounds = 0
    for item in range(gl.program_id(0), row_tiles * output_tiles * parts, gl.num_programs(0)):
        row_tile, output_tile, part, _, _ = item_of(item, blocks, row_tiles, output_tiles, together, parts)
        start, second_start = pieces_of(output_tile, inner, WARPGROUP, GATED)
        first, end = escapes_of(firsts, N, start)
        second_first, second_end = escapes_of(firsts, N, second_start)
        count = end - first
        low, high = share_of(count + second_end - second_first, part, parts)
        for at in range(low, high, _ROUND):
            nth = at + e
            inside, second = nth < high, nth >= count
            where = gl.where(second, second_first - count, first) + nth
            place = gl.load(places + where, mask=inside, other=0)
            output = (place >> 16) - gl.where(second, second_start, start) & 0x7FFF
            mbarrier.wait(free.index(WARPGROUP), rounds % 2 ^ 1)
            outputs.index(WARPGROUP).store(gl.where(inside, output + gl.where(second, PIECE, 0), -1))
            replacements.index(WARPGROUP).store(gl.load(values + where, mask=inside, other=0.0))
            gdc_wait()
            for piece in range(ROWS // _GATHERED):
                rows = row_tile * ROWS + piece * _GATHERED + gl.arange(0, _GATHERED, gl.SliceLayout(1, LOADED))
                column = x + (place & 0xFFFF)[None, :] + rows[:, None] * K
                loaded = gl.load(column, mask=inside[None, :] & (rows < T)[:, None], other=0.0)
                pieces.index(WARPGROUP * (ROWS // _GATHERED) + piece).store(loaded)
            fence_async_shared()
            debug_barrier()
            mbarrier.arrive(ready.index(WARPGROUP))
            rounds += 1


@gluon.jit
def _take_third(
    ring, ready, nth, WARPGROUP: gl.constexpr, GATED: gl.constexpr, LANES: gl.constexpr, RING: gl.constexpr,
    DOT: gl.constexpr,
):  # fmt: skip
    """Loads a warpgroup's words [M, L] of a third of a block into registers: their place may be freed."""
    place = nth % RING
    mbarrier.wait(ready.index(place), nth // RING % 2)
    part = ring.index(place * 2 + WARPGROUP)
    words = _seen_as(part, gl.int32, [GROUP, LANES], words_layout(LANES, GATED))
    return words.load(DOT)


@gluon.jit
def _beside(left, right):
    """[M, A] and [M, A] → [M, 2 · A]."""
    return gl.join(left, right).permute((0, 2, 1)).reshape([left.shape[0], 2 * left.shape[1]])


@gluon.jit
def _numbers(high, low, base, Q: gl.constexpr):
    """bf16 of a block's numbers 2q and 2q + 1 of all lanes: [M, 2 · L]."""
    first, second = gl.inline_asm_elementwise(
        decoding(Q), "=r,=r,r,r,r,r,r,r", [high, low, base], (gl.bfloat16, gl.bfloat16), True, 2
    )
    return _beside(first, second)


@gluon.jit
def _weights(high, low, base, STAGE: gl.constexpr, LANES: gl.constexpr, DOT: gl.constexpr):
    """A block's nth stage: [M, 64]."""
    if LANES == 32:
        weights = _numbers(high, low, base, STAGE)
    else:
        weights = _beside(_numbers(high, low, base, 2 * STAGE), _numbers(high, low, base, 2 * STAGE + 1))
    return gl.convert_layout(weights, DOT)


@gluon.jit
def _multiply_block(
    total, base, x_ring, words_ring, x_ready, x_free, words_ready, words_free, stages, thirds,
    WARPGROUP: gl.constexpr, GATED: gl.constexpr, LANES: gl.constexpr, X_RING: gl.constexpr, WORDS_RING: gl.constexpr,
    DOT: gl.constexpr,
):  # fmt: skip
    """Multiplies a block, decoding each stage during the matmul of the last one. Not across blocks: in a loop ptxas
    would have each matmul wait for the one before it."""
    STAGES: gl.constexpr = 8 * LANES // STAGE_INPUTS
    high = _take_third(words_ring, words_ready, thirds, WARPGROUP, GATED, LANES, WORDS_RING, DOT)
    low = _take_third(words_ring, words_ready, thirds + 1, WARPGROUP, GATED, LANES, WORDS_RING, DOT)
    weights = _weights(high, low, base, 0, LANES, DOT)
    before = weights
    for stage in gl.static_range(STAGES):
        place = (stages + stage) % X_RING
        mbarrier.wait(x_ready.index(place), (stages + stage) // X_RING % 2)
        total = warpgroup_mma(weights, x_ring.index(place).permute((1, 0)), total, is_async=True)
        if stage > 0:
            total, before = warpgroup_mma_wait(1, [total, before])
            debug_barrier()
            mbarrier.arrive(x_free.index((stages + stage - 1) % X_RING))
        if stage == 1:
            mbarrier.arrive(words_free.index(thirds % WORDS_RING))
            mbarrier.arrive(words_free.index((thirds + 1) % WORDS_RING))
        before = weights
        if stage + 1 == STAGES // 2:
            low = _take_third(words_ring, words_ready, thirds + 2, WARPGROUP, GATED, LANES, WORDS_RING, DOT)
        if stage + 1 < STAGES:
            weights = _weights(high, low, base, stage + 1, LANES, DOT)
    total, before = warpgroup_mma_wait(0, [total, before])
    debug_barrier()
    mbarrier.arrive(x_free.index((stages + STAGES - 1) % X_RING))
    mbarrier.arrive(words_free.index((thirds + 2) % WORDS_RING))
    return total


@gluon.jit
def _replace(
    total, place_of, least, columns, outputs, replacements, ready, free, nth, WARPGROUP: gl.constexpr,
    DOT: gl.constexpr,
):  # fmt: skip
    """Adds the difference between 16 escapes and the numbers in their places."""
    mbarrier.wait(ready.index(WARPGROUP), nth % 2)
    output = outputs.index(WARPGROUP).load(gl.SliceLayout(0, DOT))
    value = replacements.index(WARPGROUP).load(gl.SliceLayout(0, DOT))
    hit = output[None, :] == place_of[:, None]
    nothing = gl.zeros([GROUP, _ROUND], gl.bfloat16, DOT)
    taken, added = gl.where(hit, -least[:, None], nothing), gl.where(hit, value[None, :], nothing)
    total = warpgroup_mma(taken, columns.index(WARPGROUP).permute((1, 0)), total, is_async=True)
    total = warpgroup_mma(added, columns.index(WARPGROUP).permute((1, 0)), total, is_async=True)
    total, taken, added = warpgroup_mma_wait(0, [total, taken, added])
    debug_barrier()
    mbarrier.arrive(free.index(WARPGROUP))
    return total


@gluon.jit
def _store(y, out, row, output, T, N, STORED: gl.constexpr):
    """Stores y [outputs, rows]: 8 threads have neighbouring outputs of a row."""
    outputs = output + gl.arange(0, y.shape[0], gl.SliceLayout(1, STORED))
    rows = row + gl.arange(0, y.shape[1], gl.SliceLayout(0, STORED))
    inside = (outputs < N)[:, None] & (rows < T)[None, :]
    stored = gl.convert_layout(y.to(out.dtype.element_ty), STORED)
    gl.store(out + outputs[:, None] + rows[None, :] * N, stored, mask=inside)


@gluon.jit
def _multiply(
    out, scales, firsts, x_ring, words_ring, columns, outputs, replacements, x_ready, x_free, words_ready, words_free,
    escapes_ready, escapes_free, T, N, blocks, row_tiles, output_tiles, together, parts, inner,
    WARPGROUP: gl.constexpr, GATED: gl.constexpr, LANES: gl.constexpr, ROWS: gl.constexpr, X_RING: gl.constexpr,
    WORDS_RING: gl.constexpr,
):  # fmt: skip
    """One warpgroup: multiplies 64 outputs of every item. Rounds of escapes come between blocks, evenly spread."""
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    ORDER: gl.constexpr = place_order(GATED)
    STORED: gl.constexpr = stored_layout(ROWS, GATED)
    m = gl.arange(0, GROUP, gl.SliceLayout(1, DOT))
    place_of = m * 0
    for bit in gl.static_range(6):
        place_of += (m // row_bits(GATED)[bit] & 1) << bit
    stages, thirds, rounds = 0, 0, 0
    for item in range(gl.program_id(0), row_tiles * output_tiles * parts, gl.num_programs(0)):
        row_tile, output_tile, part, first, last = item_of(item, blocks, row_tiles, output_tiles, together, parts)
        start, second_start = pieces_of(output_tile, inner, WARPGROUP, GATED)
        escape, end = escapes_of(firsts, N, start)
        second_escape, second_end = escapes_of(firsts, N, second_start)
        low, high = share_of(end - escape + second_end - second_escape, part, parts)
        wanted, begun = (high - low + _ROUND - 1) // _ROUND, rounds
        output = place_of + gl.where(place_of < PIECE, start, second_start - PIECE)
        scale = gl.load(scales + output, mask=output < N, other=0.0).to(gl.int32, bitcast=True) >> 23
        base = gl.where(scale > 0, scale + 1, 0)  # of a scale of 2 ^ (base − 128), and of a row of zeros
        least = (base << 23).to(gl.float32, bitcast=True).to(gl.bfloat16)
        total = gl.zeros([GROUP, ROWS], gl.float32, SUM)
        for block in range(first, last):
            total = _multiply_block(
                total, base[:, None], x_ring, words_ring, x_ready, x_free, words_ready, words_free, stages, thirds,
                WARPGROUP, GATED, LANES, X_RING, WORDS_RING, DOT,
            )  # fmt: skip
            stages += 8 * LANES // STAGE_INPUTS
            thirds += 3
            due = (wanted * (block - first + 1) + (last - first) // 2) // (last - first)
            for _ in range(rounds - begun, due):
                total = _replace(
                    total, place_of, least, columns, outputs, replacements, escapes_ready, escapes_free, rounds,
                    WARPGROUP, DOT,
                )  # fmt: skip
                rounds += 1
        gdc_wait()
        bits = total.reshape([2, 2, 2, 2, 2, 2, ROWS])
        y = bits.permute((ORDER[0], ORDER[1], ORDER[2], ORDER[3], ORDER[4], ORDER[5], 6))
        if GATED:
            gate, up = y.reshape([2, PIECE, ROWS]).permute((1, 2, 0)).split()
            y = gate / (1.0 + gl.exp(-gate)) * up
            _store(y, out, row_tile * ROWS, start, T, inner, STORED)
        else:
            _store(y.reshape([GROUP, ROWS]), out + part * T * N, row_tile * ROWS, start, T, N, STORED)


@gluon.jit(
    do_not_specialize=["T", "blocks", "row_tiles", "output_tiles", "together", "parts"],
    do_not_specialize_on_alignment=["x_flat", "scales", "firsts", "places", "values"],
)
def _matmul(
    x, words, out, x_flat, scales, firsts, places, values, T, N, K, blocks, row_tiles, output_tiles, together, parts,
    inner, GATED: gl.constexpr, LANES: gl.constexpr, ROWS: gl.constexpr, X_RING: gl.constexpr,
    WORDS_RING: gl.constexpr,
):  # fmt: skip
    panel: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [X_RING, ROWS, STAGE_INPUTS], panel)
    words_ring = gl.allocate_shared_memory(
        gl.int32, [2 * WORDS_RING, GROUP, LANES], gl.NVMMASharedLayout(4 * LANES, 32, rank=2)
    )
    columns = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, _ROUND], gl.NVMMASharedLayout(32, 16, rank=2))
    outputs = gl.allocate_shared_memory(gl.int32, [2, _ROUND], flat)
    replacements = gl.allocate_shared_memory(gl.bfloat16, [2, _ROUND], flat)
    x_ready = gl.allocate_shared_memory(gl.int64, [X_RING, 1], barrier)
    x_free = gl.allocate_shared_memory(gl.int64, [X_RING, 1], barrier)
    words_ready = gl.allocate_shared_memory(gl.int64, [WORDS_RING, 1], barrier)
    words_free = gl.allocate_shared_memory(gl.int64, [WORDS_RING, 1], barrier)
    escapes_ready = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    escapes_free = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    for place in gl.static_range(X_RING):
        mbarrier.init(x_ready.index(place), count=1)
        mbarrier.init(x_free.index(place), count=2)
    for place in gl.static_range(WORDS_RING):
        mbarrier.init(words_ready.index(place), count=1)
        mbarrier.init(words_free.index(place), count=2)
    for warpgroup in gl.static_range(2):
        mbarrier.init(escapes_ready.index(warpgroup), count=1)
        mbarrier.init(escapes_free.index(warpgroup), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                out, scales, firsts, x_ring, words_ring, columns, outputs, replacements, x_ready, x_free, words_ready,
                words_free, escapes_ready, escapes_free, T, N, blocks, row_tiles, output_tiles, together, parts, inner,
                0, GATED, LANES, ROWS, X_RING, WORDS_RING,
            )),
            (_multiply, (
                out, scales, firsts, x_ring, words_ring, columns, outputs, replacements, x_ready, x_free, words_ready,
                words_free, escapes_ready, escapes_free, T, N, blocks, row_tiles, output_tiles, together, parts, inner,
                1, GATED, LANES, ROWS, X_RING, WORDS_RING,
            )),
            (_fetch_words, (
                words, words_ring, words_ready, words_free, blocks, row_tiles, output_tiles, together, parts, inner,
                GATED, LANES, WORDS_RING,
            )),
            (_fetch_x, (
                x, x_ring, x_ready, x_free, blocks, row_tiles, output_tiles, together, parts, LANES, ROWS, X_RING,
            )),
            (_gather, (
                x_flat, firsts, places, values, columns, outputs, replacements, escapes_ready, escapes_free, T, N, K,
                blocks, row_tiles, output_tiles, together, parts, inner, 0, GATED, ROWS,
            )),
            (_gather, (
                x_flat, firsts, places, values, columns, outputs, replacements, escapes_ready, escapes_free, T, N, K,
                blocks, row_tiles, output_tiles, together, parts, inner, 1, GATED, ROWS,
            )),
        ],
        [4, 1, 1, 1, 1], [_REGISTERS, _REGISTERS_OTHERS, _REGISTERS_OTHERS, _REGISTERS_OTHERS, _REGISTERS_OTHERS],
    )  # fmt: skip


def serves(outputs: int, gated: bool, device: torch.device) -> bool:
    """Whether the kernel takes weights of so many outputs on this device."""
    return is_hopper(device) and not (gated and outputs // 2 % _INNER_STEP)


def multiply(x_TK: Tensor, weight: Bf12Weight, tiling: HopperTiling) -> Tensor:
    """x·Wᵀ as [P, T, N]: in bfloat16 where P is 1, else float32 parts. A row of x that is not finite gives
    nothing finite."""
    dtype = x_TK.dtype if tiling.parts == 1 else torch.float32
    out_PTN = torch.empty(tiling.parts, len(x_TK), weight.outputs, dtype=dtype, device=x_TK.device)
    _launch(x_TK, weight, out_PTN, tiling, gated=False)
    return out_PTN


def multiply_gated(x_TK: Tensor, weight: Bf12Weight, tiling: HopperTiling) -> Tensor:
    """silu(x·Gᵀ)·(x·Uᵀ) as [T, I], where W is G above U. The tiling has one part."""
    assert tiling.parts == 1
    assert weight.outputs // 2 % _INNER_STEP == 0
    out_TI = torch.empty(len(x_TK), weight.outputs // 2, dtype=x_TK.dtype, device=x_TK.device)
    _launch(x_TK, weight, out_TI, tiling, gated=True)
    return out_TI


@cache
def multiprocessors_of(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def _launch(x_TK: Tensor, weight: Bf12Weight, out: Tensor, tiling: HopperTiling, gated: bool) -> None:
    rows, inputs = x_TK.shape
    outputs, lanes, index, ring = weight.outputs, lanes_of(inputs), weight.index, _RING[tiling.rows]
    assert weight.inputs == inputs
    assert x_TK.dtype == torch.bfloat16
    assert x_TK.is_contiguous()
    assert weight.words_NW.is_contiguous()
    assert max(x_TK.numel(), out.numel()) < 1 << 31  # offsets are int32
    blocks, row_tiles = inputs // (8 * lanes), triton.cdiv(rows, tiling.rows)
    output_tiles = triton.cdiv(outputs, OUTPUTS)
    assert 1 <= tiling.parts <= blocks
    programs = min(multiprocessors_of(x_TK.device), row_tiles * output_tiles * tiling.parts)
    _matmul[(programs,)](
        _tensor_map(x_TK, [tiling.rows, STAGE_INPUTS.value]), _tensor_map(weight.words_NW, [PIECE.value, lanes]), out,
        x_TK, index.scales_N, index.firsts_G, index.places_E, index.values_E, rows, outputs, inputs, blocks, row_tiles,
        output_tiles, TOGETHER, tiling.parts, outputs // 2, GATED=gated, LANES=lanes, ROWS=tiling.rows,
        X_RING=ring, WORDS_RING=ring, num_warps=4, launch_pdl=True,
    )  # fmt: skip


def _tensor_map(tensor: Tensor, box: list[int]) -> Any:
    """The map of a contiguous matrix, with strides of its shape: torch gives any stride for a single row."""
    rows, columns = tensor.shape
    swizzled = gl.NVMMASharedLayout(box[1] * tensor.itemsize, 8 * tensor.itemsize, rank=2)
    return TensorDescriptor(tensor, [rows, columns], [columns, 1], box, swizzled)
