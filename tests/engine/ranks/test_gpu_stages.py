"""The stages of a model on GPUs, of which each rank is a process that runs the GPU's kernels in Triton's interpreter:
they answer as one, in whatever micro-batches, sleep as one, and end where one is lost."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.pipeline import pipeline_runner
from engine.pipeline.pipeline_runner import PipelineRunner
from engine.protocol.types import SamplingParams
from engine.ranks.gpu_part import WaitEnder
from engine.ranks.group import RankLost
from engine.ranks.watch import RankWatch
from engine.step.layout import Int32s, SequenceSlice, awaited_token, pack_step
from tests.engine.execution.test_gpu_runner import interpreted
from tests.engine.ranks.test_gpu_ranks import ALL, GREEDY, OpenedRanks, life, two
from tests.support.small_models import BLOCK_TOKENS, reference_model, saved

pytestmark = [
    pytest.mark.usefixtures("inference"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="processes of a CPU; test_ranks_on_gpus.py has GPUs"),
]
SAMPLED = SamplingParams(temperature=0.8, seed=7, logprobs=2)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama biases": {},
    "llama 3.2 tied": {},
    "gemma2": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "mixtral": {},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: saved(reference_model(family, num_hidden_layers=4, **more), tmp_path_factory.mktemp("model"))
        for family, more in FAMILIES.items()
    }


@pytest.fixture(autouse=True)
def many_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_runner, "ROWS_MIN", 1)
    monkeypatch.setattr(pipeline_runner, "FULL_ROWS", 4)


def same(given: list[Any], expected: list[Any]) -> None:
    for own, other in zip(given, expected, strict=True):
        assert own.tokens_R.tolist() == other.tokens_R.tolist()
        assert own.logprobs.keys() == other.logprobs.keys()
        for row, (logprob, ids, best) in other.logprobs.items():
            assert own.logprobs[row][0] == pytest.approx(logprob, abs=1e-4)
            assert own.logprobs[row][1] == ids
            assert own.logprobs[row][2] == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize(
    ("family", "gpus", "stages"),
    [(family, 1, 2) for family in FAMILIES] + [("llama biases", 1, 3), ("llama biases", 2, 2)],
)
def test_stages_on_gpus_answer_as_one(folders: dict[str, Path], family: str, gpus: int, stages: int) -> None:
    one = interpreted(folders[family], context_tokens=256, sequences=8, step_tokens=128)
    expected = life(one.executor, one.memories, one.sleeper)
    one.close()
    with two(folders[family], gpus=gpus, stages=stages) as ranks:
        given = life(ranks.executor, ranks.memory.memories, ranks.memory)
        board = ranks.group.board
        ranks.group.wait(lambda: bool((board.ended_W[1:] == board.published).all()))
        assert [load.steps for load in ranks.memory.rank_loads()] == [5] * gpus * stages
    same(given, expected)
