"""What stages of a model hand on on GPUs: the sum of a micro-batch's rows, from each rank into the memory of the one in
the next stage that has the same number there, and from the last stage back to the first.

A mail is some rows. Its sender adds up what its last layer gave and writes the sum into a mail of the receiver's
window; program p of the sender raises flag p there, for which program p of the receiver waits, whose grid is the same.
Flags count mails, of which a window has a few that are used in turns: a sender waits until the receiver has taken what
lay there before. All counts lie in the windows, and the last program of a kernel raises them, so that captured graphs
replay. The abort word of the rank's window (windows.py) ends all waits; what is computed then is of no use to anybody.

    window   what windows.py has of it | flags [PROGRAMS] | sent | taken | received | …  HEAD_BYTES | mails

P parts of one result, T rows, H hidden size.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.pdl import supports_pdl, wait
from engine.kernels.ranks.windows import STOP, await_word

HEAD_BYTES: Final = 4 << 10
MAIL_BYTES: Final = 2 << 20
PROGRAMS: Final = 128  # of 8 warps, so that any GPU that has peers runs all at once
_WARPS: Final = 8
_PER_LAUNCH: Final = ["own", "other", "rows", "first", "mails"]  # one kernel serves all ranks, and any number of rows

# Words of a head, each in a cache line of its own.
_SENT = tl.constexpr(PROGRAMS)
_SENDING = tl.constexpr(PROGRAMS + 16)
_TAKEN = tl.constexpr(PROGRAMS + 32)
_RECEIVED = tl.constexpr(PROGRAMS + 48)
_RECEIVING = tl.constexpr(PROGRAMS + 64)


@dataclass(frozen=True, slots=True)
class StageWindows:
    """The windows of all ranks, [W, bytes], as one of them sees them: zeroes when they are new.

    rank      whose view it is; it sends to `next`, and receives from `previous`.
    first     the byte of each window at which the head of its mails begins, as many as `mails`.
    """

    memory_WB: Tensor
    rank: int
    next: int
    previous: int
    first: int
    mails: int

    def rows_of(self, hidden: int) -> int:
        """The rows of a mail."""
        rows = MAIL_BYTES // (4 * hidden)
        assert rows > 0, "mails that hold no row"
        return rows


def mails_bytes(mails: int) -> int:
    """What so many mails take of a window, their head included."""
    return HEAD_BYTES + mails * MAIL_BYTES


@triton.jit(do_not_specialize=_PER_LAUNCH)
def _hand_on(
    total, parts, behind, words, data, own, other, rows, first, mails, hidden, part_stride, epsilon, window,
    data_window, mail, data_head, P: tl.constexpr, BEHIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait()
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    head = words + own * window + first
    number = tl.load(head + _SENT) + 1
    await_word(head + _TAKEN, words + own * window + STOP, number - mails)
    tl.debug_barrier()
    inbox = data + other * data_window + data_head + (number % mails) * mail
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=1):
        offset = tl.cast(row, tl.int64) * hidden
        x = tl.load(total + offset + columns, mask=inside, other=0.0)
        if BEHIND:
            added = tl.zeros([BLOCK], tl.float32)
            for part in tl.static_range(P):
                added += tl.load(parts + part * part_stride + offset + columns, mask=inside, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(added * added, 0) / hidden + epsilon)
            x = added * scale * tl.load(behind + columns, mask=inside, other=0.0) + x
        else:
            for part in tl.static_range(P):
                x += tl.load(parts + part * part_stride + offset + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(inbox + offset + columns, x, mask=inside)
    tl.debug_barrier()
    tl.atomic_xchg(words + other * window + first + tl.program_id(0), number, sem="release", scope="sys")
    finished = tl.atomic_add(head + _SENDING, 1, sem="acq_rel", scope="gpu")
    if finished == tl.num_programs(0) - 1:
        tl.atomic_xchg(head + _SENDING, 0, sem="relaxed", scope="gpu")
        tl.atomic_xchg(head + _SENT, number, sem="release", scope="gpu")


@triton.jit(do_not_specialize=_PER_LAUNCH)
def _take_over(
    total, words, data, own, other, rows, first, mails, hidden, window, data_window, mail, data_head,
    BLOCK: tl.constexpr,
):  # fmt: skip
    wait()
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    head = words + own * window + first
    number = tl.load(head + _RECEIVED) + 1
    await_word(head + tl.program_id(0), words + own * window + STOP, number)
    tl.debug_barrier()
    inbox = data + own * data_window + data_head + (number % mails) * mail
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=1):
        offset = tl.cast(row, tl.int64) * hidden
        x = tl.load(inbox + offset + columns, mask=inside, other=0.0)
        tl.store(total + offset + columns, x, mask=inside)
    tl.debug_barrier()
    finished = tl.atomic_add(head + _RECEIVING, 1, sem="acq_rel", scope="gpu")
    if finished == tl.num_programs(0) - 1:
        tl.atomic_xchg(head + _RECEIVING, 0, sem="relaxed", scope="gpu")
        tl.atomic_xchg(head + _RECEIVED, number, sem="release", scope="gpu")
        tl.atomic_xchg(words + other * window + first + _TAKEN, number, sem="release", scope="sys")


def hand_on(
    windows: StageWindows, sum_TH: Tensor, parts_PTH: Tensor | None, epsilon: float, behind_H: Tensor | None = None
) -> None:
    """Sends the sum and what is to be added to it, which is normed by `behind_H` before, as rms_norm.add_norm adds it,
    bit for bit; the sum stays as it is."""
    rows, hidden = sum_TH.shape
    assert sum_TH.dtype == torch.float32
    assert sum_TH.is_contiguous()
    assert behind_H is None or (behind_H.shape == (hidden,) and behind_H.dtype == torch.float32)
    count, stride = 0, 0
    if parts_PTH is not None:
        count, stride = len(parts_PTH), parts_PTH.stride(0)
        assert parts_PTH.shape[1:] == sum_TH.shape
        assert parts_PTH.stride()[1:] == (hidden, 1)
    run = windows.rows_of(hidden)
    for first in range(0, rows, run):
        part = min(run, rows - first)
        own_TH = sum_TH[first:]
        _hand_on[(min(PROGRAMS, part),)](
            own_TH, own_TH if parts_PTH is None else parts_PTH[:, first:], behind_H, *_views(windows), windows.rank,
            windows.next, part, windows.first // 8, windows.mails, hidden, stride, epsilon, *_places(windows),
            P=count, BEHIND=behind_H is not None, BLOCK=triton.next_power_of_2(hidden), num_warps=_WARPS,
            launch_pdl=supports_pdl(sum_TH.device),
        )  # fmt: skip


def take_over(windows: StageWindows, sum_TH: Tensor) -> None:
    """Fills the sum, float32, with what the stage before hands on, which must be as many rows."""
    rows, hidden = sum_TH.shape
    assert sum_TH.dtype == torch.float32
    assert sum_TH.is_contiguous()
    run = windows.rows_of(hidden)
    for first in range(0, rows, run):
        part = min(run, rows - first)
        _take_over[(min(PROGRAMS, part),)](
            sum_TH[first:], *_views(windows), windows.rank, windows.previous, part, windows.first // 8, windows.mails,
            hidden, *_places(windows), BLOCK=triton.next_power_of_2(hidden), num_warps=_WARPS,
            launch_pdl=supports_pdl(sum_TH.device),
        )  # fmt: skip


def _views(windows: StageWindows) -> tuple[Tensor, Tensor]:
    """The windows' counts and their data."""
    return windows.memory_WB.view(-1).view(torch.int64), windows.memory_WB.view(-1).view(torch.float32)


def _places(windows: StageWindows) -> tuple[int, int, int, int]:
    """Words of a window; then in float32 numbers a window, a mail, and where the mails begin."""
    size = windows.memory_WB.shape[1]
    return size // 8, size // 4, MAIL_BYTES // 4, (windows.first + HEAD_BYTES) // 4
