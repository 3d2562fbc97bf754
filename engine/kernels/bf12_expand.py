"""A weight of 12 bits a number → the matrix that it was, bit for bit, for whatever multiplies many rows.

N outputs of a range, K inputs, W words of a row.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.bf12.codec import Bf12Weight
from engine.bf12.layout import GROUP_OUTPUTS, lanes_of
from engine.kernels.bf12_decode import ESCAPES, GROUP, decode, inline, some_escapes
from engine.kernels.pdl import release, supports_pdl, wait

_COLUMNS = 128  # words of a third of a block that a program reads at once: enough for 16 bytes of output a thread
_TURNS = 2  # so many times


@triton.jit
def _expand(
    words, scales, firsts, places, values, out, first_output, end_output, K, W, INLINE: tl.constexpr,
    LANES: tl.constexpr, COLUMNS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    release()
    start = first_output + tl.program_id(0) * GROUP
    outputs = start + tl.arange(0, GROUP)
    inside_N = outputs < end_output
    scale = tl.load(scales + outputs, mask=inside_N, other=0.0)[:, None]
    row = (outputs - first_output).to(tl.int64)[:, None] * K
    first_column = tl.program_id(1) * (COLUMNS * TURNS)
    wait()
    for turn in tl.static_range(TURNS):
        columns = first_column + turn * COLUMNS + tl.arange(0, COLUMNS)
        block, lane = columns // LANES, columns % LANES
        inside = inside_N[:, None] & (block * (8 * LANES) < K)[None, :]
        at = words + outputs.to(tl.int64)[:, None] * W + (block * (3 * LANES) + lane)[None, :]
        high = tl.load(at, mask=inside, other=0)
        low0 = tl.load(at + LANES, mask=inside, other=0)
        low1 = tl.load(at + 2 * LANES, mask=inside, other=0)
        numbers = decode(high, low0, low1, INLINE)
        at_out = out + row + (block * (8 * LANES) + lane)[None, :]
        for number in tl.static_range(8):
            expanded = (numbers[number].to(tl.float32) * scale).to(out.dtype.element_ty)  # by a power of two: exact
            tl.store(at_out + number * LANES, expanded, mask=inside)
    tl.debug_barrier()  # what follows is written over it by other threads
    first, last = tl.load(firsts + start // GROUP), tl.load(firsts + start // GROUP + 1)
    for escape in tl.range(first, last, ESCAPES, num_stages=1):
        place, value = some_escapes(places, values, escape, last)
        output = start + ((place >> 16) - start & 0x7FFF)
        k = place & 0xFFFF
        here = (place >= 0) & (output < end_output)
        here &= (k >= first_column * 8) & (k < (first_column + COLUMNS * TURNS) * 8)
        at_escape = out + (output - first_output).to(tl.int64) * K + k
        tl.store(at_escape, value.to(out.dtype.element_ty), mask=here)


def expand(weight: Bf12Weight, out_NK: Tensor, outputs: range) -> None:
    """out = those outputs of the weight, the first of which begins a group of escapes. In bfloat16, or float32."""
    inputs, lanes, index = weight.inputs, lanes_of(weight.inputs), weight.index
    assert out_NK.shape == (len(outputs), inputs)
    assert outputs.start % GROUP_OUTPUTS == 0
    assert outputs.stop <= weight.outputs
    assert out_NK.is_contiguous()
    assert weight.words_NW.is_contiguous()
    grid = (triton.cdiv(len(outputs), GROUP_OUTPUTS), triton.cdiv(inputs, 8 * _COLUMNS * _TURNS))
    _expand[grid](
        weight.words_NW, index.scales_N, index.firsts_G, index.places_E, index.values_E, out_NK, outputs.start,
        outputs.stop, inputs, weight.words_NW.shape[1], INLINE=inline(out_NK.device), LANES=lanes, COLUMNS=_COLUMNS,
        TURNS=_TURNS, num_warps=8, launch_pdl=supports_pdl(out_NK.device),
    )  # fmt: skip
