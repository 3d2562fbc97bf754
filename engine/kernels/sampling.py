"""Logits → tokens on the device, with the meaning, the order and the noise of engine/step/sampling.py.

`draw` alone is enough where every row is greedy or has a temperature and nothing else: it reads the logits once. What
only some rows need comes before it: `add_biases`, `penalise` and `forbid`, on a float32 copy, and `cut`, which finds
the least logit that top_k, top_p and min_p leave without sorting. A row's token depends on that row alone.

R rows, V vocabulary, M masked rows, W words of a bit mask, C chunks of the vocabulary, H history, L listed values,
E edges.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.step_layout import (
    BIAS_IDS,
    BIAS_STARTS,
    BIAS_VALUES,
    HISTORY,
    HISTORY_STARTS,
    SAMPLED,
    SAMPLING,
    word,
)
from engine.step.layout import SAMPLING_WORDS

CHUNK = 8192  # of the vocabulary, for one program
_BLOCK = 2048  # of the vocabulary, that a program of `cut` looks at together
_LISTED = 4096  # values that `cut` puts in order, once it knows that what it looks for is among them
_WARPS = 8
_REGISTERS = 128  # so that two programs of `cut` share a multiprocessor
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
_MASK = tl.constexpr(11)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # splitmix64's
_FACTOR_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_FACTOR_2 = tl.constexpr(0x94D049BB133111EB)
_REST_MOST = tl.constexpr(1.0 - 2.0**-24)  # this and the next as engine/step/sampling.py has them
_TEMPERATURE_LEAST = tl.constexpr(1e-10)
_LN_2 = tl.constexpr(0.6931471805599453)
_EDGES = tl.constexpr(4)
_LINEAR_ROUNDS = tl.constexpr(4)
_ROUNDS = tl.constexpr(20)  # 4 linear ones, then 16 that part 2³² float32 in 4: no more are needed


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
def _log2(x):
    """Of normal numbers, to 2⁻²². Triton's own is exact, and takes ten times as long."""
    if tl.target_info.is_cuda():
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.log2(x)


@triton.jit
def _scale(step, row):
    """1 ÷ temperature; 0 where the row is greedy."""
    temperature = _number(step, row, _TEMPERATURE)
    return tl.where(temperature > 0, 1 / tl.maximum(temperature, _TEMPERATURE_LEAST), 0.0)


@triton.jit
def _noise(key, ids):
    """Standard Gumbel noise: −log(−log(1 − rest)), rest a hash of (key, id) in 0 … 1. Exact to some 1e-6."""
    hashed = _shuffle((ids + 1).to(tl.uint64) * _GOLDEN + key)
    rest = tl.minimum(((hashed >> 32).to(tl.uint32).to(tl.float32) + 0.5) * 2.3283064365386963e-10, _REST_MOST)
    # 1 − rest loses what a small rest says, and the noise is great just there: by the series of the logarithm then.
    series = rest * (1 + rest * (1 / 2 + rest * (1 / 3 + rest * (1 / 4 + rest * (1 / 5)))))
    negative_log = tl.where(rest < 0.0625, series, -_LN_2 * _log2(1 - rest))
    return -_LN_2 * _log2(negative_log)


@triton.jit
def _ordered(values):
    """float32 → int32 in the same order; −0 is made 0 before."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _float(ordered):
    """What `_ordered` was made of."""
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _draw_chunk(
    step, logits, cuts, lasts, scores, ids, V, chunks, FILTERED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    if row < tl.load(step + SAMPLED):
        scale = _scale(step, row)
        key = _key(step, row)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
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
                        score = tl.where(kept, x * scale + _noise(key, at), float("-inf"))
                else:
                    score = x * scale + _noise(key, at)
            better = score > best  # of equal ones the lower id, which came first
            best = tl.where(better, score, best)
            best_id = tl.where(better, at, best_id)
        top = tl.max(best, 0)
        found = tl.min(tl.where(best == top, best_id, 0x7FFFFFFF), 0)
        unsound = tl.max((greatest < float("inf")).to(tl.int32) ^ 1, 0)  # NaN or +inf
        tl.store(scores + row * chunks + chunk, top)
        tl.store(ids + row * chunks + chunk, tl.where(unsound > 0, -1, found))


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
def _mass(x, peak, scale, BY_MASS: tl.constexpr):
    """What a value weighs: its likelihood against the likeliest's, or 1 where values are counted."""
    return tl.exp((x - peak) * scale) if BY_MASS else (x == x).to(tl.float32)


