"""Real tokens through the real scheduler and the built-in model: a text does not depend on what else was going on."""

from array import array
from collections.abc import Sequence
from importlib.resources import files

import pytest

from engine.execution.open import open_model
from engine.kv_blocks.block_pool import BlockPool
from engine.kv_blocks.kv_manager import KVManager
from engine.protocol.frames import Submit
from engine.protocol.specs import ModelSpec
from engine.protocol.types import SamplingParams, Scope, ScopeKind
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.token_budget import SchedulerConfig
from engine.sequences.validation import RequestValidator
from engine.step.executor import LoadedModel
from prefixcache.tree import PrefixTree

pytestmark = pytest.mark.usefixtures("inference")

BLOCK_TOKENS = 16
SYSTEM = [int(37 * i * i + 11 * i + 300) % 4000 for i in range(70)]
PROMPTS = [[*SYSTEM[: 70 - 9 * (i % 3)], *[(911 * i + 17 * j) % 4000 for j in range(5 + i)]] for i in range(6)]
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.9, top_p=0.9, seed=7),
    SamplingParams(repetition_penalty=1.3),
]
OUTPUT = 40


@pytest.fixture(scope="module")
def runner() -> LoadedModel:
    spec = ModelSpec(
        name="ember",
        folder=str(files("engine") / "builtin_model"),
        dtype="float32",
        kv_bytes=64 << 20,
        block_tokens=BLOCK_TOKENS,
    )
    return open_model(spec, "cpu", 1, lambda: None)


class Turns:
    """The replica's loop without sockets."""

    def __init__(self, runner: LoadedModel, blocks: int, step_tokens: int) -> None:
        self.runner = runner
        self.scheduler = Scheduler(
            KVManager(PrefixTree(blocks, BLOCK_TOKENS, lambda: 0.0), BlockPool(blocks)),
            SchedulerConfig(step_tokens, step_tokens, 8, 64),
            clock=lambda: 0.0,
        )
        self.door = RequestValidator(
            runner.revision, runner.paged.layout.name, BLOCK_TOKENS, 512, runner.executor.limits.vocabulary, frozenset()
        )
        self.texts: dict[int, list[int]] = {}

    def submit(self, id: int, tokens: Sequence[int], sampling: SamplingParams) -> None:
        scope = Scope(ScopeKind.TENANT, b"t" * 16)
        submit = Submit(id, array("I", tokens).tobytes(), scope, sampling, OUTPUT)
        self.scheduler.intake.add(self.door.sequences(submit, 1, 0.0))
        self.texts[id] = []

    def run(self) -> dict[int, list[int]]:
        while (plan := self.scheduler.next_batch()) is not None:
            self.scheduler.commit(plan, self.runner.executor.launch(plan.packed).wait())
            for progress in self.scheduler.intake.take_outputs().values():
                for id, token in zip(progress.ids, array("I", progress.tokens), strict=True):
                    self.texts[id].append(token)
            self.scheduler.check()
        return self.texts


@pytest.fixture(scope="module")
def alone(runner: LoadedModel) -> list[list[int]]:
    """Each text from a scheduler and a cache of its own, its prompt in one piece."""
    texts = []
    for number, prompt in enumerate(PROMPTS):
        turns = Turns(runner, blocks=16, step_tokens=512)
        turns.submit(0, prompt, SAMPLINGS[number % 3])
        texts.append(turns.run()[0])
    return texts


@pytest.mark.parametrize(("blocks", "step_tokens"), [(64, 512), (64, 20), (10, 48)])
def test_text_is_the_same_in_company_in_pieces_and_after_preemption(
    runner: LoadedModel, alone: list[list[int]], blocks: int, step_tokens: int
) -> None:
    turns = Turns(runner, blocks, step_tokens)
    for number, prompt in enumerate(PROMPTS):
        turns.submit(number, prompt, SAMPLINGS[number % 3])
    texts = turns.run()
    assert [texts[number] for number in range(len(PROMPTS))] == alone
    counters = turns.scheduler.load(draining=False).counters
    assert counters["hit_tokens"] > 0
    assert (counters.get("preemptions", 0) > 0) == (blocks == 10)


def test_text_is_the_same_behind_a_cached_prefix(runner: LoadedModel, alone: list[list[int]]) -> None:
    turns = Turns(runner, blocks=64, step_tokens=512)
    for turn in range(2):
        for number, prompt in enumerate(PROMPTS):
            turns.submit(10 * turn + number, prompt, SAMPLINGS[number % 3])
            turns.run()
    assert [turns.texts[10 + number] for number in range(len(PROMPTS))] == alone
    assert turns.scheduler.load(draining=False).counters["hit_tokens"] >= sum(len(p) // 16 * 16 - 16 for p in PROMPTS)
