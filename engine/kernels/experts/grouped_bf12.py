"""Rows times the matrices of their experts where these are in 12 bits a number: one stack of all experts' outputs, of
which a tile takes its expert's. It goes by the same list as grouped_linear.py, and decodes as kernels/bf12_linear.py.

T rows, K inputs, N outputs of an expert, W words of a row, S entries, P parts, C choices of a row, E escapes at once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.bf12.codec import Bf12Weight
from engine.bf12.layout import GROUP_OUTPUTS, lanes_of
from engine.kernels.bf12_decode import ESCAPES, escapes_of, inline, some_escapes
from engine.kernels.bf12_linear import escaped, joined, load_numbers, words_at
from engine.kernels.experts.grouped_sums import biased, store
from engine.kernels.experts.route import ExpertPlan
from engine.kernels.pdl import release, supports_pdl, wait

BF12_TILE_ROWS_MAX = 64  # sums of more rows leave no registers for the weights: then they are expanded


@dataclass(frozen=True, slots=True)
class GroupedBf12Tiling:
    """How a kernel goes through an expert's words: block_n outputs × a block of inputs at once, the inputs in `parts`
    parts; `joined` is Bf12Tiling's."""

    block_n: int
    parts: int
    stages: int
    warps: int
    joined: int = 4


@triton.jit
def _finish(
    total, x, scales, firsts, places, values, start, end, outputs, part, parts, x_lines, inside, K
):  # fmt: skip
    """Scales the sums and adds what the words do not hold."""
    first, last = escapes_of(firsts, start, end, part, parts)
    missing = tl.zeros_like(total)
    for escape in tl.range(first, last, ESCAPES, num_stages=1):
        place, value = some_escapes(places, values, escape, last)
        there = inside & (place >= 0)[:, None]
        x_ET = tl.load(x + x_lines[None, :] * K + (place & 0xFFFF)[:, None], mask=there, other=0.0)
        total, missing = escaped(total, missing, x_ET, place, value, outputs)
    return total * tl.load(scales + outputs)[:, None] + missing


