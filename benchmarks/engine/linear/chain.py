"""Which ways to multiply are the fastest together: a model's layers and its head, with their norms, in one CUDA graph
as in a decode step, each weight in its own place. The fastest way alone need not be the fastest there, where kernels
begin while others end. So one matrix after the other tries its ways within the whole, and keeps a way that is clearly
better.

Attention itself is left out. Parts of qkv, which it would read, are charged as in alone.py.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from time import monotonic
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.engine.linear.alone import (
    GPU,
    Call,
    Measured,
    as_bf16,
    by_library,
    in_parts,
    parts_us,
    random_weights,
    replayed_us,
    runs,
)
from benchmarks.engine.linear.shapes import MODELS, AnyTiling, Model, Shape, Work, buckets_of
from benchmarks.engine.linear.table import Found
from engine.kernels.rms_norm import add_norm

_ROWS_MOST: Final = 128
_REPLAYS: Final = 7
_GAIN: Final = 0.003  # less may be chance
_ROUNDS: Final = 2
_TRIED_MOST: Final = 16
_HOPELESS: Final = 1.4  # of the time of the fastest alone

Choices = Mapping[Shape, AnyTiling | None]
Weights = Mapping[Shape, Sequence[Any]]  # a copy for each layer


class DeviceLostError(Exception):
    """A kernel went astray: nothing runs on the GPU any more in this process."""


@dataclass(frozen=True, slots=True)
class Step:
    """What trying a matrix's ways has changed, or nothing."""

    shape: Shape
    was: AnyTiling | None
    became: AnyTiling | None
    before_ms: float
    after_ms: float


def descend(
    start: Choices, tried: Mapping[Shape, Sequence[AnyTiling | None]], chain_ms: Callable[[Choices], float]
) -> Iterator[Step]:
    """Each matrix in turn, until none of them changes or all have had their rounds. Ways that fail are never taken."""
    choices, settled = dict(start), 0
    for shape in islice(cycle(tried), _ROUNDS * len(tried)):
        if settled == len(tried):
            return
        was = choices[shape]
        before_ms = attempt(chain_ms, choices)
        took = {tiling: attempt(chain_ms, {**choices, shape: tiling}) for tiling in tried[shape] if tiling != was}
        became, after_ms = min(took.items(), key=lambda item: item[1], default=(was, before_ms))
        if after_ms < (1 - _GAIN) * before_ms:
            choices[shape], settled = became, 1
        else:
            became, after_ms, settled = was, before_ms, settled + 1
        yield Step(shape, was, became, before_ms, after_ms)


def attempt(chain_ms: Callable[[Choices], float], choices: Choices) -> float:
    """Infinite where it fails."""
    try:
        return chain_ms(choices)
    except DeviceLostError:
        raise
    except Exception as error:
        print(f"{choices}: {error!r}"[:600], file=sys.stderr)
        return math.inf


def worth_trying(measured: Measured) -> list[AnyTiling | None]:
    """The fastest alone, but those that cannot win."""
    ranked = sorted([*measured.found, *measured.others], key=lambda timed: timed.us)
    return [timed.tiling for timed in ranked if timed.us <= _HOPELESS * ranked[0].us][:_TRIED_MOST]


def shapes_in_turn(model: Model) -> list[Shape]:
    """The one with the most bytes first."""
    return sorted(model.shapes, key=lambda shape: -shape[0] * shape[1] * model.copies(shape))


