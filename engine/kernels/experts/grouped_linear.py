"""Rows times the matrices of their experts, in one launch for all of them: by the list of kernels/experts/route.py.

A tile's entries are those of one expert. Its weights are the first operand of tensor cores, as in kernels/linear.py,
and the rows the second. As many programs start as the worst choice needs, and those without a tile end at once.
Programs that read the same weights start together.

A matrix may be in 8 bits a number (e4m3), with a factor for each output, or for each output and 128 inputs. The rows
are in 8 bits then too, with factors of their own.

T rows, K inputs, N outputs of an expert, E experts, S entries, P parts, C choices of a row, B blocks of 128 inputs.
"""

from dataclasses import dataclass
from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.experts.grouped_sums import biased, store, tiles_of
from engine.kernels.experts.route import ExpertPlan
from engine.kernels.pdl import release, supports_pdl, wait

SCALE_INPUTS: Final = 128  # that share a factor, where factors are not whole outputs'


@dataclass(frozen=True, slots=True)
class GroupedTiling:
    """How a kernel goes through an expert's matrix: block_n outputs × block_k inputs at once, the inputs in `parts`
    parts. The plan says how many entries a tile has."""

    block_n: int
    block_k: int
    parts: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The matrices of all experts below each other, [E · N, K], with factors [E · N, B or 1] where they are in 8 bits,
    and biases [E · N] where they have some; or of some experts beside each other.

    first  the expert that they begin with: what others compute is left as it is.
    """

    weight: Tensor
    scales: Tensor | None = None
    bias: Tensor | None = None
    first: int = 0


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Rows [T or S, K], with factors [T or S, B or 1] where they are in 8 bits."""

    rows: Tensor
    scales: Tensor | None = None


@triton.jit
def _weights_of(w, lines, inputs, K, MASKED: tl.constexpr, ONCE: tl.constexpr):
    at = w + lines[:, None] * K + inputs[None, :]
    if MASKED:
        return tl.load(at, mask=(inputs < K)[None, :], other=0.0)
    if ONCE:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at)


@triton.jit
def _rows_of(x, lines, inputs, inside, K, MASKED: tl.constexpr):
    within = inside[None, :] & (inputs < K)[:, None] if MASKED else inside[None, :]
    return tl.load(x + lines[None, :] * K + inputs[:, None], mask=within, other=0.0)


@triton.jit
def _scaled(total, product, w_scales, x_scales, lines, x_lines, inside, block, BLOCKS):
    """Adds one block's product with its factors."""
    product *= tl.load(w_scales + lines * BLOCKS + block)[:, None]
    return total + product * tl.load(x_scales + x_lines * BLOCKS + block, mask=inside, other=0.0)[None, :]


