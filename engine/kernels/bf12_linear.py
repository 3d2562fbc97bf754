"""y = x·Wᵀ for few rows and a W of 12 bits a number, decoded on its way from memory to the arithmetic.

It works as linear.py: one row by multiply and add, more on tensor cores with the weights as first operand; the inputs
in parts where outputs are few. Sums are those of the scaled numbers that the words hold. At the end each is multiplied
by its output's scale, a power of two: without escapes it has the bits of linear.py's sum in the same order. Escapes'
placeholders are subtracted before that, and their values added after it.

A kernel reads what depends on the weight alone before it waits for the kernel before it: scales and escapes, and for
one row the first turn's words too.

T rows, K inputs, N outputs, W words of a row, P parts, I inner size, C columns, E escapes at once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.bf12.codec import Bf12Weight
from engine.bf12.layout import lanes_of
from engine.kernels.bf12_decode import ESCAPES, PLACEHOLDER, decode, escapes_of, hits, inline, some_escapes
from engine.kernels.pdl import release, supports_pdl, wait

BF12_ROWS_MAX = 128  # of the kernels here
_DECODED = 2  # words of neighbouring lanes that a thread decodes at once: with one word the numbers are wrong


@dataclass(frozen=True, slots=True)
class Bf12Tiling:
    """How a kernel goes through W: block_n outputs × some blocks of inputs at once, the inputs in `parts` parts.

    blocks  blocks of 8 · lanes inputs at once, a divisor of their number; 1 on tensor cores
    joined  how many of a block's 8 numbers one product on tensor cores takes: 1, 2, 4 or 8; 0 for one row without them
    """

    block_n: int
    blocks: int
    parts: int
    stages: int
    warps: int
    joined: int


@triton.jit
def words_at(words, outputs, columns, N, W, MASKED: tl.constexpr, LANES: tl.constexpr):
    if MASKED:
        outputs = tl.minimum(outputs, N - 1)  # its result is not stored
    within = columns // LANES * (3 * LANES) + columns % LANES
    return words + outputs.to(tl.int64)[:, None] * W + within[None, :]


@triton.jit
def load_numbers(at, LANES: tl.constexpr, INLINE: tl.constexpr):
    high = tl.load(at, eviction_policy="evict_first")
    low0 = tl.load(at + LANES, eviction_policy="evict_first")
    low1 = tl.load(at + 2 * LANES, eviction_policy="evict_first")
    return decode(high, low0, low1, INLINE)


@triton.jit
def _x_of(x, place):
    """One row's x at some escapes."""
    return tl.load(x + (place & 0xFFFF), mask=place >= 0, other=0.0).to(tl.float32)


@triton.jit
def _finish_row(y, x, scale, places, values, place, value, x_E, first, last, outputs):
    """Scales one row's sums and adds what the words do not hold. The first escapes are loaded already."""
    held = tl.zeros_like(y)
    missing = tl.zeros_like(y)
    for escape in tl.range(first, last, ESCAPES, num_stages=1):
        if escape > first:
            place, value = some_escapes(places, values, escape, last)
            x_E = _x_of(x, place)
        hit = hits(place, outputs)
        held += tl.sum(tl.where(hit, (x_E * PLACEHOLDER)[None, :], 0.0), 1)
        missing += tl.sum(tl.where(hit, (x_E * value.to(tl.float32))[None, :], 0.0), 1)
    return (y - held) * scale + missing


@triton.jit
def _add_turn(total, numbers, x_at, LANES: tl.constexpr):
    for number in tl.static_range(8):
        total += numbers[number].to(tl.float32) * tl.load(x_at + number * LANES).to(tl.float32)[None, :]
    return total


@triton.jit
def _add_gated_turn(total, total_up, numbers, numbers_up, x_at, LANES: tl.constexpr):
    for number in tl.static_range(8):
        x_C = tl.load(x_at + number * LANES).to(tl.float32)[None, :]
        total += numbers[number].to(tl.float32) * x_C
        total_up += numbers_up[number].to(tl.float32) * x_C
    return total, total_up


