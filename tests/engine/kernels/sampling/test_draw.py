"""engine/kernels/sampling against the CPU's sampler: the same logits give the same tokens."""

from collections.abc import Collection

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels.sampling import filters
from engine.kernels.sampling.draw import add_biases, draw, forbid, penalise
from engine.protocol.types import SamplingParams
from engine.step.layout import SequenceSlice, pack_step, unpack_step
from engine.step.sampling import _key, gumbel_noise, sample_batch
from tests.support.steps import DEVICE, random


def step_of(
    samplings: list[SamplingParams], histories: list[tuple[list[int], int] | None], masked: Collection[int] = ()
) -> np.ndarray:
    slices = [
        SequenceSlice([5], 3, [[index]], settings, history, index in masked)
        for index, (settings, history) in enumerate(zip(samplings, histories, strict=True))
    ]
    return pack_step(slices, 16)


def bits_of(allowed_MV: np.ndarray) -> np.ndarray:
    """The bit masks of what is allowed."""
    padded = np.pad(allowed_MV, ((0, 0), (0, -allowed_MV.shape[1] % 32)))
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def on_device(packed: np.ndarray, logits_RV: Tensor, masks_MW: np.ndarray | None = None) -> list[int]:
    step, x_RV = torch.from_numpy(packed.copy()).to(DEVICE), logits_RV.to(DEVICE).float().clone()
    sampled_R = torch.zeros(len(x_RV) + 1, dtype=torch.int32, device=DEVICE)
    add_biases(step, x_RV)
    penalise(step, x_RV, sampled_R)
    if masks_MW is not None:
        forbid(step, x_RV, torch.from_numpy(masks_MW).to(DEVICE))
    tokens_R = torch.full((len(x_RV),), 77, dtype=torch.int32, device=DEVICE)
    draw(step, x_RV, tokens_R, filters.find_cutoffs(step, x_RV))
    return tokens_R.tolist()


def check(samplings: list[SamplingParams], logits_RV: Tensor, histories: list[tuple[list[int], int] | None]) -> None:
    packed = step_of(samplings, histories)
    wanted = sample_batch(logits_RV.float().clone(), unpack_step(packed.copy())).tokens_R.tolist()
    found = on_device(packed, logits_RV)
    assert found == wanted, [(s, f, w) for s, f, w in zip(samplings, found, wanted, strict=True) if f != w]


def drawn(rng: np.random.Generator, vocabulary: int) -> SamplingParams:
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.3, 1.0, 1.7])),
        top_k=int(rng.choice([0, 0, 1, 2, 7, vocabulary, 10 * vocabulary])),
        top_p=float(rng.choice([1.0, 1.0, 0.9, 0.5, 0.01])),
        min_p=float(rng.choice([0.0, 0.0, 0.05, 0.5])),
        seed=int(rng.integers(0, 2**62)),
    )


@pytest.mark.parametrize("vocabulary", [50, 300])
@pytest.mark.parametrize("seed", range(4))
def test_filters_and_draws(seed: int, vocabulary: int) -> None:
    rng = np.random.default_rng(seed)
    logits_RV = random(12, vocabulary, seed=seed).cpu() * 3
    check([drawn(rng, vocabulary) for _ in range(12)], logits_RV, [None] * 12)


