"""What the kernels that multiply rows by their experts have in common: which tiles a program takes, and what becomes of
its sums [outputs, entries].

T rows, N outputs of an expert, P parts, C choices of a row.
"""

import triton
import triton.language as tl

from engine.kernels.experts.reference import CLAMPED_ALPHA

_TOGETHER = tl.constexpr(8)  # tiles of entries that go with one tile of outputs before the next comes
_ALPHA = tl.constexpr(CLAMPED_ALPHA)


@triton.jit
def tiles_of(program, tiles_count, N, BLOCK_N: tl.constexpr):
    """A program's tile of entries and its tile of outputs: programs that read the same weights start together."""
    output_tiles = tl.cdiv(N, BLOCK_N)
    chunk = program // (_TOGETHER * output_tiles)
    together = tl.minimum(_TOGETHER, tiles_count - chunk * _TOGETHER)
    within = program % (_TOGETHER * output_tiles)
    return chunk * _TOGETHER + within % together, within // together


@triton.jit
def gated(gate, up, limit, LIMITED: tl.constexpr):
    if LIMITED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return gate / (1.0 + tl.exp(gate * -_ALPHA)) * (up + 1.0)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def biased(
    total, total_up, factors, bias, lines, N, part, WEIGH_INPUTS: tl.constexpr, BIASED: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Both sums as of weighed rows, and with their biases in the first part."""
    if WEIGH_INPUTS:  # here, where it costs nothing: the sums grow as the rows would
        total *= factors
        total_up *= factors
    if BIASED:
        share = tl.where(part == 0, 1.0, 0.0)
        total += tl.load(bias + lines).to(tl.float32)[:, None] * share
        if GATED:
            total_up += tl.load(bias + lines + N).to(tl.float32)[:, None] * share
    return total, total_up


@triton.jit
def store(
    total, total_up, factors, out, added, entry, row, places, outputs, wanted, T, N, part, parts, added_parts, limit,
    C: tl.constexpr, GATED: tl.constexpr, LIMITED: tl.constexpr, WEIGH_OUTPUTS: tl.constexpr,
):  # fmt: skip
    """GATED: stores entries in their order. Else stores each choice's in a part of its own, with what is added to the
    row in the first part of its first choice."""
    if GATED:
        total = gated(total, total_up, limit, LIMITED)
        at = out + places.to(tl.int64)[:, None] * N + outputs[None, :]
    else:
        if WEIGH_OUTPUTS:
            total *= factors
        choice = entry % C
        at_row = row.to(tl.int64)[:, None] * N + outputs[None, :]
        best = wanted & (choice == 0)[:, None]
        total = tl.trans(total)
        for other in range(0, tl.where(part == 0, added_parts, 0)):
            total += tl.load(added + other * T.to(tl.int64) * N + at_row, mask=best, other=0.0).to(tl.float32)
        total = tl.trans(total)
        at = out + (choice * parts + part).to(tl.int64)[:, None] * T * N + at_row
    tl.store(at, tl.trans(total).to(out.dtype.element_ty), mask=wanted)
