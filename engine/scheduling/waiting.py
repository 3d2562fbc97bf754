"""The queues of sequences that wait for a turn: from their arrival until they start, are rejected or are cancelled.

Live sequences wait in one queue, background sequences in another one behind it. A request that would wait for longer
than it may is refused at once, one that did wait so long is rejected; in a full queue the account that has most makes
room. The queues do not know what a sequence needs to start; of running ones they know the ids, so that none is used
twice.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from heapq import heapify, heappop, heappush
from itertools import takewhile
from typing import Final

from engine.protocol.frames import Reject
from engine.protocol.types import RejectReason
from engine.sequences.fair_queue import AccountQueue, FairQueue
from engine.sequences.prompt_images import ImageOrders
from engine.sequences.sequence import FetchState, Sequence, SequenceState
from engine.sequences.validation import SubmitRejected

PASSES_MAX: Final = 16  # later sequences of its account that may start before one that could start too
RETRY_MS_MIN: Final = 250
RETRY_MS_MAX: Final = 3_600_000
_STEPS: Final = 256  # steps in the mean of the pace, the later ones counting more
_ENDINGS: Final = 64  # ended sequences in the mean of the share that was done


class WaitingQueue:
    """A request's choices wait as one until the first of them starts: they are rejected together.

    sequences    all that arrived and have not ended, by owner and id, in the order of their arrival.
    live         live sequences that wait,
    best_effort  and background sequences that do.
    fetching     waiting sequences that have blocks on their way from disk.
    live_tokens  known tokens of waiting live sequences that no step computes yet.
    estimator    how fast work is done while live sequences wait.
    images       of all of these sequences.
    counters     of requests: refused_…, expired_… and displaced_requests; of sequences: started, prompt_tokens,
                 waited_ms.
    """

    def __init__(self, max_waiting: int, work: Callable[[Sequence], float], clock: Callable[[], float]) -> None:
        """max_waiting: in each of the queues. `work`: the most that a sequence will be served."""
        self._max_waiting = max_waiting
        self._work = work
        self._clock = clock
        self.sequences: dict[tuple[int, int], Sequence] = {}
        self.live: FairQueue[Sequence] = FairQueue(start_order_of)
        self.best_effort: FairQueue[Sequence] = FairQueue(start_order_of)
        self.fetching: dict[Sequence, None] = {}
        self.live_tokens = 0
        self.estimator = WaitEstimator()
        self.counters: Counter[str] = Counter()
        self._compiling: dict[Sequence, None] = {}  # sequences that wait for their grammar
        self._deadlines: list[tuple[float, int, int]] = []  # a heap: deadline, owner and id of choices 0
        self._rejects: list[tuple[Sequence, Reject]] = []
        self._contended = False  # whether live sequences waited for a turn when the last step landed
        self._waited_ms = 0.0  # by the live sequence that started last
        self._starts = 0
        self._secret_ended = False
        self.images = ImageOrders()

    # Coming and going

    def refuse_known_id(self, sequence: Sequence) -> None:
        """Raises SubmitRejected where its id is in use."""
        if (sequence.owner, sequence.id) in self.sequences:
            raise SubmitRejected(RejectReason.INVALID, f"id {sequence.id} is still in use on this connection")

    def add(self, sequences: Items[Sequence]) -> None:
        """Queues the choices of one request, all or none, whose ids are not in use. Raises SubmitRejected: the queue is
        full, or the request would wait for longer than it may."""
        first = sequences[0]
        self.images.refuse_too_many(first)
        queue = self.queue_of(first)
        account = queue.account_queue(first.account, first.terms)
        if first.deadline_s < math.inf:
            self._refuse_if_late(account, first)
        if not self._make_room(queue, account, len(sequences)):
            self.counters["refused_full"] += 1
            raise SubmitRejected(
                RejectReason.BUSY, "too many requests are waiting; try again later", self._retry_ms(account)
            )
        for sequence in sequences:
            sequence.account_queue = account
            self.sequences[sequence.owner, sequence.id] = sequence
            queue.push(account, sequence, self._work(sequence))
            self._count(sequence, 1)
        self.images.hold(sequences)
        if first.compilation is not None:
            self._compiling |= dict.fromkeys(sequences)
        if first.deadline_s < math.inf:
            heappush(self._deadlines, (first.deadline_s, first.owner, first.id))

    def start(self, sequence: Sequence) -> None:
        """Takes a sequence out of its queue: it runs, and passes those before it that could have started."""
        self._count(sequence, -1)
        waiting = sequence.account_queue.waiting
        if sequence in waiting:
            for earlier in takewhile(lambda other: other is not sequence, waiting):
                earlier.passed += not earlier.awaited
        sequence.state = SequenceState.RUNNING
        self.queue_of(sequence).start(sequence.account_queue, sequence)

    def first_start(self, sequence: Sequence) -> float:
        """Sets the start order of a sequence that never ran before; returns for how many ms it waited."""
        sequence.start_order = self._starts
        self._starts += 1
        waited_ms = (self._clock() - sequence.arrived_s) * 1e3
        self.counters["started"] += 1
        self.counters["prompt_tokens"] += sequence.prompt_tokens
        if not sequence.background:
            self._waited_ms = waited_ms
            self.counters["waited_ms"] += int(waited_ms)
        return waited_ms

    def resume(self, sequence: Sequence) -> None:
        """Queues a sequence that was preempted, before all of its account that never ran."""
        sequence.state = SequenceState.WAITING
        self.queue_of(sequence).resume(sequence.account_queue, sequence, self._work(sequence))
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that ends, whether it waits or runs."""
        if sequence.state == SequenceState.WAITING:
            self._count(sequence, -1)
            self.queue_of(sequence).remove(sequence.account_queue, sequence)
        if sequence.compilation is not None:
            sequence.compilation = None
            del self._compiling[sequence]
        self.fetching.pop(sequence, None)
        sequence.state = SequenceState.ENDED
        self.images.end(sequence)
        self._secret_ended |= sequence.terms.erase
        del self.sequences[sequence.owner, sequence.id]

    # Between steps

    def expire(self) -> None:
        """Rejects requests that have waited for as long as they may, if no choice of them has started."""
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            _, owner, id = heappop(self._deadlines)
            first = self.sequences.get((owner, id))
            if first is None or first.deadline_s > self._clock():  # another request has its id by now
                continue
            if choices := self._unstarted_choices(first):
                self._reject(choices, "it waited for as long as it may; try again later")
                self.counters["expired_requests"] += 1
        if len(self._deadlines) > 64 + 2 * len(self.live):
            self._deadlines = [entry for entry in self._deadlines if entry[1:] in self.sequences]
            heapify(self._deadlines)

    def take_matchers(self) -> Iterator[tuple[Sequence, str]]:
        """Lets sequences start whose grammar is compiled, and rejects the requests whose grammar is wrong. Yields
        sequences with a wrong grammar whose request can no longer be rejected, since a choice of it has started or
        ended: the caller ends them with this message."""
        for sequence in list(self._compiling):
            compilation = sequence.compilation
            if compilation is None or not compilation.done:  # None: it was rejected with a choice before it
                continue
            try:
                sequence.matcher = compilation.new_matcher(sequence.stop_ids, sequence.tokens[sequence.prompt_tokens :])
                sequence.compilation = None
                del self._compiling[sequence]
            except SubmitRejected as refused:
                if choices := self._unstarted_choices(sequence):
                    self._reject(choices, refused.message, refused.reason)
                else:
                    yield sequence, refused.message

    def observe(self, served: float, took_s: float) -> None:
        """Notes that a step landed which served live sequences so much, took_s after the step before it; math.inf
        where there was none."""
        if self._contended and took_s < math.inf:
            self.estimator.observe(served, took_s)
        self._contended = self.live_contended

    @property
    def live_contended(self) -> bool:
        """Whether live sequences wait for their turn, and not for a grammar or a disk alone."""
        awaited = self._compiling | self.fetching if self._compiling or self.fetching else {}
        return bool(self.live.eligible) and len(self.live) > sum(not sequence.background for sequence in awaited)

    def queue_of(self, sequence: Sequence) -> FairQueue[Sequence]:
        return self.best_effort if sequence.background else self.live

    def take_rejects(self) -> list[tuple[Sequence, Reject]]:
        """Requests that were queued and will not run, by their choice 0. Each is returned once."""
        rejects, self._rejects = self._rejects, []
        return rejects

    def take_secret_ended(self) -> bool:
        """Whether a sequence of which nothing may be kept has ended since the last call."""
        ended, self._secret_ended = self._secret_ended, False
        return ended

    # Inside

    def _count(self, sequence: Sequence, sign: int) -> None:
        if not sequence.background:
            self.live_tokens += sign * sequence.pending

    def _refuse_if_late(self, account: AccountQueue[Sequence], sequence: Sequence) -> None:
        """Raises SubmitRejected where the request would start after its deadline, as far as can be estimated."""
        wait_ms = self._wait_ms(account)
        if wait_ms > 1e3 * (sequence.deadline_s - sequence.arrived_s):
            self.counters["refused_deadline"] += 1
            message = f"it would wait for about {wait_ms / 1e3:.1f} s, which is longer than it may; try again later"
            raise SubmitRejected(RejectReason.BUSY, message, self._retry_ms(account))

    def _wait_ms(self, account: AccountQueue[Sequence]) -> float:
        """How long one more request of this account would wait for its turn, without its own caps."""
        if not self.live.eligible:
            return 0.0
        return self.estimator.wait_ms(self.live.work_ahead(account, self.estimator.done_share))

    def _retry_ms(self, account: AccountQueue[Sequence]) -> int:
        return int(min(max(self._wait_ms(account) or self._waited_ms, RETRY_MS_MIN), RETRY_MS_MAX))

    def _make_room(self, queue: FairQueue[Sequence], account: AccountQueue[Sequence], count: int) -> bool:
        """Whether `count` more of this account may wait. A full queue rejects the newest request of the account with
        most for its weight, if that account keeps no fewer than this one then has and no choice of it has started."""
        while len(queue) + count > self._max_waiting:
            longest = queue.longest_account()
            if longest is None:
                return False
            newest = self._unstarted_choices(next(reversed(longest.waiting)))
            needed = (len(account.waiting) + count) / account.terms.weight
            if not newest or (len(longest.waiting) - len(newest)) / longest.terms.weight < needed:
                return False
            self._reject(newest, "others with fewer requests needed the place in the queue; try again later")
            self.counters["displaced_requests"] += 1
        return True

    def _unstarted_choices(self, sequence: Sequence) -> list[Sequence]:
        """All choices of its request, or none where one of them has started or ended."""
        ids = range(sequence.first_id, sequence.first_id + sequence.choices)
        present = [self.sequences.get((sequence.owner, id)) for id in ids]
        choices = [choice for choice in present if choice is not None and choice.start_order < 0]
        return choices if len(choices) == sequence.choices else []

    def _reject(self, choices: list[Sequence], message: str, reason: RejectReason = RejectReason.BUSY) -> None:
        first = choices[0]
        for sequence in choices:
            self.remove(sequence)
        retry_ms = self._retry_ms(first.account_queue) if reason == RejectReason.BUSY else 0
        self._rejects.append((first, Reject(first.id, reason, message, retry_ms)))

    def check(self) -> None:
        """Every waiting sequence is in one queue, holds nothing, and is counted."""
        self.images.check(list(self.sequences.values()))
        self.live.check()
        self.best_effort.check()
        waiting = [sequence for sequence in self.sequences.values() if sequence.state == SequenceState.WAITING]
        live = [sequence for sequence in waiting if not sequence.background]
        assert len(live) == len(self.live)
        assert len(waiting) == len(self.live) + len(self.best_effort)
        assert sum(sequence.pending for sequence in live) == self.live_tokens
        assert all(not sequence.block_count and sequence.lease is None for sequence in waiting), (
            "a waiting sequence holds blocks"
        )
        assert max((sequence.passed for sequence in waiting), default=0) <= PASSES_MAX, "one is passed too often"
        assert all(sequence.state != SequenceState.ENDED for sequence in self.sequences.values()), (
            "an ended one is still known"
        )
        assert self.fetching.keys() == {each for each in waiting if each.fetch == FetchState.WAITING}
        assert self._compiling.keys() == {sequence for sequence in waiting if sequence.compilation is not None}


