"""Models' sizes, for measuring with random weights, and what a step of them costs at the least. It measures nothing."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.models.config import ModelConfig

BYTES_PER_S: Final = 4.3e12  # an H200's memory, measured by a copy
FLOP_PER_S: Final = 790e12  # its bf16 matmuls, measured
_MXFP4_BYTES: Final = 17 / 32  # of a number
_LLAMA: Final = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
_QWEN3: Final = {"architectures": ["Qwen3ForCausalLM"], "rope_theta": 1000000.0, "head_dim": 128, "vocab_size": 151936}

_GPT_OSS: Final = {
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 64,
    "vocab_size": 201088,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
}
_MXFP4: Final = {"quantization_config": {"quant_method": "mxfp4"}}
_SCOUT: Final = {
    "architectures": ["Llama4ForCausalLM"],
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 202048,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8192,
}


def _sizes(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, context: int, tied: bool = False
) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "max_position_embeddings": context, "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }  # fmt: skip


GEOMETRIES: Final[dict[str, dict[str, Any]]] = {
    "llama-3.1-8b": {**_LLAMA, **_sizes(4096, 14336, 32, 32, 8, 131072), "vocab_size": 128256},
    "qwen3-0.6b": {**_QWEN3, **_sizes(1024, 3072, 28, 16, 8, 40960, tied=True)},
    "qwen3-8b": {**_QWEN3, **_sizes(4096, 12288, 36, 32, 8, 40960)},
    "qwen3-14b": {**_QWEN3, **_sizes(5120, 17408, 40, 40, 8, 40960)},
    "qwen3-32b": {**_QWEN3, **_sizes(5120, 25600, 64, 64, 8, 40960)},
    "mistral-7b": {
        **_sizes(4096, 14336, 32, 32, 8, 32768),
        "architectures": ["MistralForCausalLM"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": 32000,
        "sliding_window": 4096,
    },
    "ministral-8b": {
        **_sizes(4096, 12288, 36, 32, 8, 131072),
        "architectures": ["MinistralForCausalLM"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000000.0,
        "vocab_size": 131072,
        "head_dim": 128,
        "sliding_window": 32768,
        "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 9,
    },
    "qwen2.5-7b": {
        **_sizes(3584, 18944, 28, 28, 4, 32768),
        "architectures": ["Qwen2ForCausalLM"],
        "rope_theta": 1000000.0,
        "vocab_size": 152064,
    },
    "phi-4": {
        **_sizes(5120, 17920, 40, 40, 10, 16384),
        "architectures": ["Phi3ForCausalLM"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 250000.0,
        "vocab_size": 100352,
    },
    "gemma-2-9b": {
        **_sizes(3584, 14336, 42, 16, 8, 8192, tied=True),
        "architectures": ["Gemma2ForCausalLM"],
        "head_dim": 256,
        "vocab_size": 256000,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
    },
    "gemma-3-27b": {
        **_sizes(5376, 21504, 62, 32, 16, 131072, tied=True),
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 128,
        "vocab_size": 262208,
        "sliding_window": 1024,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    },
    "mixtral-8x7b": {
        **_sizes(4096, 14336, 32, 32, 8, 32768),
        "architectures": ["MixtralForCausalLM"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3-30b": {
        **_QWEN3,
        **_sizes(2048, 6144, 48, 32, 4, 40960),
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "gpt-oss-20b": {**_GPT_OSS, **_sizes(2880, 2880, 24, 64, 8, 131072), "num_local_experts": 32},
    "gpt-oss-20b-mxfp4": {**_GPT_OSS, **_sizes(2880, 2880, 24, 64, 8, 131072), "num_local_experts": 32, **_MXFP4},
    "gpt-oss-120b-mxfp4": {**_GPT_OSS, **_sizes(2880, 2880, 36, 64, 8, 131072), "num_local_experts": 128, **_MXFP4},
    "scout": {**_sizes(5120, 8192, 48, 40, 8, 1048576), **_SCOUT},
    # What one of two GPUs computes of it, without what they tell each other.
    "scout-rank": {**_sizes(5120, 4096, 48, 20, 4, 1048576), **_SCOUT, "intermediate_size_mlp": 8192},
    # As many of its layers as have a full one among them, for sequences that leave no room beside all of it.
    "scout-slice": {**_sizes(5120, 8192, 4, 40, 8, 1048576), **_SCOUT, "intermediate_size_mlp": 16384},
    "tiny": {**_LLAMA, **_sizes(64, 96, 2, 4, 2, 4096), "vocab_size": 160, "torch_dtype": "float32"},
}

MIXTURES: Final = tuple(name for name, sizes in GEOMETRIES.items() if "num_experts_per_tok" in sizes)


def write_folder(name: str, folder: Path) -> Path:
    """A model folder with nothing but the geometry's config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(GEOMETRIES[name], indent=1))
    return folder


