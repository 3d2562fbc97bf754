"""engine/models/sharding.py: how layers are shared out to stages."""

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from engine.models.config import read_decoder_config
from engine.models.sharding import (
    CannotShard,
    balance,
    head_cost,
    layer_costs,
    stage_config,
    stage_layers,
    stage_name,
)
from engine.step.key_span import FULL, KeySpan
from tests.support.small_models import reference_model, saved


@settings(max_examples=150, deadline=None)
@given(some.lists(some.integers(1, 50), min_size=1, max_size=8), some.integers(0, 100), some.integers(1, 8))
def test_no_other_runs_of_layers_have_a_cheaper_dearest_stage(costs: list[int], first_cost: int, stages: int) -> None:
    stages = min(stages, len(costs))
    layers = balance(costs, first_cost, stages)
    assert [layer for own in layers for layer in own] == list(range(len(costs)))
    assert all(layers)

    def dearest(edges: tuple[int, ...]) -> int:
        bounds = [0, *edges, len(costs)]
        sums = [sum(costs[start:end]) for start, end in pairwise(bounds)]
        return max(sums[0] + first_cost, *sums[1:], 0)

    best = min(dearest(edges) for edges in combinations(range(1, len(costs)), stages - 1))
    assert dearest(tuple(own.start for own in layers[1:])) == best


def test_the_first_stage_has_fewer_layers_where_the_head_is_dear(tmp_path: Path) -> None:
    config = read_decoder_config(saved(reference_model("llama 2", num_hidden_layers=6), tmp_path))
    (cost,) = set(layer_costs(config))
    assert head_cost(config) == 64 * 160
    attention = 2 * 64 * 16 * (config.heads + config.kv_heads)
    assert cost == attention + 3 * 64 * config.intermediate
    assert stage_layers(config, 2) == [range(3), range(3, 6)]
    assert stage_layers(replace(config, vocabulary=16000), 2) == [range(1), range(1, 6)]
    assert stage_layers(replace(config, vocabulary=16000, vectors=True), 2) == [range(3), range(3, 6)]


def test_what_cannot_be_shared_out_is_refused_by_name(tmp_path: Path) -> None:
    config = read_decoder_config(saved(reference_model("llama 2"), tmp_path))
    with pytest.raises(CannotShard, match="stages = 4, and the model has 3 layers: set stages to fewer"):
        stage_layers(config, 4)
    kinds = replace(config, spans=(FULL, KeySpan(window=32), KeySpan(window=32)))
    words = "layers 0 to 0, those of stage 0, are not of all 2 kinds of attention that the model has"
    with pytest.raises(CannotShard, match=words):
        stage_layers(kinds, 3)
    turned = replace(config, layers=4, spans=(KeySpan(window=8), KeySpan(window=32)) * 2, ropes=config.ropes[:1] * 4)
    assert len(stage_layers(turned, 2)) == 2
    swapped = replace(turned, spans=(KeySpan(window=8), KeySpan(window=32), KeySpan(window=32), KeySpan(window=8)))
    with pytest.raises(CannotShard, match="layers 2 to 3"):
        stage_layers(swapped, 2)


def test_a_stage_counts_its_layers_from_0(tmp_path: Path) -> None:
    config = read_decoder_config(saved(reference_model("llama4 scout", num_hidden_layers=4), tmp_path))
    own = stage_config(config, range(2, 4))
    assert own.layers == 2
    assert (own.spans, own.ropes) == (config.spans[2:], config.ropes[2:])
    assert [own.has_experts(layer) for layer in range(2)] == [config.has_experts(layer) for layer in (2, 3)]
    assert stage_name("layers.3.qkv.weight", range(2, 4)) == "layers.1.qkv.weight"
    assert stage_name("layers.1.qkv.weight", range(2, 4)) is None
    assert stage_name("layers.12.qkv.weight", range(12, 14)) == "layers.0.qkv.weight"
    assert stage_name("norm", range(2, 4)) is None
    assert stage_name("head.weight", range(2)) == "head.weight"
