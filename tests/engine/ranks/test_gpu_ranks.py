"""The ranks of a model on GPUs, of which each is a process that runs the GPU's kernels in Triton's interpreter: they
answer as one, draw once, sleep as one, and end where one is lost."""

import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from engine.bf12.codec import Bf12Weight
from engine.bf12.metadata import CompressionLevel
from engine.execution import gpu_model
from engine.execution.artifacts import kernels_folder
from engine.execution.gpu_memory import GpuMemory
from engine.execution.gpu_model import GpuModel
from engine.execution.gpu_runner import GpuRunner
from engine.execution.memory_plan import BOUNCE_BYTES, DoesNotFit
from engine.execution.open import loaded_decoder, read_decoder, seeing_source
from engine.layers.linear_gpu import Bf12Linear, GpuLinear
from engine.memory.errors import CaptureFailed, OutOfDeviceMemory
from engine.models.config import read_decoder_config
from engine.models.llama import kv_shape
from engine.models.parameter_entries import ParameterEntry
from engine.pipeline.pipeline_runner import PipelineRunner
from engine.protocol.specs import ModelSpec, ReplicaSpec
from engine.protocol.types import SamplingParams
from engine.ranks import fork, gpu_part
from engine.ranks.board import RankBoard
from engine.ranks.channel import RankChannel
from engine.ranks.command_ring import RING_BYTES, CommandKind
from engine.ranks.follower import Follower, FollowerModel
from engine.ranks.fork import Ranks, fork_ranks
from engine.ranks.gpu_executor import GpuAnnouncer, RankedGpuExecutor, pack_order, unpack_order
from engine.ranks.gpu_follow import follow_on_gpu
from engine.ranks.gpu_lead import lead_exchange, lead_part
from engine.ranks.gpu_part import RankFacts, WaitEnder, require_alike
from engine.ranks.group import RankGroup, RankLost, RankWatch
from engine.ranks.leader import RankCommands, RankedMemory, ranked_model
from engine.replica.served_model import open_served_model
from engine.step.layout import SequenceSlice, awaited_token, pack_step
from engine.step.order import StepOrder
from engine.weights import assembly, source
from engine.weights.formats import WeightFormats, select_formats
from engine.weights.tensor_index import StoredTensor
from tests.engine.execution.test_gpu_runner import interpreted
from tests.support.bf12_files import compressed
from tests.support.small_models import BLOCK_TOKENS, reference_model, saved, spec

pytestmark = [
    pytest.mark.usefixtures("inference"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="processes of a CPU; test_ranks_on_gpus.py has GPUs"),
]
CPU = torch.device("cpu")
FAMILIES = ("llama biases", "qwen3", "gemma2", "mixtral", "qwen3moe", "llama4 scout", "gpt-oss")
GREEDY = SamplingParams()
ALL = SamplingParams(temperature=0.7, seed=3, top_p=0.9, repetition_penalty=1.1, logprobs=3)


class OpenedRanks:
    """A model of several ranks as rank 0 has it."""

    def __init__(
        self, folder: Path, resources: ExitStack, gpus: int = 2, stages: int = 1, stall_s: float = 30.0, **settings: Any
    ) -> None:
        sizes = {"context_tokens": 256, "sequences": 8, "step_tokens": 128} | settings
        self.spec = model = spec(folder, gpus=gpus, stages=stages, dtype="float32", **sizes)
        count = gpus * stages
        board = RankBoard(count, RING_BYTES, 1, bounce_bytes=BOUNCE_BYTES if model.handover_bytes else 0)
        pairs = [RankChannel.pair() for _ in range(1, count)]

        def follow(rank: int, waker: int) -> None:
            torch.set_num_threads(1)
            follow_on_gpu(model, CPU, board, pairs[rank - 1][1], rank, waker)

        self.group = RankGroup.fork(board, follow, stall_s)
        resources.callback(self.group.close)
        config, tokens, files, source = read_decoder(model, CPU)
        source = seeing_source(model, source)
        commands = RankCommands(self.group)
        announcer = GpuAnnouncer(commands)
        ranks = Ranks(self.group, count, tuple(own for own, _ in pairs))
        self.part = lead_part(model, source, ranks, commands, announcer, tokens)
        opened = GpuModel(model, source.config, source, tokens, lambda: None, self.part, resources)
        memory = self.part.begin(opened.memory, [])
        assert isinstance(memory, RankedMemory)
        self.memory = memory
        self.exchange = lead_exchange(self.memory, commands, resources)
        runner = opened.decoder_runner(0)
        assert isinstance(runner, GpuRunner | PipelineRunner)
        resources.callback(runner.close)
        resources.callback(commands.close)
        for paged in self.memory.memories:
            paged.map(range(len(paged.mapped), paged.layout.extents))
        self.executor = RankedGpuExecutor(runner, announcer, self.group)
        parts = (self.executor, self.memory, Mock())
        loaded = loaded_decoder(model, config, tokens, files, parts, ExitStack())
        self.model = ranked_model(loaded, self.exchange, gpus)


