"""Which experts each row takes, and the list by which their matmuls go: all on the device, in the same kernels whatever
the rows choose, so that a CUDA graph can hold them.

The list has an entry for each row and choice, row · K + choice, put together by expert in the order of rows. It is cut
into tiles of entries of one expert. Up to 32 rows are chosen for and listed by one program; of more, a second kernel
lists what the first one counted, block by block. Where a rank has some experts alone, it lists their entries alone,
and says which are absent: experts are numbered from its first one on.

T rows, E experts, H of them listed, K of them chosen for each row, P parts of the logits, S = T · K entries.
"""

from dataclasses import dataclass
from typing import Final, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.experts.routing_rule import RouterScores, RoutingRule
from engine.kernels.pdl import release, supports_pdl, wait

BLOCK_ROWS: Final = 32  # that one program chooses for
_TILES_AT_ONCE = tl.constexpr(32)
_BLOCKS_AT_ONCE = tl.constexpr(32)
_SUM_LEAST = tl.constexpr(1e-20)
_WORST = tl.constexpr(-1.0e38)  # what NaN counts as; experts out of reach count less, those taken −inf
_UNREACHED = tl.constexpr(-1.5e38)
_KIND: Final = {RouterScores.SOFTMAX: 0, RouterScores.SOFTMAX_OF_CHOSEN: 1, RouterScores.SIGMOID: 2}


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """What the matmuls of one mixture go by. Everything is int32 but the weights.

    order_S    the entries, by expert.
    ends_H     where each expert's end.
    tiles_L2   of each tile its expert, −1 from the last one on, and its first entry's place in the order.
    rows       of a tile at most.
    absent_TK  1 for each choice whose expert is not listed; None: all are.
    """

    weights_TK: Tensor  # float32
    order_S: Tensor
    ends_H: Tensor
    tiles_L2: Tensor
    rows: int
    absent_TK: Tensor | None = None

    @classmethod
    def make(cls, rows: int, rule: RoutingRule, tile_rows: int, device: torch.device, listed: int) -> Self:
        """Memory for a plan of so many rows and listed experts, which nobody has written yet."""
        entries = rows * min(rule.chosen, listed)
        absent_TK = None
        if listed < rule.experts:
            absent_TK = torch.empty(rows, rule.chosen, dtype=torch.int32, device=device)
        return cls(
            torch.empty(rows, rule.chosen, dtype=torch.float32, device=device),
            torch.empty(entries, dtype=torch.int32, device=device),
            torch.empty(listed, dtype=torch.int32, device=device),
            torch.empty(tiles_most(entries, listed, tile_rows), 2, dtype=torch.int32, device=device),
            tile_rows,
            absent_TK,
        )


def tiles_most(entries: int, experts: int, tile_rows: int) -> int:
    """Tiles that any choice of so many entries has at most: a whole one for each tile_rows, and a rest for each
    expert."""
    touched = min(entries, experts)
    return touched + (entries - touched) // tile_rows


