"""What runs in the next step, and what its outcome means. It knows neither torch nor sockets nor what a scope is.

There is no prefill and no decode: a sequence has tokens and computed tokens, and a step lets the second catch up with
the first under one budget of tokens. Running sequences are kept in the order in which they were first admitted;
the older of two is never preempted for the younger, so the oldest always moves on.
"""

from array import array
from bisect import insort
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from engine.batch import Int32s, Sampled, Slice, pack
from engine.blocks import Blocks
from engine.fairness import FairQueue
from engine.sequence import Refused, Sequence, Stage
from engine.wire import Finish, FinishReason, Load, Progress, RejectReason, Started, TokenLogprobs
from prefixcache.tree import Namespace, Tree

RETRY_MS_MIN, RETRY_MS_MAX = 250, 10_000


@dataclass(frozen=True, slots=True)
class Limits:
    """step_tokens: computed in one step; sequences: running at once; waiting: in the queue at once."""

    step_tokens: int
    sequences: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: sequences[i] computes its next chunks[i] tokens, slice i of `packed`."""

    packed: Int32s
    sequences: list[Sequence]
    chunks: list[int]


@dataclass(slots=True)
class _News:
    """What one owner is to be told next: a Progress in the making."""

    ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: "array[int]" = field(default_factory=lambda: array("I"))
    started: list[Started] = field(default_factory=list)
    finished: list[Finish] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def progress(self) -> Progress:
        return Progress(self.ids, self.counts, self.tokens.tobytes(), self.started, self.finished, self.logprobs)


class _Prompts:
    """The running sequences that lack more than one token, while others are let in beside them."""

    def __init__(self, running: list[Sequence]) -> None:
        self._oldest: Sequence | None = None
        self._pending = 0
        self._namespaces: dict[Namespace, list[Sequence]] = {}
        for sequence in running:
            self.add(sequence)

    @property
    def pending_behind(self) -> int:
        """Tokens that all but the oldest of them lack."""
        return self._pending - self._oldest.pending if self._oldest is not None else 0

    def of(self, namespace: Namespace) -> list[Sequence]:
        return self._namespaces.get(namespace, [])

    def add(self, sequence: Sequence) -> None:
        if sequence.pending <= 1:
            return
        self._pending += sequence.pending
        if self._oldest is None or sequence.ticket < self._oldest.ticket:
            self._oldest = sequence
        if sequence.namespace is not None:
            self._namespaces.setdefault(sequence.namespace, []).append(sequence)


class Scheduler:
    """The loop is `next_batch`, launch, `commit` (or `fail`), `news`. Between calls every block is accounted for."""

    def __init__(self, tree: Tree, blocks: Blocks, limits: Limits, clock: Callable[[], float]) -> None:
        assert limits.step_tokens > 0
        assert limits.sequences > 0
        self._tree = tree
        self._blocks = blocks
        self._block_tokens = tree.block_tokens
        self._limits = limits
        self._running_max = min(limits.sequences, limits.step_tokens)  # each gets one token of every step
        self._clock = clock
        self._live: dict[tuple[int, int], Sequence] = {}
        self._queue: FairQueue[Sequence] = FairQueue()
        self._running: list[Sequence] = []  # by ticket
        self._preempted: list[Sequence] = []  # by ticket
        self._leaving: set[Sequence] = set()  # ended while flying: they hold blocks until their step is over
        self._stuck: tuple[Sequence, int] | None = None  # who found too few blocks, and how many there were
        self._waiting_tokens = 0
        self._waited_ms = 0.0
        self._tickets = 0
        self._steps = 0
        self._counters: Counter[str] = Counter()
        self._vain: Counter[str] = Counter()  # the tree's counts of lookups that started nothing
        self._news: dict[int, _News] = {}

    # Coming and going

    def add(self, sequences: Items[Sequence]) -> None:
        """Queues the choices of one request, all or none. Raises Refused: queue full, an id in use, too long."""
        for sequence in sequences:
            if (sequence.owner, sequence.id) in self._live:
                raise Refused(RejectReason.INVALID, f"id {sequence.id} is still in use on this connection")
            if self._blocks_for(sequence.tokens_max - 1) > self._blocks.total:
                raise Refused(
                    RejectReason.TOO_LONG,
                    f"{sequence.tokens_max} tokens can never fit a pool of {self._blocks.total * self._block_tokens}",
                )
        if len(self._queue) + len(self._preempted) + len(sequences) > self._limits.waiting:
            wait_ms = int(min(max(self._waited_ms, RETRY_MS_MIN), RETRY_MS_MAX))
            raise Refused(RejectReason.BUSY, "too many requests are waiting; try again later", wait_ms)
        for sequence in sequences:
            self._live[sequence.owner, sequence.id] = sequence
            self._queue.push(sequence.account, sequence)
            self._waiting_tokens += sequence.pending

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
        """The next step's work, or None when nothing can run."""
        if self._grow():
            self._admit()
        running = self._running
        if not running:
            return None
        extra = self._share()
        slices, chunks = [], []
        for sequence in running:
            tokens, start = sequence.tokens, sequence.computed
            chunk = 1 + extra.get(sequence, 0) if extra else 1
            end = start + chunk
            table = sequence.table[: sequence.blocks]
            if end < len(tokens):
                slices.append(Slice(tokens[start:end], start, table))
            else:
                history = (tokens, sequence.prompt_tokens) if sequence.penalized else None
                slices.append(Slice(tokens[start:end], start, table, sequence.sampling, history))
            chunks.append(chunk)
            sequence.flying = True
        return Plan(pack(slices, self._block_tokens), list(running), chunks)

    def commit(self, plan: Plan, sampled: Sampled) -> None:
        """Takes in what a step computed: one token more for every sequence that had caught up."""
        tokens_R = sampled.tokens_R.tolist()
        row = 0
        for sequence, chunk in zip(plan.sequences, plan.chunks, strict=True):
            sequence.flying = False
            sequence.computed = computed = sequence.computed + chunk
            samples = computed == len(sequence.tokens)
            if sequence.stage == Stage.ENDED:
                self._release(sequence)
            else:
                if computed // self._block_tokens > sequence.shared:
                    self._cache(sequence)
                if samples:
                    self._emit(sequence, tokens_R[row], sampled.logprobs.get(row) if sampled.logprobs else None)
            row += samples
        assert row == len(tokens_R), f"{len(tokens_R)} tokens sampled for {row} rows"
        self._steps += 1
        self._counters["computed_tokens"] += sum(plan.chunks)

    def fail(self, plan: Plan, message: str) -> None:
        """The step was lost: its sequences end with an error, everything else goes on."""
        for sequence in plan.sequences:
            sequence.flying = False
            if sequence.stage == Stage.ENDED:
                self._release(sequence)
            else:
                self._end(sequence, FinishReason.ERROR, message)

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks; it resumes before anything new starts. What it cached may stay."""
        assert sequence.stage == Stage.RUNNING
        assert not sequence.flying
        self._running.remove(sequence)
        self._release(sequence)
        sequence.stage = Stage.WAITING
        insort(self._preempted, sequence, key=_ticket)
        self._waiting_tokens += sequence.pending
        self._counters["preemptions"] += 1

    # What to tell

    def news(self) -> dict[int, Progress]:
        """What each owner has not been told yet; it counts as told now."""
        told = {owner: news.progress() for owner, news in self._news.items()}
        self._news.clear()
        return told

    def load(self, draining: bool) -> Load:
        """How full it is. Of its counters, hit_tokens are all that lookups found, those of resumed sequences too;
        cached_tokens are what `Started` told of, each prompt's once."""
        counters = Counter(self._tree.counters)
        counters.subtract(self._vain)
        return Load(
            running=len(self._running),
            waiting=len(self._queue) + len(self._preempted),
            waiting_tokens=self._waiting_tokens,
            free_blocks=self._blocks.free,
            cached_blocks=self._tree.cached,
            steps=self._steps,
            draining=draining,
            counters={**counters, **self._counters},
            shared_blocks=self._tree.shared,
        )

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not self._live

    # Inside

    def _grow(self) -> bool:
        """Gives every running sequence the block its next token needs, the oldest first.

        Where none is left the youngest is preempted. True when none had to be.
        """
        calm = True
        for sequence in list(self._running):
            while sequence.stage == Stage.RUNNING and len(sequence.tokens) > sequence.blocks * self._block_tokens:
                if self._available() >= 1:
                    sequence.grow(self._take(1))
                else:
                    assert len(self._running) > 1, "a sequence alone does not fit: add let it in"
                    self.preempt(self._running[-1])
                    calm = False
        return calm

    def _admit(self) -> None:
        """Starts what waits while there are places, blocks, and budget that running prompts do not use up."""
        if not self._preempted and not self._queue:
            return
        prompts = _Prompts(self._running)
        while len(self._running) < self._running_max:
            spare = self._limits.step_tokens - len(self._running)
            if prompts.pending_behind > spare // 2:  # half of the budget is the oldest prompt's
                return
            sequence = self._candidate(prompts)
            if sequence is None or not self._start(sequence):
                return
            prompts.add(sequence)

    def _candidate(self, prompts: "_Prompts") -> Sequence | None:
        if self._preempted:
            return self._preempted[0]
        return self._queue.first(lambda head: not self._held(head, prompts))

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
                common = _common(other.tokens, sequence.tokens, len(sequence.tokens) - 1)
                if common >= next_end:
                    sequence.behind = other, common // size
                    return True
        return False

    def _start(self, sequence: Sequence) -> bool:
        """Leases the longest cached prefix and takes blocks for the rest; False, and nothing taken, if too few."""
        if self._stuck is not None and self._stuck[0] is sequence and self._available() <= self._stuck[1]:
            return False
        if sequence.namespace is not None:
            sequence.lease = self._tree.match(sequence.namespace, sequence.tokens[:-1])
            cached = sequence.lease.blocks
        else:
            cached = []
        needed = self._blocks_for(len(sequence.tokens)) - len(cached)
        if needed + len(self._running) > self._available():  # and a block for the next tokens of each that runs
            if sequence.lease is not None:
                self._vain.update(lookups=1, lookup_tokens=len(sequence.tokens) - 1, hit_tokens=sequence.lease.tokens)
            self._release(sequence)
            self._stuck = (sequence, self._available())
            return False
        self._stuck = sequence.behind = None
        self._waiting_tokens -= sequence.pending
        sequence.grow(cached)
        sequence.shared = len(cached)
        sequence.computed = len(cached) * self._block_tokens
        sequence.grow(self._take(needed))
        sequence.stage = Stage.RUNNING
        if sequence.ticket < 0:
            self._first_start(sequence)
        else:
            self._preempted.remove(sequence)
        insort(self._running, sequence, key=_ticket)
        return True

    def _first_start(self, sequence: Sequence) -> None:
        sequence.ticket = self._tickets
        self._tickets += 1
        self._queue.take(sequence.account, sequence)
        self._queue.charge(sequence.account, sequence.pending)
        self._waited_ms = (self._clock() - sequence.arrived_s) * 1e3
        self._counters["started"] += 1
        self._counters["prompt_tokens"] += sequence.prompt_tokens
        self._counters["cached_tokens"] += sequence.computed
        self._told(sequence.owner).started.append(Started(sequence.id, sequence.computed, self._waited_ms))

    def _share(self) -> dict[Sequence, int]:
        """How many tokens beyond its first each running prompt computes in this step.

        The oldest prompt has a right to half of what is left, the others share the rest, the shortest first: a short
        prompt is not kept waiting by a long one, and a long one is not starved by short ones.
        """
        prompts = [sequence for sequence in self._running if sequence.pending > 1]
        if not prompts:
            return {}
        left = self._limits.step_tokens - len(self._running)
        oldest, *others = prompts
        kept = min(oldest.pending - 1, left - left // 2)
        extra = {}
        for sequence in sorted(others, key=_pending):
            extra[sequence] = min(sequence.pending - 1, left - kept)
            left -= extra[sequence]
        extra[oldest] = min(oldest.pending - 1, left)
        return extra

    def _cache(self, sequence: Sequence) -> None:
        """Puts the blocks that became full into the tree. Where it has them already, ours are freed for its own."""
        if sequence.namespace is None:
            return
        size, shared, full = self._block_tokens, sequence.shared, sequence.computed // self._block_tokens
        assert sequence.lease is not None
        blocks = sequence.table[shared:full].tolist()
        sequence.lease, spare = self._tree.insert(sequence.lease, sequence.tokens[shared * size : full * size], blocks)
        if spare:
            self._blocks.give(spare)
            sequence.table[:full] = sequence.lease.blocks
        sequence.shared = full

    def _emit(self, sequence: Sequence, token: int, chosen: tuple[float, list[int], list[float]] | None) -> None:
        sequence.tokens.append(token)
        self._queue.charge(sequence.account, 1)
        news = self._told(sequence.owner)
        news.ids.append(sequence.id)
        news.counts.append(1)
        news.tokens.append(token)
        if chosen is not None:
            news.logprobs.append(TokenLogprobs(sequence.id, *chosen))
        if token in sequence.stop_ids:
            self._end(sequence, FinishReason.STOP)
        elif len(sequence.tokens) >= sequence.tokens_max:
            self._end(sequence, FinishReason.LENGTH)

    def _end(self, sequence: Sequence, reason: FinishReason, message: str = "") -> None:
        """The one end of every sequence. The blocks of one that is flying are freed when its step is over."""
        if sequence.stage == Stage.RUNNING:
            self._running.remove(sequence)
        else:
            self._waiting_tokens -= sequence.pending
            if sequence.ticket < 0:
                self._queue.remove(sequence.account, sequence)
            else:
                self._preempted.remove(sequence)
        sequence.stage = Stage.ENDED
        if sequence.flying:
            self._leaving.add(sequence)
        else:
            self._release(sequence)
        del self._live[sequence.owner, sequence.id]
        self._counters[f"finished_{reason}"] += 1
        self._told(sequence.owner).finished.append(Finish(sequence.id, reason, sequence.emitted, message))

    def _release(self, sequence: Sequence) -> None:
        """Gives back its lease and its private blocks. The tree keeps what was cached for as long as it likes."""
        self._leaving.discard(sequence)
        self._blocks.give(sequence.private())
        if sequence.lease is not None:
            self._blocks.give(self._tree.release(sequence.lease))
        sequence.rewind()

    def _available(self) -> int:
        """Blocks that can be had at once: free ones, and cached ones that nobody reads."""
        return self._blocks.free + self._tree.evictable

    def _take(self, count: int) -> list[int]:
        """So many blocks, evicting from the tree what is missing. Only after asking `_available`."""
        missing = count - self._blocks.free
        if missing > 0:
            self._blocks.give(self._tree.evict(missing))
        return self._blocks.take(count)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _told(self, owner: int) -> _News:
        news = self._news.get(owner)
        if news is None:
            news = self._news[owner] = _News()
        return news

    def check(self) -> None:
        """Every block is free, cached or private to one sequence, and every sequence is in one place."""
        holding = [*self._running, *self._leaving]
        private = [block for sequence in holding for block in sequence.private()]
        total = self._blocks.total
        assert self._blocks.free + self._tree.cached + len(private) == total, (
            f"{self._blocks.free} free, {self._tree.cached} cached, {len(private)} private of {total}"
        )
        assert len(set(private)) == len(private), "a private block has two owners"
        self._tree.check()
        self._blocks.check()
        self._queue.check()
        for sequence in holding:
            if sequence.lease is not None:
                assert sequence.lease.blocks == sequence.table[: sequence.shared].tolist()
        assert self._running == sorted(self._running, key=_ticket)
        assert self._preempted == sorted(self._preempted, key=_ticket)
        waiting = [sequence for sequence in self._live.values() if sequence.stage == Stage.WAITING]
        assert len(waiting) == len(self._queue) + len(self._preempted)
        assert sum(sequence.pending for sequence in waiting) == self._waiting_tokens
        assert all(not sequence.blocks and sequence.lease is None for sequence in waiting), "a waiting one holds blocks"
        assert len(self._live) == len(waiting) + len(self._running)


def _ticket(sequence: Sequence) -> int:
    return sequence.ticket


def _pending(sequence: Sequence) -> int:
    return sequence.pending


def _common(some: "array[int]", others: "array[int]", most: int) -> int:
    """The length of the longest common prefix, at most `most`."""
    length = min(len(some), len(others), most)
    differ = np.frombuffer(some, np.uint32, length) != np.frombuffer(others, np.uint32, length)
    return int(differ.argmax()) if differ.any() else length
