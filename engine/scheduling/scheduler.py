"""What runs in the next step, and what its outcome means. It knows neither torch nor sockets nor what a scope is.

There is no prefill and no decode: a sequence has tokens and computed tokens, and a step lets the second catch up with
the first under one budget of rows. The oldest running sequence is never preempted, so it always moves on, and ends.
Blocks and places that are missing come from the account that has most for its weight, see preemption.py. Accounts take
turns, see fair_queue.py; waiting.py holds the sequences that have no turn yet, admission.py chooses among those of one
account, kv_manager.py gives them blocks, running.py knows the sequences that have them.

Background sequences have a queue of their own behind that of the live ones, and are admitted where no live one waits.
In a step they get what best_effort.py leaves them, nothing while a live one waits; and they are preempted first.

A step may be planned while the one before it is in flight, so that a device never waits for the host: what that one
computes counts as computed, and a token that it samples is packed as the row that it will be in. The end of a sequence
is found one step late; what was computed for it meanwhile is thrown away, and its blocks are freed when the last step
that reads them has landed.

The pool's memory comes and goes by extents, and all of it goes while the model sleeps. An admitted sequence always fits
the blocks that never lose their memory, so that the oldest can end whatever was given away.
"""

import math
from collections.abc import Callable
from itertools import chain
from typing import Final

import msgspec

from engine.kv_blocks.kv_manager import KVManager
from engine.log import log
from engine.protocol.frames import ReplicaLoad, TokenLogprobs
from engine.protocol.types import FinishReason
from engine.scheduling.admission import PrefillAdmission, exceeds_cap
from engine.scheduling.best_effort import BestEffortBudget
from engine.scheduling.intake import Intake, PendingOutputs
from engine.scheduling.preemption import victim_for_turn, victim_of_shortage, victim_under_cap
from engine.scheduling.prefix_groups import PrefixGroups
from engine.scheduling.running import RunningSequences
from engine.scheduling.step_plan import INFLIGHT_STEPS_MAX, StepPlan, plan_step
from engine.scheduling.token_budget import SchedulerConfig, TokenBudget
from engine.sequences.fair_queue import GENERATED_TOKEN, PROMPT_TOKEN, FairQueue
from engine.sequences.sequence import GrammarMatcher, Sequence, SequenceState
from engine.step.executor import RunnerOutput

NOT_FINITE: Final = (
    "the model computed no finite numbers for this request; send it again, and if that does not help, change its prompt"
)
STALE_BLOCKS: Final = "blocks of this request were given to another one; nothing of that was read: send it again"
OUT_OF_MEMORY: Final = "the device has too little memory left for this request; send it again later, or a shorter one"


