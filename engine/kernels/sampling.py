"""Logits → tokens on the device, with the meaning, the order and the noise of engine/sampler.py.

`draw` alone is enough where every row is greedy or has a temperature and nothing else: it reads the logits once. What
only some rows need comes before it, on a float32 copy: `add_biases`, `penalise`, `forbid`, and `cut`, which finds the
least logit that top_k, top_p and min_p leave by a search for it instead of a sort (each pass over the row halves what
is left of the values between; the idea is FlashInfer's). A row's token depends on that row alone.

R rows, V vocabulary, W words of a bit mask, C chunks of the vocabulary, H history.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.batch import SAMPLING_WORDS
from engine.kernels.packed import (
    BIAS_IDS,
    BIAS_STARTS,
    BIAS_VALUES,
    HISTORY,
    HISTORY_STARTS,
    SAMPLED,
    SAMPLING,
    word,
)

CHUNK = 8192  # of the vocabulary, for one program
_SEARCH_BLOCK = 8192
_SEARCH_WARPS = 16
_WORDS = tl.constexpr(SAMPLING_WORDS)
_TEMPERATURE = tl.constexpr(0)  # columns of sampling_R12
_TOP_K = tl.constexpr(1)
_TOP_P = tl.constexpr(2)
_MIN_P = tl.constexpr(3)
_REPETITION = tl.constexpr(4)
_FREQUENCY = tl.constexpr(5)
_PRESENCE = tl.constexpr(6)
_SEED_LOW = tl.constexpr(7)
_SEED_HIGH = tl.constexpr(8)
_POSITION = tl.constexpr(9)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # splitmix64's
_FACTOR_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_FACTOR_2 = tl.constexpr(0x94D049BB133111EB)
_LOWEST = tl.constexpr(-0x7F800001)  # −inf, ordered
_REST_MOST = tl.constexpr(1.0 - 2.0**-24)  # as engine/sampler.py has it


@triton.jit
def _shuffle(value):
    value = (value ^ (value >> 30)) * _FACTOR_1
    value = (value ^ (value >> 27)) * _FACTOR_2
    return value ^ (value >> 31)


@triton.jit
def _column(step, row, column):
    return word(step, SAMPLING, row * _WORDS + column)


@triton.jit
def _number(step, row, column):
    return _column(step, row, column).to(tl.float32, bitcast=True)


@triton.jit
def _key(step, row):
    """64 bits that (seed, position) determine."""
    low = _column(step, row, _SEED_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = _column(step, row, _SEED_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
    position = _column(step, row, _POSITION).to(tl.uint64)
    return _shuffle(_shuffle((high << 32) | low) + position * _GOLDEN)


@triton.jit
def _noise(key, ids):
    """Standard Gumbel noise: −log(−log u), u a hash of (key, id); by 1 − u, which float32 holds exactly near 0."""
    hashed = _shuffle((ids + 1).to(tl.uint64) * _GOLDEN + key)
    rest = tl.minimum(((hashed >> 32).to(tl.float32) + 0.5) * 2.3283064365386963e-10, _REST_MOST)
    u = 1.0 - rest
    # log(1 − rest), exact for a small rest too: Kahan's correction of what the subtraction lost.
    log_u = tl.where(u == 1.0, -rest, tl.log(u) * (-rest / (u - 1.0)))
    return -tl.log(-log_u)


@triton.jit
def _ordered(values):
    """float32 → int32 in the same order; −0 is made 0 before."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _best(score, id_, other_score, other_id):
    """The greater score; of equal ones the lower id."""
    other = (other_score > score) | ((other_score == score) & (other_id < id_))
    return tl.where(other, other_score, score), tl.where(other, other_id, id_)