@triton.jit
def _extremes(x_row, V, BLOCK: tl.constexpr):
    """The greatest value of each lane's share of the row, and the least of all that is not −inf."""
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    leasts = tl.full([BLOCK], float("inf"), tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=4):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_row + at, mask=at < V, other=float("-inf")).to(tl.float32)
        peaks = tl.maximum(peaks, x)
        leasts = tl.minimum(leasts, tl.where(x > float("-inf"), x, float("inf")))
    return peaks, tl.min(leasts, 0)


@triton.jit
def _weigh(x_row, V, peak, scale, low, BLOCK: tl.constexpr):
    """The mass of the values from `low` on."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=4):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_row + at, mask=at < V, other=float("-inf")).to(tl.float32)
        total += tl.where(x >= low, _mass(x, peak, scale, True), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _measure(x_row, V, peak, scale, edges_E, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """What the values at or above each edge weigh together."""
    totals = tl.zeros([_EDGES, BLOCK], tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=4):
        at = start + tl.arange(0, BLOCK)[None, :]
        x = tl.load(x_row + at, mask=at < V, other=float("-inf")).to(tl.float32)
        totals += tl.where(x >= edges_E[:, None], _mass(x, peak, scale, BY_MASS), 0.0)
    return tl.sum(totals, 1)


@triton.jit
def _edges(low, high, base, rounds):
    """Parts low … high: evenly from `base` on, or, where that was not enough, evenly among the float32 there are."""
    part = tl.arange(0, _EDGES)
    share = part.to(tl.float32) / _EDGES
    even = tl.where(part == 0, low, base * (1 - share) + high * share)
    first = _ordered(low).to(tl.int64)
    fine = first + (_ordered(high).to(tl.int64) - first) * part // _EDGES
    return tl.where(rounds < _LINEAR_ROUNDS, even, _float(fine.to(tl.int32)))


@triton.jit
def _list(x_row, V, low, high, listed, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """Copies the values in low … high, high excluded. Gives how many they are, of which the first LISTED are copied."""
    found = 0
    for start in tl.range(0, V, BLOCK, num_stages=4):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_row + at, mask=at < V, other=float("-inf")).to(tl.float32)
        inside = ((x >= low) & (x < high)).to(tl.int32)
        here = tl.sum(inside, 0)
        if here > 0:
            place = found + tl.cumsum(inside, 0) - 1
            tl.store(listed + place, x, mask=(inside > 0) & (place < LISTED))
        found += here
    tl.debug_barrier()
    return found


@triton.jit
def _greatest(values, weights, beyond, goal, low, last):
    """The greatest float32 such that `beyond` and the values at or above it weigh the goal; `low` if none does."""
    order = _ordered(values)
    first = _ordered(low)
    while first < last:
        middle = ((first.to(tl.int64) + last + 1) // 2).to(tl.int32)
        if beyond + tl.sum(tl.where(order >= middle, weights, 0.0), 0) >= goal:
            first = middle
        else:
            last = middle - 1
    return _float(first)


@triton.jit
def _narrow(
    x_row, V, peaks, peak, scale, low, base, goal, listed,
    BY_MASS: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Values low … high, high excluded, among which is the greatest such that those at or above it weigh the goal.

    Gives (low, high, what is at or above each, how many values between them are listed); more than LISTED where they
    all are equal. Mostly the peaks of the lanes weigh the goal by themselves, and little is as great as the least of
    those that are needed for it: then all that is as great is listed at once.
    """
    high = _float(_ordered(peak) + 1)
    low_total, high_total = tl.full((), 0, tl.float32), tl.full((), 0, tl.float32)
    found, rounds = tl.full((), LISTED + 1, tl.int32), tl.full((), 0, tl.int32)
    bound = _greatest(peaks, _mass(peaks, peak, scale, BY_MASS), 0.0, goal, low, _ordered(peak))
    if bound > low:
        found = _list(x_row, V, bound, high, listed, LISTED, BLOCK)
        low, base = bound, tl.maximum(base, bound)
    while (found > LISTED) & (rounds < _ROUNDS):
        edges_E = _edges(low, high, tl.where(rounds == 0, base, low), rounds)
        totals_E = _measure(x_row, V, peak, scale, edges_E, BY_MASS, BLOCK)
        whole = tl.max(totals_E, 0)
        reached_E = totals_E >= goal
        low = tl.maximum(low, tl.max(tl.where(reached_E, edges_E, low), 0))
        high = tl.minimum(high, tl.min(tl.where(reached_E, high, edges_E), 0))
        low_total = tl.min(tl.where(reached_E, totals_E, whole), 0)
        high_total = tl.maximum(high_total, tl.max(tl.where(reached_E, 0.0, totals_E), 0))
        if low_total <= LISTED * _mass(low, peak, scale, BY_MASS):
            # So few that all of them can be listed, which spares another search its own list.
            high, high_total = _float(_ordered(peak) + 1), tl.full((), 0, tl.float32)
        rounds += 1
        if _ordered(high) - 1 <= _ordered(low):
            rounds = _ROUNDS
        elif low_total - high_total <= LISTED * _mass(low, peak, scale, BY_MASS):
            found = _list(x_row, V, low, high, listed, LISTED, BLOCK)
    return low, high, low_total, high_total, found


