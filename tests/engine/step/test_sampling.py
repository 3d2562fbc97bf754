"""engine/step/sampling.py: draws follow the exact probabilities, repeat per (seed, position), and agree with an
oracle."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.protocol.types import SamplingParams
from engine.step.executor import RunnerOutput
from engine.step.layout import SequenceSlice, StepBatch, pack_step, unpack_step
from engine.step.sampling import gumbel_noise, sample_batch

BLOCK_TOKENS = 16
Row = tuple[list[float], SamplingParams, int, tuple[Sequence[int], int] | None]


def batch_of(rows: list[Row]) -> StepBatch:
    """A step whose i-th row samples the token for the position given."""
    slices = [
        SequenceSlice([0], position - 1, [list(range(position // BLOCK_TOKENS + 1))], sampling, history)
        for _, sampling, position, history in rows
    ]
    return unpack_step(pack_step(slices, BLOCK_TOKENS))


def run(rows: list[Row]) -> RunnerOutput:
    return sample_batch(torch.tensor([row[0] for row in rows], dtype=torch.float32), batch_of(rows))


def draws(logits: list[float], sampling: SamplingParams, count: int) -> np.ndarray:
    """How often each token came in `count` draws at as many positions, run in steps of 64 rows."""
    seen = np.zeros(len(logits), np.int64)
    for first in range(1, count + 1, 64):
        rows: list[Row] = [(logits, sampling, position, None) for position in range(first, min(first + 64, count + 1))]
        np.add.at(seen, run(rows).tokens_R, 1)
    return seen


def exact(logits: list[float], sampling: SamplingParams) -> np.ndarray:
    """The probabilities, straight from the definition: temperature, min_p, top_k, top_p."""
    scaled = np.array(logits, np.float64) / sampling.temperature
    shares = np.exp(scaled - scaled.max())
    kept = shares >= sampling.min_p
    order = sorted(range(len(logits)), key=lambda token: (-scaled[token], token))
    if sampling.top_k:
        kept[order[sampling.top_k :]] = False
    shares = np.where(kept, shares, 0) / shares[kept].sum()
    reached = 0.0
    for token in order:
        if reached >= sampling.top_p:
            shares[token] = 0
        reached += shares[token]
    return np.asarray(shares / shares.sum())


LOGITS = [2.0, -1.0, 0.5, 0.5, 3.0, 1.5, -4.0, 2.5, 0.0, 1.0]
SETTINGS = {
    "temperature 1": SamplingParams(temperature=1.0, seed=11),
    "temperature 0.6": SamplingParams(temperature=0.6, seed=12),
    "temperature 3": SamplingParams(temperature=3.0, seed=13),
    "top_k": SamplingParams(temperature=1.0, top_k=4, seed=14),
    "top_k cuts a tie": SamplingParams(temperature=2.0, top_k=7, seed=15),
    "top_p": SamplingParams(temperature=1.0, top_p=0.7, seed=16),
    "min_p": SamplingParams(temperature=1.5, min_p=0.2, seed=17),
    "all of them": SamplingParams(temperature=1.2, top_k=6, top_p=0.9, min_p=0.05, seed=2**63 - 1),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_follow_the_exact_probabilities(name: str) -> None:
    sampling, count = SETTINGS[name], 6000
    expected = exact(LOGITS, sampling) * count
    seen = draws(LOGITS, sampling, count)
    possible = expected > 0
    assert not seen[~possible].any(), "a filtered token was drawn"
    chi_square = ((seen - expected)[possible] ** 2 / expected[possible]).sum()
    degrees = int(possible.sum()) - 1
    # Five standard deviations above the mean of the chi-square distribution; the seeds are fixed, so this never flips.
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees)


def test_noise_is_standard_gumbel_and_unlike_between_ids_and_keys() -> None:
    values = gumbel_noise(12345, np.arange(200_000)).astype(np.float64)
    assert abs(values.mean() - 0.57722) < 0.01
    assert abs(values.std() - math.pi / math.sqrt(6)) < 0.01
    assert np.isfinite(values).all()
    other = gumbel_noise(12346, np.arange(200_000)).astype(np.float64)
    assert abs(np.corrcoef(values, other)[0, 1]) < 0.01
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.01


def test_a_token_depends_on_seed_and_position_and_not_on_its_company() -> None:
    rng = np.random.default_rng(1)
    rows: list[Row] = []
    for index in range(12):
        sampling = SamplingParams(
            temperature=float(rng.choice([0.0, 0.6, 1.0, 1.7])),
            top_k=int(rng.choice([0, 5, 40])),
            top_p=float(rng.choice([1.0, 0.8])),
            seed=index // 2,
        )
        rows.append((rng.normal(0, 3, 300).tolist(), sampling, int(rng.integers(1, 500)), None))
    together = run(rows).tokens_R.tolist()
    assert together == [int(run([row]).tokens_R[0]) for row in rows]
    assert together[::-1] == run(rows[::-1]).tokens_R.tolist()
    flat: list[Row] = [
        ([0.0] * 300, SamplingParams(temperature=1.0, seed=seed), at, None) for seed, at in ((1, 5), (1, 6), (2, 5))
    ]
    assert len(set(run(flat).tokens_R.tolist())) == 3


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    assert run([([1.0, 7.0, 3.0, 7.0], SamplingParams(), 1, None)]).tokens_R.tolist() == [1]


def test_top_p_beyond_the_tokens_sorted_first_still_finds_its_set() -> None:
    flat = [0.0] * 5000
    seen = {
        int(run([(flat, SamplingParams(temperature=1.0, top_p=0.5, seed=seed), 3, None)]).tokens_R[0])
        for seed in range(200)
    }
    assert max(seen) <= 2500, "of equals the lower ids make up top_p's set"
    assert max(seen) > 1500, "more than the tokens sorted first are needed"


def oracle_penalties(
    logits: list[float], sampling: SamplingParams, history: tuple[Sequence[int], int] | None
) -> list[float]:
    changed = list(logits)
    for token, bias in sampling.logit_bias.items():
        changed[token] += bias
    if history is None:
        return changed
    ids, prompt = list(history[0]), history[1]
    for token in set(ids):
        factor = sampling.repetition_penalty
        changed[token] = changed[token] / factor if changed[token] > 0 else changed[token] * factor
    for token in set(ids[prompt:]):
        count = ids[prompt:].count(token)
        changed[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return changed


def test_biases_and_penalties_agree_with_a_plain_oracle() -> None:
    rng = np.random.default_rng(2)
    rows: list[Row] = []
    for _ in range(40):
        ids = rng.integers(0, 30, int(rng.integers(1, 25))).tolist()
        sampling = SamplingParams(
            repetition_penalty=float(rng.choice([1.0, 1.3, 0.7])),
            frequency_penalty=float(rng.choice([0.0, 0.9, -0.5])),
            presence_penalty=float(rng.choice([0.0, 1.1])),
            logit_bias={int(token): float(rng.normal(0, 4)) for token in rng.integers(0, 30, int(rng.integers(0, 4)))},
        )
        history = (ids, int(rng.integers(0, len(ids) + 1))) if rng.random() < 0.8 else None
        rows.append((rng.normal(0, 2, 30).tolist(), sampling, 40, history))
    expected = [int(np.argmax(oracle_penalties(logits, sampling, history))) for logits, sampling, _, history in rows]
    assert run(rows).tokens_R.tolist() == expected
    assert expected != [int(np.argmax(logits)) for logits, *_ in rows], "the penalties change something"


def test_a_bias_of_minus_100_bans_a_token_while_sampling() -> None:
    sampling = SamplingParams(temperature=1.0, seed=3, logit_bias={4: -100.0})
    assert draws(LOGITS, sampling, 500)[4] == 0


def test_logprobs_are_of_the_raw_logits() -> None:
    sampling = SamplingParams(temperature=0.3, top_k=2, seed=5, logit_bias={1: 50.0}, logprobs=3)
    done = run(
        [
            (LOGITS, sampling, 9, None),
            (LOGITS, SamplingParams(logprobs=0), 9, None),
            (LOGITS, SamplingParams(), 9, None),
        ]
    )
    assert sorted(done.logprobs) == [0, 1]
    whole = torch.log_softmax(torch.tensor(LOGITS, dtype=torch.float64), -1)
    logprob, ids, logprobs = done.logprobs[0]
    assert done.tokens_R[0] == 1, "the bias decides"
    assert logprob == pytest.approx(float(whole[1]), abs=1e-6)
    assert ids == [4, 7, 0]
    assert logprobs == pytest.approx(whole[[4, 7, 0]].tolist(), abs=1e-6)
    assert done.logprobs[1] == (pytest.approx(float(whole[4]), abs=1e-6), [], [])


def test_alternatives_with_equal_logits_come_lowest_id_first() -> None:
    done = run([([1.0, 2.0, 2.0, 2.0, 0.0], SamplingParams(logprobs=2), 1, None)])
    assert done.logprobs[0][1] == [1, 2]


def test_a_mask_leaves_only_what_it_allows_and_reported_logprobs_are_of_all() -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=5, logprobs=2)
    slices = [SequenceSlice([0], 8, [[0]], sampling, masked=masked) for masked in (False, True, True)]
    allowed_MV = np.zeros((2, len(LOGITS)), np.bool_)
    allowed_MV[0, 6], allowed_MV[1, [1, 6]] = True, True
    masks_MW = np.packbits(np.pad(allowed_MV, ((0, 0), (0, 22))), axis=1, bitorder="little").view(np.int32)
    done = sample_batch(torch.tensor([LOGITS] * 3), unpack_step(pack_step(slices, BLOCK_TOKENS)), masks_MW)
    assert done.tokens_R[0] == run([(LOGITS, sampling, 9, None)]).tokens_R[0]
    assert done.tokens_R[1:].tolist() == [6, 1]
    whole = torch.log_softmax(torch.tensor(LOGITS, dtype=torch.float64), -1)
    assert done.logprobs[1] == (
        pytest.approx(float(whole[6]), abs=1e-6), [4, 7], pytest.approx(whole[[4, 7]].tolist(), abs=1e-6)
    )  # fmt: skip


def test_a_mask_comes_behind_a_bias() -> None:
    packed = pack_step(
        [SequenceSlice([0], 8, [[0]], SamplingParams(logit_bias={4: 100.0, 1: 50.0}), masked=True)], BLOCK_TOKENS
    )
    masks_MW = np.array([[1 << 1 | 1 << 7]], np.int32)
    assert sample_batch(torch.tensor([LOGITS]), unpack_step(packed), masks_MW).tokens_R.tolist() == [1]


def test_masks_that_are_not_as_many_as_their_rows_are_a_mistake() -> None:
    packed = pack_step([SequenceSlice([0], 8, [[0]], SamplingParams(), masked=True)] * 2, BLOCK_TOKENS)
    with pytest.raises(AssertionError, match="as many masks"):
        sample_batch(torch.tensor([LOGITS] * 2), unpack_step(packed), np.ones((1, 1), np.int32))