@triton.jit(do_not_specialize=["parts"])
def _multiply_row(
    x, words, scales, firsts, places, values, out, N, K, W, parts, GATED: tl.constexpr, MASKED: tl.constexpr,
    INLINE: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    start = tl.program_id(0) * BLOCK_N
    end = tl.minimum(start + BLOCK_N, N)
    turns = K // (8 * LANES * BLOCKS)
    turn_first, turn_last = part * turns // parts, (part + 1) * turns // parts
    outputs = start + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCKS * LANES)
    at = words_at(words, outputs, columns, N, W, MASKED, LANES)
    x_at = x + columns // LANES * (8 * LANES) + columns % LANES
    numbers = load_numbers(at + turn_first * (3 * LANES * BLOCKS), LANES, INLINE)
    scale = tl.load(scales + outputs, mask=outputs < N, other=0.0)
    first, last = escapes_of(firsts, start, end, part, parts)
    place, value = some_escapes(places, values, first, last)
    total = tl.zeros([BLOCK_N, BLOCKS * LANES], tl.float32)
    if GATED:
        at_up = at + N.to(tl.int64) * W
        numbers_up = load_numbers(at_up + turn_first * (3 * LANES * BLOCKS), LANES, INLINE)
        scale_up = tl.load(scales + outputs + N, mask=outputs < N, other=0.0)
        first_up, last_up = escapes_of(firsts, start + N, end + N, part, parts)
        place_up, value_up = some_escapes(places, values, first_up, last_up)
        total_up = tl.zeros([BLOCK_N, BLOCKS * LANES], tl.float32)
    wait()
    x_E = _x_of(x, place)
    if GATED:
        x_up_E = _x_of(x, place_up)
    x_first = x_at + turn_first * (8 * LANES * BLOCKS)
    if GATED:
        total, total_up = _add_gated_turn(total, total_up, numbers, numbers_up, x_first, LANES)
    else:
        total = _add_turn(total, numbers, x_first, LANES)
    for turn in tl.range(turn_first + 1, turn_last, num_stages=STAGES):
        numbers = load_numbers(at + turn * (3 * LANES * BLOCKS), LANES, INLINE)
        x_turn = x_at + turn * (8 * LANES * BLOCKS)
        if GATED:
            numbers_up = load_numbers(at_up + turn * (3 * LANES * BLOCKS), LANES, INLINE)
            total, total_up = _add_gated_turn(total, total_up, numbers, numbers_up, x_turn, LANES)
        else:
            total = _add_turn(total, numbers, x_turn, LANES)
    release()
    y = _finish_row(tl.sum(total, 1), x, scale, places, values, place, value, x_E, first, last, outputs)
    if GATED:
        up = tl.sum(total_up, 1)
        outputs_up = outputs + N
        up = _finish_row(up, x, scale_up, places, values, place_up, value_up, x_up_E, first_up, last_up, outputs_up)
        y = y / (1.0 + tl.exp(-y)) * up
    tl.store(out + part * N + outputs, y.to(out.dtype.element_ty), mask=outputs < N)


@triton.jit
def _join(left, right):
    """Side by side: [N, C] twice → [N, 2 · C]."""
    pairs = tl.permute(tl.join(left, right), [0, 2, 1])
    return tl.reshape(pairs, [left.shape[0], 2 * left.shape[1]])


@triton.jit
def joined(numbers, JOINED: tl.constexpr):
    """Eight [N, C] → 8 ÷ JOINED of [N, JOINED · C]."""
    if JOINED > 1:
        n0, n1, n2, n3, n4, n5, n6, n7 = numbers
        numbers = (_join(n0, n1), _join(n2, n3), _join(n4, n5), _join(n6, n7))
    if JOINED > 2:
        n0, n1, n2, n3 = numbers
        numbers = (_join(n0, n1), _join(n2, n3))
    if JOINED > 4:
        numbers = (_join(numbers[0], numbers[1]),)
    return numbers


