"""One model, opened once, and sessions on it: requests in, tokens and their times out. It knows no shapes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from engine.bench.vocabulary import write_tokenizer
from engine.execution.open import open_model
from engine.protocol.frames import Submit
from engine.protocol.specs import ModelSpec
from engine.protocol.types import Grammar, SamplingParams, Scope, ScopeKind
from engine.ranks.fork import fork_ranks
from engine.ranks.open import open_ranked_model
from engine.replica.open_scheduler import open_scheduler, open_validator
from engine.scheduling.step_loop import StepLoop
from engine.sequences.sequence import GrammarMatcher
from engine.step.cost_model import CostModel
from engine.step.executor import InflightStep, RunnerOutput, StepExecutor
from engine.step.layout import Int32s
from engine.structured_output.manager import StructuredOutputManager


@dataclass(slots=True)
class RequestTimeline:
    """When each token of a request came, and whether it is over."""

    submitted_s: float
    token_s: list[float] = field(default_factory=list)
    over: bool = False


class _TimedExecutor:
    """A StepExecutor that measures how long its caller waits for steps."""

    def __init__(self, executor: StepExecutor, costs: CostModel | None) -> None:
        self.limits = executor.limits
        self.costs = costs
        self.waited_s = 0.0
        self.warm_up = executor.warm_up
        self._executor = executor

    def launch(self, packed: Int32s) -> InflightStep:
        return _TimedStep(self, self._executor.launch(packed))


class _TimedStep:
    def __init__(self, timed: _TimedExecutor, step: InflightStep) -> None:
        self._timed = timed
        self.step = step

    def wait(self) -> RunnerOutput:
        began = time.perf_counter()
        try:
            return self.step.wait()
        finally:
            self._timed.waited_s += time.perf_counter() - began


class BenchEngine:
    """An open model that sessions share, one after the other. It is to be closed, and used in inference mode. One of
    several GPUs is to be opened before anything else touches a driver."""

    def __init__(self, spec: ModelSpec, device: str) -> None:
        self.spec = spec
        ranks = fork_ranks(spec, device, None)
        if ranks is None:
            self.model = open_model(spec, device, None, lambda: None)
        else:
            self.model = open_ranked_model(spec, ranks, None, lambda: None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.model.close()

    def prepare(self) -> None:
        """Does what a replica does while it is idle: captures every graph."""
        while self.model.executor.warm_up():
            pass

    @property
    def vocabulary(self) -> int:
        return self.model.executor.limits.vocabulary

    def grammars(self) -> StructuredOutputManager:
        """Opens a manager, to be closed. Where the model's folder has no tokenizer, a made-up one is written there."""
        folder = Path(self.spec.folder)
        if not (folder / "tokenizer.json").exists():
            write_tokenizer(folder, self.vocabulary)
        return StructuredOutputManager(folder, None)


class BenchSession:
    """An empty cache and a scheduler of its own on an engine. `grouped` switches prefix groups; `grammars` are for
    requests that have one."""

    def __init__(
        self,
        engine: BenchEngine,
        gap_ms: float | None = None,
        grouped: bool = True,
        grammars: StructuredOutputManager | None = None,
    ) -> None:
        model, executor = engine.model, engine.model.executor
        costs = executor.costs
        if costs is not None and not grouped:
            costs = replace(costs, pair_us=float("inf"))
        spec = msgspec.structs.replace(engine.spec, gap_ms=gap_ms or engine.spec.gap_ms, waiting=4096)
        self._timed = _TimedExecutor(executor, costs)
        model = replace(model, executor=self._timed, stop_ids=frozenset())
        self.scheduler = open_scheduler(model, spec, time.perf_counter)
        self._grammars = grammars
        self._loop = StepLoop(
            self._timed, self.scheduler, model.memories, self._sample if grammars else None, model.tier
        )
        self._sampler = model.sampler
        self._validator = open_validator(model, spec, executor.limits.context_tokens)
        self.streams: dict[int, RequestTimeline] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends what still runs and lands what is in the air."""
        self.scheduler.intake.end_all("the measurement is over")
        while self._loop.turn():
            pass

    def _sample(self, step: InflightStep, matchers: list[GrammarMatcher | None]) -> Callable[[], None]:
        assert isinstance(step, _TimedStep)
        assert self._sampler is not None
        assert self._grammars is not None
        sampler, masks = self._sampler, self._grammars.begin_masks(matchers)
        return lambda: sampler.sample(step.step, masks())

    @property
    def waited_s(self) -> float:
        """How long the host has waited for the device."""
        return self._timed.waited_s

    @property
    def emitted(self) -> int:
        """How many tokens there were."""
        return sum(len(stream.token_s) for stream in self.streams.values())

    def submit(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        scope: int | None = None,
        temperature: float = 0.0,
        grammar: Grammar | None = None,
        account: bytes = bytes(16),
    ) -> RequestTimeline:
        """A request; those of one `scope` share cached prefixes. Waits until its grammar is compiled, which its
        `account` caches."""
        number = len(self.streams)
        self.streams[number] = RequestTimeline(time.perf_counter())
        sharing = Scope() if scope is None else Scope(ScopeKind.TENANT, scope.to_bytes(16, "big"))
        packed = np.asarray(tokens, "<u4").tobytes()
        submit = Submit(number, packed, sharing, SamplingParams(temperature=temperature, seed=number), max_tokens)
        sequences = self._validator.sequences(submit, 0, time.perf_counter())
        if grammar is not None:
            assert self._grammars is not None
            sequences[0].compilation = compilation = self._grammars.compile(grammar, account, cache=True)
            while not compilation.done:
                time.sleep(1e-3)
        self.scheduler.intake.add(sequences)
        return self.streams[number]

    def turn(self) -> bool:
        """Runs one turn of the replica's loop and takes its outputs. Returns False when nothing was left to do."""
        worked = self._loop.turn()
        for progress in self.scheduler.intake.take_outputs().values():
            now = time.perf_counter()
            for number, count in zip(progress.ids, progress.counts, strict=True):
                self.streams[number].token_s += [now] * count
            for finish in progress.finished:
                assert not finish.message, finish.message
                self.streams[finish.id].over = True
        return worked

    def rest(self) -> None:
        """Does what a replica does between calls: host memory for blocks grows to all that the spec allows."""
        while self._loop.sweep():
            pass

    def run(self) -> float:
        """Runs until all is done. Returns the seconds that it took."""
        began = time.perf_counter()
        while not all(stream.over for stream in self.streams.values()):
            self.turn()
        return time.perf_counter() - began

    def run_until_all_stream(self) -> None:
        """Runs until each request that is not over has given a token."""
        while not all(stream.token_s for stream in self.streams.values()):
            self.turn()

    def steps_ms(self, steps: int) -> float:
        """Returns milliseconds per step over so many of them, from one landing to the last."""
        self.turn()
        began = time.perf_counter()
        for _ in range(steps):
            assert self.turn(), "a step without work"
        return 1e3 * (time.perf_counter() - began) / steps
