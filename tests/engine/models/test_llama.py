"""engine/model: logits agree with the reference library for each family, however a text is cut, packed and paged."""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.protocol.types import SamplingParams
from tests.support.small_models import (
    FAMILIES,
    Text,
    kv_pools,
    logits,
    open_small,
    poison,
    reference_model,
    saved,
    shuffled_tables,
)

pytestmark = pytest.mark.usefixtures("inference")

GREEDY = SamplingParams()
TOLERANCE = 2e-4  # float32, added up in another order on each processor: 1.09e-4 was seen


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_logits_agree_with_the_reference_library_packed_chunked_and_paged(family: str, tmp_path: Path) -> None:
    reference = reference_model(family)
    model = open_small(saved(reference, tmp_path))
    poison(model)
    rng = np.random.default_rng(7)
    lengths = [1, 5, 70, 150, 600]
    texts = [
        Text(rng.integers(0, model.executor.limits.vocabulary, length).tolist(), table)
        for length, table in zip(lengths, shuffled_tables(model, lengths, seed=3), strict=True)
    ]
    with torch.no_grad():
        expected = [reference(torch.tensor([text.ids])).logits[0] for text in texts]
    compared = 0
    # Every step takes of each text a run of random length, single tokens among them, so that chunks and decodes mix.
    while any(text.computed < len(text.ids) for text in texts):
        slices, rows = [], []
        for text, wanted in zip(texts, expected, strict=True):
            left = len(text.ids) - text.computed
            if left:
                slices.append(text.slice(min(left, int(rng.choice([1, 1, 3, 16, 17, 90, 250]))), GREEDY))
                rows.append(wanted[text.computed - 1])
        difference = (logits(model, slices) - torch.stack(rows)).abs().max().item()
        assert difference <= TOLERANCE
        compared += len(rows)
    assert compared >= len(texts) * 3
    for pool in kv_pools(model):
        pool.check()


GREEDY_FAMILIES = (
    "gemma2",
    "gemma3",
    "gpt-oss",
    "llama4 maverick",
    "llama4 scout",
    "ministral",
    "ministral3 window",
    "mistral window",
    "mixtral",
    "phi3 window",
    "phi4 mini",
    "qwen2.5 yarn",
    "qwen3",
    "qwen3moe",
)


@pytest.mark.parametrize("family", GREEDY_FAMILIES)
def test_greedy_text_is_the_reference_librarys_over_several_windows(family: str, tmp_path: Path) -> None:
    reference = reference_model(family)
    model = open_small(saved(reference, tmp_path))
    poison(model)
    prompt, wanted = np.random.default_rng(2).integers(2, model.executor.limits.vocabulary, 30).tolist(), 120
    with torch.no_grad():
        whole = reference.generate(
            torch.tensor([prompt]), max_new_tokens=wanted, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0].tolist()
    (table,) = shuffled_tables(model, [len(prompt) + wanted], seed=2)
    text = Text(list(prompt), table)
    while len(text.ids) < len(whole):
        logits_1V = logits(model, [text.slice(len(text.ids) - text.computed, GREEDY)])
        text.ids.append(int(logits_1V[0].argmax()))
    assert text.ids == whole
    assert len(set(whole)) > 5  # it does not say one thing for ever
