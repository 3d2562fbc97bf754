"""One engine, opened once, and sessions on it: requests in, tokens and their times out. It knows no shapes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, cast

import numpy as np

from engine.bench.vocabulary import write_tokenizer
from engine.execution.open import DecoderRunner
from engine.execution.step_loop import StepLoop, open_scheduler
from engine.protocol.frames import Submit
from engine.protocol.specs import ModelSpec
from engine.protocol.types import Grammar, SamplingParams, Scope, ScopeKind
from engine.scheduling.validation import RequestValidator
from engine.step.cost_model import CostModel
from engine.step.executor import InflightStep, RunnerOutput, StepExecutor
from engine.step.layout import Int32s
from engine.structured_output.manager import StructuredOutputManager


@dataclass(slots=True)
class RequestTimeline:
    """What one request gave: when each of its tokens was told, and whether it is over."""

    submitted_s: float
    told_s: list[float] = field(default_factory=list)
    over: bool = False


class _TimedRunner:
    """A runner that tells how long its caller waited for flights."""

    def __init__(self, runner: DecoderRunner) -> None:
        self._runner = runner
        self.waited_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, packed: Int32s) -> InflightStep:
        return _TimedStep(self, self._runner.launch(packed))

    def sample(self, flight: InflightStep, masks_MW: Int32s) -> None:
        assert isinstance(flight, _TimedStep)
        self._runner.sample(flight.flight, masks_MW)


class _TimedStep:
    def __init__(self, watched: _TimedRunner, flight: InflightStep) -> None:
        self._watched = watched
        self.flight = flight

    def wait(self) -> RunnerOutput:
        began = time.perf_counter()
        try:
            return self.flight.wait()
        finally:
            self._watched.waited_s += time.perf_counter() - began


class BenchEngine:
    """A runner that sessions share, one after the other. It is to be closed."""

    def __init__(self, model: ModelSpec, device: str) -> None:
        self.model = model
        self.runner = DecoderRunner.open(model, device, None, lambda: None)

    def prepare(self) -> None:
        """What a replica does while it is idle: every graph is captured."""
        while self.runner.idle():
            pass

    def close(self) -> None:
        self.runner.close()

    def grammars(self) -> StructuredOutputManager:
        """To be closed. Where the model's folder has no tokenizer, a made-up one of its size is written there."""
        folder = Path(self.model.folder)
        if not (folder / "tokenizer.json").exists():
            write_tokenizer(folder, self.runner.vocabulary)
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
        runner, model = engine.runner, engine.model
        self._runner = runner
        self._costs: CostModel | None = runner.costs
        if runner.costs is not None and not grouped:
            runner.costs = replace(runner.costs, pair_us=float("inf"))
        changed = {name: getattr(model, name) for name in model.__struct_fields__}
        spec = ModelSpec(**{**changed, "gap_ms": gap_ms or model.gap_ms, "waiting": 4096})
        self._scheduler = open_scheduler(runner, spec, time.perf_counter)
        self._watched = _TimedRunner(runner)
        self._grammars = grammars
        self._loop = StepLoop(cast(StepExecutor, self._watched), self._scheduler, grammars.masks if grammars else None)
        self._door = RequestValidator(
            model_revision=runner.revision, kv_layout=runner.kv_layout, block_tokens=runner.block_tokens,
            max_total_tokens=runner.context_tokens, vocabulary=runner.vocabulary, stop_ids=frozenset(),
        )  # fmt: skip
        self.streams: dict[int, RequestTimeline] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends what still runs and lands what is in the air."""
        self._scheduler.intake.end_all("the measurement is over")
        while self._loop.turn():
            pass
        self._runner.costs = self._costs

    @property
    def waited_s(self) -> float:
        """How long the host has waited for the device."""
        return self._watched.waited_s

    def submit(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        scope: int | None = None,
        temperature: float = 0.0,
        grammar: Grammar | None = None,
    ) -> RequestTimeline:
        """A request; those of one `scope` share cached prefixes. Waits until its grammar is compiled."""
        number = len(self.streams)
        self.streams[number] = RequestTimeline(time.perf_counter())
        sharing = Scope() if scope is None else Scope(ScopeKind.TENANT, scope.to_bytes(16, "big"))
        packed = np.asarray(tokens, "<u4").tobytes()
        submit = Submit(number, packed, sharing, SamplingParams(temperature=temperature, seed=number), max_tokens)
        sequences = self._door.sequences(submit, 0, time.perf_counter())
        if grammar is not None:
            assert self._grammars is not None
            sequences[0].compilation = compilation = self._grammars.compile(grammar, bytes(16), cache=True)
            while not compilation.done:
                time.sleep(1e-3)
        self._scheduler.intake.add(sequences)
        return self.streams[number]

    def turn(self) -> bool:
        """One turn of the replica's loop, its news told. False when nothing was left to do."""
        worked = self._loop.turn()
        for progress in self._scheduler.intake.outputs.take().values():
            now = time.perf_counter()
            for number in progress.ids:
                self.streams[number].told_s.append(now)
            for finish in progress.finished:
                assert not finish.message, finish.message
                self.streams[finish.id].over = True
        return worked

    def run(self) -> float:
        """Until all is done; the seconds that it took."""
        began = time.perf_counter()
        while not all(stream.over for stream in self.streams.values()):
            self.turn()
        return time.perf_counter() - began

    def run_until_all_stream(self) -> None:
        """Until each request that is not over has given a token."""
        while not all(stream.told_s for stream in self.streams.values()):
            self.turn()

    def steps_ms(self, steps: int) -> float:
        """Milliseconds per step over so many of them, from one landing to the last."""
        self.turn()
        began = time.perf_counter()
        for _ in range(steps):
            assert self.turn(), "a step without work"
        return 1e3 * (time.perf_counter() - began) / steps
