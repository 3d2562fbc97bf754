"""How a GPU's blocks go to other replicas, with kernels in the interpreter: what a model's steps wrote leaves by a
window and is read by the steps of another one; asleep there is none."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.execution.open_gpu import open_exchange
from engine.memory.errors import OutOfDeviceMemory
from engine.step.executor import LoadedModel
from engine.step.layout import SequenceSlice
from tests.engine.execution.test_gpu_runner import GREEDY, interpreted, launch
from tests.support.small_models import reference_model, saved

pytestmark = pytest.mark.usefixtures("inference")
PROMPT = [*range(3, 35)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(reference_model("qwen3"), tmp_path)


def opened(folder: Path, **changes: Any) -> LoadedModel:
    model = interpreted(folder, handover_bytes=1 << 30, context_tokens=256, sequences=8, step_tokens=128, **changes)
    model.sleeper.handover_bytes = 1 << 20  # type: ignore[attr-defined]
    return model


def exchange_of(model: LoadedModel) -> Any:
    exchange = open_exchange(model.sleeper, model.resources)  # type: ignore[arg-type]
    assert exchange is not None
    return exchange


def test_what_one_model_computed_another_one_goes_on_with(folder: Path) -> None:
    one, other = opened(folder), opened(folder)
    out, into = exchange_of(one), exchange_of(other)
    launch(one, [SequenceSlice(PROMPT, 0, [[5, 2]], GREEDY)]).wait()
    expected = launch(one, [SequenceSlice([7], 32, [[5, 2, 9]], GREEDY)]).wait().tokens_R
    made = into.windows.make(2)
    opened_there = out.windows.open(os.dup(made.descriptor), 2)
    sums = opened_there.push(0, [5, 2]).wait()
    assert made.checksums(0, 2) == sums
    made.pull(0, [4, 1])
    given = launch(other, [SequenceSlice([7], 32, [[4, 1, 8]], GREEDY)]).wait().tokens_R
    assert given.tolist() == expected.tolist()
    assert bool((given >= 0).all()), "no slot that it read was unwritten"
    for window in (opened_there, made):
        window.close()
    for model in (one, other):
        model.close()


def test_a_model_that_sleeps_makes_no_windows_and_one_that_wakes_does(folder: Path) -> None:
    model = opened(folder)
    exchange, memory = exchange_of(model), model.memories[0]
    mapped = memory.mapped
    exchange.windows.make(1).close()
    model.sleeper.sleep([[]])
    with pytest.raises(OutOfDeviceMemory):
        exchange.windows.make(1)
    model.sleeper.wake([mapped], [[]])
    exchange.windows.make(1).close()
    assert exchange.windows.held_bytes == 0
    model.close()


def test_what_windows_may_take_is_held_while_the_model_is_awake(folder: Path) -> None:
    without, model = interpreted(folder, context_tokens=256, sequences=8, step_tokens=128), opened(folder)
    assert open_exchange(without.sleeper, without.resources) is None  # type: ignore[arg-type]
    plain, usage = without.sleeper.usage(), model.sleeper.usage()
    assert usage.min_bytes - plain.min_bytes == 1 << 20
    assert usage.asleep_bytes == plain.asleep_bytes
    assert torch.is_inference_mode_enabled()
    for each in (without, model):
        each.close()
