"""engine/models/config.py: each family's own rules, and refusals that name what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.models.config import ModelConfigError, RopeConfig, parse_decoder_config, read_decoder_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "max_window_layers": 3}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 32}


def test_llama_without_extras() -> None:
    config = parse_decoder_config(LLAMA)
    assert (config.head_dim, config.kv_heads, config.windows) == (16, 2, (None,) * 4)
    assert config.rope == RopeConfig(10000.0)
    switches = (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm, config.tied_head)
    assert switches == (False,) * 5


def test_heads_default_to_one_kv_head_each() -> None:
    without = {entry: value for entry, value in LLAMA.items() if entry != "num_key_value_heads"}
    assert parse_decoder_config(without).kv_heads == 4


def test_both_spellings_of_rope_mean_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling | {"type": "llama3"}}
    new = LLAMA | {"rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 5e5}}
    assert (
        parse_decoder_config(old).rope == parse_decoder_config(new).rope == RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64)
    )


def test_mistral_windows_every_layer_and_none_without_a_window() -> None:
    assert parse_decoder_config(MISTRAL).windows == (32,) * 4
    assert parse_decoder_config(MISTRAL | {"sliding_window": None}).windows == (None,) * 4


def test_qwen2_windows_only_where_switched_on_and_from_max_window_layers() -> None:
    assert parse_decoder_config(QWEN2).windows == (None,) * 4
    assert parse_decoder_config(QWEN2 | {"use_sliding_window": True}).windows == (None, None, None, 32)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert parse_decoder_config(QWEN2 | {"use_sliding_window": True, "layer_types": kinds}).windows == (
        32,
        None,
        32,
        None,
    )


def test_biases_belong_to_families() -> None:
    assert parse_decoder_config(QWEN2).qkv_bias
    assert not parse_decoder_config(QWEN2).output_bias
    biased = parse_decoder_config(LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert biased.qkv_bias
    assert biased.output_bias
    assert biased.mlp_bias
    assert not parse_decoder_config(MISTRAL | {"attention_bias": True}).qkv_bias


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": []}, "architectures"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"head_dim": 15}, "head_dim"),
    ],
)
def test_what_cannot_run_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelConfigError, match=said):
        parse_decoder_config(LLAMA | change)


def test_stop_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 7}))
    assert read_decoder_config(tmp_path).stop_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 9]}))
    assert read_decoder_config(tmp_path).stop_ids == (3, 9)


@pytest.mark.parametrize("content", ["{", "[]", "\xff", "[" * 100_000], ids=["cut", "a list", "no text", "nested"])
def test_a_broken_config_is_a_clear_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelConfigError, match=r"config\.json"):
        read_decoder_config(tmp_path)


def test_a_folder_without_config_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="missing"):
        read_decoder_config(tmp_path)
