"""Rows times the matrices of their experts in 4 bits a number, as kernels/experts/grouped_linear.py multiplies others:
for few rows, where reading the weights is what takes the time; and the way back to numbers, for many.

A block of 32 inputs has one power of two. For the fewest rows its sums get it, which are fewer than its numbers; else
the numbers. A GPU unpacks eight numbers in 15 instructions and as many multiplications as there are pairs: an exponent
and a fraction of 4 bits are those of a bfloat16 when they lie at their end, but for 2¹²⁶.

T rows, K inputs, N outputs of an expert, E experts, S entries, P parts, C choices of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.experts.grouped_linear import GroupedTiling
from engine.kernels.experts.grouped_sums import biased, store, tiles_of
from engine.kernels.experts.mxfp4_weight import Mxfp4Weight
from engine.kernels.experts.route import ExpertPlan
from engine.kernels.pdl import release, supports_pdl, wait

MXFP4_TILE_ROWS_MAX = 64  # weights are expanded for larger tiles, which take less time by themselves
_BLOCK = tl.constexpr(32)  # inputs that share a power of two
_ROWS_AT_ONCE = 16  # that a program expands
_SUMS_ROWS_MAX = 16  # of a tile whose sums get the powers of two
_PAIRS = tl.constexpr((tl.bfloat16, tl.bfloat16))


def _unpacking(scaled: bool) -> str:
    """Four bytes, and if `scaled` four factors of each half → four numbers of lower halves and four of upper ones."""
    shifts = [("shl", 6, "shl", 12), ("shr", 2, "shl", 4), ("shl", 2, "shl", 8), ("shr", 6, "shl", 0)]
    lines = [
        ".reg .b32 bytes, size, sign, large, nothing;",
        "mov.b32 large, 0x7E807E80;",  # 2¹²⁶, twice
        "mov.b32 nothing, 0x80008000;",  # -0: what is added to a product so that it stays as it is
        "prmt.b32 bytes, $4, $4, 0x3120;",
    ]
    for pair, (turn, by, turn_sign, by_sign) in enumerate(shifts):
        lines += [
            f"{turn}.b32 size, bytes, {by};",
            f"{turn_sign}.b32 sign, bytes, {by_sign};",
            "and.b32 sign, sign, 0x80008000;",
            "lop3.b32 size, size, 0x01C001C0, sign, 0xEA;",
            f"fma.rn.bf16x2 {'size' if scaled else f'${pair}'}, size, large, nothing;",
        ]
        if scaled:
            lines.append(f"fma.rn.bf16x2 ${pair}, size, ${5 + pair}, nothing;")
    return "{\n" + "\n".join(lines) + "\n}"


_UNPACK = tl.constexpr(_unpacking(scaled=False))
_UNPACK_SCALED = tl.constexpr(_unpacking(scaled=True))


@triton.jit
def _numbers(nibbles, dtype: tl.constexpr):
    """The numbers that 4 bits mean: a sign, two bits of an exponent, one of a fraction. Below 1 they lie evenly."""
    size = nibbles & 7
    value = ((size << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 2, 2.0 * value - 1.0, value)
    return tl.where(nibbles < 8, value, -value).to(dtype)


@triton.jit
def _power(exponents):
    """2 to the power of each, less 127."""
    exponents = exponents.to(tl.int32)
    bits = tl.where(exponents > 0, exponents << 23, 1 << 22)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _add_product(total, numbers, power, values, SUMS: tl.constexpr):
    """`numbers` have their power of two already, unless SUMS."""
    if SUMS:
        return total + tl.dot(numbers, values, input_precision="ieee") * power[:, None]
    return tl.dot(numbers, values, total, input_precision="ieee")


@triton.jit
def _add_blocks(total, both, exponent_low, exponent_high, low, high, SUMS: tl.constexpr, INLINE: tl.constexpr):
    """Adds 64 inputs' products of these outputs, of which `both` has the bytes."""
    power_low, power_high = _power(exponent_low), _power(exponent_high)
    if INLINE and SUMS:
        numbers_low, numbers_high = tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,=r,=r,r", [both], dtype=_PAIRS, is_pure=True, pack=4
        )  # fmt: skip
    elif INLINE:
        factors_low = tl.broadcast_to(power_low.to(tl.bfloat16)[:, None], both.shape)
        factors_high = tl.broadcast_to(power_high.to(tl.bfloat16)[:, None], both.shape)
        numbers_low, numbers_high = tl.inline_asm_elementwise(
            _UNPACK_SCALED, "=r,=r,=r,=r,r,r,r,r,r", [both, factors_low, factors_high], dtype=_PAIRS, is_pure=True,
            pack=4,
        )  # fmt: skip
    else:
        nibbles = both.to(tl.int32)
        factors_low = 1.0 if SUMS else power_low[:, None]
        factors_high = 1.0 if SUMS else power_high[:, None]
        numbers_low = (_numbers(nibbles & 15, tl.float32) * factors_low).to(low.dtype)
        numbers_high = (_numbers(nibbles >> 4, tl.float32) * factors_high).to(low.dtype)
    total = _add_product(total, numbers_low, power_low, low, SUMS)
    return _add_product(total, numbers_high, power_high, high, SUMS)


