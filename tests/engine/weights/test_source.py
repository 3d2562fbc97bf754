"""engine/weights/source.py: a compressed folder's parameters are those of the folder that it was made of, to the bit,
wherever they lie.
"""

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from msgspec.structs import replace as replace_fields
from torch import Tensor
from transformers import AutoModel, BertConfig

from engine.bf12.codec import Bf12Weight
from engine.bf12.metadata import CompressionLevel
from engine.execution.cpu_runner import CpuRunner
from engine.execution.open_gpu import describe_memory
from engine.layers.linear_gpu import Bf12Linear
from engine.layers.rank_shard import RankShard
from engine.memory.streams import DeviceStream, StreamEvent
from engine.memory.virtual_memory import Arena
from engine.models.config import read_decoder_config
from engine.protocol.reports import MemoryReport
from engine.protocol.specs import ModelSpec
from engine.protocol.types import Pooling, SamplingParams
from engine.step.executor import LoadedModel
from engine.weights import source as weights_source
from engine.weights.assembly import weights_bytes
from engine.weights.checkpoint import Checkpoint, CheckpointError
from engine.weights.device_buffer import WeightBuffer
from engine.weights.load import load_tensors
from engine.weights.source import WeightSource
from engine.weights.validate import inspect_weights
from tests.engine.execution.test_gpu_runner import logits as device_logits
from tests.support.batch_invariance import skip_if_bfloat16_varies
from tests.support.bf12_files import compressed, small_llama
from tests.support.small_encoders import open_encoder, vectors
from tests.support.small_models import Text, logits, open_small, spec

pytestmark = pytest.mark.usefixtures("inference")

CPU, GPU = torch.device("cpu"), torch.device("cuda")
LEVELS = pytest.mark.parametrize("level", list(CompressionLevel), ids=[level.name for level in CompressionLevel])
EMBER = Path(__file__).parents[3] / "engine/builtin_model"