@triton.jit
def _pick(
    low, high, low_total, high_total, found, goal, peak, scale, listed, BY_MASS: tl.constexpr, LISTED: tl.constexpr
):
    """The greatest of what `_narrow` left such that those at or above it weigh the goal; how many that equal it are
    needed for that, and how many there are."""
    at = tl.arange(0, LISTED)
    inside = at < tl.where(found <= LISTED, found, 0)
    x = tl.load(listed + at, mask=inside, other=float("-inf"))
    weights = tl.where(inside, _mass(x, peak, scale, BY_MASS), 0.0)
    last = tl.where(found <= LISTED, _ordered(high) - 1, _ordered(low))
    cut = _greatest(x, weights, high_total, goal, low, last)
    each = _mass(cut, peak, scale, BY_MASS)
    beyond = high_total + tl.sum(tl.where(x > cut, weights, 0.0), 0)
    needed = tl.maximum(1.0, tl.ceil((goal - beyond) / each))
    equal = tl.sum((inside & (x == cut)).to(tl.float32), 0)
    return cut, needed, tl.where(found <= LISTED, equal, (low_total - high_total) / each)


@triton.jit
def _last_tie(x_row, V, cut, ties, BLOCK: tl.constexpr):
    """The id of the last of so many that equal the cut."""
    seen, last = 0, -1
    for start in tl.range(0, V, BLOCK, num_stages=4):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_row + at, mask=at < V, other=float("-inf")).to(tl.float32)
        equal = (x == cut).to(tl.int32)
        here = tl.sum(equal, 0)
        if (here > 0) & (seen < ties):
            place = seen + tl.cumsum(equal, 0)
            last = tl.maximum(last, tl.max(tl.where((equal > 0) & (place <= ties), at, -1), 0))
        seen += here
    return last


