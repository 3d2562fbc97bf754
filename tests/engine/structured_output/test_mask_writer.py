"""engine/structured_output/mask_writer.py: masks that are written beside their caller."""

import threading
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from engine.protocol.types import GrammarKind
from engine.structured_output.lark_grammar import LarkMatcher
from engine.structured_output.manager import StructuredOutputManager
from engine.structured_output.mask_writer import MaskWriter
from tests.engine.structured_output.texts import compiled

WORDS = 40


@pytest.fixture
def writer() -> Iterator[MaskWriter]:
    with closing(MaskWriter(2)) as writer:
        yield writer


@pytest.mark.parametrize("count", [1, 7, 8, 33])
def test_masks_begun_are_those_that_are_written_at_once(grammars: StructuredOutputManager, count: int) -> None:
    compilation = compiled(grammars, "a(b|c){2,9}d", GrammarKind.REGEX)
    matchers = [compilation.new_matcher(frozenset()) if row % 3 else None for row in range(count)]
    for row, matcher in enumerate(matchers):
        if matcher is not None:
            for token in np.flatnonzero(_allowed(grammars, matcher))[: row % 2]:
                assert matcher.accept(int(token)) == ""
    masks = grammars.begin_masks(matchers)
    for timing in (False, True):
        grammars.writer._timing = timing
        assert (grammars.writer.write(matchers, masks().shape[1]) == masks()).all()


def test_the_caller_goes_on_while_masks_are_written(writer: MaskWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()

    def slow(rows: list[tuple[LarkMatcher, int]], masks_MW: np.ndarray, begun: object) -> float:
        assert callable(begun)
        begun()
        assert goes_on.wait(10), "the caller waits for what it has begun"
        masks_MW[:] = 5
        return 0.0

    matcher = LarkMatcher.__new__(LarkMatcher)
    matcher._extra_stops = frozenset()
    monkeypatch.setattr(writer, "_write_at_once", slow)
    masks = writer.begin([matcher] * 8, WORDS)
    goes_on.set()
    assert (masks() == np.full((8, WORDS), 5)).all()


def test_what_fails_beside_the_caller_is_told_to_who_waits(writer: MaskWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> float:
        raise RuntimeError("the library gave up")

    matcher = LarkMatcher.__new__(LarkMatcher)
    monkeypatch.setattr(writer, "_write_at_once", failing)
    masks = writer.begin([matcher] * 8, WORDS)
    with pytest.raises(RuntimeError, match="gave up"):
        masks()


def _allowed(grammars: StructuredOutputManager, matcher: LarkMatcher) -> np.ndarray:
    return np.unpackbits(grammars.begin_masks([matcher])().view(np.uint8), bitorder="little")
