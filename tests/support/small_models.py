"""Small random models of each family, made with the reference library, and ways to run them step by step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from engine.execution.open import open_model
from engine.protocol.specs import ModelSpec
from engine.protocol.types import SamplingParams
from engine.step.executor import LoadedModel
from engine.step.layout import SequenceSlice, pack_step, unpack_step

BLOCK_TOKENS = 16
CONTEXT_TOKENS = 2048
_SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_TOKENS,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama 2": lambda: LlamaConfig(**(_SIZES | {"num_key_value_heads": 4}), tie_word_embeddings=False),
    "llama 2 linear rope": lambda: LlamaConfig(**_SIZES, rope_parameters=_LINEAR),
    "llama 3.1": lambda: LlamaConfig(**_SIZES, rope_parameters=_LLAMA3, tie_word_embeddings=False),
    "llama 3.2 tied": lambda: LlamaConfig(**_SIZES, rope_parameters=_LLAMA3, tie_word_embeddings=True),
    "llama biases": lambda: LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True, head_dim=24),
    "llama one kv head": lambda: LlamaConfig(**(_SIZES | {"num_key_value_heads": 1})),
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=None),
    "mistral window": lambda: MistralConfig(**_SIZES, sliding_window=37, head_dim=32),
    "qwen2": lambda: Qwen2Config(**_SIZES, use_sliding_window=False, sliding_window=40, tie_word_embeddings=True),
    "qwen2 window": lambda: Qwen2Config(**_SIZES, use_sliding_window=True, sliding_window=40, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=32),
    "qwen3 biases window": lambda: Qwen3Config(
        **_SIZES, head_dim=16, attention_bias=True, use_sliding_window=True, sliding_window=50, max_window_layers=2
    ),
}  # fmt: skip


def reference_model(family: str) -> PreTrainedModel:
    """The family's model with random weights, biases and norms included, in float32."""
    torch.manual_seed(sorted(FAMILIES).index(family))
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif parameter.ndim == 1:
                parameter.normal_(1, 0.2)
    return model.eval()


def saved(model: PreTrainedModel, folder: Path, shard: str = "1GB") -> Path:
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def spec(folder: Path, **changes: Any) -> ModelSpec:
    return ModelSpec(**({"name": "small", "folder": str(folder), "dtype": "float32", "kv_bytes": 8 << 20} | changes))


def open_small(folder: Path, **changes: Any) -> LoadedModel:
    """To be used within the fixture `inference`."""
    return open_model(spec(folder, **changes), "cpu", 1, lambda: None)


@dataclass
class Text:
    """One sequence being computed: its ids and its block table."""

    ids: list[int]
    blocks: list[int]
    computed: int = 0

    def slice(self, tokens: int, sampling: SamplingParams | None = None) -> SequenceSlice:
        first, self.computed = self.computed, self.computed + tokens
        return SequenceSlice(self.ids[first : self.computed], first, self.blocks, sampling)


def logits(model: LoadedModel, slices: Iterable[SequenceSlice]) -> Tensor:
    """What the model says for the slices that have a sampling."""
    batch = unpack_step(pack_step(list(slices), BLOCK_TOKENS))
    return model.executor.logits(batch).clone()


def shuffled_tables(model: LoadedModel, lengths: list[int], seed: int) -> list[list[int]]:
    """Disjoint block tables for sequences of these lengths, in no order, from all over the pool."""
    layout = model.paged.layout
    blocks = np.random.default_rng(seed).permutation(layout.blocks).tolist()
    tables = []
    for length in lengths:
        needed = -(-length // layout.block_tokens)
        tables.append(blocks[:needed])
        del blocks[:needed]
    return tables


def poison(model: LoadedModel) -> None:
    """Writes NaN into every slot that tables can name: whatever is read before it is written shows."""
    for rows in model.paged.pool.layers:
        rows[: model.paged.layout.blocks * model.paged.layout.block_tokens] = float("nan")
