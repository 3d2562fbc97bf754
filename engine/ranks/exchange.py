"""How ranks on a CPU give each other what they computed: through two buffers of shared memory, in turns.

Each rank writes its own part and says that it arrived; when all have, each reads. Nobody writes a buffer again before
all have arrived at the exchange between, so that nobody still reads it. Stages hand on what they computed in mails of
shared memory, which are used in turns too. It knows no layers.

P parts of a sum, T rows, N columns, H hidden size.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal

import torch
from torch import Tensor

from engine.layers.rank_shard import RankShard
from engine.ranks.board import RankBoard

_SPIN_S: Final = 100e-6
_YIELD_S: Final = 2e-3
_NAP_S: Final = 200e-6

Wait = Callable[[Callable[[], bool]], None]
"""Returns once a condition holds, or raises because it never will."""


class RanksAborted(RuntimeError):
    """Another rank ended the work of all."""


class HostExchange:
    """One rank's side of the exchanges, which all ranks of a stage make in the same order. What one returns
    holds until the next but one.

    shard  whose side this is.
    parts  of each sum, over all ranks; every rank has as many of them.
    """

    def __init__(self, board: RankBoard, number: int, parts: int, wait: Wait) -> None:
        """`number` is the rank's on the board."""
        ranks = board.ranks // board.stages
        assert parts % ranks == 0
        stage, rank = divmod(number, ranks)
        self.shard = RankShard(rank, ranks)
        self.fused: Literal[False] = False
        self.parts = parts
        self._board = board
        self._wait = wait
        self._count = 0
        self._number = number
        self._stage = slice(number - rank, number - rank + ranks)
        self._buffers_B = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in board.buffers[stage]]

    @property
    def own_parts(self) -> int:
        return self.parts // self.shard.ranks

    def gather_parts(self, own: Sequence[Tensor]) -> Tensor:
        """All parts [P, T, N] of a sum, of which `own`, [T, N] each, are this rank's."""
        all_PTN = self._region((self.parts, *own[0].shape), own[0].dtype)
        for place, part_TN in enumerate(own, self.shard.rank * self.own_parts):
            all_PTN[place].copy_(part_TN)
        self._arrive()
        return all_PTN

    def gather_columns(self, own_TN: Tensor, first: int, columns: int) -> Tensor:
        """On rank 0 all columns [T, columns], of which own_TN are this rank's, from `first` on; on others their own."""
        all_TN = self._region((len(own_TN), columns), own_TN.dtype)
        all_TN[:, first : first + own_TN.shape[1]].copy_(own_TN)
        self._arrive()
        return all_TN.clone() if self.shard.rank == 0 else own_TN

    def _region(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape)
        buffer_B = self._buffers_B[self._count % len(self._buffers_B)]
        assert size.numel() * dtype.itemsize <= len(buffer_B), "more than what ranks can exchange at once"
        return buffer_B[: size.numel() * dtype.itemsize].view(dtype).view(size)

    def _arrive(self) -> None:
        self._count += 1
        arrived_W, count = self._board.arrived_W, self._count
        arrived_W[self._number] = count
        with waiting(self._board, self._number):
            self._wait(lambda: bool((arrived_W[self._stage] >= count).all()))


class StageLink:
    """One rank's side. What a stage gives is the same on all of its ranks: the first of them sends it, and all ranks of
    the next stage read it. Rank 0 sees to it that no more micro-batches are on their way than there are mails.

    stage  whose side this is.
    """

    def __init__(self, board: RankBoard, number: int, hidden: int, wait: Wait) -> None:
        """`number` is the rank's on the board."""
        ranks = board.ranks // board.stages
        self.stage, self._rank = divmod(number, ranks)
        self._board, self._number, self._hidden, self._wait = board, number, hidden, wait
        self._before = (self.stage - 1) % board.stages
        self._sender = self._before * ranks
        self._received = 0

    @property
    def is_last(self) -> bool:
        return self.stage == self._board.stages - 1

    @property
    def has_mail(self) -> bool:
        """Whether `receive` would not wait."""
        return bool(self._board.sent_W[self._sender] > self._received)

    def send(self, sum_TH: Tensor) -> None:
        """Hands on the next micro-batch."""
        number = int(self._board.sent_W[self._number])
        if self._rank == 0:
            self._mail(self.stage, number, len(sum_TH)).copy_(sum_TH)
        self._board.sent_W[self._number] = number + 1

    def receive(self, rows: int) -> Tensor:
        """Waits for the next micro-batch of the stage before. Its sum, float32 [T, H], in memory of its own."""
        with waiting(self._board, self._number):
            self._wait(lambda: self.has_mail)
        sum_TH = self._mail(self._before, self._received, rows).clone()
        self._received += 1
        return sum_TH

    def _mail(self, stage: int, number: int, rows: int) -> Tensor:
        mails = self._board.mails[stage]
        mail, size = mails[number % len(mails)], rows * self._hidden
        assert 4 * size <= len(mail), "more rows than a micro-batch may have"
        return torch.frombuffer(mail, dtype=torch.float32)[:size].view(rows, self._hidden)


@contextmanager
def waiting(board: RankBoard, number: int) -> Iterator[None]:
    """Within it the rank of this number waits for others; the board has for how long it did."""
    began = time.perf_counter()
    board.waits_W[number] = 1
    yield
    board.waits_W[number] = 0
    board.waited_us_W[number] += int(1e6 * (time.perf_counter() - began))


def wait_for_others(board: RankBoard) -> Wait:
    """How a follower waits: until the condition holds, or RanksAborted is raised. It spins first, and yields then."""

    def wait(done: Callable[[], bool]) -> None:
        began = time.perf_counter()
        while not done():
            if board.aborted:
                raise RanksAborted(f"rank {board.aborted - 1} ended the step")
            waited_s = time.perf_counter() - began
            if waited_s > _YIELD_S:
                time.sleep(_NAP_S)
            elif waited_s > _SPIN_S:
                os.sched_yield()

    return wait
