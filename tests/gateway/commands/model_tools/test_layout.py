"""How models are shared out, in words: what is said of experts is what the engine does with them."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.bench.geometries import GEOMETRIES
from engine.models.config import read_decoder_config
from engine.models.sharding import shard_config
from engine.protocol.rank_layout import RankLayout
from gateway.commands.model_tools.layout import layout_text
from gateway.settings.config import Config, ModelEntryConfig

IN_FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
INSIDE, WHOLE = ", each with a part of each expert", ", each with whole experts"


@pytest.mark.parametrize(
    ("name", "changes", "settings", "ranks", "said"),
    [
        ("qwen3-0.6b", {}, {}, 2, ""),
        ("qwen3-30b", {}, {}, 1, ""),
        ("qwen3-30b", {}, {}, 2, INSIDE),
        ("qwen3-30b", IN_FP8, {}, 2, INSIDE),
        ("qwen3-30b", IN_FP8, {}, 4, WHOLE),
        ("qwen3-30b", IN_FP8, {"dtype": "float16"}, 4, INSIDE),
        ("qwen3-30b", IN_FP8, {"random_weights": True}, 4, INSIDE),
        ("qwen3-30b", {"moe_intermediate_size": 767}, {}, 2, WHOLE),
        ("gpt-oss-20b", {}, {}, 2, INSIDE),
        ("gpt-oss-20b-mxfp4", {}, {}, 2, WHOLE),
        ("gpt-oss-20b-mxfp4", {}, {"random_weights": True}, 2, WHOLE),
        ("gpt-oss-20b-mxfp4", {"intermediate_size": 3072}, {}, 2, INSIDE),
    ],
)
def test_it_is_said_how_ranks_share_experts(
    name: str, changes: dict[str, Any], settings: dict[str, Any], ranks: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEOMETRIES[name] | changes))
    shard_config(read_decoder_config(tmp_path), ranks)
    entry = ModelEntryConfig(name="@cf/m/m", folder=str(tmp_path), gpus=ranks, **settings)
    layout = RankLayout(ranks, 1)
    assert layout_text(Config(), entry, layout) == f"{layout.text}{said}: as its settings say"
