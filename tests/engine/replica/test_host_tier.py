"""The built-in model on a CPU with a pool that holds one prompt of many: texts with a tier in host memory are those
without it, nothing is left there that was wiped, and it lasts over a sleep."""

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import pytest

from engine.execution.kv_groups import CpuKVGroup
from engine.execution.memory_plan import DoesNotFit
from engine.execution.open import open_model
from engine.kv_blocks.block_pool import blocks_of
from engine.protocol.frames import SetPlacement, Submit
from engine.protocol.specs import ModelSpec
from engine.protocol.types import Residency, SamplingParams, SchedulingTerms, Scope, ScopeKind
from engine.ranks.fork import fork_ranks
from engine.ranks.open import open_ranked_model
from engine.replica.open_scheduler import open_scheduler, open_validator
from engine.replica.sleep_wake import SleepController
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_loop import StepLoop
from engine.step.executor import LoadedModel

pytestmark = pytest.mark.usefixtures("inference")

HOST_BYTES = 32 << 20  # one piece
TENANT, OTHER = (Scope(ScopeKind.TENANT, letter * 16, account=letter * 16) for letter in (b"t", b"o"))
CANARY = [3999, 3998, 3997] * 48
PROMPTS = [[*CANARY, 5], *([(911 * number + 17 * at) % 4000 for at in range(150)] for number in range(4))]


def ember(**changes: Any) -> ModelSpec:
    spec: dict[str, Any] = {"name": "ember", "folder": str(files("engine") / "builtin_model"), "dtype": "float32"}
    return ModelSpec(**spec | {"context_tokens": 256, "kv_bytes": 24 << 17, "step_tokens": 64} | changes)


class Turns:
    """A replica without sockets."""

    def __init__(self, model: LoadedModel, spec: ModelSpec) -> None:
        self.model = model
        self.seconds = 0.0
        scheduler = open_scheduler(model, spec, lambda: self.seconds)
        assert isinstance(scheduler, Scheduler)
        self.scheduler = scheduler
        self.loop = StepLoop(model.executor, scheduler, model.memories, None, model.tier)
        self.door = open_validator(model, spec, 256)
        self.sleep = SleepController(model.sleeper, model.memories, scheduler, self.loop, 1 << 30, lambda: self.seconds)
        while self.loop.sweep():
            pass

    def text(
        self, id: int, tokens: list[int], scope: Scope = TENANT, terms: SchedulingTerms | None = None
    ) -> tuple[list[int], int]:
        """The text of a request, and how many tokens it found."""
        packed = array("I", tokens).tobytes()
        submit = Submit(id, packed, scope, SamplingParams(), 12, terms=terms or SchedulingTerms())
        self.scheduler.intake.add(self.door.sequences(submit, 1, self.seconds))
        text, found = array("I"), 0
        while not self.loop.idle:
            self.loop.turn()
            self.loop.sweep()
            for outputs in self.scheduler.intake.take_outputs().values():
                text += array("I", outputs.tokens)
                found += sum(started.cached_tokens for started in outputs.started)
            self.scheduler.check()
        return text.tolist(), found

    @property
    def host(self) -> Any:
        return self.scheduler.kv.host

    def counted(self, name: str) -> int:
        return self.scheduler.load(draining=False).counters.get(name, 0)

    def place(self, residency: Residency) -> None:
        self.sleep.order(SetPlacement(residency))
        while self.sleep.residency != residency or not self.sleep.pause_s(1.0):
            self.sleep.step(resting=True)

    def holds(self, rows: bytes) -> bool:
        """Whether host memory has these bytes anywhere."""
        tier: Any = self.model.tier
        return any(rows in piece.numpy().tobytes() for piece in tier._pinned.pieces)


@contextmanager
def opened(spec: ModelSpec) -> Iterator[Turns]:
    ranks = fork_ranks(spec, "cpu", 1)
    model = (
        open_model(spec, "cpu", 1, lambda: None) if ranks is None else open_ranked_model(spec, ranks, 1, lambda: None)
    )
    yield Turns(model, spec)
    model.close()