@triton.jit
def _draw_chunk(
    step, logits, cuts, lasts, scores, ids, V, chunks, FILTERED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    if row < tl.load(step + SAMPLED):
        temperature = _number(step, row, _TEMPERATURE)
        key = _key(step, row)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_id = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        sound = tl.full([BLOCK], 1, tl.int32)
        for start in range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, V), BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(logits + row.to(tl.int64) * V + at, mask=at < V, other=float("-inf")).to(tl.float32)
            sound = tl.where(x < float("inf"), sound, 0)  # neither NaN nor +inf
            if temperature > 0:
                x = x / temperature
                if FILTERED:
                    cut = tl.load(cuts + row)
                    kept = (_ordered(x) > cut) | ((_ordered(x) == cut) & (at <= tl.load(lasts + row)))
                    x = tl.where(kept, x, float("-inf"))
                x += _noise(key, at)
            best, best_id = _best(best, best_id, x, tl.where(at < V, at, 0x7FFFFFFF))
        top = tl.max(best, 0)
        found = tl.min(tl.where(best == top, best_id, 0x7FFFFFFF), 0)
        sound = tl.min(sound, 0)
        tl.store(scores + row * chunks + chunk, top)
        tl.store(ids + row * chunks + chunk, tl.where(sound > 0, found, -1))


