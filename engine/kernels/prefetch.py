"""Has weights come into the L2 cache while a kernel still waits for the one before it: memory would be idle then.

What a step's linear layer reads is known long before the rows that it multiplies. From Hopper on one instruction
fetches a run of bytes; without it, and in the interpreter, nothing is done.
"""

from typing import Final

import triton
import triton.language as tl

AHEAD_BYTES: Final = 96 << 10  # of one program: all that run at once fill half of an H200's L2
_UNIT_BYTES: Final = 16  # in which runs are aligned


@triton.jit
def prefetch(runs, BYTES: tl.constexpr):
    """Fetches as many bytes, a multiple of 16, behind each of these pointers, which are aligned to as many."""
    if BYTES > 0:
        if tl.target_info.cuda_capability_geq(9):
            sizes = tl.full(runs.shape, BYTES, tl.int32)
            tl.inline_asm_elementwise(
                "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, $2; }", "=r,l,r", [runs, sizes],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


def runs_of(row_bytes: int, rows: int, threads: int, matrices: int = 1) -> tuple[int, int]:
    """Into how many runs each of a program's rows, of as many matrices, is cut, so that each thread fetches one of
    each, and the bytes of a run: 0 where it cannot be aligned."""
    runs = max(1, threads // rows)
    run_bytes = min(row_bytes, AHEAD_BYTES // (rows * matrices)) // runs // _UNIT_BYTES * _UNIT_BYTES
    return runs, 0 if row_bytes % _UNIT_BYTES else run_bytes
