"""engine/pipeline/stage_plan.py: blocks that all stages have, however many layers each of them has."""

from pathlib import Path

import pytest
import torch

from engine.layers.rank_shard import RankShard
from engine.memory.streams import DeviceStream
from engine.models.config import read_decoder_config
from engine.models.sharding import stage_layers
from engine.pipeline.stage_plan import StageRoom, pool_sizes, stage_shares
from engine.pipeline.word_slots import WordSlots
from engine.weights.source import WeightSource
from tests.support.small_models import reference_model, saved, spec

CPU = torch.device("cpu")
PAGE = 4096


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of five layers, whose head is dear: its first stage has two of them."""
    model = reference_model("llama biases", num_hidden_layers=5)
    return saved(model, tmp_path_factory.mktemp("model"))


def source_of(folder: Path) -> WeightSource:
    return WeightSource.open(folder, read_decoder_config(folder), torch.float32, CPU, random=False)


def test_stages_share_out_weights_and_kv(folder: Path) -> None:
    source, model = source_of(folder), spec(folder, stages=2, kv_bytes=5 << 20, kept_kv_bytes=5 << 10)
    shares, layers = stage_shares(model, source), stage_layers(source.config, 2)
    assert [share.source.config.layers for share in shares] == [len(each) for each in layers] == [2, 3]
    assert sum(share.source.bytes for share in shares) == source.bytes
    assert [share.model.kv_bytes for share in shares] == [2 << 20, 3 << 20]
    assert [share.model.kept_kv_bytes for share in shares] == [2 << 10, 3 << 10]
    (first,), (second,) = (share.block_bytes for share in shares)
    assert 3 * first == 2 * second


def test_ranks_of_a_stage_share_out_what_the_stage_has(folder: Path) -> None:
    source, model = source_of(folder), spec(folder, gpus=2, stages=2, kv_bytes=10 << 20)
    shares = stage_shares(model, source, rank=1)
    alone = stage_shares(spec(folder, stages=2), source)
    assert [2 * share.block_bytes[0] for share in shares] == [share.block_bytes[0] for share in alone]
    assert [share.model.kv_bytes for share in shares] == [2 << 20, 3 << 20]
    whole = stage_shares(spec(folder, gpus=2), source, rank=1)
    assert [share.source.shapes for share in whole] == [source.cut(RankShard(1, 2), cut_embedding=True).shapes]


def test_blocks_and_extents_are_as_many_in_all_stages_as_suit_the_one_with_most_layers(folder: Path) -> None:
    source, model = source_of(folder), spec(folder, stages=2, context_tokens=256, sequences=64, kv_bytes=None)
    shares = stage_shares(model, source)
    room_bytes = 4 << 20
    ((blocks, at_once),) = pool_sizes(shares, torch.float32, 256, room_bytes, PAGE)
    most = max(share.block_bytes[0] for share in shares)
    left = min(room_bytes - share.source.bytes for share in shares)
    assert left // most <= blocks <= room_bytes // most
    assert at_once * (most // 3) % PAGE == 0


def test_room_is_what_the_stage_with_the_least_has() -> None:
    """Another stage has half as many free bytes left, and blocks that are half as large again."""
    room = StageRoom(more_free_bytes=-50, more_weights_bytes=10, block_bytes=3, own_block_bytes=2)
    assert room.of(100) == 60
    assert room.of_free(100) == 26


def test_slots_are_used_again_once_they_are_released_and_as_large_as_is_asked_for() -> None:
    slots = WordSlots(DeviceStream(CPU))
    first, second = slots.take(10), slots.take(10)
    assert first is not second
    assert len(first.used) == 10
    slots.release(first)
    assert slots.take(100_000) not in (first, second)
    assert slots.take(20) is first
    assert len(first.used) == 20
