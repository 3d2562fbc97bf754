"""The GPU's path against the CPU's, which tests/engine/models/test_bert.py holds against the reference library."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.protocol.specs import ModelSpec
from engine.protocol.types import Pooling
from engine.step.encoder_layout import pack_texts
from engine.step.executor import LoadedModel
from tests.support.small_encoders import FAMILIES, RERANKERS, VOCABULARY, open_encoder, saved, seeded, vectors

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("inference")]
_LENGTHS = (1, 2, 7, 15, 16, 17, 31, 64, 127, 128, 129, 250)


def _texts() -> list[list[int]]:
    pick = random.Random(1)
    return [[pick.randrange(4, VOCABULARY) for _ in range(length)] for length in _LENGTHS]


OnGpu = Callable[..., LoadedModel]


@pytest.fixture
def on_gpu(open_on_gpu: Callable[[ModelSpec], Any]) -> OnGpu:
    return lambda folder, dtype="auto": open_on_gpu(ModelSpec(name="small", folder=str(folder), dtype=dtype))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pooling", [Pooling.MEAN, Pooling.CLS])
def test_a_gpu_gives_the_vectors_that_a_cpu_does(family: str, pooling: Pooling, on_gpu: OnGpu, tmp_path: Path) -> None:
    folder = saved(seeded(FAMILIES[family]), tmp_path)
    expected, found = (vectors(runner, _texts(), pooling) for runner in (open_encoder(folder), on_gpu(folder)))
    assert np.abs(found - expected).max() < 1e-4


@pytest.mark.parametrize("family", RERANKERS)
def test_a_gpu_gives_the_scores_that_a_cpu_does(family: str, on_gpu: OnGpu, tmp_path: Path) -> None:
    folder = saved(seeded(RERANKERS[family]), tmp_path)
    texts = [[2, *text, 3, *text[:4], 3] for text in _texts()]
    expected, found = (vectors(runner, texts, Pooling.SCORE) for runner in (open_encoder(folder), on_gpu(folder)))
    assert np.abs(found - expected).max() < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_point_the_same_way(dtype: str, on_gpu: OnGpu, tmp_path: Path) -> None:
    folder = saved(seeded(FAMILIES["bert"]), tmp_path)
    wide, narrow = (vectors(on_gpu(folder, kind), _texts(), Pooling.MEAN) for kind in ("float32", dtype))
    lengths = np.linalg.norm(wide, axis=1) * np.linalg.norm(narrow, axis=1)
    assert ((wide * narrow).sum(1) / lengths).min() > 0.995


def test_company_changes_a_vector_by_rounding_alone(on_gpu: OnGpu, tmp_path: Path) -> None:
    runner = on_gpu(saved(seeded(FAMILIES["bert"]), tmp_path))
    texts = _texts()
    together = vectors(runner, texts, Pooling.MEAN)
    alone = np.concatenate([vectors(runner, [text], Pooling.MEAN) for text in texts])
    assert np.abs(together - alone).max() < 1e-5


def test_two_steps_may_be_in_the_air(on_gpu: OnGpu, tmp_path: Path) -> None:
    runner = on_gpu(saved(seeded(FAMILIES["bert"]), tmp_path))
    texts = _texts()
    flights = [runner.executor.launch(pack_texts([text], [Pooling.MEAN])) for text in texts[:2]]
    for flight, text in zip(flights, texts, strict=False):
        landed = flight.wait().vectors_RH
        assert landed is not None
        assert np.array_equal(landed, vectors(runner, [text], Pooling.MEAN))
