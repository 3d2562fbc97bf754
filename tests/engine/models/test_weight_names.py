"""engine/models/weight_names.py: one place that knows what checkpoints call things."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.models.config import parse_decoder_config
from engine.models.weight_names import decoder_entries, is_unused_tensor
from tests.support.small_models import FAMILIES

EXPERTS_APART = ("mixtral", "qwen3_moe")  # whose files have experts one by one; loading tests hold their layers' names


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_table_lists_exactly_the_reference_librarys_parameters(family: str) -> None:
    theirs = FAMILIES[family]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    config = parse_decoder_config(theirs.to_dict() | {"architectures": [type(model).__name__]})
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if model.config.model_type in EXPERTS_APART:
        expected = {name: shape for name, shape in expected.items() if not name.startswith("model.layers.")}
    listed = [source for entry in decoder_entries(config) for source in entry.sources]
    names = {source.name: source.shape for source in listed}
    assert len(listed) == len(names), "a name is listed twice"
    if model.config.model_type in EXPERTS_APART:
        names = {name: shape for name, shape in names.items() if not name.startswith("model.layers.")}
    assert names == expected


def test_only_rotary_tables_and_a_tied_heads_copy_are_spare() -> None:
    tied, untied = (
        parse_decoder_config(FAMILIES[name]().to_dict() | {"architectures": ["LlamaForCausalLM"]})
        for name in ("llama 3.2 tied", "llama 2")
    )
    assert is_unused_tensor(tied, "lm_head.weight")
    assert not is_unused_tensor(untied, "lm_head.weight")
    assert is_unused_tensor(untied, "model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not is_unused_tensor(tied, "model.layers.0.self_attn.extra.weight")
