"""Blocks of a model of several ranks that go to another replica: what leaves is what one process would have, whatever
the cut on either side, and nothing of it is left on its way."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from engine.execution.kv_groups import CpuKVGroup
from engine.execution.memory_plan import BOUNCE_BYTES
from engine.execution.open_gpu import device_exchange
from engine.kvcache.tensors import KVShape
from engine.memory.errors import OutOfDeviceMemory, OutOfHostMemory
from engine.protocol.types import SamplingParams
from engine.ranks.block_exchange import RankBlocks, RankedExchange, RankedGathering
from engine.ranks.board import BOUNCES, RankBoard
from engine.ranks.group import RankLost
from engine.step.exchange import BlockExchange, Gathering, GatheringLost
from engine.step.executor import LoadedModel
from engine.step.layout import SequenceSlice
from tests.engine.execution.test_gpu_runner import interpreted
from tests.engine.ranks.test_gpu_ranks import two
from tests.engine.ranks.test_ranks import opened, step
from tests.support.small_models import BLOCK_TOKENS, reference_model, saved

pytestmark = pytest.mark.usefixtures("inference")
HANDOVER = {"handover_bytes": 1 << 20}
SAMPLED = SamplingParams(temperature=0.8, seed=7, logprobs=5)
TOKENS = 90
BLOCKS = list(range(1, 7))
GATE_S = 8.0  # less than what a rank may be silent for


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = reference_model("llama 2", num_key_value_heads=4, intermediate_size=128)
    return saved(model, tmp_path_factory.mktemp("model"))


def exchange_of(model: LoadedModel) -> BlockExchange:
    assert model.exchange is not None
    return model.exchange


def block_bytes(model: LoadedModel) -> int:
    """Of whole blocks."""
    return model.memories[0].layout.block_bytes * model.devices


def gathered(model: LoadedModel, blocks: list[int]) -> bytes:
    into = bytearray(len(blocks) * block_bytes(model))
    with memoryview(into) as view:
        exchange_of(model).gather(blocks, view).wait()
    return bytes(into)


def behind(model: LoadedModel, blocks: list[int]) -> Any:
    """What a step draws behind a prompt whose KV is in these blocks, greedily and sampled."""
    return step(model, [SequenceSlice([30], TOKENS, [blocks], each) for each in (SamplingParams(), SAMPLED)])


def computed(model: LoadedModel) -> bytes:
    """A prompt's blocks, as they leave."""
    step(model, [SequenceSlice(list(range(2, 2 + TOKENS)), 0, [BLOCKS], SAMPLED)])
    return gathered(model, BLOCKS)


def require_nothing_left(model: LoadedModel) -> None:
    if isinstance(model.exchange, RankedExchange):
        model.exchange.check()


def require_goes_on(model: LoadedModel, blocks: bytes) -> Any:
    """What is drawn behind blocks that came from elsewhere; they leave again as they came."""
    targets = [20, 11, 13, 12, 30, 31]
    with memoryview(bytearray(blocks)) as view:
        exchange_of(model).scatter(targets, view)
    drawn = behind(model, targets)
    whole = TOKENS // BLOCK_TOKENS * block_bytes(model)
    assert gathered(model, targets)[:whole] == blocks[:whole]
    require_nothing_left(model)
    return drawn


