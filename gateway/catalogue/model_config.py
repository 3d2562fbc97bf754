"""config.json of a model's folder, as the gateway reads it: architecture, context, sizes. It knows no settings."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from gateway.catalogue.bf12_size import read_bf12_size
from gateway.text.tokenizer import ModelFolderError

_ENCODERS: Final = ("Bert", "Roberta", "XLMRoberta")
# What files of a family mean where they say nothing.
_UNSAID: Final[Mapping[str, Mapping[str, Any]]] = {
    "Gemma2": {"head_dim": 256, "tie_word_embeddings": True},
    "Gemma3": {
        "head_dim": 256, "tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 4,
        "vocab_size": 262_208, "max_position_embeddings": 131_072,
    },
    "Llama4": {"head_dim": 128, "num_local_experts": 16},
    "GptOss": {"head_dim": 64, "num_local_experts": 128, "sliding_window": 128},
}  # fmt: skip


def read_json(path: Path, default: Any) -> Any:
    """The file's JSON; `default` where there is no such file. Raises ModelFolderError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return default
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path} is not readable as JSON: {error}") from error


# What generation_config.json may say of how a model is sampled: type, least, greatest. What is off there is left out.
_SAMPLING: Final[Mapping[str, tuple[type, float, float]]] = {
    "temperature": (float, 0, 5), "top_k": (int, 1, 1 << 20), "top_p": (float, 0.001, 1), "min_p": (float, 0, 1),
    "repetition_penalty": (float, 0.01, 2),
}  # fmt: skip


def read_sampling(folder: Path) -> dict[str, float]:
    """The sampling parameters of generation_config.json, as far as they are in range: `do_sample` says nothing, as in
    vLLM. Raises ModelFolderError."""
    document, found = read_json(folder / "generation_config.json", {}), {}
    for name, (kind, low, high) in _SAMPLING.items():
        value = document.get(name) if isinstance(document, dict) else None
        if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
            found[name] = kind(value)
    return found


def read_model_config(folder: Path) -> dict[str, Any]:
    """Raises ModelFolderError."""
    path = folder / "config.json"
    document = read_json(path, None)
    if document is None and not path.exists():
        raise ModelFolderError(f"{folder} has no config.json")
    if not isinstance(document, dict):
        raise ModelFolderError(f"{path} is no JSON object")
    return _with_text_entries(document)


def _with_text_entries(document: dict[str, Any]) -> dict[str, Any]:
    """The entries with those of text_config, where a model that also sees has its decoder's, and with what Gemma's
    files leave unsaid."""
    nested = document.get("text_config")
    entries = nested.items() if isinstance(nested, dict) else ()
    merged = {**document, **{name: value for name, value in entries if value is not None}}
    unsaid = next((unsaid for family, unsaid in _UNSAID.items() if architecture_of(document).startswith(family)), {})
    return {**unsaid, **merged}


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first architecture, like `XLMRobertaForMaskedLM`; empty without one."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether the model reads a whole text at once, and keeps nothing of it."""
    return architecture_of(config).partition("For")[0].removesuffix("Model") in _ENCODERS


def context_of(config: Mapping[str, Any]) -> int:
    """Tokens of the longest text. RoBERTa's positions begin behind that of its padding."""
    context = int(config.get("max_position_embeddings") or 2048)
    if "Roberta" in architecture_of(config):
        context -= int(config.get("pad_token_id", 1)) + 1
    return context


class ModelGeometry(NamedTuple):
    """The sizes of a model's layers. `windows`: the tokens that each of them keeps at most; None: all."""

    layers: int
    heads: int
    kv_heads: int
    head_width: int
    windows: tuple[int | None, ...]

    @property
    def kv_numbers_per_token(self) -> int:
        """What a token adds while no window is full."""
        return 2 * self.layers * self.kv_heads * self.head_width

    def kv_numbers(self, tokens: int) -> int:
        """What so many tokens of one sequence take."""
        return 2 * self.kv_heads * self.head_width * sum(min(tokens, window or tokens) for window in self.windows)

    def most_ranks(self, config: Mapping[str, Any]) -> int:
        """The largest number that divides all that ranks share: heads, the width of each kind of MLP, and of experts
        their width or their number."""
        mlps = _mlps(config, self.layers) or (Mlps(1, 0, 1),)
        ranks = math.gcd(self.heads, self.kv_heads, *(mlp.width for mlp in mlps if not mlp.are_chosen))
        experts = [mlp for mlp in mlps if mlp.are_chosen]
        return max((math.gcd(ranks, count) for mlp in experts for count in (mlp.width, mlp.routed)), default=ranks)

    def expert_sizes(self, config: Mapping[str, Any]) -> tuple[int, int] | None:
        """How many experts a router chooses from, and their width; None where there is none."""
        return next(((mlp.routed, mlp.width) for mlp in _mlps(config, self.layers) if mlp.routed), None)

    def parameters(self, config: Mapping[str, Any]) -> int:
        """Counts the layers' linear weights, the embedding, and an untied head. Raises ModelFolderError."""
        try:
            hidden, vocabulary = int(config["hidden_size"]), int(config["vocab_size"])
            mlps = _mlps(config, self.layers)
        except (ValueError, KeyError, TypeError) as error:
            raise ModelFolderError(f"config.json does not say how large the model is: {error}") from error
        query, kv = self.head_width * self.heads, self.head_width * self.kv_heads
        tables = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
        inner = sum(mlp.layers * (3 * mlp.each * mlp.width + mlp.routed) for mlp in mlps)
        return tables + hidden * (self.layers * (2 * query + 2 * kv) + inner)


