"""Models' sizes, for measuring with random weights, and what a step of them costs at the least. It measures nothing."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.models.config import ModelConfig

BYTES_PER_S: Final = 4.3e12  # an H200's memory, measured by a copy
FLOP_PER_S: Final = 790e12  # its bf16 matmuls, measured
_LLAMA: Final = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
_QWEN3: Final = {"architectures": ["Qwen3ForCausalLM"], "rope_theta": 1000000.0, "head_dim": 128, "vocab_size": 151936}


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
    "tiny": {**_LLAMA, **_sizes(64, 96, 2, 4, 2, 4096), "vocab_size": 160, "torch_dtype": "float32"},
}


def write_folder(name: str, folder: Path) -> Path:
    """A model folder with nothing but the geometry's config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(GEOMETRIES[name], indent=1))
    return folder


@dataclass(frozen=True, slots=True)
class RooflineBound:
    """The least that steps of a model take, in bf16 on one H200: bytes ÷ bandwidth and FLOP ÷ rate."""

    weights_bytes: int  # that every step reads: all but the embedding
    head_bytes: int  # of these, those of the head, which a prompt's last token alone needs
    kv_token_bytes: int
    attention_flop: int  # per row and key

    @classmethod
    def of(cls, config: ModelConfig) -> "RooflineBound":
        qkv = (config.heads + 2 * config.kv_heads) * config.head_dim
        layer = config.hidden * (qkv + config.heads * config.head_dim + 3 * config.intermediate)
        return cls(
            weights_bytes=2 * (config.layers * layer + config.vocabulary * config.hidden),
            head_bytes=2 * config.vocabulary * config.hidden,
            kv_token_bytes=4 * config.layers * config.kv_heads * config.head_dim,
            attention_flop=4 * config.layers * config.heads * config.head_dim,
        )

    def step_ms(self, rows: int, keys: float, pairs: float = 0.0) -> float:
        """A decode step of so many rows that reads so many keys in all. `pairs` of row and key: more than keys where
        rows share them."""
        linear = max(self.weights_bytes / BYTES_PER_S, rows * self.weights_bytes / FLOP_PER_S)
        attention = max(keys * self.kv_token_bytes / BYTES_PER_S, pairs * self.attention_flop / FLOP_PER_S)
        return 1e3 * (linear + attention)

    def prompt_ms(self, tokens: int) -> float:
        """To the first token: a FLOP per byte of bf16 weights and token, and causal attention."""
        linear = tokens * (self.weights_bytes - self.head_bytes) + self.head_bytes
        return 1e3 * (linear + tokens * (tokens + 1) // 2 * self.attention_flop) / FLOP_PER_S

    def throughput(self, requests: Sequence[tuple[int, int]]) -> float:
        """Output tokens per second of requests (tokens in, tokens out) that begin at once and decode side by side."""
        total_ms = sum(self.prompt_ms(prompt) for prompt, _ in requests)
        for step in range(1, max(output for _, output in requests)):
            running = [prompt + step for prompt, output in requests if output > step]
            total_ms += self.step_ms(len(running), sum(running))
        return 1e3 * sum(output for _, output in requests) / total_ms