@contextmanager
def two(folder: Path, **settings: Any) -> Iterator[OpenedRanks]:
    fits = patch.object(gpu_model, "_require_weights_fit", lambda device, needed: None)
    with fits, patch.object(assembly, "_linear_of", gpu_linear), ExitStack() as resources:
        yield OpenedRanks(folder, resources, **settings)


def in_memory_as_on_a_gpu(
    table: Iterable[ParameterEntry], stored: Mapping[str, StoredTensor], dtype: torch.dtype, device: torch.device
) -> WeightFormats:
    """In 12 bits a number what a GPU has so."""
    return select_formats(table, stored, torch.bfloat16, torch.device("cuda"))


def gpu_linear(weight_NK: Tensor | Bf12Weight, bias_N: Tensor | None) -> GpuLinear | Bf12Linear:
    return GpuLinear(weight_NK, bias_N) if isinstance(weight_NK, Tensor) else Bf12Linear(weight_NK, bias_N)


def life(executor: Any, memories: Any, sleeper: Any) -> list[Any]:
    """Prompts, decodes whose tokens nobody knows yet, rows with masks and all that sampling knows, sleep and wake."""
    rng = np.random.default_rng(1)
    texts = [rng.integers(2, 100, 20).tolist() for _ in range(2)]
    tables = [[list(range(first, first + 3))] * executor.limits.groups for first in (0, 3)]

    def step(ids: list[list[int]], first: int, sampling: SamplingParams, masked: bool = False) -> Any:
        history = None if sampling is GREEDY else ([1, 2, 3], 1)
        slices = [
            SequenceSlice(own, first, table, sampling, history, masked) for own, table in zip(ids, tables, strict=True)
        ]
        return executor.launch(pack_step(slices, BLOCK_TOKENS))

    prompts = step(texts, 0, GREEDY)
    behind = step([[awaited_token(0)], [awaited_token(1)]], 20, GREEDY)  # launched before the first has landed
    outputs = [prompts.wait(), behind.wait()]
    masked = step([[5], [6]], 21, ALL, masked=True)
    words = -(-executor.limits.vocabulary // 32)
    masks = np.zeros((2, words), np.int32)
    masks[0, 0], masks[1, 0] = 1 << 7, 1 << 9
    executor.sample(masked, masks)
    outputs.append(masked.wait())
    keep, mapped = [[0, 1, 3, 4]] * len(memories), [memory.mapped for memory in memories]
    fall_asleep, wake = sleeper.sleep, sleeper.wake
    assert fall_asleep(keep) > 0
    assert wake(mapped, keep) > 0
    outputs.append(step([[7], [8]], 22, ALL).wait())
    outputs.append(step([[awaited_token(1)], [awaited_token(0)]], 23, GREEDY).wait())
    return outputs


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: saved(reference_model(family), tmp_path_factory.mktemp("model")) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_two_gpus_answer_as_one(family: str, folders: dict[str, Path]) -> None:
    one = interpreted(folders[family], context_tokens=256, sequences=8, step_tokens=128)
    expected = life(one.executor, one.memories, one.sleeper)
    one.close()
    with two(folders[family]) as ranks:
        given = life(ranks.executor, ranks.memory.memories, ranks.memory)
    for own, other in zip(given, expected, strict=True):
        assert own.tokens_R.tolist() == other.tokens_R.tolist()
        for row, (logprob, ids, best) in other.logprobs.items():
            assert own.logprobs[row][0] == pytest.approx(logprob, abs=1e-4)
            assert own.logprobs[row][1] == ids
            assert own.logprobs[row][2] == pytest.approx(best, abs=1e-4)
    assert given[2].tokens_R.tolist() == [7, 9]


@pytest.mark.parametrize("tied", [False, True])
def test_two_gpus_answer_as_one_in_12_bits(tied: bool, tmp_path: Path) -> None:
    """All of a mixture is in 12 bits on both, the router and the embedding too."""
    torch.manual_seed(5)
    config = MixtralConfig(
        vocab_size=96, hidden_size=128, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4, head_dim=128,
        num_key_value_heads=2, num_local_experts=2, max_position_embeddings=256, initializer_range=0.05,
        pad_token_id=None, tie_word_embeddings=tied,
    )  # fmt: skip
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "plain", save_original_format=True)
    folder = compressed(tmp_path / "plain", tmp_path / "coded", CompressionLevel.DEVICE)
    one = interpreted(folder, coded=True, context_tokens=256, sequences=8, step_tokens=128)

    def answers(executor: Any) -> list[Any]:
        slices = [SequenceSlice([3, 80, 95, 7], 0, [[0]], GREEDY), SequenceSlice([90, 4], 0, [[1]], ALL)]
        prompts = executor.launch(pack_step(slices, BLOCK_TOKENS))
        decodes = [SequenceSlice([awaited_token(row)], (4, 2)[row], [[row]], ALL) for row in (0, 1)]
        return [prompts.wait(), executor.launch(pack_step(decodes, BLOCK_TOKENS)).wait()]

    expected = answers(one.executor)
    one.close()
    with patch.object(source, "select_formats", in_memory_as_on_a_gpu), two(folder) as ranks:
        formats = ranks.part.source.formats
        assert all(format_.is_bf12 for name, format_ in formats.items() if not name.endswith("norm"))
        given = answers(ranks.executor)
    for own, other in zip(given, expected, strict=True):
        assert own.tokens_R.tolist() == other.tokens_R.tolist()
        for row, (logprob, _, best) in other.logprobs.items():
            assert own.logprobs[row][0] == pytest.approx(logprob, abs=1e-4)
            assert own.logprobs[row][2] == pytest.approx(best, abs=1e-4)


