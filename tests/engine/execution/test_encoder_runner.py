"""engine/execution/encoder_runner.py: an encoder sleeps and wakes, and gives the same vectors; on a GPU too."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.execution.memory_plan import CONTEXT_BYTES
from engine.protocol.frames import SetPlacement
from engine.protocol.specs import ModelSpec
from engine.protocol.types import Pooling, Residency
from engine.replica.open_scheduler import open_scheduler
from engine.replica.sleep_wake import SleepController
from engine.scheduling.step_loop import StepLoop
from engine.step.encoder_layout import pack_texts
from engine.weights.checkpoint import CheckpointError
from tests.support.small_encoders import FAMILIES, RERANKERS, VOCABULARY, open_encoder, saved, seeded, vectors

pytestmark = pytest.mark.usefixtures("inference")

PICK = random.Random(1)
TEXTS = [[PICK.randrange(4, VOCABULARY) for _ in range(length)] for length in (1, 7, 40, 150)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vectors_are_the_same_to_the_bit_after_a_sleep(dtype: str, tmp_path: Path) -> None:
    model = open_encoder(saved(seeded(FAMILIES["xlm-roberta"]), tmp_path), dtype=dtype)
    expected = vectors(model, TEXTS, Pooling.MEAN)
    for _ in range(2):
        held = model.sleeper.usage()
        assert (held.device_bytes, held.kv_bytes) == (model.report.weights_bytes, 0)
        assert model.sleeper.sleep([]) == 0
        assert model.sleeper.usage().device_bytes == 0
        assert model.sleeper.wake([], []) == held.weights_bytes
        assert model.sleeper.arrived()
        assert np.array_equal(vectors(model, TEXTS, Pooling.MEAN), expected)


def test_scores_and_made_up_weights_are_the_same_too(tmp_path: Path) -> None:
    model = open_encoder(saved(seeded(RERANKERS["bert"]), tmp_path), random_weights=True)
    texts = [[2, *text, 3, *text[:4], 3] for text in TEXTS]
    expected = vectors(model, texts, Pooling.SCORE)
    model.sleeper.sleep([])
    model.sleeper.wake([], [])
    assert np.array_equal(vectors(model, texts, Pooling.SCORE), expected)


def test_a_place_moves_an_encoder_too(tmp_path: Path) -> None:
    model = open_encoder(saved(seeded(FAMILIES["bert"]), tmp_path))
    scheduler = open_scheduler(model, ModelSpec(name="small", folder=str(tmp_path)), time.monotonic)
    standby = SleepController(
        model.sleeper, (), scheduler, StepLoop(model.executor, scheduler), 1 << 20, time.monotonic
    )
    weights_bytes = model.report.weights_bytes
    for residency, held, moved in ((Residency.MEMORY, 0, 0), (Residency.DEVICE, weights_bytes, weights_bytes)):
        standby.order(SetPlacement(residency, device_bytes=1))
        told = [placed for placed in (standby.step(resting=True) for _ in range(3)) if placed is not None]
        assert [(each.residency, each.device_bytes, each.moved_bytes) for each in told] == [(residency, held, moved)]


def test_nothing_runs_asleep(tmp_path: Path) -> None:
    model = open_encoder(saved(seeded(FAMILIES["bert"]), tmp_path))
    model.sleeper.sleep([])
    with pytest.raises(AssertionError, match="asleep"):
        model.executor.launch(pack_texts(TEXTS[:1], [Pooling.CLS]))


def test_a_folder_that_changed_is_not_woken(tmp_path: Path) -> None:
    folder = saved(seeded(FAMILIES["bert"]), tmp_path)
    model = open_encoder(folder)
    expected = vectors(model, TEXTS, Pooling.CLS)
    model.sleeper.sleep([])
    path = folder / "model.safetensors"
    held = path.read_bytes()
    path.write_bytes(held[:-1] + bytes([held[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="changed"):
        model.sleeper.wake([], [])
    path.write_bytes(held)
    model.sleeper.wake([], [])
    assert np.array_equal(vectors(model, TEXTS, Pooling.CLS), expected)


def test_on_a_gpu_what_the_driver_keeps_is_held_asleep_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_encoder(saved(seeded(FAMILIES["bert"]), tmp_path))
    weights_bytes = model.report.weights_bytes
    with monkeypatch.context() as patch:
        patch.setattr(model.executor._stream, "queues", True)
        patch.setattr(torch.cuda, "memory_reserved", lambda device: weights_bytes + 5)
        awake = model.sleeper.usage()
    assert (awake.device_bytes, awake.min_bytes) == (CONTEXT_BYTES + weights_bytes + 5, CONTEXT_BYTES + weights_bytes)
    model.sleeper.sleep([])
    with monkeypatch.context() as patch:
        patch.setattr(model.executor._stream, "queues", True)
        patch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
        asleep = model.sleeper.usage()
    assert asleep.device_bytes == asleep.asleep_bytes == awake.asleep_bytes == CONTEXT_BYTES


@pytest.mark.gpu
def test_a_gpu_is_given_back_and_taken_again(open_on_gpu: Callable[[ModelSpec], Any], tmp_path: Path) -> None:
    folder = saved(seeded(FAMILIES["bert"]), tmp_path)
    model = open_on_gpu(ModelSpec(name="small", folder=str(folder)))
    expected = vectors(model, TEXTS, Pooling.MEAN)
    held = torch.cuda.memory_allocated()
    model.sleeper.sleep([])
    assert torch.cuda.memory_allocated() <= held - model.report.weights_bytes
    model.sleeper.wake([], [])
    assert np.array_equal(vectors(model, TEXTS, Pooling.MEAN), expected)
