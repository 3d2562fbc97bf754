"""A model of several ranks beside the same one of one: the same bits, whatever it is told; and what becomes of it when
a rank refuses or is lost."""

import os
import re
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

from engine.execution.kv_groups import CpuKVGroup
from engine.execution.open import open_model
from engine.memory.errors import OutOfDeviceMemory
from engine.models.sharding import CannotShard
from engine.protocol.types import SamplingParams
from engine.ranks import follow, software
from engine.ranks.fork import Ranks, fork_ranks
from engine.ranks.group import RankLost
from engine.ranks.open import open_ranked_model
from engine.ranks.software import UnlikeRanks, require_like, software_of
from engine.step.executor import LoadedModel
from engine.step.layout import SequenceSlice, pack_step
from engine.weights.checkpoint import CheckpointError
from tests.support.small_models import BLOCK_TOKENS, in_all_groups, reference_model, saved, spec

pytestmark = pytest.mark.usefixtures("inference")

FAMILIES = (
    "llama biases",
    "llama 2",
    "phi3 window",
    "qwen3",
    "gemma2",
    "qwen2 window",
    "mixtral",
    "qwen3moe",
    "llama4 scout",
    "gpt-oss",
)
BY_FOUR = ("llama 2", "mixtral", "gpt-oss")
SAMPLED = SamplingParams(temperature=0.8, seed=7, logprobs=5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Their MLP is as wide as whole vectors on each of four ranks: what is left of one torch computes otherwise."""
    return {
        family: saved(
            reference_model(family, intermediate_size=128, **({"num_key_value_heads": 4} if family in BY_FOUR else {})),
            tmp_path_factory.mktemp("model"),
        )
        for family in FAMILIES
    }


@contextmanager
def opened(
    folder: Path, gpus: int, parts: int | None = None, stall_s: float = 10.0, **changes: Any
) -> Iterator[tuple[LoadedModel, Any]]:
    """The model and its ranks, None where it has one."""
    model = spec(folder, gpus=gpus, context_tokens=512, **changes)
    ranks = fork_ranks(model, "cpu", 1, parts, stall_s)
    if ranks is None:
        loaded = open_model(model, "cpu", 1, lambda: None)
    else:
        loaded = open_ranked_model(model, ranks, 1, lambda: None)
    try:
        yield loaded, ranks
    finally:
        loaded.close()


def step(model: LoadedModel, slices: list[SequenceSlice]) -> tuple[list[int], dict[int, Any]]:
    output = model.executor.launch(pack_step(in_all_groups(model, slices), BLOCK_TOKENS)).wait()
    return output.tokens_R.tolist(), output.logprobs


def prompt(length: int = 20, block: int = 0) -> SequenceSlice:
    return SequenceSlice(list(range(2, 2 + length)), 0, [list(range(block, block + 4))], SAMPLED)


def life(model: LoadedModel) -> list[Any]:
    """Prompts in chunks, decodes, blocks that move, sleep and wake: all that was sampled, with logprobs."""
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 150, 90).tolist() for _ in range(3)]
    tables = [list(range(first, first + 12)) for first in (0, 12, 24)]
    outputs: list[Any] = []
    for first, last in ((0, 40), (40, 90)):
        chunks = zip(texts, tables, strict=True)
        outputs.append(
            step(model, [SequenceSlice(ids[first:last], first, [blocks], SAMPLED) for ids, blocks in chunks])
        )
    for _ in range(6):
        slices = []
        for ids, blocks, token in zip(texts, tables, outputs[-1][0], strict=True):
            ids.append(token)
            slices.append(SequenceSlice([token], len(ids) - 1, [blocks], SAMPLED))
        outputs.append(step(model, slices))
        if len(outputs) == 4:
            for memory in model.memories:
                memory.copy([1, 13], [40, 41])
                memory.zero([1, 13])
            tables[0][1], tables[1][1] = 40, 41
        if len(outputs) == 6:
            keep = [sorted(block for blocks in tables for block in blocks[:6])] * len(model.memories)
            mapped = [memory.mapped for memory in model.memories]
            assert model.sleeper.sleep(keep) > 0
            assert model.sleeper.wake(mapped, keep) > 0
    return outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_give_the_bits_of_one_that_computes_all_parts(folders: dict[str, Path], family: str) -> None:
    counts = (1, 2, 4) if family in BY_FOUR else (1, 2)
    lives = {}
    for gpus in counts:
        with opened(folders[family], gpus, counts[-1]) as (model, _):
            lives[gpus] = life(model)
    assert all(each == lives[1] for each in lives.values())
    assert len({str(each) for each in lives[1]}) == len(lives[1])


def test_ranks_of_other_counts_than_parts_answer_alike_up_to_rounding(folders: dict[str, Path]) -> None:
    answers = []
    for gpus in (1, 2):
        with opened(folders["qwen3"], gpus) as (model, ranks):
            assert (ranks is None) == (gpus == 1)
            answers.append(step(model, [prompt()]))
    (tokens, logprobs), (tokens_of_two, logprobs_of_two) = answers
    assert tokens == tokens_of_two
    assert logprobs[0][0] == pytest.approx(logprobs_of_two[0][0], abs=1e-4)


def test_all_ranks_refuse_what_one_refuses(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The follower has no memory for an extent, nor rank 0 for another: none of them has it then, and all go on."""
    parent, own = os.getpid(), CpuKVGroup.__init__

    def refusing(self: CpuKVGroup, *arguments: Any) -> None:
        own(self, *arguments)
        give = self.map

        def map_some(extents: Any) -> None:
            if list(extents) == ([1] if os.getpid() == parent else [2]):
                raise OutOfDeviceMemory("no memory is left")
            give(extents)

        self.map = map_some

    monkeypatch.setattr(CpuKVGroup, "__init__", refusing)
    with opened(folders["llama 2"], 2) as (model, _):
        (memory,) = model.memories
        assert memory.layout.extents > 3
        memory.unmap([extent for extent in memory.mapped if extent])
        before = step(model, [prompt()])
        with pytest.raises(OutOfDeviceMemory, match="no memory is left"):
            memory.map([1])
        with pytest.raises(OutOfDeviceMemory, match="rank 1: no memory is left"):
            memory.map([2])
        assert memory.mapped == [0]
        memory.map([3])
        memory.map([1, 2])
        assert memory.mapped == [0, 1, 2, 3]
        assert step(model, [prompt()]) == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_noticed_and_takes_the_others_with_it(folders: dict[str, Path], number: int) -> None:
    with opened(folders["llama 2"], 4, stall_s=1.0) as (model, ranks):
        step(model, [prompt()])
        pids = list(ranks.group.pids)
        os.kill(pids[1], number)
        began = time.monotonic()
        reason = "rank 2 ended" if number == signal.SIGKILL else "rank 2 made no progress for 1 s"
        with pytest.raises(RankLost, match=reason):
            step(model, [prompt()])
        assert time.monotonic() - began < 30
        with pytest.raises(RankLost):
            step(model, [prompt()])
        with pytest.raises(RankLost):
            model.memories[0].zero([1])
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_each_rank_says_what_it_did_and_holds(folders: dict[str, Path]) -> None:
    with opened(folders["qwen3"], 1) as (model, _):
        assert model.rank_loads() == []
    with opened(folders["qwen3"], 2) as (model, ranks):
        before = model.rank_loads()
        steps = [step(model, [prompt()]) for _ in range(3)]
        ranks.group.wait(lambda: ranks.group.board.ended_W[1] == ranks.group.board.published)
        loads = model.rank_loads()
        assert len(steps) == 3
        assert [load.steps - earlier.steps for load, earlier in zip(loads, before, strict=True)] == [3, 3]
        assert all(load.waited_ms >= earlier.waited_ms for load, earlier in zip(loads, before, strict=True))
        assert sum(map(int, ranks.group.board.waited_us_W)) > 0
        assert loads[0].device_bytes == loads[1].device_bytes > 0
        mapped = [memory.mapped for memory in model.memories]
        fall_asleep = model.sleeper.sleep
        fall_asleep([[0]])
        assert all(
            asleep.device_bytes < load.device_bytes for asleep, load in zip(model.rank_loads(), loads, strict=True)
        )
        model.sleeper.wake(mapped, [[0]])
        assert [load.device_bytes for load in model.rank_loads()] == [load.device_bytes for load in loads]


def test_a_step_that_names_what_is_not_there_is_refused_before_a_follower_begins_it(folders: dict[str, Path]) -> None:
    with opened(folders["llama 2"], 2) as (model, ranks):
        began = int(ranks.group.board.began_W[1])
        with pytest.raises(AssertionError, match="past the vocabulary"):
            step(model, [SequenceSlice([5000], 0, [[0]], SAMPLED)])
        assert int(ranks.group.board.began_W[1]) == began
        step(model, [prompt()])


def test_followers_end_with_rank_0_however_it_ends(folders: dict[str, Path]) -> None:
    model = spec(folders["llama 2"], gpus=2, context_tokens=512)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        ranks = fork_ranks(model, "cpu", 1)
        assert isinstance(ranks, Ranks)
        os.write(writing, str(ranks.group.pids[0]).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    follower = int(os.read(reading, 20))
    until = time.monotonic() + 20
    while psutil.pid_exists(follower) and psutil.Process(follower).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        os.sched_yield()


def test_a_model_that_does_not_divide_is_refused_by_name(folders: dict[str, Path]) -> None:
    with pytest.raises(CannotShard, match="num_key_value_heads 2 is no multiple of 4"):
        fork_ranks(spec(folders["qwen3"], gpus=4), "cpu", 1)


def test_a_rank_that_computes_with_something_else_is_named(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = software_of(torch.device("cpu"))
    monkeypatch.setattr(follow, "software_of", lambda _: here | {"torch": "9.9"})
    words = f"rank 1 has torch 9.9, rank 0 {re.escape(here['torch'])}: a model's ranks"
    with pytest.raises(RankLost, match=words), opened(folders["qwen3"], 2):
        pass


def test_software_is_unlike_where_a_line_of_code_is(tmp_path: Path) -> None:
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "one.py").write_text("x = 1\n")
    before = software._code_digest(tmp_path)
    assert software._code_digest(tmp_path) == before
    (tmp_path / "layers" / "one.py").write_text("x = 2\n")
    assert software._code_digest(tmp_path) != before
    with pytest.raises(UnlikeRanks, match="rank 3 has driver None, rank 0 13000"):
        require_like(3, {"code": "a"}, {"code": "a", "driver": "13000"})
    require_like(3, {"code": "a"}, {"code": "a"})


def test_weights_that_are_gone_end_all_ranks(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = saved(reference_model("llama 2"), tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"nothing")
    model = spec(folder, gpus=2)
    ranks = fork_ranks(model, "cpu", 1)
    assert ranks is not None
    pids = list(ranks.group.pids)
    with pytest.raises(CheckpointError):
        open_ranked_model(model, ranks, 1, lambda: None)
    assert not any(psutil.pid_exists(pid) for pid in pids)
