"""A model in stages beside the same one in one process: the same bits, whatever it is told and however many steps are
in flight; and what becomes of it when a rank of a stage is lost."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from engine.execution.memory_plan import DoesNotFit
from engine.execution.open import open_model
from engine.models.sharding import CannotShard
from engine.protocol.types import SamplingParams
from engine.ranks import fork
from engine.ranks.fork import fork_ranks
from engine.ranks.group import RankLost
from engine.ranks.open import open_ranked_model
from engine.ranks.staged_executor import ROWS_MIN
from engine.step.executor import LoadedModel, RunnerOutput
from engine.step.layout import Int32s, SequenceSlice, awaited_token, pack_step
from tests.engine.ranks.test_ranks import life, prompt, step
from tests.support.small_models import BLOCK_TOKENS, in_all_groups, reference_model, saved, spec

pytestmark = pytest.mark.usefixtures("inference")

FAMILIES: dict[str, dict[str, Any]] = {
    "llama 2": {},
    "llama 3.2 tied": {},
    "gemma2": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "mixtral": {},
    "qwen3moe some dense": {},
}
SAMPLED = SamplingParams(temperature=0.8, seed=7, logprobs=5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    sizes = {"intermediate_size": 128, "num_hidden_layers": 4, "num_key_value_heads": 4}
    return {
        family: saved(reference_model(family, **sizes, **more), tmp_path_factory.mktemp("model"))
        for family, more in FAMILIES.items()
    }


@contextmanager
def opened(
    folder: Path, gpus: int, stages: int, stall_s: float = 10.0, **changes: Any
) -> Iterator[tuple[LoadedModel, Any]]:
    """The model and its ranks, None where it has one. Of as many parts of sums as there are ranks in a stage."""
    model = spec(folder, **({"gpus": gpus, "stages": stages, "context_tokens": 512, "kv_bytes": 16 << 20} | changes))
    ranks = fork_ranks(model, "cpu", 1, stall_s=stall_s)
    if ranks is None:
        loaded = open_model(model, "cpu", 1, lambda: None)
    else:
        loaded = open_ranked_model(model, ranks, 1, lambda: None)
    try:
        yield loaded, ranks
    finally:
        loaded.close()


@pytest.mark.parametrize(
    ("family", "gpus", "stages"),
    [(family, 1, 2) for family in FAMILIES] + [("llama 2", 1, 4), ("llama 2", 2, 2), ("mixtral", 2, 2)],
)
def test_stages_give_the_bits_of_one_process(folders: dict[str, Path], family: str, gpus: int, stages: int) -> None:
    """Its first prompts are cut into micro-batches within a prompt, and some of these sample nothing."""
    lives, usages, reports = [], [], []
    for count in (1, stages):
        with opened(folders[family], gpus, count) as (model, _):
            lives.append(life(model))
            usages.append(model.sleeper.usage())
            reports.append((model.report.weights_bytes, model.report.kv_bytes, model.report.kv_blocks))
            layouts = [(memory.mapped, memory.layout) for memory in model.memories]
    assert lives[0] == lives[1]
    assert usages[0] == usages[1]
    assert reports[0] == reports[1]
    assert usages[1].kv_bytes == sum(len(mapped) * layout.extent_bytes for mapped, layout in layouts)


def decode(tokens: list[int], position: int, rows: int, masked: bool = False) -> list[SequenceSlice]:
    """One token of each of some sequences."""
    return [
        SequenceSlice([token], position, [list(range(4 * row, 4 * row + 4))], SAMPLED, None, masked)
        for row, token in zip(range(rows), tokens, strict=True)
    ]


def prompts(rows: int) -> list[SequenceSlice]:
    rng = np.random.default_rng(5)
    return [
        SequenceSlice(rng.integers(0, 150, 8).tolist(), 0, [list(range(4 * row, 4 * row + 4))], SAMPLED)
        for row in range(rows)
    ]


def packed(model: LoadedModel, slices: list[SequenceSlice]) -> Int32s:
    return pack_step(in_all_groups(model, slices), BLOCK_TOKENS)


def one_by_one(model: LoadedModel, rows: int, masks_MW: Int32s, steps: int) -> list[list[int]]:
    tokens = [model.executor.launch(packed(model, prompts(rows))).wait().tokens_R.tolist()]
    for index in range(steps):
        launched = model.executor.launch(packed(model, decode(tokens[-1], 8 + index, rows, masked=index == 2)))
        if index == 2:
            assert model.sampler is not None
            model.sampler.sample(launched, masks_MW)
        tokens.append(launched.wait().tokens_R.tolist())
    return tokens


def two_in_flight(model: LoadedModel, rows: int, masks_MW: Int32s, steps: int) -> list[list[int]]:
    """The same with each step launched while the one before is in flight, whose tokens it names; and with blocks that
    are copied and zeroed between a launch and the next wait, which comes behind what was launched."""
    (memory, *_), awaited = model.memories, [awaited_token(row) for row in range(rows)]
    outputs: list[RunnerOutput] = []
    before = model.executor.launch(packed(model, prompts(rows)))
    for index in range(steps):
        launched = model.executor.launch(packed(model, decode(awaited, 8 + index, rows, masked=index == 2)))
        if index == 1:
            memory.copy([0, 4], [400, 404])
            memory.zero([401])
        outputs.append(before.wait())
        if index == 2:
            assert model.sampler is not None
            model.sampler.sample(launched, masks_MW)
        before = launched
    outputs.append(before.wait())
    return [output.tokens_R.tolist() for output in outputs]


@pytest.mark.parametrize(("gpus", "stages"), [(1, 2), (2, 2)])
def test_steps_in_flight_sample_what_steps_one_by_one_do(folders: dict[str, Path], gpus: int, stages: int) -> None:
    rows, steps = 4 * ROWS_MIN, 6
    masks_MW = np.random.default_rng(2).integers(-(2**31), 2**31 - 1, (rows, 5), np.int32)
    with opened(folders["llama 2"], gpus, 1) as (model, _):
        expected = one_by_one(model, rows, masks_MW, steps)
    with opened(folders["llama 2"], gpus, stages) as (model, ranks):
        assert model.executor.limits.depth == 2
        assert one_by_one(model, rows, masks_MW, steps) == expected
        assert two_in_flight(model, rows, masks_MW, steps) == expected
        sent_W = ranks.group.board.sent_W.tolist()
        assert len(set(sent_W)) == 1
        assert sent_W[0] == 2 * (1 + steps) * 2 * stages  # twice as many micro-batches as stages in each step
        ranks.group.wait(lambda: bool((ranks.group.board.ended_W[1:] == ranks.group.board.published).all()))
        assert [load.steps for load in model.rank_loads()] == [2 * (1 + steps)] * gpus * stages
    assert len({str(each) for each in expected}) == len(expected)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_rank_of_any_stage_that_is_lost_is_named_and_ends_all(
    folders: dict[str, Path], rank: int, number: int
) -> None:
    with opened(folders["llama 2"], 2, 2, stall_s=0.5) as (model, ranks):
        step(model, [prompt()])
        pids = list(ranks.group.pids)
        os.kill(pids[rank - 1], number)
        began = time.monotonic()
        reason = f"rank {rank} ended" if number == signal.SIGKILL else f"rank {rank} made no progress for 0.5 s"
        with pytest.raises(RankLost, match=reason):
            step(model, [prompt()])
        assert time.monotonic() - began < 30
        with pytest.raises(RankLost):
            model.memories[0].zero([1])
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_weights_that_are_made_up_are_those_of_the_whole(folders: dict[str, Path]) -> None:
    answers = []
    for stages in (1, 2):
        with opened(folders["llama 2"], 1, stages, random_weights=True) as (model, _):
            answers.append(step(model, [prompt()]))
    assert answers[0] == answers[1]


def test_a_model_of_fewer_layers_than_stages_is_refused_by_name(folders: dict[str, Path]) -> None:
    with pytest.raises(CannotShard, match="stages = 5, and the model has 4 layers: set stages to fewer"):
        fork_ranks(spec(folders["llama 2"], stages=5), "cpu", 1)


def test_stages_on_fewer_gpus_than_they_need_are_refused_by_name(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(fork, "visible_gpus", lambda _: ["0", "1", "2"])
    with pytest.raises(DoesNotFit, match="stages = 2 of gpus = 2, and 3 can be seen: set fewer, or show it more"):
        fork_ranks(spec(folders["llama 2"], gpus=2, stages=2), "auto", 1)
