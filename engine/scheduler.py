"""What runs in the next step, and what its outcome means. It knows neither torch nor sockets nor what a scope is.

There is no prefill and no decode: a sequence has tokens and computed tokens, and a step lets the second catch up with
the first under one budget of rows. Running sequences are kept in the order in which they were first admitted; the
oldest of them is never preempted, so it always moves on, and ends. Blocks and places that are missing come from the
account that has the most for its weight, from its youngest sequence. Accounts take turns, see fairness.py; inside one
those that were preempted come first, and who would compute what another one computes steps aside.

Background sequences have a queue of their own behind that of the live ones. They are let in where no live one waits,
get what background.py leaves them of a step, none of it while a live one waits, and are the first to be preempted.

A step may be planned while the one before it is still in the air, so that a device never waits for the host: what that
one computes counts as computed, and a token that it samples is packed as the row that it will be in. What ends a
sequence is found one step late; what was computed for it meanwhile is thrown away, and its blocks are freed when the
last flight that reads them has landed.
"""

import math
from array import array
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.background import Background
from engine.batch import Int32s, Sampled, Segment, Slice, pack
from engine.blocks import Blocks
from engine.budget import Budget, Limits
from engine.fairness import GENERATED_TOKEN, PROMPT_TOKEN, FairQueue, Standing, portions
from engine.grouping import Groups
from engine.log import log
from engine.pace import Pace
from engine.published import Published
from engine.sequence import Refused, Sequence, Stage
from engine.wire import Finish, FinishReason, Load, Progress, Reject, RejectReason, Started, TokenLogprobs, Vector
from prefixcache.names import Namespace
from prefixcache.tree import Lease, Tree

