"""The processes of one model: rank 0, which is the one that forks the others, and how it notices that one is lost.

A follower ends with rank 0, however that ends. One that makes no progress and is not even on a core is lost after
STALL_S; one that computes and gets nowhere after _HANGS_S more, and what rank 0 took for its own part of the work,
which is the plan. Then, or where one ends, all of them are killed and RankLost is raised. It knows no commands.
"""

import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, Self

import numpy as np

from engine.log import LOG_RANK_VARIABLE, log
from engine.process.supervised import die_with_parent
from engine.ranks.board import RankBoard
from engine.ranks.silence import Silence, active_s
from engine.step.executor import ExecutorLost

STALL_S: Final = 0.85  # with what rank 0 still does itself less than 1 s; below what an agent takes for a hang
_HANGS_S: Final = 2.0
_COMPILES_S: Final = 60.0  # while rank 0 itself is not done either
_CLOSING_S: Final = 3.0  # until a follower that was told to end has given its memory back
_SPIN_S: Final = 100e-6
_YIELD_S: Final = 2e-3
_NAP_S: Final = 200e-6
_LOOK_S: Final = 20e-3  # between two looks at the followers, at most
_WATCH_S: Final = 50e-3  # between two of a thread that does nothing else


class RankLost(ExecutorLost):
    """A rank of this model ended, hangs, or failed where it may not: what all of them compute is of no use any more."""


