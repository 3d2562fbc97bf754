"""A replica without sockets or a process: the real scheduler, tree and block account over the stamp engine.

After every step it checks all pools, who reads which block, and that each token of each sequence came exactly once.
"""

import random
from array import array
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from engine.kv_blocks.block_pool import BlockPool, WakeExtents, blocks_of
from engine.kv_blocks.kv_manager import KVManager
from engine.kv_blocks.windowed_group import WindowedGroup
from engine.memory.errors import OutOfDeviceMemory
from engine.protocol.frames import Reject, SequenceFinished, SequenceStarted, StepOutputs, Submit, TokenLogprobs
from engine.protocol.types import FinishReason, RejectReason, SamplingParams, SchedulingTerms, Scope, ScopeKind
from engine.replica.public_prefixes import publish_prefixes
from engine.scheduling.best_effort import IDLE_STEP_ROWS, STEP_SLACK
from engine.scheduling.scheduler import NOT_FINITE, OUT_OF_MEMORY, Scheduler
from engine.scheduling.step_loop import StepLoop
from engine.scheduling.step_plan import StepPlan
from engine.scheduling.token_budget import SchedulerConfig
from engine.sequences.sequence import DEFAULT_TERMS, FORCED_MAX, GrammarMatcher, Sequence, SequenceState
from engine.sequences.validation import RequestValidator, SubmitRejected
from engine.step.cost_model import CostModel
from engine.step.executor import CopyOutcome, InflightStep, RunnerOutput
from engine.step.layout import Int32s, unpack_step
from engine.tiers.disk_blocks import DiskBlocks
from engine.tiers.host_blocks import HostBlocks
from prefixcache.names import BlockNames
from prefixcache.namespace import CacheShare
from prefixcache.tier import TierIndex
from prefixcache.tree import PrefixTree
from tests.engine.scheduling.simulation.windows import WindowSize, WindowStamps
from tests.support.stamp_engine import PUBLIC, Claim, Rule, StampFlight, Stamps, logprobs_of, solo
from tests.support.stamp_tier import StampFiles, StampTier