@triton.jit
def _rows_x_of(x, place, rows, T, K):
    """All rows' x at some escapes."""
    inside = (place >= 0)[:, None] & (rows < T)[None, :]
    return tl.load(x + rows[None, :] * K + (place & 0xFFFF)[:, None], mask=inside, other=0.0)


@triton.jit
def escaped(total, missing, x_ET, place, value, outputs):
    """Subtracts some escapes' placeholders from the sums, and adds their values to what is missing."""
    hit = hits(place, outputs)
    held = tl.where(hit, -PLACEHOLDER, 0.0).to(x_ET.dtype)
    value = tl.where(hit, value.to(tl.float32)[None, :], 0.0).to(x_ET.dtype)
    total = tl.dot(held, x_ET, total, input_precision="ieee")
    return total, tl.dot(value, x_ET, missing, input_precision="ieee")


@triton.jit
def _finish_rows(total, x, scale, places, values, place, value, x_ET, first, last, outputs, rows, T, K):
    """Finishes the sums as `_finish_row`. The first escapes are not in the loop: without a product right after the loop
    over the inputs, the assembler would have each of its products wait for the one before."""
    missing = tl.zeros_like(total)
    total, missing = escaped(total, missing, x_ET, place, value, outputs)
    for escape in tl.range(first + ESCAPES, last, ESCAPES, num_stages=1):
        place, value = some_escapes(places, values, escape, last)
        total, missing = escaped(total, missing, _rows_x_of(x, place, rows, T, K), place, value, outputs)
    return total * scale[:, None] + missing


