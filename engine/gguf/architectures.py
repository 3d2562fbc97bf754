"""A GGUF file's metadata → config.json, and which of its tensors is which of the checkpoint's. It reads no weights.

In files of `llama`, of which Mistral's are as well, the rows of q and k lie as a rotation of neighbours wants them; a
checkpoint has the first halves of all pairs before the second. Qwen's lie as in the checkpoint.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine.gguf.reader import GgufError, GgufFile, GgufTensor
from engine.models.config import ModelConfig, ModelConfigError, parse_decoder_config
from engine.models.weight_names import decoder_entries

ROPE_FACTORS: Final = "rope_freqs.weight"
_FAMILIES: Final = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_INTERLEAVED: Final = "llama"
_UNUSED: Final = (ROPE_FACTORS, ".attn_rot_embd.weight")
_TENSORS: Final = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_PARTS: Final = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
# Keys below the architecture's name that change what a model computes, in a way that is not served.
_UNSERVED: Final = (
    *("expert_count", "logit_scale", "embedding_scale", "residual_scale", "attention.scale", "attention.clamp_kqv"),
    *("attn_logit_softcapping", "final_logit_softcapping", "attention.temperature_scale"),
)
# What Llama 3.1 and those after it scale by; a file has only the factors that come of it.
_LOW_FREQUENCY_FACTOR: Final = 1.0
_HIGH_FREQUENCY_FACTOR: Final = 4.0
_ORIGINAL_CONTEXT: Final = 8192
_FACTOR_ERROR_MAX: Final = 1e-3


@dataclass(frozen=True, slots=True)
class TensorImport:
    """A tensor of the checkpoint and where it comes from. `head_dim` is that of rows that are to be put into halves; 0
    where they stay as they are."""

    name: str
    shape: tuple[int, ...]
    source: GgufTensor
    head_dim: int


def config_of(file: GgufFile, rope_factors_D: NDArray[np.float32] | None) -> dict[str, Any]:
    """config.json, whose end is the file's data type: bfloat16. Raises GgufError for what is not served."""
    reader = _Metadata(file)
    family, embedding = _FAMILIES[reader.architecture], file.tensors.get("token_embd.weight")
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise GgufError(f"{file.path} is a part of a model: merge all of them into one file first (llama-gguf-split)")
    if embedding is None or len(embedding.shape) != 2:
        raise GgufError(f"{file.path} has no token_embd.weight, so it is no whole language model")
    for key in _UNSERVED:
        if reader.entry(key):
            raise GgufError(f"{file.path} has {reader.architecture}.{key}, which is not served")
    heads, hidden, layers = (reader.count(key) for key in ("attention.head_count", "embedding_length", "block_count"))
    if layers > len(file.tensors):
        raise GgufError(f"{file.path} claims {layers:,} layers in {len(file.tensors):,} tensors")
    head_dim = reader.count("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if reader.count(key, head_dim) != head_dim:
            raise GgufError(f"{file.path}: {reader.architecture}.{key} is not the {head_dim} of a head's keys")
    config: dict[str, Any] = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": reader.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": reader.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": reader.real("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": reader.count("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": reader.real("rope.freq_base", 10_000.0),
        **_scaling(reader, rope_factors_D, head_dim),
    }
    if family != "Qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if family == "Llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    if window := reader.entry("attention.sliding_window"):
        if family != "Llama" or config["attention_bias"] or config["mlp_bias"]:
            raise GgufError(f"{file.path} has {reader.architecture}.attention.sliding_window {window}: not served")
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return config | {"dtype": "bfloat16"}


def tensor_imports(file: GgufFile, config: Mapping[str, Any]) -> list[TensorImport]:
    """Every tensor of the checkpoint, in the order in which layers use them. Raises GgufError where the file's tensors
    are not exactly those that its metadata mean."""
    try:
        parsed = parse_decoder_config(config)
    except ModelConfigError as error:
        raise GgufError(f"{file.path}: {error}") from error
    imports = []
    for source in (source for entry in decoder_entries(parsed) for source in entry.sources):
        name = _gguf_name(source.name)
        tensor = file.tensors.get(name)
        if tensor is None:
            raise GgufError(f"{file.path} lacks {name}, which its metadata mean")
        if tensor.shape != source.shape:
            raise GgufError(f"{file.path}: {name} is {list(tensor.shape)}, its metadata mean {list(source.shape)}")
        imports.append(TensorImport(source.name, source.shape, tensor, _head_dim(file, parsed, name)))
    used = {entry.source.name for entry in imports}
    if unknown := [name for name in file.tensors if name not in used and not name.endswith(_UNUSED)]:
        raise GgufError(f"{file.path} has {unknown[0]} and more ({len(unknown)}), which the model has no place for")
    return imports


