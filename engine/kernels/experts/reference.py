"""The choice of experts and what they compute between their matmuls, in plain torch: the CPU's path, and the kernels'
oracle. A row's result depends on that row alone, to the last bit, as in kernels/reference.py.

T rows, E experts, K of them chosen for each row, I inner size.
"""

import torch
from torch import Tensor

from engine.kernels.experts.routing_rule import RouterScores, RoutingRule
from engine.kernels.reference import UNDIVIDED_ELEMENTS, silu_and_multiply, whole_vectors

CLAMPED_ALPHA = 1.702
_SUM_LEAST = 1e-20  # so that scores of 0 can be divided by their sum


def route(logits_TE: Tensor, rule: RoutingRule, choice_bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Each row's experts, int64 [T, K], the best first, and their weights, float32 [T, K].

    Among equal experts the first is the better one. `choice_bias_E` counts for the choice alone. A logit that is NaN is
    the worst; a row of nothing else takes the first experts, with weights of NaN.
    """
    logits_TE = logits_TE.float()
    if rule.scores is RouterScores.SIGMOID:
        scores_TE = whole_vectors(torch.sigmoid_, logits_TE)
    elif rule.scores is RouterScores.SOFTMAX:
        scores_TE = logits_TE.softmax(-1)
    else:
        scores_TE = logits_TE
    # Scores order experts as logits do, but for what rounding makes equal.
    choice_TE = logits_TE if rule.groups == 1 and choice_bias_E is None else scores_TE
    choice_TE = choice_TE if choice_bias_E is None else choice_TE + choice_bias_E
    choice_TE = choice_TE.masked_fill(choice_TE.isnan(), float("-inf"))
    if rule.groups > 1:
        choice_TE = _within_best_groups(choice_TE, rule)
    ids_TK = choice_TE.sort(dim=-1, descending=True, stable=True).indices[:, : rule.chosen]
    weights_TK = scores_TE.gather(1, ids_TK)
    if rule.scores is RouterScores.SOFTMAX_OF_CHOSEN:
        weights_TK = weights_TK.softmax(-1)
    if rule.normed:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + _SUM_LEAST)
    return ids_TK, weights_TK * rule.scale


def _within_best_groups(choice_TE: Tensor, rule: RoutingRule) -> Tensor:
    choice_TGE = choice_TE.view(len(choice_TE), rule.groups, -1)
    best = choice_TGE.sort(-1, descending=True).values[..., :2].sum(-1)
    groups_TG = best.sort(dim=-1, descending=True, stable=True).indices[:, : rule.chosen_groups]
    left_out_TG = torch.ones_like(best, dtype=torch.bool).scatter_(1, groups_TG, False)
    return choice_TGE.masked_fill(left_out_TG[..., None], float("-inf")).view(choice_TE.shape)


def gate(x_T2I: Tensor, limit: float) -> Tensor:
    """What becomes of gate and up: silu(gate) · up; with a limit gpt-oss's (up + 1) · gate · sigmoid(1.702 · gate),
    both clamped. The memory of x may be written."""
    if not limit:
        return silu_and_multiply(x_T2I)
    gate_TI, up_TI = x_T2I.float().chunk(2, -1)
    gate_TI.clamp_(max=limit)
    slope_TI = torch.empty_like(x_T2I, dtype=torch.float32).chunk(2, -1)[0]  # strided as gate: rows are apart
    torch.mul(gate_TI, CLAMPED_ALPHA, out=slope_TI)
    rows = max(1, UNDIVIDED_ELEMENTS // gate_TI.shape[1])
    for first in range(0, len(slope_TI), rows):
        slope_TI[first : first + rows].sigmoid_()
    return (gate_TI * slope_TI * (up_TI.clamp_(-limit, limit) + 1)).to(x_T2I.dtype)
