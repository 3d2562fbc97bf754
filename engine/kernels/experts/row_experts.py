"""One row's experts: chosen by each program that begins with them, so that nothing is listed before, and multiplied as
kernels/linear.py multiplies one row, each weight once.

A choice's rank among all experts says at once which it is, where the list of kernels/experts/route.py finds one after
the other.

K inputs, N outputs of an expert, E experts, C choices of the row, P parts of the logits.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.experts.grouped_linear import ExpertWeights
from engine.kernels.experts.grouped_sums import gated
from engine.kernels.experts.route import _KIND, _SUM_LEAST, _WORST
from engine.kernels.experts.routing_rule import RoutingRule
from engine.kernels.pdl import release, supports_pdl, wait

ROW_EXPERTS_MAX: Final = 256  # each is compared with every other


@dataclass(frozen=True, slots=True)
class RowTiling:
    """How a kernel goes through an expert's matrix: block_n outputs × block_k inputs at once."""

    block_n: int
    block_k: int
    stages: int
    warps: int


GATED_ROW: Final = RowTiling(8, 512, 3, 4)
ROW: Final = RowTiling(16, 256, 3, 4)


@dataclass(frozen=True, slots=True)
class RowChoice:
    """The row's experts, int32, and their weights, float32, the best first."""

    ids_C: Tensor
    weights_C: Tensor


@triton.jit
def _choose(
    logits, choice_bias, choice, part_stride, P: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr,
    KIND: tl.constexpr, NORMED: tl.constexpr, SCALE: tl.constexpr, CHOICE_BIASED: tl.constexpr,
):  # fmt: skip
    """The expert of one choice, and its weight: as route.py has them."""
    experts = tl.arange(0, EP)
    real = experts < E
    x = tl.load(logits + experts, mask=real, other=0.0).to(tl.float32)
    for part in tl.static_range(1, P):
        x += tl.load(logits + part * part_stride + experts, mask=real, other=0.0).to(tl.float32)
    scores = x
    if KIND == 0:
        scores = tl.exp(tl.where(real, x, float("-inf")) - tl.max(tl.where(real, x, float("-inf")), 0))
        scores = scores / tl.sum(scores, 0)
    if KIND == 2:
        scores = 1.0 / (1.0 + tl.exp(-x))
    value = x
    if CHOICE_BIASED:
        value = scores + tl.load(choice_bias + experts, mask=real, other=0.0)
    value = tl.maximum(tl.where(value == value, value, _WORST), _WORST)
    value = tl.where(real, value, float("-inf"))
    before = (value[None, :] == value[:, None]) & (experts[None, :] < experts[:, None])
    rank = tl.sum(((value[None, :] > value[:, None]) | before).to(tl.int32), 1)
    own = tl.sum(tl.where(rank == choice, experts, 0), 0)
    weight = tl.sum(tl.where(rank == choice, scores, 0.0), 0)
    chosen = rank < C
    if KIND == 1:
        greatest = tl.max(tl.where(chosen, x, float("-inf")), 0)
        weight = tl.exp(weight - greatest) / tl.sum(tl.where(chosen, tl.exp(x - greatest), 0.0), 0)
        if NORMED:
            weight = weight / (1.0 + _SUM_LEAST)
    elif NORMED:
        weight = weight / (tl.sum(tl.where(chosen, scores, 0.0), 0) + _SUM_LEAST)
    return own, weight * SCALE


