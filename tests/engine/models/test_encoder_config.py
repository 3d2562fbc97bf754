"""What config.json and checkpoints of encoders must say, and what is told where they do not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.config import ModelConfigError
from engine.models.encoder_config import is_encoder, parse_encoder_config
from engine.protocol.types import Pooling
from engine.weights.checkpoint import CheckpointError
from tests.support import minilm
from tests.support.small_encoders import FAMILIES, RERANKERS, open_encoder, saved, seeded, vectors

BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "vocab_size": 100,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}


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
