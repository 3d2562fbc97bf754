"""A model of two GPUs, in ranks or in stages, beside the same one of one: it answers as that does, sleeps, wakes, and
ends with a lost rank.
Each life is a program of its own, since ranks are forked before a driver is touched."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from engine.execution.open import inference_mode, open_model
from engine.memory.pinned import PIECE_BYTES
from engine.protocol.specs import ModelSpec
from engine.protocol.types import SamplingParams
from engine.ranks.fork import Ranks, fork_ranks
from engine.ranks.group import RankLost
from engine.ranks.open import open_ranked_model
from engine.replica.warmup import warm_up
from engine.step.executor import LoadedModel
from engine.step.layout import SequenceSlice, pack_step
from tests.support.small_models import BLOCK_TOKENS, reference_model, saved, spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def said(function: str, *arguments: object) -> Any:
    """What a function of this module prints in a new process."""
    program = f"from tests.engine.ranks import test_ranks_on_gpus as here; here.{function}(*{arguments!r})"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


def model_of(folder: str, gpus: int, stages: int, **settings: int) -> ModelSpec:
    sizes = {"context_tokens": 256, "sequences": 8, "step_tokens": 128} | settings
    return spec(Path(folder), gpus=gpus, stages=stages, dtype="float32", **sizes)


def opened(folder: str, gpus: int, stages: int, **settings: int) -> tuple[LoadedModel, Ranks | None]:
    model = model_of(folder, gpus, stages, **settings)
    ranks = fork_ranks(model, "cuda", None)
    if ranks is None:
        return open_model(model, "cuda", None, lambda: None), None
    return open_ranked_model(model, ranks, None, lambda: None), ranks


def answers(folder: str, gpus: int, stages: int, rows_min: int = 16) -> None:
    """Prints tokens and log probabilities of all steps, of which micro-batches have so many rows at least."""
    from engine.pipeline import pipeline_runner

    with (
        patch.object(pipeline_runner, "ROWS_MIN", rows_min),
        patch.object(pipeline_runner, "FULL_ROWS", 4 * rows_min),
        inference_mode(),
    ):
        model, _ = opened(folder, gpus, stages)
        from tests.engine.ranks.test_gpu_ranks import life  # behind the fork: it asks for a GPU

        with closing(model):
            outputs = [life(model.executor, model.memories, model.sleeper) for _ in range(3)]
            while model.executor.warm_up():
                pass
            outputs.append(life(model.executor, model.memories, model.sleeper))  # by graphs
    print(json.dumps([[each.tokens_R.tolist(), each.logprobs] for life in outputs for each in life]))


def keeps(folder: str, gpus: int, stages: int) -> None:
    """Prints whether a start leaves what `hearth models warm --check` looks for."""
    with inference_mode():
        model, _ = opened(folder, gpus, stages)
        model.close()
        print(json.dumps(warm_up(model_of(folder, gpus, stages), "cuda", opening=False).found))


def brings_back(folder: str, gpus: int) -> None:
    """Prints true where each rank's part of blocks comes back from the host."""
    with inference_mode():
        model, _ = opened(folder, gpus, 1, host_kv_bytes=gpus * PIECE_BYTES)
        from tests.engine.ranks.test_ranked_tier import require_parts_come_back  # behind the fork: it asks for a GPU

        with closing(model):
            require_parts_come_back(model, gpus)
    print("true")


def hands_over(folder: str, gpus: int, sent: str, received: str) -> None:
    """Prints the tokens behind a prompt whose blocks it writes to a file, and behind those of another file."""
    with inference_mode():
        model, _ = opened(folder, gpus, 1, handover_bytes=64 << 20)
        from tests.engine.ranks import test_block_exchange as blocks  # behind the fork: it asks for a GPU

        with closing(model):
            Path(sent).write_bytes(blocks.computed(model))
            tokens = [blocks.behind(model, blocks.BLOCKS)[0]]
            if received:
                tokens.append(blocks.require_goes_on(model, Path(received).read_bytes())[0])
    print(json.dumps(tokens))


def loses(folder: str, gpus: int, stages: int, number: int) -> None:
    """Prints how long it took until a lost rank was noticed, and why the model ended."""
    with inference_mode():
        model, ranks = opened(folder, gpus, stages)
        assert ranks is not None
        packed = pack_step([SequenceSlice(list(range(2, 30)), 0, [[0, 1]], SamplingParams())], BLOCK_TOKENS)
        for _ in range(20):
            model.executor.launch(packed).wait()
        os.kill(ranks.group.pids[0], number)
        began = time.monotonic()
        try:
            while True:
                model.executor.launch(packed).wait()
        except RankLost as lost:
            print(json.dumps([time.monotonic() - began, str(lost)]), flush=True)
        os._exit(0)  # a device that fails may not answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(saved(reference_model("llama biases"), tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def alone(folder: str) -> Any:
    return said("answers", folder, 1, 1)


@pytest.mark.parametrize(("gpus", "stages", "rows_min"), [(2, 1, 16), (1, 2, 16), (1, 2, 1)])
def test_two_gpus_answer_as_one_without_and_with_graphs(
    folder: str, alone: Any, gpus: int, stages: int, rows_min: int
) -> None:
    for (tokens, logprobs), (expected, others) in zip(
        said("answers", folder, gpus, stages, rows_min), alone, strict=True
    ):
        assert tokens == expected
        for row, (logprob, ids, best) in others.items():
            assert logprobs[row][0] == pytest.approx(logprob, abs=1e-3)
            assert ids == logprobs[row][1]
            np.testing.assert_allclose(logprobs[row][2], best, atol=1e-3)


@pytest.mark.parametrize(("gpus", "stages"), [(2, 1), (1, 2)])
def test_what_a_start_keeps_is_found(folder: str, gpus: int, stages: int) -> None:
    assert said("keeps", folder, gpus, stages) is True


def test_blocks_of_two_ranks_come_back_from_the_host(folder: str) -> None:
    assert said("brings_back", folder, 2) is True


def test_what_two_gpus_hand_over_one_goes_on_with_and_the_other_way_round(folder: str, tmp_path: Path) -> None:
    of_two, of_one, again = (str(tmp_path / name) for name in ("two", "one", "again"))
    (wanted,) = said("hands_over", folder, 2, of_two, "")
    assert said("hands_over", folder, 1, of_one, of_two) == [wanted, wanted]
    assert said("hands_over", folder, 2, again, of_one) == [wanted, wanted]


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_four_gpus_in_two_stages_of_two_ranks_answer_as_one(folder: str, alone: Any) -> None:
    given = said("answers", folder, 2, 2, 1)
    assert [tokens for tokens, _ in given] == [tokens for tokens, _ in alone]


@pytest.mark.parametrize(("gpus", "stages"), [(2, 1), (1, 2)])
@pytest.mark.parametrize(("number", "within_s"), [(signal.SIGKILL, 2.0), (signal.SIGSTOP, 5.0)])
def test_a_lost_rank_is_noticed_while_rank_0_waits_for_its_device(
    folder: str, gpus: int, stages: int, number: int, within_s: float
) -> None:
    took_s, reason = said("loses", folder, gpus, stages, int(number))
    assert took_s < within_s
    assert reason.startswith("rank 1")