@triton.jit(do_not_specialize=["T", "tiles_count", "parts", "added_parts"])
def _multiply(
    x, words, scales, firsts, places, values, out, added, order, ends, tiles, weights, T, N, K, W, tiles_count, parts,
    added_parts, C: tl.constexpr, GATED: tl.constexpr, WEIGH_INPUTS: tl.constexpr, WEIGH_OUTPUTS: tl.constexpr,
    INLINE: tl.constexpr, LANES: tl.constexpr, JOINED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """As grouped_linear._multiply. N is a multiple of BLOCK_N."""
    release()
    tile = tl.program_id(0) % tiles_count
    start = tl.program_id(0) // tiles_count * BLOCK_N
    part = tl.program_id(1)
    wait()
    expert = tl.load(tiles + 2 * tile)
    if expert >= 0:
        entries = tl.load(tiles + 2 * tile + 1) + tl.arange(0, BLOCK_T)
        there = entries < tl.load(ends + expert)
        inside = there[None, :]
        entry = tl.load(order + entries, mask=there, other=0)
        row = entry // C
        x_lines = (row if GATED else entries).to(tl.int64)
        factors = tl.load(weights + entry, mask=there, other=0.0)[None, :]
        first_output = expert * (2 * N if GATED else N) + start
        outputs = first_output + tl.arange(0, BLOCK_N)
        at = words_at(words, outputs, tl.arange(0, LANES), N, W, False, LANES)
        blocks = K // (8 * LANES)
        total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        total_up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        columns = tl.arange(0, JOINED * LANES)
        for block in tl.range(part * blocks // parts, (part + 1) * blocks // parts, num_stages=STAGES):
            numbers = joined(load_numbers(at + block * (3 * LANES), LANES, INLINE), JOINED)
            if GATED:
                at_up = at + N.to(tl.int64) * W
                numbers_up = joined(load_numbers(at_up + block * (3 * LANES), LANES, INLINE), JOINED)
            for piece in tl.static_range(8 // JOINED):
                inputs = (block * 8 + piece * JOINED) * LANES + columns
                x_CT = tl.load(x + x_lines[None, :] * K + inputs[:, None], mask=inside, other=0.0)
                total = tl.dot(numbers[piece].to(x_CT.dtype), x_CT, total, input_precision="ieee")
                if GATED:
                    total_up = tl.dot(numbers_up[piece].to(x_CT.dtype), x_CT, total_up, input_precision="ieee")
        total = _finish(
            total, x, scales, firsts, places, values, first_output, first_output + BLOCK_N, outputs, part, parts,
            x_lines, inside, K,
        )  # fmt: skip
        own = start + tl.arange(0, BLOCK_N)
        if GATED:
            total_up = _finish(
                total_up, x, scales, firsts, places, values, first_output + N, first_output + N + BLOCK_N,
                outputs + N, part, parts, x_lines, inside, K,
            )  # fmt: skip
        no_bias = values
        total, total_up = biased(total, total_up, factors, no_bias, outputs, N, part, WEIGH_INPUTS, False, GATED)
        store(
            total, total_up, factors, out, added, entry, row, entries, own, there[:, None], T, N, part, parts,
            added_parts, 0.0, C, GATED, False, WEIGH_OUTPUTS,
        )  # fmt: skip


def multiply_gated(
    x_TK: Tensor, weight: Bf12Weight, plan: ExpertPlan, tiling: GroupedBf12Tiling, weigh_inputs: bool, out_SI: Tensor
) -> Tensor:
    """As grouped_linear.multiply_gated, without a limit."""
    assert tiling.parts == 1
    _launch(x_TK, weight, plan, tiling, out_SI, None, gated=True, weigh=weigh_inputs)
    return out_SI


def multiply(
    x_SK: Tensor, weight: Bf12Weight, plan: ExpertPlan, tiling: GroupedBf12Tiling, added_PTN: Tensor | None,
    weigh_outputs: bool, out_PTN: Tensor,
) -> Tensor:  # fmt: skip
    """As grouped_linear.multiply."""
    rows, choices = plan.weights_TK.shape
    assert out_PTN.shape[:2] == (choices * tiling.parts, rows)
    _launch(x_SK, weight, plan, tiling, out_PTN, added_PTN, gated=False, weigh=weigh_outputs)
    return out_PTN


def _launch(
    x: Tensor, weight: Bf12Weight, plan: ExpertPlan, tiling: GroupedBf12Tiling, out: Tensor, added: Tensor | None,
    gated: bool, weigh: bool,
) -> None:  # fmt: skip
    (rows, choices), inputs, outputs, index = plan.weights_TK.shape, x.shape[1], out.shape[-1], weight.index
    assert weight.inputs == inputs
    assert weight.outputs == len(plan.ends_H) * outputs * (2 if gated else 1)
    assert outputs % tiling.block_n == 0
    assert tiling.block_n % GROUP_OUTPUTS == 0
    assert plan.rows <= BF12_TILE_ROWS_MAX
    assert x.dtype in (torch.bfloat16, torch.float32)  # others cannot hold a scaled number
    for each in (x, weight.words_NW, out):
        assert each.is_contiguous()
    if added is not None:
        assert added.shape[1:] == out.shape[1:]
        assert added.is_contiguous()
    tiles = len(plan.tiles_L2)
    _multiply[(tiles * (outputs // tiling.block_n), tiling.parts)](
        x, weight.words_NW, index.scales_N, index.firsts_G, index.places_E, index.values_E, out,
        plan.weights_TK if added is None else added, plan.order_S, plan.ends_H, plan.tiles_L2, plan.weights_TK, rows,
        outputs, inputs, weight.words_NW.shape[1], tiles, tiling.parts, 0 if added is None else len(added), C=choices,
        GATED=gated, WEIGH_INPUTS=gated and weigh, WEIGH_OUTPUTS=not gated and weigh, INLINE=inline(x.device),
        LANES=lanes_of(inputs), JOINED=tiling.joined, BLOCK_T=plan.rows, BLOCK_N=tiling.block_n,
        STAGES=tiling.stages, num_warps=tiling.warps, launch_pdl=supports_pdl(x.device),
    )  # fmt: skip
