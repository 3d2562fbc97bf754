"""Token → row of the embedding, also for a token that the flight before this one has only just sampled.

T rows of a bucket, H hidden size, V vocabulary, R sampled rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.packed import ROWS, TOKENS, word


@triton.jit
def _embed(step, sampled, embedding, out, hidden, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    values = tl.zeros([BLOCK], tl.float32)
    if row < tl.load(step + ROWS):
        token = word(step, TOKENS, row)
        if token < 0:
            token = tl.load(sampled - 1 - token)
        token = tl.maximum(token, 0)  # what was not finite sampled −1: its sequence ends, whatever is computed here
        values = tl.load(embedding + token.to(tl.int64) * hidden + columns, mask=inside).to(tl.float32)
    tl.store(out + row.to(tl.int64) * hidden + columns, values, mask=inside)


def embed(step: Tensor, sampled_R: Tensor, embedding_VH: Tensor, out_TH: Tensor) -> None:
    """out (float32) = embedding of the step's tokens; 0 in rows past them. Token −1−r stands for sampled_R[r]."""
    rows, hidden = out_TH.shape
    assert step.dtype == sampled_R.dtype == torch.int32
    assert out_TH.dtype == torch.float32
    assert embedding_VH.shape[1] == hidden
    assert embedding_VH.is_contiguous()
    assert out_TH.is_contiguous()
    block = min(2048, triton.next_power_of_2(hidden))
    _embed[rows, triton.cdiv(hidden, block)](step, sampled_R, embedding_VH, out_TH, hidden, BLOCK=block)
