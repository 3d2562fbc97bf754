"""The sum of all ranks' parts on GPUs, with residual and RMSNorm, and tokens that all need of rank 0, in kernels
of our own over the windows of windows.py.

Few rows come without flags, which must wait until the data before them have arrived: no number is sent as 0, and a
reader waits for each number to be another one, and writes zeroes in its place. More rows of two ranks go in one shot;
of more ranks each row is summed by one, and handed to all.

W ranks, P parts of one result on a rank, T rows of a bucket, H hidden size.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.pdl import release, supports_pdl, wait
from engine.kernels.ranks.windows import (
    FEW_BYTES,
    LOOKS,
    PER_LAUNCH,
    REGISTERS,
    RUNS,
    STOP,
    RankWindows,
    await_others,
    begin,
    count_in,
    max_programs,
    places_of,
    signal,
    views_of,
)

__all__ = ["RankWindows", "add_norm_ranks", "share_tokens"]
ONE_SHOT_BYTES: Final = 512 << 10  # of all rows of more than two ranks: above it one of them sums a row, for all
_WARPS: Final = 16
_FEW_ROWS: Final = 128  # a program each, without flags
_INTEGERS: Final = {2: torch.int16, 4: torch.int32}  # as wide as numbers
_AT_ONCE: Final = 2  # of a program's rows, where it has many


@triton.jit
def _own(parts, row, part_stride, hidden, columns, inside, P: tl.constexpr):
    offset = tl.cast(row, tl.int64) * hidden
    x = tl.load(parts + offset + columns, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, P):
        x += tl.load(parts + part * part_stride + offset + columns, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _received(own, source, stride, columns, inside, rank, W: tl.constexpr):
    """The sum of `own` and of what all other ranks sent, in the ranks' order, whoever adds it up."""
    x = tl.zeros(own.shape, tl.float32)
    for peer in tl.static_range(W):
        if peer == rank:
            x += own
        else:
            place = source + (peer - (rank < peer).to(tl.int32)) * stride
            x += tl.load(place + columns, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _normed(
    x, total, weight, behind, out, row, hidden, columns, inside, epsilon, BEHIND: tl.constexpr
):  # fmt: skip
    offset = tl.cast(row, tl.int64) * hidden
    if BEHIND:
        x = x * tl.rsqrt(tl.sum(x * x, 0) / hidden + epsilon) * tl.load(behind + columns, mask=inside, other=0.0)
    x += tl.load(total + offset + columns, mask=inside, other=0.0)
    tl.store(total + offset + columns, x, mask=inside)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / hidden + epsilon) * tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + offset + columns, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _arrived(place, words, window, rank, inside):
    """Waits until other numbers than 0 lie there, or the abort word is set; leaves zeroes, and gives the numbers."""
    got = tl.load(place, mask=inside, other=1, volatile=True)
    looks = 0
    while tl.min((got != 0).to(tl.int32), 0) == 0:
        got = tl.load(place, mask=inside, other=1, volatile=True)
        looks += 1
        if looks % LOOKS == 0:
            stopped = tl.atomic_add(words + rank * window + STOP, 0, sem="acquire", scope="sys")
            if stopped != 0:
                got = tl.full(got.shape, 1, got.dtype)
    tl.store(place, tl.zeros(got.shape, got.dtype), mask=inside)
    return got


