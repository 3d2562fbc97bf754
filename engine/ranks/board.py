"""The memory that a model's ranks share: who has done which command, what failed, whether all is to end, the ring of
commands, and room to exchange tensors and blocks.

One anonymous mapping, made before the ranks are forked. Each word has one writer; words are stored in one piece, and in
the order in which they are written (as x86 does it). It knows no commands and no tensors.
"""

import mmap
from typing import Final

import numpy as np
from numpy.typing import NDArray

ERROR_BYTES: Final = 1024
MAILS: Final = 2  # times as many micro-batches as stages may be on their way
BOUNCES: Final = 16  # for blocks on their way: twice the 8 MiB that leave between two steps, in pieces of 1 MiB
_LINE_WORDS: Final = 16  # two cache lines for each rank
_PAGE: Final = mmap.PAGESIZE


class RankBoard:
    """What rank 0 and its followers say to each other by words.

    published    the number of the newest command; rank 0 writes it.
    aborted      0, or 1 + the rank that ended it all.
    began_W      the newest command that each rank began, ended_W and that it ended,
    failed_W     and that failed on it, error_W's text saying why.
    beats_W      counted up by each rank as it computes.
    arrived_W    how many exchanges each rank has put its own into.
    positions_W  how many bytes of the ring each has read.
    steps_W      how many steps each has computed or launched, waited_us_W for how long it waited for the others in
                 their exchanges on a CPU (on GPUs kernels wait, and nobody counts), and device_bytes_W what its model
                 holds of its device.
    sent_W       how many micro-batches each has handed on, where there are stages,
    waits_W      whether it waits for others now,
    weights_bytes_W and what its weights take.

    Ranks are numbered stage by stage. Each stage has `buffers` to exchange tensors in, `mails` for what it hands on.

    bounces    N buffers for KV blocks that come or go, none where they do neither.
    copied_NW  the last turn of each of them in which each rank has done its part; below 0 where it could not.
    """

    def __init__(
        self, ranks: int, ring_bytes: int, exchange_bytes: int, stages: int = 1, mail_bytes: int = 0,
        bounce_bytes: int = 0,
    ) -> None:  # fmt: skip
        """`ranks` of all stages; exchange_bytes of each of two buffers, mail_bytes of a micro-batch, bounce_bytes of a
        bounce buffer. Pages are taken as they are first written."""
        assert ranks >= stages >= 1
        assert ranks % stages == 0
        self.ranks, self.stages = ranks, stages
        mails = MAILS * stages if stages > 1 else 0
        words = _LINE_WORDS * (1 + ranks)
        of_stages = [exchange_bytes] * 2 * stages + [mail_bytes] * mails * stages
        of_bounces = [bounce_bytes] * BOUNCES if bounce_bytes else []
        sizes = (words * 8, ranks * ERROR_BYTES, ring_bytes, *of_stages, BOUNCES * ranks * 8, *of_bounces)
        starts = np.cumsum([0, *(_pages(size) for size in sizes)]).tolist()
        self._mapped = mmap.mmap(-1, starts[-1])
        memory = memoryview(self._mapped)
        parts = [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        self._words: NDArray[np.int64] = np.frombuffer(parts[0], np.int64)
        lines = self._words.reshape(1 + ranks, _LINE_WORDS)[1:]
        self.began_W, self.ended_W, self.failed_W = lines[:, 0], lines[:, 1], lines[:, 2]
        self.beats_W, self.arrived_W, self.positions_W = lines[:, 3], lines[:, 4], lines[:, 5]
        self.steps_W, self.waited_us_W, self.device_bytes_W = lines[:, 6], lines[:, 7], lines[:, 8]
        self.sent_W, self.waits_W, self.weights_bytes_W = lines[:, 9], lines[:, 10], lines[:, 11]
        self._errors = parts[1]
        self.ring = parts[2]
        first = 3 + 2 * stages
        self.buffers = [parts[3 + 2 * stage : 5 + 2 * stage] for stage in range(stages)]
        self.mails = [parts[first + mails * stage : first + mails * (1 + stage)] for stage in range(stages)]
        first += mails * stages
        self.copied_NW: NDArray[np.int64] = np.frombuffer(parts[first], np.int64).reshape(BOUNCES, ranks)
        self.bounces = parts[first + 1 :]

    @property
    def published(self) -> int:
        return int(self._words[0])

    @published.setter
    def published(self, number: int) -> None:
        self._words[0] = number

    @property
    def aborted(self) -> int:
        return int(self._words[1])

    def abort(self, rank: int) -> None:
        """Ends all that waits, on every rank. The first one to say so counts."""
        if not self._words[1]:
            self._words[1] = 1 + rank

    def fail(self, rank: int, number: int, error: str) -> None:
        """Says that a command failed on this rank, and changed nothing there."""
        text = error.encode()[: ERROR_BYTES - 1]
        first = rank * ERROR_BYTES
        self._errors[first : first + len(text) + 1] = text + b"\0"
        self.failed_W[rank] = number

    def error(self, rank: int) -> str:
        """What `fail` said last."""
        text = bytes(self._errors[rank * ERROR_BYTES : (rank + 1) * ERROR_BYTES])
        return text.partition(b"\0")[0].decode(errors="replace")


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
