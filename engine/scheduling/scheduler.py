"""What runs in the next step, and what its outcome means. It knows neither torch nor sockets nor what a scope is.

There is no prefill and no decode: a sequence has tokens and computed tokens, and a step lets the second catch up with
the first under one budget of rows. Running sequences are kept in the order in which they were first admitted; the
oldest of them is never preempted, so it always moves on, and ends. Blocks and places that are missing come from the
account that has the most for its weight, from its youngest sequence. Accounts take turns, see fairness.py.
Who has no turn yet is in waiting.py, which of an account's goes next in admission.py, what it has of the pool then in
holdings.py.

Background sequences have a queue of their own behind that of the live ones. They are let in where no live one waits,
get what background.py leaves them of a step, none of it while a live one waits, and are the first to be preempted.

A step may be planned while the one before it is still in the air, so that a device never waits for the host: what that
one computes counts as computed, and a token that it samples is packed as the row that it will be in. What ends a
sequence is found one step late; what was computed for it meanwhile is thrown away, and its blocks are freed when the
last flight that reads them has landed.

The pool's memory comes and goes by extents, and all of it goes while the model sleeps. What is admitted always fits the
blocks that are there at the least, so that the oldest can end whatever was given away; the rest is for company.
"""

import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import chain
from typing import Final

from engine.log import log
from engine.protocol.frames import (
    PoolingOutput,
    Reject,
    ReplicaLoad,
    SequenceFinished,
    SequenceStarted,
    StepOutputs,
    TokenLogprobs,
)
from engine.protocol.types import FinishReason, RejectReason
from engine.scheduling.admission import PrefillAdmission, common_prefix_length
from engine.scheduling.best_effort import BestEffortBudget
from engine.scheduling.block_pool import BlockPool, ShrinkPlan, WakeExtents
from engine.scheduling.fair_queue import GENERATED_TOKEN, PROMPT_TOKEN, AccountQueue, FairQueue
from engine.scheduling.kv_manager import KVManager, exceeds_cap
from engine.scheduling.outputs import OutputCollector
from engine.scheduling.prefix_groups import PrefixGroups
from engine.scheduling.sequence import Sequence, SequenceState
from engine.scheduling.step_plan import INFLIGHT_STEPS_MAX, StepPlan, plan_step
from engine.scheduling.token_budget import SchedulerConfig, TokenBudget
from engine.scheduling.validation import SubmitRejected
from engine.scheduling.waiting import WaitingQueue, ticket_of
from engine.step.executor import RunnerOutput
from engine.step.layout import PrefixSegment
from prefixcache.tree import PrefixTree

PREEMPTION_RATIO: Final = 2.0  # an account gives up what leaves it so many times as much for its weight as who gets it
NOT_FINITE: Final = (
    "the model computed no finite numbers for this request; send it again, and if that does not help, change its prompt"
)
STALE_BLOCKS: Final = "blocks of this request were given to another one; nothing of that was read: send it again"
OUT_OF_MEMORY: Final = "the device has too little memory left for this request; send it again later, or a shorter one"


