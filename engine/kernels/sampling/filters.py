"""What top_k, top_p and min_p leave of a row's logits, found without sorting: the smallest logit that stays.

It knows no tokens and draws none. Values are weighed against edges that halve the range, until few enough are left to
be listed and put in order.

R rows, V vocabulary, L listed values, E edges.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.step_layout import (
    MIN_P,
    SAMPLED,
    TOP_K,
    TOP_P,
    sampling_float,
    sampling_scale,
    sampling_word,
)

_BLOCK = 2048  # logits that a program looks at together
_LISTED = 4096  # values that are put in order, once the cutoff is known to be among them
_WARPS = 8
_REGISTERS = 128  # of a thread, so that two programs share a multiprocessor
_EDGES = tl.constexpr(4)
_LINEAR_ROUNDS = tl.constexpr(4)
_ROUNDS = tl.constexpr(20)  # 4 linear ones, then 16 that part 2³² float32 in 4: no more are needed


@triton.jit
def _ordered(values):
    """float32 → int32 in the same order; −0 is made 0 before."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _float(ordered):
    """The inverse of `_ordered`."""
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _mass(x, peak, scale, BY_MASS: tl.constexpr):
    """The weight of a value: its likelihood relative to the likeliest, or 1 where values are counted."""
    return tl.exp((x - peak) * scale) if BY_MASS else (x == x).to(tl.float32)


@triton.jit
def _extremes(x_row, V, BLOCK: tl.constexpr):
    """The largest value of each lane's share of the row, and the smallest of all that is not −inf."""
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
    """The mass of the values at or above each edge."""
    totals = tl.zeros([_EDGES, BLOCK], tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=4):
        at = start + tl.arange(0, BLOCK)[None, :]
        x = tl.load(x_row + at, mask=at < V, other=float("-inf")).to(tl.float32)
        totals += tl.where(x >= edges_E[:, None], _mass(x, peak, scale, BY_MASS), 0.0)
    return tl.sum(totals, 1)


@triton.jit
def _edges(low, high, base, rounds):
    """Divides low … high: evenly from `base` on, or, where that was not enough, evenly among the float32 numbers."""
    part = tl.arange(0, _EDGES)
    share = part.to(tl.float32) / _EDGES
    even = tl.where(part == 0, low, base * (1 - share) + high * share)
    first = _ordered(low).to(tl.int64)
    fine = first + (_ordered(high).to(tl.int64) - first) * part // _EDGES
    return tl.where(rounds < _LINEAR_ROUNDS, even, _float(fine.to(tl.int32)))


@triton.jit
def _list(x_row, V, low, high, listed, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """Copies the first LISTED values in low … high, high excluded. Returns how many there are."""
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
    """The largest float32 such that `beyond` and the values at or above it weigh the goal; `low` if none does."""
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
    """Narrows low … high, high excluded, around the largest value such that those at or above it weigh the goal.

    Returns (low, high, the mass at or above each, how many values between them are listed); more than LISTED where all
    are equal. Mostly the peaks of the lanes weigh the goal by themselves, and few values reach the smallest peak that
    is needed for it: then all of these are listed at once.
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
            # So few that all of them can be listed, which saves another search its own list.
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
    """The largest value in the range of `_narrow` such that those at or above it weigh the goal; how many values that
    equal it are needed for that, and how many there are."""
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
    """The id of the last of the first `ties` values that equal the cut."""
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
        scale = sampling_scale(step, row)
        top_k = sampling_word(step, row, TOP_K)
        top_p = sampling_float(step, row, TOP_P)
        min_p = sampling_float(step, row, MIN_P)
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


def find_cutoffs(step: Tensor, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest logit of each row that min_p, top_k and top_p leave, and the last id that they leave of those that
    equal it.

    Reads float32, bfloat16 or float16 logits two to four times where a row has a filter and little is left, else more.
    """
    rows, vocabulary = logits_RV.shape
    assert step.dtype == torch.int32
    assert logits_RV.is_contiguous()
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
