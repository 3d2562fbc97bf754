"""engine/replica/handovers.py: what a replica's log says of how its calls move, or why they move without their KV."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from engine.protocol.specs import ModelSpec, ReplicaSpec
from engine.replica import handovers
from engine.replica.handovers import open_handovers
from prefixcache.namespace import Namespace

SPACE = Namespace("r", "", "r", "kv", 4, 2, b"t" * 16, 0)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    events: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(handovers, "log", lambda event, **fields: events.append((event, fields)))
    return events


def open_with(spec: dict[str, int], exchange: Any, memories: int = 1, devices: int = 1) -> int:
    """What a block takes that travels, of a model of so many memories on so many devices."""
    memory = SimpleNamespace(layout=SimpleNamespace(block_bytes=64))
    model: Any = SimpleNamespace(
        exchange=exchange, memories=(memory,) * memories, paged=memory if memories else None, devices=devices,
        revision="r",
    )  # fmt: skip
    validator: Any = SimpleNamespace(kv_layout="kv", namespace=lambda scope: SPACE)
    own = ReplicaSpec(model=ModelSpec(name="m", folder="/", **spec), address="tcp:127.0.0.1:1", pulse="", boot=1)
    opened = open_handovers(model, own, Mock(), validator, lambda: 0.0)
    opened.close()
    return opened.format.block_bytes


@pytest.mark.parametrize(
    ("spec", "memories", "problem"),
    [
        ({"stages": 2}, 1, "stages = 2: each has the KV of some layers"),
        ({}, 2, "its layers do not all see everything"),
        ({}, 0, "it keeps no KV"),
    ],
)
def test_a_model_that_hands_over_nothing_says_why(
    logged: list[tuple[str, dict[str, Any]]], spec: dict[str, int], memories: int, problem: str
) -> None:
    open_with({"handover_bytes": 1, **spec}, None, memories)
    ((event, fields),) = logged
    assert event == "handovers_unavailable"
    assert fields["problem"].startswith(problem)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_model_of_several_gpus_says_that_its_blocks_go_by_host_memory(
    logged: list[tuple[str, dict[str, Any]]], devices: int
) -> None:
    block_bytes = open_with({"handover_bytes": 1}, SimpleNamespace(windows=None), devices=devices)
    assert [event for event, _ in logged] == ["handovers_by_host_memory"] * (devices > 1)
    assert block_bytes == 64 * devices, "what travels are whole blocks"


def test_a_model_without_the_memory_says_nothing(logged: list[tuple[str, dict[str, Any]]]) -> None:
    open_with({}, None)
    assert not logged
