"""An encoder's replica without sockets, a process or a model: its scheduler and the loop over vectors that say which
text they were made of. After every step it checks the queues, and that each text got its own vector, once."""

import random
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from engine.memory.errors import OutOfDeviceMemory
from engine.protocol.frames import Reject, SequenceFinished, SequenceStarted, Submit
from engine.protocol.types import FinishReason, Pooling, SamplingParams, SchedulingTerms, Scope, ScopeKind
from engine.scheduling.encoder_scheduler import EncoderScheduler
from engine.scheduling.step_loop import StepLoop
from engine.scheduling.token_budget import SchedulerConfig
from engine.sequences.sequence import Sequence
from engine.sequences.validation import RequestValidator, SubmitRejected
from engine.step.encoder_layout import POOLINGS, unpack_texts
from engine.step.executor import InflightStep, RunnerOutput
from engine.step.layout import Int32s
from engine.step.limits import ExecutorLimits

VOCABULARY = 1000
CONTEXT_TOKENS = 64
ACCOUNTS = [bytes([65 + index]) * 16 for index in range(3)]


def stamped(tokens: Items[int], pooling: Pooling) -> NDArray[np.float32]:
    """What this runner makes of a text."""
    return np.array([len(tokens), POOLINGS.index(pooling), sum(tokens), *list(tokens)[:2]][:4], np.float32)


@dataclass(slots=True)
class Heard:
    """What the owner of one text was told so far."""

    sequence: Sequence
    tokens: list[int]
    started: SequenceStarted | None = None
    finish: SequenceFinished | None = None
    reject: Reject | None = None
    vector: bytes | None = None


@dataclass(slots=True)
class Landing:
    outcome: RunnerOutput | Exception
    meanwhile: Callable[[], None]

    def wait(self) -> RunnerOutput:
        self.meanwhile()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@dataclass
class Simulation:
    """It is the executor of its loop. The clock is one second per step; `steps` are the texts of each, as they ran."""

    step_tokens: int = 32
    sequences: int = 8
    waiting: int = 16
    depth: int = 1
    misfortune: Callable[[], Exception | None] = lambda: None
    meanwhile: Callable[[], None] = lambda: None
    seconds: float = 0.0
    heard: dict[tuple[int, int], Heard] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    steps: list[list[list[int]]] = field(default_factory=list)
    costs: None = None

    def __post_init__(self) -> None:
        config = SchedulerConfig(self.step_tokens, self.step_tokens, self.sequences, self.waiting)
        self.limits = ExecutorLimits(
            CONTEXT_TOKENS, VOCABULARY, (), self.step_tokens, self.step_tokens, self.sequences, self.depth
        )
        self.scheduler = EncoderScheduler(config, lambda: self.seconds)
        self.loop = StepLoop(self, self.scheduler)
        poolings = frozenset({Pooling.MEAN, Pooling.CLS})
        self.door = RequestValidator("1", "", 1, CONTEXT_TOKENS, VOCABULARY, frozenset(), poolings=poolings)

    def submit(
        self,
        id: int,
        tokens: Items[int],
        account: bytes = ACCOUNTS[0],
        owner: int = 1,
        pooling: Pooling | None = Pooling.MEAN,
        deadline_ms: int = 0,
        terms: SchedulingTerms = SchedulingTerms(),  # noqa: B008 frozen
    ) -> Heard:
        """Raises Refused, with nothing changed."""
        scope = Scope(ScopeKind.TENANT, account)
        packed = array("I", tokens).tobytes()
        submit = Submit(
            id, packed, scope, SamplingParams(), max_tokens=1, terms=terms, deadline_ms=deadline_ms, pooling=pooling
        )
        (sequence,) = self.door.sequences(submit, owner, self.seconds)
        self.scheduler.intake.add([sequence])
        self.heard[owner, id] = Heard(sequence, list(tokens))
        return self.heard[owner, id]

    def launch(self, packed: Int32s) -> InflightStep:
        texts = unpack_texts(packed)
        rows = [texts.tokens_T[a:b].tolist() for a, b in pairwise(texts.starts_S1.tolist())]
        assert len(rows) <= self.sequences
        assert len(rows) == 1 or sum(map(len, rows)) <= self.step_tokens, "more rows than a step may have"
        self.steps.append(rows)
        error = self.misfortune()
        if error is not None:
            return Landing(error, self.meanwhile)
        pairs = zip(rows, texts.poolings_S.tolist(), strict=True)
        vectors = np.stack([stamped(row, POOLINGS[pooling]) for row, pooling in pairs])
        return Landing(RunnerOutput(np.zeros(len(rows), np.int32), {}, vectors), self.meanwhile)

    def warm_up(self) -> bool:
        return False

    def step(self) -> bool:
        """One turn, and what it told."""
        turned = self.loop.turn()
        self.seconds += 1
        self.scheduler.check()
        self.listen()
        return turned

    def listen(self) -> None:
        for owner, progress in self.scheduler.intake.take_outputs().items():
            assert owner not in self.gone, "somebody is told who is gone"
            assert not progress.ids
            for started in progress.started:
                heard = self.heard[owner, started.id]
                assert heard.started is None, "a text starts twice"
                assert started.cached_tokens == 0
                heard.started = started
            for vector in progress.vectors:
                heard = self.heard[owner, vector.id]
                assert heard.vector is None, "a vector comes twice"
                assert heard.finish is None
                heard.vector = vector.values
            for finish in progress.finished:
                heard = self.heard[owner, finish.id]
                assert heard.finish is None, "a text ends twice"
                assert finish.completion_tokens == 0
                assert (heard.vector is not None) == (finish.reason == FinishReason.STOP)
                heard.finish = finish
                self._assert_own(heard)
        for sequence, reject in self.scheduler.intake.waiting.take_rejects():
            if sequence.owner in self.gone:
                continue
            heard = self.heard[sequence.owner, reject.id]
            assert heard.started is None, "a text that had started is rejected"
            assert heard.finish is heard.reject is None
            heard.reject = reject

    def _assert_own(self, heard: Heard) -> None:
        pooling = heard.sequence.pooling
        if heard.vector is not None:
            assert pooling is not None
            assert heard.vector == stamped(heard.tokens, pooling).tobytes(), "a text has another one's vector"

    def run(self) -> None:
        """Until nothing is left."""
        while not self.loop.idle:
            assert self.step() or self.loop.idle