@triton.jit
def _cut(step, logits, cuts, lasts, listed, V, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row < tl.load(step + SAMPLED):
        scale = _scale(step, row)
        top_k = _column(step, row, _TOP_K)
        top_p = _number(step, row, _TOP_P)
        min_p = _number(step, row, _MIN_P)
        cut = float("-inf")
        last = V
        if (scale > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
            x_row = logits + row.to(tl.int64) * V
            listed += row * LISTED
            peaks, cut = _extremes(x_row, V, BLOCK)
            peak = tl.max(peaks, 0)
            if min_p > 0:
                cut = tl.maximum(cut, peak + tl.log(min_p) / scale)
            low, high, low_total, high_total = cut, peak, peak, peak
            found = tl.full((), LISTED + 1, tl.int32)
            ties, equal = (
                tl.full((), 0, tl.float32) + V,
                tl.full((), 0, tl.float32),
            )  # how many of those that equal the cut are kept, and how many there are
            if (top_k > 0) & (top_k < V):
                goal = top_k * 1.0
                low, high, low_total, high_total, found = _narrow(
                    x_row, V, peaks, peak, scale, cut, cut, goal, listed, False, LISTED, BLOCK
                )
                cut, ties, equal = _pick(
                    low, high, low_total, high_total, found, goal, peak, scale, listed, False, LISTED
                )
            if top_p < 1:
                floor, ties_of_floor = cut, ties
                surplus = tl.maximum(equal - ties, 0.0) * _mass(cut, peak, scale, True)
                if (found <= LISTED) & (high_total == 0):  # all that top_k left are listed
                    at = tl.arange(0, LISTED)
                    x = tl.load(listed + at, mask=at < found, other=float("-inf"))
                    whole = tl.sum(tl.where(x >= cut, _mass(x, peak, scale, True), 0.0), 0)
                    low, goal = cut, top_p * (whole - surplus)
                else:
                    goal = top_p * (_weigh(x_row, V, peak, scale, cut, BLOCK) - surplus)
                    # Below that the whole vocabulary weighs less than what top_p leaves out.
                    base = tl.maximum(cut, peak - tl.log(V / (1 - top_p)) / scale)
                    low, high, low_total, high_total, found = _narrow(
                        x_row, V, peaks, peak, scale, cut, base, goal, listed, True, LISTED, BLOCK
                    )
                cut, ties, equal = _pick(
                    low, high, low_total, high_total, found, goal, peak, scale, listed, True, LISTED
                )
                ties = tl.where(cut == floor, tl.minimum(ties, ties_of_floor), ties)
            if ties < equal:
                last = _last_tie(x_row, V, cut, ties, BLOCK)
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
def _forbid(step, logits, masks, V, W, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row < tl.load(step + SAMPLED):
        mask = _column(step, row, _MASK)
        if mask >= 0:
            at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            bits = tl.load(masks + mask * W + at // 32, mask=at < V, other=0)
            forbidden = ((bits >> (at % 32)) & 1) == 0
            tl.store(logits + row.to(tl.int64) * V + at, float("-inf"), mask=(at < V) & forbidden)


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
    """Per row the least logit that min_p, top_k and top_p leave, and the last id that is left of those that equal it.

    Reads float32, bfloat16 or float16 logits two to four times where a row has a filter and little is left, else more.
    """
    rows, vocabulary = logits_RV.shape
    _check(step, logits_RV)
    cuts_R = torch.empty(rows, device=logits_RV.device)
    lasts_R = torch.empty(rows, dtype=torch.int32, device=logits_RV.device)
    block, listed = (min(size, triton.next_power_of_2(vocabulary)) for size in (_BLOCK, _LISTED))
    listed_RL = torch.empty(rows, listed, device=logits_RV.device)
    warps = _WARPS if block == _BLOCK else 4
    _cut[(rows,)](
        step, logits_RV, cuts_R, lasts_R, listed_RL, vocabulary, LISTED=listed, BLOCK=block, num_warps=warps,
        maxnreg=_REGISTERS,
    )  # fmt: skip
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


def forbid(step: Tensor, logits_RV: Tensor, masks_MW: Tensor) -> None:
    """−inf where bit (id % 32) of int32 word (id ÷ 32) of the row's mask is 0, on float32 logits in place."""
    rows, vocabulary = logits_RV.shape
    _check(step, logits_RV)
    assert logits_RV.dtype == torch.float32
    assert masks_MW.dtype == torch.int32
    assert masks_MW.is_contiguous()
    assert masks_MW.shape[1] * 32 >= vocabulary
    block = min(2048, triton.next_power_of_2(vocabulary))
    grid = (rows, triton.cdiv(vocabulary, block))
    _forbid[grid](step, logits_RV, masks_MW, vocabulary, masks_MW.shape[1], BLOCK=block)


def _check(step: Tensor, logits_RV: Tensor) -> None:
    assert step.dtype == torch.int32
    assert logits_RV.is_contiguous()
