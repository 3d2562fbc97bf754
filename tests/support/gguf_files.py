"""GGUF files, written with the library of llama.cpp's own converter: models of the reference library, vocabularies."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import PreTrainedModel

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
ENDS = {"bos_token_id": 0, "eos_token_id": 1}


def write_model(
    path: Path,
    model: PreTrainedModel,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    raw: Mapping[str, tuple[np.ndarray, GGMLQuantizationType]] | None = None,
) -> Path:
    """The model with its matrices in blocks of `kind`, those in `raw` as bytes that are blocks already. Its tokens are
    words that no text has."""
    config = model.config
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config.model_type]])
    _add_config(writer, config)
    tokens = ["<s>", "</s>", "t", "0", *(f"t{id}" for id in range(config.vocab_size - 4))]
    add_vocabulary(writer, tokens, {"<s>": 3, "</s>": 3}, ["t 0"])
    if config.rope_parameters["rope_type"] == "llama3":
        dim = config.head_dim
        plain_D = config.rope_parameters["rope_theta"] ** (-torch.arange(0, dim, 2).double() / dim)
        writer.add_tensor("rope_freqs.weight", (plain_D / model.model.rotary_emb.inv_freq.double()).float().numpy())
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        if raw and own in raw:
            writer.add_tensor(own, raw[own][0], raw_dtype=raw[own][1])
            continue
        numbers = _permuted(name, parameter.detach().float().numpy(), config)
        if numbers.ndim == 1 or kind is GGMLQuantizationType.F32:
            writer.add_tensor(own, numbers)
        else:
            writer.add_tensor(own, gguf.quantize(numbers, kind), raw_dtype=kind)
    return finish(writer, path)


def _add_config(writer: GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if config.rope_parameters["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    if config.model_type == "mistral" and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)


def _permuted(name: str, numbers: np.ndarray, config: Any) -> np.ndarray:
    """Rows of q and k as files of llama have them: the two of each pair beside each other."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2]
    if config.model_type not in ("llama", "mistral") or part not in heads:
        return numbers
    halves = numbers.reshape(heads[part], 2, -1, *numbers.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(numbers.shape)


def add_vocabulary(
    writer: GGUFWriter,
    tokens: Sequence[str],
    kinds: Mapping[str, int] | None = None,
    merges: Sequence[str] = (),
    **settings: Any,
) -> None:
    """A byte-level vocabulary, unless `settings` say another `model`; `kinds` of tokens that are not normal."""
    settings = {"model": "gpt2", "pre": "gpt-2", **ENDS, **settings}
    writer.add_token_list(tokens)
    writer.add_token_types([(kinds or {}).get(token, 1) for token in tokens])
    writer.add_token_merges(merges) if settings["model"] == "gpt2" else None
    for key, value in settings.items():
        name = f"tokenizer.ggml.{key}"
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case str():
                writer.add_string(name, value)
            case _:
                writer.add_array(name, value)


def finish(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
