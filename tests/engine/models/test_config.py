"""engine/models/config.py: each family's own rules, and refusals that name what is wrong, in its checkpoint too."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.config import (
    ModelConfigError,
    RopeConfig,
    is_encoder,
    parse_decoder_config,
    parse_encoder_config,
    read_decoder_config,
)
from engine.protocol.types import Pooling
from engine.step.key_span import FULL, KeySpan, LayerGroup
from engine.weights.checkpoint import CheckpointError
from tests.support import minilm
from tests.support.small_encoders import FAMILIES, RERANKERS, open_encoder, saved, seeded, vectors

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
WINDOWED = QWEN2 | {"use_sliding_window": True}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 32}
BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "vocab_size": 100,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}


def test_llama_without_extras() -> None:
    config = parse_decoder_config(LLAMA)
    assert (config.head_dim, config.kv_heads, config.spans) == (16, 2, (FULL,) * 4)
    assert config.ropes == (RopeConfig(10000.0),) * 4
    switches = (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm, config.tied_head)
    assert switches == (False,) * 5


def test_heads_default_to_one_kv_head_each() -> None:
    without = {entry: value for entry, value in LLAMA.items() if entry != "num_key_value_heads"}
    assert parse_decoder_config(without).kv_heads == 4


def test_both_spellings_of_rope_mean_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling | {"type": "llama3"}}
    new = LLAMA | {"rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 5e5}}
    wanted = (RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64),) * 4
    assert parse_decoder_config(old).ropes == parse_decoder_config(new).ropes == wanted


def test_mistral_windows_every_layer_and_none_without_a_window() -> None:
    assert parse_decoder_config(MISTRAL).spans == (KeySpan(window=32),) * 4
    assert parse_decoder_config(MISTRAL | {"sliding_window": None}).spans == (FULL,) * 4


def test_qwen2_windows_only_where_switched_on_and_from_max_window_layers() -> None:
    window = KeySpan(window=32)
    assert parse_decoder_config(QWEN2).spans == (FULL,) * 4
    assert parse_decoder_config(QWEN2 | {"use_sliding_window": True}).spans == (FULL, FULL, FULL, window)
    kinds = ["sliding_attention", "full_attention"] * 2
    config = parse_decoder_config(QWEN2 | {"use_sliding_window": True, "layer_types": kinds})
    assert config.spans == (window, FULL, window, FULL)
    assert config.kv_groups == (LayerGroup(FULL, (1, 3)), LayerGroup(window, (0, 2)))


def test_biases_belong_to_families() -> None:
    assert parse_decoder_config(QWEN2).qkv_bias
    assert not parse_decoder_config(QWEN2).output_bias
    biased = parse_decoder_config(LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert biased.qkv_bias
    assert biased.output_bias
    assert biased.mlp_bias
    assert not parse_decoder_config(MISTRAL | {"attention_bias": True}).qkv_bias


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": []}, "architectures"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_scaling": {"type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"head_dim": 15}, "head_dim"),
        (WINDOWED | {"sliding_window": 0}, "sliding_window"),
        (WINDOWED | {"sliding_window": -4}, "sliding_window"),
        (WINDOWED | {"layer_types": ["full_attention"] * 3}, "layer_types must name .* of 4 layers"),
        (WINDOWED | {"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, "chunked_attention"),
        (WINDOWED | {"layer_types": 4}, "layer_types"),
    ],
)
def test_what_cannot_run_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_act": "silu"}, "hidden_act 'silu'"),
        ({"num_attention_heads": 5}, "no multiple of num_attention_heads"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"architectures": ["BertForSequenceClassification"]}, "2 labels"),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}}, "3 labels"),
        ({"architectures": ["RobertaModel"], "max_position_embeddings": 2}, "max_position_embeddings 2"),
        ({"architectures": ["RobertaModel"], "pad_token_id": -1}, "pad_token_id"),
    ],
)
def test_what_is_not_run_is_refused_by_its_entry(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        parse_encoder_config({**BERT, **changes})


def test_robertas_context_is_what_its_positions_leave() -> None:
    config = parse_encoder_config({**BERT, "architectures": ["XLMRobertaModel"], "pad_token_id": 1})
    assert (config.first_position, config.context_tokens) == (2, 126)
    assert parse_encoder_config(BERT).context_tokens == 128


def test_encoders_are_told_from_decoders(tmp_path: Path) -> None:
    for architecture, encoder in (("BertModel", True), ("Qwen3Model", False)):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        assert is_encoder(tmp_path) == encoder


def test_weights_as_pickle_are_refused_with_a_way_out(tmp_path: Path) -> None:
    folder = saved(seeded(FAMILIES["bert"]), tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="only as pickle files"):
        open_encoder(folder)


def test_a_missing_tensor_and_one_without_a_place_are_named(tmp_path: Path) -> None:
    folder = saved(seeded(FAMILIES["bert"]), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "encoder.layer.1.output.dense.bias"
    bias = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=name):
        open_encoder(folder)
    save_file({**tensors, name: bias, "encoder.layer.9.stray": bias.clone()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"encoder\.layer\.9\.stray"):
        open_encoder(folder)


def test_another_familys_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = saved(seeded(FAMILIES["bert"]), tmp_path)
    save_file({"model.embed_tokens.weight": torch.zeros(4, 4)}, folder / "model.safetensors")
    with pytest.raises(ModelConfigError, match="word_embeddings"):
        open_encoder(folder)


def test_a_reranker_gives_scores_alone_and_others_vectors_alone(tmp_path: Path) -> None:
    reranker = open_encoder(saved(seeded(RERANKERS["bert"]), tmp_path / "reranker"))
    encoder = open_encoder(saved(seeded(FAMILIES["bert"]), tmp_path / "encoder"))
    assert reranker.poolings == {Pooling.SCORE}
    assert encoder.poolings == {Pooling.MEAN, Pooling.CLS}


def test_a_real_checkpoint_with_its_positions_written_out_is_read() -> None:
    runner = open_encoder(minilm.folder())
    assert runner.executor.limits.context_tokens == 512
    assert vectors(runner, [[101, 7592, 102]], Pooling.MEAN).shape == (1, 384)