def _head_dim(file: GgufFile, config: ModelConfig, name: str) -> int:
    rotated = ".attn_q." in name or ".attn_k." in name
    return config.head_dim if rotated and file.metadata["general.architecture"] == _INTERLEAVED else 0


def _gguf_name(name: str) -> str:
    part, _, kind = name.rpartition(".")
    if part in _TENSORS:
        return f"{_TENSORS[part]}.{kind}"
    _, _, layer, part = part.split(".", 3)
    return f"blk.{layer}.{_PARTS[part]}.{kind}"


class _Metadata:
    """What a file says below its architecture's name."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.architecture = str(file.metadata.get("general.architecture", ""))
        if self.architecture not in _FAMILIES:
            served = ", ".join(_FAMILIES)
            raise GgufError(f"{file.path} is of the architecture {self.architecture!r}; served are {served}")

    def entry(self, key: str) -> Any:
        return self._file.metadata.get(f"{self.architecture}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        value = self.entry(key)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < 1 << 31:
            raise self.wrong(key, value)
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.entry(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(key, value)
        return float(value)

    def wrong(self, key: str, value: object) -> GgufError:
        return GgufError(
            f"{self._file.path}: {self.architecture}.{key} is {value!r}, which no model that is served has"
        )


def _scaling(reader: _Metadata, factors_D: NDArray[np.float32] | None, head_dim: int) -> dict[str, Any]:
    """config.json's entry of how positions are scaled; empty where they are not."""
    factor = reader.real("rope.scaling.factor", reader.real("rope.scale_linear", 1.0))
    kind = reader.entry("rope.scaling.type") or ("none" if factor == 1.0 else "linear")
    if factors_D is not None:
        if kind not in ("none", "llama3") and factor != 1.0:
            raise reader.wrong("rope.scaling.type", kind)
        return {"rope_scaling": _llama3_scaling(reader, factors_D, head_dim)}
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {}
    if kind != "linear":
        raise reader.wrong("rope.scaling.type", kind)
    return {"rope_scaling": {"rope_type": "linear", "factor": factor}}


def _llama3_scaling(reader: _Metadata, factors_D: NDArray[np.float32], head_dim: int) -> dict[str, Any]:
    """What the divisors of the frequencies come of: low frequencies are divided by the factor, high ones by 1, and
    those between by what the original context sets. Raises GgufError where nothing gives these divisors."""
    theta = reader.real("rope.freq_base", 10_000.0)
    wavelengths_D = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    factor = float(factors_D.max()) if factors_D.shape == wavelengths_D.shape else 0.0
    between_D = (factors_D > 1.0 + 1e-4) & (factors_D < factor * (1 - 1e-4)) if factor > 1.0 else np.zeros(0, bool)
    spread = _HIGH_FREQUENCY_FACTOR - _LOW_FREQUENCY_FACTOR
    original = _ORIGINAL_CONTEXT
    if between_D.any():
        smooth_N = (1 / factors_D[between_D].astype(np.float64) - 1 / factor) / (1 - 1 / factor)
        original = round(float(np.median(wavelengths_D[between_D] * (_LOW_FREQUENCY_FACTOR + spread * smooth_N))))
    smooth_D = np.clip((original / wavelengths_D - _LOW_FREQUENCY_FACTOR) / spread, 0.0, 1.0)
    if factor <= 1.0 or np.abs(factors_D * ((1 - smooth_D) / factor + smooth_D) - 1).max() > _FACTOR_ERROR_MAX:
        raise GgufError(f"{reader.architecture}: {ROPE_FACTORS} is not of the kind of Llama 3.1, which is served")
    return {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": _LOW_FREQUENCY_FACTOR,
        "high_freq_factor": _HIGH_FREQUENCY_FACTOR,
        "original_max_position_embeddings": original,
    }
