"""Logits → tokens on the device, with the meaning, the order and the noise of engine/step/sampling.py.

`draw` alone is enough where every row is greedy or has a temperature and nothing else: it reads the logits once. What
only some rows need comes before it: `add_biases` and `penalise`, on a float32 copy, `forbid`, and the cutoffs of
filters.py. A row's token depends on that row alone.

R rows, V vocabulary, M masked rows, W words of a bit mask, C chunks of the vocabulary, H history.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.step_layout import (
    BIAS_IDS,
    BIAS_STARTS,
    BIAS_VALUES,
    FREQUENCY,
    HISTORIES,
    HISTORY,
    MASK,
    PRESENCE,
    REPETITION,
    SAMPLED,
    SEED_HIGH,
    SEED_LOW,
    SEED_POSITION,
    sampling_float,
    sampling_scale,
    sampling_word,
    word,
)

CHUNK = 8192  # of the vocabulary, for one program
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # splitmix64's
_FACTOR_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_FACTOR_2 = tl.constexpr(0x94D049BB133111EB)
_REST_MAX = tl.constexpr(1.0 - 2.0**-24)  # as in engine/step/sampling.py
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _shuffle(value):
    value = (value ^ (value >> 30)) * _FACTOR_1
    value = (value ^ (value >> 27)) * _FACTOR_2
    return value ^ (value >> 31)


@triton.jit
def _key(step, row):
    """64 bits that (seed, position) determine."""
    low = sampling_word(step, row, SEED_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = sampling_word(step, row, SEED_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
    position = sampling_word(step, row, SEED_POSITION).to(tl.uint64)
    return _shuffle(_shuffle((high << 32) | low) + position * _GOLDEN)


@triton.jit
def _log2(x):
    """log₂ of normal numbers, to 2⁻²². Triton's own is exact, and takes ten times as long."""
    if tl.target_info.is_cuda():
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.log2(x)


@triton.jit
def _noise(key, ids):
    """Standard Gumbel noise: −log(−log(1 − rest)), rest a hash of (key, id) in 0 … 1. Exact to some 1e-6."""
    hashed = _shuffle((ids + 1).to(tl.uint64) * _GOLDEN + key)
    rest = tl.minimum(((hashed >> 32).to(tl.uint32).to(tl.float32) + 0.5) * 2.3283064365386963e-10, _REST_MAX)
    # 1 − rest loses the digits of a small rest, where the noise is largest: the logarithm's series keeps them.
    series = rest * (1 + rest * (1 / 2 + rest * (1 / 3 + rest * (1 / 4 + rest * (1 / 5)))))
    negative_log = tl.where(rest < 0.0625, series, -_LN_2 * _log2(1 - rest))
    return -_LN_2 * _log2(negative_log)


@triton.jit
def _draw_chunk(
    step, logits, cuts, lasts, best, V, first, chunks, FILTERED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A chunk's greatest score and, in the low half of the same word, its id; −1 where a logit is not finite. The
    logits' first id is `first`."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    if row < tl.load(step + SAMPLED):
        scale = sampling_scale(step, row)
        key = _key(step, row)
        most = tl.full([BLOCK], float("-inf"), tl.float32)
        best_id = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        greatest = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, V), BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(logits + row.to(tl.int64) * V + at, mask=at < V, other=float("-inf")).to(tl.float32)
            greatest = tl.maximum(greatest, x, propagate_nan=tl.PropagateNan.ALL)
            score = x
            if scale > 0:
                if FILTERED:
                    cut = tl.load(cuts + row)
                    kept = (x > cut) | ((x == cut) & (at <= tl.load(lasts + row)))
                    score = tl.full([BLOCK], float("-inf"), tl.float32)
                    if tl.max(kept.to(tl.int32), 0) > 0:
                        score = tl.where(kept, x * scale + _noise(key, first + at), float("-inf"))
                else:
                    score = x * scale + _noise(key, first + at)
            better = score > most  # the lower id of equal ones, which came first
            most = tl.where(better, score, most)
            best_id = tl.where(better, first + at, best_id)
        top = tl.max(most, 0)
        found = tl.min(tl.where(most == top, best_id, 0x7FFFFFFF), 0)
        unsound = tl.max((greatest < float("inf")).to(tl.int32) ^ 1, 0)  # NaN or +inf
        id_ = tl.where(unsound > 0, -1, found).to(tl.uint32, bitcast=True).to(tl.int64)
        tl.store(best + row * chunks + chunk, (top.to(tl.int32, bitcast=True).to(tl.int64) << 32) | id_)


