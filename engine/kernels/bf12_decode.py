"""Weights of 12 bits a number (engine/bf12/codec.py) → numbers in kernels, and the kernel that expands a whole matrix.

Numbers come out scaled, as the words hold them: value · 2^(128 − base). An escape's place comes out as 2.

N outputs of a range, K inputs, W words of a row, C columns, E escapes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.bf12.codec import Bf12Weight
from engine.bf12.layout import GROUP_OUTPUTS, lanes_of
from engine.kernels.pdl import release, supports_pdl, wait

GROUP = tl.constexpr(GROUP_OUTPUTS)
ESCAPES = tl.constexpr(32)  # looked at together
PLACEHOLDER = tl.constexpr(2.0)
NOWHERE = tl.constexpr(-1)  # a place without an escape

# Two words of high halves and four of low bytes: both lanes' eight numbers, a pair of lanes in each register.
_PAIRS = tl.constexpr("""{
.reg .b32 turned, q0, q1, q2, q3;
shf.l.wrap.b32 turned, $8, $8, 28;
lop3.b32 q0, $8, 0x87878787, 0x40404040, 0xEA;
lop3.b32 q1, turned, 0x87878787, 0x40404040, 0xEA;
shf.l.wrap.b32 turned, $9, $9, 28;
lop3.b32 q2, $9, 0x87878787, 0x40404040, 0xEA;
lop3.b32 q3, turned, 0x87878787, 0x40404040, 0xEA;
prmt.b32 $0, $10, q0, 0x5140;
prmt.b32 $1, $10, q0, 0x7362;
prmt.b32 $2, $11, q1, 0x5140;
prmt.b32 $3, $11, q1, 0x7362;
prmt.b32 $4, $12, q2, 0x5140;
prmt.b32 $5, $12, q2, 0x7362;
prmt.b32 $6, $13, q3, 0x5140;
prmt.b32 $7, $13, q3, 0x7362;
}""")
_OPERANDS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 6))
_EIGHT = tl.constexpr((tl.bfloat16,) * 8)
_SIGNED = tl.constexpr(-0x78787879)  # 0x87878787: the sign and the exponent's bits of each byte
_OFFSET = tl.constexpr(0x40)  # the exponent from which decoded numbers count

_COLUMNS = 128  # words of a third of a block that a program reads at once: enough for 16 bytes of output a thread
_TURNS = 2  # how often a program does that


def inline(device: torch.device) -> bool:
    """Whether `decode` uses the GPU's own instructions; without them it gives the same numbers anywhere, slower."""
    return device.type == "cuda"


@triton.jit
def decode(high, low0, low1, INLINE: tl.constexpr):
    """Words [N, C] → eight [N, C], number after number: bfloat16, or float32 if not INLINE."""
    if INLINE:
        numbers = tl.inline_asm_elementwise(
            _PAIRS, _OPERANDS, [high, low0, low1], dtype=_EIGHT, is_pure=True, pack=2
        )  # fmt: skip
    else:
        even, odd = _lanes(high)
        low_0, low_1 = _lanes(low0)
        low_2, low_3 = _lanes(low1)
        n0, n1 = _two(even, low_0)
        n2, n3 = _two(_turned(even), low_1)
        n4, n5 = _two(odd, low_2)
        n6, n7 = _two(_turned(odd), low_3)
        numbers = (n0, n1, n2, n3, n4, n5, n6, n7)
    return numbers


@triton.jit
def _lanes(words):
    """[N, C] → the words of even and of odd lanes, [N, C ÷ 2]."""
    return tl.split(tl.reshape(words, [words.shape[0], words.shape[1] // 2, 2]))


@triton.jit
def _turned(high):
    return (high << 28) | ((high >> 4) & 0x0FFFFFFF)


@triton.jit
def _two(high, low):
    """Four bytes each: two lanes of one number and of the next."""
    high = high & _SIGNED
    first = tl.join(_number(high, low, 0), _number(high, low, 8))
    second = tl.join(_number(high, low, 16), _number(high, low, 24))
    shape: tl.constexpr = [high.shape[0], high.shape[1] * 2]
    return tl.reshape(first, shape), tl.reshape(second, shape)


@triton.jit
def _number(high, low, SHIFT: tl.constexpr):
    bits = ((((high >> SHIFT) & 0xFF) | _OFFSET) << 24) | (((low >> SHIFT) & 0xFF) << 16)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def escapes_of(firsts, first_output, end_output, part, parts):
    """A part's slice of the escapes of some outputs, which are whole groups."""
    first = tl.load(firsts + first_output // GROUP)
    last = tl.load(firsts + tl.cdiv(end_output, GROUP))
    count = last - first
    return first + count * part // parts, first + count * (part + 1) // parts


@triton.jit
def some_escapes(places, values, first, last):
    """Places and values of the first ESCAPES from `first` to `last`."""
    escapes = first + tl.arange(0, ESCAPES)
    valid = escapes < last
    return tl.load(places + escapes, mask=valid, other=NOWHERE), tl.load(values + escapes, mask=valid, other=0.0)


@triton.jit
def hits(place, outputs):
    """[N, E]: whether an escape is of an output."""
    return (place >> 16)[None, :] == (outputs & 0x7FFF)[:, None]


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
    tl.debug_barrier()  # other threads write escapes over it
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
    """Writes these outputs of the weight, bit for bit, in bfloat16 or float32. The first begins a group of escapes."""
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
