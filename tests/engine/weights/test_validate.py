"""engine/weights/validate.py: what a replica would load is counted from headers, without torch. What it refuses is
tested by the command that asks it (tests/gateway/commands/model_tools/test_add.py).
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.protocol.specs import ModelSpec
from engine.weights.checkpoint import CheckpointError
from engine.weights.validate import inspect_weights
from tests.support.tiling_models import write_tiling_folder
from tests.support.tiny_model import write_tiny


def test_every_number_that_is_loaded_counts_once(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    stored = load_file(folder / "model.safetensors")
    numbers = sum(tensor.size for tensor in stored.values())
    spec = ModelSpec(name="@cf/a/tiny", folder=str(folder))
    assert inspect_weights(spec).numbers == numbers
    spare = {
        "lm_head.weight": stored["model.embed_tokens.weight"],
        "model.layers.0.rotary_emb.inv_freq": np.ones(4, "f4"),
    }
    save_file(stored | spare, folder / "model.safetensors")
    assert inspect_weights(spec).numbers == numbers, "the copy of a tied head and rotary tables are not loaded"


def test_numbers_of_what_encodes_images_count_apart(tmp_path: Path) -> None:
    folder, _ = write_tiling_folder(tmp_path / "tiling")
    stored = load_file(folder / "model.safetensors")
    seeing = [stored[name].size for name in stored if name.startswith(("vision_model.", "multi_modal_projector."))]
    report = inspect_weights(ModelSpec(name="@cf/a/tiling", folder=str(folder)))
    assert report.image_numbers == sum(seeing) > 0
    assert report.numbers == sum(tensor.size for tensor in stored.values()) - sum(seeing)
    lacking = "multi_modal_projector.linear_1.weight"
    save_file({name: tensor for name, tensor in stored.items() if name != lacking}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"lacks {lacking}"):
        inspect_weights(ModelSpec(name="@cf/a/tiling", folder=str(folder)))


def test_it_needs_no_torch() -> None:
    code = "import sys, engine.weights.validate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0