@triton.jit(do_not_specialize=["T", "parts"])
def _multiply_rows(
    x, words, scales, firsts, places, values, out, T, N, K, W, parts, GATED: tl.constexpr,
    MASKED: tl.constexpr, INLINE: tl.constexpr, LANES: tl.constexpr, JOINED: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    start = tl.program_id(0) * BLOCK_N
    end = tl.minimum(start + BLOCK_N, N)
    blocks = K // (8 * LANES)
    block_first, block_last = part * blocks // parts, (part + 1) * blocks // parts
    outputs = start + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_T)
    at = words_at(words, outputs, tl.arange(0, LANES), N, W, MASKED, LANES)
    x_at = x + rows[None, :] * K + tl.arange(0, JOINED * LANES)[:, None]
    inside = (rows < T)[None, :]
    scale = tl.load(scales + outputs, mask=outputs < N, other=0.0)
    first, last = escapes_of(firsts, start, end, part, parts)
    place, value = some_escapes(places, values, first, last)
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    if GATED:
        at_up = at + N.to(tl.int64) * W
        scale_up = tl.load(scales + outputs + N, mask=outputs < N, other=0.0)
        first_up, last_up = escapes_of(firsts, start + N, end + N, part, parts)
        place_up, value_up = some_escapes(places, values, first_up, last_up)
        total_up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    wait()
    EARLY: tl.constexpr = BLOCK_T <= 32  # with more rows, registers do not hold escapes' x beside all else
    if EARLY:
        x_ET = _rows_x_of(x, place, rows, T, K)
        if GATED:
            x_up_ET = _rows_x_of(x, place_up, rows, T, K)
    for block in tl.range(block_first, block_last, num_stages=STAGES):
        weights = joined(load_numbers(at + block * (3 * LANES), LANES, INLINE), JOINED)
        if GATED:
            weights_up = joined(load_numbers(at_up + block * (3 * LANES), LANES, INLINE), JOINED)
        for piece in tl.static_range(8 // JOINED):
            x_CT = tl.load(x_at + (block * 8 + piece * JOINED) * LANES, mask=inside, other=0.0)
            total = tl.dot(weights[piece].to(x_CT.dtype), x_CT, total, input_precision="ieee")
            if GATED:
                total_up = tl.dot(weights_up[piece].to(x_CT.dtype), x_CT, total_up, input_precision="ieee")
    release()
    if not EARLY:
        x_ET = _rows_x_of(x, place, rows, T, K)
        if GATED:
            x_up_ET = _rows_x_of(x, place_up, rows, T, K)
    total = _finish_rows(total, x, scale, places, values, place, value, x_ET, first, last, outputs, rows, T, K)
    if GATED:
        total_up = _finish_rows(
            total_up, x, scale_up, places, values, place_up, value_up, x_up_ET, first_up, last_up, outputs + N, rows,
            T, K,
        )  # fmt: skip
        total = total / (1.0 + tl.exp(-total)) * total_up
    at_out = out + (part * T + rows[:, None]) * N + outputs[None, :]
    tl.store(at_out, tl.trans(total).to(out.dtype.element_ty), mask=(rows < T)[:, None] & (outputs < N)[None, :])


def multiply(x_TK: Tensor, weight: Bf12Weight, tiling: Bf12Tiling) -> Tensor:
    """x·Wᵀ as [P, T, N]: in x's dtype where P is 1, else float32 parts."""
    dtype = x_TK.dtype if tiling.parts == 1 else torch.float32
    out_PTN = torch.empty(tiling.parts, len(x_TK), weight.outputs, dtype=dtype, device=x_TK.device)
    _launch(x_TK, weight, out_PTN, weight.outputs, tiling, gated=False)
    return out_PTN


def multiply_gated(x_TK: Tensor, weight: Bf12Weight, tiling: Bf12Tiling) -> Tensor:
    """silu(x·Gᵀ)·(x·Uᵀ) as [T, I] in x's dtype, where W is G above U. The tiling has one part."""
    assert tiling.parts == 1
    inner = weight.outputs // 2
    out_TI = torch.empty(len(x_TK), inner, dtype=x_TK.dtype, device=x_TK.device)
    _launch(x_TK, weight, out_TI, inner, tiling, gated=True)
    return out_TI


def _launch(x_TK: Tensor, weight: Bf12Weight, out: Tensor, outputs: int, tiling: Bf12Tiling, gated: bool) -> None:
    rows, inputs = x_TK.shape
    lanes, index = lanes_of(inputs), weight.index
    assert 1 <= rows <= BF12_ROWS_MAX
    assert weight.inputs == inputs
    assert x_TK.dtype in (torch.bfloat16, torch.float32)  # others cannot hold a scaled number
    assert inputs % (8 * lanes * tiling.blocks) == 0
    assert tiling.block_n * tiling.blocks * lanes >= _DECODED * 32 * tiling.warps
    assert x_TK.is_contiguous()
    assert weight.words_NW.is_contiguous()
    grid = (triton.cdiv(outputs, tiling.block_n), tiling.parts)
    tensors = (x_TK, weight.words_NW, index.scales_N, index.firsts_G, index.places_E, index.values_E, out)
    numbers = (outputs, inputs, weight.words_NW.shape[1], tiling.parts)
    options = {
        "GATED": gated, "MASKED": bool(outputs % tiling.block_n), "INLINE": inline(x_TK.device), "LANES": lanes,
        "BLOCK_N": tiling.block_n, "STAGES": tiling.stages, "num_warps": tiling.warps,
        "launch_pdl": supports_pdl(x_TK.device),
    }  # fmt: skip
    if tiling.joined == 0:
        assert rows == 1
        assert tiling.parts <= inputs // (8 * lanes * tiling.blocks)  # a part has a first turn
        _multiply_row[grid](*tensors, *numbers, BLOCKS=tiling.blocks, **options)
        return
    assert tiling.blocks == 1
    block_t = max(16, triton.next_power_of_2(rows))
    _multiply_rows[grid](*tensors, rows, *numbers, JOINED=tiling.joined, BLOCK_T=block_t, **options)
