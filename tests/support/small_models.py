"""Small random models of each family, made with the reference library, and ways to run them step by step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from engine.execution.open import open_model
from engine.kvcache.tensors import KVPool
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
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_GROWING = {"llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 40}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 8.0, 16.0],
}
_SIZES_4: dict[str, Any] = _SIZES | {"num_hidden_layers": 4, "initializer_range": 0.1}
_CHUNKED: dict[str, Any] = {
    "attention_chunk_size": 48, "floor_scale": 16, "attn_scale": 0.4, "intermediate_size_mlp": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
_GEMMA: dict[str, Any] = {"head_dim": 32, "query_pre_attn_scalar": 24}
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
    "ministral": lambda: MinistralConfig(
        **_SIZES, sliding_window=48, head_dim=24, layer_types=["full_attention"] + ["sliding_attention"] * 2
    ),
    "ministral3": lambda: Ministral3Config(**_SIZES, head_dim=24, rope_parameters=_YARN | _GROWING),
    "ministral3 window": lambda: Ministral3Config(
        **_SIZES, head_dim=16, sliding_window=50, rope_parameters=_YARN | _GROWING
    ),
    "qwen2.5 yarn": lambda: Qwen2Config(**_SIZES, rope_parameters=_YARN),
    "phi3 window": lambda: Phi3Config(**_SIZES, sliding_window=70),
    "phi4": lambda: Phi3Config(**_SIZES, rope_parameters={"rope_type": "default", "rope_theta": 250000.0}),
    "phi4 mini": lambda: Phi3Config(
        **_SIZES, rope_parameters=_LONGROPE, original_max_position_embeddings=CONTEXT_TOKENS, tie_word_embeddings=True
    ),
    "gemma2": lambda: Gemma2Config(**_SIZES, **_GEMMA, sliding_window=37, attn_logit_softcapping=4.0),
    "gemma3": lambda: Gemma3TextConfig(**(_SIZES | {"num_hidden_layers": 7}), **_GEMMA, sliding_window=50),
    "gemma3 scaled": lambda: Gemma3TextConfig(
        **_SIZES, **_GEMMA, sliding_window=37, layer_types=["sliding_attention"] + ["full_attention"] * 2,
        rope_parameters={"full_attention": _LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=32),
    "qwen3 biases window": lambda: Qwen3Config(
        **_SIZES, head_dim=16, attention_bias=True, use_sliding_window=True, sliding_window=50, max_window_layers=2
    ),
    "mixtral": lambda: MixtralConfig(**_SIZES, num_local_experts=4, sliding_window=None),
    "qwen3moe": lambda: Qwen3MoeConfig(
        **_SIZES, head_dim=32, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=64, norm_topk_prob=True
    ),
    "qwen3moe some dense": lambda: Qwen3MoeConfig(
        **_SIZES, head_dim=32, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=32, mlp_only_layers=[1]
    ),
    "llama4 scout": lambda: Llama4TextConfig(
        **_SIZES_4, **_CHUNKED, head_dim=32, num_local_experts=4
    ),
    "llama4 maverick": lambda: Llama4TextConfig(
        **_SIZES_4, **_CHUNKED, head_dim=32, num_local_experts=8, interleave_moe_layer_step=2, use_qk_norm=False
    ),
    "gpt-oss": lambda: GptOssConfig(
        **_SIZES, head_dim=32, num_local_experts=8, num_experts_per_tok=3, sliding_window=37,
        rope_parameters=_YARN | {"truncate": False},
    ),
}  # fmt: skip


def reference_model(family: str, **sizes: int) -> PreTrainedModel:
    """The family's model with random weights, biases and norms included, in float32; its config with other `sizes`."""
    torch.manual_seed(sorted(FAMILIES).index(family))
    config = FAMILIES[family]()
    config.update(sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
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
        return SequenceSlice(self.ids[first : self.computed], first, [self.blocks], sampling)


def in_all_groups(model: LoadedModel, slices: Iterable[SequenceSlice]) -> list[SequenceSlice]:
    """The slices with their table in each of the model's groups, where they have one alone."""
    groups = model.executor.limits.groups
    return [replace(item, tables=[*item.tables] * (groups // len(item.tables))) for item in slices]


def logits(model: LoadedModel, slices: Iterable[SequenceSlice]) -> Tensor:
    """What the model says for the slices that have a sampling."""
    batch = unpack_step(pack_step(in_all_groups(model, slices), BLOCK_TOKENS))
    return model.executor.logits(batch).clone()


def shuffled_tables(model: LoadedModel, lengths: list[int], seed: int) -> list[list[int]]:
    """Disjoint block tables for sequences of these lengths, in no order, from all over the pool."""
    pools = kv_pools(model)
    blocks = np.random.default_rng(seed).permutation(min(pool.blocks for pool in pools)).tolist()
    tables = []
    for length in lengths:
        needed = -(-length // pools[0].shape.block_tokens)
        assert needed <= len(blocks), "a pool with too few blocks"
        tables.append(blocks[:needed])
        del blocks[:needed]
    return tables


def poison(model: LoadedModel) -> None:
    """Writes NaN into every slot that tables can name: whatever is read before it is written shows."""
    for pool in kv_pools(model):
        for rows in pool.layers:
            rows[: pool.blocks * pool.shape.block_tokens] = float("nan")


def kv_pools(model: LoadedModel) -> list[KVPool]:
    """The pool of each group of the model's layers."""
    return [memory.pool for memory in model.memories if memory.layout.block_bytes]