def test_blocks_leave_as_one_process_has_them_and_any_cut_goes_on_with_them(folder: Path) -> None:
    sent, wanted = {}, {}
    for gpus in (1, 2, 4):
        with opened(folder, gpus, 4, **HANDOVER) as (model, _):
            sent[gpus] = computed(model)
            wanted[gpus] = behind(model, BLOCKS)
            require_nothing_left(model)
    assert sent[1] == sent[2] == sent[4]
    assert wanted[1] == wanted[2] == wanted[4]
    with opened(folder, 1, **HANDOVER) as (model, ranks):
        assert ranks is None
        assert isinstance(model.exchange, CpuKVGroup)
        assert len(sent[1]) == len(BLOCKS) * block_bytes(model)
        layout, digest = model.memories[0].layout.name, model.digest(folder)
        require_goes_on(model, sent[2])
    for gpus in (1, 2, 4):
        with opened(folder, gpus, 4, **HANDOVER) as (model, _):
            assert (model.memories[0].layout.name, model.digest(folder)) == (layout, f"{digest}/4"), "4 parts of a sum"
            assert require_goes_on(model, sent[4 // gpus]) == wanted[1]


def test_more_blocks_than_all_buffers_hold_go_in_turns(folder: Path) -> None:
    with opened(folder, 2, **HANDOVER) as (model, _):
        count = model.memories[0].layout.min_blocks
        size, some = block_bytes(model), BOUNCE_BYTES // block_bytes(model)
        blocks = list(range(0, count, 2)) * (1 + 2 * BOUNCES * some // count)
        given = b"".join(bytes([block % 251]) * size for block in blocks)
        with memoryview(bytearray(given)) as view:
            exchange_of(model).scatter(blocks, view)
        assert gathered(model, blocks) == given
        require_nothing_left(model)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """While it is not set, no follower begins to copy what leaves."""
    parent, own, opening = os.getpid(), CpuKVGroup.gather, get_context("fork").Event()

    def gather(self: CpuKVGroup, *args: Any) -> Any:
        if os.getpid() != parent:
            opening.wait(GATE_S)
        return own(self, *args)

    monkeypatch.setattr(CpuKVGroup, "gather", gather)
    return opening


def leaving(model: LoadedModel, into: bytearray, turns: int) -> list[Gathering]:
    """A block for each buffer, begun one by one."""
    size, view = block_bytes(model), memoryview(into)
    return [exchange_of(model).gather([turn % 8], view[turn * size : (turn + 1) * size]) for turn in range(turns)]


def test_it_is_busy_while_a_rank_has_all_buffers_to_fill(folder: Path, gate: Any) -> None:
    with opened(folder, 2, **HANDOVER) as (model, _):
        into = bytearray(BOUNCES * block_bytes(model))
        begun = leaving(model, into, BOUNCES - 1)
        assert not exchange_of(model).busy
        begun += leaving(model, into, 1)
        assert exchange_of(model).busy
        gate.set()
        for gathering in begun:
            gathering.wait()
        assert not exchange_of(model).busy
        require_nothing_left(model)


def test_steps_that_are_launched_later_change_nothing_of_what_leaves(folder: Path) -> None:
    with opened(folder, 2, **HANDOVER) as (model, _):
        expected = computed(model)
        into = bytearray(len(expected))
        with memoryview(into) as view:
            gathering = exchange_of(model).gather(BLOCKS, view)
            model.memories[0].zero(BLOCKS)
            step(model, [SequenceSlice(list(range(2, 20)), 0, [BLOCKS], SAMPLED)])
            gathering.wait()
        assert into == expected


def test_what_left_before_a_sleep_is_there_after_it_and_comes_back(folder: Path) -> None:
    with opened(folder, 2, **HANDOVER) as (model, _):
        expected, wanted = computed(model), behind(model, BLOCKS)
        into, mapped, fall_asleep = bytearray(len(expected)), model.memories[0].mapped, model.sleeper.sleep
        with memoryview(into) as view:
            gathering = exchange_of(model).gather(BLOCKS, view)
            fall_asleep([[]])
            model.sleeper.wake([mapped], [[]])
            gathering.wait()
        whole = TOKENS // BLOCK_TOKENS * block_bytes(model)
        assert into[:whole] == expected[:whole]
        assert require_goes_on(model, bytes(into)) == wanted


@pytest.mark.parametrize(("refusing_rank", "refusal"), [(0, OutOfDeviceMemory), (1, OutOfHostMemory)])
def test_a_rank_without_memory_ends_what_leaves_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch, refusing_rank: int, refusal: type[Exception]
) -> None:
    parent, own, refused = os.getpid(), CpuKVGroup.gather, []

    def gather(self: CpuKVGroup, *args: Any) -> Any:
        if (os.getpid() == parent) == (refusing_rank == 0) and not refused:
            refused.append(1)
            raise refusal("another process has it")
        return own(self, *args)

    monkeypatch.setattr(CpuKVGroup, "gather", gather)
    with opened(folder, 2, **HANDOVER) as (model, _):
        with pytest.raises(GatheringLost, match=f"rank {refusing_rank} has no memory"):
            computed(model)
        require_nothing_left(model)
        assert any(gathered(model, BLOCKS))


def test_blocks_of_which_some_are_lost_are_waited_for_until_none_is_on_its_way() -> None:
    lost, late = Future[None](), Future[None]()
    lost.set_exception(GatheringLost("one is lost"))
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(RankedGathering([lost, late]).wait)
        assert wait([waiting], timeout=0.05).not_done
        late.set_result(None)
        with pytest.raises(GatheringLost, match="one is lost"):
            waiting.result(GATE_S)


def test_a_rank_that_may_not_refuse_what_comes_ends_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent, own = os.getpid(), CpuKVGroup.scatter

    def scatter(self: CpuKVGroup, *args: Any) -> None:
        if os.getpid() != parent:
            raise OutOfDeviceMemory("another process has it")
        own(self, *args)

    monkeypatch.setattr(CpuKVGroup, "scatter", scatter)
    with opened(folder, 2, **HANDOVER) as (model, _):
        with memoryview(bytearray(block_bytes(model))) as view:
            exchange_of(model).scatter([1], view)
        with pytest.raises(RankLost, match="no memory for blocks that came from another replica"):
            behind(model, BLOCKS)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_what_is_on_its_way(folder: Path, number: int) -> None:
    with opened(folder, 2, stall_s=0.3, **HANDOVER) as (model, ranks):
        size = len(computed(model))
        os.kill(ranks.group.pids[0], number)
        with memoryview(bytearray(size)) as view:
            gathering = exchange_of(model).gather(BLOCKS, view)
            with pytest.raises(RankLost):
                behind(model, BLOCKS)
            with pytest.raises(GatheringLost, match="lost"):
                gathering.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_while_rank_0_waits_for_a_buffer_is_noticed(folder: Path, gate: Any, number: int) -> None:
    with opened(folder, 2, stall_s=0.3, **HANDOVER) as (model, ranks):
        begun = leaving(model, bytearray(BOUNCES * block_bytes(model)), BOUNCES)
        assert exchange_of(model).busy
        os.kill(ranks.group.pids[0], number)
        with memoryview(bytearray(block_bytes(model))) as view, pytest.raises(RankLost):
            exchange_of(model).gather([1], view)
        for gathering in begun:
            with pytest.raises(GatheringLost, match="lost"):
                gathering.wait()


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_rank_that_fails_to_give_its_part_ends_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch, failing_rank: int
) -> None:
    parent, own = os.getpid(), CpuKVGroup.gather

    def gather(self: CpuKVGroup, *args: Any) -> Any:
        fails = (os.getpid() == parent) == (failing_rank == 0)
        return Mock(wait=Mock(side_effect=ValueError("the device is gone"))) if fails else own(self, *args)

    monkeypatch.setattr(CpuKVGroup, "gather", gather)
    with opened(folder, 2, **HANDOVER) as (model, _):
        with pytest.raises(GatheringLost, match="lost"):
            gathered(model, BLOCKS)
        with pytest.raises(RankLost, match=f"rank {failing_rank} failed: ValueError.*the device is gone"):
            behind(model, BLOCKS)


def test_closing_gives_up_what_is_on_its_way(folder: Path, gate: Any) -> None:
    with opened(folder, 2, **HANDOVER) as (model, _):
        begun, exchange = leaving(model, bytearray(3 * block_bytes(model)), 3), exchange_of(model)
        assert isinstance(exchange, RankedExchange)
        exchange.close()
        for gathering in begun:
            with pytest.raises(GatheringLost, match="all of them end"):
                gathering.wait()
        gate.set()


@pytest.mark.parametrize(
    ("layers", "dtype", "blocks"), [(1, torch.float32, 8), (1, torch.bfloat16, 16), (16, torch.bfloat16, 1)]
)
def test_a_buffer_holds_no_more_than_is_said_whatever_the_type(layers: int, dtype: torch.dtype, blocks: int) -> None:
    shape = KVShape(layers, kv_heads=1, head_dim=128, block_tokens=64, dtype=dtype)
    local: Any = None
    own = RankBlocks(RankBoard(2, 1 << 10, 8, bounce_bytes=2 * BOUNCE_BYTES), 0, shape, local)
    assert (own.bounce_blocks, own.bounce_blocks * own.block_bytes) == (blocks, BOUNCE_BYTES)
    own.close()


@pytest.mark.parametrize("changes", [{}, {"handover_bytes": 1, "stages": 2}])
def test_models_without_the_memory_and_models_in_stages_hand_over_nothing(
    folder: Path, changes: dict[str, int]
) -> None:
    with opened(folder, 2, **changes) as (model, ranks):
        assert model.exchange is None
        assert not ranks.group.board.bounces


@contextmanager
def one_gpu(folder: Path) -> Iterator[LoadedModel]:
    """Interpreted, in one process."""
    model = interpreted(folder, context_tokens=256, sequences=8, step_tokens=128)
    with ExitStack() as resources:
        resources.callback(model.close)
        memory: Any = model.sleeper
        yield replace(model, exchange=device_exchange(memory, resources))


@pytest.mark.skipif(torch.cuda.is_available(), reason="processes of a CPU; test_ranks_on_gpus.py has GPUs")
def test_what_two_gpus_hand_over_one_goes_on_with_and_the_other_way_round(tmp_path: Path) -> None:
    folder = saved(reference_model("llama 2", num_hidden_layers=1), tmp_path)
    with two(folder, **HANDOVER) as ranks:
        sent, wanted = computed(ranks.model), behind(ranks.model, BLOCKS)
        with one_gpu(folder) as model:
            of_one = computed(model)
            numbers, others = (torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (sent, of_one))
            whole = TOKENS // BLOCK_TOKENS * block_bytes(model) // 4
            assert torch.allclose(numbers[:whole], others[:whole], atol=1e-5)
            drawn = require_goes_on(model, sent)
        assert drawn[0] == require_goes_on(ranks.model, of_one)[0] == wanted[0]
        assert require_goes_on(ranks.model, sent) == wanted
