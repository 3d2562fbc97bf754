"""Prompts with tiles of pictures through the scheduler that serves text, as Llama 4 takes them: each tile sees what is
before it, in chunks as far as these go."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray
from transformers import Llama4ForConditionalGeneration

from engine.step.layout import unpack_step
from tests.engine.replica.test_images import Part, Seeing, scope, text
from tests.support.seeing_models import IMAGE_TOKEN, TOKENS, random_image
from tests.support.tiling_models import greedy_tiling, tiling_model

pytestmark = pytest.mark.usefixtures("inference")

ACROSS, DOWN, WHOLE = [141], [142], [143]


@pytest.fixture(scope="module")
def reference() -> Llama4ForConditionalGeneration:
    return tiling_model()


@pytest.fixture(scope="module")
def folder(reference: Llama4ForConditionalGeneration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiling")
    reference.save_pretrained(folder)
    return folder


@pytest.fixture
def seeing(folder: Path) -> Iterator[Seeing]:
    served = Seeing(folder)
    yield served
    served.close()


def picture(seed: int) -> list[Part]:
    """Two tiles side by side, and the whole picture."""
    left, right, whole = (random_image(10 * seed + tile) for tile in range(3))
    return [[140], left, ACROSS, right, DOWN + WHOLE, whole, [144]]


def wanted(model: Llama4ForConditionalGeneration, parts: list[Part], written: list[int]) -> list[int]:
    assert written
    ids = [id for part in parts for id in (part if isinstance(part, list) else [IMAGE_TOKEN] * TOKENS)]
    return greedy_tiling(model, ids, [part for part in parts if not isinstance(part, list)], written)


def test_texts_are_those_of_the_reference_library(seeing: Seeing, reference: Llama4ForConditionalGeneration) -> None:
    prompts: list[list[Part]] = [
        [text(1, 5), *picture(1), text(2, 9)],
        [text(3, 70), *picture(2), text(4, 2), *picture(1), text(5, 1)],
        [text(6, 50)],
        [text(7, 3), random_image(1), text(8, 4)],
    ]
    texts = seeing.texts(prompts, 6)
    assert texts == [wanted(reference, prompt, own) for prompt, own in zip(prompts, texts, strict=True)]
    swapped = [[part if isinstance(part, list) else random_image(3) for part in prompt] for prompt in prompts]
    assert texts != [wanted(reference, prompt, own) for prompt, own in zip(swapped, texts, strict=True)]


def test_steps_of_few_rows_give_the_same_texts(folder: Path, reference: Llama4ForConditionalGeneration) -> None:
    served, rows = Seeing(folder, step_tokens=16), list[int]()
    launch = served.model.executor.launch

    def launched(words: NDArray[Any]) -> Any:
        rows.append(len(unpack_step(words).tokens_T))
        return launch(words)

    served.model.executor.launch = launched  # type: ignore[method-assign]
    prompts: list[list[Part]] = [[text(1, 21), *picture(1), text(2, 9)], [text(4, 30)]]
    texts = served.texts(prompts, 6)
    assert texts == [wanted(reference, prompt, own) for prompt, own in zip(prompts, texts, strict=True)]
    assert max(rows) <= 16 + TOKENS
    served.close()


def test_a_prefix_that_ends_among_tiles_is_found(seeing: Seeing, reference: Llama4ForConditionalGeneration) -> None:
    first, encoded = [text(1, 20), *picture(1), text(2, 40)], seeing.encoded
    seeing.texts([first], 2)
    assert seeing.encoded == encoded + 3
    other: list[Part] = [*first[:4], random_image(7), *first[5:]]  # the right tile is another one
    again, changed = seeing.submit([*first, text(3, 5)], 3), seeing.submit(other, 3)
    seeing.run()
    assert seeing.written[again] == wanted(reference, [*first, text(3, 5)], seeing.written[again])
    assert seeing.written[changed] == wanted(reference, other, seeing.written[changed])
    assert seeing.cached[again] == 160
    assert seeing.cached[changed] == 48, "20 of text, one that begins the picture, 27 of the first tile"
    stranger = seeing.submit(first, 2, tenant=scope(b"u"))
    seeing.run()
    assert seeing.cached[stranger] == 0