def start_order_of(sequence: Sequence) -> int:
    return sequence.start_order


class WaitEstimator:
    """How long a request would wait: how much is served per second while others wait, and what share of the requested
    work is done in the end. Until something has waited it knows no pace, and predicts no wait.

    Work is in tokens served, each counted as in fair_queue.py; what is requested is the most that it may become.
    """

    def __init__(self) -> None:
        self._served = self._seconds = 0.0
        self._done = self._requested = 0.0

    def observe(self, served: float, seconds: float) -> None:
        """Adds a step that served so much in so long, while something waited."""
        decay = 1 - 1 / _STEPS
        self._served = decay * self._served + served
        self._seconds = decay * self._seconds + seconds

    def finished(self, requested: float, done: float) -> None:
        """Adds a sequence that started and ended: the work it requested, and what was done; the rest was cached or not
        needed."""
        decay = 1 - 1 / _ENDINGS
        self._requested = decay * self._requested + requested
        self._done = decay * self._done + done

    @property
    def done_share(self) -> float:
        """The share of the requested work that will be done."""
        return self._done / self._requested if self._requested else 1.0

    def wait_ms(self, work: float) -> float:
        """How long so much work takes; 0 where the pace is not known."""
        return 1e3 * work * self._seconds / self._served if self._served else 0.0
