"""What the ranks of a model give each other on GPUs, in kernels of their own: the sum of all ranks' parts with residual
and RMSNorm, the logits of a head cut along the vocabulary, and the tokens that rank 0 drew.

Each rank has a window of memory that all others map too (memory/symmetric.py). A program writes what it has into the
windows of those that need it, raises its flag there, waits for the flags of the same program of all other ranks in its
own window, and reads what came. Flags count epochs, an epoch for each exchange; ranks launch the same exchanges in the
same order. The epoch lies in the window and the last program of a kernel raises it, so that captured graphs replay.

Data lie in two halves in turns. A rank writes a half again two exchanges later: it has seen the flags of the exchange
between, which others raise only when the kernels before are done, and with them all that they read. Programs are no
more than what a device runs at once, so that none waits for one that cannot begin. A word beside the flags ends all
waits: what is computed then is of no use to anybody.

Few rows come without flags, which must wait until the data before them have arrived: no number is sent as 0, and a
reader waits for each number to be another one, and writes zeroes in its place.

    window   flags [2 phases, W sources, PROGRAMS] | epoch | counted | abort | …  HEAD_BYTES
             few rows 0 | few rows 1 | half 0 | half 1

W ranks, P parts of one result on a rank, T rows of a bucket, H hidden size, R sampled rows, V vocabulary.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.pdl import release, supports_pdl, wait

PROGRAMS: Final = 256  # at most; two of them run on a multiprocessor at once
RANKS_MAX: Final = 16
HEAD_BYTES: Final = 128 << 10
FEW_BYTES: Final = 4 << 20  # of few rows, twice
DATA_BEGINS: Final = HEAD_BYTES + 2 * FEW_BYTES
ONE_SHOT_BYTES: Final = 512 << 10  # of all rows of more than two ranks: above it one of them sums a row, for all
_STATE: Final = 2 * RANKS_MAX * PROGRAMS  # words before the epoch
ABORT_WORD: Final = _STATE + 2  # of a window
_COLUMNS: Final = 2048
_WARPS: Final = 16
_REGISTERS: Final = 64  # of a thread, so that two programs of so many warps fit into a multiprocessor
_FEW_ROWS: Final = 128  # a program each, without flags
_INTEGERS: Final = {2: torch.int16, 4: torch.int32}  # as wide as numbers
_AT_ONCE: Final = 2  # of a program's rows, where it has many
_PER_LAUNCH: Final = ["rank", "rows", "count"]  # one kernel serves all ranks and any number of rows

_SLOTS = tl.constexpr(PROGRAMS)
_SOURCES = tl.constexpr(RANKS_MAX)
_EPOCH = tl.constexpr(_STATE)
_STOP = tl.constexpr(ABORT_WORD)
_LOOKS = tl.constexpr(64)  # for a flag, to one for the abort word
_RUNS = tl.constexpr(1 << 16)  # flags of one epoch: more than a program has runs of rows


@dataclass(frozen=True, slots=True)
class RankWindows:
    """The windows of all ranks, [W, bytes], as one of them sees them: zeroes when they are new. Their last `more_bytes`
    are for something else."""

    memory_WB: Tensor
    rank: int
    more_bytes: int = 0

    @property
    def ranks(self) -> int:
        return len(self.memory_WB)

    @property
    def bytes(self) -> int:
        """What they take of each rank's device."""
        return self.memory_WB.shape[1]

    @property
    def half_bytes(self) -> int:
        """The bytes that one exchange may put into a window."""
        return (self.memory_WB.shape[1] - self.more_bytes - DATA_BEGINS) // 2 // 16 * 16

    def words(self) -> Tensor:
        """All windows as flags are read."""
        return self.memory_WB.view(-1).view(torch.int64)

    @property
    def abort_1(self) -> Tensor:
        """One word of the own window: anything but 0 ends all waits of this rank's kernels."""
        return self.memory_WB[self.rank, 8 * ABORT_WORD : 8 * ABORT_WORD + 8].view(torch.int64)