@dataclass(slots=True)
class Heard:
    """What the owner of one sequence was told so far."""

    sequence: Sequence
    submit: Submit
    tokens: list[int] = field(default_factory=list)
    started: SequenceStarted | None = None
    finish: SequenceFinished | None = None
    reject: Reject | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one launch: it raises `error`, or lands with it, or its row `glitch` is not finite."""

    error: Exception | None = None
    late: bool = False
    glitch: int | None = None


@dataclass(slots=True)
class SimulatedFlight:
    """Lets things happen while it is in the air."""

    meanwhile: Callable[[], None]
    outcome: StampFlight | Exception

    def wait(self) -> RunnerOutput:
        self.meanwhile()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome.wait()


@dataclass(slots=True)
class RuleMatcher:
    """A GrammarMatcher by a rule of the stamps: a token that was sampled by another mask than its own shows. A mask
    costs what `cost_us` says of the number of tokens before it."""

    rule: Rule
    vocabulary: int
    cost_us: Callable[[int], float] = lambda written: 0.0
    written: list[int] = field(default_factory=list)
    finished: bool = False
    mask_us: float = 0.0

    def accept(self, token: int) -> str:
        assert self.rule.allowed(self.written, self.vocabulary)[token], "it was sampled by another mask"
        self.written.append(token)
        self.finished = len(self.written) >= self.rule.length
        return ""

    def forced(self, tokens: "array[int]") -> list[int]:
        count = len(self.written)
        assert tokens[len(tokens) - count :].tolist() == self.written
        ahead = list(self.written)
        while len(ahead) < min(self.rule.length, count + FORCED_MAX):
            only = self.rule.only(ahead, self.vocabulary)
            if only is None:
                break
            ahead.append(only)
        return ahead[count:]


@dataclass(slots=True, eq=False)
class RuleCompilation:
    """A GrammarCompilation: done at a time of the simulation, for naught where there is no rule."""

    rule: Rule | None
    vocabulary: int
    done_s: float
    clock: Callable[[], float]
    cost_us: Callable[[int], float]

    @property
    def done(self) -> bool:
        return self.clock() >= self.done_s

    def new_matcher(self, stop_ids: frozenset[int], given: Items[int] = ()) -> RuleMatcher:
        assert self.done
        if self.rule is None:
            raise SubmitRejected(RejectReason.GRAMMAR, "told to")
        matcher = RuleMatcher(self.rule, self.vocabulary, self.cost_us)
        for token in given:
            matcher.accept(token)
        return matcher


def masks_of(matchers: Items[GrammarMatcher | None]) -> Int32s:
    """As Grammars.masks."""
    width = max((each.vocabulary for each in matchers if isinstance(each, RuleMatcher)), default=1)
    allowed_MV = np.ones((len(matchers), -(-width // 32) * 32), np.uint8)
    for row, matcher in enumerate(matchers):
        if isinstance(matcher, RuleMatcher):
            matcher.mask_us = matcher.cost_us(len(matcher.written))
            allowed_MV[row, : matcher.vocabulary] = matcher.rule.allowed(matcher.written, matcher.vocabulary)
    return np.packbits(allowed_MV, axis=1, bitorder="little").view(np.int32)


class Simulation:
    """Set sizes, submit, step; `heard` has what came back. The clock is one second per step.

    It is the executor of its loop, and hands every launch to the stamps, which check every slot. `misfortune` says what
    goes wrong with the next launch, `meanwhile` is called before each landing. `moves` counts what became of memory.
    """

    def __init__(
        self,
        blocks: int = 64,
        block_tokens: int = 4,
        step_tokens: int = 16,
        sequences: int = 8,
        waiting: int = 64,
        vocabulary: int = 1000,
        stop_ids: Items[int] = (),
        context_tokens: int = 4096,
        share: CacheShare | None = None,
        depth: int = 1,
        prompt_step_tokens: int | None = None,
        costs: CostModel | None = None,
        gap_ms: float = 0.0,
        public: Items[Items[int]] = (),
        extent_blocks: int | None = None,
        mapped: Items[int] | None = None,
        least: int | None = None,
        windows: Items[WindowSize] = (),
        host_slots: int | None = None,
        loading_looks: Callable[[], int] = int,
        disk_places: int | None = None,
        disk_fault: Callable[[], CopyOutcome | None] = lambda: None,
    ) -> None:
        """None: one extent; all of them are mapped; no block is ever without memory; and host and disk take in nothing.
        loading_looks: how often they are asked for a load in vain."""
        self.stamps = Stamps(blocks, block_tokens, context_tokens, vocabulary, stop_ids, extent_blocks, mapped, depth)
        self.limits, self.costs = self.stamps.limits, costs
        names = None if host_slots is None else BlockNames(bytes(32))
        self.tree = PrefixTree(blocks, block_tokens, lambda: self.seconds, names)
        self.tier = StampTier(self.stamps, host_slots or 0, loading_looks)
        self.host: HostBlocks[Sequence] | None = None
        if host_slots is not None:
            self.host = HostBlocks(TierIndex(0, lambda: self.seconds), block_tokens, 100)
            if disk_places is not None:
                self.tier.files = files = StampFiles(self.tier, disk_places, loading_looks, disk_fault)
                index = TierIndex(0, lambda: self.seconds)
                self.host.disk = DiskBlocks(
                    index, self.host.index, files, self.tier.copied, lambda: self.seconds, block_bytes=100
                )
        self.account = BlockPool(blocks, extent_blocks, self.stamps.mapped, least)
        self.depth, self.extent_blocks = depth, self.stamps.extent_blocks
        self.blocks, self.block_tokens = blocks, block_tokens
        self.sequences = sequences
        self.misfortune: Callable[[], Fault] = Fault
        self.meanwhile: Callable[[], None] = lambda: None
        self.masking: Callable[[float], None] = lambda took_us: None  # hears what a step's masks took
        prompt_tokens = prompt_step_tokens or step_tokens
        self.config = SchedulerConfig(
            step_tokens, prompt_tokens, sequences, waiting, gap_ms, costs, groups=1 + len(windows)
        )
        self.seconds = 0.0
        self.windows = [WindowStamps(size, block_tokens) for size in windows]
        groups = [
            WindowedGroup(index, each.layout.span, block_tokens, each.new_pool(), lambda: self.seconds)
            for index, each in enumerate(self.windows)
        ]
        kv = KVManager(self.tree, self.account, groups, self.host)
        self.scheduler = Scheduler(kv, self.config, lambda: self.seconds)
        self.memories = [self.stamps, *self.windows]
        self.loop = StepLoop(self, self.scheduler, self.memories, self._mask, self.tier)
        assert self.loop.extents is not None
        self.extents = self.loop.extents
        self.door = RequestValidator(
            self.stamps.revision,
            self.stamps.layout.name,
            block_tokens,
            min(context_tokens, self.account.min_blocks * block_tokens - sum(map(len, public))),
            vocabulary,
            frozenset(stop_ids),
            share or CacheShare(),
        )
        self.heard: dict[tuple[int, int], Heard] = {}
        self.gone: set[int] = set()
        self.moves: Counter[str] = Counter()
        self._asked: dict[Sequence, Submit] = {}
        self._rules: dict[Sequence, Rule] = {}
        self._numbers: dict[object, int] = {}
        self._lost: set[Sequence] = set()  # what is launched for them builds on a step that is never done
        self._not_finite: dict[Sequence, set[int]] = {}  # what was read of that kind
        self._wrong: list[Exception] = []
        self._smallest: set[Sequence] = set()  # those whose step of one row had too little memory
        publish_prefixes(
            self.loop, self.scheduler, [self.door.public_sequence(array("I", prefix)) for prefix in public]
        )

    def submit(
        self,
        id: int,
        tokens: Items[int],
        scope: Scope | None = None,
        max_tokens: int = 4,
        owner: int = 1,
        sampling: SamplingParams | None = None,
        n: int = 1,
        stop_ids: Items[int] = (),
        terms: SchedulingTerms = DEFAULT_TERMS,
        deadline_ms: int = 0,
        rule: Rule | None = None,
        compiles: bool = True,
        compiling_s: float = 0.0,
        mask_us: Callable[[int], float] = lambda written: 0.0,
    ) -> list[Heard]:
        """Raises Refused, with nothing changed. A rule is its grammar, which takes so long, and may not compile."""
        submit = Submit(
            id=id,
            tokens=array("I", tokens).tobytes(),
            scope=scope or Scope(),
            sampling=sampling or SamplingParams(),
            max_tokens=max_tokens,
            stop_ids=list(stop_ids),
            n=n,
            terms=terms,
            deadline_ms=deadline_ms,
        )
        sequences = self.door.sequences(submit, owner, self.seconds)
        if rule is not None:
            done_s, vocabulary = self.seconds + compiling_s, self.door.vocabulary
            own = rule if compiles else None
            compilation = RuleCompilation(own, vocabulary, done_s, lambda: self.seconds, mask_us)
            for sequence in sequences:
                sequence.compilation = compilation
                self._rules[sequence] = rule
        self.scheduler.intake.add(sequences)
        entries = [Heard(sequence, submit) for sequence in sequences]
        self._asked |= {sequence: submit for sequence in sequences}
        self.heard |= {(owner, entry.sequence.id): entry for entry in entries}
        return entries

    def plan(self) -> StepPlan | None:
        return self.scheduler.next_batch()

    def fly(self, plan: StepPlan) -> RunnerOutput:
        """Launches what was planned last, and lands it."""
        return self.launch(plan.packed).wait()

    @property
    def kept_to_rules(self) -> int:
        """How many texts ended where their grammar does."""
        matchers = [sequence.matcher for sequence in self._rules]
        return sum(matcher is not None and matcher.finished for matcher in matchers)

    @property
    def compiling(self) -> bool:
        """Whether something waits for its grammar, or for a disk."""
        waiting = self.scheduler.intake.waiting
        return bool(waiting._compiling or waiting.fetching)

    def _mask(self, flight: InflightStep, matchers: list[GrammarMatcher | None]) -> Callable[[], None]:
        masks_MW = masks_of(matchers)
        self.masking(sum(matcher.mask_us for matcher in matchers if matcher is not None))
        return lambda: self.sample(flight, masks_MW)

    def sample(self, flight: InflightStep, masks_MW: Int32s) -> None:
        """Masks come when nothing else is in the air, be more planned or not, and may find too little memory too."""
        assert isinstance(flight, SimulatedFlight)
        plan, fault = self.scheduler.running.inflight[0], self.misfortune()
        if isinstance(flight.outcome, Exception):
            return
        if fault.error is not None:
            if isinstance(fault.error, OutOfDeviceMemory) and sum(plan.chunks) == 1:
                self._smallest.add(plan.sequences[0])
            raise fault.error
        try:
            assert len(self.loop._inflight) == 1, "tokens before its own are not known yet"
            assert len(masks_MW) == len(plan.masked_sequences)
            self.stamps.sample(flight.outcome, masks_MW)
        except Exception as error:
            self._wrong.append(error)
            raise
        self._note_not_finite(plan, flight.outcome.wait())

    def launch(self, packed: Int32s) -> InflightStep:
        """Runs the step on the stamps, which check every slot against the plan's sequences."""
        plan = self.scheduler.running.inflight[-1]
        assert plan.packed is packed
        fault = self.misfortune()
        if len(self.scheduler.running.inflight) == 1:
            self._lost = set()
        if isinstance(fault.error, OutOfDeviceMemory) and sum(plan.chunks) == 1:
            self._smallest.add(plan.sequences[0])
        if fault.error is not None:
            if not fault.late:
                raise fault.error
            self.stamps.lose(packed)
            self._lost = set(plan.sequences)
            return SimulatedFlight(self.meanwhile, fault.error)
        try:
            return SimulatedFlight(self.meanwhile, self._compute(plan, fault.glitch))
        except Exception as error:
            self._wrong.append(error)  # which the loop takes for a step that failed
            raise

    def warm_up(self) -> bool:
        return False

    # What a machine has done to it

    @property
    def asleep(self) -> bool:
        return self.account.asleep

    def sleep(self, max_kept_blocks: int, fails: bool = False) -> list[int]:
        """What is kept. Where it fails, it is awake as before."""
        self.land()
        self.scheduler.preempt_all()
        mapped = [memory.mapped for memory in self.memories]
        kept = self.extents.sleep(max_kept_blocks)
        self.loop.zero_freed()
        if fails:
            self.extents.finish_wake([*map(WakeExtents, mapped, kept)])
        else:
            self.stamps.sleep(kept[:1])
            for window, blocks in zip(self.windows, kept[1:], strict=True):
                window.give_back(blocks)
        self.moves.update(sleeps=not fails, failed_sleeps=fails, kept_blocks=sum(map(len, kept)))
        self.listen()
        return kept[0]

    def wake(self, extents: int = 0, fails: bool = False) -> None:
        """Where it fails, it sleeps as before."""
        waking = self.extents.plan_wake([extents] * len(self.memories))
        if not fails:
            self.stamps.wake([waking[0].extents], [waking[0].restore])
            for window, plan in zip(self.windows, waking[1:], strict=True):
                window.come_back(plan.extents, plan.restore)
            self.extents.finish_wake(waking)
        self.moves.update(wakes=not fails, failed_wakes=fails)
        self.listen()

    def grow(self, count: int, group: int = 0) -> None:
        extents = self.scheduler.kv.pools[group].extents_to_grow(count)
        self.loop.grow(extents, group)
        self.loop.sweep()
        self.moves["grown_extents"] += len(extents)
        self.listen()

    def shrink(self, count: int, group: int = 0) -> int:
        """How many extents it gave up."""
        self.land()
        shrinking = self.loop.shrink(count, group)
        self.moves.update(shrunk_extents=len(shrinking.extents), copied_blocks=len(shrinking.sources))
        self.moves["copied_secrets"] += len(shrinking.secret)
        self.listen()
        return len(shrinking.extents)

    # What it does

    def _compute(self, plan: StepPlan, glitch: int | None) -> StampFlight:
        self._assert_within_limits(plan)
        self._assert_scopes_disjoint(plan)
        self._assert_caps_kept(plan)
        self._assert_live_first(plan)
        self.moves["bounded_rows"] += sum(sequence.row_turn > 0 for sequence in plan.sequences)
        self._assert_flights_apart()
        for index, window in enumerate(self.windows):
            window.launch(index, plan, self.block_tokens)
        self.stamps.claims = [self._claim(sequence) for sequence in plan.sequences]
        self.stamps.glitch, self._lost = glitch, set()
        flight = self.stamps.launch(plan.packed)
        if flight.lacking is None:
            self._note_not_finite(plan, flight.wait())
        return flight

    def _note_not_finite(self, plan: StepPlan, sampled: RunnerOutput) -> None:
        for sequence, row in zip(plan.sequences, plan.rows, strict=True):
            if row >= 0 and sampled.tokens_R[row] < 0:
                slots = (~self.stamps.finite_GK).any(0).nonzero()[0]
                self._not_finite.setdefault(sequence, set()).update((slots // self.block_tokens).tolist())

    def step(self) -> bool:
        """One turn of the loop; False when nothing could run."""
        turned = self.loop.turn()
        self.loop.sweep()
        if self._wrong:
            raise self._wrong[0]
        self.listen()
        return turned

    def land(self) -> None:
        """Lands all that is in the air, and launches nothing."""
        self.loop.land_all()
        self.loop.sweep()
        assert not self.scheduler.running.inflight
        if self._wrong:
            raise self._wrong[0]
        self.listen()

    def listen(self) -> None:
        """Takes the news and checks everything."""
        self.seconds += 1
        for owner, progress in self.scheduler.intake.take_outputs().items():
            assert owner not in self.gone, "news for an owner that is gone"
            self._hear(owner, progress)
        for sequence, reject in self.scheduler.intake.waiting.take_rejects():
            self._hear_reject(sequence, reject)
        self.scheduler.check()
        self._assert_erased()
        self._assert_kept_to_rules()

    def run(self, steps: int = 10_000) -> None:
        """Until nothing is left to do."""
        for _ in range(steps):
            if self.loop.idle:
                return
            assert self.step() or self.compiling, "sequences wait and nothing can run"
        raise AssertionError(f"not done after {steps} steps")

    def drop(self, owner: int) -> None:
        self.gone.add(owner)
        self.scheduler.intake.drop(owner)

    def assert_all_finished(self) -> None:
        """Every sequence ended once with the text of a solo run, and no block is held by anybody."""
        for (owner, id), entry in self.heard.items():
            assert entry.sequence.state == SequenceState.ENDED
            if owner in self.gone or entry.reject is not None:
                continue
            assert entry.finish is not None, f"sequence {id} of {owner} never finished"
            expected, reason = self.expected(entry)
            assert entry.finish.completion_tokens == len(entry.tokens)
            if entry.finish.reason in (FinishReason.CANCELLED, FinishReason.ERROR, FinishReason.GRAMMAR):
                assert entry.finish.message != OUT_OF_MEMORY or entry.sequence in self._smallest
                assert entry.tokens == expected[: len(entry.tokens)]
            else:
                assert (entry.tokens, entry.finish.reason) == (expected, reason)
        assert self.account.free_blocks + self.tree.cached_blocks + self.account.absent_blocks == self.account.total
        pinned = self.tree.cached_blocks - self.tree.unused_blocks
        assert pinned == len(self.scheduler.kv.public_prefixes.pages), "a block is pinned by nobody that lives"

    def expected(self, entry: Heard) -> tuple[list[int], str]:
        """Text and finish of a solo run, from what was submitted alone."""
        submit, stamps = entry.submit, self.stamps
        prompt = array("I", submit.tokens).tolist()
        seed = (submit.sampling.seed + entry.sequence.id - submit.id) % 2**63
        longest = min(self.door.max_total_tokens, len(prompt) + submit.max_tokens)
        sampling = msgspec.structs.replace(submit.sampling, seed=seed)
        rule = self._rules.get(entry.sequence)
        return solo(prompt, sampling, longest, [*submit.stop_ids, *stamps.stop_ids], stamps.vocabulary, rule)

    def _hear(self, owner: int, progress: StepOutputs) -> None:
        tokens = array("I", progress.tokens)
        assert len(tokens) == sum(progress.counts)
        at, row = 0, 0
        for started in progress.started:
            entry = self.heard[owner, started.id]
            assert entry.started is None, "started twice"
            assert entry.reject is None, "started after its rejection"
            entry.started = started
        for id, count in zip(progress.ids, progress.counts, strict=True):
            entry = self.heard[owner, id]
            assert entry.started is not None, "a token before its start"
            assert entry.finish is None, "a token after the end"
            entry.tokens += tokens[at : at + count]
            top = entry.submit.sampling.logprobs
            if top is not None:
                for token in tokens[at : at + count]:
                    assert progress.logprobs[row] == TokenLogprobs(id, *logprobs_of(token, top))
                    row += 1
            at += count
        assert row == len(progress.logprobs)
        for finish in progress.finished:
            entry = self.heard[owner, finish.id]
            assert entry.finish is None, "finished twice"
            assert entry.reject is None, "finished after its rejection"
            entry.finish = finish
            if finish.message == NOT_FINITE:
                self._assert_not_matched_again(entry.sequence)

    def _hear_reject(self, sequence: Sequence, reject: Reject) -> None:
        """It is of a whole request, of which nothing was told before and nothing will be."""
        assert reject.id == sequence.first_id
        by_grammar = reject.reason == RejectReason.GRAMMAR
        assert not sequence.background or by_grammar or "needed the place in the queue" in reject.message
        for id in range(reject.id, reject.id + sequence.choices):
            entry = self.heard[sequence.owner, id]
            assert entry.started is None, "rejected after its start"
            assert entry.finish is None
            assert entry.reject is None
            entry.reject = reject

    def _claim(self, sequence: Sequence) -> Claim:
        owner = self._owner(sequence)
        lost, secret = sequence in self._lost, sequence.terms.erase
        scope = PUBLIC if sequence not in self._asked else self._number(owner)
        return Claim(scope, self._number(sequence), owner is not sequence, lost, sequence.public_blocks, secret)

    def _owner(self, sequence: Sequence) -> object:
        """The owner of the sequence's KV, by its request: the sequence alone, or all of one scope and epoch."""
        if sequence not in self._asked:
            return PUBLIC
        scope = self._asked[sequence].scope
        return sequence if scope.kind == ScopeKind.REQUEST or not scope.id else (scope.kind, scope.id, scope.epoch)

    def _number(self, thing: object) -> int:
        return self._numbers.setdefault(thing, len(self._numbers))

    def _assert_within_limits(self, plan: StepPlan) -> None:
        assert sum(plan.chunks) <= self.config.prompt_step_tokens
        assert max(plan.chunks) > 1 or len(plan.chunks) <= self.config.step_tokens
        assert len(plan.sequences) <= self.config.max_sequences
        assert min(plan.chunks) >= 1
        assert all(sequence.launched < sequence.max_total_tokens for sequence in plan.sequences), (
            "the last token is computed"
        )

    def _assert_caps_kept(self, plan: StepPlan) -> None:
        """Nobody has more running, or several that hold more blocks, than the terms of all of them allow."""
        accounts: dict[tuple[bytes, bool], list[Sequence]] = {}
        for sequence in plan.sequences:
            accounts.setdefault((sequence.account, sequence.background), []).append(sequence)
        for own in accounts.values():
            places = [sequence.terms.sequences or self.sequences for sequence in own]
            assert len(own) <= max(places), "more run than its account's cap"
            blocks = {block for sequence in own for block in sequence.table[: sequence.block_count].tolist()}
            caps = [sequence.terms.blocks or self.blocks for sequence in own]
            assert len(blocks) <= max(caps), "they hold more than their account's cap"

    def _assert_live_first(self, plan: StepPlan) -> None:
        """Nothing of the background is launched while a live one could take its place, or, where nobody knows what that
        would cost, runs; and what it adds to a step is a small part of it."""
        behind = [sequence for sequence in plan.sequences if sequence.background]
        if not behind:
            return
        live = [sequence for sequence in plan.sequences if not sequence.background]
        assert not self.scheduler.intake.waiting.live_contended, "a live one waits, and not for its grammar alone"
        if self.costs is None:
            assert not any(self.scheduler.intake.waiting.live.running_accounts), "it is launched beside live ones"
            assert sum(plan.chunks) <= IDLE_STEP_ROWS
        elif live:
            with_us, live_us = self._predicted_us(plan, len(plan.sequences)), self._predicted_us(plan, len(live))
            assert with_us <= live_us * (1 + STEP_SLACK) + 1e-6, "live ones are slowed down"

    def _predicted_us(self, plan: StepPlan, first: int) -> float:
        """What a step of the first so many of its sequences is to take."""
        assert self.costs is not None
        chunks = plan.chunks[:first]
        starts = [sequence.launched - chunk for sequence, chunk in zip(plan.sequences, chunks, strict=False)]
        return self.costs.rows_us(sum(chunks)) + sum(map(self.costs.reads_us, starts, chunks))

    def _assert_scopes_disjoint(self, plan: StepPlan) -> None:
        owner_of: dict[int, object] = {}
        for sequence in plan.sequences:
            owner = self._owner(sequence)
            for at, block in enumerate(sequence.table[: sequence.block_count].tolist()):
                whose = PUBLIC if at < sequence.public_blocks else owner
                assert owner_of.setdefault(block, whose) == whose, f"block {block} is in two scopes"

    def _assert_kept_to_rules(self) -> None:
        """A matcher has taken all that was written and nothing more, through preemptions too."""
        for sequence in self._rules:
            if sequence.state != SequenceState.ENDED and isinstance(sequence.matcher, RuleMatcher):
                assert sequence.matcher.written == sequence.tokens[sequence.prompt_tokens :].tolist()
            assert sequence.start_order < 0 or sequence.matcher is not None, "it started without its grammar"

    def _assert_erased(self) -> None:
        """No secret is in a free block, nor in one that somebody else holds."""
        assert self.host is None or not self.host.index._unerased, "a slot is free and was not erased"
        secret = self.stamps.secret_blocks()
        assert secret.isdisjoint(self.account._free), "a block is free and was not erased"

    def _assert_flights_apart(self) -> None:
        """What a flight writes, the one before it neither reads nor writes for others."""
        older, younger = ([None, *self.scheduler.running.inflight])[-2:]
        if older is None:
            return
        writers: dict[int, Sequence] = {}
        batch = unpack_step(younger.packed)
        for index, sequence in enumerate(younger.sequences):
            start, end = batch.query_starts_S1[index : index + 2].tolist()
            writers |= {slot // self.block_tokens: sequence for slot in batch.slots_GT[0, start:end].tolist()}
        batch = unpack_step(older.packed)
        for index, sequence in enumerate(older.sequences):
            for block in batch.tables_GSW[0][index, : -(-int(batch.contexts_S[index]) // self.block_tokens)].tolist():
                assert writers.get(block, sequence) is sequence, f"block {block} is written while it is read"

    def _assert_not_matched_again(self, sequence: Sequence) -> None:
        if sequence.namespace is not None:
            published = self.scheduler.kv.public_prefixes
            public = published.find(sequence.tokens[:-1])
            namespace = sequence.namespace._replace(behind=published.pages[public[-1]] if public else 0)
            tokens = sequence.tokens[len(public) * self.block_tokens : -1]
            lease = self.tree.match(namespace, tokens, sequence.retention)
            assert self._not_finite[sequence].isdisjoint(blocks_of(lease.blocks)), "what is not finite can be found"
            self.account.free(self.tree.release(lease))


TENANTS = [Scope(ScopeKind.TENANT, bytes([letter]) * 16) for letter in b"abc"]
SCOPES = [*TENANTS, Scope(ScopeKind.USER, b"a" * 16), Scope(ScopeKind.TENANT, b"a" * 16, 1), Scope()]
SCOPES += [Scope(account=b"a" * 16), Scope(ScopeKind.PUBLIC, b"p" * 16, account=b"b" * 16)]
GROUPING = CostModel(
    ((1, 1.0),), key_us=1.0, shared_key_us=0.5, pair_us=0.1, prompt_pair_us=0.1, segment_us=0.0, groups_us=0.0
)


class Chaos:
    """One random life of a replica: arrivals that share prefixes across scopes, cancels, leaving owners, preemptions,
    failing steps, devices without memory, numbers that are not finite, tiny pools whose memory comes and goes, sleeps.
    Everything follows from the seed."""

    def __init__(self, seed: int, **more: Any) -> None:
        """`more`: what else its simulation gets."""
        self.random = pick = random.Random(seed)
        block_tokens, blocks = pick.choice([1, 2, 3, 4]), pick.randint(3, 30)
        self.motion = pick.choice([0.0, 0.1, 0.5])
        blocks += pick.randint(0, 30) if self.motion else 0
        self.vocabulary = pick.choice([3, 7, 50])
        self.prefixes = [self._tokens(pick.randint(0, 5 * block_tokens)) for _ in range(3)]
        public = [self.prefixes[0][: len(self.prefixes[0]) // block_tokens * block_tokens]]
        extent_blocks, least = None, blocks
        if self.motion:
            extent_blocks, least = pick.randint(1, -(-blocks // 2)), pick.randint(-(-blocks // 4), blocks)
        self.simulation = simulation = Simulation(
            depth=pick.choice([1, 2, 2]),
            blocks=blocks,
            block_tokens=block_tokens,
            step_tokens=pick.choice([1, 2, 5, 8, 16]),
            sequences=pick.randint(1, 6),
            waiting=pick.randint(4, 12),
            vocabulary=self.vocabulary,
            stop_ids=[0] if pick.random() < 0.3 else [],
            share=pick.choice([None, None, CacheShare(floor=2, cap=5), CacheShare(cap=0)]),
            costs=pick.choice([None, GROUPING]),
            gap_ms=pick.choice([0.0, 0.0, 1e-3]),
            public=public if 0 < len(public[0]) <= least // 2 * block_tokens and pick.random() < 0.4 else [],
            extent_blocks=extent_blocks,
            least=least,
            **more,
        )
        self.terms = {
            scope.account or scope.id: SchedulingTerms(
                weight=pick.choice([0.5, 1.0, 3.0]),
                sequences=pick.choice([None, None, 1, 2]),
                blocks=pick.choice([None, None, 3, 10]),
                floor_blocks=pick.choice([None, 3]),
                cap_blocks=pick.choice([None, None, 6]),
                keep_s=pick.choice([None, None, 0.0, 3.5, 20.5]),
                erase=pick.random() < 0.4,
            )
            for scope in SCOPES
        }
        self.deadlines_ms = pick.choice([[0], [0], [0, 3000, 20_000]])
        self.background = pick.choice([0.0, 0.3, 0.5])
        self.scopes = pick.sample(SCOPES, pick.randint(1, 4))
        self.arrivals = pick.randint(4, 12)
        self.unrest = pick.choice([0.0, 0.1, 0.3])
        self.poverty = pick.choice([0.0, 0.0, 0.2, 0.7])
        self.ruled = pick.choice([0.0, 0.0, 0.5, 1.0])
        simulation.misfortune, simulation.meanwhile = self._fault, self._meanwhile
        self.refused = 0
        self._id = 0

    def run(self) -> Simulation:
        pick, simulation = self.random, self.simulation
        while self.arrivals or not simulation.loop.idle:
            if self.arrivals and pick.random() < 0.5:
                self.arrivals -= 1
                self._arrive()
            if pick.random() < self.unrest:
                self._disturb()
            if pick.random() < self.motion * (1 + 4 * simulation.asleep):
                self._move()
            rests = simulation.scheduler.intake.idle or simulation.compiling
            rests |= simulation.asleep or not simulation.scheduler.intake.admitting
            assert simulation.step() or rests or simulation.scheduler.intake.idle, "sequences wait and nothing can run"
            assert simulation.seconds < 5000, "no end in sight"
        simulation.assert_all_finished()
        counters = simulation.scheduler.load(draining=False).counters
        assert counters.get("stale_reads", 0) == counters["stale_pages"] == 0, "a page moved and somebody was not told"
        return simulation

    def _move(self) -> None:
        """Memory goes, or comes back. Free blocks are in any order, as after a long life."""
        pick, simulation = self.random, self.simulation
        extents = simulation.stamps.extents
        fails = pick.random() < 0.2
        pick.shuffle(simulation.account._free)
        if simulation.asleep:
            simulation.wake(pick.randint(0, extents), fails)
            simulation.scheduler.intake.admitting = True
        elif pick.random() < 0.2:
            simulation.sleep(pick.choice([0, pick.randint(1, 8), 30]), fails)
        elif pick.random() < 0.2:
            simulation.scheduler.intake.admitting = not simulation.scheduler.intake.admitting
        elif pick.random() < 0.5:
            simulation.grow(pick.randint(1, extents))
        else:
            simulation.shrink(pick.choice([1, 1, 2, extents]))

    def _fault(self) -> Fault:
        pick = self.random
        late = pick.random() < 0.5
        if pick.random() < self.poverty * self.unrest:
            return Fault(OutOfDeviceMemory("told to"), late)
        if pick.random() < self.unrest / 10:
            return Fault(RuntimeError("told to"), late)
        return Fault(glitch=pick.randrange(1000) if pick.random() < self.unrest / 4 else None)

    def _meanwhile(self) -> None:
        if self.random.random() < self.unrest:
            self._leave()

    def _arrive(self) -> None:
        pick = self.random
        n = pick.choice([1, 1, 1, 2, 4])
        scope = pick.choice(self.scopes)
        sampling = SamplingParams(
            temperature=pick.choice([0.0, 1.0]),
            seed=pick.randint(0, 2**63 - 1),
            presence_penalty=pick.choice([0.0, 0.0, 0.5]),
            logprobs=pick.choice([None, None, 0, 2]),
        )
        rule = Rule(pick.randint(1, 24)) if pick.random() < self.ruled else None
        if rule is None:
            endless, early = pick.random() < 0.1, pick.choice([0, 0, 0, 1, 3])
            sampling = msgspec.structs.replace(sampling, ignore_eos=endless, min_tokens=early)
        terms = self.terms[scope.account or scope.id]
        if pick.random() < self.background:
            terms = msgspec.structs.replace(terms, background=True)
        try:
            self.simulation.submit(
                self._id,
                [*pick.choice(self.prefixes), *self._tokens(pick.randint(1, 6))],
                scope,
                max_tokens=pick.randint(1, 12),
                owner=pick.randint(1, 3) if len(self.simulation.gone) == 0 else 4,
                sampling=sampling,
                n=n,
                stop_ids=[1] if pick.random() < 0.2 else [],
                terms=terms,
                deadline_ms=pick.choice(self.deadlines_ms),
                rule=rule,
                compiles=pick.random() < 0.95,
                compiling_s=pick.choice([0, 0, 1, 5, 30]),
                mask_us=pick.choice([lambda written: 0.0, lambda written: 1e6, lambda written: 3e5 * written]),
            )
        except SubmitRejected:
            self.refused += 1
        self._id += n

    def _disturb(self) -> None:
        sequences = [entry.sequence for entry in self.simulation.heard.values()]
        running = [each for each in sequences if each.state == SequenceState.RUNNING and not each.inflight_steps]
        if running and self.random.random() < 0.5:
            self.simulation.scheduler.preempt(self.random.choice(running))
        else:
            self._leave()

    def _leave(self) -> None:
        if self.simulation.heard and self.random.random() < 0.9:
            owner, id = self.random.choice(list(self.simulation.heard))
            if owner not in self.simulation.gone:
                self.simulation.scheduler.intake.cancel(owner, [id, 10**9])
        elif not self.simulation.gone:
            self.simulation.drop(self.random.randint(1, 3))

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self.vocabulary) for _ in range(count)]
