from collections.abc import Iterator
from contextlib import closing

import pytest

from engine.structured_output.manager import StructuredOutputManager
from tests.engine.structured_output.texts import EMBER, Scribe


@pytest.fixture(scope="module")
def grammars() -> Iterator[StructuredOutputManager]:
    with closing(StructuredOutputManager(EMBER, 1)) as opened:
        opened.wait_ready()
        yield opened


@pytest.fixture(scope="module")
def scribe(grammars: StructuredOutputManager) -> Scribe:
    return Scribe(grammars, stop_id=1)
