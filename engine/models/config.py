"""What a checkpoint's config.json says, as one frozen value that the rest of the model can trust.

It knows the families by their `architectures` entry and what each leaves unsaid; it knows no tensor names.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final


class ModelConfigError(ValueError):
    """A config.json that this engine cannot run; the message names the entry and what would do."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `kind` is default, linear (positions ÷ factor) or llama3 (low frequencies ÷ factor)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer of the Llama kind.

    windows         per layer, how many tokens back attention reaches, its own included; None: all of them.
    qkv_bias …      which linear layers add a bias.
    qk_norm         RMS norm over each head of q and k before the rotation (Qwen3).
    tied_head       the output head is the embedding table.
    vectors         there is no head: what the last norm gives is the result.
    dtype           the weights', as the file says: float32, bfloat16 or float16; bfloat16 where it is silent.
    """

    architecture: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_epsilon: float
    rope: RopeConfig
    context_tokens: int
    windows: tuple[int | None, ...]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_head: bool
    stop_ids: tuple[int, ...]
    dtype: str
    vectors: bool = False

    @property
    def outputs(self) -> int:
        """How many numbers a sampled row gives: a logit for each token, or a vector."""
        return self.hidden if self.vectors else self.vocabulary


DECODER_ARCHITECTURES: Final = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
HEADLESS: Final = {f"{family}Model": f"{family}ForCausalLM" for family in ("Llama", "Mistral", "Qwen2", "Qwen3")}
ROPE_KINDS: Final = ("default", "linear", "llama3")
_FAMILY_THETA: Final = 10_000.0


def read_decoder_config(folder: Path, *, vectors: bool = False) -> ModelConfig:
    """Reads the folder's config.json, with stop ids from generation_config.json where it has them; without its head
    where the model is to give vectors. Raises ModelConfigError."""
    config = read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    stop = generation.get("eos_token_id")
    parsed = parse_decoder_config(config, stop if stop is not None else config.get("eos_token_id"))
    if parsed.vectors and not vectors:
        raise ModelConfigError(
            f"{folder} is a model without a head, which gives vectors: set its task to Text Embeddings"
        )
    return replace(parsed, vectors=vectors)


def parse_decoder_config(config: Mapping[str, Any], stop: int | list[int] | None = None) -> ModelConfig:
    """Raises ModelConfigError for an architecture, an activation, a rope kind or a size that this engine does not
    run."""
    architecture = _architecture(config)
    if config.get("hidden_act", "silu") != "silu":
        raise ModelConfigError(f"hidden_act {config['hidden_act']!r} is not supported; silu is")
    hidden, heads = positive_entry(config, "hidden_size"), positive_entry(config, "num_attention_heads")
    kv_heads = positive_entry(config, "num_key_value_heads", heads)
    layers = positive_entry(config, "num_hidden_layers")
    head_dim = positive_entry(config, "head_dim", 128 if architecture == "Qwen3ForCausalLM" else hidden // heads)
    if heads % kv_heads:
        raise ModelConfigError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise ModelConfigError(f"head_dim {head_dim} is odd, so it cannot be rotated")
    vocabulary = positive_entry(config, "vocab_size")
    attention_bias = bool(config.get("attention_bias", False)) and architecture not in _WITHOUT_ATTENTION_BIAS
    return ModelConfig(
        architecture=architecture,
        vocabulary=vocabulary,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=positive_entry(config, "intermediate_size"),
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config),
        context_tokens=positive_entry(config, "max_position_embeddings"),
        windows=_windows(config, architecture, layers),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        output_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        tied_head=bool(config.get("tie_word_embeddings", False)),
        stop_ids=_stop_ids(stop, vocabulary),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
        vectors=config["architectures"][0] in HEADLESS,
    )


_WITHOUT_ATTENTION_BIAS: Final = ("MistralForCausalLM", "Qwen2ForCausalLM")


def _architecture(config: Mapping[str, Any]) -> str:
    named = [HEADLESS.get(name, name) for name in config.get("architectures") or []]
    if len(named) != 1 or named[0] not in DECODER_ARCHITECTURES:
        raise ModelConfigError(
            f"architectures {named!r} is not supported; one of {', '.join(DECODER_ARCHITECTURES)} is"
        )
    if config.get("quantization_config"):
        raise ModelConfigError(
            "quantization_config is set: quantised checkpoints are not supported, bf16, f16 and f32 are"
        )
    return str(named[0])


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    """Both spellings: rope_theta with rope_scaling, and the newer rope_parameters that holds all of it."""
    entry = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = str(entry.get("rope_type", entry.get("type", "default")))
    if kind not in ROPE_KINDS:
        raise ModelConfigError(f"rope scaling {kind!r} is not supported; {', '.join(ROPE_KINDS)} are")
    partial = entry.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelConfigError(f"partial_rotary_factor {partial} is not supported; 1.0 is")
    theta = float(entry.get("rope_theta", config.get("rope_theta", _FAMILY_THETA)))
    try:
        if kind == "default":
            return RopeConfig(theta)
        if kind == "linear":
            return RopeConfig(theta, kind, float(entry["factor"]))
        return RopeConfig(
            theta,
            kind,
            float(entry["factor"]),
            float(entry["low_freq_factor"]),
            float(entry["high_freq_factor"]),
            int(entry["original_max_position_embeddings"]),
        )
    except KeyError as missing:
        raise ModelConfigError(f"rope scaling {kind!r} lacks {missing}") from None


def _windows(config: Mapping[str, Any], architecture: str, layers: int) -> tuple[int | None, ...]:
    """Mistral windows every layer; Qwen those that layer_types names, or from max_window_layers on; Llama none."""
    if architecture == "LlamaForCausalLM" or config.get("sliding_window") is None:
        return (None,) * layers
    window = positive_entry(config, "sliding_window")
    if architecture == "MistralForCausalLM":
        return (window,) * layers
    if not config.get("use_sliding_window", False):
        return (None,) * layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = int(config.get("max_window_layers", 28))
        return tuple(window if layer >= first else None for layer in range(layers))
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ModelConfigError(f"layer_types must name full_attention or sliding_attention for each of {layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _stop_ids(stop: int | list[int] | None, vocabulary: int) -> tuple[int, ...]:
    listed = [] if stop is None else [stop] if isinstance(stop, int) else stop
    return tuple(token for token in listed if isinstance(token, int) and 0 <= token < vocabulary)


def positive_entry(config: Mapping[str, Any], entry: str, default: int | None = None) -> int:
    """Raises ModelConfigError where the entry is anything else, or missing without a default."""
    value = config.get(entry)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelConfigError(f"{entry} must be a positive integer, not {value!r}")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Raises ModelConfigError."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelConfigError(f"{path} is missing: a model folder holds config.json and safetensors files") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelConfigError(f"{path} holds no JSON object")
    return parsed
