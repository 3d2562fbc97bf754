"""A mixture of experts on a GPU: the router's choice becomes a list on the device, by which the experts' matmuls go.
The host learns nothing of it, so that a CUDA graph holds the whole layer whatever its rows choose.

A choice of a row is a part of the row's sum: whoever reads the result adds up the parts, as it does those of a linear
layer. What all rows take is added to the first choice's part. Where ranks have whole experts, the part of a choice
whose expert another one has is zero.

T rows, K inputs, P parts, H hidden size, S rows of all experts' weights below each other.
"""

from collections.abc import Iterator
from typing import Final, Protocol

import torch
from torch import Tensor

from engine.bf12.codec import Bf12Weight
from engine.kernels.bf12_decode import expand
from engine.kernels.experts import grouped_bf12, grouped_linear, grouped_mxfp4
from engine.kernels.experts.absent_experts import fill_absent
from engine.kernels.experts.grouped_linear import ExpertRows, ExpertWeights
from engine.kernels.experts.grouped_mxfp4 import MXFP4_TILE_ROWS_MAX
from engine.kernels.experts.grouped_tuning import (
    bf12_tiling_for,
    has_large_blocks,
    mxfp4_tiling_for,
    tile_rows,
    tiling_for,
)
from engine.kernels.experts.mxfp4_weight import Mxfp4Weight
from engine.kernels.experts.quantize_rows import quantize_rows
from engine.kernels.experts.route import ExpertPlan, route
from engine.kernels.experts.routing_rule import RoutingRule
from engine.kernels.experts.row_experts import ROW_EXPERTS_MAX, gate_row, multiply_row
from engine.layers.fp8_weight import Fp8Weight

_PARTS_ROWS_MAX: Final = 128  # of more rows parts are in the model's dtype: fewer bytes beside matmuls that take longer
_CODED_ROWS_MAX: Final = 32  # of a tile; weights in 12 bits are expanded for larger ones, some experts at a time
_CHUNK_BYTES: Final = 256 << 20

Weight = Tensor | Bf12Weight | Fp8Weight | Mxfp4Weight