def warps_for(rows: int, experts: int) -> int:
    """How many warps choose for so many rows: none that would share a row, so that no choice waits for two."""
    return max(1, min(4, rows * experts // 128))


@triton.jit
def _within_best_groups(choice, E: tl.constexpr, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr):
    """Puts experts out of reach that are in none of the best groups."""
    rows: tl.constexpr = choice.shape[0]
    members: tl.constexpr = E // GROUPS
    grouped = tl.reshape(choice, [rows, GROUPS, members])
    best = tl.max(grouped, 2)
    first = tl.argmax(grouped, 2)
    others = tl.where(tl.arange(0, members)[None, None, :] == first[:, :, None], float("-inf"), grouped)
    best += tl.max(others, 2)
    best = tl.maximum(best, 2 * _WORST)
    groups = tl.arange(0, GROUPS)[None, :]
    reached = tl.zeros([rows, GROUPS], tl.int1)
    for _ in tl.static_range(CHOSEN_GROUPS):
        taken = groups == tl.argmax(tl.where(reached, float("-inf"), best), 1)[:, None]
        reached = reached | taken
    return tl.reshape(tl.where(reached[:, :, None], grouped, _UNREACHED), [rows, E])


@triton.jit
def _is_listed(experts, first_expert, H: tl.constexpr):
    return (experts >= first_expert) & (experts < first_expert + H)


@triton.jit
def _write_tiles(
    counts, starts, ends, tiles, tiles_count, first_expert, E: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr
):
    """The listed experts' ends, and all tiles."""
    experts = tl.arange(0, counts.shape[0])
    tl.store(ends + experts - first_expert, starts + counts, mask=_is_listed(experts, first_expert, H))
    own = (counts + TILE - 1) // TILE
    last = tl.cumsum(own, 0)
    for first in range(0, tiles_count, _TILES_AT_ONCE):
        tile = first + tl.arange(0, _TILES_AT_ONCE)
        expert = tl.sum((last[None, :] <= tile[:, None]).to(tl.int32), 1)  # those that end before it
        mine = experts[None, :] == expert[:, None]
        start = tl.sum(tl.where(mine, starts[None, :] + (tile[:, None] - (last - own)[None, :]) * TILE, 0), 1)
        there = tile < tiles_count
        tl.store(tiles + 2 * tile, tl.where(expert < E, expert - first_expert, -1), mask=there)
        tl.store(tiles + 2 * tile + 1, start, mask=there)


@triton.jit(do_not_specialize=["T", "tiles_count", "first_expert"])
def _route(
    logits, bias, count, ids, weights, counts, ends, order, tiles, absent, T, tiles_count, first_expert, part_stride,
    P: tl.constexpr, E: tl.constexpr, H: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    KIND: tl.constexpr, NORMED: tl.constexpr, SCALE: tl.constexpr, BIASED: tl.constexpr, GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr, TILE: tl.constexpr, ALONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    release()
    block = tl.program_id(0)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    experts = tl.arange(0, EP)
    real = (experts < E)[None, :]
    wait()
    # Rows behind the step's own choose as its first one does: they bring no expert that would not be read.
    read = tl.where(rows < tl.minimum(T, tl.load(count)), rows, 0)
    at = logits + read[:, None] * E + experts[None, :]
    x = tl.load(at, mask=real, other=0.0).to(tl.float32)
    for part in tl.static_range(1, P):
        x += tl.load(at + part * part_stride, mask=real, other=0.0).to(tl.float32)
    scores = x
    if KIND == 0:
        inside = tl.where(real, x, float("-inf"))
        scores = tl.exp(inside - tl.max(inside, 1)[:, None])
        scores = scores / tl.sum(scores, 1)[:, None]
    if KIND == 2:
        scores = 1.0 / (1.0 + tl.exp(-x))
    choice = x
    if BIASED or GROUPS > 1:
        choice = scores
    if BIASED:
        choice += tl.load(bias + experts, mask=experts < E, other=0.0)[None, :]
    choice = tl.maximum(tl.where(choice == choice, choice, _WORST), _WORST)
    if GROUPS > 1:
        choice = _within_best_groups(choice, E, GROUPS, CHOSEN_GROUPS)
    choice = tl.where(real, choice, float("-inf"))
    columns = tl.arange(0, KP)[None, :]
    chosen = tl.zeros([BLOCK, EP], tl.int1)
    ids_own = tl.zeros([BLOCK, KP], tl.int32)
    weights_own = tl.zeros([BLOCK, KP], tl.float32)
    for column in tl.static_range(K):
        best = tl.argmax(tl.where(chosen, float("-inf"), choice), 1)
        taken = experts[None, :] == best[:, None]
        chosen = chosen | taken
        ids_own = tl.where(columns == column, best[:, None], ids_own)
        weights_own = tl.where(columns == column, tl.sum(tl.where(taken, scores, 0.0), 1)[:, None], weights_own)
    if KIND == 1:
        greatest = tl.max(tl.where(columns < K, weights_own, float("-inf")), 1)
        weights_own = tl.where(columns < K, tl.exp(weights_own - greatest[:, None]), 0.0)
        weights_own = weights_own / tl.sum(weights_own, 1)[:, None]
    if NORMED:
        weights_own = weights_own / (tl.sum(weights_own, 1)[:, None] + _SUM_LEAST)
    inside = (rows < T)[:, None] & (columns < K)
    tl.store(weights + rows[:, None] * K + columns, weights_own * SCALE, mask=inside)
    chosen = chosen & (rows < T)[:, None]
    if H < E:
        listed = _is_listed(ids_own, first_expert, H)
        tl.store(absent + rows[:, None] * K + columns, (~listed).to(tl.int32), mask=inside)
        chosen = chosen & _is_listed(experts, first_expert, H)[None, :]
    own = tl.sum(chosen.to(tl.int32), 0)
    if ALONE:
        starts = tl.cumsum(own, 0) - own
        _place(chosen, ids_own, starts, order, rows, T, first_expert, H, K, KP)
        _write_tiles(own, starts, ends, tiles, tiles_count, first_expert, E, H, TILE)
    else:
        tl.store(ids + rows[:, None] * K + columns, ids_own, mask=inside)
        tl.store(counts + block * EP + experts, own)


@triton.jit
def _place(
    chosen, ids, base, order, rows, T, first_expert, H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr
):  # fmt: skip
    """Puts a block's entries of listed experts where they belong. Before each expert's come `base` entries: all of
    experts before it, and its own of blocks before this one."""
    experts = tl.arange(0, chosen.shape[1])
    places = base[None, :] + tl.cumsum(chosen.to(tl.int32), 0) - 1
    columns = tl.arange(0, KP)[None, :]
    for column in tl.static_range(K):
        own = tl.sum(tl.where(columns == column, ids, 0), 1)
        place = tl.sum(tl.where(experts[None, :] == own[:, None], places, 0), 1)
        tl.store(order + place, rows * K + column, mask=(rows < T) & _is_listed(own, first_expert, H))


@triton.jit(do_not_specialize=["T", "tiles_count", "first_expert", "blocks"])
def _list_blocks(
    ids, counts, ends, order, tiles, T, tiles_count, first_expert, blocks, E: tl.constexpr, H: tl.constexpr,
    EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    release()
    block = tl.program_id(0)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    experts = tl.arange(0, EP)
    wait()
    total = tl.zeros([EP], tl.int32)
    before = tl.zeros([EP], tl.int32)
    for first in range(0, blocks, _BLOCKS_AT_ONCE):
        others = first + tl.arange(0, _BLOCKS_AT_ONCE)[:, None]
        own = tl.load(counts + others * EP + experts[None, :], mask=others < blocks, other=0)
        before += tl.sum(tl.where(others < block, own, 0), 0)
        total += tl.sum(own, 0)
    starts = tl.cumsum(total, 0) - total
    columns = tl.arange(0, KP)[None, :]
    inside = (rows < T)[:, None] & (columns < K)
    ids_own = tl.load(ids + rows[:, None] * K + columns, mask=inside, other=-1)
    chosen = tl.zeros([BLOCK, EP], tl.int1)
    for column in tl.static_range(K):
        own = tl.sum(tl.where(columns == column, ids_own, 0), 1)
        chosen = chosen | (experts[None, :] == own[:, None])
    chosen = chosen & (rows < T)[:, None]
    _place(chosen, ids_own, starts + before, order, rows, T, first_expert, H, K, KP)
    if block == 0:
        _write_tiles(total, starts, ends, tiles, tiles_count, first_expert, E, H, TILE)


def route(
    logits_PTE: Tensor, count: Tensor, rule: RoutingRule, choice_bias_E: Tensor | None, tile_rows: int,
    own: range | None = None,
) -> ExpertPlan:  # fmt: skip
    """Chooses each row's experts as reference.route does, and lists them in tiles of `tile_rows`, those that are `own`
    alone, which are numbered from 0; None: all. `count`, int32 on the device, is how many of the rows there are; those
    behind them choose as the first."""
    parts, rows, experts = logits_PTE.shape
    assert experts == rule.experts
    assert logits_PTE.stride()[1:] == (experts, 1)
    assert count.dtype == torch.int32
    assert rule.groups == 1 or experts & (experts - 1) == 0, "groups are of powers of two"
    device = logits_PTE.device
    own = own or range(experts)
    plan = ExpertPlan.make(rows, rule, tile_rows, device, len(own))
    blocks, width = triton.cdiv(rows, BLOCK_ROWS), max(2, triton.next_power_of_2(experts))
    columns = triton.next_power_of_2(rule.chosen)
    alone = blocks == 1
    ids_TK = torch.empty(1 if alone else rows, rule.chosen, dtype=torch.int32, device=device)
    counts_BE = torch.empty(1 if alone else blocks, width, dtype=torch.int32, device=device)
    lists, sizes = (plan.ends_H, plan.order_S, plan.tiles_L2), (rows, len(plan.tiles_L2), own.start)
    absent_TK = ids_TK if plan.absent_TK is None else plan.absent_TK
    block = BLOCK_ROWS if not alone else max(2, triton.next_power_of_2(rows))
    _route[(blocks,)](
        logits_PTE, logits_PTE if choice_bias_E is None else choice_bias_E, count, ids_TK, plan.weights_TK, counts_BE,
        *lists, absent_TK, *sizes, logits_PTE.stride(0), P=parts, E=experts, H=len(own), EP=width,
        K=rule.chosen, KP=columns, KIND=_KIND[rule.scores], NORMED=rule.normed, SCALE=rule.scale,
        BIASED=choice_bias_E is not None, GROUPS=rule.groups, CHOSEN_GROUPS=rule.chosen_groups,
        TILE=tile_rows, ALONE=alone, BLOCK=block, num_warps=warps_for(block, width), launch_pdl=supports_pdl(device),
    )  # fmt: skip
    if not alone:
        _list_blocks[(blocks,)](
            ids_TK, counts_BE, *lists, *sizes, blocks, E=experts, H=len(own), EP=width, K=rule.chosen, KP=columns,
            TILE=tile_rows, BLOCK=BLOCK_ROWS, num_warps=4, launch_pdl=supports_pdl(device),
        )  # fmt: skip
    return plan
