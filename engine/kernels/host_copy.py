"""Copies a few words between a device and pinned host memory, by a kernel that reads and writes that memory itself.

A copy engine does one copy after the other, whatever stream has queued it: the words of a step, and its tokens, would
wait behind all blocks and weights that are on their way. The kernel lets none begin before it has ended: kernels of a
step read its words before they wait for those in front of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256  # a word for each thread


@triton.jit(do_not_specialize=["count"])
def _copy(source, target, count, BLOCK: tl.constexpr):
    words = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = words < count
    tl.store(target + words, tl.load(source + words, mask=inside, other=0), mask=inside)


def copy_words(source: Tensor, target: Tensor) -> None:
    """Queues the copy of int32 words into as many others, in the order of the stream that is entered. The caller keeps
    both until it is done."""
    assert source.dtype == target.dtype == torch.int32
    assert source.shape == target.shape
    assert source.is_contiguous()
    assert target.is_contiguous()
    _copy[(triton.cdiv(source.numel(), _BLOCK),)](source, target, source.numel(), BLOCK=_BLOCK, num_warps=8)
