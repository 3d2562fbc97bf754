"""What a rank gives for choices whose experts other ranks have: nothing, so that the sum over all ranks is whole. It
multiplies nothing.

T rows, N outputs of an expert, P parts, C choices of a row.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.experts.route import ExpertPlan
from engine.kernels.pdl import release, supports_pdl, wait

_BLOCK = 1024  # outputs of a program


@triton.jit(do_not_specialize=["T", "parts", "added_parts"])
def _fill_absent(out, added, absent, T, N, parts, added_parts, C: tl.constexpr, BLOCK: tl.constexpr):
    release()
    entry = tl.program_id(0)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, choice = (entry // C).to(tl.int64), entry % C
    inside = outputs < N
    wait()
    if tl.load(absent + entry) != 0:
        for part in range(parts):
            total = tl.zeros([BLOCK], tl.float32)
            for other in range(0, tl.where((choice == 0) & (part == 0), added_parts, 0)):
                at = added + (other * T.to(tl.int64) + row) * N + outputs
                total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
            at = out + ((choice * parts + part).to(tl.int64) * T + row) * N + outputs
            tl.store(at, total.to(out.dtype.element_ty), mask=inside)


def fill_absent(plan: ExpertPlan, added_PTN: Tensor | None, out_PTN: Tensor) -> None:
    """Writes the parts [C · P, T, N] of each choice that the plan has as absent: zeros, and with the first choice what
    is added. Others are left as they are."""
    absent_TC = plan.absent_TK
    if absent_TC is None:
        return
    (rows, choices), outputs = absent_TC.shape, out_PTN.shape[2]
    assert out_PTN.shape[1] == rows
    assert len(out_PTN) % choices == 0
    assert out_PTN.is_contiguous()
    if added_PTN is not None:
        assert added_PTN.shape[1:] == out_PTN.shape[1:]
        assert added_PTN.is_contiguous()
    _fill_absent[rows * choices, triton.cdiv(outputs, _BLOCK)](
        out_PTN, out_PTN if added_PTN is None else added_PTN, absent_TC, rows, outputs, len(out_PTN) // choices,
        0 if added_PTN is None else len(added_PTN), C=choices, BLOCK=_BLOCK, num_warps=4,
        launch_pdl=supports_pdl(out_PTN.device),
    )  # fmt: skip