RETRY_MS_MIN, RETRY_MS_MAX = 250, 3_600_000
FLIGHTS_MAX: Final = 2
SWEEP_MAX: Final = 128  # blocks given back beside one step: erasing so many takes a fraction of it
LOOK_AHEAD: Final = 4  # how many of an account are looked at for one that does not wait for another's prefix
CONCEDED: Final = 2.0  # an account gives up what leaves it so many times as much for its weight as who gets it
NOT_FINITE: Final = (
    "the model computed no finite numbers for this request; send it again, and if that does not help, change its prompt"
)
STALE: Final = "blocks of this request were given to another one; nothing of that was read: send it again"
OUT_OF_MEMORY: Final = "the device has too little memory left for this request; send it again later, or a shorter one"


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One step: sequences[i] computes its next chunks[i] tokens, slice i of `packed`; rows[i] of what is sampled is its
    next token, or none where that is −1. planned_us is what it is to take, 0 where nobody needs to know; planned_s when
    it was planned. The rows of `masked` are sampled by their masks, in this order."""

    packed: Int32s
    sequences: list[Sequence]
    chunks: list[int]
    rows: list[int]
    planned_us: float
    planned_s: float
    masked: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class _News:
    """What one owner is to be told next: a Progress in the making."""

    ids: list[int] = field(default_factory=list)  # one for each token
    tokens: "array[int]" = field(default_factory=lambda: array("I"))
    started: list[Started] = field(default_factory=list)
    finished: list[Finish] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    vectors: list[Vector] = field(default_factory=list)

    def progress(self) -> Progress:
        counts = [1] * len(self.ids)
        tokens = self.tokens.tobytes()
        return Progress(self.ids, counts, tokens, self.started, self.finished, self.logprobs, self.vectors)


class _Prompts:
    """The running sequences whose prompt is not computed, while others are let in beside them."""

    def __init__(self, running: list[Sequence]) -> None:
        self._oldest: dict[Standing[Sequence], Sequence] = {}
        self._pending: dict[Standing[Sequence], int] = {}
        self._namespaces: dict[Namespace, list[Sequence]] = {}
        for sequence in running:
            self.add(sequence)

    def fill(self, standing: Standing[Sequence], rows: int) -> bool:
        """Whether an account's prompts use up what is its own of so many rows. Half of that is its oldest's, as far as
        it needs them."""
        if rows <= 0:
            return True
        others = [each for each in self._pending if each is not standing]
        share = portions([standing, *others], [rows, *(self._pending[each] for each in others)], rows)[0]
        oldest = self._oldest[standing].pending if standing in self._oldest else 0
        return self._pending.get(standing, 0) - oldest >= share - min(oldest, share - share // 2)

    def of(self, namespace: Namespace) -> list[Sequence]:
        return self._namespaces.get(namespace, [])

    def add(self, sequence: Sequence) -> None:
        if len(sequence.tokens) - sequence.computed <= 1:
            return
        if sequence.namespace is not None:
            self._namespaces.setdefault(sequence.namespace, []).append(sequence)
        if sequence.pending > 1:  # the rest of its prompt may be in the air
            standing = sequence.standing
            self._pending[standing] = self._pending.get(standing, 0) + sequence.pending
            if standing not in self._oldest or sequence.ticket < self._oldest[standing].ticket:
                self._oldest[standing] = sequence


class Scheduler:
    """The loop is `next_batch`, launch, and when that has landed `commit` (or `fail`, or `retry_smaller`), `news`.

    One more may be planned and launched before the one before it has landed. Flights land in the order of their launch.
    Between calls every block is accounted for.
    """

    def __init__(self, tree: Tree, blocks: Blocks, limits: Limits, clock: Callable[[], float]) -> None:
        assert limits.sequences > 0
        self._tree = tree
        self._blocks = blocks
        self._block_tokens = tree.block_tokens
        self._limits = limits
        self._budget = Budget(limits)
        self._groups = Groups(limits.costs, tree.block_tokens) if limits.costs is not None else None
        self._running_max = min(limits.sequences, limits.step_tokens)  # each gets one token of every step
        self._clock = clock
        self._live: dict[tuple[int, int], Sequence] = {}
        self._queue: FairQueue[Sequence] = FairQueue(_ticket)
        self._behind: FairQueue[Sequence] = FairQueue(_ticket)  # those in the background
        self._background = Background(limits)
        self._running: list[Sequence] = []  # by ticket
        self._background_runs = 0  # how many of them are in the background
        self._yielding: Sequence | None = None  # it is not launched, to be preempted when it has landed
        self._compiling: dict[Sequence, None] = {}  # those that wait for their grammar
        self._deadlines: list[tuple[float, int, int]] = []  # a heap of the owners and ids of choices 0 that have one
        self._secret_left = False
        self._pace = Pace()
        self._pressed = False  # whether something waited for its turn when the last flight landed
        self._served = 0  # of prompts, in the step that is committed
        self._leaving: set[Sequence] = set()  # ended while flying: they hold blocks until their last flight has landed
        self._flights: deque[Plan] = deque()
        self._spare: list[int] = []  # blocks of nobody that a flight in the air reads
        self._frees = -1  # of blocks, when pages were compared last; −1: they have to be
        self._published = Published(tree.block_tokens)
        self._pins: list[Lease] = []  # of what is published
        self._stuck: tuple[Sequence, int] | None = None  # who found too few blocks, and how many there were
        self._waiting_tokens = [0, 0]  # of live sequences, of those in the background
        self._waited_ms = 0.0
        self._landed_s = -math.inf
        self._tickets = 0
        self._steps = 0
        self._counters: Counter[str] = Counter()
        self._vain: Counter[str] = Counter()  # the tree's counts of lookups that started nothing
        self._news: dict[int, _News] = {}
        self._rejects: list[tuple[Sequence, Reject]] = []

    # Coming and going

    def add(self, sequences: Items[Sequence]) -> None:
        """Queues the choices of one request, all or none. Raises Refused: queue full, an id in use, too long, or it
        would wait for longer than it may. Where the queue is full, who has most in it for its weight makes room."""
        for sequence in sequences:
            self._examine(sequence)
        first = sequences[0]
        queue = self._queue_of(first)
        standing = queue.standing(first.account, first.terms)
        if first.deadline_s < math.inf:
            self._refuse_if_late(standing, first)
        if not self._room_for(queue, standing, len(sequences)):
            self._counters["refused_full"] += 1
            raise Refused(RejectReason.BUSY, "too many requests are waiting; try again later", self._retry_ms(standing))
        for sequence in sequences:
            sequence.standing = standing
            self._live[sequence.owner, sequence.id] = sequence
            queue.push(standing, sequence, _work(sequence))
            self._waiting_tokens[sequence.background] += sequence.pending
        if first.compilation is not None:
            self._compiling |= dict.fromkeys(sequences)
        if first.deadline_s < math.inf:
            heappush(self._deadlines, (first.deadline_s, first.owner, first.id))

    def cancel(self, owner: int, ids: Items[int]) -> None:
        """Ends these sequences. Ids that are unknown or have ended are ignored."""
        for id in ids:
            sequence = self._live.get((owner, id))
            if sequence is not None:
                self._end(sequence, FinishReason.CANCELLED)

    def drop(self, owner: int) -> None:
        """Ends all sequences of an owner that is gone; there is nobody to tell."""
        self.cancel(owner, [id for other, id in self._live if other == owner])
        self._news.pop(owner, None)

    def end_all(self, message: str) -> None:
        """Ends every sequence with an error."""
        for sequence in list(self._live.values()):
            self._end(sequence, FinishReason.ERROR, message)

    # One step

    def next_batch(self) -> Plan | None:
        """The next step's work, or None when nothing can run before what is in the air has landed."""
        assert len(self._flights) < FLIGHTS_MAX
        self._expire()
        if self._compiling:
            self._take_matchers()
        if not self._make_room():
            return None
        self._end_outdated()
        sequences = [sequence for sequence in self._running if sequence.launchable]
        if self._yielding is not None:
            sequences = [sequence for sequence in sequences if sequence is not self._yielding]
        behind: list[Sequence] = []
        if self._background_runs:
            behind = [sequence for sequence in sequences if sequence.background]
            sequences = [sequence for sequence in sequences if not sequence.background]
        del sequences[self._budget.rows_max :]
        extra = self._budget.share(sequences)
        chunks = [1 + extra.get(sequence, 0) for sequence in sequences] if extra else [1] * len(sequences)
        if behind and not self._paused:
            self._add_background(behind, sequences, chunks)
        if not sequences:
            return None
        slices = [_slice(sequence, chunk) for sequence, chunk in zip(sequences, chunks, strict=True)]
        rows, sampled = [-1] * len(slices), 0
        for index, sequence in enumerate(sequences):
            sequence.flying += 1
            sequence.launched += chunks[index]
            if slices[index].sampling is not None:
                rows[index] = sequence.row = sampled
                sampled += 1
        packed = pack(slices, self._block_tokens, self._segments(sequences, chunks))
        planned_us = 0.0 if sequences[-1].background else self._budget.planned_us
        masked = [sequence for sequence, each in zip(sequences, slices, strict=True) if each.masked]
        plan = Plan(packed, sequences, chunks, rows, planned_us, self._clock(), masked)
        self._flights.append(plan)
        return plan

    def commit(self, plan: Plan, sampled: Sampled) -> None:
        """Takes in what a step computed: one token more for every sequence that had caught up."""
        self._land(plan)
        now = self._clock()
        if plan.planned_us and plan.planned_s <= self._landed_s:
            self._budget.observe(plan.planned_us, 1e6 * (now - self._landed_s))
        took_s, self._landed_s, self._served = now - self._landed_s, now, 0
        tokens_R, logprobs = sampled.tokens_R.tolist(), sampled.logprobs
        assert len(tokens_R) == int(plan.packed[3]), f"{len(tokens_R)} tokens sampled for {plan.packed[3]} rows"
        for sequence, chunk, row in zip(plan.sequences, plan.chunks, plan.rows, strict=True):
            if sequence.stage == Stage.ENDED:
                continue
            if row >= 0 and tokens_R[row] < 0:
                self._end_not_finite(sequence)
                continue
            sequence.sound += row >= 0
            sequence.computed = computed = sequence.computed + chunk
            if sequence.counted < sequence.prompt_tokens:
                self._count(sequence)
            if computed // self._block_tokens > sequence.shared:
                self._cache(sequence)
            if row >= 0 and sequence.pooling is not None:
                self._give(sequence, sampled, row)
            elif row >= 0:
                self._emit(sequence, tokens_R[row], logprobs.get(row) if logprobs else None)
        if self._pressed and took_s < math.inf:
            self._pace.observe(self._served + GENERATED_TOKEN * len(tokens_R), took_s)
        self._pressed = self._live_wait
        self._steps += 1
        self._counters["computed_tokens"] += int(plan.packed[0])
        self._budget.recover()

    def fail(self, plan: Plan, message: str) -> None:
        """The step was lost: its sequences end with an error, everything else goes on."""
        self._land(plan)
        self._landed_s = -math.inf
        for sequence in plan.sequences:
            if sequence.stage != Stage.ENDED:
                self._end(sequence, FinishReason.ERROR, message)

    def retry_smaller(self, plan: Plan) -> int:
        """The step found too little memory: it and what was launched behind it are taken back, as if never planned.

        The next step is at most half as large, which is returned; the later ones grow again. Where it was one row
        already, its sequence ends with an error.
        """
        rows = int(plan.packed[0])
        taken_back = list(self._flights)
        assert taken_back[0] is plan
        for taken in taken_back:
            self._land(taken)
        self._landed_s = -math.inf
        for sequence in chain.from_iterable(taken.sequences for taken in taken_back):
            sequence.launched = sequence.computed
        self._budget.halve(rows)
        self._counters["steps_out_of_memory"] += 1
        if rows == 1 and plan.sequences[0].stage != Stage.ENDED:
            self._end(plan.sequences[0], FinishReason.ERROR, OUT_OF_MEMORY)
        return self._budget.rows_max

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks; it resumes before anything new of its account. What it cached may stay."""
        assert sequence.stage == Stage.RUNNING
        assert not sequence.flying
        self._stop(sequence)
        self._release(sequence)
        self._regroup()
        sequence.stage = Stage.WAITING
        self._queue_of(sequence).resume(sequence.standing, sequence, _work(sequence))
        self._waiting_tokens[sequence.background] += sequence.pending
        self._counters["preemptions"] += 1

    # What is kept

    def publish(self, sequence: Sequence) -> bool:
        """Lets everybody read the prompt of a sequence that has ended, for good. False where it was not computed."""
        assert sequence.namespace is not None
        assert sequence.stage == Stage.ENDED
        lease = self._tree.match(sequence.namespace, sequence.tokens[: sequence.prompt_tokens], sequence.keep)
        self._pins.append(lease)
        if lease.tokens < sequence.prompt_tokens:
            return False
        self._published.add(sequence.tokens[: sequence.prompt_tokens], lease.blocks)
        return True

    def sweep(self) -> bool:
        """Gives back cached blocks that are found no more, to be erased; whether there may be more of them."""
        swept = self._tree.sweep(SWEEP_MAX)
        self._blocks.hide(swept)
        self._blocks.give(swept)
        return len(swept) == SWEEP_MAX

    def unerased(self) -> list[int]:
        """Blocks that have to be erased before anything is launched; they count as erased now."""
        blocks = self._blocks.unerased()
        self._counters["erased_blocks"] += len(blocks)
        return blocks

    def secret_left(self) -> bool:
        """Whether a sequence of which nothing may be kept has ended since this was asked last."""
        left, self._secret_left = self._secret_left, False
        return left

    # What to tell

    def news(self) -> dict[int, Progress]:
        """What each owner has not been told yet; it counts as told now."""
        told = {owner: news.progress() for owner, news in self._news.items()}
        self._news.clear()
        return told

    def rejects(self) -> list[tuple[Sequence, Reject]]:
        """The requests that were taken in and will not run after all, by their choice 0; they count as told now."""
        told, self._rejects = self._rejects, []
        return told

    def load(self, draining: bool) -> Load:
        """How full it is. Of its counters, hit_tokens are all that lookups found, those of resumed sequences too;
        cached_tokens are what `Started` told of, each prompt's once; spared_keys were not read as groups read them;
        preemptions those _cap (by a cap of the account), _share (for an account with less) and _background (of such
        sequences) too; waited_ms is the sum over the live ones that started; refused_… at once, where the queue was
        full or it would have waited for too long, expired_… and displaced_requests after they waited, for too long or
        for an account with fewer in a full queue; background_rows were computed for those."""
        counters = Counter(self._tree.counters)
        counters.subtract(self._vain)
        live = sum(standing.running for standing in self._queue.running)
        return Load(
            running=live,
            waiting=len(self._queue),
            waiting_tokens=self._waiting_tokens[False],
            free_blocks=self._blocks.free,
            cached_blocks=self._tree.cached,
            steps=self._steps,
            draining=draining,
            counters={**counters, **self._counters, "stale_pages": self._blocks.stale},
            shared_blocks=self._tree.shared,
            background=len(self._running) - live + len(self._behind),
        )

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not self._live

    # Inside

    def _queue_of(self, sequence: Sequence) -> FairQueue[Sequence]:
        return self._behind if sequence.background else self._queue

    @property
    def _paused(self) -> bool:
        """Whether background sequences may not run now, and are not let in."""
        return self._live_wait or (self._limits.costs is None and any(self._queue.running))

    @property
    def _live_wait(self) -> bool:
        """Whether live sequences wait for their turn, and not for a grammar alone."""
        compiling = sum(not sequence.background for sequence in self._compiling) if self._compiling else 0
        return bool(self._queue.line) and len(self._queue) > compiling

    def _take_matchers(self) -> None:
        """Those whose grammar is compiled may start; the requests of which it is none are rejected."""
        for sequence in list(self._compiling):
            compilation = sequence.compilation
            if compilation is None or not compilation.done:  # None: it was rejected with a choice before it
                continue
            try:
                sequence.matcher = compilation.matcher(sequence.stop_ids)
                sequence.compilation = None
                del self._compiling[sequence]
            except Refused as refused:
                if choices := self._untouched(sequence):
                    self._reject(choices, refused.message, refused.reason)
                else:
                    self._end(sequence, FinishReason.ERROR, refused.message)

    def _add_background(self, behind: list[Sequence], sequences: list[Sequence], chunks: list[int]) -> None:
        """Adds those of them to a step that it has room for."""
        ready = [each for each in behind if each.launched < each.blocks * self._block_tokens]
        more = self._background.chunks(sequences, chunks, ready, self._budget.spared_us, self._budget.rows_max)
        sequences += ready[: len(more)]
        chunks += more
        self._counters["background_rows"] += sum(more)

    def _segments(self, sequences: list[Sequence], chunks: list[int]) -> Items[Segment]:
        """The keys that are read once for several of a step's slices."""
        if self._groups is None:
            return ()
        pairs = zip(sequences, chunks, strict=True)
        segments = self._groups.segments([sequence if chunk == 1 else None for sequence, chunk in pairs])
        for segment in segments:
            self._counters["spared_keys"] += (len(segment.members) - 1) * (segment.last - segment.first)
        self._budget.spared_us = self._groups.saved_us
        return segments

    def _examine(self, sequence: Sequence) -> None:
        """Raises Refused for what can never run here."""
        if (sequence.owner, sequence.id) in self._live:
            raise Refused(RejectReason.INVALID, f"id {sequence.id} is still in use on this connection")
        blocks, size, cap = self._blocks_for(sequence.tokens_max - 1), self._block_tokens, sequence.terms.blocks
        total = self._blocks.total - len(self._published.pages)
        if blocks > total:
            raise Refused(RejectReason.TOO_LONG, f"{sequence.tokens_max} tokens can never fit a pool of {total * size}")
        if cap is not None and blocks > cap:
            raise Refused(
                RejectReason.TOO_LONG,
                f"{sequence.tokens_max} tokens can never fit the {cap * size} that this account may have at once; "
                "send a shorter prompt, or ask for fewer tokens",
            )

    def _refuse_if_late(self, standing: Standing[Sequence], sequence: Sequence) -> None:
        """Raises Refused where it would start after its deadline, as far as can be told."""
        wait_ms = self._wait_ms(standing)
        if wait_ms > 1e3 * (sequence.deadline_s - sequence.arrived_s):
            self._counters["refused_deadline"] += 1
            message = f"it would wait for about {wait_ms / 1e3:.1f} s, which is longer than it may; try again later"
            raise Refused(RejectReason.BUSY, message, self._retry_ms(standing))

    def _wait_ms(self, standing: Standing[Sequence]) -> float:
        """How long one more request of this account would wait for its turn, its own caps left out."""
        return self._pace.wait_ms(self._queue.ahead(standing, self._pace.part)) if self._queue.line else 0.0

    def _retry_ms(self, standing: Standing[Sequence]) -> int:
        return int(min(max(self._wait_ms(standing) or self._waited_ms, RETRY_MS_MIN), RETRY_MS_MAX))

    def _room_for(self, queue: FairQueue[Sequence], standing: Standing[Sequence], count: int) -> bool:
        """Whether so many more may wait there. Where they fill the queue, the newest of an account with more of them
        for its weight go, if all of their request still waits."""
        while len(queue) + count > self._limits.waiting:
            longest = queue.longest()
            if longest is None:
                return False
            newest = self._untouched(next(reversed(longest.waiting)))
            ours = (len(standing.waiting) + count) / standing.terms.weight
            if not newest or (len(longest.waiting) - len(newest)) / longest.terms.weight < ours:
                return False
            self._reject(newest, "others with fewer requests needed the place in the queue; try again later")
            self._counters["displaced_requests"] += 1
        return True

    def _expire(self) -> None:
        """Rejects requests that have waited for as long as they may and of which nothing has started."""
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            _, owner, id = heappop(self._deadlines)
            first = self._live.get((owner, id))
            if first is not None and first.stage == Stage.WAITING and (choices := self._untouched(first)):
                self._reject(choices, "it waited for as long as it may; try again later")
                self._counters["expired_requests"] += 1
        if len(self._deadlines) > 64 + 2 * len(self._queue):
            self._deadlines = [each for each in self._deadlines if each[1:] in self._live]
            heapify(self._deadlines)

    def _untouched(self, sequence: Sequence) -> list[Sequence]:
        """All choices of its request, or none where one of them has started."""
        ids = range(sequence.first, sequence.first + sequence.choices)
        live = [self._live.get((sequence.owner, id)) for id in ids]
        choices = [each for each in live if each is not None and each.ticket < 0]
        return choices if len(choices) == sequence.choices else []

    def _reject(self, choices: list[Sequence], message: str, reason: RejectReason = RejectReason.BUSY) -> None:
        first = choices[0]
        for sequence in choices:
            self._leave(sequence)
        retry_ms = self._retry_ms(first.standing) if reason == RejectReason.BUSY else 0
        self._rejects.append((first, Reject(first.id, reason, message, retry_ms)))

    def _make_room(self) -> bool:
        """Gives every running sequence the block that it writes next, and lets others in where that is easy.

        Where blocks are missing one is preempted. False if that has to wait for what is in the air.
        """
        calm, self._yielding = True, None
        while (lacking := self._grow()) is not None:
            if self._flights:
                return False
            assert len(self._running) > 1, "a sequence alone does not fit: add let it in"
            self.preempt(self._victim(lacking))
            calm = False
        if calm:
            self._admit()
        return True

    def _grow(self) -> Sequence | None:
        """Gives blocks to those that need one, the oldest first, those in the background last, and only where they may
        run. Who finds none left, if anybody: of all, or under the cap of its account, which stops nobody who runs alone
        in it."""
        size, growing = self._block_tokens, self._running
        if self._background_runs:
            growing = [each for each in self._running if not each.background]
            growing += [] if self._paused else [each for each in self._running if each.background]
        for sequence in growing:
            if sequence.launched == sequence.blocks * size and sequence.launchable:
                standing = sequence.standing
                cap = standing.terms.blocks
                if not self._available() or (cap is not None and standing.running > 1 and standing.blocks >= cap):
                    return sequence
                taken = self._take(1, sequence.terms.erase)
                sequence.grow(taken)
                standing.hold(taken)
        return None

    def _victim(self, lacking: Sequence) -> Sequence:
        """Who is preempted for one that lacks a block: the youngest in the background, be it itself; else never the
        oldest of all, nor the oldest of an account."""
        if self._available():
            self._counters["preemptions_cap"] += 1
            return next(each for each in reversed(self._running) if each.standing is lacking.standing)
        if self._background_runs:
            self._counters["preemptions_background"] += 1
            return next(each for each in reversed(self._running) if each.background)
        return max(self._running[1:], key=lambda each: (each.standing.blocks / each.standing.terms.weight, each.ticket))

    def _land(self, plan: Plan) -> None:
        """The oldest flight is over. Nobody reads what was spare when it was launched, nor who had ended."""
        assert self._flights.popleft() is plan, "flights land in the order of their launch"
        self._blocks.give(self._spare)
        self._spare.clear()
        for sequence in plan.sequences:
            sequence.flying -= 1
            if sequence.stage == Stage.ENDED and not sequence.flying:
                self._release(sequence)

    def _admit(self) -> None:
        """Starts what waits while there are places, blocks, and rows that running prompts do not use up."""
        if self._queue.line:
            live = [each for each in self._running if not each.background]
            self._let_in(self._queue, live, self._budget.rows(live))
        if self._behind.line and not self._paused:
            behind = [each for each in self._running if each.background]
            self._let_in(self._behind, behind, self._background.rows_alone)

    def _let_in(self, queue: FairQueue[Sequence], running: list[Sequence], rows: int) -> None:
        """The same for one queue, whose sequences have so many rows of a step."""
        prompts = _Prompts(running)

        def choose(standing: Standing[Sequence]) -> Sequence | None:
            if prompts.fill(standing, rows - len(running)):
                return None
            if standing.resuming:
                return next(iter(standing.resuming))
            ready = (each for each in standing.waiting if each.compilation is None)
            return next((each for each in islice(ready, LOOK_AHEAD) if not self._held(each, prompts)), None)

        while (sequence := queue.first(choose)) is not None:
            if len(self._running) < self._running_max and self._start(sequence):
                prompts.add(sequence)
                running.append(sequence)
            elif not sequence.standing.full and not self._concede(sequence):
                return

    def _concede(self, sequence: Sequence) -> bool:
        """Where the next in turn finds no place or too few blocks: makes room at the cost of what runs in the
        background, else of the account that has most of what is missing for its weight, if that will have CONCEDED
        times as much then as the next one's. False where nobody has, or not before what is in the air has landed.

        What changes hands would have to double before it changes back, so that two accounts never take turns in
        preempting each other; and the oldest of all is never preempted, so that every step brings it nearer to its end.
        """
        if sequence.background:
            return False
        if self._background_runs:
            return self._preempt_background()
        standing, places = sequence.standing, len(self._running) == self._running_max

        def has(each: Standing[Sequence]) -> float:
            return (each.running if places else each.blocks) / each.terms.weight

        most = max(self._queue.running, key=has, default=standing)
        needed = has(standing) + (1 if places else self._blocks_for(len(sequence.tokens))) / standing.terms.weight
        if most is standing or has(most) < CONCEDED * needed:
            return False
        victims = [each for each in self._running[1:] if each.standing is most]
        victim = max(victims, key=lambda each: (not each.flying, each.ticket), default=None)
        if victim is None:
            return False
        if has(most) - (1 if places else victim.blocks) / most.terms.weight < CONCEDED * needed:
            return False
        if victim.flying:
            self._yielding = victim
            return False
        self.preempt(victim)
        self._counters["preemptions_share"] += 1
        return True

    def _preempt_background(self) -> bool:
        """The youngest of those that are not in the air, where none is launched anew while a live one waits."""
        landed = [each for each in self._running if each.background and not each.flying]
        if landed:
            self.preempt(landed[-1])
            self._counters["preemptions_background"] += 1
        return bool(landed)

    def _held(self, sequence: Sequence, prompts: "_Prompts") -> bool:
        """Whether a running prompt is about to cache blocks that this one would otherwise compute again.

        Whom it waits for is remembered: asked in every step, it must not compare whole prompts in every step.
        """
        if sequence.namespace is None:
            return False
        size, behind = self._block_tokens, sequence.behind
        if behind is not None and behind[0].stage == Stage.RUNNING and behind[0].computed // size < behind[1]:
            return True
        sequence.behind = None
        for other in prompts.of(sequence.namespace):
            next_end = (other.computed // size + 1) * size
            if next_end >= len(sequence.tokens) or next_end > len(other.tokens):
                continue
            if sequence.tokens[next_end - 1] == other.tokens[next_end - 1]:  # else not the same block for sure
                common = _common(_ids(other.tokens), _ids(sequence.tokens)[:-1])
                if common >= next_end:
                    sequence.behind = other, common // size
                    return True
        return False

    def _start(self, sequence: Sequence) -> bool:
        """Leases the longest cached prefix and takes blocks for the rest; False, and nothing taken, if too few."""
        if self._stuck is not None and self._stuck[0] is sequence and self._available() <= self._stuck[1]:
            return False
        public = self._published.find(sequence.tokens[:-1])
        lease = self._lease(sequence, public)
        cached = public if lease is None else public + lease.blocks
        needed = self._blocks_for(len(sequence.tokens)) - len(cached)
        capped = self._capped(sequence.standing, needed, cached)
        if capped or needed + len(self._running) > self._available():  # and a block for the next tokens of each
            if lease is not None:
                lookup_tokens = len(sequence.tokens) - 1 - len(public) * self._block_tokens
                self._vain.update(lookups=1, lookup_tokens=lookup_tokens, hit_tokens=lease.tokens)
            self._release(sequence)
            if capped:
                self._queue_of(sequence).pass_over(sequence.standing)
            else:
                self._stuck = (sequence, self._available())
            return False
        self._stuck = sequence.behind = None
        self._waiting_tokens[sequence.background] -= sequence.pending
        sequence.grow(cached)
        sequence.public, sequence.shared = len(public), len(cached)
        self._frees = -1
        sequence.computed = sequence.launched = len(cached) * self._block_tokens
        sequence.grow(self._take(needed, sequence.terms.erase))
        sequence.stage = Stage.RUNNING
        queue = self._queue_of(sequence)
        queue.start(sequence.standing, sequence)
        sequence.standing.hold(sequence.held())
        if sequence.ticket < 0:
            self._first_start(sequence)
        sequence.counted = max(sequence.counted, min(sequence.computed, sequence.prompt_tokens))
        queue.promise(sequence.standing, sequence.prompt_tokens - sequence.counted)
        insort(self._running, sequence, key=_ticket)
        self._background_runs += sequence.background
        return True

    def _lease(self, sequence: Sequence, public: list[int]) -> Lease | None:
        """The longest cached prefix of its own behind the published blocks; only behind these it was ever read."""
        if sequence.namespace is None:
            return None
        namespace = sequence.namespace._replace(behind=public[-1]) if public else sequence.namespace
        tokens = sequence.tokens[len(public) * self._block_tokens : -1]
        sequence.lease = lease = self._tree.match(namespace, tokens, sequence.keep)
        if sequence.terms.erase:
            self._blocks.hide(lease.blocks)
        return lease

    def _capped(self, standing: Standing[Sequence], needed: int, cached: list[int]) -> bool:
        """Whether so many new blocks and these cached ones, and one more for each that runs, pass an account's cap."""
        cap = standing.terms.blocks
        if cap is None or not standing.running:
            return False
        more = needed + sum(block not in standing.readers for block in cached)
        return standing.blocks + more + standing.running > cap

    def _first_start(self, sequence: Sequence) -> None:
        sequence.ticket = self._tickets
        self._tickets += 1
        sequence.spared = sequence.computed
        waited_ms = (self._clock() - sequence.arrived_s) * 1e3
        self._counters["started"] += 1
        if not sequence.background:
            self._waited_ms = waited_ms
            self._counters["waited_ms"] += int(waited_ms)
        self._counters["prompt_tokens"] += sequence.prompt_tokens
        self._counters["cached_tokens"] += sequence.computed
        self._told(sequence.owner).started.append(Started(sequence.id, sequence.computed, waited_ms))

    def _count(self, sequence: Sequence) -> None:
        """Charges its account for what was computed of its prompt, once: not again after a preemption."""
        upto = min(sequence.computed, sequence.prompt_tokens)
        tokens = upto - sequence.counted
        if tokens > 0:
            sequence.counted = upto
            standing = sequence.standing
            standing.level += tokens * standing.prompt_cost
            standing.promised -= tokens
            self._served += 0 if sequence.background else PROMPT_TOKEN * tokens

    def _cache(self, sequence: Sequence) -> None:
        """Puts the blocks that became full into the tree. Where it has them already, its own are read from now on, and
        ours are free when nothing in the air reads them."""
        if sequence.namespace is None:
            return
        size, shared, full = self._block_tokens, sequence.shared, sequence.computed // self._block_tokens
        assert sequence.lease is not None
        pages = sequence.pages[shared:full].tolist()
        sequence.lease, spare = self._tree.insert(sequence.lease, sequence.tokens[shared * size : full * size], pages)
        if spare:
            if self._flights:
                self._spare += spare
            else:
                self._blocks.give(spare)
            sequence.standing.let_go(sequence.pages[sequence.public : full].tolist())
            sequence.pages[sequence.public : full] = sequence.lease.blocks
            sequence.standing.hold(sequence.lease.blocks)
            self._frees = -1
            if sequence.terms.erase:
                self._blocks.hide(sequence.lease.blocks)
            self._regroup()
            sequence.sound = -sequence.flying  # what is in the air still reads ours
        sequence.shared = full

    def _regroup(self) -> None:
        if self._groups is not None:
            self._groups.change()

    def _emit(self, sequence: Sequence, token: int, chosen: tuple[float, list[int], list[float]] | None) -> None:
        sequence.tokens.append(token)
        sequence.standing.level += sequence.standing.generated_cost
        news = self._told(sequence.owner)
        news.ids.append(sequence.id)
        news.tokens.append(token)
        if chosen is not None:
            news.logprobs.append(TokenLogprobs(sequence.id, *chosen))
        matcher = sequence.matcher
        problem = "" if matcher is None else matcher.accept(token)
        if problem:
            self._end(sequence, FinishReason.ERROR, problem)
        elif token in sequence.stop_ids or (matcher is not None and matcher.over):
            self._end(sequence, FinishReason.STOP)
        elif len(sequence.tokens) >= sequence.tokens_max:
            self._end(sequence, FinishReason.LENGTH)

    def _give(self, sequence: Sequence, sampled: Sampled, row: int) -> None:
        """Its prompt is computed, and the vector behind it is all that was asked for."""
        assert sampled.vectors_RH is not None, "the runner gives no vectors"
        values = sampled.vectors_RH[row].astype("<f4").tobytes()
        self._told(sequence.owner).vectors.append(Vector(sequence.id, values))
        self._end(sequence, FinishReason.STOP)

    def _end_not_finite(self, sequence: Sequence) -> None:
        """Ends it with an error. What it read is not matched again, except what a sampled token speaks for."""
        if sequence.lease is not None and sequence.sound <= 0:
            self._tree.forget(sequence.lease, max(0, self._proven(sequence) - sequence.public))
        self._counters["not_finite"] += 1
        log("not_finite", computed=sequence.computed, emitted=sequence.emitted)
        self._end(sequence, FinishReason.ERROR, NOT_FINITE)

    def _end_outdated(self) -> None:
        """Ends who would read a block that is no longer what it was given; what that one read is found no more.

        Pages are compared where blocks were freed or came from the tree since the last time: 160 µs for 256 sequences
        of 64 blocks.
        """
        if self._frees == self._blocks.frees or not self._running:
            return
        self._frees = self._blocks.frees
        pages = [sequence.pages[: sequence.blocks] for sequence in self._running]
        outdated = self._blocks.outdated(np.concatenate(pages))
        if not outdated.any():
            return
        ends = np.cumsum([len(each) for each in pages])
        for sequence, found in zip(list(self._running), np.split(outdated, ends[:-1]), strict=True):
            if found.any():
                if sequence.lease is not None:
                    self._tree.forget(sequence.lease, 0)
                self._counters["stale_reads"] += 1
                log("stale_read", computed=sequence.computed, emitted=sequence.emitted)
                self._end(sequence, FinishReason.ERROR, STALE)

    def _proven(self, suspect: Sequence) -> int:
        """How many of its first blocks another one reads whose tokens are sampled from finite numbers."""
        blocks = suspect.table[: suspect.shared]
        others = [other for other in self._running if other.sound > 0 and other.namespace == suspect.namespace]
        return max((_common(blocks, other.table[: other.shared]) for other in others), default=0)

    def _end(self, sequence: Sequence, reason: FinishReason, message: str = "") -> None:
        """Ends it, and tells its owner."""
        if sequence.ticket >= 0 and not sequence.background:
            prompt, asked = sequence.prompt_tokens, sequence.tokens_max - sequence.prompt_tokens
            done = PROMPT_TOKEN * (sequence.counted - sequence.spared) + GENERATED_TOKEN * sequence.emitted
            self._pace.ended(PROMPT_TOKEN * prompt + GENERATED_TOKEN * asked, done)
        self._leave(sequence)
        self._counters[f"finished_{reason}"] += 1
        self._told(sequence.owner).finished.append(Finish(sequence.id, reason, sequence.emitted, message))

    def _leave(self, sequence: Sequence) -> None:
        """The one end of every sequence. The blocks of one that is flying are freed when its last flight has landed."""
        if sequence.stage == Stage.RUNNING:
            self._stop(sequence)
        else:
            self._waiting_tokens[sequence.background] -= sequence.pending
            self._queue_of(sequence).remove(sequence.standing, sequence)
        if sequence.compilation is not None:
            sequence.compilation = None
            del self._compiling[sequence]
        sequence.stage = Stage.ENDED
        self._secret_left |= sequence.terms.erase
        if self._stuck is not None and self._stuck[0] is sequence:
            self._stuck = None
        if sequence.flying:
            self._leaving.add(sequence)
        else:
            self._release(sequence)
        del self._live[sequence.owner, sequence.id]

    def _stop(self, sequence: Sequence) -> None:
        """Takes its place, and what its prompt was still promised."""
        self._running.remove(sequence)
        self._background_runs -= sequence.background
        queue = self._queue_of(sequence)
        queue.promise(sequence.standing, sequence.counted - sequence.prompt_tokens)
        queue.stop(sequence.standing)

    def _release(self, sequence: Sequence) -> None:
        """Gives back its lease and its private blocks. The tree keeps what was cached for as long as it likes."""
        self._leaving.discard(sequence)
        if sequence.blocks:
            self._queue_of(sequence).let_go(sequence.standing, sequence.held())
        self._blocks.give(sequence.private())
        if sequence.lease is not None:
            self._blocks.give(self._tree.release(sequence.lease))
        sequence.rewind()

    def _available(self) -> int:
        """Blocks that can be had at once: free ones, and cached ones that nobody reads."""
        return self._blocks.free + self._tree.unused

    def _take(self, count: int, secret: bool) -> list[int]:
        """So many pages, evicting from the tree what is missing. Only after asking `_available`."""
        while self._blocks.free < count and self.sweep():
            pass
        if self._blocks.free < count:
            self._blocks.give(self._tree.evict(count - self._blocks.free))
        return self._blocks.take(count, secret)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _told(self, owner: int) -> _News:
        news = self._news.get(owner)
        if news is None:
            news = self._news[owner] = _News()
        return news

    def check(self) -> None:
        """Every block is free, cached, private to one sequence or spare, and every sequence is in one place."""
        holding = [*self._running, *self._leaving]
        private = [page for sequence in holding for page in sequence.private()]
        self._blocks.check([*self._tree.check(), *private, *self._spare])
        assert self._flights or not self._spare, "blocks are kept for nothing in the air"
        self._queue.check()
        self._behind.check()
        assert self._background_runs == sum(sequence.background for sequence in self._running)
        for sequence in holding:
            if sequence.lease is not None:
                assert sequence.lease.blocks == sequence.pages[sequence.public : sequence.shared].tolist()
            assert self._published.pages >= set(sequence.held()[: sequence.public])
        self._check_flights(holding)
        assert self._running == sorted(self._running, key=_ticket)
        self._check_standings(holding)
        waiting = [sequence for sequence in self._live.values() if sequence.stage == Stage.WAITING]
        assert [each.background for each in waiting].count(False) == len(self._queue)
        assert len(waiting) == len(self._queue) + len(self._behind)
        for background, tokens in enumerate(self._waiting_tokens):
            assert sum(each.pending for each in waiting if each.background == background) == tokens
        assert all(not sequence.blocks and sequence.lease is None for sequence in waiting), "a waiting one holds blocks"
        assert len(self._live) == len(waiting) + len(self._running)
        assert self._compiling.keys() == {sequence for sequence in waiting if sequence.compilation is not None}

    def _check_standings(self, holding: list[Sequence]) -> None:
        """What accounts are said to hold is what their sequences do, and no cap is passed by several of one."""
        standings = {sequence.standing for sequence in self._live.values()}
        for standing in standings:
            own = [sequence for sequence in self._running if sequence.standing is standing]
            assert standing.running == len(own)
            assert standing.promised == sum(sequence.prompt_tokens - sequence.counted for sequence in own)
        for standing in standings | {sequence.standing for sequence in holding}:
            held = [each.held() for each in holding if each.standing is standing]
            assert standing.readers == Counter(chain.from_iterable(held))

    def _check_flights(self, holding: list[Sequence]) -> None:
        flying, chunks = Counter[Sequence](), Counter[Sequence]()
        for plan in self._flights:
            flying.update(plan.sequences)
            chunks.update(dict(zip(plan.sequences, plan.chunks, strict=True)))
        assert all(flying[sequence] == sequence.flying for sequence in holding)
        assert flying.keys() <= set(holding), "what flies holds no blocks"
        assert all(sequence.flying for sequence in self._leaving), "an ended one is never released"
        for sequence in self._running:
            assert sequence.launched == sequence.computed + chunks[sequence]
            assert sequence.launched <= min(len(sequence.tokens) + 1, sequence.blocks * self._block_tokens)


def _ticket(sequence: Sequence) -> int:
    return sequence.ticket


def _work(sequence: Sequence) -> float:
    """What it will be served at most."""
    prompt, output = sequence.prompt_tokens - sequence.counted, sequence.tokens_max - len(sequence.tokens)
    return PROMPT_TOKEN * prompt + GENERATED_TOKEN * output


def _ids(tokens: "array[int]") -> NDArray[np.uint32]:
    return np.frombuffer(tokens, np.uint32)


def _common(some: NDArray[np.integer], others: NDArray[np.integer]) -> int:
    """The length of the longest common prefix."""
    length = min(len(some), len(others))
    differ = some[:length] != others[:length]
    return int(differ.argmax()) if differ.any() else length


def _slice(sequence: Sequence, chunk: int) -> Slice:
    """Its next `chunk` tokens as a step computes them."""
    tokens, start = sequence.tokens, sequence.launched
    table, end = sequence.table[: sequence.blocks], start + chunk
    if end < len(tokens):
        return Slice(tokens[start:end], start, table)
    history = (tokens, sequence.prompt_tokens) if sequence.penalized else None
    computed = tokens[start:end] if start < len(tokens) else (-1 - sequence.row,)
    return Slice(computed, start, table, sequence.sampling, history, sequence.matcher is not None)