class Scheduler:
    """A loop calls `next_batch`, launches that, and once it has landed `commit` (or `fail`, or `retry_smaller`); one
    more step may be planned and launched before. Steps land in the order of their launch. Between calls every block is
    accounted for.

    Extents change, and the model sleeps and wakes, through `kv` while nothing is in flight. Asleep, requests come and
    go and wait, and `next_batch` finds nothing to run, as it does when nothing runs and `intake.admitting` is False.
    """

    def __init__(self, kv: KVManager, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        assert config.max_sequences > 0
        self.kv = kv
        self.intake = Intake(config.max_waiting, lambda each: each.max_work, clock, self._end, kv.refuse_too_long)
        self.running = RunningSequences(kv, self.intake.waiting)
        self._block_tokens = kv.block_tokens
        self._config = config
        self._budget = TokenBudget(config)
        self.intake.step_costs = self._budget.time.learned
        self._best_effort = BestEffortBudget(config)
        self._groups: PrefixGroups | None = None
        if config.costs is not None:
            self._groups = PrefixGroups(config.costs, kv.block_tokens, kv.spans[-config.groups :])
        self._max_running = min(config.max_sequences, config.step_tokens)  # each gets one token of every step
        self._clock = clock
        self._waiting = self.intake.waiting
        self._counters = self.intake.counters
        self._preempt_next: Sequence | None = None  # it is not launched, to be preempted when it has landed
        self._served_tokens = 0  # of prompts, in the step that is committed
        self._landed_s = -math.inf
        self._steps = 0

    # One step

    def next_batch(self) -> StepPlan | None:
        """The next step's work, or None when nothing can run before a step in flight has landed."""
        assert len(self.running.inflight) < INFLIGHT_STEPS_MAX
        self._waiting.expire()
        self.running.disk_reads.take_ready()
        if self.running.take_arrived():
            self._regroup()
        for sequence, problem in self._waiting.take_matchers():
            self._end(sequence, FinishReason.GRAMMAR, problem)
        if not self._give_blocks():
            return None
        self._end_stale()
        sequences = self.running.ready()
        if self._preempt_next in sequences:
            sequences.remove(self._preempt_next)
        best_effort = [each for each in sequences if each.background] if self.running.best_effort else []
        if best_effort:
            sequences = [sequence for sequence in sequences if not sequence.background]
        del sequences[self._budget.max_rows :]
        sequences = self._budget.time.select(sequences, len(self._waiting.live.running_accounts))
        extra = self._budget.share(sequences)
        if extra and (sitting := self._budget.sitting_out(sequences, extra)):
            sequences = [sequence for sequence in sequences if sequence not in sitting]
            extra = self._budget.share(sequences)
        chunks = [1 + extra.get(sequence, 0) for sequence in sequences] if extra else [1] * len(sequences)
        if extra and self.kv.windowed:
            chunks = [self.running.cover(sequence, chunk) for sequence, chunk in zip(sequences, chunks, strict=True)]
        if best_effort and not self._best_effort_paused:
            self._add_best_effort(best_effort, sequences, chunks)
        sequences, chunks = self.running.fit_images(sequences, chunks, self._budget.max_rows)
        if not sequences:
            if self.running.stuck:
                self.preempt(self.running.sequences[-1])
            return None
        self.running.inflight.append(plan := self._plan(sequences, chunks))
        return plan

    def commit(self, plan: StepPlan, sampled: RunnerOutput) -> None:
        """Takes in what a step computed: one token more for every sequence that had caught up."""
        self.running.land(plan)
        now = self._clock()
        if plan.planned_us and plan.planned_s <= self._landed_s:
            self._budget.observe(plan.planned_us, 1e6 * (now - self._landed_s))
        took_us = 1e6 * (now - max(self._landed_s, plan.planned_s))
        self._budget.time.observe(plan, took_us)
        if self.kv.host is not None:
            self.kv.host.observe(max(plan.chunks), plan.computed_tokens, took_us)
        took_s, self._landed_s, self._served_tokens = now - self._landed_s, now, 0
        tokens_R, logprobs, unwanted = sampled.tokens_R.tolist(), sampled.logprobs, plan.unwanted
        assert len(tokens_R) == plan.sampled_rows, f"{len(tokens_R)} tokens sampled for {plan.sampled_rows} rows"
        windowed = bool(self.kv.windowed)
        for sequence, chunk, row in zip(plan.sequences, plan.chunks, plan.rows, strict=True):
            if sequence.state == SequenceState.ENDED:
                continue
            if row >= 0 and tokens_R[row] < 0:
                self._end_not_finite(sequence)
                continue
            sequence.finite_samples += row >= 0
            sequence.computed = computed = sequence.computed + chunk
            if sequence.charged_tokens < sequence.prompt_tokens:
                self._served_tokens += PROMPT_TOKEN * sequence.charge_prompt() * (not sequence.background)
            if computed // self._block_tokens > sequence.shared_blocks:
                self._cache(sequence)
            if windowed:
                self.kv.advance(sequence)
            if row >= 0 and sequence.pooling is not None:
                assert sampled.vectors_RH is not None, "the runner gives no vectors"
                self.intake.end_with_vector(sequence, sampled.vectors_RH[row])
            elif row >= 0 and not (unwanted and sequence in unwanted):
                self._report_token(sequence, tokens_R[row], logprobs.get(row) if logprobs else None)
        self._waiting.observe(self._served_tokens + GENERATED_TOKEN * len(tokens_R), took_s)
        self._steps += 1
        self._counters["computed_tokens"] += plan.computed_tokens
        self._budget.recover()

    def fail(self, plan: StepPlan, message: str) -> None:
        """Ends the sequences of a step that was lost with an error. Everything else goes on."""
        self.running.land(plan)
        self._landed_s = -math.inf
        self.intake.fail(plan.sequences, message)

    def retry_smaller(self, plan: StepPlan) -> int:
        """Takes back a step that found too little memory, and the one launched behind it, as if never planned.

        The next step is at most half as large, which is returned; the later ones grow again. A step of one row cannot
        shrink, nor one for a single row that has a whole image instead: its sequence ends with an error.
        """
        rows, plans, smallest = plan.computed_tokens, list(self.running.inflight), self._budget.max_rows == 1
        assert plans[0] is plan
        for launched in plans:
            self.running.land(launched)
        self._landed_s = -math.inf
        for sequence in chain.from_iterable(launched.sequences for launched in plans):
            sequence.launched = sequence.computed
        self._budget.halve(rows)
        self._counters["steps_out_of_memory"] += 1
        if rows == 1 or smallest:
            self.intake.fail(plan.sequences, OUT_OF_MEMORY)
        return self._budget.max_rows

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks. It resumes before any of its account that never ran."""
        self.running.preempt(sequence)
        self._regroup()
        self._counters["preemptions"] += 1

    def preempt_all(self) -> None:
        """Preempts all that runs, before a sleep: nothing is in flight, and the sleep is no part of a step's time."""
        assert not self.running.inflight
        self.running.disk_reads.take_ready()
        if self.running.take_arrived():
            self._regroup()
        for sequence in self.running.sequences[::-1]:
            self.preempt(sequence)
        self._preempt_next = None
        self._landed_s = -math.inf

    def load(self, draining: bool) -> ReplicaLoad:
        """How full the replica is. Its counters:

        hit_tokens          found by all lookups, those of resumed sequences too.
        cached_tokens       as `SequenceStarted` reports them, once for each prompt.
        forced_tokens       that a grammar left no choice of, and no step sampled.
        spared_keys         not read, because groups read them once; counted as CostModel counts keys.
        preemptions         those _cap (by a cap of the account), _share (for an account with less) and _background (of
                            background sequences) too.
        waited_ms           summed over the live sequences that started.
        refused_…           at once, because the queue was full or the wait would have been too long; expired_… and
                            displaced_requests after a wait, too long or for an account with fewer in a full queue.
        background_rows     computed for background sequences.
        short_of_blocks     attempts to start a live sequence, and preemptions of live ones, that found too few blocks
                            in the pool: its machine gives it more extents for them.
        traded_extents      that one group of layers got of another one.
        host_…              as HostBlocks counts what left for the host's memory, and came back.

        Its blocks, but for the shared ones, are those of the group that has the smallest part of its own free.
        """
        pools = self.kv.pools
        group = min(range(len(pools)), key=lambda group: pools[group].free_blocks / max(1, pools[group].mapped_blocks))
        load = self.intake.queue_load(self._steps, draining)
        return msgspec.structs.replace(
            load,
            free_blocks=pools[group].free_blocks,
            cached_blocks=self.kv.cached(group),
            counters={**self.kv.counters(), **load.counters},
            shared_blocks=self.kv.tree.shared_blocks,
            blocks=pools[group].mapped_blocks,
        )

    # Planning

    @property
    def _best_effort_paused(self) -> bool:
        """Whether background sequences may not run now, and are not admitted."""
        live = self._waiting.live
        return self._waiting.live_contended or (self._config.costs is None and any(live.running_accounts))

    def _add_best_effort(self, candidates: list[Sequence], sequences: list[Sequence], chunks: list[int]) -> None:
        """Adds the background sequences to a step that it has room for."""
        size = self._block_tokens
        ready = [each for each in candidates if each.block_count * size > max(each.launched, len(each.tokens) - 1)]
        more = self._best_effort.chunks(sequences, chunks, ready, self._budget.saved_us, self._budget.max_rows)
        del ready[len(more) :]
        more = [self.running.cover(sequence, chunk) for sequence, chunk in zip(ready, more, strict=True)]
        sequences += ready
        chunks += more
        self._counters["background_rows"] += sum(more)

    def _plan(self, sequences: list[Sequence], chunks: list[int]) -> StepPlan:
        """The step that computes these chunks; keys that several of its slices have in common are read once."""
        segments = []
        if self._groups is not None:
            pairs = zip(sequences, chunks, strict=True)
            segments = self._groups.segments([sequence if chunk == 1 else None for sequence, chunk in pairs])
            self._budget.saved_us = self._groups.saved_us
            self._counters["spared_keys"] += self._groups.spared_keys
        planned_us = 0.0 if sequences[-1].background else self._budget.planned_us
        sizes, work = (self._block_tokens, self._config.groups), self._budget.time.work(sequences, chunks)
        return plan_step(sequences, chunks, segments, *sizes, planned_us, self._clock(), work)

    def _give_blocks(self) -> bool:
        """Gives every running sequence the block that it writes next, and admits others where none was missing: that
        preempts a sequence. False if that has to wait for a step in flight."""
        preempted, self._preempt_next = False, None
        while (lacking := self.running.append_blocks(not self._best_effort_paused)) is not None:
            if self.running.inflight or self.running.loading:
                return False
            assert len(self.running.sequences) > 1, "a sequence alone does not fit: add let it in"
            self.preempt(self._victim(lacking))
            preempted = True
        if not preempted:
            self._admit()
        return True

    def _victim(self, lacking: Sequence) -> Sequence:
        """The sequence that is preempted for one that lacks a block: under a cap one of its own account, else the
        youngest in the background, be it itself, else one of an account that has much."""
        if all(self.kv.all_available()):
            self._counters["preemptions_cap"] += 1
            return victim_under_cap(self.running.sequences, lacking.account_queue)
        if self.running.best_effort:
            self._counters["preemptions_background"] += 1
            return next(sequence for sequence in reversed(self.running.sequences) if sequence.background)
        self._counters["short_of_blocks"] += 1
        return victim_of_shortage(self.running.sequences)

    # Admission

    def _admit(self) -> None:
        """Starts waiting sequences while there are places, blocks, and rows that running prompts do not use up."""
        if not self.intake.admitting or self.kv.pool.asleep:
            return
        running = self.running.sequences
        if self._waiting.live.eligible:
            live = [sequence for sequence in running if not sequence.background]
            self._admit_from(self._waiting.live, live, self._budget.rows(live))
        if self._waiting.best_effort.eligible and not self._best_effort_paused:
            best_effort = [sequence for sequence in running if sequence.background]
            self._admit_from(self._waiting.best_effort, best_effort, self._best_effort.max_idle_rows)

    def _admit_from(self, queue: FairQueue[Sequence], running: list[Sequence], rows: int) -> None:
        """Starts sequences of one queue, whose running ones have so many rows of a step."""
        prompts = PrefillAdmission(running, rows, self._block_tokens, self.kv.cached_tokens)
        while (sequence := queue.peek(prompts.choose)) is not None:
            if self.running.disk_reads.begin(sequence):
                continue
            if len(self.running.sequences) < self._max_running and self._start(sequence):
                prompts.add(sequence)
            elif not sequence.account_queue.at_cap and not self._preempt_for_turn(sequence):
                return

    def _start(self, sequence: Sequence) -> bool:
        """Leases the longest cached prefix and takes blocks for the rest; False, and nothing taken, if too few."""
        kv = self.kv
        if kv.still_short(sequence):
            self._counters["short_of_blocks"] += not sequence.background
            return False
        match = kv.lease_prefix(sequence)
        capped = exceeds_cap(sequence.account_queue, match)
        # one block stays for the next tokens of each that runs
        if capped or not kv.fits(sequence, match, len(self.running.sequences)):
            kv.cancel_lease(sequence, match, short=not capped)
            if capped:
                self._waiting.queue_of(sequence).skip(sequence.account_queue)
            else:
                self._counters["short_of_blocks"] += not sequence.background
            return False
        sequence.prefix_source = None
        self._waiting.start(sequence)
        kv.allocate(sequence, match)
        self._waiting.images.start(sequence)
        if sequence.start_order < 0:
            self._first_start(sequence)
        self.running.add(sequence)
        return True

    def _first_start(self, sequence: Sequence) -> None:
        found = sequence.computed + sequence.loading_blocks * self._block_tokens
        sequence.cached_tokens = min(found, sequence.prompt_tokens)
        self._counters["cached_tokens"] += sequence.cached_tokens
        self.intake.report_first_start(sequence)

    def _preempt_for_turn(self, sequence: Sequence) -> bool:
        """Makes room for the next sequence in turn, which finds no place or too few blocks: at the cost of the
        background, else of the account that has most. False where nothing gives way, or not before a step in flight
        has landed."""
        if sequence.background:
            return False
        if self.running.best_effort:
            return self._preempt_best_effort()
        running = self.running.sequences
        missing_blocks = None if len(running) == self._max_running else self.kv.blocks_for(len(sequence.tokens))
        accounts = self._waiting.live.running_accounts
        victim = victim_for_turn(running, accounts, sequence.account_queue, missing_blocks)
        if victim is None:
            return False
        if victim.inflight_steps:
            self._preempt_next = victim
            return False
        self.preempt(victim)
        self._counters["preemptions_share"] += 1
        return True

    def _preempt_best_effort(self) -> bool:
        """Preempts the youngest background sequence that is not in flight: none is launched while a live one waits."""
        for sequence in [each for each in self.running.sequences[::-1] if each.background and not each.inflight_steps]:
            self.preempt(sequence)
            self._counters["preemptions_background"] += 1
            return True
        return False

    # Outcome

    def _cache(self, sequence: Sequence) -> None:
        """Lets others find what it has computed; groups change where it reads others' blocks for its own."""
        if self.kv.cache_full_blocks(sequence, in_flight=bool(self.running.inflight)):
            self._regroup()

    def _regroup(self) -> None:
        if self._groups is not None:
            self._groups.invalidate()

    def _report_token(
        self, sequence: Sequence, token: int, logprobs: tuple[float, list[int], list[float]] | None
    ) -> None:
        sequence.tokens.append(token)
        sequence.account_queue.level += sequence.account_queue.generated_cost
        outputs = self.intake.outputs[sequence.owner]
        outputs.ids.append(sequence.id)
        outputs.tokens.append(token)
        if logprobs is not None:
            outputs.logprobs.append(TokenLogprobs(sequence.id, *logprobs))
        if sequence.matcher is not None:
            self._follow_grammar(sequence, sequence.matcher, outputs)
        elif token in sequence.stop_ids:
            self._end(sequence, FinishReason.STOP)
        elif len(sequence.tokens) >= sequence.max_total_tokens:
            self._end(sequence, FinishReason.LENGTH)

    def _follow_grammar(self, sequence: Sequence, matcher: GrammarMatcher, outputs: PendingOutputs) -> None:
        """Keeps the text to its grammar behind the sampled token, and appends what alone may follow, which one step
        computes. What a step in flight samples for the sequence is the first of that, and left out."""
        count, account = len(sequence.tokens), sequence.account_queue
        ending = sequence.follow_grammar(matcher)
        if forced := len(sequence.tokens) - count:
            outputs.add_forced(sequence.tokens[count:])
            self._counters["forced_tokens"] += forced
            if sequence.launched == count and sequence.inflight_steps:
                self.running.inflight[-1].unwanted.add(sequence)
        account.level += forced * account.generated_cost + matcher.mask_us * account.mask_cost
        if ending is not None:
            self._end(sequence, *ending)

    def _end_not_finite(self, sequence: Sequence) -> None:
        """Ends a sequence with an error. The blocks that it read are not matched again, except those that the sampled
        tokens of others vouch for."""
        if sequence.finite_samples <= 0:
            self.kv.forget_suspect(sequence, self.running.sequences)
        self._counters["not_finite"] += 1
        log("not_finite", level="warning", computed=sequence.computed, emitted=sequence.emitted)
        self._end(sequence, FinishReason.ERROR, NOT_FINITE)

    def _end_stale(self) -> None:
        """Ends sequences that would read blocks of others by now, and makes what they read unfindable."""
        for sequence in self.kv.with_stale_pages(self.running.sequences):
            if sequence.lease is not None:
                self.kv.tree.forget(sequence.lease, 0)
            self._counters["stale_reads"] += 1
            log("stale_read", level="error", computed=sequence.computed, emitted=sequence.emitted)
            self._end(sequence, FinishReason.ERROR, STALE_BLOCKS)

    def _end(self, sequence: Sequence, reason: FinishReason, message: str = "") -> None:
        """The one end of every sequence; its owner is sent the reason."""
        if sequence.start_order >= 0 and not sequence.background:
            prompt, output = sequence.prompt_tokens, sequence.max_total_tokens - sequence.prompt_tokens
            computed = PROMPT_TOKEN * (sequence.charged_tokens - sequence.cached_tokens)
            self._waiting.estimator.finished(
                PROMPT_TOKEN * prompt + GENERATED_TOKEN * output, computed + GENERATED_TOKEN * sequence.emitted
            )
        self.running.end(sequence)
        self.intake.report_end(sequence, reason, message)

    def check(self) -> None:
        """Every block is free, cached, private to one sequence or deferred, and every sequence is in one place."""
        self.running.check()
        self._waiting.check()
