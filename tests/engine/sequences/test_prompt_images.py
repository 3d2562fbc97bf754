"""Steps are cut at images: none is computed in parts or before it is encoded, and the first that a step has come to is
computed however few rows there are."""

from array import array

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol.types import SamplingParams
from engine.sequences.prompt_images import fit_chunks
from engine.sequences.sequence import PromptImage, Sequence

TOKENS, LENGTH = 5, 40
ENCODED = np.ones((TOKENS, 2), np.float32)


def sequence(id: int, gaps: list[int], encoded: list[bool], launched: int) -> Sequence:
    """A prompt of LENGTH tokens with an image behind each gap; what it has launched ends at no place within one."""
    images: list[PromptImage] = []
    for gap, done in zip(gaps, encoded, strict=False):
        first = (images[-1].end if images else 0) + gap
        if first + TOKENS >= LENGTH:
            break
        images.append(PromptImage(first, TOKENS, 1, b"x", 1, ENCODED if done else None))
    tokens = array("I", range(LENGTH))
    made = Sequence(1, id, b"", None, tokens, LENGTH, LENGTH + 9, SamplingParams(), frozenset(), 0.0, images=images)
    made.launched = made.computed = launched
    return made


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Sequence], list[int], int]:
    sequences = []
    for id in range(draw(st.integers(1, 4))):
        gaps = draw(st.lists(st.integers(1, 9), max_size=3))
        encoded = draw(st.lists(st.booleans(), min_size=3, max_size=3))
        made = sequence(id, gaps, encoded, 0)
        edges = [place for image in made.images for place in (image.first - 1, image.first, image.first + 1)]
        made.launched = made.computed = draw(st.sampled_from([*edges, 0, LENGTH - 1]))
        if not made.awaits_image:  # it would be in no step
            sequences.append(made)
    chunks = [draw(st.integers(1, min(each.pending, 9))) for each in sequences]
    return sequences, chunks, sum(chunks) + draw(st.integers(0, 3))


def rows(image: PromptImage, first: int, chunk: int) -> int:
    """How many of the image's rows a chunk has."""
    return max(0, min(image.end, first + chunk) - max(image.first, first))


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(steps())
def test_images_are_computed_whole_and_once_encoded(step: tuple[list[Sequence], list[int], int]) -> None:
    sequences, chunks, max_rows = step
    planned = dict(zip(map(id, sequences), chunks, strict=True))
    fitted, own = fit_chunks(sequences, chunks, max_rows, lambda _, wanted: wanted)
    assert [each for each in sequences if each in fitted] == fitted, "another order"
    for each, chunk in zip(fitted, own, strict=True):
        assert 0 < chunk <= each.pending
        for image in each.images:
            left = image.end - max(image.first, each.launched)
            assert rows(image, each.launched, chunk) in (0, max(0, left)), "an image in parts"
            assert image.rows_NH is not None or not rows(image, each.launched, chunk), "it is not encoded"
        if chunk > planned[id(each)]:
            assert any(image.end == each.launched + chunk for image in each.images), "more than an image needs"
    assert sum(own) <= max_rows + TOKENS
    for each in set(sequences) - set(fitted):
        assert each.cut_at_images(planned[id(each)])[0] > planned[id(each)], "left out, and not for an image's rows"
    assert fitted or not sequences, "none goes on"


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(steps(), st.integers(0, TOKENS))
def test_a_sequence_without_blocks_for_an_image_sits_out(
    step: tuple[list[Sequence], list[int], int], covered: int
) -> None:
    sequences, chunks, max_rows = step
    fitted, own = fit_chunks(sequences, chunks, max_rows, lambda _, wanted: min(wanted, covered))
    planned = dict(zip(map(id, sequences), chunks, strict=True))
    assert all(chunk <= max(planned[id(each)], covered) for each, chunk in zip(fitted, own, strict=True))


def test_ids_stand_for_elements_where_only_ids_can() -> None:
    made = sequence(0, [3, 2], [True, True], 0)
    ids = made.token_ids
    assert list(ids[3:8]) == list(ids[10:15]) == [1] * TOKENS
    assert [*ids[:3], *ids[8:10], *ids[15:]] == [*range(3), 8, 9, *range(15, LENGTH)]
    assert list(made.tokens) == list(range(LENGTH)), "the prompt's own have changed"


def test_one_image_may_exceed_a_step_and_others_wait_for_its_rows() -> None:
    sequences = [sequence(id, [3], [True], 3) for id in range(3)]

    def fitting(max_rows: int) -> list[tuple[int, int]]:
        fitted, own = fit_chunks(sequences, [1, 1, 1], max_rows, lambda _, wanted: wanted)
        return [(each.id, chunk) for each, chunk in zip(fitted, own, strict=True)]

    assert fitting(3) == [(0, TOKENS)]
    assert fitting(2 * TOKENS) == [(0, TOKENS)], "the third passed the second"
    assert fitting(2 * TOKENS + 1) == [(0, TOKENS), (1, TOKENS)]
    assert fitting(3 * TOKENS) == [(0, TOKENS), (1, TOKENS), (2, TOKENS)]
