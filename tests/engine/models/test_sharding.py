"""engine/models/sharding.py: what the ranks have is together what the model has, each number once."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.layers.rank_shard import RankShard
from engine.models.config import read_decoder_config
from engine.models.sharding import shard_config, shard_parameters
from engine.models.weight_names import decoder_entries
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


def test_heads_stay_with_their_kv_head(tmp_path: Path) -> None:
    config = read_decoder_config(saved(reference_model("qwen3"), tmp_path))
    whole, own = decoder_entries(config), decoder_entries(shard_config(config, 2))
    rows = dict(shard_parameters(whole, own, RankShard(1, 2)))["layers.0.qkv.weight"].rows
    head = config.head_dim
    assert rows == (range(2 * head, 4 * head), range(5 * head, 6 * head), range(7 * head, 8 * head))
