"""Encoders against the reference library, and a text's vector against its company."""

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.models.bert import PAD_STEP, PAD_STEP_FROM, padded_length
from engine.protocol.types import Pooling
from engine.step.encoder_layout import pack_texts, unpack_texts
from tests.support.small_encoders import (
    FAMILIES,
    POSITIONS,
    RERANKERS,
    VOCABULARY,
    open_encoder,
    reference,
    reference_score,
    saved,
    seeded,
    vectors,
)

_LENGTHS = (1, 2, 7, 15, 16, 17, 31, 64, 127, 128, 129, 250, POSITIONS)
_CLS, _SEP = 2, 3


def _texts(lengths: tuple[int, ...] | list[int], seed: int = 1) -> list[list[int]]:
    pick = random.Random(seed)
    return [[pick.randrange(4, VOCABULARY) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pooling", [Pooling.MEAN, Pooling.CLS])
def test_vectors_of_mixed_lengths_are_those_of_transformers(family: str, pooling: Pooling, tmp_path: Path) -> None:
    model = seeded(FAMILIES[family])
    runner = open_encoder(saved(model, tmp_path))
    texts = _texts(_LENGTHS)
    found = vectors(runner, texts, pooling)
    for row, text in zip(found, texts, strict=True):
        expected = reference(model, text, pooling)
        assert np.abs(row - expected.numpy()).max() < 1e-4
        assert torch.cosine_similarity(torch.from_numpy(row), expected, 0) > 1 - 1e-6


@pytest.mark.parametrize("family", RERANKERS)
def test_scores_of_pairs_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = seeded(RERANKERS[family])
    runner = open_encoder(saved(model, tmp_path))
    types_known = model.config.type_vocab_size > 1
    pairs, expected = [], []
    for first, second in zip(_texts([1, 5, 40, 100]), _texts([3, 90, 2, 150], seed=2), strict=True):
        pairs.append([_CLS, *first, _SEP, *second, _SEP])
        second_part = len(second) + 1 if types_known else 0
        types = [0] * (len(pairs[-1]) - second_part) + [1] * second_part
        expected.append(reference_score(model, pairs[-1], types))
    found = vectors(runner, pairs, Pooling.SCORE)
    assert found.shape == (len(pairs), 1)
    assert np.abs(found[:, 0] - expected).max() < 1e-4


def test_a_vector_does_not_depend_on_company_or_order(tmp_path: Path) -> None:
    runner = open_encoder(saved(seeded(FAMILIES["bert"]), tmp_path))
    pick, texts = random.Random(5), _texts(_LENGTHS)
    alone = [vectors(runner, [text], Pooling.MEAN)[0] for text in texts]
    for _ in range(12):
        chosen = pick.sample(range(len(texts)), pick.randint(1, len(texts)))
        company = vectors(runner, [texts[index] for index in chosen], Pooling.MEAN)
        for row, index in zip(company, chosen, strict=True):
            assert np.array_equal(row, alone[index])


def test_one_step_pools_each_text_as_asked(tmp_path: Path) -> None:
    model = seeded(FAMILIES["bert"])
    runner = open_encoder(saved(model, tmp_path))
    texts, poolings = _texts([9, 9, 20]), [Pooling.CLS, Pooling.MEAN, Pooling.CLS]
    for row, text, pooling in zip(vectors(runner, texts, poolings), texts, poolings, strict=True):
        assert np.abs(row - reference(model, text, pooling).numpy()).max() < 1e-4


def test_a_vector_that_is_not_finite_is_told(tmp_path: Path) -> None:
    model = seeded(FAMILIES["bert"])
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[7] = 3e38
    runner = open_encoder(saved(model, tmp_path))
    landed = runner.executor.launch(pack_texts([[8, 9], [7, 9]], [Pooling.MEAN] * 2)).wait()
    assert landed.tokens_R.tolist() == [0, -1]


def test_a_step_beats_after_every_layer(tmp_path: Path) -> None:
    runner = open_encoder(saved(seeded(FAMILIES["bert"]), tmp_path))
    beats: list[int] = []
    runner.executor._beat = lambda: beats.append(1)
    vectors(runner, _texts([3, 4]), Pooling.MEAN)
    assert len(beats) == 3


def test_made_up_weights_need_only_the_config(tmp_path: Path) -> None:
    saved(seeded(RERANKERS["xlm-roberta"]), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    runner = open_encoder(tmp_path, random_weights=True)
    assert np.isfinite(vectors(runner, _texts([5]), Pooling.SCORE)).all()


def test_padding_follows_from_the_length_alone() -> None:
    lengths = range(1, 2000)
    assert all(padded_length(length) >= length for length in lengths)
    assert all(
        padded_length(length) % (PAD_STEP if length <= PAD_STEP_FROM else PAD_STEP_FROM) == 0 for length in lengths
    )
    assert all(padded_length(more) >= padded_length(less) for less, more in pairwise(lengths))


def test_a_packed_step_reads_back() -> None:
    texts = [[5], [6, 7, 8], [9, 10]]
    found = unpack_texts(pack_texts(texts, [Pooling.MEAN, Pooling.CLS, Pooling.SCORE]))
    assert found.lengths == [1, 3, 2]
    assert [found.tokens_T[a:b].tolist() for a, b in pairwise(found.starts_S1.tolist())] == texts
    assert found.poolings_S.tolist() == [
        list(Pooling).index(each) for each in (Pooling.MEAN, Pooling.CLS, Pooling.SCORE)
    ]
