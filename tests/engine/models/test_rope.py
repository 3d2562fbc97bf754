"""engine/models/rope.py: tables equal the reference library's for each way to scale, and what they may leave out."""

from typing import Any

import pytest
import torch
from transformers import Phi3Config, Qwen2Config
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from engine.models.config import ModelConfigError, parse_decoder_config
from engine.models.decoder_config import RopeConfig
from engine.models.rope import RopeKind, rope_kinds, rope_tables
from engine.step.key_span import FULL, KeySpan

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 512, "pad_token_id": None,
}  # fmt: skip
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1000.0},
    "linear": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn of gpt-oss": {
        "rope_type": "yarn", "rope_theta": 1.5e5, "factor": 32.0, "original_max_position_embeddings": 64,
        "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0,
    },
    "yarn with scales": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 32, "mscale": 0.8,
        "mscale_all_dim": 0.5,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
def test_tables_equal_the_reference_librarys(name: str) -> None:
    theirs = Qwen2Config(**SIZES, rope_parameters=dict(SCALINGS[name]))
    (rope,) = set(parse_decoder_config(theirs.to_dict() | {"architectures": ["Qwen2ForCausalLM"]}).ropes)
    assert rope is not None
    check(rope, Qwen2RotaryEmbedding(theirs), 16, 512)


@pytest.mark.parametrize("context_tokens", [64, 512])
def test_long_contexts_take_the_long_factors(context_tokens: int) -> None:
    factors = {"short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 2.5], "long_factor": [1.0, 2.0, 4.0, 6.0, 9.0, 16.0]}
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, **factors}
    theirs = Phi3Config(**SIZES, original_max_position_embeddings=64, rope_parameters=scaling)
    (rope,) = set(parse_decoder_config(theirs.to_dict() | {"architectures": ["Phi3ForCausalLM"]}).ropes)
    assert rope is not None
    assert rope.rotary_dim == 12
    check(rope, Phi3RotaryEmbedding(theirs), 16, context_tokens)


def check(rope: RopeConfig, theirs: torch.nn.Module, head_dim: int, context_tokens: int) -> None:
    positions = torch.arange(context_tokens)[None]
    wanted_cos, wanted_sin = (table[0] for table in theirs(torch.zeros(1), positions))
    cos_PD, sin_PD = rope_tables(rope, head_dim, context_tokens)
    turned, half = wanted_cos.shape[1] // 2, head_dim // 2
    for first in (0, half):
        assert torch.allclose(cos_PD[:, first : first + turned], wanted_cos[:, :turned], atol=1e-6)
        assert (cos_PD[:, first + turned : first + half] == 1).all()
        assert (sin_PD[:, first + turned : first + half] == 0).all()
    assert torch.allclose(sin_PD[:, half : half + turned], wanted_sin[:, :turned], atol=1e-6)
    assert torch.equal(sin_PD[:, :half], -sin_PD[:, half:])


def test_a_layer_of_chunks_needs_a_chunks_positions() -> None:
    rope = RopeConfig(10000.0)
    cos_PD, _ = RopeKind(rope, 32).tables(16, 4096)
    assert cos_PD.shape == (32, 16)
    assert RopeKind(rope, 8192).tables(16, 4096)[0].shape == (4096, 16)


def test_layers_that_rotate_alike_share_tables() -> None:
    sizes = {**SIZES, "num_hidden_layers": 6, "layer_types": None, "sliding_window": 40, "head_dim": 16}
    config = parse_decoder_config({**sizes, "architectures": ["Gemma3ForCausalLM"]})
    assert config.spans == (KeySpan(window=40),) * 5 + (FULL,)
    kinds = rope_kinds(config)
    assert len(set(kinds)) == 2
    assert kinds[0] == RopeKind(RopeConfig(10_000.0), None)
    assert kinds[5] == RopeKind(RopeConfig(1_000_000.0), None)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8}, "short_factor must list 8"),
        ({"type": "longrope", "long_factor": [1.0] * 8}, "lacks 'short_factor'"),
        ({"type": "linear", "factor": "x"}, "factor"),
        ({"type": "default", "partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"type": "default", "partial_rotary_factor": 0.7}, "rotates 11"),
        ([1], "rope scaling must be an object"),
    ],
)
def test_a_scaling_that_cannot_be_is_refused_by_its_entry(scaling: Any, message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        parse_decoder_config({**SIZES, "architectures": ["Phi3ForCausalLM"], "rope_scaling": scaling})


def test_yarn_needs_the_context_that_it_stretches() -> None:
    scaling = {"type": "yarn", "factor": 4.0}
    with pytest.raises(ModelConfigError, match="original_max_position_embeddings"):
        parse_decoder_config({**SIZES, "architectures": ["Qwen2ForCausalLM"], "rope_scaling": scaling})