class Chain:
    """A model's layers for some number of rows."""

    def __init__(self, model: Model, rows: int) -> None:
        hidden, attended = model.qkv[1], model.output[1]
        self._model = model
        self._sum_TH = torch.zeros(rows, hidden, device=GPU)
        self._ones_H = torch.ones(hidden, device=GPU)
        self._x_TH = torch.empty(rows, hidden, dtype=torch.bfloat16, device=GPU)
        self._attended_TA = torch.randn(rows, attended, dtype=torch.bfloat16, device=GPU)
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None  # the last one keeps the pool for the next

    def run(self, calls: Mapping[Shape, Call], weights: Weights, layers: int) -> Tensor:
        """The first layers and the head: what its parts add up to."""
        model, added_PTH = self._model, None
        for layer in range(layers):
            self._norm(added_PTH)
            calls[model.qkv](self._x_TH, weights[model.qkv][layer])
            added_PTH = in_parts(calls[model.output](self._attended_TA, weights[model.output][layer]))
            self._norm(added_PTH)
            inner_TI = calls[model.gate_up](self._x_TH, weights[model.gate_up][layer])
            added_PTH = in_parts(calls[model.down](inner_TI, weights[model.down][layer]))
        self._norm(added_PTH)
        logits_PTV = in_parts(calls[model.head](self._x_TH, weights[model.head][0]))
        return logits_PTV[0] if len(logits_PTV) == 1 else logits_PTV.sum(0).bfloat16()

    def _norm(self, added_PTH: Tensor | None) -> None:
        add_norm(self._sum_TH, added_PTH, self._ones_H, 1e-5, self._x_TH)

    def ms(self, calls: Mapping[Shape, Call], weights: Weights) -> float:
        """The median of some replays. Kernels are loaded before: a graph's capture takes none that is not."""
        qkv = self._model.qkv
        try:
            self._sum_TH.zero_()  # what all replays add up stays a number
            self.run(calls, weights, 2)
            qkv_us = parts_us(in_parts(calls[qkv](self._x_TH, weights[qkv][0]))) * self._model.layers
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
                self.run(calls, weights, self._model.layers)
                graph.capture_end()
            self._graph = graph
            return (replayed_us(graph, _REPLAYS) + qkv_us) / 1e3
        except Exception as error:
            if not is_alive():
                raise DeviceLostError from error
            raise


def is_alive() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def tune(name: str, is_coded: bool, alone: Mapping[Work, Measured], seconds: float, findings: Found) -> None:
    """For each number of rows of a decode step at which all matrices were measured alone."""
    model = MODELS[name]
    buckets = buckets_with_all(model, is_coded, alone)
    if not buckets:
        return
    end_s = monotonic() + seconds
    plain, coded = weights_of(model, is_coded)
    for nth, rows in enumerate(buckets):
        until_s = monotonic() + (end_s - monotonic()) / (len(buckets) - nth)  # what one leaves is the others'
        works = {shape: Work(shape, rows, is_coded) for shape in shapes_in_turn(model)}
        chain = Chain(model, rows)
        bf16_ms = chain.ms({shape: as_bf16(shape[2]) for shape in model.shapes}, plain)
        chain_ms = partial(chosen_ms, chain, coded if is_coded else plain, is_coded)
        choices = {shape: alone[work].best.tiling for shape, work in works.items()}
        for step in descend(choices, {shape: worth_trying(alone[work]) for shape, work in works.items()}, chain_ms):
            choices[step.shape] = step.became
            findings.change(alone[works[step.shape]], step.became)
            print(
                f"{name} {works[step.shape].key}, {rows} rows: {step.was} → {step.became}, chain {step.before_ms:.3f} "
                f"→ {step.after_ms:.3f} ms, ÷ bf16 {step.after_ms / bf16_ms:.3f}", flush=True,
            )  # fmt: skip
            if monotonic() > until_s:
                break
        bound_ms = sum(work.bound_us * model.copies(shape) for shape, work in works.items()) / 1e3
        findings.whole(name, rows, is_coded, attempt(chain_ms, choices), bf16_ms, bound_ms)


def buckets_with_all(model: Model, is_coded: bool, alone: Mapping[Work, Measured]) -> list[int]:
    return [
        rows
        for rows in buckets_of(is_coded)
        if rows <= _ROWS_MOST and all(Work(shape, rows, is_coded) in alone for shape in model.shapes)
    ]


def weights_of(model: Model, is_coded: bool) -> tuple[Weights, Weights]:
    """In bf16, and in 12 bits, or none: for each layer its own."""
    plain, coded = {}, {}
    for shape in model.shapes:
        plain[shape], coded[shape] = random_weights(shape, is_coded, model.copies(shape))
    return plain, coded


def chosen_ms(chain: Chain, weights: Weights, is_coded: bool, choices: Choices) -> float:
    calls = {
        shape: by_library(shape[2], is_coded) if tiling is None else runs(tiling, shape[2])
        for shape, tiling in choices.items()
    }
    return chain.ms(calls, weights)