@pytest.fixture
def tiered() -> Iterator[Turns]:
    with opened(ember(host_kv_bytes=HOST_BYTES)) as turns:
        yield turns


@pytest.mark.parametrize("gpus", [1, 2])
def test_texts_are_the_same_where_their_prompts_come_back_from_the_host(gpus: int) -> None:
    with opened(ember(gpus=gpus)) as bare, opened(ember(gpus=gpus, host_kv_bytes=gpus * HOST_BYTES)) as tiered:
        require_like(bare, tiered, gpus * HOST_BYTES)


def require_like(bare: Turns, tiered: Turns, host_bytes: int) -> None:
    assert bare.model.tier is None
    ids = [0, 1, 2, 0, 2, 1]
    plain, kept = ([turns.text(turn, PROMPTS[id]) for turn, id in enumerate(ids)] for turns in (bare, tiered))
    assert [text for text, _ in kept] == [text for text, _ in plain]
    assert [found for _, found in kept] == [0] * 3 + [144] * 3
    assert sum(found for _, found in plain) < 2 * 144
    assert tiered.counted("host_hit_tokens") >= 144
    assert tiered.counted("host_stored_blocks") >= 9
    assert tiered.counted("host_saved_ms") >= 0
    usage = tiered.model.sleeper.usage()
    assert usage.memory_bytes >= usage.kept_bytes >= host_bytes
    assert usage.standby_bytes >= host_bytes


def test_a_canary_is_gone_from_host_memory_when_its_scope_is_wiped(tiered: Turns) -> None:
    tiered.text(1, PROMPTS[0])
    submit = Submit(9, array("I", CANARY).tobytes(), TENANT, SamplingParams(), 1)
    (sequence,) = tiered.door.sequences(submit, 1, 0.0)
    kv, memory = tiered.scheduler.kv, tiered.model.paged
    assert isinstance(memory, CpuKVGroup)
    assert sequence.namespace is not None
    lease = kv.tree.match(sequence.namespace, array("I", CANARY), sequence.retention)
    canary = memory.pool.words_LNW[1, blocks_of(lease.blocks)[4]].numpy().tobytes()
    kv.tree.release(lease)
    assert not tiered.holds(canary), "the control: it is on the device alone"
    tiered.place(Residency.MEMORY)
    tiered.place(Residency.DEVICE)
    assert tiered.holds(canary)
    tiered.text(20, PROMPTS[4], Scope(ScopeKind.TENANT, TENANT.id, 1, TENANT.account))
    while tiered.loop.sweep():
        pass
    assert not tiered.holds(canary)


def test_what_is_to_be_erased_never_comes_into_host_memory(tiered: Turns) -> None:
    tiered.text(1, PROMPTS[0], TENANT, SchedulingTerms(erase=True))
    tiered.text(2, PROMPTS[1], OTHER, SchedulingTerms(erase=True))
    tiered.place(Residency.MEMORY)
    tiered.place(Residency.DEVICE)
    assert tiered.counted("host_stored_blocks") == 0
    assert tiered.text(4, PROMPTS[0])[1] == 0


def test_what_was_cached_is_found_after_a_sleep_and_what_was_in_the_host_too(tiered: Turns) -> None:
    texts = [tiered.text(id, PROMPTS[id])[0] for id in range(3)]
    tiered.place(Residency.MEMORY)
    assert tiered.model.sleeper.usage().kept_bytes >= HOST_BYTES
    tiered.place(Residency.DEVICE)
    assert [tiered.text(10 + id, PROMPTS[id]) for id in range(3)] == [(text, 144) for text in texts]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stages": 2}, "host_kv_bytes is for models in one stage"),
        ({"gpus": 2, "disk_kv_bytes": 1 << 30}, "disk_kv_bytes is for models on one GPU"),
    ],
)
def test_models_that_have_no_tier_say_so(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(DoesNotFit, match=reason):
        open_model(ember(host_kv_bytes=HOST_BYTES, **changes), "cpu", 1, lambda: None)