@triton.jit(do_not_specialize=PER_LAUNCH)
def _sum_few_rows(
    total, parts, weight, behind, out, words, data, rank, rows, hidden, part_stride, epsilon, window, data_window,
    data_first, half, P: tl.constexpr, W: tl.constexpr, BEHIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each rank sends its rows to all others, and each adds up all of them, a program for a row. `data` are integers as
    wide as numbers; +0 goes instead of −0, and the sign bit of all is turned."""
    SIGN: tl.constexpr = -(1 << (data.dtype.element_ty.primitive_bitwidth - 1))
    release()
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    inside = columns < hidden
    wait()
    epoch = begin(words, window, rank)
    inbox = data + data_first + (epoch % 2) * half
    own = _own(parts, row, part_stride, hidden, columns, inside, P).to(out.dtype.element_ty)
    sent = own.to(data.dtype.element_ty, bitcast=True)
    sent = tl.where(sent == SIGN, 0, sent) ^ SIGN
    for peer in tl.static_range(W):
        if peer != rank:
            place = ((rank - (rank > peer).to(tl.int32)) * rows + row) * hidden
            tl.store(inbox + peer * data_window + place + columns, sent, mask=inside)
    count_in(words, window, rank, epoch)
    x = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(W):
        if peer == rank:
            x += (sent ^ SIGN).to(out.dtype.element_ty, bitcast=True).to(tl.float32)
        else:
            place = ((peer - (rank < peer).to(tl.int32)) * rows + row) * hidden
            got = _arrived(inbox + rank * data_window + place + columns, words, window, rank, inside)
            x += (got ^ SIGN).to(out.dtype.element_ty, bitcast=True).to(tl.float32)
    x = tl.where(inside, x, 0.0)
    _normed(x, total, weight, behind, out, row, hidden, columns, inside, epsilon, BEHIND)


@triton.jit
def _send_rows(
    inbox, parts, first, rows, rank, hidden, part_stride, data_window, columns, inside, P: tl.constexpr,
    W: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Writes AT_ONCE of this program's rows, the first of which is `first`, to all other ranks."""
    for index in tl.static_range(AT_ONCE):
        row = first + index * tl.num_programs(0)
        if row < rows:
            x = _own(parts, row, part_stride, hidden, columns, inside, P).to(inbox.dtype.element_ty)
            for peer in tl.static_range(W):
                if peer != rank:
                    place = ((rank - (rank > peer).to(tl.int32)) * rows + row) * hidden
                    tl.store(inbox + peer * data_window + place + columns, x, mask=inside)


@triton.jit(do_not_specialize=PER_LAUNCH)
def _sum_one_shot(
    total, parts, weight, behind, out, words, data, rank, rows, hidden, part_stride, epsilon, window, data_window,
    data_first, half, P: tl.constexpr, W: tl.constexpr, BEHIND: tl.constexpr, BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Each rank sends its rows to all others, and each adds up all of them: AT_ONCE rows of a program are on their way
    while those before are added up."""
    release()
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    wait()
    epoch = begin(words, window, rank)
    inbox = data + data_first + (epoch % 2) * half
    own_inbox = inbox + rank * data_window
    first, stride = tl.program_id(0), AT_ONCE * tl.num_programs(0)
    value = epoch * RUNS
    _send_rows(inbox, parts, first, rows, rank, hidden, part_stride, data_window, columns, inside, P, W, AT_ONCE)
    signal(words, window, rank, 0, value, W)
    count_in(words, window, rank, epoch)
    for start in tl.range(first, rows, stride, num_stages=1):
        if start + stride < rows:
            _send_rows(
                inbox, parts, start + stride, rows, rank, hidden, part_stride, data_window, columns, inside, P, W,
                AT_ONCE,
            )  # fmt: skip
            signal(words, window, rank, 0, value + 1, W)
        await_others(words, window, rank, 0, value, W)
        value += 1
        for index in tl.static_range(AT_ONCE):
            row = start + index * tl.num_programs(0)
            if row < rows:
                x = _own(parts, row, part_stride, hidden, columns, inside, P).to(inbox.dtype.element_ty).to(tl.float32)
                x = _received(x, own_inbox + row * hidden, rows * hidden, columns, inside, rank, W)
                _normed(x, total, weight, behind, out, row, hidden, columns, inside, epsilon, BEHIND)


@triton.jit
def _all_received(source, stride, columns, inside, W: tl.constexpr):
    """The sum of what all ranks sent, the own too, in their order."""
    x = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    for peer in tl.static_range(1, W):
        x += tl.load(source + peer * stride + columns, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit(do_not_specialize=PER_LAUNCH)
def _sum_two_shot(
    total, parts, weight, behind, out, words, data, rank, rows, hidden, part_stride, epsilon, window, data_window,
    data_first, half, P: tl.constexpr, W: tl.constexpr, BEHIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row t is sent to rank t % W, which adds up all ranks' and sends the sum to all. Rows W·g … W·g + W − 1 are the
    same program's on each rank."""
    release()
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    groups = tl.cdiv(rows, W)
    wait()
    epoch = begin(words, window, rank)
    inbox = data + data_first + (epoch % 2) * half
    sums = inbox + W * groups * hidden
    own = inbox + rank * data_window
    for group in tl.range(tl.program_id(0), groups, tl.num_programs(0), num_stages=1):
        place = (rank * groups + group) * hidden
        for owner in tl.static_range(W):
            row = group * W + owner
            if row < rows:
                x = _own(parts, row, part_stride, hidden, columns, inside, P).to(data.dtype.element_ty)
                tl.store(inbox + owner * data_window + place + columns, x, mask=inside)
    signal(words, window, rank, 0, epoch * RUNS, W)
    count_in(words, window, rank, epoch)
    await_others(words, window, rank, 0, epoch * RUNS, W)
    for group in tl.range(tl.program_id(0), groups, tl.num_programs(0), num_stages=1):
        row = group * W + rank
        if row < rows:
            x = _all_received(own + group * hidden, groups * hidden, columns, inside, W).to(data.dtype.element_ty)
            for peer in tl.static_range(W):
                tl.store(sums + peer * data_window + row * hidden + columns, x, mask=inside)
    signal(words, window, rank, 1, epoch * RUNS, W)
    await_others(words, window, rank, 1, epoch * RUNS, W)
    for group in tl.range(tl.program_id(0), groups, tl.num_programs(0), num_stages=1):
        for member in tl.static_range(W):
            row = group * W + member
            if row < rows:
                x = tl.load(sums + rank * data_window + row * hidden + columns, mask=inside, other=0.0).to(tl.float32)
                _normed(x, total, weight, behind, out, row, hidden, columns, inside, epsilon, BEHIND)


@triton.jit(do_not_specialize=PER_LAUNCH)
def _share_tokens(tokens, words, data, rank, count, window, data_window, data_first, half, W: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    wait()
    epoch = begin(words, window, rank)
    inbox = data + data_first + (epoch % 2) * half
    rows = tl.arange(0, BLOCK)
    if rank == 0:
        x = tl.load(tokens + rows, mask=rows < count)
        for peer in tl.static_range(1, W):
            tl.store(inbox + peer * data_window + rows, x, mask=rows < count)
    signal(words, window, rank, 0, epoch * RUNS, W)
    count_in(words, window, rank, epoch)
    await_others(words, window, rank, 0, epoch * RUNS, W)
    if rank != 0:
        x = tl.load(inbox + rank * data_window + rows, mask=rows < count)
        tl.store(tokens + rows, x, mask=rows < count)


def add_norm_ranks(
    windows: RankWindows, sum_TH: Tensor, parts_PTH: Tensor, weight_H: Tensor, epsilon: float, out_TH: Tensor,
    behind_H: Tensor | None = None,
) -> None:  # fmt: skip
    """As rms_norm.add_norm, with the parts of all ranks, of which parts_PTH are this one's. What a rank sends has the
    dtype of `out_TH`; all ranks get the same bits. Many rows go in runs that fit into a half of a window."""
    rows, hidden = sum_TH.shape
    assert sum_TH.dtype == weight_H.dtype == torch.float32
    assert weight_H.shape == (hidden,)
    assert out_TH.shape == sum_TH.shape == parts_PTH.shape[1:]
    assert parts_PTH.stride()[1:] == (hidden, 1)
    assert behind_H is None or (behind_H.shape == (hidden,) and behind_H.dtype == torch.float32)
    for each in (sum_TH, weight_H, out_TH):
        assert each.is_contiguous()
    row_bytes, ranks = hidden * out_TH.itemsize, windows.ranks
    if rows <= min(_FEW_ROWS, max_programs(sum_TH.device) // 2) and rows * (ranks - 1) * row_bytes <= FEW_BYTES:
        _sum_few_rows[(rows,)](
            sum_TH, parts_PTH, weight_H, behind_H, out_TH, *views_of(windows, _INTEGERS[out_TH.itemsize]),
            windows.rank, rows, hidden, parts_PTH.stride(0), epsilon, *places_of(windows, out_TH.itemsize, few=True),
            P=len(parts_PTH), W=ranks, BEHIND=behind_H is not None, BLOCK=triton.next_power_of_2(hidden),
            num_warps=_few_warps(hidden), launch_pdl=supports_pdl(sum_TH.device),
        )  # fmt: skip
        return
    run = windows.half_bytes // ((ranks - 1) * row_bytes)
    assert run > 0, "windows that hold no row"
    one_shot = ranks == 2 or (rows <= run and rows * row_bytes <= ONE_SHOT_BYTES)
    if not one_shot:
        run = _run_rows(windows, row_bytes)
    most = max_programs(sum_TH.device)
    for first in range(0, rows, run):
        count = min(run, rows - first)
        programs = min(most, count if one_shot else -(-count // ranks))
        options = {"AT_ONCE": 1 if count <= 2 * most else _AT_ONCE} if one_shot else {}
        (_sum_one_shot if one_shot else _sum_two_shot)[(programs,)](
            sum_TH[first:], parts_PTH[:, first:], weight_H, behind_H, out_TH[first:], *views_of(windows, out_TH.dtype),
            windows.rank, count, hidden, parts_PTH.stride(0), epsilon, *places_of(windows, out_TH.itemsize),
            P=len(parts_PTH), W=ranks, BEHIND=behind_H is not None, BLOCK=triton.next_power_of_2(hidden), **options,
            num_warps=_WARPS, maxnreg=REGISTERS, launch_pdl=supports_pdl(sum_TH.device),
        )  # fmt: skip


def _run_rows(windows: RankWindows, row_bytes: int) -> int:
    """How many rows a half holds, as two shots put them there: each once as it comes and once as it goes."""
    groups = windows.half_bytes // (2 * windows.ranks * row_bytes)
    assert groups > 0, "windows that hold no row of each rank"
    return groups * windows.ranks


def _few_warps(hidden: int) -> int:
    """No more than have a number each: two threads that look at one number may find it there and taken."""
    warps: int = max(1, min(_WARPS, triton.next_power_of_2(hidden) // 32))
    return warps


def share_tokens(windows: RankWindows, tokens_R: Tensor) -> None:
    """Gives all ranks the tokens of rank 0."""
    assert tokens_R.dtype == torch.int32
    assert tokens_R.nbytes <= windows.half_bytes
    count = len(tokens_R)
    _share_tokens[(1,)](
        tokens_R, *views_of(windows, torch.int32), windows.rank, count, *places_of(windows, 4), W=windows.ranks,
        BLOCK=triton.next_power_of_2(count), num_warps=4, launch_pdl=supports_pdl(tokens_R.device),
    )  # fmt: skip