def expanded_bytes(config: Mapping[str, Any], on_cpu: bool) -> int | None:
    """About what weights take that become bf16 as they are loaded: on a CPU those in mxfp4 and fp8. None where they
    take what their files do. Raises ModelFolderError."""
    entry = config.get("quantization_config")
    method = entry.get("quant_method") if isinstance(entry, Mapping) else None
    if on_cpu and method in ("mxfp4", "fp8", "compressed-tensors"):
        return 2 * geometry_of(config).parameters(config)
    return None


def weights_bytes(folder: Path, on_cpu: bool) -> int:
    """The size of its files: about that of its weights, until its replica reports the exact one."""
    if (compressed := read_bf12_size(folder)) is not None:
        return compressed.original_bytes if on_cpu else compressed.coded_bytes
    with suppress(ModelFolderError):  # for its replica reports what is wrong
        expanded = expanded_bytes(read_model_config(folder), on_cpu)
        if expanded is not None:
            return expanded
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


class Mlps(NamedTuple):
    """MLPs of one width: in how many layers, how many in each, and how many of these a router chooses from."""

    layers: int
    each: int
    width: int
    routed: int = 0

    @property
    def are_chosen(self) -> bool:
        """Whether a router chooses from all of them, so that ranks may have some whole."""
        return self.each == self.routed > 0


def _mlps(config: Mapping[str, Any], layers: int) -> tuple[Mlps, ...]:
    """The model's, by width; none where config.json says no width."""
    family, width = architecture_of(config), int(config.get("intermediate_size") or 0)
    experts = int(config.get("num_local_experts") or config.get("num_experts") or 0)
    if family.startswith(("Mixtral", "GptOss")):
        return (Mlps(layers, experts, width, experts),)
    if family.startswith("Llama4"):
        listed, step = config.get("moe_layers"), int(config.get("interleave_moe_layer_step") or 1)
        sparse = len(listed) if isinstance(listed, list) else layers // step
        dense = Mlps(layers - sparse, 1, int(config.get("intermediate_size_mlp") or width))
        return tuple(mlp for mlp in (dense, Mlps(sparse, experts + 1, width, experts)) if mlp.layers)
    if family.startswith("Qwen3Moe"):
        step, named = int(config.get("decoder_sparse_step") or 1), config.get("mlp_only_layers") or []
        sparse = sum((layer + 1) % step == 0 and layer not in named for layer in range(layers))
        own = Mlps(sparse, experts, int(config.get("moe_intermediate_size") or 768), experts)
        return tuple(mlp for mlp in (Mlps(layers - sparse, 1, width), own) if mlp.layers)
    return (Mlps(layers, 1, width),) if width else ()


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """The window of each layer: of those that layer_types names, else as the family has them."""
    family = architecture_of(config)
    if family.startswith("Llama4"):
        chunk, every = int(config.get("attention_chunk_size") or 8192), int(config.get("no_rope_layer_interval") or 4)
        rotated = config.get("no_rope_layers") or [(layer + 1) % every for layer in range(layers)]
        return tuple(chunk if turns else None for turns in rotated)
    window = config.get("sliding_window") or (4096 if family.startswith("Gemma") else None)
    unused = family.startswith("Llama") or (family.startswith("Qwen") and not config.get("use_sliding_window"))
    if window is None or unused:
        return (None,) * layers
    kinds, period = config.get("layer_types"), int(config.get("sliding_window_pattern") or 6)
    if isinstance(kinds, list) and len(kinds) == layers and not family.startswith(("Mistral", "Phi3")):
        sliding = [kind == "sliding_attention" for kind in kinds]
    elif family.startswith(("Gemma", "GptOss")):
        every = 2 if family.startswith(("Gemma2", "GptOss")) else period
        sliding = [(layer + 1) % every > 0 for layer in range(layers)]
    else:
        first = int(config.get("max_window_layers", 28)) if family.startswith("Qwen") else 0
        sliding = [layer >= first for layer in range(layers)]
    return tuple(int(window) if slides else None for slides in sliding)


def geometry_of(config: Mapping[str, Any]) -> ModelGeometry:
    """Raises ModelFolderError."""
    try:
        heads = int(config["num_attention_heads"])
        return ModelGeometry(
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_width=int(config.get("head_dim") or config["hidden_size"] // heads),
            windows=_windows(config, int(config["num_hidden_layers"])),
        )
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise ModelFolderError(f"config.json does not say how large the model is: {error}") from error