def test_bytes_of_a_device_are_those_of_each_and_of_the_host_those_of_all(folders: dict[str, Path]) -> None:
    with two(folders["qwen3"]) as ranks:
        local, usage = ranks.memory.local.usage(), ranks.memory.usage()
        assert (usage.device_bytes, usage.min_bytes, usage.kv_bytes) == (
            local.device_bytes, local.min_bytes, local.kv_bytes,
        )  # fmt: skip
        assert usage.standby_bytes == 2 * local.standby_bytes
        assert usage.asleep_bytes >= ranks.part.windows.bytes >= 48 << 20
        layout, own_layout = (memory.memories[-1].layout for memory in (ranks.memory, ranks.memory.local))
        assert layout == replace(own_layout, name=layout.name)
        assert ("h2x" in layout.name, "h1x" in own_layout.name) == (True, True), "it is called as whole blocks are"


def test_a_model_that_sleeps_keeps_no_more_than_each_rank_has_memory_for(folders: dict[str, Path]) -> None:
    config = read_decoder_config(folders["qwen3"])
    kept_bytes = 8 * kv_shape(config, BLOCK_TOKENS, torch.float32).block_bytes
    with two(folders["qwen3"], kept_kv_bytes=kept_bytes) as ranks:
        replica = ReplicaSpec(model=ranks.spec, address="", pulse="", boot=1)
        served = open_served_model(ranks.model, replica, Mock(), lambda: 0.0)
        kept = list(range(served.sleep._max_kept_blocks()))
        assert len(kept) == 8
        mapped = [memory.mapped for memory in ranks.memory.memories]
        fall_asleep = ranks.memory.sleep
        fall_asleep([kept])
        assert ranks.memory.usage().kept_bytes == kept_bytes
        ranks.memory.wake(mapped, [kept])
        served.handovers.close()


