"""What the engine's tests share: inference mode, and models on a GPU that are closed when their test is over."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from engine.protocol.specs import ModelSpec


@pytest.fixture(scope="module")
def inference() -> Iterator[None]:
    """Inference mode for a whole module, in which a replica's main opens and uses its model."""
    from engine.execution.open import inference_mode  # only here: most tests need no torch

    with inference_mode():
        yield


@pytest.fixture
def open_on_gpu(inference: None) -> Iterator[Callable[[ModelSpec], Any]]:
    """Opens a model as open_model does. All of them are closed at the end, the last one first."""
    from engine.execution.open import open_model  # only here: most tests need no torch

    with ExitStack() as opened:
        yield lambda model: opened.enter_context(closing(open_model(model, "cuda", None, lambda: None)))
