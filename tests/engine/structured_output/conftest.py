from collections.abc import Iterator
from contextlib import closing

import pytest

from engine.structured_output.manager import Grammars
from tests.engine.structured_output.texts import EMBER, Scribe


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    with closing(Grammars(EMBER, 1)) as opened:
        opened.wait()
        yield opened


@pytest.fixture(scope="module")
def scribe(grammars: Grammars) -> Scribe:
    return Scribe(grammars, stop_id=1)