@triton.jit
def _signal(words, window, rank, phase, value, W: tl.constexpr):
    """Tells this program of all other ranks that what it wrote for them is there."""
    tl.debug_barrier()
    place = (phase * _SOURCES + rank) * _SLOTS + tl.program_id(0)
    for peer in tl.static_range(W):
        if peer != rank:
            tl.atomic_xchg(words + peer * window + place, value, sem="release", scope="sys")


@triton.jit
def _await(words, window, rank, phase, value, W: tl.constexpr):
    """Waits until this program of all other ranks has told so, or the abort word is set."""
    own = words + rank * window
    for peer in tl.static_range(W):
        if peer != rank:
            flag = own + (phase * _SOURCES + peer) * _SLOTS + tl.program_id(0)
            there = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            looks = 0
            while there < value:
                there = tl.atomic_add(flag, 0, sem="acquire", scope="sys")  # compiled to a load
                looks += 1
                if looks % _LOOKS == 0:
                    stopped = tl.atomic_add(own + _STOP, 0, sem="acquire", scope="sys")
                    if stopped != 0:
                        there = value
    tl.debug_barrier()


@triton.jit
def _begin(words, window, rank):
    return tl.load(words + rank * window + _EPOCH) + 1


@triton.jit
def _count_in(words, window, rank, epoch):
    """The last program that has read the epoch ends it for the next kernel: while others are waited for, it costs
    nothing."""
    tl.debug_barrier()
    state = words + rank * window + _EPOCH
    counted = tl.atomic_add(state + 1, 1, sem="acq_rel", scope="gpu")
    if counted == tl.num_programs(0) - 1:
        tl.atomic_xchg(state + 1, 0, sem="relaxed", scope="gpu")
        tl.atomic_xchg(state, epoch, sem="release", scope="gpu")


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
        if looks % _LOOKS == 0:
            stopped = tl.atomic_add(words + rank * window + _STOP, 0, sem="acquire", scope="sys")
            if stopped != 0:
                got = tl.full(got.shape, 1, got.dtype)
    tl.store(place, tl.zeros(got.shape, got.dtype), mask=inside)
    return got


@triton.jit(do_not_specialize=_PER_LAUNCH)
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
    epoch = _begin(words, window, rank)
    inbox = data + data_first + (epoch % 2) * half
    own = _own(parts, row, part_stride, hidden, columns, inside, P).to(out.dtype.element_ty)
    sent = own.to(data.dtype.element_ty, bitcast=True)
    sent = tl.where(sent == SIGN, 0, sent) ^ SIGN
    for peer in tl.static_range(W):
        if peer != rank:
            place = ((rank - (rank > peer).to(tl.int32)) * rows + row) * hidden
            tl.store(inbox + peer * data_window + place + columns, sent, mask=inside)
    _count_in(words, window, rank, epoch)
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


@triton.jit(do_not_specialize=_PER_LAUNCH)
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
    epoch = _begin(words, window, rank)
    inbox = data + data_first + (epoch % 2) * half
    own_inbox = inbox + rank * data_window
    first, stride = tl.program_id(0), AT_ONCE * tl.num_programs(0)
    value = epoch * _RUNS
    _send_rows(inbox, parts, first, rows, rank, hidden, part_stride, data_window, columns, inside, P, W, AT_ONCE)
    _signal(words, window, rank, 0, value, W)
    _count_in(words, window, rank, epoch)
    for begin in tl.range(first, rows, stride, num_stages=1):
        if begin + stride < rows:
            _send_rows(
                inbox, parts, begin + stride, rows, rank, hidden, part_stride, data_window, columns, inside, P, W,
                AT_ONCE,
            )  # fmt: skip
            _signal(words, window, rank, 0, value + 1, W)
        _await(words, window, rank, 0, value, W)
        value += 1
        for index in tl.static_range(AT_ONCE):
            row = begin + index * tl.num_programs(0)
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


