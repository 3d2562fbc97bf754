"""Logits → tokens: biases, penalties, temperature, filters, and a draw that depends on (seed, position) alone.

A row's token does not depend on the rows beside it. It knows no sequences and no text.

Per row and in this order: logit biases and penalties on the raw logits, the row's mask, temperature, min_p (against
the most likely token), top_k, top_p (of what top_k left), then the draw: the greatest log-probability plus Gumbel
noise, where the noise of a token is a hash of (seed, position, token id). Temperature 0 takes the greatest logit, the
lowest id where several are equal. Reported log probabilities are those of the raw logits, before any of this, as OpenAI
means them.

R rows, V vocabulary, C candidates, M masked rows, W words of a bit mask.
"""

import math
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.step.executor import RunnerOutput
from engine.step.layout import Int32s, StepBatch

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15  # the constants are splitmix64's
_SHUFFLES: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_REST_MAX: Final = 1 - 2.0**-24  # the float32 before 1, which would make the noise −∞: no token would be left
_TEMPERATURE_MIN: Final = 1e-10  # less would make scores infinite, and is greedy all the same
_NOISE_MAX: Final = 23.0  # −log(−log(1 − 2⁻³³)) is 22.9: no token's noise is greater
_SORTED_FIRST: Final = 1024  # how many the search for top_p's set puts in order before it takes them all


def sample_batch(logits_RV: Tensor, batch: StepBatch, masks_MW: Int32s | None = None) -> RunnerOutput:
    """Chooses a token for each of the batch's rows from their float32 logits, which it changes in place. A batch with
    masked rows needs their masks."""
    assert logits_RV.dtype == torch.float32
    logits = logits_RV.numpy()
    alternatives_R = batch.sampling_R["logprobs"].tolist()
    reported = [row for row, count in enumerate(alternatives_R) if count >= 0]
    raw = {row: logits[row].copy() for row in reported}
    touched = (np.diff(batch.bias_starts_R1) > 0) | (batch.histories_R3[:, 0] < batch.histories_R3[:, 1])
    for row in np.flatnonzero(touched).tolist():
        _add_biases(logits[row], batch, row)
        _penalise(logits[row], batch, row)
    if masks_MW is not None:
        _forbid(logits, batch, masks_MW)
    tokens_R = logits_RV.argmax(-1).to(torch.int32).numpy()
    for row in np.flatnonzero(batch.sampling_R["temperature"] > 0).tolist():
        tokens_R[row] = _draw(logits[row], batch, row)
    return RunnerOutput(tokens_R, {row: _report(raw[row], int(tokens_R[row]), alternatives_R[row]) for row in reported})


def pooling_output(vectors_RH: Tensor) -> RunnerOutput:
    """The output of a step in a model that gives vectors."""
    vectors = vectors_RH.numpy()
    return RunnerOutput(np.where(np.isfinite(vectors).all(1), 0, -1).astype(np.int32), {}, vectors)


def _add_biases(logits_V: Floats, batch: StepBatch, row: int) -> None:
    first, last = batch.bias_starts_R1[row], batch.bias_starts_R1[row + 1]
    logits_V[batch.bias_ids_B[first:last]] += batch.bias_values_B[first:last]


def _penalise(logits_V: Floats, batch: StepBatch, row: int) -> None:
    """Applies penalties: repetition counts prompt and output, frequency and presence the output alone."""
    first, last, prompt_tokens = batch.histories_R3[row].tolist()
    if first == last:
        return
    ids = batch.history_H[first:last]
    seen = np.unique(ids)
    settings, values = batch.sampling_R[row], logits_V[seen]
    repetition = settings["repetition_penalty"]
    logits_V[seen] = np.where(values > 0, values / repetition, values * repetition)
    written, counts = np.unique(ids[prompt_tokens:], return_counts=True)
    logits_V[written] -= settings["frequency_penalty"] * counts.astype(np.float32) + settings["presence_penalty"]


def _forbid(logits_RV: Floats, batch: StepBatch, masks_MW: Int32s) -> None:
    """Sets logits to −∞ where a row's mask does not allow the token."""
    rows = np.flatnonzero(batch.sampling_R["mask"] >= 0)
    assert len(rows) == len(masks_MW), "as many masks as masked rows"
    for row, mask_W in zip(rows.tolist(), masks_MW, strict=True):
        allowed = np.unpackbits(mask_W.view(np.uint8), count=logits_RV.shape[1], bitorder="little")
        logits_RV[row, allowed == 0] = -np.inf


