"""Which texts an encoder reads in the next step, and what their vectors mean. It knows neither torch nor sockets.

A text is read whole, in one step, and nothing of it stays: there are no blocks, no preemption and no order among what
runs. Accounts take turns as in fairness.py; a step takes texts in that order as long as they fit into its rows, and a
text that is longer than that runs alone. Texts in the background run in steps of their own, while no other one waits.
"""

import math
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np

from engine.batch import Sampled
from engine.budget import Limits
from engine.encoder.packed import pack
from engine.fairness import PROMPT_TOKEN, FairQueue, Standing
from engine.log import log
from engine.pace import Pace
from engine.scheduler import FLIGHTS_MAX, NOT_FINITE, OUT_OF_MEMORY, RETRY_MS_MAX, RETRY_MS_MIN, Plan
from engine.sequence import Refused, Sequence, Stage
from engine.wire import Finish, FinishReason, Load, Progress, Reject, RejectReason, Started, Vector

BACKGROUND_PART: Final = 8  # of a step's rows, one in so many: a text that comes meanwhile waits for its end


@dataclass(slots=True)
class _News:
    """What one owner is to be told next."""

    started: list[Started] = field(default_factory=list)
    finished: list[Finish] = field(default_factory=list)
    vectors: list[Vector] = field(default_factory=list)

    def progress(self) -> Progress:
        return Progress([], [], b"", self.started, self.finished, vectors=self.vectors)