@triton.jit
def _draw_row(step, best, tokens, chunks, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row < tl.load(step + SAMPLED):
        chunk = tl.arange(0, BLOCK)
        pair = tl.load(best + row * chunks + chunk, mask=chunk < chunks, other=0)
        score = tl.where(chunk < chunks, (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True), float("-inf"))
        id_ = tl.where(chunk < chunks, pair.to(tl.int32), 0x7FFFFFFF)
        top = tl.max(score, 0)
        token = tl.min(tl.where(score == top, id_, 0x7FFFFFFF), 0)
        tl.store(tokens + row, tl.where((tl.min(id_, 0) < 0) | (top == float("-inf")), -1, token))


@triton.jit
def _add_biases(step, logits, V, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row < tl.load(step + SAMPLED):
        last = word(step, BIAS_STARTS, row + 1)
        for start in range(word(step, BIAS_STARTS, row), last, BLOCK):
            at = start + tl.arange(0, BLOCK)
            ids = tl.load(step + tl.load(step + BIAS_IDS) + at, mask=at < last, other=0)
            values = tl.load(step + tl.load(step + BIAS_VALUES) + at, mask=at < last, other=0)
            place = logits + row.to(tl.int64) * V + ids
            x = tl.load(place, mask=at < last, other=0.0)
            tl.store(place, x + values.to(tl.float32, bitcast=True), mask=at < last)


@triton.jit
def _count(step, sampled, counts, V, BLOCK: tl.constexpr):
    """Counts a row's tokens. Bit 0: seen in prompt or output; the rest: how often in the output. Integers, so that no
    order matters."""
    row = tl.program_id(0)
    if row < tl.load(step + SAMPLED):
        first = word(step, HISTORIES, 3 * row)
        last = word(step, HISTORIES, 3 * row + 1)
        if first < last:
            prompt_end = first + word(step, HISTORIES, 3 * row + 2)
            for start in range(first + tl.program_id(1) * BLOCK, last, tl.num_programs(1) * BLOCK):
                at = start + tl.arange(0, BLOCK)
                ids = tl.load(step + tl.load(step + HISTORY) + at, mask=at < last, other=0)
                ids = tl.where(ids < 0, tl.load(sampled - 1 - ids, mask=(at < last) & (ids < 0), other=0), ids)
                known = (at < last) & (ids >= 0)
                place = counts + row.to(tl.int64) * V + ids
                tl.atomic_or(place, 1, mask=known)
                tl.atomic_add(place, 2, mask=known & (at >= prompt_end))


@triton.jit
def _penalise(step, logits, counts, V, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row < tl.load(step + SAMPLED):
        seen = word(step, HISTORIES, 3 * row) < word(step, HISTORIES, 3 * row + 1)
        last = tl.where(seen, V, 0)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        place = row.to(tl.int64) * V + at
        count = tl.load(counts + place, mask=at < last, other=0)
        x = tl.load(logits + place, mask=at < last, other=0.0)
        repetition = sampling_float(step, row, REPETITION)
        x = tl.where((count & 1) > 0, tl.where(x > 0, x / repetition, x * repetition), x)
        written = (count >> 1).to(tl.float32)
        lowered = sampling_float(step, row, FREQUENCY) * written + sampling_float(step, row, PRESENCE)
        x = tl.where(written > 0, x - lowered, x)
        tl.store(logits + place, x, mask=at < last)


@triton.jit
def _forbid(step, logits, masks, V, W, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row < tl.load(step + SAMPLED):
        mask = sampling_word(step, row, MASK)
        if mask >= 0:
            at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            bits = tl.load(masks + mask * W + at // 32, mask=at < V, other=0)
            forbidden = ((bits >> (at % 32)) & 1) == 0
            tl.store(logits + row.to(tl.int64) * V + at, float("-inf"), mask=(at < V) & forbidden)


def draw(step: Tensor, logits_RV: Tensor, tokens_R: Tensor, cutoffs: tuple[Tensor, Tensor] | None = None) -> None:
    """Chooses each row's token; −1 where its logits are not finite or all −inf. `cutoffs` are those of `find_cutoffs`.

    Reads float32, bfloat16 or float16 logits once. Greedy rows (temperature 0) take the greatest logit.
    """
    choose(step, draw_chunks(step, logits_RV, cutoffs), tokens_R)


def draw_chunks(
    step: Tensor, logits_RV: Tensor, cutoffs: tuple[Tensor, Tensor] | None = None, first: int = 0
) -> Tensor:
    """The best of each chunk of the vocabulary, int64 [R, C], for `choose`. Where a
    vocabulary is cut, the logits are those from `first` on, and have no cutoffs."""
    rows, vocabulary = logits_RV.shape
    _check(step, logits_RV)
    assert cutoffs is None or not first
    chunks = triton.cdiv(vocabulary, CHUNK)
    best_RC = torch.empty(rows, chunks, dtype=torch.int64, device=logits_RV.device)
    cuts_R, lasts_R = cutoffs or (best_RC, best_RC)
    block = min(2048, triton.next_power_of_2(vocabulary))
    _draw_chunk[rows, chunks](
        step, logits_RV, cuts_R, lasts_R, best_RC, vocabulary, first, chunks, FILTERED=cutoffs is not None,
        CHUNK=CHUNK, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return best_RC


def choose(step: Tensor, best_RC: Tensor, tokens_R: Tensor) -> None:
    """Chooses each row's token among the best of all chunks."""
    rows, chunks = best_RC.shape
    assert best_RC.dtype == torch.int64
    assert best_RC.is_contiguous()
    assert tokens_R.dtype == torch.int32
    _draw_row[(rows,)](step, best_RC, tokens_R, chunks, BLOCK=triton.next_power_of_2(chunks), num_warps=1)


def add_biases(step: Tensor, logits_RV: Tensor) -> None:
    """Adds the step's logit biases to float32 logits, in place."""
    rows, vocabulary = logits_RV.shape
    _check(step, logits_RV)
    assert logits_RV.dtype == torch.float32
    _add_biases[(rows,)](step, logits_RV, vocabulary, BLOCK=128)


def penalise(step: Tensor, logits_RV: Tensor, sampled_R: Tensor) -> None:
    """Applies repetition, frequency and presence penalties to float32 logits, in place; sampled_R as in `embed`."""
    rows, vocabulary = logits_RV.shape
    _check(step, logits_RV)
    assert logits_RV.dtype == torch.float32
    assert sampled_R.dtype == torch.int32
    counts_RV = torch.zeros(rows, vocabulary, dtype=torch.int32, device=logits_RV.device)
    _count[rows, 8](step, sampled_R, counts_RV, vocabulary, BLOCK=256)
    block = min(2048, triton.next_power_of_2(vocabulary))
    _penalise[rows, triton.cdiv(vocabulary, block)](step, logits_RV, counts_RV, vocabulary, BLOCK=block)


def forbid(step: Tensor, logits_RV: Tensor, masks_MW: Tensor) -> None:
    """Writes −inf to float32, bfloat16 or float16 logits where bit (id % 32) of int32 word (id ÷ 32) of the row's mask
    is 0."""
    rows, vocabulary = logits_RV.shape
    _check(step, logits_RV)
    assert masks_MW.dtype == torch.int32
    assert masks_MW.is_contiguous()
    assert masks_MW.shape[1] * 32 >= vocabulary
    block = min(2048, triton.next_power_of_2(vocabulary))
    grid = (rows, triton.cdiv(vocabulary, block))
    _forbid[grid](step, logits_RV, masks_MW, vocabulary, masks_MW.shape[1], BLOCK=block)


def _check(step: Tensor, logits_RV: Tensor) -> None:
    assert step.dtype == torch.int32
    assert logits_RV.is_contiguous()