def live(seed: int) -> Simulation:
    """One random life: arrivals of three accounts, cancels, leaving owners, deadlines, background, lost steps."""
    pick = random.Random(seed)
    life = Simulation(
        step_tokens=pick.choice([8, 32, 100]),
        sequences=pick.randint(1, 8),
        waiting=pick.randint(2, 20),
        depth=pick.choice([1, 2]),
    )

    def misfortune() -> Exception | None:
        luck = pick.random()
        return RuntimeError("lost") if luck < 0.04 else OutOfDeviceMemory("full") if luck < 0.1 else None

    def disturb() -> None:
        present = [owner for owner in range(1, 4) if owner not in life.gone]
        if pick.random() < 0.3 and life.heard:
            owner, id = pick.choice(list(life.heard))
            life.scheduler.intake.cancel(owner, [id, id + 1000])
        if pick.random() < 0.02 and len(present) > 1:
            life.gone.add(present[-1])
            life.scheduler.intake.drop(present[-1])

    life.misfortune, life.meanwhile = misfortune, disturb
    for id in range(pick.randint(20, 120)):
        for _ in range(pick.choice([0, 0, 1, 3])):
            life.step()
        disturb()
        owner = pick.choice([owner for owner in range(1, 4) if owner not in life.gone])
        tokens = [pick.randrange(1, VOCABULARY) for _ in range(pick.randint(1, CONTEXT_TOKENS))]
        terms = SchedulingTerms(
            weight=pick.choice([1.0, 2.0]), sequences=pick.choice([None, 1]), background=pick.random() < 0.2
        )
        account, pooling = pick.choice(ACCOUNTS), pick.choice([Pooling.MEAN, Pooling.CLS])
        try:
            life.submit(id, tokens, account, owner, pooling, pick.choice([0, 0, 3000]), terms)
        except SubmitRejected:
            assert (owner, id) not in life.heard
        life.scheduler.check()
    life.run()
    return life
