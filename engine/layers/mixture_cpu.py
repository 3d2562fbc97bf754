"""A mixture of experts on a CPU: the router, the experts' linear layers, and what all rows take. It knows no names.

Rows are put together by expert, and each expert's matmuls give a row the same bits in any company (linear_cpu.py). What
a row's experts give is added up in float32, the best expert first. Each of several ranks has a part of every expert's
inner size, as it has of a dense MLP's, or some of the experts whole. A part of the sum over all ranks is then that of
as many experts, whichever rank has them: its bits depend on the number of parts alone.

T rows, H hidden size, E experts, K of them chosen for each row, S rows of all experts' weights below each other.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from engine.kernels.experts.reference import gate, route
from engine.kernels.experts.routing_rule import RoutingRule
from engine.layers.linear_cpu import CpuLinear
from engine.layers.linear_ranks import InputShardLinear, RankExchange


class CpuExperts:
    """Weights gate_up_SH and down_SH, and biases where there are any: every expert's below those of the one before.

    limit  of what goes through the gate (reference.gate).
    own    which of the rule's experts they are, where ranks have whole ones; None: all, or a part of each.
    """

    def __init__(
        self, gate_up: tuple[Tensor, Tensor | None], down: tuple[Tensor, Tensor | None], rule: RoutingRule,
        limit: float, exchange: RankExchange | None, own: range | None = None,
    ) -> None:  # fmt: skip
        self._rule, self._limit = rule, limit
        self._parts = 1 if exchange is None else exchange.own_parts
        self._whole, self._own = own is not None, own or range(rule.experts)
        first = exchange is None or exchange.shard.rank == 0
        self._gate_up = [CpuLinear(weight, bias) for weight, bias in _each(gate_up, len(self._own))]
        self._down: list[dict[int, CpuLinear]] = []  # by part of the sum
        for place, (weight, bias) in enumerate(_each(down, len(self._own))):
            if self._whole:
                self._down.append({place * self._parts // len(self._own): CpuLinear(weight, bias)})
                continue
            chunks = enumerate(weight.chunk(self._parts, 1))
            self._down.append(
                {part: CpuLinear(chunk.contiguous(), None if part or not first else bias) for part, chunk in chunks}
            )
        downs = [linear for linears in self._down for linear in linears.values()]
        self.bytes = sum(linear.bytes for linear in (*self._gate_up, *downs))

    def __call__(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> list[Tensor]:
        """This rank's parts of each row's sum, [T, H] in float32."""
        rows, chosen = ids_TK.shape
        make = torch.zeros if self._whole else torch.empty  # what experts of other parts give is nothing
        out_PSH = make(self._parts, rows * chosen, x_TH.shape[1])
        scales_S = weights_TK.reshape(-1, 1)
        order_S = ids_TK.reshape(-1).argsort(stable=True)
        ends = [0, *ids_TK.reshape(-1).bincount(minlength=self._rule.experts).cumsum(0).tolist()]
        bounds = list(pairwise(ends))[self._own.start : self._own.stop]
        for (first, last), gate_up, downs in zip(bounds, self._gate_up, self._down, strict=True):
            if first == last:
                continue
            places = order_S[first:last]
            own = x_TH.index_select(0, places // chosen)
            if self._rule.scales_inputs:
                own = (own * scales_S[places].to(own.dtype)).contiguous()
            inner = gate(gate_up(own), self._limit)
            widths = [down.inputs for down in downs.values()]
            for (part, down), inner_Ti in zip(downs.items(), inner.split(widths, 1), strict=True):
                given = down(inner_Ti.contiguous()).float()
                out_PSH[part, places] = given if self._rule.scales_inputs else given * scales_S[places]
        return [_added(out_SH.view(rows, chosen, -1)) for out_SH in out_PSH]


class _SharedExpert(Protocol):
    """A gated MLP: `down` follows what `gate` gives."""

    bytes: int

    @property
    def gate(self) -> Callable[[Tensor], Tensor]: ...

    @property
    def down(self) -> Callable[[Tensor], Tensor]: ...


class CpuMixture:
    """The whole MLP of a layer (a llama.Mlp). `shared` is what all rows take."""

    def __init__(
        self, router: CpuLinear, choice_bias_E: Tensor | None, rule: RoutingRule, experts: CpuExperts,
        shared: _SharedExpert | None, exchange: RankExchange | None,
    ) -> None:  # fmt: skip
        self._router, self._rule, self._experts, self._shared = router, rule, experts, shared
        self._choice_bias_E = choice_bias_E
        self._exchange = exchange
        self.bytes = router.bytes + experts.bytes + (0 if shared is None else shared.bytes)

    def __call__(self, x_TH: Tensor, count: Tensor | None) -> Tensor:
        parts = self._experts(x_TH, *route(self._router(x_TH), self._rule, self._choice_bias_E))
        if self._shared is not None:
            inner, down = self._shared.gate(x_TH), self._shared.down
            given = down.own(inner) if isinstance(down, InputShardLinear) else [down(inner)]
            parts = [part + more for part, more in zip(parts, given, strict=True)]
        return parts[0] if self._exchange is None else self._exchange.gather_parts(parts)


def _each(stack: tuple[Tensor, Tensor | None], experts: int) -> list[tuple[Tensor, Tensor | None]]:
    weights, biases = stack
    each = biases.chunk(experts) if biases is not None else (None,) * experts
    return list(zip(weights.chunk(experts), each, strict=True))


def _added(out_TKH: Tensor) -> Tensor:
    total_TH = out_TKH[:, 0]
    for chosen in range(1, out_TKH.shape[1]):
        total_TH = total_TH + out_TKH[:, chosen]
    return total_TH
