"""engine/weights/validate.py: what a replica would load is counted from headers, without torch. What it refuses is
tested by the command that asks it (tests/gateway/commands/model_tools/test_add.py).
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from engine.protocol.specs import ModelSpec
from engine.weights.validate import inspect_weights
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


def test_it_needs_no_torch() -> None:
    code = "import sys, engine.weights.validate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0
