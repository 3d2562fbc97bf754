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
from engine.ranks.group import RankLost, RankWatch
from engine.step.layout import Int32s, SequenceSlice, awaited_token, pack_step
from tests.engine.execution.test_gpu_runner import interpreted
from tests.engine.ranks.test_gpu_ranks import ALL, GREEDY, life, two
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


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a layer for each of two stages."""
    return saved(reference_model("llama biases", num_hidden_layers=2), tmp_path_factory.mktemp("small"))


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


def prompts(rows: int, groups: int) -> list[SequenceSlice]:
    rng = np.random.default_rng(5)
    return [
        SequenceSlice(rng.integers(2, 95, 3 + row).tolist(), 0, [[2 * row, 2 * row + 1]] * groups, SAMPLED)
        for row in range(rows)
    ]


def decode(tokens: list[int], step: int, groups: int, masked: bool = False) -> list[SequenceSlice]:
    """A token of each sequence behind what `prompts` have; some have penalties, which name it in their history."""
    return [
        SequenceSlice(
            [token], 3 + row + step, [[2 * row, 2 * row + 1]] * groups, ALL if row % 3 == 0 else SAMPLED,
            ([1, 2, 3], 1) if row % 3 == 0 else None, masked and row % 2 == 0,
        )
        for row, token in enumerate(tokens)
    ]  # fmt: skip


def tokens_of(executor: Any, rows: int, steps: int, masks_MW: Int32s, ahead: bool) -> list[list[int]]:
    """What steps sample of which one has masks: one by one, or each launched while the one before is in flight."""
    groups, outputs, before = executor.limits.groups, [], None
    inflight = executor.launch(pack_step(prompts(rows, groups), BLOCK_TOKENS))
    for step in range(steps):
        if not ahead:
            outputs.append(inflight.wait())
        known = [awaited_token(row) for row in range(rows)] if ahead else outputs[-1].tokens_R.tolist()
        before = inflight
        inflight = executor.launch(pack_step(decode(known, step, groups, masked=step == 1), BLOCK_TOKENS))
        if ahead:
            outputs.append(before.wait())
        if step == 1:
            executor.sample(inflight, masks_MW)
    outputs.append(inflight.wait())
    return [output.tokens_R.tolist() for output in outputs]


@pytest.mark.parametrize(("gpus", "stages"), [(1, 2), (2, 2)])
def test_steps_in_flight_sample_what_steps_one_by_one_do(small: Path, gpus: int, stages: int) -> None:
    """Prompts are cut within a prompt; tokens of the step before are named from both halves of the buffer."""
    rows, steps = 5, 4
    masks_MW = np.random.default_rng(2).integers(-(2**31), 2**31 - 1, (3, 5), np.int32)
    one = interpreted(small, context_tokens=256, sequences=8, step_tokens=128)
    masks_MW = masks_MW[:, : -(-one.executor.limits.vocabulary // 32)]
    expected = tokens_of(one.executor, rows, steps, masks_MW, ahead=False)
    one.close()
    with two(small, gpus=gpus, stages=stages) as ranks:
        assert ranks.executor.limits.depth == 2
        assert tokens_of(ranks.executor, rows, steps, masks_MW, ahead=True) == expected
    assert len({str(each) for each in expected}) == len(expected)


def test_heads_come_as_late_as_may_be_and_bodies_behind_them_one_by_one(small: Path) -> None:
    with two(small, gpus=1, stages=2) as ranks:
        runner = ranks.executor._local
        assert isinstance(runner, PipelineRunner)
        launched: list[str] = []
        stage, groups = runner._stage, runner.limits.groups
        body, head = stage.launch, stage.launch_head
        stage.launch = lambda order, words: (launched.append(f"body {order.rows}"), body(order, words))[1]
        stage.launch_head = lambda order, *more: (launched.append(f"head {order.sampled_rows}"), head(order, *more))[1]
        first = ranks.executor.launch(pack_step(decode([5, 6, 7], 0, groups), BLOCK_TOKENS))
        assert launched == ["body 1", "body 2"]
        second = ranks.executor.launch(
            pack_step(decode([awaited_token(row) for row in range(3)], 1, groups), BLOCK_TOKENS)
        )
        assert launched[2:] == ["head 1", "body 1", "head 2", "body 2"]
        first.wait()
        assert len(launched) == 6
        second.wait()
        assert launched[6:] == ["head 1", "head 2"]


def test_what_is_copied_and_zeroed_comes_behind_what_was_launched(small: Path) -> None:
    with two(small, gpus=1, stages=2) as ranks:
        groups, (memory, *_) = ranks.executor.limits.groups, ranks.memory.memories
        prompt = pack_step([SequenceSlice(list(range(2, 20)), 0, [[0, 1]] * groups, SAMPLED)], BLOCK_TOKENS)
        follow = [SequenceSlice([5], 18, [table] * groups, SAMPLED) for table in ([0, 1], [4, 5])]
        inflight = ranks.executor.launch(prompt)
        memory.copy([0, 1], [4, 5])
        inflight.wait()
        first, copied = (ranks.executor.launch(pack_step([each], BLOCK_TOKENS)).wait() for each in follow)
        assert first.tokens_R.tolist() == copied.tokens_R.tolist()
        assert first.logprobs == copied.logprobs
        memory.zero([4, 5])
        zeroed = ranks.executor.launch(pack_step([follow[1]], BLOCK_TOKENS)).wait()
        assert zeroed.logprobs != copied.logprobs


def test_a_device_is_counted_as_the_fullest_stage_has_it(small: Path) -> None:
    with two(small, gpus=1, stages=2) as ranks:
        memories = ranks.memory.memories
        mapped, nothing = [memory.mapped for memory in memories], [[] for _ in memories]
        fall_asleep = ranks.memory.sleep
        fall_asleep(nothing)
        usage = ranks.memory.usage()
        assert usage.device_bytes == usage.asleep_bytes
        ranks.memory.wake(mapped, nothing)
        usage, loads = ranks.memory.usage(), ranks.memory.rank_loads()
        assert usage.device_bytes >= max(load.device_bytes for load in loads)
        assert usage.min_bytes <= usage.device_bytes <= usage.max_bytes
        assert len(loads) == ranks.memory.devices == 2


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_of_any_stage_ends_what_rank_0_waits_for(small: Path, rank: int, number: int) -> None:
    with two(small, gpus=2, stages=2) as ranks:
        watch = RankWatch(ranks.group, WaitEnder(ranks.part.windows).end)
        groups = ranks.executor.limits.groups
        packed = pack_step([SequenceSlice([5, 6, 7], 0, [[0]] * groups, GREEDY)], BLOCK_TOKENS)
        ranks.executor.launch(packed).wait()
        os.kill(ranks.group.pids[rank - 1], number)
        reason = f"rank {rank} ended" if number == signal.SIGKILL else "made no progress for 1 s"
        with ranks.group.patient(1.0), pytest.raises(RankLost, match=reason):
            ranks.executor.launch(packed).wait()
        watch.close()