@dataclass(frozen=True, slots=True)
class RooflineBound:
    """The least that steps of a model take on one H200, which computes in bf16: bytes ÷ bandwidth and FLOP ÷ rate.

    weights_bytes    that every step reads: all but the embedding and experts that rows choose.
    head_bytes       of these, those of the head, which a prompt's last token alone needs.
    kv_token_bytes   of all layers.
    attention_flop   of all layers, per row and key.
    spans            how many tokens back rows see at most, None for all, and the share of the layers in which.
    expert_bytes     of one expert in all layers that have some; there are `experts`, of which a row takes `chosen`.
    expert_flop      of one expert in all layers, per row.
    """

    weights_bytes: int
    head_bytes: int
    kv_token_bytes: int
    attention_flop: int
    spans: tuple[tuple[int | None, float], ...] = ((None, 1.0),)
    expert_bytes: float = 0.0
    expert_flop: int = 0
    experts: int = 1
    chosen: int = 0

    @classmethod
    def of(cls, config: ModelConfig) -> "RooflineBound":
        qkv = (config.heads + 2 * config.kv_heads) * config.head_dim
        mixture, sparse = config.mixture, sum(config.has_experts(layer) for layer in range(config.layers))
        numbers = config.layers * (qkv + config.heads * config.head_dim) + config.vocabulary
        numbers += 3 * config.intermediate * (config.layers - sparse)
        if mixture is not None:
            numbers += sparse * (mixture.rule.experts + 3 * mixture.shared)
        expert_numbers = 0 if mixture is None else 3 * sparse * config.hidden * mixture.intermediate
        return cls(
            weights_bytes=2 * config.hidden * numbers,
            head_bytes=2 * config.vocabulary * config.hidden,
            kv_token_bytes=4 * config.layers * config.kv_heads * config.head_dim,
            attention_flop=4 * config.layers * config.heads * config.head_dim,
            spans=tuple((group.span.tokens, len(group.layers) / config.layers) for group in config.kv_groups),
            expert_bytes=expert_numbers * (_MXFP4_BYTES if config.mxfp4 else 2),
            expert_flop=2 * expert_numbers,
            experts=1 if mixture is None else mixture.rule.experts,
            chosen=0 if mixture is None else mixture.rule.chosen,
        )

    @property
    def row_flop(self) -> int:
        """One row's matmuls need so many: as many as the bytes of their weights in bf16."""
        return self.weights_bytes + self.chosen * self.expert_flop

    def read_bytes(self, rows: int) -> float:
        """The weights that so many rows need, whose choices are even and independent."""
        touched = self.experts * (1 - (1 - self.chosen / self.experts) ** rows)
        return self.weights_bytes + touched * self.expert_bytes

    def step_ms(self, rows: int, keys: float, pairs: float = 0.0) -> float:
        """A decode step of so many rows that reads so many keys in all, about as many for each. `pairs` of row and key:
        more than keys where rows share them."""
        linear = max(self.read_bytes(rows) / BYTES_PER_S, rows * self.row_flop / FLOP_PER_S)
        read, computed = (self._seen(rows, each) for each in (keys, pairs))
        attention = max(read * self.kv_token_bytes / BYTES_PER_S, computed * self.attention_flop / FLOP_PER_S)
        return 1e3 * (linear + attention)

    def prompt_ms(self, tokens: int) -> float:
        """To the first token: a FLOP per byte of bf16 weights and token, and attention to what each token sees."""
        linear = tokens * (self.row_flop - self.head_bytes) + self.head_bytes
        pairs = 0.0
        for span, share in self.spans:
            growing = tokens if span is None else min(tokens, span)
            pairs += share * (growing * (growing + 1) // 2 + (tokens - growing) * growing)
        return 1e3 * (linear + pairs * self.attention_flop) / FLOP_PER_S

    def _seen(self, rows: int, keys: float) -> float:
        """The keys that a layer reads on average, of those there are."""
        return sum(share * (keys if span is None else min(keys, rows * span)) for span, share in self.spans)

    def throughput(self, requests: Sequence[tuple[int, int]]) -> float:
        """Output tokens per second of requests (tokens in, tokens out) that begin at once and decode side by side."""
        total_ms = sum(self.prompt_ms(prompt) for prompt, _ in requests)
        for step in range(1, max(output for _, output in requests)):
            running = [prompt + step for prompt, output in requests if output > step]
            total_ms += self.step_ms(len(running), sum(running))
        return 1e3 * sum(output for _, output in requests) / total_ms