@triton.jit(do_not_specialize=_PER_LAUNCH)
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
    epoch = _begin(words, window, rank)
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
    _signal(words, window, rank, 0, epoch * _RUNS, W)
    _count_in(words, window, rank, epoch)
    _await(words, window, rank, 0, epoch * _RUNS, W)
    for group in tl.range(tl.program_id(0), groups, tl.num_programs(0), num_stages=1):
        row = group * W + rank
        if row < rows:
            x = _all_received(own + group * hidden, groups * hidden, columns, inside, W).to(data.dtype.element_ty)
            for peer in tl.static_range(W):
                tl.store(sums + peer * data_window + row * hidden + columns, x, mask=inside)
    _signal(words, window, rank, 1, epoch * _RUNS, W)
    _await(words, window, rank, 1, epoch * _RUNS, W)
    for group in tl.range(tl.program_id(0), groups, tl.num_programs(0), num_stages=1):
        for member in tl.static_range(W):
            row = group * W + member
            if row < rows:
                x = tl.load(sums + rank * data_window + row * hidden + columns, mask=inside, other=0.0).to(tl.float32)
                _normed(x, total, weight, behind, out, row, hidden, columns, inside, epsilon, BEHIND)


@triton.jit(do_not_specialize=_PER_LAUNCH)
def _gather_columns(
    own, whole, words, data, rank, rows, width, first_columns, vocabulary, window, data_window, data_first, half,
    W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rank 0 gets the columns of all others. `width` is that of the widest, first_columns[W + 1] where each begins."""
    wait()
    epoch = _begin(words, window, rank)
    inbox = data + data_first + (epoch % 2) * half
    blocks = tl.cdiv(width, BLOCK)
    first = tl.load(first_columns + rank)
    count = tl.load(first_columns + rank + 1) - first
    for item in tl.range(tl.program_id(0), rows * blocks, tl.num_programs(0), num_stages=1):
        row, columns = item // blocks, (item % blocks) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(own + tl.cast(row, tl.int64) * count + columns, mask=columns < count)
        if rank == 0:
            tl.store(whole + tl.cast(row, tl.int64) * vocabulary + first + columns, x, mask=columns < count)
        else:
            tl.store(inbox + (rank * rows + row) * width + columns, x, mask=columns < count)
    _signal(words, window, rank, 0, epoch * _RUNS, W)
    _count_in(words, window, rank, epoch)
    _await(words, window, rank, 0, epoch * _RUNS, W)
    if rank == 0:
        for item in tl.range(tl.program_id(0), rows * blocks, tl.num_programs(0), num_stages=1):
            row, columns = item // blocks, (item % blocks) * BLOCK + tl.arange(0, BLOCK)
            for peer in tl.static_range(1, W):
                start = tl.load(first_columns + peer)
                inside = columns < tl.load(first_columns + peer + 1) - start
                x = tl.load(inbox + (peer * rows + row) * width + columns, mask=inside)
                tl.store(whole + tl.cast(row, tl.int64) * vocabulary + start + columns, x, mask=inside)


@triton.jit(do_not_specialize=_PER_LAUNCH)
def _share_tokens(tokens, words, data, rank, count, window, data_window, data_first, half, W: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    wait()
    epoch = _begin(words, window, rank)
    inbox = data + data_first + (epoch % 2) * half
    rows = tl.arange(0, BLOCK)
    if rank == 0:
        x = tl.load(tokens + rows, mask=rows < count)
        for peer in tl.static_range(1, W):
            tl.store(inbox + peer * data_window + rows, x, mask=rows < count)
    _signal(words, window, rank, 0, epoch * _RUNS, W)
    _count_in(words, window, rank, epoch)
    _await(words, window, rank, 0, epoch * _RUNS, W)
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
    if rows <= _FEW_ROWS and rows * (ranks - 1) * row_bytes <= FEW_BYTES:
        _sum_few_rows[(rows,)](
            sum_TH, parts_PTH, weight_H, behind_H, out_TH, *_windows(windows, _INTEGERS[out_TH.itemsize]),
            windows.rank, rows, hidden, parts_PTH.stride(0), epsilon, *_few_places(windows, out_TH.itemsize),
            P=len(parts_PTH), W=ranks, BEHIND=behind_H is not None, BLOCK=triton.next_power_of_2(hidden),
            num_warps=_WARPS, launch_pdl=supports_pdl(sum_TH.device),
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
            sum_TH[first:], parts_PTH[:, first:], weight_H, behind_H, out_TH[first:], *_windows(windows, out_TH.dtype),
            windows.rank, count, hidden, parts_PTH.stride(0), epsilon, *_places(windows, out_TH.itemsize),
            P=len(parts_PTH), W=ranks, BEHIND=behind_H is not None, BLOCK=triton.next_power_of_2(hidden), **options,
            num_warps=_WARPS, maxnreg=_REGISTERS, launch_pdl=supports_pdl(sum_TH.device),
        )  # fmt: skip


def max_programs(device: torch.device) -> int:
    """How many programs of an exchange a device certainly runs at once."""
    if device.type != "cuda":
        return PROGRAMS
    return min(PROGRAMS, 2 * torch.cuda.get_device_properties(device).multi_processor_count)


def gather_columns(windows: RankWindows, own_RV: Tensor, firsts_W1: Tensor, first_columns: list[int]) -> Tensor:
    """On rank 0 all columns [R, V], of which each rank has those from first_columns[rank] to first_columns[rank + 1];
    `firsts_W1` are these numbers, int32 on the device. On others their own."""
    rows, count = own_RV.shape
    rank, vocabulary = windows.rank, first_columns[-1]
    assert own_RV.is_contiguous()
    assert count == first_columns[rank + 1] - first_columns[rank]
    assert firsts_W1.dtype == torch.int32
    width = max(last - first for first, last in pairwise(first_columns))
    whole_RV = own_RV.new_empty(rows, vocabulary) if rank == 0 else own_RV
    run = windows.half_bytes // (windows.ranks * width * own_RV.itemsize)
    assert run > 0, "windows that hold no row of the logits"
    for first in range(0, rows, run):
        part = min(run, rows - first)
        programs = min(max_programs(own_RV.device), part * triton.cdiv(width, _COLUMNS))
        _gather_columns[(programs,)](
            own_RV[first:], whole_RV[first:], *_windows(windows, own_RV.dtype), rank, part, width, firsts_W1,
            vocabulary, *_places(windows, own_RV.itemsize), W=windows.ranks, BLOCK=_COLUMNS, num_warps=8,
            maxnreg=2 * _REGISTERS,
            launch_pdl=supports_pdl(own_RV.device),
        )  # fmt: skip
    return whole_RV


def share_tokens(windows: RankWindows, tokens_R: Tensor) -> None:
    """Gives all ranks the tokens of rank 0."""
    assert tokens_R.dtype == torch.int32
    assert tokens_R.nbytes <= windows.half_bytes
    count = len(tokens_R)
    _share_tokens[(1,)](
        tokens_R, *_windows(windows, torch.int32), windows.rank, count, *_places(windows, 4), W=windows.ranks,
        BLOCK=triton.next_power_of_2(count), num_warps=4, launch_pdl=supports_pdl(tokens_R.device),
    )  # fmt: skip


def _run_rows(windows: RankWindows, row_bytes: int) -> int:
    """How many rows a half holds, as two shots put them there: each once as it comes and once as it goes."""
    groups = windows.half_bytes // (2 * windows.ranks * row_bytes)
    assert groups > 0, "windows that hold no row of each rank"
    return groups * windows.ranks


def _windows(windows: RankWindows, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The windows' flags and their data."""
    return windows.words(), windows.memory_WB.view(-1).view(dtype)


def _places(windows: RankWindows, itemsize: int) -> tuple[int, int, int, int]:
    """Words of a window; then in numbers of a dtype: a window, where the data begin, and a half."""
    size = windows.memory_WB.shape[1]
    return size // 8, size // itemsize, DATA_BEGINS // itemsize, windows.half_bytes // itemsize


def _few_places(windows: RankWindows, itemsize: int) -> tuple[int, int, int, int]:
    """The same of few rows."""
    size = windows.memory_WB.shape[1]
    return size // 8, size // itemsize, HEAD_BYTES // itemsize, FEW_BYTES // itemsize
