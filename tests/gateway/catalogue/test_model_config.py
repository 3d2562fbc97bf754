"""gateway/catalogue/model_config.py: sizes that a file leaves to its family, and those of a decoder within it."""

import json
from pathlib import Path

import pytest

from engine.bench.geometries import GEOMETRIES
from engine.models.config import read_decoder_config
from gateway.catalogue.model_config import context_of, expanded_bytes, geometry_of, read_model_config, read_sampling


def test_a_decoder_within_a_model_that_sees_is_read_with_what_its_family_means(tmp_path: Path) -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    document = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {**text, "head_dim": None}}
    (tmp_path / "config.json").write_text(json.dumps(document))
    config = read_model_config(tmp_path)
    assert context_of(config) == 131_072
    geometry = geometry_of(config)
    assert (geometry.layers, geometry.heads, geometry.kv_heads) == (34, 8, 4)
    assert 3.7e9 < geometry.parameters(config) < 4.0e9  # Gemma 3 4B, whose vision is not counted


def test_other_families_are_read_as_they_are(tmp_path: Path) -> None:
    document = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert read_model_config(tmp_path) == document


def test_sampling_parameters_are_those_in_range_and_what_is_off_is_left_out(tmp_path: Path) -> None:
    assert read_sampling(tmp_path) == {}
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 1}))
    assert read_sampling(tmp_path) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    path.write_text(json.dumps({"temperature": "hot", "top_k": -1, "top_p": True, "repetition_penalty": 1.05}))
    assert read_sampling(tmp_path) == {"repetition_penalty": 1.05}


QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 3}
WINDOWED = {
    **GEOMETRIES,
    "gemma-3 by its list": GEOMETRIES["gemma-3-27b"] | {"layer_types": ["full_attention", "sliding_attention"] * 31},
    "qwen by its layers": GEOMETRIES["qwen3-0.6b"] | QWEN_WINDOW,
    "qwen by its list": GEOMETRIES["qwen3-0.6b"]
    | QWEN_WINDOW
    | {"layer_types": ["sliding_attention"] * 27 + ["full_attention"]},
    "qwen without": GEOMETRIES["qwen3-0.6b"] | QWEN_WINDOW | {"use_sliding_window": False},
}


@pytest.mark.parametrize(
    ("name", "billions", "ranks"),
    [
        ("mixtral-8x7b", 46.7, 8),
        ("qwen3-30b", 30.5, 4),
        ("gpt-oss-20b", 20.9, 8),
        ("scout", 107.8, 8),
        ("tiny", 0.0, 2),
    ],
)
def test_the_experts_of_mixtures_are_counted(name: str, billions: float, ranks: int) -> None:
    geometry = geometry_of(GEOMETRIES[name])
    assert geometry.parameters(GEOMETRIES[name]) == pytest.approx(1e9 * billions, rel=0.005, abs=1e6)
    assert geometry.most_ranks(GEOMETRIES[name]) == ranks


def test_experts_divide_by_their_number_where_their_width_does_not() -> None:
    odd = GEOMETRIES["qwen3-30b"] | {"moe_intermediate_size": 767}
    assert geometry_of(odd).most_ranks(odd) == 4
    assert geometry_of(odd).most_ranks(odd | {"num_experts": 6}) == 2
    assert geometry_of(odd).most_ranks(odd | {"num_experts": 7}) == 1
    beside = GEOMETRIES["scout"] | {"intermediate_size": 8191}  # one that all rows take is as wide
    assert geometry_of(beside).most_ranks(beside) == 1


def test_what_is_expanded_as_it_is_loaded_is_counted_so() -> None:
    oss = GEOMETRIES["gpt-oss-20b"] | {"quantization_config": {"quant_method": "mxfp4"}}
    assert expanded_bytes(oss, on_cpu=True) == 2 * geometry_of(oss).parameters(oss)
    assert expanded_bytes(oss, on_cpu=False) is None
    eight = GEOMETRIES["qwen3-8b"] | {"quantization_config": {"quant_method": "fp8"}}
    assert expanded_bytes(eight, on_cpu=False) is None
    assert expanded_bytes(eight, on_cpu=True) == pytest.approx(16.4e9, rel=0.01)
    assert expanded_bytes(GEOMETRIES["qwen3-8b"], on_cpu=True) is None


def test_dense_layers_between_those_with_experts_are_counted_as_such() -> None:
    maverick = GEOMETRIES["scout"] | {
        "num_local_experts": 128, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 16384,
    }  # fmt: skip
    assert geometry_of(maverick).parameters(maverick) == pytest.approx(400e9, rel=0.01)
    some = GEOMETRIES["qwen3-30b"] | {"mlp_only_layers": [0, 1]}
    all_experts = GEOMETRIES["qwen3-30b"]
    fewer = geometry_of(all_experts).parameters(all_experts) - geometry_of(some).parameters(some)
    assert fewer == 2 * 2048 * (3 * (128 * 768 - 6144) + 128)


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_are_those_that_the_engine_reads(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WINDOWED[name]))
    config = read_decoder_config(tmp_path)
    geometry = geometry_of(read_model_config(tmp_path))
    assert geometry.windows == tuple(span.tokens for span in config.spans)
    tokens = 32_768
    kept = sum(min(tokens, span.tokens or tokens) for span in config.spans)
    assert geometry.kv_numbers(tokens) == 2 * config.kv_heads * config.head_dim * kept
    assert geometry.kv_numbers(1) == geometry.kv_numbers_per_token
