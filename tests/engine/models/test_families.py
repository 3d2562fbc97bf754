"""engine/models/families.py: what each family's config.json means, how its tensors come to lie, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Mistral3Config, Mistral3ForConditionalGeneration, Phi3ForCausalLM

from engine.models.config import ModelConfigError, parse_decoder_config
from engine.models.decoder_config import QueryTemperature, RopeConfig
from engine.models.mixture_families import GptOss, Llama4
from engine.models.parameter_entries import HeadOrder
from engine.protocol.types import SamplingParams
from engine.step.key_span import FULL, KeySpan
from tests.support.small_models import FAMILIES, Text, logits, open_small, reference_model, saved, shuffled_tables

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 512,
}  # fmt: skip
WINDOW, CHUNK = KeySpan(window=32), KeySpan(chunk=64)


def parsed(architecture: str, **changes: Any) -> Any:
    return parse_decoder_config({**SIZES, "architectures": [architecture], **changes})


def test_ministral_has_windows_where_layer_types_says_so() -> None:
    kinds = ["full_attention", *["sliding_attention"] * 3]
    assert parsed("MinistralForCausalLM", sliding_window=32, layer_types=kinds).spans == (FULL, *[WINDOW] * 3)
    assert parsed("MinistralForCausalLM", sliding_window=32).spans == (WINDOW,) * 4
    assert parsed("MinistralForCausalLM").spans == (FULL,) * 4


def test_gemma_2_alternates_and_caps() -> None:
    config = parsed("Gemma2ForCausalLM", sliding_window=32, head_dim=32, query_pre_attn_scalar=144)
    assert config.spans == (WINDOW, FULL, WINDOW, FULL)
    assert (config.attention_cap, config.logits_cap) == (50.0, 30.0)
    assert config.attention_scale == pytest.approx(1 / 12)
    assert config.embedding_scale == 8.0
    assert config.tied_head
    uncapped = parsed("Gemma2ForCausalLM", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (uncapped.attention_cap, uncapped.logits_cap, uncapped.head_dim) == (0.0, 0.0, 256)


def test_gemma_3_in_both_spellings() -> None:
    old = {"rope_theta": 2e6, "rope_local_base_freq": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        }
    }
    full, sliding = RopeConfig(2e6, "linear", 8.0), RopeConfig(500.0)
    for entries in (old, new):
        config = parsed("Gemma3ForCausalLM", sliding_window=32, sliding_window_pattern=2, **entries)
        assert config.spans == (WINDOW, FULL, WINDOW, FULL)
        assert config.ropes == (sliding, full, sliding, full)
        assert config.qk_norm
        assert (config.attention_cap, config.logits_cap) == (0.0, 0.0)


@pytest.mark.usefixtures("inference")
def test_gemma_3_is_served_out_of_a_model_that_also_sees(tmp_path: Path) -> None:
    reference = reference_model("gemma3 scaled")
    folder = saved(reference, tmp_path)
    text = json.loads((folder / "config.json").read_text())
    architecture = ["Gemma3ForConditionalGeneration"]
    (folder / "config.json").write_text(json.dumps({"architectures": architecture, "text_config": text}))
    tensors = load_file(folder / "model.safetensors")
    nested = {name.replace("model.", "language_model.model.", 1): tensor for name, tensor in tensors.items()}
    nested |= {name: torch.ones(2, 2) for name in ("vision_tower.embeddings.weight", "multi_modal_projector.weight")}
    save_file(nested, folder / "model.safetensors")
    model = open_small(folder)
    ids = list(range(3, 90))
    text_of = Text(ids, shuffled_tables(model, [len(ids)], seed=1)[0])
    with torch.no_grad():
        wanted_V = reference(torch.tensor([ids])).logits[0, -1]
    assert (logits(model, [text_of.slice(len(ids), SamplingParams())])[0] - wanted_V).abs().max() < 1e-4


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize("prefixed", [True, False], ids=["as it is stored", "as the library names its tensors"])
def test_ministral_3_is_served_out_of_a_model_that_also_sees(prefixed: bool, tmp_path: Path) -> None:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = FAMILIES["ministral3"]()
    torch.manual_seed(4)
    seeing = Mistral3Config(
        text_config=text, vision_config={"model_type": "pixtral", "head_dim": 8, **vision}, tie_word_embeddings=False
    )
    reference = Mistral3ForConditionalGeneration(seeing).eval()
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "language_model.lm_head.weight" in tensors
    if not prefixed:
        tensors = {
            re.sub("^language_model.model.", "model.language_model.", name): tensor for name, tensor in tensors.items()
        }
        tensors["lm_head.weight"] = tensors.pop("language_model.lm_head.weight")
        save_file(tensors, tmp_path / "model.safetensors")
    model = open_small(tmp_path)
    ids = list(range(3, 130))
    text_of = Text(ids, shuffled_tables(model, [len(ids)], seed=1)[0])
    with torch.no_grad():
        wanted_V = reference(torch.tensor([ids])).logits[0, -1]
    assert (logits(model, [text_of.slice(len(ids), SamplingParams())])[0] - wanted_V).abs().max() < 1e-4


def test_ministral_3_tempers_its_queries_where_its_rope_says_so() -> None:
    rope = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "rope_theta": 1e6}
    growing = parsed("Ministral3ForCausalLM", rope_parameters={**rope, "llama_4_scaling_beta": 0.1})
    assert growing.temperature == QueryTemperature(64, 0.1, ahead=0, rotating=True)
    assert growing.temperature_of(0) == growing.temperature
    assert parsed("Mistral3ForConditionalGeneration", rope_theta=1e6).temperature is None
    with pytest.raises(ModelConfigError, match="llama_4_scaling_beta must be a number"):
        parsed("Ministral3ForCausalLM", rope_parameters={**rope, "llama_4_scaling_beta": "0.1"})


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize(("context_tokens", "length"), [(64, 64), (2048, 65), (2048, 300)])
def test_longrope_goes_by_the_context_served_whatever_a_texts_length(
    context_tokens: int, length: int, tmp_path: Path
) -> None:
    """As the reference library computes texts of such a length anew; below the original context it would take the
    short factors though more be served."""
    config = FAMILIES["phi4 mini"]()
    config.original_max_position_embeddings = 64
    config.rope_parameters["original_max_position_embeddings"] = 64
    torch.manual_seed(8)
    reference = Phi3ForCausalLM(config).eval()
    model = open_small(saved(reference, tmp_path), context_tokens=context_tokens)
    ids = np.random.default_rng(3).integers(2, 160, length).tolist()
    text_of = Text(ids, shuffled_tables(model, [length], seed=1)[0])
    got_RV = [logits(model, [text_of.slice(count, SamplingParams())])[0] for count in (30, length - 31, 1)]
    with torch.no_grad():
        wanted_TV = reference(torch.tensor([ids])).logits[0]
    assert (got_RV[-1] - wanted_TV[-1]).abs().max() < 1e-4
    assert (got_RV[0] - wanted_TV[29]).abs().max() < 1e-4, "whose keys were written before the text was so long"


def test_gpt_oss_has_windows_sinks_and_yarn() -> None:
    config = GptOss().config({**SIZES, "architectures": ["GptOssForCausalLM"], "sliding_window": 32})
    assert config.spans == (WINDOW, FULL, WINDOW, FULL)
    assert config.sinks
    assert (config.qkv_bias, config.output_bias, config.head_dim) == (True, True, 64)
    assert config.ropes[0] is not None
    assert (config.ropes[0].kind, config.ropes[0].ramp_whole) == ("yarn", False)


def test_llama_4_rotates_where_it_has_chunks() -> None:
    entries = {**SIZES, "architectures": ["Llama4ForCausalLM"], "attention_chunk_size": 64}
    config = Llama4().config(entries)
    rotated = RopeConfig(500_000.0, interleaved=True)
    assert config.spans == (CHUNK, CHUNK, CHUNK, FULL)
    assert config.ropes == (rotated, rotated, rotated, None)
    assert config.temperature == QueryTemperature(8192, 0.1)
    assert config.rotated_norm
    assert Llama4().config({**entries, "attn_temperature_tuning": False}).temperature is None
    order = Llama4().attention(config, 0, "", "")[0].order
    assert order == HeadOrder(6, 128, 128, True)
    assert Llama4().attention(config, 3, "", "")[0].order is None


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 12, 16])
def test_a_heads_rows_are_put_so_that_pairs_lie_half_a_head_apart(rotary_dim: int, interleaved: bool) -> None:
    order = HeadOrder(2, 16, rotary_dim, interleaved).rows(40)
    assert sorted(order) == list(range(40))
    assert order[32:] == list(range(32, 40))
    for head in range(2):
        rows = [row - 16 * head for row in order[16 * head :][:16]]
        pairs = list(zip(rows[:8], rows[8:], strict=True))[: rotary_dim // 2]
        apart = [(2 * pair, 2 * pair + 1) for pair in range(rotary_dim // 2)]
        assert pairs == (apart if interleaved else [(pair, pair + rotary_dim // 2) for pair in range(rotary_dim // 2)])


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("Gemma2ForCausalLM", {"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma2ForCausalLM", {"sliding_window": 0}, "sliding_window"),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": -1}, "attn_logit_softcapping"),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention"]}, "of 4 layers"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("Gemma3ForConditionalGeneration", {"text_config": 3}, "text_config"),
        ("MinistralForCausalLM", {"layer_types": ["sliding_attention"] * 5}, "of 4 layers"),
        ("Phi3ForCausalLM", {"sliding_window": -1}, "sliding_window"),
        ("Phi3ForCausalLM", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_what_a_family_cannot_be_is_refused(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        parsed(architecture, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_chunk_size": 0}, "attention_chunk_size"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"layer_types": ["chunked_attention"] * 3}, "of 4 layers"),
    ],
)
def test_chunks_and_layers_that_disagree_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        Llama4().config({**SIZES, "architectures": ["Llama4ForCausalLM"], **changes})