@triton.jit(do_not_specialize=["T", "tiles_count", "first", "held", "parts", "added_parts"])
def _multiply(
    x, x_scales, w, w_scales, bias, out, added, order, ends, tiles, weights, T, N, K, tiles_count, first, held, parts,
    added_parts, limit, C: tl.constexpr, BLOCKS: tl.constexpr, GATED: tl.constexpr, LIMITED: tl.constexpr,
    BIASED: tl.constexpr, SCALES: tl.constexpr, WEIGH_INPUTS: tl.constexpr,
    WEIGH_OUTPUTS: tl.constexpr, MASKED: tl.constexpr, ONCE: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """GATED takes rows by their own number and gives them in the order of entries; else it takes them in that order,
    and gives each choice's to a part of its own. ALONE: there is one expert, which all rows take in their order."""
    release()
    tile, output_tile = tiles_of(tl.program_id(0), tiles_count, N, BLOCK_N)
    part = tl.program_id(1)
    wait()
    expert = tile * 0 if ALONE else tl.load(tiles + 2 * tile)
    own = expert - first
    if (expert >= 0) & (own >= 0) & (own < held):
        if ALONE:
            places = tile * BLOCK_T + tl.arange(0, BLOCK_T)
            inside = places < T
            entry = places
        else:
            places = tl.load(tiles + 2 * tile + 1) + tl.arange(0, BLOCK_T)
            inside = places < tl.load(ends + expert)
            entry = tl.load(order + places, mask=inside, other=0)
        row = entry // C
        outputs = output_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        lines = own.to(tl.int64) * (2 * N if GATED else N) + tl.minimum(outputs, N - 1)  # others are not stored
        x_lines = (row if GATED else places).to(tl.int64)
        factors = 1.0
        if WEIGH_INPUTS or WEIGH_OUTPUTS:
            factors = tl.load(weights + entry, mask=inside, other=0.0)[None, :]
        steps = tl.cdiv(K, BLOCK_K)
        total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        total_up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for step in tl.range(part * steps // parts, (part + 1) * steps // parts, num_stages=STAGES):
            inputs = step * BLOCK_K + tl.arange(0, BLOCK_K)
            values = _rows_of(x, x_lines, inputs, inside, K, MASKED)
            block = step * BLOCK_K // 128
            if SCALES == 2:
                product = tl.dot(_weights_of(w, lines, inputs, K, MASKED, ONCE), values, input_precision="ieee")
                total = _scaled(total, product, w_scales, x_scales, lines, x_lines, inside, block, BLOCKS)
                if GATED:
                    up = tl.dot(_weights_of(w, lines + N, inputs, K, MASKED, ONCE), values, input_precision="ieee")
                    total_up = _scaled(total_up, up, w_scales, x_scales, lines + N, x_lines, inside, block, BLOCKS)
            else:
                # Tensor cores add up products of 8 bits in fewer bits than float32 has: only a block at a time.
                IMPRECISE: tl.constexpr = BLOCK_K if SCALES else None
                weight = _weights_of(w, lines, inputs, K, MASKED, ONCE).to(values.dtype)
                total = tl.dot(weight, values, total, input_precision="ieee", max_num_imprecise_acc=IMPRECISE)
                if GATED:
                    weight_up = _weights_of(w, lines + N, inputs, K, MASKED, ONCE).to(values.dtype)
                    total_up = tl.dot(
                        weight_up, values, total_up, input_precision="ieee", max_num_imprecise_acc=IMPRECISE
                    )  # fmt: skip
        if SCALES == 1:
            row_scale = tl.load(x_scales + x_lines, mask=inside, other=0.0)[None, :]
            total *= tl.load(w_scales + lines)[:, None] * row_scale
            if GATED:
                total_up *= tl.load(w_scales + lines + N)[:, None] * row_scale
        total, total_up = biased(total, total_up, factors, bias, lines, N, part, WEIGH_INPUTS, BIASED, GATED)
        wanted = inside[:, None] & (outputs < N)[None, :]
        store(
            total, total_up, factors, out, added, entry, row, places, outputs, wanted, T, N, part, parts, added_parts,
            limit, C, GATED, LIMITED, WEIGH_OUTPUTS,
        )  # fmt: skip


def multiply_gated(
    x: ExpertRows, weights: ExpertWeights, plan: ExpertPlan, tiling: GroupedTiling, limit: float,
    weigh_inputs: bool, out_SI: Tensor,
) -> Tensor:  # fmt: skip
    """Into [S, I] in the order of entries: what each expert's gate lets through of its up, of the entry's row, which
    is multiplied by its weight first where `weigh_inputs`. The tiling has one part; `limit` is reference.gate's."""
    assert tiling.parts == 1
    assert len(out_SI) == len(plan.order_S)
    _launch(x, weights, plan, tiling, out_SI, out_SI.shape[1], None, gated=True, limit=limit, weigh=weigh_inputs)
    return out_SI


def multiply(
    x: ExpertRows, weights: ExpertWeights, plan: ExpertPlan, tiling: GroupedTiling, added_PTN: Tensor | None,
    weigh_outputs: bool, out_PTN: Tensor,
) -> Tensor:  # fmt: skip
    """Into parts [C · P, T, N]: each choice's rows, from [S, K] in the order of entries, times its weight where
    `weigh_outputs`. What is `added` is part of the first choice's."""
    rows, choices = plan.weights_TK.shape
    assert out_PTN.shape[:2] == (choices * tiling.parts, rows)
    _launch(x, weights, plan, tiling, out_PTN, out_PTN.shape[2], added_PTN, gated=False, limit=0.0, weigh=weigh_outputs)
    return out_PTN


def multiply_alone(
    x: ExpertRows, weights: ExpertWeights, tile_rows: int, tiling: GroupedTiling, out_PTN: Tensor
) -> Tensor:
    """One matrix, which all rows take: into parts [P, T, N]."""
    _launch(x, weights, tile_rows, tiling, out_PTN, out_PTN.shape[2], None, gated=False, limit=0.0, weigh=False)
    return out_PTN


def _launch(
    x: ExpertRows, weights: ExpertWeights, plan: ExpertPlan | int, tiling: GroupedTiling, out: Tensor, outputs: int,
    added: Tensor | None, gated: bool, limit: float, weigh: bool,
) -> None:  # fmt: skip
    """`plan` is the rows of a tile where there is one matrix for all."""
    inputs, blank = x.rows.shape[1], weights.weight
    lists: tuple[Tensor, ...] = (blank,) * 4
    if isinstance(plan, int):
        assert not gated
        assert weights.bias is None
        rows, choices, tiles, tile_rows = len(x.rows), 1, triton.cdiv(len(x.rows), plan), plan
    else:
        (rows, choices), tiles, tile_rows = plan.weights_TK.shape, len(plan.tiles_L2), plan.rows
        lists = (plan.order_S, plan.ends_H, plan.tiles_L2, plan.weights_TK)
    assert weights.weight.shape[1] == inputs
    assert len(weights.weight) % (2 * outputs if gated else outputs) == 0
    assert weights.bias is None or len(weights.bias) == len(weights.weight)
    for each in (x.rows, weights.weight, out):
        assert each.is_contiguous()
    kind = 0
    if weights.scales is not None:
        kind = 1 if weights.scales.shape[1] == 1 else 2
        assert kind == 1 or tiling.block_k == SCALE_INPUTS
        assert weights.scales.is_contiguous()
        assert x.scales is not None
        assert x.scales.shape[1] == weights.scales.shape[1]
        assert x.rows.dtype == weights.weight.dtype
    if added is not None:
        assert added.shape[1:] == out.shape[1:]
        assert added.is_contiguous()
    grid = (tiles * triton.cdiv(outputs, tiling.block_n), tiling.parts)
    held = len(weights.weight) // (2 * outputs if gated else outputs)
    _multiply[grid](
        x.rows, blank if x.scales is None else x.scales, weights.weight,
        blank if weights.scales is None else weights.scales, blank if weights.bias is None else weights.bias, out,
        blank if added is None else added, *lists, rows, outputs, inputs, tiles,
        weights.first, held, tiling.parts, 0 if added is None else len(added), limit, C=choices,
        BLOCKS=0 if weights.scales is None else weights.scales.shape[1], GATED=gated, LIMITED=limit > 0,
        BIASED=weights.bias is not None, SCALES=kind, WEIGH_INPUTS=gated and weigh,
        WEIGH_OUTPUTS=not gated and weigh, MASKED=bool(inputs % tiling.block_k), ONCE=tile_rows <= 32,
        BLOCK_T=tile_rows, BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k, STAGES=tiling.stages,
        ALONE=isinstance(plan, int), num_warps=tiling.warps, launch_pdl=supports_pdl(out.device),
    )  # fmt: skip
