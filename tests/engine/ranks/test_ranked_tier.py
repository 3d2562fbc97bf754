"""Host memory below the pools of a model of several ranks: each rank's part of a block comes back, is zeroed, and is
there on all of them or on none."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kvcache.slot_tier import SlotTier
from engine.memory.pinned import PIECE_BYTES
from engine.step.executor import BlockTier, LoadedModel
from engine.step.layout import SequenceSlice
from tests.engine.ranks.test_gpu_ranks import two
from tests.engine.ranks.test_ranks import SAMPLED, opened, prompt, step
from tests.support.small_models import reference_model, saved

pytestmark = pytest.mark.usefixtures("inference")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(reference_model("llama 2", num_key_value_heads=4), tmp_path_factory.mktemp("model"))


def tier_of(model: LoadedModel) -> BlockTier:
    assert model.tier is not None
    return model.tier


def behind(model: LoadedModel, blocks: list[int]) -> Any:
    """What a step draws behind a prompt of 20 tokens whose KV is in these blocks."""
    return step(model, [SequenceSlice([30], 20, [blocks], SAMPLED)])


def require_parts_come_back(model: LoadedModel, gpus: int) -> None:
    """All blocks of a prompt, over a sleep too; and not what was zeroed in the host."""
    tier, memory = tier_of(model), model.memories[0]
    assert (tier.slots, tier.grow(), tier.grow()) == (0, True, False)
    assert tier.slots == tier.max_slots > 0
    assert model.sleeper.usage().kept_bytes == gpus * PIECE_BYTES
    step(model, [prompt()])
    blocks = [0, 1, 2, 3]
    wanted = behind(model, blocks)
    tier.store(blocks, [5, 6, 9, 4])
    memory.zero(blocks)
    zeroed = behind(model, blocks)
    assert zeroed != wanted
    mapped, fall_asleep = memory.mapped, model.sleeper.sleep
    fall_asleep([[]])
    model.sleeper.wake([mapped], [[]])
    tier.load([5, 6], [10, 11]).wait()
    tier.load([9, 4], [12, 13]).wait()
    assert behind(model, [10, 11, 12, 13]) == wanted
    memory.zero([10])
    without_first = behind(model, [10, 11, 12, 13])
    assert without_first not in (wanted, zeroed)
    tier.zero([5])
    tier.load([5, 6, 9, 4], [14, 15, 16, 17]).wait()
    assert behind(model, [14, 15, 16, 17]) == without_first


@pytest.mark.parametrize("gpus", [2, 4])
def test_the_parts_of_all_ranks_come_back(folder: Path, gpus: int) -> None:
    with opened(folder, gpus, host_kv_bytes=gpus * PIECE_BYTES) as (model, _):
        require_parts_come_back(model, gpus)


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_ranks_on_gpus.py has GPUs")
def test_the_parts_of_all_ranks_come_back_as_gpus_copy_them(folder: Path) -> None:
    with two(folder, host_kv_bytes=2 * PIECE_BYTES) as ranks:
        require_parts_come_back(ranks.model, 2)


@pytest.mark.parametrize("refusing_rank", [0, 1])
def test_all_ranks_have_the_slots_that_each_of_them_has_memory_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, refusing_rank: int
) -> None:
    parent, own = os.getpid(), SlotTier.grow

    def grow(self: SlotTier) -> bool:
        refuses = (os.getpid() == parent) == (refusing_rank == 0) and self.slots > 0
        return False if refuses else own(self)

    monkeypatch.setattr(SlotTier, "grow", grow)
    with opened(folder, 2, host_kv_bytes=8 * PIECE_BYTES) as (model, ranks):
        tier = tier_of(model)
        assert tier.grow()
        slots = tier.slots
        assert not tier.grow()
        assert tier.slots == tier.max_slots == slots
        assert model.sleeper.usage().kept_bytes == 2 * PIECE_BYTES
        published = ranks.group.board.published
        assert not tier.grow()
        assert ranks.group.board.published == published, "nobody is asked again"
        step(model, [prompt()])
