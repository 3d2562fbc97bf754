"""Who waits for a turn, and for how long: from being taken in until it starts, is rejected or leaves by itself.

Live sequences wait in one queue, those in the background in another one behind it. Who would wait for longer than it
may is refused at once, who did wait so long is rejected; where a queue is full, who has most in it makes room. It does
not know what a sequence needs to start, nor what runs; of what runs it keeps the ids, so that none is in use twice.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from heapq import heapify, heappop, heappush
from typing import Final

from engine.protocol.frames import Reject
from engine.protocol.types import RejectReason
from engine.scheduling.fair_queue import AccountQueue, FairQueue
from engine.scheduling.sequence import Sequence, SequenceState
from engine.scheduling.validation import SubmitRejected
from engine.scheduling.wait_estimate import WaitEstimator

RETRY_MS_MIN: Final = 250
RETRY_MS_MAX: Final = 3_600_000


class WaitingQueue:
    """A request's choices wait as one until the first of them starts: they are rejected together.

    sequences  all that came and have not ended, by owner and id, in the order in which they came.
    queue      the live ones that wait,
    behind     and those in the background.
    tokens     of live ones that wait, those that no step computes yet.
    pace       of what is served while live ones wait.
    counters   of requests: refused_…, expired_… and displaced_requests; of sequences: started, and what they brought.
    """

    def __init__(self, room: int, work: Callable[[Sequence], float], clock: Callable[[], float]) -> None:
        """So many may wait in each of the queues; `work` is what a sequence will be served at most."""
        self._room = room
        self._work = work
        self._clock = clock
        self.sequences: dict[tuple[int, int], Sequence] = {}
        self.queue: FairQueue[Sequence] = FairQueue(ticket_of)
        self.behind: FairQueue[Sequence] = FairQueue(ticket_of)
        self.tokens = 0
        self.pace = WaitEstimator()
        self.counters: Counter[str] = Counter()
        self._compiling: dict[Sequence, None] = {}  # those that wait for their grammar
        self._deadlines: list[tuple[float, int, int]] = []  # a heap of the owners and ids of choices 0 that have one
        self._rejects: list[tuple[Sequence, Reject]] = []
        self._pressed = False  # whether something waited for its turn when the last step landed
        self._waited_ms = 0.0  # by the live one that started last
        self._tickets = 0
        self._secret_left = False

    # Coming and going

    def examine(self, sequence: Sequence) -> None:
        """Raises Refused where its id is in use."""
        if (sequence.owner, sequence.id) in self.sequences:
            raise SubmitRejected(RejectReason.INVALID, f"id {sequence.id} is still in use on this connection")

    def add(self, sequences: Items[Sequence]) -> None:
        """Queues the choices of one request, all or none, whose ids are not in use. Raises Refused: the queue is full,
        or it would wait for longer than it may. Where the queue is full, who has most in it for its weight makes room.
        """
        first = sequences[0]
        queue = self.queue_of(first)
        standing = queue.standing(first.account, first.terms)
        if first.deadline_s < math.inf:
            self._refuse_if_late(standing, first)
        if not self._room_for(queue, standing, len(sequences)):
            self.counters["refused_full"] += 1
            raise SubmitRejected(
                RejectReason.BUSY, "too many requests are waiting; try again later", self._retry_ms(standing)
            )
        for sequence in sequences:
            sequence.standing = standing
            self.sequences[sequence.owner, sequence.id] = sequence
            queue.push(standing, sequence, self._work(sequence))
            self._count(sequence, 1)
        if first.compilation is not None:
            self._compiling |= dict.fromkeys(sequences)
        if first.deadline_s < math.inf:
            heappush(self._deadlines, (first.deadline_s, first.owner, first.id))

    def start(self, sequence: Sequence) -> None:
        """Its turn has come: it runs."""
        self._count(sequence, -1)
        sequence.stage = SequenceState.RUNNING
        self.queue_of(sequence).start(sequence.standing, sequence)

    def first_start(self, sequence: Sequence) -> float:
        """Gives one that never ran before its ticket, and says for how many ms it waited."""
        sequence.ticket = self._tickets
        self._tickets += 1
        waited_ms = (self._clock() - sequence.arrived_s) * 1e3
        self.counters["started"] += 1
        self.counters["prompt_tokens"] += sequence.prompt_tokens
        if not sequence.background:
            self._waited_ms = waited_ms
            self.counters["waited_ms"] += int(waited_ms)
        return waited_ms

    def resume(self, sequence: Sequence) -> None:
        """It runs no longer, and waits again before all of its account that never ran."""
        sequence.stage = SequenceState.WAITING
        self.queue_of(sequence).resume(sequence.standing, sequence, self._work(sequence))
        self._count(sequence, 1)

    def leave(self, sequence: Sequence) -> None:
        """It ends, whether it waits or runs."""
        if sequence.stage == SequenceState.WAITING:
            self._count(sequence, -1)
            self.queue_of(sequence).remove(sequence.standing, sequence)
        if sequence.compilation is not None:
            sequence.compilation = None
            del self._compiling[sequence]
        sequence.stage = SequenceState.ENDED
        self._secret_left |= sequence.terms.erase
        del self.sequences[sequence.owner, sequence.id]

    # Between steps

    def expire(self) -> None:
        """Rejects requests that have waited for as long as they may and of which nothing has started."""
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            _, owner, id = heappop(self._deadlines)
            first = self.sequences.get((owner, id))
            if first is None or first.deadline_s > self._clock():  # another request has its id by now
                continue
            if choices := self._untouched(first):
                self._reject(choices, "it waited for as long as it may; try again later")
                self.counters["expired_requests"] += 1
        if len(self._deadlines) > 64 + 2 * len(self.queue):
            self._deadlines = [each for each in self._deadlines if each[1:] in self.sequences]
            heapify(self._deadlines)

    def take_matchers(self) -> Iterator[tuple[Sequence, str]]:
        """Those whose grammar is compiled may start; the requests of which it is none are rejected. Yields those that
        cannot be, because of their request something has started or left: to be ended, with what is wrong."""
        for sequence in list(self._compiling):
            compilation = sequence.compilation
            if compilation is None or not compilation.done:  # None: it was rejected with a choice before it
                continue
            try:
                sequence.matcher = compilation.matcher(sequence.stop_ids)
                sequence.compilation = None
                del self._compiling[sequence]
            except SubmitRejected as refused:
                if choices := self._untouched(sequence):
                    self._reject(choices, refused.message, refused.reason)
                else:
                    yield sequence, refused.message

    def observe(self, served: float, took_s: float) -> None:
        """A step landed in which live ones were served so much, so long after the one before it, or after none."""
        if self._pressed and took_s < math.inf:
            self.pace.observe(served, took_s)
        self._pressed = self.live_wait

    @property
    def live_wait(self) -> bool:
        """Whether live sequences wait for their turn, and not for a grammar alone."""
        compiling = sum(not sequence.background for sequence in self._compiling) if self._compiling else 0
        return bool(self.queue.line) and len(self.queue) > compiling

    def queue_of(self, sequence: Sequence) -> FairQueue[Sequence]:
        return self.behind if sequence.background else self.queue

    # What to tell

    def rejects(self) -> list[tuple[Sequence, Reject]]:
        """The requests that were taken in and will not run after all, by their choice 0; they count as told now."""
        told, self._rejects = self._rejects, []
        return told

    def secret_left(self) -> bool:
        """Whether a sequence of which nothing may be kept has ended since this was asked last."""
        left, self._secret_left = self._secret_left, False
        return left

    # Inside

    def _count(self, sequence: Sequence, sign: int) -> None:
        if not sequence.background:
            self.tokens += sign * sequence.pending

    def _refuse_if_late(self, standing: AccountQueue[Sequence], sequence: Sequence) -> None:
        """Raises Refused where it would start after its deadline, as far as can be told."""
        wait_ms = self._wait_ms(standing)
        if wait_ms > 1e3 * (sequence.deadline_s - sequence.arrived_s):
            self.counters["refused_deadline"] += 1
            message = f"it would wait for about {wait_ms / 1e3:.1f} s, which is longer than it may; try again later"
            raise SubmitRejected(RejectReason.BUSY, message, self._retry_ms(standing))

    def _wait_ms(self, standing: AccountQueue[Sequence]) -> float:
        """How long one more request of this account would wait for its turn, its own caps left out."""
        return self.pace.wait_ms(self.queue.ahead(standing, self.pace.part)) if self.queue.line else 0.0

    def _retry_ms(self, standing: AccountQueue[Sequence]) -> int:
        return int(min(max(self._wait_ms(standing) or self._waited_ms, RETRY_MS_MIN), RETRY_MS_MAX))

    def _room_for(self, queue: FairQueue[Sequence], standing: AccountQueue[Sequence], count: int) -> bool:
        """Whether so many more may wait there. Where they fill the queue, the newest of an account with more of them
        for its weight go, if all of their request still waits."""
        while len(queue) + count > self._room:
            longest = queue.longest()
            if longest is None:
                return False
            newest = self._untouched(next(reversed(longest.waiting)))
            ours = (len(standing.waiting) + count) / standing.terms.weight
            if not newest or (len(longest.waiting) - len(newest)) / longest.terms.weight < ours:
                return False
            self._reject(newest, "others with fewer requests needed the place in the queue; try again later")
            self.counters["displaced_requests"] += 1
        return True

    def _untouched(self, sequence: Sequence) -> list[Sequence]:
        """All choices of its request, or none where one of them has started."""
        ids = range(sequence.first, sequence.first + sequence.choices)
        present = [self.sequences.get((sequence.owner, id)) for id in ids]
        choices = [each for each in present if each is not None and each.ticket < 0]
        return choices if len(choices) == sequence.choices else []

    def _reject(self, choices: list[Sequence], message: str, reason: RejectReason = RejectReason.BUSY) -> None:
        first = choices[0]
        for sequence in choices:
            self.leave(sequence)
        retry_ms = self._retry_ms(first.standing) if reason == RejectReason.BUSY else 0
        self._rejects.append((first, Reject(first.id, reason, message, retry_ms)))

    def check(self) -> None:
        """Who waits is in one queue, holds nothing, and is counted."""
        self.queue.check()
        self.behind.check()
        waiting = [sequence for sequence in self.sequences.values() if sequence.stage == SequenceState.WAITING]
        live = [sequence for sequence in waiting if not sequence.background]
        assert len(live) == len(self.queue)
        assert len(waiting) == len(self.queue) + len(self.behind)
        assert sum(sequence.pending for sequence in live) == self.tokens
        assert all(not sequence.blocks and sequence.lease is None for sequence in waiting), "a waiting one holds blocks"
        assert all(sequence.stage != SequenceState.ENDED for sequence in self.sequences.values()), (
            "an ended one is still known"
        )
        assert self._compiling.keys() == {sequence for sequence in waiting if sequence.compilation is not None}


def ticket_of(sequence: Sequence) -> int:
    return sequence.ticket