class RankGroup:
    """Rank 0's view of its followers.

    wakers   their eventfds, one for each.
    closing  they were told to end.
    """

    def __init__(self, board: RankBoard, pids: Sequence[int], wakers: Sequence[int], stall_s: float) -> None:
        self.board = board
        self.wakers = wakers
        self.pids = pids
        self.closing = False
        self._stall_s = stall_s
        self._lost: RankLost | None = None
        self._work_began, self._work_s, self._works = time.perf_counter(), 0.0, False  # rank 0's own
        self._ends = [os.pidfd_open(pid) for pid in pids]
        self._poll = select.poll()
        for end in self._ends:
            self._poll.register(end, select.POLLIN)
        self._silence = Silence(time.perf_counter(), lambda: active_s(self.pids[self._last() - 1]))
        self._looks = threading.Lock()  # a RankWatch looks too
        self._look_due = 0.0

    @classmethod
    def fork(cls, board: RankBoard, follow: Callable[[int, int], None], stall_s: float = STALL_S) -> Self:
        """Forks the followers, each of which calls `follow(rank, waker)` and ends with it. To be called from the main
        thread, before others start and before a device is touched. Raises OSError."""
        wakers = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(1, board.ranks)]
        parent, pids = os.getpid(), []
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for rank, waker in enumerate(wakers, 1):
            pid = os.fork()
            if pid == 0:
                _become_follower(board, parent, rank, partial(follow, rank, waker))
            pids.append(pid)
        return cls(board, pids, wakers, stall_s)

    def wait(self, done: Callable[[], bool]) -> None:
        """Returns once `done()`. Raises RankLost where that cannot come to pass any more."""
        began = time.perf_counter()
        due, worked_s = began + _SPIN_S, began - self._work_began
        while not done():
            now = time.perf_counter()
            if now >= due:
                due = self._look(now, _HANGS_S + worked_s)
            if now - began > _YIELD_S:
                time.sleep(_NAP_S)
            elif now - began > _SPIN_S:
                os.sched_yield()
        self._work_began = time.perf_counter()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Rank 0 does itself within it what it has told the followers to do."""
        before, self._works, self._work_began = self._works, True, time.perf_counter()
        try:
            yield
        finally:
            self._work_s, self._works = max(self._work_s, time.perf_counter() - self._work_began), before

    def lose(self, reason: str, rank: int = 0) -> RankLost:
        """Ends the followers at once. Returns what to raise, now and whenever they are asked for again."""
        if self._lost is None:
            self._lost = RankLost(reason)
            self.board.abort(rank)
            for pid in self.pids:
                os.kill(pid, signal.SIGKILL)
            log("rank_lost", rank=rank, reason=reason)
        return self._lost

    @contextmanager
    def patient(self, stall_s: float) -> Iterator[None]:
        """Followers may make no progress for so long within it."""
        usual_s, self._stall_s = self._stall_s, stall_s
        try:
            yield
        finally:
            self._stall_s = usual_s

    def look(self) -> None:
        """Looks at the followers once; to be called again and again by whoever cannot `wait`. Raises RankLost."""
        now = time.perf_counter()
        if self._rests(now):
            self._work_s = 0.0
            self._require_all(0.0)
        elif self._works and self.board.waits_W[self._last()]:  # for rank 0
            self._rest(now)
            self._require_all(0.0)
        else:
            self._look(now, _COMPILES_S if self._works else _HANGS_S + self._work_s)

    def watched(self, beat: Callable[[], None]) -> Callable[[], None]:
        """The beat of rank 0's own work, which looks at the followers too where it is time."""

        def look_too() -> None:
            beat()
            if (now := time.perf_counter()) >= self._look_due:
                self._look_due = now + _LOOK_S
                self.look()

        return look_too

    def require(self) -> None:
        """Raises RankLost if that was raised before."""
        if self._lost is not None:
            raise self._lost

    def begin(self) -> None:
        """To be called before a command: followers that had nothing to do were not silent. Raises as `require`."""
        self.require()
        self._rests(time.perf_counter())

    def close(self) -> None:
        """Waits for the followers to end, or ends them where they were not told to. It may be called again."""
        until = time.perf_counter() + (_CLOSING_S if self.closing else 0.0)
        for pid, end in zip(self.pids, self._ends, strict=True):
            poll = select.poll()
            poll.register(end, select.POLLIN)
            if not poll.poll(max(0, int(1e3 * (until - time.perf_counter())))):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for descriptor in (*self._ends, *self.wakers):
            os.close(descriptor)
        self.pids, self._ends, self.wakers = (), [], ()

    def _rests(self, now: float) -> bool:
        """Whether the followers have done all that they were told; their silence begins anew then."""
        if int(self.board.ended_W[1:].min(initial=self.board.published)) < self.board.published:
            return False
        self._rest(now)
        return True

    def _rest(self, now: float) -> None:
        with self._looks:
            self._silence.rest(now)

    def _look(self, now: float, excused_s: float) -> float:
        """Returns when to look again: at the moment at which a rank would be lost, if that comes sooner than the
        next look."""
        with self._looks:
            silent_s = self._silence.look(now, self._progress(), excused_s)
        self._require_all(silent_s)
        return now + min(_LOOK_S, self._stall_s - silent_s)

    def _last(self) -> int:
        """The follower that the others wait for: it does not wait itself, or has done least, in the first such
        stage."""
        board, ended_W = self.board, self.board.ended_W[1:]
        stage_W = np.arange(1, board.ranks) // (board.ranks // board.stages)
        keys = (board.arrived_W[1:], stage_W, ended_W, board.waits_W[1:], ended_W >= board.published)
        return 1 + int(np.lexsort(keys)[0])

    def _require_all(self, silent_s: float) -> None:
        self.require()
        if self.board.aborted:
            rank = self.board.aborted - 1
            raise self.lose(f"rank {rank} failed: {self.board.error(rank) or 'its log says why'}", rank)
        with self._looks:  # no two threads may poll at once
            ended = self._poll.poll(0)
        for descriptor, _ in ended:
            rank = 1 + self._ends.index(descriptor)
            raise self.lose(f"rank {rank} ended", rank)
        if silent_s >= self._stall_s:
            rank = self._last()
            raise self.lose(f"rank {rank} made no progress for {self._stall_s:g} s", rank)

    def _progress(self) -> bytes:
        board = self.board
        words = (board.began_W, board.ended_W, board.beats_W, board.arrived_W, board.positions_W)
        return b"".join(each[1:].tobytes() for each in words)


class RankWatch:
    """A thread of rank 0 that looks at the followers while rank 0 waits for its device, which waits for them: from when
    it is made until it is closed, or a rank is lost; then it calls `on_loss`."""

    def __init__(self, group: RankGroup, on_loss: Callable[[], None]) -> None:
        self._group = group
        self._on_loss = on_loss
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Returns when it looks no more. It may be called again."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(_WATCH_S):
            try:
                self._group.look()
            except RankLost:
                self._on_loss()
                return


def _become_follower(board: RankBoard, parent: int, rank: int, follow: Callable[[], None]) -> None:
    """Becomes a follower, and never returns. Signals that are sent to all of the replica are rank 0's to answer."""
    status = 1
    try:
        die_with_parent(parent)()
        os.environ[LOG_RANK_VARIABLE] = str(rank)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        follow()
        status = 0
    except BaseException as error:
        where = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        log("rank_failed", rank=rank, error=repr(error)[:300], where=where)
        if not board.aborted:  # else what ended all is why this rank ends
            board.fail(rank, -1, repr(error))
            board.abort(rank)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)