@triton.jit
def _draw_row(step, scores, ids, tokens, chunks, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row < tl.load(step + SAMPLED):
        chunk = tl.arange(0, BLOCK)
        score = tl.load(scores + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
        id_ = tl.load(ids + row * chunks + chunk, mask=chunk < chunks, other=0x7FFFFFFF)
        top = tl.max(score, 0)
        token = tl.min(tl.where(score == top, id_, 0x7FFFFFFF), 0)
        tl.store(tokens + row, tl.where((tl.min(id_, 0) < 0) | (top == float("-inf")), -1, token))


@triton.jit
def _measure(x_row, V, temperature, peak, least, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """How many values are at or above `least`, or their mass; the lowest of those, and the highest below."""
    total = tl.zeros([BLOCK], tl.float32)
    above = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    below = tl.full([BLOCK], -0x7FFFFFFF, tl.int32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_row + at, mask=at < V, other=float("-inf")) / temperature
        order = _ordered(x)
        inside = (order >= least) & (at < V)
        total += tl.where(inside, tl.exp(x - peak) if BY_MASS else 1.0, 0.0)
        above = tl.minimum(above, tl.where(inside, order, 0x7FFFFFFF))
        below = tl.maximum(below, tl.where(inside | (at >= V), -0x7FFFFFFF, order))
    return tl.sum(total, 0), tl.min(above, 0), tl.max(below, 0)


@triton.jit
def _search(x_row, V, temperature, peak, low, high, target, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The greatest value such that those at or above it measure at least `target`. It lies in low … high."""
    while low < high:
        middle = (low.to(tl.int64) + high.to(tl.int64) + 1) // 2
        found, above, below = _measure(x_row, V, temperature, peak, middle.to(tl.int32), BY_MASS, BLOCK)
        if found >= target:
            low = above
        else:
            high = below
    return low


@triton.jit
def _cut(step, logits, cuts, lasts, V, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row < tl.load(step + SAMPLED):
        temperature = _number(step, row, _TEMPERATURE)
        top_k = _column(step, row, _TOP_K)
        top_p = _number(step, row, _TOP_P)
        min_p = _number(step, row, _MIN_P)
        cut = -0x7FFFFFFF
        last = V
        if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
            x_row = logits + row.to(tl.int64) * V
            peaks = tl.full([BLOCK], float("-inf"), tl.float32)
            for start in range(0, V, BLOCK):
                at = start + tl.arange(0, BLOCK)
                peaks = tl.maximum(peaks, tl.load(x_row + at, mask=at < V, other=float("-inf")))
            peak = tl.max(peaks, 0) / temperature
            high = _ordered(peak)
            if min_p > 0:
                # The least value there is at or above the bound, so that it is one that a search can end at.
                bound = _ordered(peak + tl.log(min_p))
                kept, cut, _below = _measure(x_row, V, temperature, peak, bound, False, BLOCK)
            else:
                kept, cut, _below = _measure(x_row, V, temperature, peak, _LOWEST, False, BLOCK)
            ties = kept  # how many of those that equal the cut are kept: so far all
            if (top_k > 0) & (top_k < kept):
                cut = _search(x_row, V, temperature, peak, cut, high, top_k.to(tl.float32), False, BLOCK)
                beyond, _above, _below = _measure(x_row, V, temperature, peak, cut + 1, False, BLOCK)
                ties = top_k - beyond
            if top_p < 1:
                beyond, _above, _below = _measure(x_row, V, temperature, peak, cut + 1, True, BLOCK)
                whole, _above, _below = _measure(x_row, V, temperature, peak, cut, True, BLOCK)
                equal, _above, _below = _measure(x_row, V, temperature, peak, cut, False, BLOCK)
                more, _above, _below = _measure(x_row, V, temperature, peak, cut + 1, False, BLOCK)
                each = (whole - beyond) / tl.maximum(equal - more, 1.0)
                whole = beyond + each * tl.minimum(ties, equal - more)
                target = top_p * whole
                before = cut
                cut = _search(x_row, V, temperature, peak, cut, high, target, True, BLOCK)
                beyond, _above, _below = _measure(x_row, V, temperature, peak, cut + 1, True, BLOCK)
                reached, _above, _below = _measure(x_row, V, temperature, peak, cut, True, BLOCK)
                equal, _above, _below = _measure(x_row, V, temperature, peak, cut, False, BLOCK)
                more, _above, _below = _measure(x_row, V, temperature, peak, cut + 1, False, BLOCK)
                each = (reached - beyond) / tl.maximum(equal - more, 1.0)
                wanted = tl.maximum(1.0, tl.ceil((target - beyond) / each))
                ties = tl.where(cut == before, tl.minimum(ties, wanted), wanted)
            # The id of the last tie that is kept.
            seen = 0.0
            last = -1
            for start in range(0, V, BLOCK):
                at = start + tl.arange(0, BLOCK)
                x = tl.load(x_row + at, mask=at < V, other=float("-inf")) / temperature
                equals = ((_ordered(x) == cut) & (at < V)).to(tl.float32)
                place = seen + tl.cumsum(equals, 0)
                last = tl.maximum(last, tl.max(tl.where((equals > 0) & (place <= ties), at, -1), 0))
                seen += tl.sum(equals, 0)
        tl.store(cuts + row, cut)
        tl.store(lasts + row, last)


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
    """Bit 0: seen in prompt or output; the rest: how often in the output. Integers, so that no order matters."""
    row = tl.program_id(0)
    if row < tl.load(step + SAMPLED):
        first = word(step, HISTORY_STARTS, row)
        last = word(step, HISTORY_STARTS, row + 1)
        if first < last:
            prompt_end = first + 1 + word(step, HISTORY, first)
            for start in range(first + 1 + tl.program_id(1) * BLOCK, last, tl.num_programs(1) * BLOCK):
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
        seen = word(step, HISTORY_STARTS, row) < word(step, HISTORY_STARTS, row + 1)
        last = tl.where(seen, V, 0)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        place = row.to(tl.int64) * V + at
        count = tl.load(counts + place, mask=at < last, other=0)
        x = tl.load(logits + place, mask=at < last, other=0.0)
        repetition = _number(step, row, _REPETITION)
        x = tl.where((count & 1) > 0, tl.where(x > 0, x / repetition, x * repetition), x)
        written = (count >> 1).to(tl.float32)
        lowered = _number(step, row, _FREQUENCY) * written + _number(step, row, _PRESENCE)
        x = tl.where(written > 0, x - lowered, x)
        tl.store(logits + place, x, mask=at < last)


@triton.jit
def _forbid(step, logits, allowed, V, W, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row < tl.load(step + SAMPLED):
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        bits = tl.load(allowed + row * W + at // 32, mask=at < V, other=0)
        tl.store(logits + row.to(tl.int64) * V + at, float("-inf"), mask=(at < V) & (((bits >> (at % 32)) & 1) == 0))


def draw(step: Tensor, logits_RV: Tensor, tokens_R: Tensor, cut: tuple[Tensor, Tensor] | None = None) -> None:
    """Chooses each row's token; −1 where its logits are not finite or all −inf. `cut` is what `cut` gave.

    Reads float32, bfloat16 or float16 logits once. Greedy rows (temperature 0) take the greatest logit.
    """
    rows, vocabulary = logits_RV.shape
    _check(step, logits_RV)
    assert tokens_R.dtype == torch.int32
    chunks = triton.cdiv(vocabulary, CHUNK)
    scores_RC = torch.empty(rows, chunks, device=logits_RV.device)
    ids_RC = torch.empty(rows, chunks, dtype=torch.int32, device=logits_RV.device)
    cuts_R, lasts_R = cut or (ids_RC, ids_RC)
    block = min(2048, triton.next_power_of_2(vocabulary))
    _draw_chunk[rows, chunks](
        step, logits_RV, cuts_R, lasts_R, scores_RC, ids_RC, vocabulary, chunks, FILTERED=cut is not None,
        CHUNK=CHUNK, BLOCK=block, num_warps=8,
    )  # fmt: skip
    _draw_row[(rows,)](step, scores_RC, ids_RC, tokens_R, chunks, BLOCK=triton.next_power_of_2(chunks), num_warps=1)


def cut(step: Tensor, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Per row the least logit ÷ temperature that min_p, top_k and top_p leave (as an ordered int32), and the last id
    that is left of those that equal it. Logits are float32. Costs some ten passes over each row that has a filter."""
    rows, vocabulary = logits_RV.shape
    _check(step, logits_RV)
    assert logits_RV.dtype == torch.float32
    cuts_R, lasts_R = torch.empty(2, rows, dtype=torch.int32, device=logits_RV.device)
    block = min(_SEARCH_BLOCK, triton.next_power_of_2(vocabulary))
    warps = _SEARCH_WARPS if block == _SEARCH_BLOCK else 4
    _cut[(rows,)](step, logits_RV, cuts_R, lasts_R, vocabulary, BLOCK=block, num_warps=warps)
    return cuts_R, lasts_R


def add_biases(step: Tensor, logits_RV: Tensor) -> None:
    """The step's logit biases, on float32 logits in place."""
    rows, vocabulary = logits_RV.shape
    _check(step, logits_RV)
    assert logits_RV.dtype == torch.float32
    _add_biases[(rows,)](step, logits_RV, vocabulary, BLOCK=128)


def penalise(step: Tensor, logits_RV: Tensor, sampled_R: Tensor) -> None:
    """Repetition, frequency and presence penalties, on float32 logits in place; sampled_R as embed has it."""
    rows, vocabulary = logits_RV.shape
    _check(step, logits_RV)
    assert logits_RV.dtype == torch.float32
    assert sampled_R.dtype == torch.int32
    counts_RV = torch.zeros(rows, vocabulary, dtype=torch.int32, device=logits_RV.device)
    _count[rows, 8](step, sampled_R, counts_RV, vocabulary, BLOCK=256)
    block = min(2048, triton.next_power_of_2(vocabulary))
    _penalise[rows, triton.cdiv(vocabulary, block)](step, logits_RV, counts_RV, vocabulary, BLOCK=block)


def forbid(step: Tensor, logits_RV: Tensor, allowed_RW: Tensor) -> None:
    """−inf where bit (id % 32) of int32 word (id ÷ 32) is 0, on float32 logits in place."""
    rows, vocabulary = logits_RV.shape
    _check(step, logits_RV)
    assert logits_RV.dtype == torch.float32
    assert allowed_RW.dtype == torch.int32
    assert allowed_RW.is_contiguous()
    assert allowed_RW.shape[1] * 32 >= vocabulary
    block = min(2048, triton.next_power_of_2(vocabulary))
    grid = (rows, triton.cdiv(vocabulary, block))
    _forbid[grid](step, logits_RV, allowed_RW, vocabulary, allowed_RW.shape[1], BLOCK=block)


def _check(step: Tensor, logits_RV: Tensor) -> None:
    assert step.dtype == torch.int32
    assert logits_RV.is_contiguous()