class GpuExperts:
    """Weights gate_up_SH and down_SH, in bf16, f16, 12, 8 or 4 bits a number, and biases where there are any: every
    expert's below those of the one before. `limit` is reference.gate's. `own`: which of the rule's experts they are,
    where ranks have whole ones; None: all, or a part of each."""

    def __init__(
        self, gate_up: tuple[Weight, Tensor | None], down: tuple[Weight, Tensor | None], rule: RoutingRule,
        limit: float, own: range | None = None,
    ) -> None:  # fmt: skip
        self._rule, self._limit = rule, limit
        self.own = own or range(rule.experts)
        (self._gate_up, self._gate_up_bias), (self._down, self._down_bias) = gate_up, down
        for weight, bias in (gate_up, down):
            assert bias is None or not isinstance(weight, Bf12Weight), "what is in 12 bits a number has no bias"
        biases = [bias.nbytes for _, bias in (gate_up, down) if bias is not None]
        self.bytes = _bytes(self._gate_up) + _bytes(self._down) + sum(biases)
        self._inner = _shape(self._down)[1]
        self.row_chooses = rule.groups == 1 and rule.experts <= ROW_EXPERTS_MAX
        self.row_chooses &= isinstance(self._gate_up, Tensor) and isinstance(self._down, Tensor)

    def __call__(self, x_TH: Tensor, plan: ExpertPlan, added_PTH: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Each row's parts [P, T, H] in `dtype`, with what is added."""
        out_PTH = self._down_of(self._gated(x_TH, plan), plan, added_PTH, dtype)
        fill_absent(plan, added_PTH, out_PTH)
        return out_PTH

    def of_row(
        self, x_1H: Tensor, logits_P1E: Tensor, choice_bias_E: Tensor | None, added_P1H: Tensor | None
    ) -> Tensor:
        """The same for one row, by its router's logits, in float32: where `row_chooses` says so."""
        gate_up, down, rule = self._gate_up, self._down, self._rule
        assert isinstance(gate_up, Tensor)
        assert isinstance(down, Tensor)
        inner_CI = x_1H.new_empty(rule.chosen, self._inner)
        stack = ExpertWeights(gate_up, None, self._gate_up_bias, self.own.start)
        choice = gate_row(x_1H, logits_P1E, rule, choice_bias_E, stack, self._limit, inner_CI)
        out_C1H = x_1H.new_empty(rule.chosen, 1, len(down) // len(self.own), dtype=torch.float32)
        stack, some = ExpertWeights(down, None, self._down_bias, self.own.start), len(self.own) < rule.experts
        return multiply_row(inner_CI, choice, stack, added_P1H, not rule.scales_inputs, out_C1H, some=some)

    def _gated(self, x_TH: Tensor, plan: ExpertPlan) -> Tensor:
        entries, experts, weigh = self._entries(plan), len(self.own), self._rule.scales_inputs
        out_SI, weight = x_TH.new_empty(len(plan.order_S), self._inner), self._gate_up
        if isinstance(weight, Bf12Weight) and plan.rows <= _CODED_ROWS_MAX:
            coded = bf12_tiling_for(self._inner, x_TH.shape[1], entries, experts, gated=True)
            return grouped_bf12.multiply_gated(x_TH, weight, plan, coded, weigh, out_SI)
        if isinstance(weight, Mxfp4Weight) and plan.rows <= MXFP4_TILE_ROWS_MAX:
            unpacked = mxfp4_tiling_for(self._inner, x_TH.shape[1], entries, experts, plan.rows, gated=True)
            return grouped_mxfp4.multiply_gated(
                x_TH, weight, self._gate_up_bias, plan, unpacked, self._limit, weigh, out_SI
            )
        tiling = tiling_for(
            self._inner, x_TH.shape[1], entries, experts, plan.rows, gated=True, blocks=_blocks(weight),
            large=has_large_blocks(x_TH.device, x_TH.dtype),
        )  # fmt: skip
        for stack in _stacks(weight, self._gate_up_bias, experts, x_TH.dtype):
            own = _rows_for(x_TH, stack)
            grouped_linear.multiply_gated(own, stack, plan, tiling, self._limit, weigh, out_SI)
        return out_SI

    def _entries(self, plan: ExpertPlan) -> int:
        """How many entries these experts have on average."""
        return max(1, plan.weights_TK.numel() * len(self.own) // self._rule.experts)

    def _down_of(self, inner_SI: Tensor, plan: ExpertPlan, added_PTH: Tensor | None, dtype: torch.dtype) -> Tensor:
        (rows, choices), rule, weight = plan.weights_TK.shape, self._rule, self._down
        entries, experts = self._entries(plan), len(self.own)
        hidden = _shape(weight)[0] // experts
        if isinstance(weight, Bf12Weight) and plan.rows <= _CODED_ROWS_MAX:
            coded = bf12_tiling_for(hidden, self._inner, entries, experts, gated=False)
            out_PTH = inner_SI.new_empty(choices * coded.parts, rows, hidden, dtype=torch.float32)
            return grouped_bf12.multiply(inner_SI, weight, plan, coded, added_PTH, not rule.scales_inputs, out_PTH)
        if isinstance(weight, Mxfp4Weight) and plan.rows <= MXFP4_TILE_ROWS_MAX:
            unpacked = mxfp4_tiling_for(hidden, self._inner, entries, experts, plan.rows, gated=False)
            dtype = torch.float32 if unpacked.parts > 1 else dtype
            out_PTH = inner_SI.new_empty(choices * unpacked.parts, rows, hidden, dtype=dtype)
            return grouped_mxfp4.multiply(
                inner_SI, weight, self._down_bias, plan, unpacked, added_PTH, not rule.scales_inputs, out_PTH
            )
        tiling = tiling_for(
            hidden, self._inner, entries, experts, plan.rows, gated=False, blocks=_blocks(weight),
            large=has_large_blocks(inner_SI.device, inner_SI.dtype),
        )  # fmt: skip
        dtype = torch.float32 if tiling.parts > 1 else dtype
        out_PTH = inner_SI.new_empty(choices * tiling.parts, rows, hidden, dtype=dtype)
        for stack in _stacks(weight, self._down_bias, experts, inner_SI.dtype):
            own = _rows_for(inner_SI, stack)
            grouped_linear.multiply(own, stack, plan, tiling, added_PTH, not rule.scales_inputs, out_PTH)
        return out_PTH


class _Router(Protocol):
    """A linear layer, whose result comes in parts [P, T, E]."""

    bytes: int

    def __call__(self, x_TK: Tensor) -> Tensor: ...


class _SharedExpert(Protocol):
    """An MLP that gives [P, T, H]; a mixture is called as it is."""

    bytes: int

    def __call__(self, x_TH: Tensor, count: Tensor | None) -> Tensor: ...


class GpuMixture:
    """The whole MLP of a layer (a llama.Mlp). `shared` is what all rows take."""

    def __init__(
        self, router: _Router, choice_bias_E: Tensor | None, rule: RoutingRule, experts: GpuExperts,
        shared: _SharedExpert | None,
    ) -> None:  # fmt: skip
        self._router, self._rule, self._experts, self._shared = router, rule, experts, shared
        self._choice_bias_E = choice_bias_E
        self.bytes = router.bytes + experts.bytes + (0 if shared is None else shared.bytes)

    def __call__(self, x_TH: Tensor, count: Tensor | None) -> Tensor:
        """[P, T, H]. `count` is how many of the rows are the step's own."""
        assert count is not None
        rows, rule = len(x_TH), self._rule
        logits_PTE = self._router(x_TH)
        added_PTH = None if self._shared is None else self._shared(x_TH, count)
        if rows == 1 and self._experts.row_chooses:
            return self._experts.of_row(x_TH, logits_PTE, self._choice_bias_E, added_PTH)
        tile = tile_rows(rows * rule.chosen, rule.experts)
        plan = route(logits_PTE, count, rule, self._choice_bias_E, tile, self._experts.own)
        dtype = torch.float32 if rows <= _PARTS_ROWS_MAX else x_TH.dtype
        return self._experts(x_TH, plan, added_PTH, dtype)


def _shape(weight: Weight) -> tuple[int, int]:
    if isinstance(weight, Bf12Weight):
        return weight.outputs, weight.inputs
    if isinstance(weight, Mxfp4Weight):
        return weight.shape
    outputs, inputs = weight.shape if isinstance(weight, Tensor) else weight.numbers_NK.shape
    return outputs, inputs


def _blocks(weight: Weight) -> int:
    """How many factors an output has."""
    return weight.scales_NB.shape[1] if isinstance(weight, Fp8Weight) else 1


def _bytes(weight: Weight) -> int:
    return weight.nbytes if isinstance(weight, Tensor) else weight.bytes


def _rows_for(x_TK: Tensor, stack: ExpertWeights) -> ExpertRows:
    """The rows as they are, or in 8 bits where the weights are."""
    return ExpertRows(x_TK) if stack.scales is None else quantize_rows(x_TK, stack.scales.shape[1])


def _stacks(weight: Weight, bias_S: Tensor | None, experts: int, dtype: torch.dtype) -> Iterator[ExpertWeights]:
    """All experts as they are; those in 12 or 4 bits expanded, as many at a time as take the memory of a chunk."""
    if isinstance(weight, Fp8Weight):
        yield ExpertWeights(weight.numbers_NK, weight.scales_NB, bias_S)
        return
    if isinstance(weight, Tensor):
        yield ExpertWeights(weight, None, bias_S)
        return
    lines, inputs = _shape(weight)
    outputs, device = lines // experts, (weight.words_NW if isinstance(weight, Bf12Weight) else weight.pairs_NH).device
    together = max(1, min(experts, _CHUNK_BYTES // (outputs * inputs * dtype.itemsize)))
    copy_SK = torch.empty(together * outputs, inputs, dtype=dtype, device=device)
    for first in range(0, experts, together):
        own = range(first * outputs, min(first + together, experts) * outputs)
        chunk_SK = copy_SK[: len(own)]
        if isinstance(weight, Bf12Weight):
            expand(weight, chunk_SK, own)
        else:
            grouped_mxfp4.expand(weight, chunk_SK, own)
        yield ExpertWeights(chunk_SK, bias=None if bias_S is None else bias_S[own.start : own.stop], first=first)