@triton.jit
def _exponents(at_exponents, group):
    """The exponents of the two blocks of a group."""
    return tl.load(at_exponents + 2 * group), tl.load(at_exponents + 2 * group + 1)


@triton.jit(do_not_specialize=["T", "tiles_count", "parts", "added_parts"])
def _multiply(
    x, pairs, exponents, bias, out, added, order, ends, tiles, weights, T, N, K, tiles_count, parts, added_parts, limit,
    C: tl.constexpr, GATED: tl.constexpr, LIMITED: tl.constexpr, BIASED: tl.constexpr, WEIGH_INPUTS: tl.constexpr,
    WEIGH_OUTPUTS: tl.constexpr, SUMS: tl.constexpr, INLINE: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """GATED takes rows by their own number and gives them in the order of entries; else it takes them in that order,
    and gives each choice's to a part of its own. Exponents are loaded a step before they are needed."""
    release()
    tile, output_tile = tiles_of(tl.program_id(0), tiles_count, N, BLOCK_N)
    part = tl.program_id(1)
    wait()
    expert = tl.load(tiles + 2 * tile)
    if expert >= 0:
        places = tl.load(tiles + 2 * tile + 1) + tl.arange(0, BLOCK_T)
        inside = places < tl.load(ends + expert)
        entry = tl.load(order + places, mask=inside, other=0)
        row = entry // C
        outputs = output_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        lines = expert.to(tl.int64) * (2 * N if GATED else N) + tl.minimum(outputs, N - 1)  # others are not stored
        at_x = x + (row if GATED else places).to(tl.int64)[None, :] * K + tl.arange(0, _BLOCK)[:, None]
        total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        total_up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        groups = K // (2 * _BLOCK)
        at_pairs = pairs + lines[:, None] * (K // 2) + tl.arange(0, _BLOCK)[None, :]
        at_exponents = exponents + lines * (K // _BLOCK)
        pairs_up, exponents_up = N.to(tl.int64) * (K // 2), N.to(tl.int64) * (K // _BLOCK)
        first, last = part * groups // parts, (part + 1) * groups // parts
        low_now, high_now = _exponents(at_exponents, first)
        low_up, high_up = low_now, high_now
        if GATED:
            low_up, high_up = _exponents(at_exponents + exponents_up, first)
        for group in tl.range(first, last, num_stages=STAGES):
            low = tl.load(at_x + group * (2 * _BLOCK), mask=inside[None, :], other=0.0)
            high = tl.load(at_x + group * (2 * _BLOCK) + _BLOCK, mask=inside[None, :], other=0.0)
            both = tl.load(at_pairs + group * _BLOCK, eviction_policy="evict_first")
            later = tl.minimum(group + 1, last - 1)
            low_later, high_later = _exponents(at_exponents, later)
            total = _add_blocks(total, both, low_now, high_now, low, high, SUMS, INLINE)
            low_now, high_now = low_later, high_later
            if GATED:
                both = tl.load(at_pairs + pairs_up + group * _BLOCK, eviction_policy="evict_first")
                low_later, high_later = _exponents(at_exponents + exponents_up, later)
                total_up = _add_blocks(total_up, both, low_up, high_up, low, high, SUMS, INLINE)
                low_up, high_up = low_later, high_later
        factors = 1.0
        if WEIGH_INPUTS or WEIGH_OUTPUTS:
            factors = tl.load(weights + entry, mask=inside, other=0.0)[None, :]
        total, total_up = biased(total, total_up, factors, bias, lines, N, part, WEIGH_INPUTS, BIASED, GATED)
        wanted = inside[:, None] & (outputs < N)[None, :]
        store(
            total, total_up, factors, out, added, entry, row, places, outputs, wanted, T, N, part, parts, added_parts,
            limit, C, GATED, LIMITED, WEIGH_OUTPUTS,
        )  # fmt: skip


def multiply_gated(
    x_TK: Tensor, weight: Mxfp4Weight, bias_S: Tensor | None, plan: ExpertPlan, tiling: GroupedTiling, limit: float,
    weigh_inputs: bool, out_SI: Tensor,
) -> Tensor:  # fmt: skip
    """As grouped_linear.multiply_gated."""
    assert tiling.parts == 1
    assert len(out_SI) == len(plan.order_S)
    _launch(x_TK, weight, bias_S, plan, tiling, out_SI, None, gated=True, limit=limit, weigh=weigh_inputs)
    return out_SI


def multiply(
    x_SK: Tensor, weight: Mxfp4Weight, bias_S: Tensor | None, plan: ExpertPlan, tiling: GroupedTiling,
    added_PTN: Tensor | None, weigh_outputs: bool, out_PTN: Tensor,
) -> Tensor:  # fmt: skip
    """As grouped_linear.multiply."""
    rows, choices = plan.weights_TK.shape
    assert out_PTN.shape[:2] == (choices * tiling.parts, rows)
    _launch(x_SK, weight, bias_S, plan, tiling, out_PTN, added_PTN, gated=False, limit=0.0, weigh=weigh_outputs)
    return out_PTN


def _launch(
    x: Tensor, weight: Mxfp4Weight, bias_S: Tensor | None, plan: ExpertPlan, tiling: GroupedTiling, out: Tensor,
    added: Tensor | None, gated: bool, limit: float, weigh: bool,
) -> None:  # fmt: skip
    (lines, inputs), outputs, (rows, choices) = weight.shape, out.shape[-1], plan.weights_TK.shape
    assert x.shape[1] == inputs
    assert inputs % 64 == 0
    assert plan.rows <= MXFP4_TILE_ROWS_MAX
    assert lines % (2 * outputs if gated else outputs) == 0
    for each in (x, weight.pairs_NH, weight.exponents_NB, out):
        assert each.is_contiguous()
    if added is not None:
        assert added.shape[1:] == out.shape[1:]
        assert added.is_contiguous()
    tiles = len(plan.tiles_L2)
    _multiply[tiles * triton.cdiv(outputs, tiling.block_n), tiling.parts](
        x, weight.pairs_NH, weight.exponents_NB, x if bias_S is None else bias_S, out, x if added is None else added,
        plan.order_S, plan.ends_H, plan.tiles_L2, plan.weights_TK, rows, outputs, inputs, tiles, tiling.parts,
        0 if added is None else len(added), limit, C=choices, GATED=gated, LIMITED=limit > 0, BIASED=bias_S is not None,
        WEIGH_INPUTS=gated and weigh, WEIGH_OUTPUTS=not gated and weigh, SUMS=plan.rows <= _SUMS_ROWS_MAX,
        INLINE=x.is_cuda and x.dtype is torch.bfloat16, BLOCK_T=plan.rows, BLOCK_N=tiling.block_n,
        STAGES=tiling.stages, num_warps=tiling.warps, launch_pdl=supports_pdl(out.device),
    )  # fmt: skip


@triton.jit
def _expand(pairs, exponents, out, first, count, K, ROWS: tl.constexpr):
    group = tl.program_id(1)
    lines = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = lines < count
    lines = tl.minimum(lines, count - 1).to(tl.int64)
    inputs = tl.arange(0, _BLOCK)[None, :]
    at = (first + lines)[:, None] * (K // 2) + group * _BLOCK + inputs
    both = tl.load(pairs + at).to(tl.int32)
    at_exponents = exponents + (first + lines) * (K // _BLOCK) + 2 * group
    at_out = out + lines[:, None] * K + group * (2 * _BLOCK) + inputs
    for half in tl.static_range(2):
        numbers = _numbers((both >> (4 * half)) & 15, tl.float32) * _power(tl.load(at_exponents + half))[:, None]
        tl.store(at_out + half * _BLOCK, numbers.to(out.dtype.element_ty), mask=there[:, None])


def expand(weight: Mxfp4Weight, out_NK: Tensor, lines: range) -> None:
    """Writes these outputs as numbers."""
    inputs = weight.shape[1]
    assert out_NK.shape == (len(lines), inputs)
    assert out_NK.is_contiguous()
    _expand[triton.cdiv(len(lines), _ROWS_AT_ONCE), inputs // 64](
        weight.pairs_NH, weight.exponents_NB, out_NK, lines.start, len(lines), inputs, ROWS=_ROWS_AT_ONCE
    )