@pytest.mark.parametrize("seed", range(3))
def test_ties_go_to_the_lower_id(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits_RV = torch.from_numpy(rng.integers(0, 4, (12, 60))).float()
    logits_RV[0] = 1.5
    settings = [drawn(rng, 60) for _ in range(12)]
    settings[0] = SamplingParams(temperature=1.0, top_k=3, seed=9)
    check(settings, logits_RV, [None] * 12)


def test_biases_and_penalties() -> None:
    rng = np.random.default_rng(3)
    logits_RV = random(8, 90, seed=3).cpu() * 2
    settings, histories = [], []
    for row in range(8):
        ids = rng.integers(0, 90, 40).tolist()
        histories.append((ids, int(rng.integers(0, 41))) if row % 2 else None)
        settings.append(
            SamplingParams(
                temperature=float(row % 3),
                repetition_penalty=1.3,
                frequency_penalty=0.4,
                presence_penalty=-0.7,
                seed=row,
                logit_bias={4: 5.0, 17: -100.0} if row % 3 else {},
            )
        )
    check(settings, logits_RV, histories)


def test_a_token_that_the_flight_before_sampled_is_penalised() -> None:
    logits_RV = torch.zeros(1, 40)
    logits_RV[0, 7], logits_RV[0, 9] = 3.0, 2.0
    settings = SamplingParams(presence_penalty=2.0)
    packed = pack_step([SequenceSlice([-1 - 2], 3, [[0]], settings, ([1, 2], 2))], 16)
    step, x_RV = torch.from_numpy(packed).to(DEVICE), logits_RV.to(DEVICE)
    penalise(step, x_RV, torch.tensor([0, 0, 7], dtype=torch.int32, device=DEVICE))
    tokens_R = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    draw(step, x_RV, tokens_R)
    assert tokens_R.tolist() == [9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_forbidding_changes_what_is_forbidden_alone_in_every_precision(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(5)
    logits_RV = random(6, 70, seed=5).to(dtype)
    allowed_MV = rng.random((3, 70)) < 0.4
    step = torch.from_numpy(step_of([SamplingParams()] * 6, [None] * 6, [1, 2, 5])).to(DEVICE)
    found_RV = logits_RV.clone()
    forbid(step, found_RV, torch.from_numpy(bits_of(allowed_MV)).to(DEVICE))
    expected_RV = logits_RV.clone()
    expected_RV[[1, 2, 5]] = expected_RV[[1, 2, 5]].masked_fill(~torch.from_numpy(allowed_MV).to(DEVICE), -torch.inf)
    assert torch.equal(found_RV, expected_RV)


@pytest.mark.parametrize("vocabulary", [60, 300])
@pytest.mark.parametrize("seed", range(3))
def test_masks_come_before_filters_and_are_of_their_rows_alone(seed: int, vocabulary: int) -> None:
    """Few tokens are allowed, fewer than top_k leaves, and none that is likely."""
    rng = np.random.default_rng(seed)
    masked = sorted(rng.choice(12, 7, replace=False).tolist())
    allowed_MV = rng.random((7, vocabulary)) < rng.choice([0.05, 0.5], (7, 1))
    allowed_MV[:, vocabulary - 1 - seed] = True
    allowed_MV[0] = np.arange(vocabulary) == vocabulary - 1
    logits_RV = random(12, vocabulary, seed=seed).cpu() * 3
    logits_RV[masked, :] += torch.from_numpy(~allowed_MV) * 5.0
    settings = [drawn(rng, vocabulary) for _ in range(12)]
    packed, masks_MW = step_of(settings, [None] * 12, masked), bits_of(allowed_MV)
    wanted = sample_batch(logits_RV.float().clone(), unpack_step(packed.copy()), masks_MW).tokens_R.tolist()
    assert on_device(packed, logits_RV, masks_MW) == wanted
    assert all(allowed_V[wanted[row]] for row, allowed_V in zip(masked, allowed_MV, strict=True))
    free = sample_batch(logits_RV.float().clone(), unpack_step(step_of(settings, [None] * 12))).tokens_R.tolist()
    assert [row for row in range(12) if free[row] != wanted[row]] == [row for row in masked if free[row] != wanted[row]]
    assert free != wanted


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_that_are_not_finite_give_no_token(temperature: float) -> None:
    logits_RV = random(5, 70)
    logits_RV[0, 30], logits_RV[1, 69], logits_RV[2] = float("nan"), float("inf"), float("-inf")
    logits_RV[3, :69] = float("-inf")
    step = torch.from_numpy(step_of([SamplingParams(temperature=temperature, seed=1)] * 5, [None] * 5)).to(DEVICE)
    tokens_R = torch.full((6,), 77, dtype=torch.int32, device=DEVICE)
    draw(step, torch.cat((logits_RV, logits_RV[:1])), tokens_R)
    assert tokens_R.tolist()[:4] == [-1, -1, -1, 69]
    assert 0 <= tokens_R[4] < 70
    assert tokens_R[5] == 77  # past the step's rows


def test_the_only_token_left_is_drawn_whatever_its_noise() -> None:
    unlucky, seed = 49743, 2  # at position 4 its hash is so near 2⁶⁴ that float32 rounds it up
    logits_RV = torch.zeros(2, unlucky + 1)
    logits_RV[:, unlucky] = 20.0
    settings = [
        SamplingParams(temperature=1.0, top_k=1, seed=seed),
        SamplingParams(temperature=1.0, top_p=0.5, seed=seed),
    ]
    packed = step_of(settings, [None] * 2)
    assert sample_batch(logits_RV.clone(), unpack_step(packed.copy())).tokens_R.tolist() == [unlucky] * 2
    assert on_device(packed, logits_RV) == [unlucky] * 2


@pytest.mark.parametrize("listed", [4, 16])
@pytest.mark.parametrize("seed", range(2))
def test_a_cut_is_found_where_few_values_can_be_listed(seed: int, listed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "_LISTED", listed)
    monkeypatch.setattr(filters, "_BLOCK", 64)
    rng = np.random.default_rng(seed)
    logits_RV = random(6, 300, seed=seed).cpu() * 3
    logits_RV[0] = (logits_RV[0] / 2).round()  # more that are equal than can be listed
    logits_RV[1, 5], logits_RV[2, 7], logits_RV[3, :100] = -1e30, 1e4, float("-inf")
    settings = [SamplingParams(temperature=0.9, top_k=100, top_p=0.7, seed=seed), *(drawn(rng, 300) for _ in range(5))]
    check(settings, logits_RV, [None] * 6)


@pytest.mark.parametrize("temperature", [1e-45, 1e-39, 1e-30, 1e-9])
def test_a_temperature_next_to_none_takes_the_greatest(temperature: float) -> None:
    logits_RV = torch.tensor([[0.0, 3.0, 2.9, 2.95, -1.0], [-2.0, -5.0, 0.0, -0.1, -1.0]])
    for settings in (
        SamplingParams(temperature=temperature, seed=3),
        SamplingParams(temperature=temperature, top_k=3, top_p=0.5, seed=3),
        SamplingParams(temperature=temperature, min_p=0.1, seed=3),
    ):
        packed = step_of([settings] * 2, [None] * 2)
        assert sample_batch(logits_RV.clone(), unpack_step(packed.copy())).tokens_R.tolist() == [1, 2]
        assert on_device(packed, logits_RV) == [1, 2]


def test_filters_end_on_rows_that_are_not_finite() -> None:
    logits_RV = random(4, 70)
    logits_RV[0, 30], logits_RV[1, 69], logits_RV[2], logits_RV[3] = float("nan"), float("inf"), float("-inf"), 3e38
    packed = step_of([SamplingParams(temperature=0.5, top_k=5, top_p=0.5, min_p=0.1, seed=1)] * 4, [None] * 4)
    assert on_device(packed, logits_RV)[:3] == [-1, -1, -1]


# On a GPU, at the shape of a full step of Llama-3.1-8B

ROWS, VOCABULARY = 256, 128256


def kept_of(step: Tensor, logits_RV: Tensor) -> Tensor:
    """Which ids `cut` leaves."""
    cuts_R, lasts_R = filters.find_cutoffs(step, logits_RV)
    ids_V = torch.arange(logits_RV.shape[1], device=DEVICE)
    return (logits_RV > cuts_R[:, None]) | ((logits_RV == cuts_R[:, None]) & (ids_V <= lasts_R[:, None]))


def check_kept(logits_RV: Tensor, settings: list[SamplingParams]) -> None:
    """Against a float64 sort. What is kept is exact, but that the border of top_p and of min_p may be 2e-6 off."""
    kept_RV = kept_of(torch.from_numpy(step_of(settings, [None] * len(settings))).to(DEVICE), logits_RV)
    for row, asked in enumerate(settings):
        x_V, ids_V = logits_RV[row].double().sort(descending=True, stable=True)
        count = int(kept_RV[row].sum())
        if asked.temperature == 0:
            assert count == len(x_V)
            continue
        assert kept_RV[row][ids_V[:count]].all(), "not the likeliest, or not the lowest ids of those that are equal"
        mass_V = ((x_V - x_V[0]) / np.float32(asked.temperature)).exp()
        most, least = (int((mass_V >= asked.min_p * off).sum()) for off in (1 - 2e-6, 1 + 2e-6))
        if asked.top_k:
            most, least = min(most, asked.top_k), min(least, asked.top_k)
        if asked.top_p == 1:
            assert min(least, int(x_V.isfinite().sum())) <= count <= most, asked
            continue
        reached_V = mass_V[:most].cumsum(0) / mass_V[:most].sum()
        assert count <= most
        assert reached_V[count - 1] >= asked.top_p - 2e-6, asked
        assert count == 1 or reached_V[count - 2] < asked.top_p + 2e-6, asked


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spread", [0.2, 1.3, 3.0, 12.0])
def test_what_a_cut_leaves_at_true_shapes(spread: float, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(int(spread * 10))
    logits_RV = (random(ROWS, VOCABULARY, seed=5) * spread).to(dtype)
    logits_RV[3] = 1.5
    logits_RV[4] = (logits_RV[4] / spread).round()
    logits_RV[5, ::2] = float("-inf")
    logits_RV[6, 0], logits_RV[7, 9] = -1e30, 100.0
    settings = [drawn(rng, VOCABULARY) for _ in range(ROWS)]
    settings[3:8] = [
        SamplingParams(temperature=1.0, top_k=50, top_p=0.5),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=1.0, top_k=90_000),
        SamplingParams(temperature=1.0, top_k=30_000, top_p=0.99),
        SamplingParams(temperature=1.0, top_p=0.9999),
    ]
    check_kept(logits_RV, settings)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("top_k", [0, 40])
def test_draws_at_true_shapes(top_k: int, dtype: torch.dtype) -> None:
    """The token's score is the greatest that float64 finds, or less than 2e-5 below it."""
    logits_RV = (random(ROWS, VOCABULARY, seed=6) * 2).to(dtype)
    settings = [SamplingParams(temperature=(row % 4) * 0.5, top_k=top_k, seed=row << 33) for row in range(ROWS)]
    packed = step_of(settings, [None] * ROWS)
    step, tokens_R = torch.from_numpy(packed.copy()).to(DEVICE), torch.zeros(ROWS, dtype=torch.int32, device=DEVICE)
    draw(step, logits_RV, tokens_R, filters.find_cutoffs(step, logits_RV) if top_k else None)
    again_R = torch.zeros_like(tokens_R)
    draw(step, logits_RV, again_R, filters.find_cutoffs(step, logits_RV) if top_k else None)
    assert torch.equal(tokens_R, again_R)
    kept_RV = kept_of(step, logits_RV)
    ids_V, position = np.arange(VOCABULARY), 4
    for row, asked in enumerate(settings):
        x_V, token = logits_RV[row].double(), int(tokens_R[row])
        if asked.temperature == 0:
            assert token == int((x_V == x_V.max()).nonzero()[0])
            continue
        noise_V = torch.from_numpy(gumbel_noise(_key(asked.seed, position), ids_V)).to(DEVICE)
        score_V = torch.where(kept_RV[row], x_V / asked.temperature + noise_V, float("-inf"))
        assert score_V[token] > score_V.max() - 2e-5, asked


@pytest.mark.gpu
def test_biases_penalties_and_masks_at_true_shapes() -> None:
    rng = np.random.default_rng(8)
    logits_RV = random(ROWS, VOCABULARY, seed=8) * 2
    settings, histories = [], []
    for row in range(ROWS):
        bias = {int(id_): float(rng.normal()) for id_ in rng.integers(0, VOCABULARY, row % 301)}
        settings.append(
            SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.1, logit_bias=bias)
        )
        ids = rng.integers(0, 200 if row % 3 else VOCABULARY, 1 + 20 * row).tolist()
        histories.append((ids, int(rng.integers(0, len(ids)))) if row % 2 else None)
    step = torch.from_numpy(step_of(settings, histories, range(ROWS))).to(DEVICE)
    allowed_RV = torch.from_numpy(rng.random((ROWS, VOCABULARY)) < 0.5).to(DEVICE)
    bits_32 = 1 << torch.arange(32, device=DEVICE)
    allowed_RW = (allowed_RV.view(ROWS, -1, 32) * bits_32).sum(-1).to(torch.int32)
    found_RV = logits_RV.clone()
    add_biases(step, found_RV)
    penalise(step, found_RV, torch.zeros(ROWS, dtype=torch.int32, device=DEVICE))
    forbid(step, found_RV, allowed_RW)

    wanted_RV = logits_RV.double()
    for row, (asked, history) in enumerate(zip(settings, histories, strict=True)):
        x_V = wanted_RV[row]
        x_V[list(asked.logit_bias)] += torch.tensor(list(asked.logit_bias.values()), device=DEVICE, dtype=torch.float64)
        if history is not None:
            ids, prompt_tokens = history
            seen_V = torch.bincount(torch.tensor(ids, device=DEVICE), minlength=VOCABULARY) > 0
            written_V = torch.bincount(torch.tensor(ids[prompt_tokens:], device=DEVICE), minlength=VOCABULARY)
            x_V[:] = torch.where(seen_V, torch.where(x_V > 0, x_V / 1.2, x_V * 1.2), x_V)
            x_V[:] = torch.where(written_V > 0, x_V - 0.3 * written_V - 0.1, x_V)
    wanted_RV[~allowed_RV] = float("-inf")
    assert torch.equal(found_RV.isinf(), wanted_RV.isinf())
    off_RV = (found_RV - wanted_RV).nan_to_num(0).abs()
    assert (off_RV / wanted_RV.abs().nan_to_num(1, 1, 1).clamp_min(1)).max() < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [128256, 151936])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_true_vocabularies(vocabulary: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(vocabulary)
    logits_RV = (random(24, vocabulary, seed=5).cpu() * 3).to(dtype)
    settings = [drawn(rng, vocabulary) for _ in range(24)]
    packed = step_of(settings, [None] * 24)
    wanted = np.array(sample_batch(logits_RV.float().clone(), unpack_step(packed.copy())).tokens_R)
    # At the border of top_p a float32 sum may fall on the other side: then one token more or less takes part.
    assert (wanted != on_device(packed, logits_RV)).sum() <= 1
