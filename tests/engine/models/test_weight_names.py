"""engine/models/weight_names.py: one place that knows what checkpoints call things."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.models.config import parse_decoder_config
from engine.models.weight_names import ShardAxis, decoder_entries, is_unused_tensor
from tests.support.small_models import FAMILIES


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_table_lists_exactly_the_reference_librarys_parameters(family: str) -> None:
    theirs = FAMILIES[family]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    config = parse_decoder_config(theirs.to_dict() | {"architectures": [type(model).__name__]})
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    listed = [source for entry in decoder_entries(config) for source in entry.sources]
    assert {source.name: source.shape for source in listed} == expected
    assert len(listed) == len(expected), "a name is listed twice"


def test_cuts_leave_norms_whole_and_pair_outputs_with_inputs() -> None:
    config = parse_decoder_config(FAMILIES["llama biases"]().to_dict() | {"architectures": ["LlamaForCausalLM"]})
    cuts = {entry.parameter.removeprefix("layers.0."): entry.cut for entry in decoder_entries(config)}
    assert cuts["qkv.weight"] is cuts["qkv.bias"] is cuts["gate_up.weight"] is ShardAxis.OUTPUTS
    assert cuts["output.weight"] is cuts["down.weight"] is ShardAxis.INPUTS
    assert cuts["output.bias"] is cuts["down.bias"] is cuts["attention_norm"] is cuts["norm"] is ShardAxis.WHOLE


def test_only_rotary_tables_and_a_tied_heads_copy_are_spare() -> None:
    tied, untied = (
        parse_decoder_config(FAMILIES[name]().to_dict() | {"architectures": ["LlamaForCausalLM"]})
        for name in ("llama 3.2 tied", "llama 2")
    )
    assert is_unused_tensor(tied, "lm_head.weight")
    assert not is_unused_tensor(untied, "lm_head.weight")
    assert is_unused_tensor(untied, "model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not is_unused_tensor(tied, "model.layers.0.self_attn.extra.weight")
