"""engine/step/key_span.py: what a row sees, counted key by key, and which layers see alike."""

import numpy as np
import pytest

from engine.step.key_span import FULL, KeySpan, LayerGroup, group_layers


@pytest.mark.parametrize("span", [FULL, KeySpan(window=1), KeySpan(window=37), KeySpan(chunk=16), KeySpan(chunk=48)])
def test_first_is_the_lowest_key_that_the_definition_shows(span: KeySpan) -> None:
    def sees(position: int, key: int) -> bool:
        if span.window is not None:
            return position - key < span.window
        return span.chunk is None or position // span.chunk == key // span.chunk

    positions = np.arange(200, dtype=np.int32)
    wanted = [next(key for key in range(position + 1) if sees(position, key)) for position in range(200)]
    assert [span.first(position) for position in range(200)] == wanted
    assert span.firsts(positions).tolist() == wanted


@pytest.mark.parametrize("sizes", [(0, None), (None, 0), (-1, None), (16, 16)])
def test_a_span_of_no_key_or_of_two_kinds_is_none(sizes: tuple[int | None, int | None]) -> None:
    with pytest.raises(AssertionError):
        KeySpan(*sizes)


def test_layers_of_one_span_are_a_group_and_the_full_ones_come_first() -> None:
    window, chunk = KeySpan(window=8), KeySpan(chunk=16)
    assert group_layers([chunk, window, FULL, chunk, FULL]) == (
        LayerGroup(FULL, (2, 4)), LayerGroup(chunk, (0, 3)), LayerGroup(window, (1,)),
    )  # fmt: skip
    assert group_layers([window, window]) == (LayerGroup(window, (0, 1)),)