def _draw(logits_V: Floats, batch: StepBatch, row: int) -> int:
    settings = batch.sampling_R[row]
    scaled_V = logits_V / max(settings["temperature"], np.float32(_TEMPERATURE_MIN))
    threshold, key = np.float32(-np.inf), _key(int(settings["seed"]), int(settings["position"]))
    min_p, top_k, top_p = float(settings["min_p"]), int(settings["top_k"]), float(settings["top_p"])
    best = int(scaled_V.argmax())
    if min_p > 0:
        threshold = scaled_V[best] + np.float32(math.log(min_p))
    ids_C: Ids
    if 0 < top_k < len(scaled_V) or top_p < 1:
        ids_C = _filter(scaled_V, threshold, top_k, top_p)
    else:
        # Whatever cannot beat the likeliest token's score even with the greatest noise is left out beforehand.
        bound = scaled_V[best] + gumbel_noise(key, np.array([best]))[0] - np.float32(_NOISE_MAX)
        ids_C = np.flatnonzero(scaled_V >= max(bound, threshold))
    return int(ids_C[(scaled_V[ids_C] + gumbel_noise(key, ids_C)).argmax()])


def _filter(scaled_V: Floats, threshold: np.float32, top_k: int, top_p: float) -> Ids:
    """The ids that min_p, top_k and top_p leave, in order of their ids. Between equal logits the lower id comes
    first."""
    candidates = int((scaled_V >= threshold).sum())
    if top_k > 0:
        candidates = min(candidates, top_k)
    if top_p >= 1:
        return np.sort(_best(scaled_V, candidates))
    log_total = _log_sum(scaled_V[_best(scaled_V, candidates)] if top_k > 0 else scaled_V[scaled_V >= threshold])
    for count in (min(candidates, _SORTED_FIRST), candidates):
        ids_C = _best(scaled_V, count)
        reached_C = np.cumsum(np.exp(scaled_V[ids_C].astype(np.float64) - log_total))
        if reached_C[-1] >= top_p:
            break
    return np.sort(ids_C[: 1 + int(np.searchsorted(reached_C, top_p))])


def _best(values_V: Floats, count: int) -> Ids:
    """The ids of the `count` greatest values, greatest first, the lower id first where values are equal."""
    if count < len(values_V):
        border = torch.from_numpy(values_V).topk(count, sorted=False).values.min().item()
        ids_C = np.flatnonzero(values_V >= border)
    else:
        ids_C = np.arange(len(values_V))
    return ids_C[np.argsort(-values_V[ids_C], kind="stable")][:count]


def _log_sum(values: Floats) -> float:
    greatest = float(values.max())
    return greatest + math.log(float(np.exp(values.astype(np.float64) - greatest).sum()))


def _report(raw_V: Floats, token: int, alternatives: int) -> tuple[float, list[int], list[float]]:
    """(the token's log probability, the most likely ids, their log probabilities)."""
    log_total = _log_sum(raw_V)
    ids_C = _best(raw_V, alternatives) if alternatives else np.empty(0, np.int64)
    return float(raw_V[token]) - log_total, ids_C.tolist(), (raw_V[ids_C].astype(np.float64) - log_total).tolist()


def _key(seed: int, position: int) -> int:
    """64 bits that (seed, position) determine."""
    return _shuffle((_shuffle(seed) + position * _GOLDEN) & _MASK)


def _shuffle(value: int) -> int:
    for shift, factor in _SHUFFLES:
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> 31)


def gumbel_noise(key: int, ids_C: NDArray[np.integer]) -> Floats:
    """Standard Gumbel noise for token ids: −log(−log u), with u a hash of (key, id)."""
    hashed = ids_C.astype(np.uint64)
    hashed += np.uint64(1)
    hashed *= np.uint64(_GOLDEN)
    hashed += np.uint64(key)
    for shift, factor in _SHUFFLES:
        hashed ^= hashed >> np.uint64(shift)
        hashed *= np.uint64(factor)
    hashed ^= hashed >> np.uint64(31)
    # 1 − u instead of u: where the noise is great, −log u is small, and float32 is exact near 0 but not near 1.
    rest = torch.from_numpy((hashed >> np.uint64(32)).astype(np.float32)).add_(0.5).mul_(2.0**-32)
    rest.clamp_(max=_REST_MAX)
    values: Floats = rest.neg_().log1p_().neg_().log_().neg_().numpy()
    return values
