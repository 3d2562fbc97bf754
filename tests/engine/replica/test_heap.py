"""A replica on a CPU keeps little free memory in its heap: large blocks lie elsewhere, and what is free is returned to
the system, however long it serves without a pause."""

from contextlib import closing
from pathlib import Path

import pytest

from engine.execution.open import open_model
from engine.process import allocator
from engine.process.heartbeat import Heartbeat
from engine.protocol.connection import listen
from engine.protocol.specs import ReplicaSpec
from engine.replica.replica import Replica, ReplicaLimits
from engine.structured_output.manager import StructuredOutputManager
from engine.weights.source import WeightSource
from tests.support.small_models import reference_model, saved, spec

load = WeightSource.load


@pytest.mark.usefixtures("inference")
def test_free_memory_goes_back_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, trimmed = [0.0], list[float]()
    monkeypatch.setattr(allocator, "trim_heap", lambda: trimmed.append(now[0]))

    def orphaned() -> bool:
        now[0] += 10.0
        return now[0] > 200.0

    address = f"unix:{tmp_path / 'r'}"
    model = spec(saved(reference_model("qwen3"), tmp_path), context_tokens=256, kv_bytes=4 << 20)
    told = ReplicaSpec(model=model, address=address, pulse=str(tmp_path / "pulse"), boot=1)
    with closing(StructuredOutputManager(tmp_path, 1)) as grammars, closing(listen(address)) as listener:
        opened = open_model(model, "cpu", 1, lambda: None)
        pulse = Heartbeat.create(told.pulse)
        Replica(told, opened, grammars, pulse, listener, ReplicaLimits(), orphaned, lambda: now[0]).run()
        opened.close()
    assert trimmed == [60.0, 120.0, 180.0]


@pytest.mark.usefixtures("inference")
def test_only_weights_are_large_blocks_of_the_heap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped_from, at_load = list[int](), list[int]()
    monkeypatch.setattr(allocator, "_set_thresholds", lambda mapped, top: mapped_from.append(mapped))
    monkeypatch.setattr(WeightSource, "load", lambda *args: at_load.append(mapped_from[-1]) or load(*args))
    model = spec(saved(reference_model("qwen3"), tmp_path), context_tokens=256, kv_bytes=4 << 20)
    opened = open_model(model, "cpu", 1, lambda: None)
    assert mapped_from[-1] == allocator.MAPPED_BYTES
    fall_asleep = opened.sleeper.sleep
    fall_asleep([[]])
    opened.sleeper.wake([[]], [[]])
    assert mapped_from[-1] == allocator.MAPPED_BYTES
    assert at_load == [allocator._HEAP_BYTES_MAX] * 2
    opened.close()
