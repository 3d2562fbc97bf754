"""Token → row of the embedding, as it is or in 12 bits a number, also for a token that the step before has only just
sampled; or row of a buffer, for what is no token of the vocabulary.

T rows of a bucket, H hidden size, V vocabulary, W words of a row, R sampled rows, E rows of the buffer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.bf12.codec import Bf12Weight
from engine.bf12.layout import lanes_of
from engine.kernels.bf12_decode import ESCAPES, GROUP, decode, inline, some_escapes
from engine.kernels.step_layout import EMBEDDED, ROWS, TOKENS, word

_COLUMNS = 256  # words of a third of a block that a program decodes


@triton.jit
def _token(step, sampled, row):
    token = word(step, TOKENS, row)
    if token < 0:
        token = tl.load(sampled - 1 - token)
    return tl.maximum(token, 0)  # −1 where logits were not finite: the sequence ends, whatever is computed here


@triton.jit
def _embed(
    step, sampled, embedding, buffer, out, hidden, first, count, SCALE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    values = tl.zeros([BLOCK], tl.float32)
    if row < tl.load(step + ROWS):
        token = _token(step, sampled, row).to(tl.int64)
        if token >= EMBEDDED:
            if first == 0:
                values = tl.load(buffer + (token - EMBEDDED) * hidden + columns, mask=inside).to(tl.float32)
        elif (token >= first) & (token < first + count):
            values = tl.load(embedding + (token - first) * hidden + columns, mask=inside).to(tl.float32)
            if SCALE != 1.0:
                values *= SCALE
    tl.store(out + row.to(tl.int64) * hidden + columns, values, mask=inside)


@triton.jit
def _embed_coded(
    step, sampled, words, scales, firsts, places, values, buffer, out, hidden, W, first_token, count,
    SCALE: tl.constexpr, INLINE: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    first_column = tl.program_id(1) * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)[None, :]
    block, lane = columns // LANES, columns % LANES
    inside = block * (8 * LANES) < hidden
    out_row = out + row.to(tl.int64) * hidden
    at_out = out_row + block * (8 * LANES) + lane
    token = tl.full((), -1, tl.int32)
    if row < tl.load(step + ROWS):
        token = _token(step, sampled, row)
    is_buffered = (token >= EMBEDDED) & (first_token == 0)
    token -= tl.where(token >= EMBEDDED, 0, first_token)
    if is_buffered:
        at = buffer + (token - EMBEDDED).to(tl.int64) * hidden + block * (8 * LANES) + lane
        for number in tl.static_range(8):
            tl.store(at_out + number * LANES, tl.load(at + number * LANES, mask=inside).to(tl.float32), mask=inside)
    elif (token >= 0) & (token < count):
        at = words + token.to(tl.int64) * W + block * (3 * LANES) + lane
        high = tl.load(at, mask=inside, other=0)
        low0 = tl.load(at + LANES, mask=inside, other=0)
        low1 = tl.load(at + 2 * LANES, mask=inside, other=0)
        numbers = decode(high, low0, low1, INLINE)
        scale = tl.load(scales + token)
        if SCALE != 1.0:
            scale *= SCALE
        for number in tl.static_range(8):
            tl.store(at_out + number * LANES, numbers[number].to(tl.float32) * scale, mask=inside)
        tl.debug_barrier()  # other threads write escapes over it
        first, last = tl.load(firsts + token // GROUP), tl.load(firsts + token // GROUP + 1)
        for escape in tl.range(first, last, ESCAPES, num_stages=1):
            place, value = some_escapes(places, values, escape, last)
            k = place & 0xFFFF
            here = (place >> 16) == (token & 0x7FFF)
            here &= (k >= first_column * 8) & (k < (first_column + COLUMNS) * 8)
            if SCALE != 1.0:
                tl.store(out_row + k, value.to(tl.float32) * SCALE, mask=here)
            else:
                tl.store(out_row + k, value.to(tl.float32), mask=here)
    else:
        for number in tl.static_range(8):
            tl.store(at_out + number * LANES, tl.zeros([1, COLUMNS], tl.float32), mask=inside)


def embed(
    step: Tensor, sampled_R: Tensor, embedding: Tensor | Bf12Weight, buffer_EH: Tensor, out_TH: Tensor,
    scale: float = 1.0, first: int = 0,
) -> None:  # fmt: skip
    """Writes scale · the embedding of the step's tokens as float32; 0 in rows past them. Token −1−r stands for
    sampled_R[r], token EMBEDDING_TOKEN+e for row e of the buffer, which is not scaled. Where the embedding's rows are
    those of tokens from `first` on, 0 stands for all other tokens; what is no token is written with those from 0 on."""
    rows, hidden = out_TH.shape
    assert step.dtype == sampled_R.dtype == torch.int32
    assert out_TH.dtype == torch.float32
    assert out_TH.is_contiguous()
    assert buffer_EH.shape[1] == hidden
    assert buffer_EH.is_contiguous()
    if isinstance(embedding, Bf12Weight):
        assert embedding.inputs == hidden
        assert embedding.words_NW.is_contiguous()
        index = embedding.index
        _embed_coded[rows, triton.cdiv(hidden, 8 * _COLUMNS)](
            step, sampled_R, embedding.words_NW, index.scales_N, index.firsts_G, index.places_E, index.values_E,
            buffer_EH, out_TH, hidden, embedding.words_NW.shape[1], first, embedding.outputs, SCALE=scale,
            INLINE=inline(out_TH.device),
            LANES=lanes_of(hidden), COLUMNS=_COLUMNS,
        )  # fmt: skip
        return
    assert embedding.shape[1] == hidden
    assert embedding.is_contiguous()
    block = min(2048, triton.next_power_of_2(hidden))
    _embed[rows, triton.cdiv(hidden, block)](
        step, sampled_R, embedding, buffer_EH, out_TH, hidden, first, len(embedding), SCALE=scale, BLOCK=block
    )
