"""engine/models/gpu_step.py: rows of the norm are packed where that is allowed, in the one dtype that they have."""

import json
from pathlib import Path
from typing import cast

import pytest
import torch

from engine.kernels.packed_rows import factors_of, is_packed, numbers_of
from engine.kvcache.layer_pools import LayerPools
from engine.models.config import read_decoder_config
from engine.models.gpu_step import GpuStep, StepBuffers
from engine.weights import fp8
from tests.support.compressed_folders import llama_config
from tests.support.steps import DEVICE, error, random


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_normed_rows_are_packed_where_what_takes_them_multiplies_such(dtype: torch.dtype, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_config()))
    config = read_decoder_config(tmp_path)
    space = StepBuffers.make(config, dtype, DEVICE, words=64, rows=8, sampled=2, context_tokens=64)
    step = GpuStep(config, space, cast(LayerPools, None), rows=3)
    weight_H = random(config.hidden, seed=1)
    space.sum_TH.copy_(random(8, config.hidden, seed=2))
    plain_TH = step.add_norm(None, weight_H)
    assert plain_TH.dtype == dtype
    found = step.add_norm(None, weight_H, packs=True)
    assert is_packed(found) == (dtype == torch.bfloat16)
    if is_packed(found):
        assert error(fp8.expand(numbers_of(found), factors_of(found), torch.float32), plain_TH) < 0.07
    else:
        assert torch.equal(found, plain_TH)