@pytest.fixture(scope="module", params=[False, True], ids=["head", "tied"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_llama(tmp_path_factory.mktemp("source"), tied=request.param, shard="500KB")


def source_of(folder: Path, dtype: torch.dtype = torch.bfloat16, device: torch.device = CPU) -> WeightSource:
    return WeightSource.open(folder, read_decoder_config(folder), dtype, device, random=False)


def as_on_a_gpu(folder: Path) -> WeightSource:
    """In a GPU's forms, in host memory."""
    return replace(source_of(folder, device=GPU), device=CPU)


def answers(runner: LoadedModel) -> list[Tensor]:
    """Logits of prompts, in chunks, and of steps of a few rows."""
    on_host = isinstance(runner.executor, CpuRunner)
    generator = np.random.default_rng(5)
    tables = ([1, 0, 2], [4, 3, 5], [7, 8, 6])
    texts = [Text(generator.integers(0, runner.executor.limits.vocabulary, 40).tolist(), table) for table in tables]
    return [
        logits(runner, slices) if on_host else device_logits(runner, slices)
        for counts in ((31, 1, 8), (2, 33, 1), (1, 1, 1))
        for slices in [[text.slice(count, SamplingParams()) for text, count in zip(texts, counts, strict=True)]]
    ]


@LEVELS
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@skip_if_bfloat16_varies()
def test_a_cpu_gives_the_same_logits_to_the_bit(
    source: Path, level: CompressionLevel, dtype: str, tmp_path: Path
) -> None:
    plain, coded = (
        open_small(folder, dtype=dtype) for folder in (source, compressed(source, tmp_path / "coded", level))
    )
    assert plain.report.weights_bytes == coded.report.weights_bytes
    assert (coded.report.coded_bytes, coded.report.bf16_bytes) == (0, 0)
    assert plain.revision != coded.revision
    for wanted, found in zip(answers(plain), answers(coded), strict=True):
        assert torch.equal(found, wanted)


@LEVELS
@skip_if_bfloat16_varies()
def test_the_built_in_model_gives_the_same_logits_to_the_bit(level: CompressionLevel, tmp_path: Path) -> None:
    plain, coded = (
        open_small(folder, dtype="bfloat16") for folder in (EMBER, compressed(EMBER, tmp_path / "ember", level))
    )
    for wanted, found in zip(answers(plain), answers(coded), strict=True):
        assert torch.equal(found, wanted)


@LEVELS
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_encoder_gives_the_same_vectors_to_the_bit(level: CompressionLevel, dtype: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=160, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    AutoModel.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    coded = open_encoder(compressed(tmp_path / "plain", tmp_path / "coded", level), dtype=dtype)
    texts = [[5, 6, 7], list(range(20, 60)), [9]]
    wanted = vectors(open_encoder(tmp_path / "plain", dtype=dtype), texts, Pooling.MEAN)
    assert np.array_equal(vectors(coded, texts, Pooling.MEAN), wanted)
    coded.sleeper.sleep([[]])
    coded.sleeper.wake([[]], [[]])
    assert np.array_equal(vectors(coded, texts, Pooling.MEAN), wanted)


@LEVELS
@skip_if_bfloat16_varies()
def test_it_sleeps_and_wakes_and_sees_what_changed_meanwhile(
    source: Path, level: CompressionLevel, tmp_path: Path
) -> None:
    folder = compressed(source, tmp_path / "coded", level)
    runner = open_small(folder, dtype="bfloat16")
    wanted = answers(runner)
    runner.sleeper.sleep([[]])
    runner.sleeper.wake([[0]], [[]])
    for before, after in zip(wanted, answers(runner), strict=True):
        assert torch.equal(after, before)
    runner.sleeper.sleep([[]])
    file = sorted(folder.glob("*.safetensors"))[0]
    content = bytearray(file.read_bytes())
    content[-100] ^= 4
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{file.name}: .* is not as it was written"):
        runner.sleeper.wake([[0]], [[]])
    content[-100] ^= 4
    file.write_bytes(content)
    runner.sleeper.wake([[0]], [[]])
    assert torch.equal(answers(runner)[0], wanted[0])


@LEVELS
def test_a_gpus_parameters_take_what_was_planned(source: Path, level: CompressionLevel, tmp_path: Path) -> None:
    planned = as_on_a_gpu(compressed(source, tmp_path / "coded", level))
    parameters = planned.load(lambda: None)
    assert weights_bytes(parameters) == planned.bytes, "a tied head is no copy"
    assert planned.bf16_bytes == source_of(source).bytes
    assert planned.bf12_bytes < 0.77 * planned.bf16_bytes
    linears = [
        linear for layer in parameters.layers for linear in (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)
    ]
    assert all(isinstance(linear, Bf12Linear) for linear in (*linears, parameters.head))
    assert isinstance(parameters.embedding, Bf12Weight)
    assert (parameters.head.bytes == 0) == planned.config.tied_head


@LEVELS
def test_coded_weights_go_and_come_back_with_a_mark_for_each_layer(
    source: Path, level: CompressionLevel, tmp_path: Path
) -> None:
    planned = as_on_a_gpu(compressed(source, tmp_path / "coded", level))
    weights, copies = WeightBuffer(Arena.of(CPU), planned.shapes), DeviceStream(CPU)
    planned.load(lambda: None, dict(weights.tensors))
    before = {name: tensor.clone() for name, tensor in weights.tensors.items()}
    while weights.prepare(copies):
        pass
    weights.unmap()
    weights.map()
    there: list[set[str]] = []

    def record(mark: StreamEvent) -> None:
        there.append({name for name, tensor in weights.tensors.items() if torch.equal(tensor, before[name])})

    with patch.object(StreamEvent, "set", record):
        marks = weights.send(copies)
    heads = [] if planned.config.tied_head else ["head"]
    stages = ["embedding", "layers.0", "layers.1", "norm", *heads]
    assert len(marks) == len(there) == len(stages)
    for stage, names in zip(stages, there, strict=True):
        assert {name for name in before if name == stage or name.startswith(stage + ".")} <= names
    assert there[-1] == before.keys()


def test_a_load_says_how_much_is_in_12_bits(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = compressed(source, tmp_path / "coded", CompressionLevel.DISTRIBUTION)
    caplog.set_level("INFO", logger="engine.weights.load")
    planned = as_on_a_gpu(folder)
    planned.load(lambda: None)
    stored, kept, coded = (count / 1e6 for count in (Checkpoint(folder).bytes, planned.bytes, planned.bf12_bytes))
    (told,) = caplog.messages
    assert told.startswith(f"loaded {len(Checkpoint(folder).tensors)} tensors, {stored:.1f} MB in ")
    assert told.endswith(f"MB/s): {kept:.1f} MB on cpu, {coded:.1f} of them in 12 bits a number")
    memory = MemoryReport(
        model="m", pid=1, device="H200", device_bytes=100 << 30, weights_bytes=12 << 30, coded_bytes=11 << 30,
        bf16_bytes=15 << 30, kv_blocks=0, kv_block_tokens=16, kv_bytes=0, free_bytes=0,
    )  # fmt: skip
    assert "weights (11.00 of it in 12 bits a number) 12.00, KV" in describe_memory(memory)
    assert "weights 12.00, KV" in describe_memory(replace_fields(memory, coded_bytes=0))


def test_made_up_parameters_are_as_they_are(source: Path) -> None:
    planned = WeightSource.open(source, read_decoder_config(source), torch.bfloat16, GPU, random=True)
    assert planned.bf12_parameters == []
    assert (planned.bf12_bytes, planned.bf16_bytes) == (0, 0)
    assert planned.checkpoint is None


def test_a_folder_that_is_not_its_configs_is_refused_before_it_is_read(source: Path, tmp_path: Path) -> None:
    folder = compressed(source, tmp_path / "coded", CompressionLevel.DEVICE)
    config = replace(read_decoder_config(folder), layers=1)
    with pytest.raises(CheckpointError, match=r"no place for: model\.layers\.1\."):
        WeightSource.open(folder, config, torch.bfloat16, CPU, random=False)


def test_a_rank_has_one_whole_parameter_at_a_time_and_none_when_it_is_loaded(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of them would be missing from a GPU's KV."""
    whole: list[weakref.ref[Tensor]] = []
    trimmed: list[torch.device] = []

    def load(*arguments: Any) -> dict[str, Tensor]:
        assert not any(each() is not None for each in whole)
        loaded = load_tensors(*arguments)
        whole[:] = [weakref.ref(tensor) for tensor in loaded.values()]
        return loaded

    def trim(device: torch.device) -> None:
        assert whole
        assert not any(each() is not None for each in whole)
        trimmed.append(device)

    monkeypatch.setattr(weights_source, "_WHOLE_BYTES", 1)
    monkeypatch.setattr(weights_source, "load_tensors", load)
    monkeypatch.setattr(weights_source, "trim_memory", trim)
    folder = compressed(source, tmp_path / "coded", CompressionLevel.DEVICE)
    source_of(folder).cut(RankShard(0, 2))._tensors(lambda: None, None)
    assert trimmed == [CPU]


def test_headers_looked_at_without_torch_say_the_same(source: Path, tmp_path: Path) -> None:
    folder = compressed(source, tmp_path / "coded", CompressionLevel.DISTRIBUTION)
    seen, planned = inspect_weights(ModelSpec(name="m", folder=str(folder))), source_of(folder, device=GPU)
    assert seen.coded_bytes == planned.bf12_bytes
    assert 2 * seen.coded_numbers - seen.coded_bytes == planned.bf16_bytes - planned.bytes


@pytest.mark.gpu
@LEVELS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_gets_the_same_bits_as_a_cpu(
    source: Path, level: CompressionLevel, dtype: torch.dtype, tmp_path: Path
) -> None:
    gpu = torch.device("cuda", 0)
    planned = source_of(compressed(source, tmp_path / "coded", level), dtype, gpu)
    assert (len(planned.bf12_parameters) > 0) == (dtype is torch.bfloat16)
    assert planned.checkpoint is not None
    with torch.inference_mode():
        here, there = (
            load_tensors(planned.checkpoint.tensors, planned.table, planned.formats, device, lambda: None)
            for device in (CPU, gpu)
        )
    assert here.keys() == there.keys()
    for name, tensor in here.items():
        assert torch.equal(tensor.view(-1).view(torch.uint8), there[name].cpu().view(-1).view(torch.uint8)), name


@pytest.mark.gpu
def test_a_model_in_12_bits_is_as_exact_as_in_bf16_also_after_a_sleep(
    source: Path, open_on_gpu: Callable[[ModelSpec], Any], tmp_path: Path
) -> None:
    folder = compressed(source, tmp_path / "coded", CompressionLevel.DEVICE)
    exact = answers(open_small(source))
    plain, coded = (open_on_gpu(spec(each, dtype="bfloat16", kv_bytes=None, sequences=8)) for each in (source, folder))
    assert coded.report.weights_bytes == source_of(folder, device=GPU).bytes < 0.8 * coded.report.bf16_bytes
    assert coded.report.bf16_bytes == plain.report.weights_bytes
    assert 0 < coded.report.coded_bytes < coded.report.weights_bytes
    assert (plain.report.coded_bytes, plain.report.bf16_bytes) == (0, 0)
    first = answers(coded)
    held = list(range(9))
    coded.sleeper.sleep([held])
    coded.sleeper.wake([coded.paged.mapped], [held])
    for wanted, usual, found, again in zip(exact, answers(plain), first, answers(coded), strict=True):
        assert torch.equal(found, again)
        assert (found - wanted).norm() <= 1.5 * (usual - wanted).norm()
