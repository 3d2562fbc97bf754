"""The windows that the ranks of a model share on GPUs, and how programs of their kernels wait for each other.

Each rank has a window of memory that all others map too (memory/symmetric.py). A program writes what it has into the
windows of those that need it, raises its flag there, waits for the flags of the same program of all other ranks in its
own window, and reads what came. Flags count epochs, an epoch for each exchange; ranks launch the same exchanges in the
same order. The epoch lies in the window and the last program of a kernel raises it, so that captured graphs replay.

Data lie in two halves in turns. A rank writes a half again two exchanges later: it has seen flags or numbers of the
exchange between, which others send only when the kernels before are done, and with them all that they read. Programs
are no more than what a device runs at once, so that none waits for one that cannot begin. A word beside the flags ends
all waits: what is computed then is of no use to anybody.

    window   flags [2 phases, W sources, PROGRAMS] | epoch | counted | abort | …  HEAD_BYTES
             few rows 0 | few rows 1 | half 0 | half 1

W ranks.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS: Final = 256  # at most; two of them run on a multiprocessor at once
RANKS_MAX: Final = 16
HEAD_BYTES: Final = 128 << 10
FEW_BYTES: Final = 4 << 20  # of few rows, twice
DATA_BEGINS: Final = HEAD_BYTES + 2 * FEW_BYTES
EPOCH_WORD: Final = 2 * RANKS_MAX * PROGRAMS  # of a window, behind all flags
ABORT_WORD: Final = EPOCH_WORD + 2
REGISTERS: Final = 64  # of a thread, so that two programs of 16 warps fit into a multiprocessor
PER_LAUNCH: Final = ["rank", "rows", "count"]  # one kernel serves all ranks and any number of rows

LOOKS = tl.constexpr(64)  # for a flag, to one for the abort word
RUNS = tl.constexpr(1 << 16)  # flags of one epoch: more than a program has runs of rows
STOP = tl.constexpr(ABORT_WORD)
_SLOTS = tl.constexpr(PROGRAMS)
_SOURCES = tl.constexpr(RANKS_MAX)
_EPOCH = tl.constexpr(EPOCH_WORD)


@dataclass(frozen=True, slots=True)
class RankWindows:
    """The windows of all ranks, [W, bytes], as one of them sees them: zeroes when they are new. Their last `more_bytes`
    are for something else."""

    memory_WB: Tensor
    rank: int
    more_bytes: int = 0

    def __post_init__(self) -> None:
        assert len(self.memory_WB) <= RANKS_MAX

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
def signal(words, window, rank, phase, value, W: tl.constexpr):
    """Tells this program of all other ranks that what it wrote for them is there."""
    tl.debug_barrier()
    place = (phase * _SOURCES + rank) * _SLOTS + tl.program_id(0)
    for peer in tl.static_range(W):
        if peer != rank:
            tl.atomic_xchg(words + peer * window + place, value, sem="release", scope="sys")


@triton.jit
def await_word(word, stop, value):
    """Waits until a word has come to a value, or the abort word `stop` is set."""
    there = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    looks = 0
    while there < value:
        there = tl.atomic_add(word, 0, sem="acquire", scope="sys")  # compiled to a load
        looks += 1
        if looks % LOOKS == 0:
            stopped = tl.atomic_add(stop, 0, sem="acquire", scope="sys")
            if stopped != 0:
                there = value


@triton.jit
def await_others(words, window, rank, phase, value, W: tl.constexpr):
    """Waits until this program of all other ranks has told so, or the abort word is set."""
    own = words + rank * window
    for peer in tl.static_range(W):
        if peer != rank:
            await_word(own + (phase * _SOURCES + peer) * _SLOTS + tl.program_id(0), own + STOP, value)
    tl.debug_barrier()


@triton.jit
def begin(words, window, rank):
    return tl.load(words + rank * window + _EPOCH) + 1


@triton.jit
def count_in(words, window, rank, epoch):
    """The last program that has read the epoch ends it for the next kernel: while others are waited for, it costs
    nothing."""
    tl.debug_barrier()
    state = words + rank * window + _EPOCH
    counted = tl.atomic_add(state + 1, 1, sem="acq_rel", scope="gpu")
    if counted == tl.num_programs(0) - 1:
        tl.atomic_xchg(state + 1, 0, sem="relaxed", scope="gpu")
        tl.atomic_xchg(state, epoch, sem="release", scope="gpu")


def max_programs(device: torch.device) -> int:
    """How many programs of an exchange a device certainly runs at once."""
    if device.type != "cuda":
        return PROGRAMS
    return min(PROGRAMS, 2 * torch.cuda.get_device_properties(device).multi_processor_count)


def views_of(windows: RankWindows, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The windows' flags and their data."""
    return windows.words(), windows.memory_WB.view(-1).view(dtype)


def places_of(windows: RankWindows, itemsize: int, few: bool = False) -> tuple[int, int, int, int]:
    """Words of a window; then in numbers of a dtype: a window, where the data begin, or `few` rows, and a half."""
    size = windows.memory_WB.shape[1]
    first, half = (HEAD_BYTES, FEW_BYTES) if few else (DATA_BEGINS, windows.half_bytes)
    return size // 8, size // itemsize, first // itemsize, half // itemsize