def test_all_ranks_find_the_kernels_that_lie_beside_the_model(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def share(folder: Path) -> None:
        (tmp_path / str(os.getpid())).write_text(str(folder))

    monkeypatch.setattr(gpu_model, "share_kernel_cache", share)
    with two(folders["qwen3"]):
        assert [file.read_text() for file in tmp_path.iterdir()] == 2 * [str(kernels_folder(folders["qwen3"]))]


def test_ranks_are_told_to_copy_weights_as_long_as_there_are_some(folders: dict[str, Path]) -> None:
    with two(folders["qwen3"]) as ranks:
        local, told = ranks.executor._local, Mock(wraps=ranks.executor._announcer)
        local._announcer = local._preparation._announcer = told
        local._memory.standby = True
        while local.warm_up():
            pass
        copies = told.prepare.call_count
        assert copies > 0
        assert not local.warm_up()
        assert told.prepare.call_count == copies


def test_a_step_that_is_refused_before_the_others_hear_of_it_loses_nobody(folders: dict[str, Path]) -> None:
    with two(folders["qwen3"]) as ranks:
        with pytest.raises(AssertionError, match="past the vocabulary"):
            ranks.executor.launch(pack_step([SequenceSlice([5000], 0, [[0]], GREEDY)], BLOCK_TOKENS))
        local = ranks.executor._local
        local._launch_body = Mock(side_effect=OutOfDeviceMemory("no room"))
        with pytest.raises(RankLost, match="rank 0 failed in a step"):
            ranks.executor.launch(pack_step([SequenceSlice([5], 0, [[0]], GREEDY)], BLOCK_TOKENS))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_what_rank_0_waits_for(
    folders: dict[str, Path], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    with two(folders["qwen3"]) as ranks:
        watch = RankWatch(ranks.group, WaitEnder(ranks.part.windows).end)
        packed = pack_step([SequenceSlice([5, 6], 0, [[0]], GREEDY)], BLOCK_TOKENS)
        ranks.executor.launch(packed).wait()
        os.kill(ranks.group.pids[0], number)
        reason = "rank 1 ended" if number == signal.SIGKILL else "rank 1 made no progress for 1 s"
        with ranks.group.patient(1.0), pytest.raises(RankLost, match=reason):
            ranks.executor.launch(packed).wait()
        watch.close()
    assert not failed, "the watch ends its kernels' waits and nothing else"


def test_graphs_are_captured_by_all_ranks_or_by_none(folders: dict[str, Path]) -> None:
    with two(folders["qwen3"]) as ranks:
        captured: list[str] = []
        with pytest.raises(RankLost):  # no device of this follower captures graphs
            ranks.executor._announcer.capture(0, 8, lambda: captured.append("here"), lambda: captured.append("dropped"))
        assert captured == ["here"]


@pytest.mark.parametrize("refusing", [0, 1, 2])
def test_a_capture_that_fails_on_one_rank_is_undone_on_all(refusing: int) -> None:
    """Ranks are counted by what each has captured, in words that all see."""
    board = RankBoard(3, RING_BYTES, 64)
    sizes = np.frombuffer(board.buffers[0][0], np.int64)[:3]

    class Graphs:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def capture(self, graphs: int, size: int) -> None:
            if self.rank == refusing and size == 8:
                raise CaptureFailed("operation not permitted when stream is capturing")
            sizes[self.rank] += size

        def drop(self, graphs: int, size: int) -> None:
            sizes[self.rank] -= size

    def follow(rank: int, waker: int) -> None:
        memory = Mock(usage=lambda: Mock(device_bytes=0))
        Follower(board, rank, waker).follow(FollowerModel(lambda _: None, memory, Graphs(rank)))

    group = RankGroup.fork(board, follow)
    commands, own = RankCommands(group), Graphs(0)
    announcer = GpuAnnouncer(commands)

    def capture(size: int) -> None:
        announcer.capture(0, size, lambda: own.capture(0, size), lambda: own.drop(0, size))

    capture(4)
    with pytest.raises(CaptureFailed, match="not permitted" if refusing == 0 else f"rank {refusing}: operation not"):
        capture(8)
    assert sizes.tolist() == [4, 4, 4]
    capture(16)
    assert sizes.tolist() == [20, 20, 20]
    commands.close()
    group.close()


def test_a_rank_that_has_no_memory_to_wake_leaves_all_asleep(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, own, refused = os.getpid(), GpuMemory.wake, []

    def wake(self: GpuMemory, extents: Any, restore: Any) -> int:
        if os.getpid() != parent and not refused:
            refused.append(1)
            raise OutOfDeviceMemory("another process has it")
        return own(self, extents, restore)

    monkeypatch.setattr(GpuMemory, "wake", wake)
    with two(folders["qwen3"]) as ranks:
        packed = pack_step([SequenceSlice([5, 6], 0, [[0]], GREEDY)], BLOCK_TOKENS)
        before = ranks.executor.launch(packed).wait().tokens_R.tolist()
        mapped = [memory.mapped for memory in ranks.memory.memories]
        fall_asleep = ranks.memory.sleep
        fall_asleep([[]])
        asleep = [load.device_bytes for load in ranks.memory.rank_loads()]
        with pytest.raises(OutOfDeviceMemory, match="rank 1: another process has it"):
            ranks.memory.wake(mapped, [[]])
        assert [load.device_bytes for load in ranks.memory.rank_loads()] == asleep
        ranks.memory.wake(mapped, [[]])
        assert ranks.executor.launch(packed).wait().tokens_R.tolist() == before


def test_a_gpu_that_somebody_took_is_named_before_a_weight_is_read(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = os.getpid()
    monkeypatch.setattr(
        gpu_part, "device_facts", lambda device: ("H200", 140 << 30 if os.getpid() == parent else 1 << 20, 141 << 30)
    )
    monkeypatch.setattr(source, "load_shard", lambda *_: pytest.fail("it reads weights"))
    words = r"to go to GPU 1 of those .* 0.0 of 151.4 GB are free there: other processes"
    with pytest.raises(DoesNotFit, match=words), two(folders["qwen3"]):
        pass


def test_orders_come_as_they_were_sent() -> None:
    order, words = StepOrder(7, 8, 2, 0, True, False, True), np.arange(5, dtype=np.int32)
    taken, unpacked = unpack_order(pack_order(order, words))
    assert taken == order
    assert unpacked.tolist() == words.tolist()
    assert CommandKind.CAPTURE > CommandKind.CLOSE


def test_gpus_that_are_not_alike_or_do_not_reach_each_other_are_refused_by_name() -> None:
    def facts(rank: int, name: str = "H100", reaches: tuple[int, ...] = (0, 1, 2)) -> RankFacts:
        return RankFacts(rank, name, 80, 80, [other for other in reaches if other != rank])

    require_alike("m", [facts(0), facts(1), facts(2)])
    with pytest.raises(DoesNotFit, match="not alike, H100 and A100"):
        require_alike("m", [facts(0), facts(1), facts(2, "A100")])
    with pytest.raises(DoesNotFit, match="GPU 1 of those that it has does not reach the memory of GPU 2"):
        require_alike("m", [facts(0), facts(1, reaches=(0, 1)), facts(2)])


def test_fewer_visible_gpus_than_ranks_are_refused_before_anything_is_forked(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(fork.RankGroup, "fork", lambda *_: pytest.fail("it forked"))
    model: ModelSpec = spec(folders["qwen3"], gpus=2)
    with pytest.raises(DoesNotFit, match="gpus = 2, and 1 can be seen: set gpus to fewer, or show it more"):
        fork_ranks(model, "cuda", 1)
