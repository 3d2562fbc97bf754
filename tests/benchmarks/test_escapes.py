"""benchmarks/bf12/escapes.py: what it says of weights is so."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.bf12 import escapes
from benchmarks.bf12.lossless import SMALL_GEOMETRY
from engine.bf12.codec import choose_bases, encode


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A folder of float32 numbers, of which one matrix has zeros."""
    draw = torch.Generator().manual_seed(0)
    good, bad = (torch.randn(64, 256, generator=draw) * 0.02 for _ in range(2))
    bad[:, ::2] = 0.0
    folder = tmp_path / "trained"
    folder.mkdir()
    save_file({"good.weight": good, "bad.weight": bad, "norm": torch.ones(256)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SMALL_GEOMETRY))
    return folder


def test_what_is_counted_is_what_the_code_leaves_out(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rounded"
    folder.mkdir()
    assert escapes.rounded(trained, folder) == folder
    weights = load_file(folder / "model.safetensors")
    found = {tensor.name: tensor for tensor in escapes.matrices(folder)}
    assert found.keys() == {"good.weight", "bad.weight"}, "the norm is no matrix"
    for name, tensor in found.items():
        coded = encode(weights[name], choose_bases(weights[name]))
        assert tensor.escapes == len(coded.escapes.positions_E)
    assert {name: tensor.kind for name, tensor in found.items()} == {"good.weight": "bf12", "bad.weight": "bf16"}
    told = {name: value for name, value, _ in escapes.figures(list(found.values()))}
    assert told["in 12 bits"] == 50.0
    assert told["worst tensor"] == pytest.approx(50.0, abs=0.1)
    assert told["escapes"] == pytest.approx(25.0, abs=0.1)


def test_entropy_is_that_of_exponents_alone() -> None:
    assert escapes.exponent_bits(torch.tensor([1.0, -1.5, 1.25, 1.75]).bfloat16()) == 0.0
    assert escapes.exponent_bits(torch.tensor([1.0, 2.0, 4.0, -8.0]).bfloat16()) == 2.0
