"""What a checkpoint's config.json says, of a decoder or an encoder, as one frozen value that the rest can trust.

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


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """An encoder of the BERT kind.

    first_position  of a text's first token, in the table of positions: RoBERTa's count from behind the padding's.
    positions       rows of that table.
    types           rows of the table that says which of two texts a token is of.
    activation      of ACTIVATIONS.
    scores          it ends in a head that gives one number for a pair of texts.
    dtype           the weights', as the file says.
    """

    roberta: bool
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    intermediate: int
    norm_epsilon: float
    first_position: int
    positions: int
    types: int
    activation: str
    scores: bool
    dtype: str

    @property
    def context_tokens(self) -> int:
        """The longest text, control tokens included."""
        return self.positions - self.first_position


DECODER_ARCHITECTURES: Final = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
HEADLESS: Final = {f"{family}Model": f"{family}ForCausalLM" for family in ("Llama", "Mistral", "Qwen2", "Qwen3")}
_SCORING: Final = ("BertForSequenceClassification", *(f"{x}RobertaForSequenceClassification" for x in ("", "XLM")))
ENCODER_ARCHITECTURES: Final = (
    *("BertModel", "BertForMaskedLM", "RobertaModel", "RobertaForMaskedLM", "XLMRobertaModel", "XLMRobertaForMaskedLM"),
    *_SCORING,
)
ACTIVATIONS: Final = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
ROPE_KINDS: Final = ("default", "linear", "llama3")
_WITHOUT_ATTENTION_BIAS: Final = ("MistralForCausalLM", "Qwen2ForCausalLM")


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
    """Raises ModelConfigError for what this engine does not run, and names the entry."""
    architecture = _architecture(config, DECODER_ARCHITECTURES)
    if config.get("hidden_act", "silu") != "silu":
        raise ModelConfigError(f"hidden_act {config['hidden_act']!r} is not supported; silu is")
    hidden, heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    kv_heads = _positive(config, "num_key_value_heads", heads)
    layers = _positive(config, "num_hidden_layers")
    head_dim = _positive(config, "head_dim", 128 if architecture == "Qwen3ForCausalLM" else hidden // heads)
    if heads % kv_heads:
        raise ModelConfigError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise ModelConfigError(f"head_dim {head_dim} is odd, so it cannot be rotated")
    vocabulary = _positive(config, "vocab_size")
    attention_bias = bool(config.get("attention_bias", False)) and architecture not in _WITHOUT_ATTENTION_BIAS
    return ModelConfig(
        architecture=architecture,
        vocabulary=vocabulary,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=_positive(config, "intermediate_size"),
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config),
        context_tokens=_positive(config, "max_position_embeddings"),
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


def is_encoder(folder: Path) -> bool:
    """Whether config.json names one of ENCODER_ARCHITECTURES. Raises ModelConfigError where there is no such file."""
    named = read_json(folder / "config.json").get("architectures") or []
    return bool(named) and named[0] in ENCODER_ARCHITECTURES


def read_encoder_config(folder: Path) -> EncoderConfig:
    """Raises ModelConfigError."""
    return parse_encoder_config(read_json(folder / "config.json"))


def parse_encoder_config(config: Mapping[str, Any]) -> EncoderConfig:
    """Raises ModelConfigError for what this engine does not run, and says what would do."""
    architecture = _architecture(config, ENCODER_ARCHITECTURES)
    roberta, scores = "Roberta" in architecture, architecture in _SCORING
    for entry, served in (("position_embedding_type", "absolute"), ("is_decoder", False)):
        if config.get(entry, served) != served:
            raise ModelConfigError(f"{entry} {config[entry]!r} is not supported; {served!r} is")
    activation = str(config.get("hidden_act", "gelu"))
    if activation not in ACTIVATIONS:
        raise ModelConfigError(f"hidden_act {activation!r} is not supported; one of {', '.join(ACTIVATIONS)} is")
    labels = len(config["id2label"]) if config.get("id2label") else int(config.get("num_labels") or 2)
    if scores and labels != 1:
        raise ModelConfigError(f"the model has {labels} labels; a model that scores pairs of texts has one")
    hidden, heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    if hidden % heads:
        raise ModelConfigError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    padding = config.get("pad_token_id", 1)
    if roberta and (type(padding) is not int or padding < 0):
        raise ModelConfigError(f"pad_token_id must be a token id, not {padding!r}")
    first_position = padding + 1 if roberta else 0
    positions = _positive(config, "max_position_embeddings")
    if positions <= first_position:
        raise ModelConfigError(f"max_position_embeddings {positions} leaves no place behind pad_token_id")
    return EncoderConfig(
        roberta=roberta,
        vocabulary=_positive(config, "vocab_size"),
        hidden=hidden,
        layers=_positive(config, "num_hidden_layers"),
        heads=heads,
        intermediate=_positive(config, "intermediate_size"),
        norm_epsilon=float(config.get("layer_norm_eps", 1e-12)),
        first_position=first_position,
        positions=positions,
        types=_positive(config, "type_vocab_size", 2),
        activation=activation,
        scores=scores,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def _architecture(config: Mapping[str, Any], runnable: tuple[str, ...]) -> str:
    """The one of `runnable` that the file names; that of a model without its head is the whole family's."""
    named = [HEADLESS.get(name, name) for name in config.get("architectures") or []]
    if len(named) != 1 or named[0] not in runnable:
        raise ModelConfigError(f"architectures {named!r} is not supported; one of {', '.join(runnable)} is")
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
    theta = float(entry.get("rope_theta", config.get("rope_theta", 10_000.0)))
    try:
        if kind == "default":
            return RopeConfig(theta)
        if kind == "linear":
            return RopeConfig(theta, kind, float(entry["factor"]))
        low, high = float(entry["low_freq_factor"]), float(entry["high_freq_factor"])
        original = int(entry["original_max_position_embeddings"])
        return RopeConfig(theta, kind, float(entry["factor"]), low, high, original)
    except KeyError as missing:
        raise ModelConfigError(f"rope scaling {kind!r} lacks {missing}") from None


def _windows(config: Mapping[str, Any], architecture: str, layers: int) -> tuple[int | None, ...]:
    """Mistral windows every layer; Qwen those that layer_types names, or from max_window_layers on; Llama none."""
    if architecture == "LlamaForCausalLM" or config.get("sliding_window") is None:
        return (None,) * layers
    window = _positive(config, "sliding_window")
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


def _positive(config: Mapping[str, Any], entry: str, default: int | None = None) -> int:
    """Raises ModelConfigError where the entry is anything else, or missing without a default."""
    value = config.get(entry)
    value = default if value is None else value
    if type(value) is not int or value <= 0:
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
