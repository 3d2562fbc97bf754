"""An encoder of images on a GPU gives the rows that it gives on a CPU, which tests hold against the reference library;
what it computes there with, torch's own linear layers, is held on a CPU too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.models.bert import TorchLinear
from engine.models.config import read_decoder_config
from engine.vision import patch_layers
from engine.weights.source import WeightSource
from tests.support.seeing_models import random_image, seeing_model
from tests.support.tiling_models import tiling_model

pytestmark = pytest.mark.usefixtures("inference")
MODELS: dict[str, Callable[[], Any]] = {"gemma3": seeing_model, "llama4": tiling_model}


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    MODELS[request.param]().save_pretrained(tmp_path)
    return tmp_path


def encoded(folder: Path, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    config, where = read_decoder_config(folder), torch.device(device)
    source = WeightSource.open(folder, config, dtype, where, False).with_vision(folder)
    pixels = torch.from_numpy(np.stack([random_image(seed) for seed in range(3)])).to(where)
    rows = source.load_vision(lambda: None).embeddings(pixels)
    assert rows.device.type == where.type
    return rows.float().cpu()


def test_torch_s_linear_layers_give_the_same_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = encoded(folder, "cpu")
    monkeypatch.setattr(patch_layers, "CpuLinear", TorchLinear)
    torch.testing.assert_close(encoded(folder, "cpu"), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-3), (torch.bfloat16, 0.04)])
def test_a_gpu_gives_the_rows_that_a_cpu_does(folder: Path, dtype: torch.dtype, error: float) -> None:
    wanted = encoded(folder, "cpu")
    assert (encoded(folder, "cuda", dtype) - wanted).norm() < error * wanted.norm()
