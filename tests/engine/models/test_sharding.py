"""engine/models/sharding.py: what the ranks have is together what the model has, each number once."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.layers.rank_shard import RankShard
from engine.models.config import read_decoder_config
from engine.models.sharding import CannotShard, shard_config, shard_parameters
from engine.models.weight_names import decoder_entries
from engine.protocol.expert_cut import ExpertCut, expert_cut
from tests.support.small_models import FAMILIES, reference_model, saved


@pytest.mark.parametrize(
    "family", ["llama biases", "phi4 mini", "qwen3", "gemma3", "qwen2", "mixtral", "llama4 maverick", "gpt-oss"]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_union_of_all_ranks_parts_is_the_parameter(family: str, ranks: int, tmp_path: Path) -> None:
    config = read_decoder_config(saved(reference_model(family, num_key_value_heads=4), tmp_path))
    whole, own = decoder_entries(config), decoder_entries(shard_config(config, ranks))
    cut = set()
    for entry in whole:
        rows, shape = sum(source.placed[0] for source in entry.sources), entry.sources[0].placed[1:]
        numbers = torch.arange(rows * (shape[0] if shape else 1)).view(rows, *shape)
        taken: list[Tensor] = []
        for rank in range(ranks):
            part = dict(shard_parameters(whole, own, RankShard(rank, ranks)))[entry.parameter]
            tensor = torch.cat([numbers[run.start : run.stop] for run in part.rows])
            taken.append(tensor if part.columns is None else tensor[:, part.columns.start : part.columns.stop])
        if all(torch.equal(tensor, numbers) for tensor in taken):
            continue
        cut.add(entry.parameter.rpartition("layers.0.")[2])
        assert sorted(torch.cat([tensor.flatten() for tensor in taken]).tolist()) == list(range(numbers.numel()))
    mlp = "experts." if config.has_experts(0) else ""
    assert {"qkv.weight", "output.weight", f"{mlp}gate_up.weight", f"{mlp}down.weight"} <= cut
    assert not cut & {
        "router.weight",
        "experts.down.bias",
        "embedding",
        "norm",
        "attention_norm",
        "output.bias",
        "down.bias",
    }
    assert family in FAMILIES


@pytest.mark.parametrize("family", ["mixtral", "qwen3moe some dense", "llama4 maverick", "gpt-oss"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_whole_experts_of_all_ranks_are_the_parameter_in_its_order(family: str, ranks: int, tmp_path: Path) -> None:
    config = read_decoder_config(saved(reference_model(family, num_key_value_heads=4), tmp_path))
    own_config = shard_config(config, ranks, ExpertCut.EXPERTS)
    assert config.mixture is not None
    assert own_config.mixture is not None
    assert own_config.mixture.held * ranks == config.mixture.rule.experts
    assert own_config.mixture.intermediate == config.mixture.intermediate
    assert own_config.mixture.shared * ranks == config.mixture.shared
    whole, own = decoder_entries(config), decoder_entries(own_config)
    parts = [dict(shard_parameters(whole, own, RankShard(rank, ranks), whole_experts=True)) for rank in range(ranks)]
    for entry, own_entry in zip(whole, own, strict=True):
        rows = sum(source.placed[0] for source in entry.sources)
        runs = [run for part in parts for run in part[entry.parameter].rows]
        if entry.is_of_experts:
            assert [row for run in runs for row in run] == list(range(rows))
            assert {part[entry.parameter].columns for part in parts} == {None}
            assert sum(source.placed[0] for source in own_entry.sources) * ranks == rows
        if ".router." in entry.parameter:
            assert runs == [range(rows)] * ranks


@pytest.mark.parametrize(
    ("experts", "inner", "keeps_format", "cut"),
    [
        (8, 64, True, ExpertCut.INSIDE),
        (8, 64, False, ExpertCut.EXPERTS),
        (8, 63, True, ExpertCut.EXPERTS),
        (7, 64, False, ExpertCut.INSIDE),
        (7, 63, True, None),
    ],
)
def test_experts_are_cut_inside_unless_that_takes_more_memory_or_does_not_divide(
    experts: int, inner: int, keeps_format: bool, cut: ExpertCut | None
) -> None:
    assert expert_cut(2, experts, inner, keeps_format) is cut


def test_what_divides_neither_way_is_refused_by_name(tmp_path: Path) -> None:
    config = read_decoder_config(saved(reference_model("qwen3moe", moe_intermediate_size=64), tmp_path))
    assert config.mixture is not None
    rule = replace(config.mixture.rule, experts=7)
    odd = replace(config, mixture=replace(config.mixture, rule=rule, intermediate=33))
    with pytest.raises(CannotShard, match="intermediate size 33 is no multiple of 2, nor is their number 7"):
        shard_config(odd, 2)
    shared = replace(config, mixture=replace(config.mixture, intermediate=33, shared=33))
    with pytest.raises(CannotShard, match="shared expert's size 33 is no multiple of 2"):
        shard_config(shared, 2)


def test_heads_stay_with_their_kv_head(tmp_path: Path) -> None:
    config = read_decoder_config(saved(reference_model("qwen3"), tmp_path))
    whole, own = decoder_entries(config), decoder_entries(shard_config(config, 2))
    rows = dict(shard_parameters(whole, own, RankShard(1, 2)))["layers.0.qkv.weight"].rows
    head = config.head_dim
    assert rows == (range(2 * head, 4 * head), range(5 * head, 6 * head), range(7 * head, 8 * head))
