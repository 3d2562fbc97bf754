"""engine/kernels/sampling.py against the CPU's sampler: the same logits give the same tokens."""

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.batch import Slice, pack, unpack
from engine.kernels import sampling
from engine.sampler import sample
from engine.wire import Sampling
from tests.engine.kernels.steps import DEVICE, random


def step_of(samplings: list[Sampling], histories: list[tuple[list[int], int] | None]) -> np.ndarray:
    slices = [
        Slice([5], 3, [index], settings, history)
        for index, (settings, history) in enumerate(zip(samplings, histories, strict=True))
    ]
    return pack(slices, 16)


def on_device(packed: np.ndarray, logits_RV: Tensor) -> list[int]:
    step, x_RV = torch.from_numpy(packed.copy()).to(DEVICE), logits_RV.to(DEVICE).float().clone()
    sampled_R = torch.zeros(len(x_RV) + 1, dtype=torch.int32, device=DEVICE)
    sampling.add_biases(step, x_RV)
    sampling.penalise(step, x_RV, sampled_R)
    tokens_R = torch.full((len(x_RV),), 77, dtype=torch.int32, device=DEVICE)
    sampling.draw(step, x_RV, tokens_R, sampling.cut(step, x_RV))
    return tokens_R.tolist()


def check(samplings: list[Sampling], logits_RV: Tensor, histories: list[tuple[list[int], int] | None]) -> None:
    packed = step_of(samplings, histories)
    wanted = sample(logits_RV.float().clone(), unpack(packed.copy())).tokens_R.tolist()
    found = on_device(packed, logits_RV)
    assert found == wanted, [(s, f, w) for s, f, w in zip(samplings, found, wanted, strict=True) if f != w]


def drawn(rng: np.random.Generator, vocabulary: int) -> Sampling:
    return Sampling(
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
    settings[0] = Sampling(temperature=1.0, top_k=3, seed=9)
    check(settings, logits_RV, [None] * 12)


def test_biases_and_penalties() -> None:
    rng = np.random.default_rng(3)
    logits_RV = random(8, 90, seed=3).cpu() * 2
    settings, histories = [], []
    for row in range(8):
        ids = rng.integers(0, 90, 40).tolist()
        histories.append((ids, int(rng.integers(0, 41))) if row % 2 else None)
        settings.append(
            Sampling(
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
    settings = Sampling(presence_penalty=2.0)
    packed = pack([Slice([-1 - 2], 3, [0], settings, ([1, 2], 2))], 16)
    step, x_RV = torch.from_numpy(packed).to(DEVICE), logits_RV.to(DEVICE)
    sampling.penalise(step, x_RV, torch.tensor([0, 0, 7], dtype=torch.int32, device=DEVICE))
    tokens_R = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    sampling.draw(step, x_RV, tokens_R)
    assert tokens_R.tolist() == [9]


def test_what_a_mask_forbids_is_never_drawn() -> None:
    allowed_RW = torch.zeros(4, 2, dtype=torch.int32, device=DEVICE)
    allowed_RW[:, 1] = 1 << 5
    allowed_RW[1:, 0] = 1 << 3
    packed = step_of([Sampling(), *(Sampling(temperature=1.0, seed=seed) for seed in range(3))], [None] * 4)
    step, x_RV = torch.from_numpy(packed).to(DEVICE), random(4, 60)
    sampling.forbid(step, x_RV, allowed_RW)
    tokens_R = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    sampling.draw(step, x_RV, tokens_R)
    assert tokens_R.tolist()[0] == 37
    assert set(tokens_R.tolist()) <= {3, 37}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_that_are_not_finite_give_no_token(temperature: float) -> None:
    logits_RV = random(5, 70)
    logits_RV[0, 30], logits_RV[1, 69], logits_RV[2] = float("nan"), float("inf"), float("-inf")
    logits_RV[3, :69] = float("-inf")
    step = torch.from_numpy(step_of([Sampling(temperature=temperature, seed=1)] * 5, [None] * 5)).to(DEVICE)
    tokens_R = torch.full((6,), 77, dtype=torch.int32, device=DEVICE)
    sampling.draw(step, torch.cat((logits_RV, logits_RV[:1])), tokens_R)
    assert tokens_R.tolist()[:4] == [-1, -1, -1, 69]
    assert 0 <= tokens_R[4] < 70
    assert tokens_R[5] == 77  # past the step's rows


def test_the_only_token_left_is_drawn_whatever_its_noise() -> None:
    unlucky, seed = 49743, 2  # at position 4 its hash is so near 2⁶⁴ that float32 rounds it up
    logits_RV = torch.zeros(2, unlucky + 1)
    logits_RV[:, unlucky] = 20.0
    settings = [Sampling(temperature=1.0, top_k=1, seed=seed), Sampling(temperature=1.0, top_p=0.5, seed=seed)]
    packed = step_of(settings, [None] * 2)
    assert sample(logits_RV.clone(), unpack(packed.copy())).tokens_R.tolist() == [unlucky] * 2
    assert on_device(packed, logits_RV) == [unlucky] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [128256, 151936])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_true_vocabularies(vocabulary: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(vocabulary)
    logits_RV = (random(24, vocabulary, seed=5).cpu() * 3).to(dtype)
    settings = [drawn(rng, vocabulary) for _ in range(24)]
    packed = step_of(settings, [None] * 24)
    wanted = np.array(sample(logits_RV.float().clone(), unpack(packed.copy())).tokens_R)
    # At the border of top_p a float32 sum may fall on the other side: then one token more or less takes part.
    assert (wanted != on_device(packed, logits_RV)).sum() <= 1