class Scheduler:
    """The loop is `next_batch`, launch, and when that has landed `commit` (or `fail`, or `retry_smaller`), `news`.

    One more may be planned and launched before the one before it has landed. Flights land in the order of their launch.
    Between calls every block is accounted for.

    Extents change, and the model sleeps and wakes, while nothing is in the air. Asleep, requests come and go and wait,
    and `next_batch` finds nothing to run, as it does when nothing runs and `admitting` is False: then nothing starts.
    """

    def __init__(
        self, tree: PrefixTree, blocks: BlockPool, limits: SchedulerConfig, clock: Callable[[], float]
    ) -> None:
        assert limits.sequences > 0
        self.admitting = True  # what waits may start
        self._holdings = KVManager(tree, blocks)
        self._block_tokens = tree.block_tokens
        self._limits = limits
        self._budget = TokenBudget(limits)
        self._groups = PrefixGroups(limits.costs, tree.block_tokens) if limits.costs is not None else None
        self._running_max = min(limits.sequences, limits.step_tokens)  # each gets one token of every step
        self._clock = clock
        self._waiting = WaitingQueue(limits.waiting, _work, clock)
        self._background = BestEffortBudget(limits)
        self._running: list[Sequence] = []  # by ticket
        self._background_runs = 0  # how many of them are in the background
        self._yielding: Sequence | None = None  # it is not launched, to be preempted when it has landed
        self._served = 0  # of prompts, in the step that is committed
        self._leaving: set[Sequence] = set()  # ended while flying: they hold blocks until their last flight has landed
        self._flights: deque[StepPlan] = deque()
        self._stuck: tuple[Sequence, int] | None = None  # who found too few blocks, and how many there were
        self._landed_s = -math.inf
        self._steps = 0
        self._counters: Counter[str] = Counter()
        self._news = OutputCollector()

    # Coming and going

    def add(self, sequences: Items[Sequence]) -> None:
        """Queues the choices of one request, all or none. Raises Refused: queue full, an id in use, too long, or it
        would wait for longer than it may. Where the queue is full, who has most in it for its weight makes room."""
        for sequence in sequences:
            self._waiting.examine(sequence)
            self._refuse_if_too_long(sequence)
        self._waiting.add(sequences)

    def cancel(self, owner: int, ids: Items[int]) -> None:
        """Ends these sequences. Ids that are unknown or have ended are ignored."""
        for id in ids:
            sequence = self._waiting.sequences.get((owner, id))
            if sequence is not None:
                self._end(sequence, FinishReason.CANCELLED)

    def drop(self, owner: int) -> None:
        """Ends all sequences of an owner that is gone; there is nobody to tell."""
        self.cancel(owner, [id for other, id in self._waiting.sequences if other == owner])
        self._news.forget(owner)

    def end_all(self, message: str) -> None:
        """Ends every sequence with an error."""
        for sequence in list(self._waiting.sequences.values()):
            self._end(sequence, FinishReason.ERROR, message)

    # One step

    def next_batch(self) -> StepPlan | None:
        """The next step's work, or None when nothing can run before what is in the air has landed."""
        assert len(self._flights) < INFLIGHT_STEPS_MAX
        self._waiting.expire()
        for sequence, problem in self._waiting.take_matchers():
            self._end(sequence, FinishReason.ERROR, problem)
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
        segments = self._segments(sequences, chunks)
        planned_us = 0.0 if sequences[-1].background else self._budget.planned_us
        plan = plan_step(sequences, chunks, segments, self._block_tokens, planned_us, self._clock())
        self._flights.append(plan)
        return plan

    def commit(self, plan: StepPlan, sampled: RunnerOutput) -> None:
        """Takes in what a step computed: one token more for every sequence that had caught up."""
        self._land(plan)
        now = self._clock()
        if plan.planned_us and plan.planned_s <= self._landed_s:
            self._budget.observe(plan.planned_us, 1e6 * (now - self._landed_s))
        took_s, self._landed_s, self._served = now - self._landed_s, now, 0
        tokens_R, logprobs = sampled.tokens_R.tolist(), sampled.logprobs
        assert len(tokens_R) == int(plan.packed[3]), f"{len(tokens_R)} tokens sampled for {plan.packed[3]} rows"
        for sequence, chunk, row in zip(plan.sequences, plan.chunks, plan.rows, strict=True):
            if sequence.stage == SequenceState.ENDED:
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
        self._waiting.observe(self._served + GENERATED_TOKEN * len(tokens_R), took_s)
        self._steps += 1
        self._counters["computed_tokens"] += int(plan.packed[0])
        self._budget.recover()

    def fail(self, plan: StepPlan, message: str) -> None:
        """The step was lost: its sequences end with an error, everything else goes on."""
        self._land(plan)
        self._landed_s = -math.inf
        for sequence in plan.sequences:
            if sequence.stage != SequenceState.ENDED:
                self._end(sequence, FinishReason.ERROR, message)

    def retry_smaller(self, plan: StepPlan) -> int:
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
        if rows == 1 and plan.sequences[0].stage != SequenceState.ENDED:
            self._end(plan.sequences[0], FinishReason.ERROR, OUT_OF_MEMORY)
        return self._budget.rows_max

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks; it resumes before anything new of its account. What it cached may stay."""
        assert sequence.stage == SequenceState.RUNNING
        assert not sequence.flying
        self._stop(sequence)
        self._release(sequence)
        self._regroup()
        self._waiting.resume(sequence)
        self._counters["preemptions"] += 1

    def preempt_all(self) -> None:
        """Who runs waits again, with its tokens."""
        for sequence in self._running[::-1]:
            self.preempt(sequence)
        self._yielding = None

    # The pool's memory

    def growing(self, count: int) -> list[int]:
        """Which extents, up to so many, are to get memory next."""
        return self._holdings.blocks.growing(count)

    def grow(self, extents: Items[int]) -> None:
        """They have it; who found too few blocks is tried again."""
        self._holdings.blocks.grow(extents)
        self._stuck = None

    def shrink(self, count: int) -> ShrinkPlan:
        """Takes up to so many extents out of use, as many as what runs can spare; never below the least. To be done
        next, in this order: erase `unerased`, copy the sources to the targets, erase what is `secret` of the sources,
        and take the extents' memory."""
        assert not self._flights
        self._stuck = None
        return self._holdings.shrink(count, self._running)

    def sleep(self, kept_most: int) -> list[int]:
        """Nobody runs: from now on no block has memory. What is kept, in the order in which it is to be restored:
        published prefixes, always, and with them up to so many blocks of what is wanted soonest; never what has to be
        erased. `unerased` is to be erased before their memory is gone.

        What is kept and freed while it sleeps is told by `unerased` too, as the blocks that were given here.
        """
        assert not self._flights
        assert not self._running
        self._landed_s = -math.inf
        return self._holdings.sleep(kept_most)

    def waking(self, extents: int) -> WakeExtents:
        """What it takes to wake with so many extents, or more where what is kept needs them. Changes nothing; all that
        is `unerased` is erased before. Holds until something that is kept is freed."""
        return self._holdings.blocks.waking(extents)

    def woken(self, waking: WakeExtents) -> None:
        """It is awake, as planned. Where the memory could not be given away after all: awake with the extents that it
        had, and what is kept where it was."""
        self._holdings.woken(waking)
        self._stuck = None

    # What is kept

    def publish(self, sequence: Sequence) -> bool:
        """Lets everybody read the prompt of a sequence that has ended, for good. False where it was not computed."""
        return self._holdings.publish(sequence)

    def sweep(self) -> bool:
        """Gives back cached blocks that are found no more, to be erased; whether there may be more of them."""
        return self._holdings.sweep()

    def unerased(self) -> list[int]:
        """Blocks that have to be erased before anything is launched; they count as erased now."""
        return self._holdings.unerased()

    def secret_left(self) -> bool:
        """Whether a sequence of which nothing may be kept has ended since this was asked last."""
        return self._waiting.secret_left()

    # What to tell

    def news(self) -> dict[int, StepOutputs]:
        """What each owner has not been told yet; it counts as told now."""
        return self._news.take()

    def rejects(self) -> list[tuple[Sequence, Reject]]:
        """The requests that were taken in and will not run after all, by their choice 0; they count as told now."""
        if self._stuck is not None and self._stuck[0].stage == SequenceState.ENDED:
            self._stuck = None
        return self._waiting.rejects()

    def load(self, draining: bool) -> ReplicaLoad:
        """How full it is. Of its counters, hit_tokens are all that lookups found, those of resumed sequences too;
        cached_tokens are what `SequenceStarted` told of, each prompt's once; spared_keys were not read as groups read
        them; preemptions those _cap (by a cap of the account), _share (for an account with less) and _background (of
        such sequences) too; waited_ms is the sum over the live ones that started; refused_… at once, where the queue
        was full or it would have waited for too long, expired_… and displaced_requests after they waited, for too long
        or for an account with fewer in a full queue; background_rows were computed for those; short_of_blocks are
        attempts to start a live sequence, and preemptions of live ones, that found too few blocks in the pool: its
        machine gives it more extents for them."""
        tree, blocks = self._holdings.tree, self._holdings.blocks
        counters = Counter(tree.counters)
        counters.update(self._holdings.counters)
        live = sum(standing.running for standing in self._waiting.queue.running)
        return ReplicaLoad(
            running=live,
            waiting=len(self._waiting.queue),
            waiting_tokens=self._waiting.tokens,
            free_blocks=blocks.free,
            cached_blocks=tree.cached,
            steps=self._steps,
            draining=draining,
            counters={**counters, **self._waiting.counters, **self._counters, "stale_pages": blocks.stale},
            shared_blocks=tree.shared,
            background=len(self._running) - live + len(self._waiting.behind),
            blocks=blocks.mapped,
        )

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not self._waiting.sequences

    # Inside

    @property
    def _paused(self) -> bool:
        """Whether background sequences may not run now, and are not let in."""
        return self._waiting.live_wait or (self._limits.costs is None and any(self._waiting.queue.running))

    def _add_background(self, behind: list[Sequence], sequences: list[Sequence], chunks: list[int]) -> None:
        """Adds those of them to a step that it has room for."""
        ready = [each for each in behind if each.launched < each.blocks * self._block_tokens]
        more = self._background.chunks(sequences, chunks, ready, self._budget.spared_us, self._budget.rows_max)
        sequences += ready[: len(more)]
        chunks += more
        self._counters["background_rows"] += sum(more)

    def _segments(self, sequences: list[Sequence], chunks: list[int]) -> Items[PrefixSegment]:
        """The keys that are read once for several of a step's slices."""
        if self._groups is None:
            return ()
        pairs = zip(sequences, chunks, strict=True)
        segments = self._groups.segments([sequence if chunk == 1 else None for sequence, chunk in pairs])
        for segment in segments:
            self._counters["spared_keys"] += (len(segment.members) - 1) * (segment.last - segment.first)
        self._budget.spared_us = self._groups.saved_us
        return segments

    def _refuse_if_too_long(self, sequence: Sequence) -> None:
        """Raises Refused for what can never run here."""
        holdings, size, cap = self._holdings, self._block_tokens, sequence.terms.blocks
        blocks, total = holdings.blocks_for(sequence.tokens_max - 1), holdings.total
        if blocks > total:
            raise SubmitRejected(
                RejectReason.TOO_LONG, f"{sequence.tokens_max} tokens can never fit a pool of {total * size}"
            )
        if cap is not None and blocks > cap:
            raise SubmitRejected(
                RejectReason.TOO_LONG,
                f"{sequence.tokens_max} tokens can never fit the {cap * size} that this account may have at once; "
                "send a shorter prompt, or ask for fewer tokens",
            )

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
        holdings, size, growing = self._holdings, self._block_tokens, self._running
        if self._background_runs:
            growing = [each for each in self._running if not each.background]
            growing += [] if self._paused else [each for each in self._running if each.background]
        for sequence in growing:
            if sequence.launched == sequence.blocks * size and sequence.launchable:
                standing = sequence.standing
                cap = standing.terms.blocks
                if not holdings.available or (cap is not None and standing.running > 1 and standing.blocks >= cap):
                    return sequence
                holdings.grow(sequence)
        return None

    def _victim(self, lacking: Sequence) -> Sequence:
        """Who is preempted for one that lacks a block: the youngest in the background, be it itself; else never the
        oldest of all, nor the oldest of an account."""
        if self._holdings.available:
            self._counters["preemptions_cap"] += 1
            return next(each for each in reversed(self._running) if each.standing is lacking.standing)
        if self._background_runs:
            self._counters["preemptions_background"] += 1
            return next(each for each in reversed(self._running) if each.background)
        self._counters["short_of_blocks"] += 1
        return max(self._running[1:], key=lambda each: (each.standing.blocks / each.standing.terms.weight, each.ticket))

    def _land(self, plan: StepPlan) -> None:
        """The oldest flight is over. Nobody reads what was spare when it was launched, nor who had ended."""
        assert self._flights.popleft() is plan, "flights land in the order of their launch"
        self._holdings.landed()
        for sequence in plan.sequences:
            sequence.flying -= 1
            if sequence.stage == SequenceState.ENDED and not sequence.flying:
                self._release(sequence)

    def _admit(self) -> None:
        """Starts what waits while there are places, blocks, and rows that running prompts do not use up."""
        if not self.admitting or self._holdings.blocks.asleep:
            return
        if self._waiting.queue.line:
            live = [each for each in self._running if not each.background]
            self._let_in(self._waiting.queue, live, self._budget.rows(live))
        if self._waiting.behind.line and not self._paused:
            behind = [each for each in self._running if each.background]
            self._let_in(self._waiting.behind, behind, self._background.rows_alone)

    def _let_in(self, queue: FairQueue[Sequence], running: list[Sequence], rows: int) -> None:
        """The same for one queue, whose sequences have so many rows of a step."""
        prompts = PrefillAdmission(running, rows, self._block_tokens)
        while (sequence := queue.first(prompts.choose)) is not None:
            if len(self._running) < self._running_max and self._start(sequence):
                prompts.add(sequence)
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

        def has(each: AccountQueue[Sequence]) -> float:
            return (each.running if places else each.blocks) / each.terms.weight

        most = max(self._waiting.queue.running, key=has, default=standing)
        more = 1 if places else self._holdings.blocks_for(len(sequence.tokens))
        needed = has(standing) + more / standing.terms.weight
        if most is standing or has(most) < PREEMPTION_RATIO * needed:
            return False
        victims = [each for each in self._running[1:] if each.standing is most]
        victim = max(victims, key=lambda each: (not each.flying, each.ticket), default=None)
        if victim is None:
            return False
        if has(most) - (1 if places else victim.blocks) / most.terms.weight < PREEMPTION_RATIO * needed:
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

    def _start(self, sequence: Sequence) -> bool:
        """Leases the longest cached prefix and takes blocks for the rest; False, and nothing taken, if too few."""
        if self._stuck is not None and self._stuck[0] is sequence and self._holdings.available <= self._stuck[1]:
            self._counters["short_of_blocks"] += not sequence.background
            return False
        holdings, queue = self._holdings, self._waiting.queue_of(sequence)
        found = holdings.lease(sequence)
        capped = exceeds_cap(sequence.standing, found.missing, found.cached)
        if capped or found.missing + len(self._running) > holdings.available:  # and a block for the next tokens of each
            holdings.give_up(sequence, found)
            if capped:
                queue.pass_over(sequence.standing)
            else:
                self._counters["short_of_blocks"] += not sequence.background
                self._stuck = (sequence, holdings.available)
            return False
        self._stuck = sequence.behind = None
        self._waiting.start(sequence)
        holdings.take(sequence, found)
        if sequence.ticket < 0:
            self._first_start(sequence)
        sequence.counted = max(sequence.counted, min(sequence.computed, sequence.prompt_tokens))
        queue.promise(sequence.standing, sequence.prompt_tokens - sequence.counted)
        insort(self._running, sequence, key=ticket_of)
        self._background_runs += sequence.background
        return True

    def _first_start(self, sequence: Sequence) -> None:
        waited_ms = self._waiting.first_start(sequence)
        sequence.spared = sequence.computed
        self._counters["cached_tokens"] += sequence.computed
        self._news.of(sequence.owner).started.append(SequenceStarted(sequence.id, sequence.computed, waited_ms))

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
        """What it has computed may be found from now on; groups change where it reads others' blocks for its own."""
        if self._holdings.cache(sequence, in_the_air=bool(self._flights)):
            self._regroup()

    def _regroup(self) -> None:
        if self._groups is not None:
            self._groups.change()

    def _emit(self, sequence: Sequence, token: int, chosen: tuple[float, list[int], list[float]] | None) -> None:
        sequence.tokens.append(token)
        sequence.standing.level += sequence.standing.generated_cost
        news = self._news.of(sequence.owner)
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

    def _give(self, sequence: Sequence, sampled: RunnerOutput, row: int) -> None:
        """Its prompt is computed, and the vector behind it is all that was asked for."""
        assert sampled.vectors_RH is not None, "the runner gives no vectors"
        values = sampled.vectors_RH[row].astype("<f4").tobytes()
        self._news.of(sequence.owner).vectors.append(PoolingOutput(sequence.id, values))
        self._end(sequence, FinishReason.STOP)

    def _end_not_finite(self, sequence: Sequence) -> None:
        """Ends it with an error. What it read is not matched again, except what a sampled token speaks for."""
        if sequence.lease is not None and sequence.sound <= 0:
            self._holdings.tree.forget(sequence.lease, max(0, self._proven(sequence) - sequence.public))
        self._counters["not_finite"] += 1
        log("not_finite", computed=sequence.computed, emitted=sequence.emitted)
        self._end(sequence, FinishReason.ERROR, NOT_FINITE)

    def _end_outdated(self) -> None:
        """Ends who would read a block that is no longer what it was given; what that one read is found no more."""
        for sequence in self._holdings.outdated(self._running):
            if sequence.lease is not None:
                self._holdings.tree.forget(sequence.lease, 0)
            self._counters["stale_reads"] += 1
            log("stale_read", computed=sequence.computed, emitted=sequence.emitted)
            self._end(sequence, FinishReason.ERROR, STALE_BLOCKS)

    def _proven(self, suspect: Sequence) -> int:
        """How many of its first blocks another one reads whose tokens are sampled from finite numbers."""
        blocks = suspect.table[: suspect.shared]
        others = [other for other in self._running if other.sound > 0 and other.namespace == suspect.namespace]
        return max((common_prefix_length(blocks, other.table[: other.shared]) for other in others), default=0)

    def _end(self, sequence: Sequence, reason: FinishReason, message: str = "") -> None:
        """Ends it, and tells its owner."""
        if sequence.ticket >= 0 and not sequence.background:
            prompt, asked = sequence.prompt_tokens, sequence.tokens_max - sequence.prompt_tokens
            done = PROMPT_TOKEN * (sequence.counted - sequence.spared) + GENERATED_TOKEN * sequence.emitted
            self._waiting.pace.ended(PROMPT_TOKEN * prompt + GENERATED_TOKEN * asked, done)
        self._leave(sequence)
        self._counters[f"finished_{reason}"] += 1
        self._news.of(sequence.owner).finished.append(SequenceFinished(sequence.id, reason, sequence.emitted, message))

    def _leave(self, sequence: Sequence) -> None:
        """The one end of every sequence. The blocks of one that is flying are freed when its last flight has landed."""
        if sequence.stage == SequenceState.RUNNING:
            self._stop(sequence)
        self._waiting.leave(sequence)
        if self._stuck is not None and self._stuck[0] is sequence:
            self._stuck = None
        if sequence.flying:
            self._leaving.add(sequence)
        else:
            self._release(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """Takes its place, and what its prompt was still promised."""
        self._running.remove(sequence)
        self._background_runs -= sequence.background
        queue = self._waiting.queue_of(sequence)
        queue.promise(sequence.standing, sequence.counted - sequence.prompt_tokens)
        queue.stop(sequence.standing)

    def _release(self, sequence: Sequence) -> None:
        """Gives back its lease and its private blocks. The tree keeps what was cached for as long as it likes."""
        self._leaving.discard(sequence)
        if sequence.blocks:
            self._waiting.queue_of(sequence).let_go(sequence.standing, sequence.held())
        self._holdings.release(sequence)

    def check(self) -> None:
        """Every block is free, cached, private to one sequence or spare, and every sequence is in one place."""
        holding = [*self._running, *self._leaving]
        self._holdings.check(holding, in_the_air=bool(self._flights))
        self._waiting.check()
        assert self._background_runs == sum(sequence.background for sequence in self._running)
        self._check_flights(holding)
        assert self._running == sorted(self._running, key=ticket_of)
        self._check_standings(holding)
        waiting = len(self._waiting.queue) + len(self._waiting.behind)
        assert len(self._waiting.sequences) == waiting + len(self._running)

    def _check_standings(self, holding: list[Sequence]) -> None:
        """What accounts are said to hold is what their sequences do, and no cap is passed by several of one."""
        standings = {sequence.standing for sequence in self._waiting.sequences.values()}
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


def _work(sequence: Sequence) -> float:
    """What it will be served at most."""
    prompt, output = sequence.prompt_tokens - sequence.counted, sequence.tokens_max - len(sequence.tokens)
    return PROMPT_TOKEN * prompt + GENERATED_TOKEN * output
