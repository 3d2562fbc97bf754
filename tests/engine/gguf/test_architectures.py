"""engine/gguf/architectures.py: metadata become config.json, and what is not served is refused by name."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.gguf.architectures import config_of, tensor_imports
from engine.gguf.reader import GgufError, GgufFile, read_gguf
from tests.support.gguf_files import write_model
from tests.support.small_models import reference_model


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    return read_gguf(write_model(tmp_path_factory.mktemp("gguf") / "model.gguf", reference_model("llama 2")))


def changed(file: GgufFile, changes: Mapping[str, Any]) -> GgufFile:
    """With other metadata; None leaves an entry out."""
    metadata = {**file.metadata, **changes}
    return replace(file, metadata={name: value for name, value in metadata.items() if value is not None})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"general.architecture": "gemma3"}, "architecture 'gemma3'; served are llama, qwen2, qwen3"),
        ({"general.architecture": None}, "architecture ''"),
        ({"llama.block_count": None}, "llama.block_count is None"),
        ({"llama.block_count": 1 << 30}, "claims 1,073,741,824 layers in 30 tensors"),
        ({"llama.block_count": 4}, r"lacks blk\.3\.attn_norm\.weight"),
        ({"llama.block_count": 2}, r"has blk\.2\.\S+ and more"),
        ({"llama.attention.head_count": [4, 4, 4]}, r"head_count is \[4, 4, 4\]"),
        ({"llama.attention.head_count": 0}, "head_count is 0"),
        ({"llama.attention.head_count_kv": 3}, "no multiple of num_key_value_heads"),
        ({"llama.attention.key_length": 15}, "value_length is not the 15 of"),
        ({"llama.feed_forward_length": 97}, r"ffn_gate.weight is \[96, 64\], its metadata mean \[97, 64\]"),
        ({"llama.embedding_length": 1 << 40}, "embedding_length is 1099511627776"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is not the 16"),
        ({"llama.rope.freq_base": float("nan")}, "freq_base is nan"),
        ({"llama.attention.layer_norm_rms_epsilon": "small"}, "epsilon is 'small'"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "rope.scaling.type is 'yarn'"),
        ({"llama.rope.scaling.factor": [4.0]}, r"rope.scaling.factor is \[4.0\]"),
        ({"split.count": 3}, "is a part of a model: merge all of them"),
        ({"llama.expert_count": 8}, "llama.expert_count, which is not served"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale, which is not served"),
    ],
)
def test_what_is_not_served_is_refused_by_name(file: GgufFile, changes: dict[str, Any], said: str) -> None:
    wrong = changed(file, changes)
    with pytest.raises(GgufError, match=said):
        tensor_imports(wrong, config_of(wrong, None))


def test_a_window_makes_a_mistral_and_is_refused_elsewhere(file: GgufFile) -> None:
    config = config_of(changed(file, {"llama.attention.sliding_window": 37}), None)
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], 37)
    renamed = {name.replace("llama.", "qwen3."): value for name, value in file.metadata.items()}
    qwen = replace(file, metadata={**renamed, "general.architecture": "qwen3", "qwen3.attention.sliding_window": 37})
    with pytest.raises(GgufError, match=r"qwen3\.attention\.sliding_window 37: not served"):
        config_of(qwen, None)


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (8.0, 256), (4.0, 16384)])
def test_the_factors_of_llama_3_are_what_they_were_made_of(file: GgufFile, factor: float, original: int) -> None:
    theta = {"llama.rope.freq_base": 500_000.0, "llama.attention.key_length": 128, "llama.attention.value_length": 128}
    wavelengths = 2 * np.pi * 500_000.0 ** (np.arange(64) / 64)
    factors = np.ones(64, np.float32)
    for index, wavelength in enumerate(wavelengths):  # as the paper has it, number by number
        if wavelength > original:
            factors[index] = factor
        elif wavelength > original / 4:
            smooth = (original / wavelength - 1) / 3
            factors[index] = 1 / ((1 - smooth) / factor + smooth)
    config = config_of(changed(file, theta), factors)
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    for wrong in (factors[:-1], factors * 1.01, np.ones(64, np.float32), np.linspace(1, 9, 64, dtype=np.float32)):
        with pytest.raises(GgufError, match=r"not of the kind of Llama 3\.1"):
            config_of(changed(file, theta), wrong)


def test_a_missing_embedding_is_told(file: GgufFile) -> None:
    without = {name: tensor for name, tensor in file.tensors.items() if name != "token_embd.weight"}
    with pytest.raises(GgufError, match="no whole language model"):
        config_of(replace(file, tensors=without), None)


def test_what_the_file_says_is_in_the_config(file: GgufFile, tmp_path: Path) -> None:
    config = config_of(changed(file, {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}), None)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert (config["rms_norm_eps"], config["rope_theta"], config["max_position_embeddings"]) == (1e-6, 10_000.0, 2048)
    assert not config["tie_word_embeddings"]