@triton.jit
def _weights(w, lines, inputs, K, MASKED: tl.constexpr):
    at = w + lines[:, None] * K + inputs[None, :]
    if MASKED:
        return tl.load(at, mask=(inputs < K)[None, :], other=0.0, eviction_policy="evict_first").to(tl.float32)
    return tl.load(at, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def _row(x, inputs, K, MASKED: tl.constexpr):
    values = tl.load(x + inputs, mask=inputs < K, other=0.0) if MASKED else tl.load(x + inputs)
    return values.to(tl.float32)[None, :]


@triton.jit
def _own(expert, first, held, steps):
    """The expert's number among those held, and how many steps it takes: none where others have it."""
    own = expert - first
    there = (own >= 0) & (own < held)
    return tl.where(there, own, 0), tl.where(there, steps, 0)


@triton.jit(do_not_specialize=["first", "held"])
def _gate_row(
    x, logits, choice_bias, w, bias, out, ids, weights, part_stride, N, K, first, held, limit, P: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr, NORMED: tl.constexpr, SCALE: tl.constexpr,
    CHOICE_BIASED: tl.constexpr, LIMITED: tl.constexpr, BIASED: tl.constexpr, WEIGH: tl.constexpr,
    MASKED: tl.constexpr, SOME: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    choice = tl.program_id(0)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    wait()
    expert, weight = _choose(
        logits, choice_bias, choice, part_stride, P, E, EP, C, KIND, NORMED, SCALE, CHOICE_BIASED
    )  # fmt: skip
    if tl.program_id(1) == 0:
        tl.store(ids + choice, expert)
        tl.store(weights + choice, weight)
    own, steps = expert, tl.cdiv(K, BLOCK_K)
    if SOME:
        own, steps = _own(expert, first, held, steps)
    lines = own.to(tl.int64) * (2 * N) + tl.minimum(outputs, N - 1)  # others are not stored
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    total_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        inputs = step * BLOCK_K + tl.arange(0, BLOCK_K)
        values = _row(x, inputs, K, MASKED)
        total += _weights(w, lines, inputs, K, MASKED) * values
        total_up += _weights(w, lines + N, inputs, K, MASKED) * values
    release()
    gate, up = tl.sum(total, 1), tl.sum(total_up, 1)
    if WEIGH:
        gate *= weight
        up *= weight
    if BIASED:
        gate += tl.load(bias + lines).to(tl.float32)
        up += tl.load(bias + lines + N).to(tl.float32)
    y = gated(gate, up, limit, LIMITED)
    tl.store(out + choice * N + outputs, y.to(out.dtype.element_ty), mask=outputs < N)


@triton.jit(do_not_specialize=["first", "held", "added_parts"])
def _multiply_row(
    x, w, bias, added, out, ids, weights, N, K, first, held, added_parts, BIASED: tl.constexpr, WEIGH: tl.constexpr,
    MASKED: tl.constexpr, SOME: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    choice = tl.program_id(0)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    wait()
    own, steps = tl.load(ids + choice), tl.cdiv(K, BLOCK_K)
    if SOME:
        own, steps = _own(own, first, held, steps)
    lines = own.to(tl.int64) * N + tl.minimum(outputs, N - 1)  # others are not stored
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        inputs = step * BLOCK_K + tl.arange(0, BLOCK_K)
        total += _weights(w, lines, inputs, K, MASKED) * _row(x + choice * K, inputs, K, MASKED)
    release()
    y = tl.sum(total, 1)
    if BIASED:
        y += tl.load(bias + lines).to(tl.float32)
    if WEIGH:
        y *= tl.load(weights + choice)
    if SOME:
        y = tl.where(steps > 0, y, 0.0)
    if choice == 0:
        for part in range(added_parts):
            y += tl.load(added + part * N + outputs, mask=outputs < N, other=0.0).to(tl.float32)
    tl.store(out + choice * N + outputs, y.to(out.dtype.element_ty), mask=outputs < N)


def gate_row(
    x_1K: Tensor, logits_P1E: Tensor, rule: RoutingRule, choice_bias_E: Tensor | None, weights: ExpertWeights,
    limit: float, out_CN: Tensor, tiling: RowTiling = GATED_ROW,
) -> RowChoice:  # fmt: skip
    """Chooses the row's experts as reference.route does, which has no groups of them, and gives what becomes of gate
    and up in each, in the order of choices. Weights multiply the row where the rule has it so. Where there are some of
    the experts alone, what others give is not to be read."""
    parts, _, experts = logits_P1E.shape
    (chosen, outputs), inputs = out_CN.shape, x_1K.shape[1]
    assert experts == rule.experts <= ROW_EXPERTS_MAX
    assert rule.groups == 1
    assert chosen == rule.chosen
    assert logits_P1E.shape[1] == len(x_1K) == 1
    assert logits_P1E.stride(2) == 1
    held = len(weights.weight) // (2 * outputs)
    assert weights.weight.shape == (held * 2 * outputs, inputs)
    assert weights.first + held <= experts
    assert weights.scales is None
    for each in (x_1K, weights.weight, out_CN):
        assert each.is_contiguous()
    choice = RowChoice(
        torch.empty(chosen, dtype=torch.int32, device=x_1K.device),
        torch.empty(chosen, dtype=torch.float32, device=x_1K.device),
    )
    _gate_row[chosen, triton.cdiv(outputs, tiling.block_n)](
        x_1K, logits_P1E, x_1K if choice_bias_E is None else choice_bias_E, weights.weight,
        x_1K if weights.bias is None else weights.bias, out_CN, choice.ids_C, choice.weights_C, logits_P1E.stride(0),
        outputs, inputs, weights.first, held, limit, P=parts, E=experts, EP=max(2, triton.next_power_of_2(experts)),
        C=chosen, KIND=_KIND[rule.scores], NORMED=rule.normed, SCALE=rule.scale,
        CHOICE_BIASED=choice_bias_E is not None, LIMITED=limit > 0, BIASED=weights.bias is not None,
        WEIGH=rule.scales_inputs, MASKED=bool(inputs % tiling.block_k), SOME=held < experts, BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k, STAGES=tiling.stages, num_warps=tiling.warps, launch_pdl=supports_pdl(x_1K.device),
    )  # fmt: skip
    return choice


def multiply_row(
    x_CK: Tensor, choice: RowChoice, weights: ExpertWeights, added_P1N: Tensor | None, weigh_outputs: bool,
    out_C1N: Tensor, tiling: RowTiling = ROW, some: bool = False,
) -> Tensor:  # fmt: skip
    """Into parts [C, 1, N]: each choice's row, times its weight where `weigh_outputs`. What is `added` is part of the
    first choice's. `some`: there may be choices of other experts, which give zeros."""
    (chosen, inputs), outputs = x_CK.shape, out_C1N.shape[2]
    assert out_C1N.shape == (chosen, 1, outputs)
    assert weights.weight.shape[1] == inputs
    assert len(weights.weight) % outputs == 0
    assert weights.scales is None
    for each in (x_CK, weights.weight, out_C1N, added_P1N):
        assert each is None or each.is_contiguous()
    _multiply_row[chosen, triton.cdiv(outputs, tiling.block_n)](
        x_CK, weights.weight, x_CK if weights.bias is None else weights.bias,
        x_CK if added_P1N is None else added_P1N, out_C1N, choice.ids_C, choice.weights_C, outputs, inputs,
        weights.first, len(weights.weight) // outputs, 0 if added_P1N is None else len(added_P1N),
        BIASED=weights.bias is not None, WEIGH=weigh_outputs,
        MASKED=bool(inputs % tiling.block_k), SOME=some, BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k,
        STAGES=tiling.stages, num_warps=tiling.warps, launch_pdl=supports_pdl(x_CK.device),
    )  # fmt: skip
    return out_C1N
