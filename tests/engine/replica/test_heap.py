"""A replica on a CPU returns the free memory of its heap to the system, however long it serves without a pause."""

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
from tests.support.small_models import reference_model, saved, spec


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
