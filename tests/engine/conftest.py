"""What the engine's tests share: models on a GPU that are closed when their test is over."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from engine.protocol.specs import ModelSpec


@pytest.fixture
def open_on_gpu() -> Iterator[Callable[[ModelSpec], Any]]:
    """Opens a model as runner.open_model does. All of them are closed at the end, the last one first."""
    from engine.execution.open import open_model  # only here: most tests need no torch

    with ExitStack() as opened:
        yield lambda model: opened.enter_context(closing(open_model(model, "cuda", None, lambda: None)))