class TextScheduler:
    """The loop is as Scheduler's: `next_batch`, launch, `commit` (or `fail`, or `retry_smaller`), `news`. One more step
    may be planned before the one before it has landed; flights land in the order of their launch."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._rows_max = limits.step_tokens
        self._clock = clock
        self._live: dict[tuple[int, int], Sequence] = {}
        self._queue: FairQueue[Sequence] = FairQueue(_ticket)
        self._behind: FairQueue[Sequence] = FairQueue(_ticket)  # texts in the background
        self._flights: deque[Plan] = deque()
        self._deadlines: list[tuple[float, int, int]] = []  # a heap of owners and ids
        self._pace = Pace()
        self._pressed = False  # whether something waited for its turn when the last flight landed
        self._landed_s = -math.inf
        self._waiting_tokens = 0
        self._waited_ms = 0.0
        self._tickets = 0
        self._steps = 0
        self._secret_left = False
        self._counters: Counter[str] = Counter()
        self._news: dict[int, _News] = {}
        self._rejects: list[tuple[Sequence, Reject]] = []

    # Coming and going

    def add(self, sequences: Items[Sequence]) -> None:
        """Queues a text. Raises Refused: queue full, an id in use, or it would wait for longer than it may. Where the
        queue is full, who has most in it for its weight makes room."""
        (sequence,) = sequences
        if (sequence.owner, sequence.id) in self._live:
            raise Refused(RejectReason.INVALID, f"id {sequence.id} is still in use on this connection")
        queue = self._queue_of(sequence)
        standing = queue.standing(sequence.account, sequence.terms)
        wait_ms = self._wait_ms(standing)
        if wait_ms > 1e3 * (sequence.deadline_s - sequence.arrived_s):
            self._counters["refused_deadline"] += 1
            message = f"it would wait for about {wait_ms / 1e3:.1f} s, which is longer than it may; try again later"
            raise Refused(RejectReason.BUSY, message, self._retry_ms(standing))
        if not self._room_for(queue, standing):
            self._counters["refused_full"] += 1
            raise Refused(RejectReason.BUSY, "too many requests are waiting; try again later", self._retry_ms(standing))
        sequence.standing = standing
        self._live[sequence.owner, sequence.id] = sequence
        queue.push(standing, sequence, PROMPT_TOKEN * sequence.prompt_tokens)
        self._count_waiting(sequence, 1)
        if sequence.deadline_s < math.inf:
            heappush(self._deadlines, (sequence.deadline_s, sequence.owner, sequence.id))

    def cancel(self, owner: int, ids: Items[int]) -> None:
        """Ends these texts. Ids that are unknown or have ended are ignored."""
        for id in ids:
            sequence = self._live.get((owner, id))
            if sequence is not None:
                self._end(sequence, FinishReason.CANCELLED)

    def drop(self, owner: int) -> None:
        """Ends all texts of an owner that is gone; there is nobody to tell."""
        self.cancel(owner, [id for other, id in self._live if other == owner])
        self._news.pop(owner, None)

    def end_all(self, message: str) -> None:
        """Ends every text with an error."""
        for sequence in list(self._live.values()):
            self._end(sequence, FinishReason.ERROR, message)

    # One step

    def next_batch(self) -> Plan | None:
        """The next step's texts, or None where nothing waits that may run."""
        assert len(self._flights) < FLIGHTS_MAX
        self._expire()
        chosen = self._choose(self._queue, self._rows_max)
        if not chosen:
            chosen = self._choose(self._behind, max(1, self._rows_max // BACKGROUND_PART))
        if not chosen:
            return None
        chosen.sort(key=lambda sequence: sequence.prompt_tokens)  # those of one length are read together
        poolings = [sequence.pooling for sequence in chosen if sequence.pooling is not None]
        lengths = [sequence.prompt_tokens for sequence in chosen]
        packed = pack([np.frombuffer(sequence.tokens, np.int32) for sequence in chosen], poolings)
        plan = Plan(packed, chosen, lengths, list(range(len(chosen))), 0.0, self._clock())
        self._flights.append(plan)
        return plan

    def commit(self, plan: Plan, sampled: Sampled) -> None:
        """Takes in what a step computed: a vector for each of its texts."""
        self._land(plan)
        vectors_RH, now = sampled.vectors_RH, self._clock()
        assert vectors_RH is not None
        assert len(vectors_RH) == len(plan.sequences)
        served, took_s, self._landed_s = 0, now - self._landed_s, now
        for sequence, token, vector in zip(plan.sequences, sampled.tokens_R.tolist(), vectors_RH, strict=True):
            standing, tokens = sequence.standing, sequence.prompt_tokens
            standing.level += tokens * standing.prompt_cost
            self._counters["computed_tokens"] += tokens
            served += 0 if sequence.background else PROMPT_TOKEN * tokens
            if sequence.stage == Stage.ENDED:
                continue
            if token < 0:
                self._counters["not_finite"] += 1
                log("not_finite", computed=tokens)
                self._end(sequence, FinishReason.ERROR, NOT_FINITE)
                continue
            self._told(sequence.owner).vectors.append(Vector(sequence.id, vector.astype("<f4").tobytes()))
            self._end(sequence, FinishReason.STOP)
        if self._pressed and took_s < math.inf:
            self._pace.observe(served, took_s)
        self._pressed = bool(self._queue.line)
        self._steps += 1
        self._rows_max = min(self._limits.step_tokens, self._rows_max + max(1, self._rows_max // 16))

    def fail(self, plan: Plan, message: str) -> None:
        """The step was lost: its texts end with an error, everything else goes on."""
        self._land(plan)
        self._landed_s = -math.inf
        for sequence in plan.sequences:
            if sequence.stage != Stage.ENDED:
                self._end(sequence, FinishReason.ERROR, message)

    def retry_smaller(self, plan: Plan) -> int:
        """The step found too little memory: its texts and those launched behind it wait again, before all others of
        their accounts. The next step has at most half as many rows, which is returned; the later ones grow again. A
        text that was alone in it ends with an error."""
        alone, rows = len(plan.sequences) == 1, sum(plan.chunks)
        assert self._flights[0] is plan
        taken_back = list(self._flights)
        self._flights.clear()
        self._landed_s = -math.inf
        self._rows_max = max(1, min(self._rows_max, rows) // 2)
        self._counters["steps_out_of_memory"] += 1
        for taken in taken_back:
            for sequence in taken.sequences:
                self._stop(sequence)
                if sequence.stage == Stage.ENDED:
                    continue
                if alone and taken is plan:
                    self._end(sequence, FinishReason.ERROR, OUT_OF_MEMORY)
                else:
                    self._wait_again(sequence)
        return self._rows_max

    # What is kept: nothing

    def sweep(self) -> bool:
        return False

    def unerased(self) -> list[int]:
        return []

    def secret_left(self) -> bool:
        """Whether a text of which nothing may be kept has ended since this was asked last."""
        left, self._secret_left = self._secret_left, False
        return left

    # What to tell

    def news(self) -> dict[int, Progress]:
        """What each owner has not been told yet; it counts as told now."""
        told = {owner: news.progress() for owner, news in self._news.items()}
        self._news.clear()
        return told

    def rejects(self) -> list[tuple[Sequence, Reject]]:
        """The texts that were taken in and will not run after all; they count as told now."""
        told, self._rejects = self._rejects, []
        return told

    def load(self, draining: bool) -> Load:
        """How full it is; counters as in Scheduler.load."""
        live = sum(standing.running for standing in self._queue.running)
        behind = sum(standing.running for standing in self._behind.running)
        return Load(
            running=live,
            waiting=len(self._queue),
            waiting_tokens=self._waiting_tokens,
            free_blocks=0,
            cached_blocks=0,
            steps=self._steps,
            draining=draining,
            counters=dict(self._counters),
            background=behind + len(self._behind),
        )

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not self._live

    # Inside

    def _queue_of(self, sequence: Sequence) -> FairQueue[Sequence]:
        return self._behind if sequence.background else self._queue

    def _choose(self, queue: FairQueue[Sequence], rows: int) -> list[Sequence]:
        """Starts texts, whose accounts' turn it is, as long as they fit; the first one fits in any case."""
        chosen: list[Sequence] = []
        left = rows

        def fitting(standing: Standing[Sequence]) -> Sequence | None:
            first = next(iter(standing.resuming or standing.waiting))
            return first if first.prompt_tokens <= left or not chosen else None

        while len(chosen) < self._limits.sequences and (sequence := queue.first(fitting)) is not None:
            self._start(queue, sequence)
            chosen.append(sequence)
            left -= sequence.prompt_tokens
        return chosen

    def _start(self, queue: FairQueue[Sequence], sequence: Sequence) -> None:
        sequence.stage = Stage.RUNNING
        sequence.flying = 1
        self._count_waiting(sequence, -1)
        queue.start(sequence.standing, sequence)
        queue.promise(sequence.standing, sequence.prompt_tokens)
        if sequence.ticket >= 0:
            return
        sequence.ticket, self._tickets = self._tickets, self._tickets + 1
        waited_ms = (self._clock() - sequence.arrived_s) * 1e3
        self._counters["started"] += 1
        self._counters["prompt_tokens"] += sequence.prompt_tokens
        if not sequence.background:
            self._waited_ms = waited_ms
            self._counters["waited_ms"] += int(waited_ms)
        self._told(sequence.owner).started.append(Started(sequence.id, 0, waited_ms))

    def _land(self, plan: Plan) -> None:
        """The oldest flight is over."""
        assert self._flights.popleft() is plan, "flights land in the order of their launch"
        for sequence in plan.sequences:
            self._stop(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """It flies no longer, and what it was promised is no longer due."""
        sequence.flying = 0
        self._queue_of(sequence).promise(sequence.standing, -sequence.prompt_tokens)
        self._queue_of(sequence).stop(sequence.standing)

    def _wait_again(self, sequence: Sequence) -> None:
        sequence.stage = Stage.WAITING
        self._queue_of(sequence).resume(sequence.standing, sequence, PROMPT_TOKEN * sequence.prompt_tokens)
        self._count_waiting(sequence, 1)

    def _end(self, sequence: Sequence, reason: FinishReason, message: str = "") -> None:
        """The one end of every text, and tells its owner. What flies of it lands for nothing."""
        self._leave(sequence)
        self._counters[f"finished_{reason}"] += 1
        self._told(sequence.owner).finished.append(Finish(sequence.id, reason, 0, message))

    def _leave(self, sequence: Sequence) -> None:
        if sequence.stage == Stage.WAITING:
            self._queue_of(sequence).remove(sequence.standing, sequence)
            self._count_waiting(sequence, -1)
        sequence.stage = Stage.ENDED
        self._secret_left |= sequence.terms.erase
        del self._live[sequence.owner, sequence.id]

    def _count_waiting(self, sequence: Sequence, sign: int) -> None:
        if not sequence.background:
            self._waiting_tokens += sign * sequence.prompt_tokens

    def _wait_ms(self, standing: Standing[Sequence]) -> float:
        return self._pace.wait_ms(self._queue.ahead(standing, self._pace.part)) if self._queue.line else 0.0

    def _retry_ms(self, standing: Standing[Sequence]) -> int:
        return int(min(max(self._wait_ms(standing) or self._waited_ms, RETRY_MS_MIN), RETRY_MS_MAX))

    def _room_for(self, queue: FairQueue[Sequence], standing: Standing[Sequence]) -> bool:
        """Whether one more may wait there. Where the queue is full, the newest of an account with more of them for its
        weight goes."""
        while len(queue) >= self._limits.waiting:
            longest = queue.longest()
            ours = (len(standing.waiting) + 1) / standing.terms.weight
            if longest is None or (len(longest.waiting) - 1) / longest.terms.weight < ours:
                return False
            newest = next(reversed(longest.waiting))
            self._reject(newest, "others with fewer requests needed the place in the queue; try again later")
            self._counters["displaced_requests"] += 1
        return True

    def _expire(self) -> None:
        """Rejects texts that have waited for as long as they may."""
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            _, owner, id = heappop(self._deadlines)
            sequence = self._live.get((owner, id))
            if sequence is not None and sequence.ticket < 0 and sequence.deadline_s <= self._clock():
                self._reject(sequence, "it waited for as long as it may; try again later")
                self._counters["expired_requests"] += 1
        if len(self._deadlines) > 64 + 2 * len(self._queue):
            self._deadlines = [each for each in self._deadlines if each[1:] in self._live]
            heapify(self._deadlines)

    def _reject(self, sequence: Sequence, message: str) -> None:
        self._leave(sequence)
        retry_ms = self._retry_ms(sequence.standing)
        self._rejects.append((sequence, Reject(sequence.id, RejectReason.BUSY, message, retry_ms)))

    def _told(self, owner: int) -> _News:
        news = self._news.get(owner)
        if news is None:
            news = self._news[owner] = _News()
        return news

    def check(self) -> None:
        """Every text is in one place, and accounts have running and promised what flies of theirs."""
        flying = [sequence for plan in self._flights for sequence in plan.sequences]
        assert len(set(flying)) == len(flying), "a text flies twice"
        assert all(sequence.flying == 1 for sequence in flying)
        for queue, background in ((self._queue, False), (self._behind, True)):
            queue.check()
            waiting = [each for each in self._live.values() if each.stage == Stage.WAITING]
            waiting = [each for each in waiting if each.background == background]
            assert len(waiting) == len(queue)
            ours = [each for each in flying if each.background == background]
            for standing in {each.standing for each in ours} | set(queue.running):
                own = [each for each in ours if each.standing is standing]
                assert standing.running == len(own)
                assert standing.promised == sum(each.prompt_tokens for each in own)
            if not background:
                assert self._waiting_tokens == sum(each.prompt_tokens for each in waiting)
        running = [each for each in self._live.values() if each.stage == Stage.RUNNING]
        assert set(running) == {each for each in flying if each.stage == Stage.RUNNING}, "a text runs and does not fly"


def _ticket(sequence: Sequence) -> int:
    return sequence.ticket
