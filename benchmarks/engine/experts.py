"""How long the experts of a mixture take on a GPU, router and list included, beside the bytes and FLOP that they need:
for even choices and for all rows on the same experts, in bf16, 12, 8 and 4 bits a number.

    python -m benchmarks.engine.experts [--models qwen3-30b,scout-rank] [--rows 1,64,256] [--json rows.json]
    python -m benchmarks.engine.experts --models qwen3-30b --row-tilings      one row in bf16, cut in several ways

Layers of weights that are together larger than the L2 cache run one after the other in a CUDA graph. Before a figure
counts, the result is compared with the same experts in float32, one by one.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch import Tensor

from engine.bench.geometries import BYTES_PER_S, FLOP_PER_S, MIXTURES, write_folder
from engine.bf12.codec import choose_bases, encode, stack_matrices
from engine.kernels.experts import reference
from engine.kernels.experts.grouped_linear import ExpertWeights
from engine.kernels.experts.grouped_tuning import tile_rows
from engine.kernels.experts.mxfp4_weight import Mxfp4Weight
from engine.kernels.experts.route import route
from engine.kernels.experts.routing_rule import RoutingRule
from engine.kernels.experts.row_experts import RowTiling, gate_row, multiply_row
from engine.layers.fp8_weight import Fp8Weight
from engine.layers.mixture_gpu import GpuExperts, Weight
from engine.models.config import read_decoder_config
from engine.weights import fp8, mxfp4

FORMS: Final = ("bf16", "bf12", "fp8", "mxfp4")
CHOICES: Final = ("even", "skewed")
_LAYERS_BYTES: Final = 400 << 20  # that one replay goes through, if a layer is smaller
_REPEATS: Final = 20
_NUMBER_BYTES: Final = {"bf16": 2.0, "bf12": 1.5, "fp8": 1.0, "mxfp4": 17 / 32}
_ERROR_MOST: Final = {"bf16": 0.02, "bf12": 0.02, "fp8": 0.08, "mxfp4": 0.02}


@dataclass(frozen=True, slots=True)
class ExpertsWork:
    """One layer's experts: hidden and inner size, rule, limit of the gate."""

    hidden: int
    inner: int
    rule: RoutingRule
    limit: float

    @classmethod
    def of(cls, model: str) -> "ExpertsWork":
        with TemporaryDirectory() as folder:
            config = read_decoder_config(write_folder(model, Path(folder)))
        assert config.mixture is not None
        return cls(config.hidden, config.mixture.intermediate, config.mixture.rule, config.mixture.limit)

    def bound_us(self, logits_TE: Tensor, form: str) -> float:
        """The larger of what reading the experts that are chosen takes, and what computing does."""
        ids_TK, _ = reference.route(logits_TE, self.rule)
        numbers = 3 * self.hidden * self.inner
        read = len(ids_TK.unique()) * numbers * _NUMBER_BYTES[form] / BYTES_PER_S
        flop = 2 * ids_TK.numel() * numbers / (FLOP_PER_S * (2 if form == "fp8" else 1))
        return 1e6 * max(read, flop)


def weight_of(outputs: int, inputs: int, form: str, device: torch.device, seed: int) -> Weight:
    if form == "mxfp4":
        bytes_BH, exponents_B = draw_blocks(outputs, inputs, device, seed)
        return Mxfp4Weight(mxfp4.pair(bytes_BH).view(outputs, -1), exponents_B.view(outputs, -1))
    generator = torch.Generator(device).manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator, device=device).mul_(inputs**-0.5).bfloat16()
    if form == "bf12":
        return stack_matrices([encode(weight, choose_bases(weight))])
    if form == "fp8":
        return Fp8Weight(*fp8.quantize(weight))
    return weight


def draw_blocks(outputs: int, inputs: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Blocks of numbers in 4 bits as files have them, and their exponents."""
    generator, blocks = torch.Generator(device).manual_seed(seed), outputs * inputs // mxfp4.BLOCK
    drawn = torch.randint(256, (blocks, mxfp4.BLOCK_BYTES), generator=generator, device=device, dtype=torch.uint8)
    return drawn, torch.randint(118, 122, (blocks,), generator=generator, device=device, dtype=torch.uint8)


def numbers_of(outputs: int, inputs: int, form: str, device: torch.device, seed: int) -> Tensor:
    """What a weight was made of, in float32: of 12 and 8 bits a number the numbers before them."""
    if form == "mxfp4":
        return mxfp4.expand(*draw_blocks(outputs, inputs, device, seed), torch.float32).view(outputs, inputs)
    return _plain(outputs, inputs, device, seed).float()


def layer_of(work: ExpertsWork, form: str, device: torch.device, seed: int = 0) -> GpuExperts:
    experts = work.rule.experts
    gate_up = weight_of(experts * 2 * work.inner, work.hidden, form, device, 2 * seed)
    down = weight_of(experts * work.hidden, work.inner, form, device, 2 * seed + 1)
    return GpuExperts((gate_up, None), (down, None), work.rule, work.limit)


def logits_of(work: ExpertsWork, rows: int, choice: str, device: torch.device) -> Tensor:
    if choice == "skewed":  # all rows choose the same
        return torch.arange(work.rule.experts, 0, -1.0, device=device).expand(rows, -1).contiguous()
    return torch.randn(rows, work.rule.experts, device=device, generator=torch.Generator(device).manual_seed(9))


def compute(work: ExpertsWork, layer: GpuExperts, x_TH: Tensor, logits_TE: Tensor, count: Tensor) -> Tensor:
    if len(x_TH) == 1 and layer.row_chooses:
        return layer.of_row(x_TH, logits_TE[None], None, None)
    plan = route(logits_TE[None], count, work.rule, None, tile_rows(len(x_TH) * work.rule.chosen, work.rule.experts))
    return layer(x_TH, plan, None, torch.float32 if len(x_TH) <= 128 else x_TH.dtype)


def error_of(work: ExpertsWork, form: str, choice: str, rows: int, device: torch.device, dtype: torch.dtype) -> float:
    """‖found − wanted‖ ÷ ‖wanted‖ beside the experts one by one in float32, of some rows."""
    layer = layer_of(work, form, device)
    x_TH = torch.randn(rows, work.hidden, device=device, generator=torch.Generator(device).manual_seed(8)).to(dtype)
    logits_TE = logits_of(work, rows, choice, device)
    found_TH = (
        compute(work, layer, x_TH, logits_TE, torch.tensor([rows], dtype=torch.int32, device=device)).float().sum(0)
    )
    gate_up, down = (
        numbers_of(work.rule.experts * outputs, inputs, form, device, seed).chunk(work.rule.experts)
        for seed, (outputs, inputs) in enumerate([(2 * work.inner, work.hidden), (work.hidden, work.inner)])
    )
    ids_TK, weights_TK = reference.route(logits_TE, work.rule)
    wanted_TH = torch.zeros_like(found_TH)
    for row, (ids, weights) in enumerate(zip(ids_TK.tolist(), weights_TK.tolist(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            scale_in, scale_out = (weight, 1.0) if work.rule.scales_inputs else (1.0, weight)
            inner = reference.gate((x_TH[row : row + 1].float() * scale_in) @ gate_up[expert].T, work.limit)
            wanted_TH[row] += scale_out * (inner @ down[expert].T)[0]
    return float((found_TH - wanted_TH).norm() / wanted_TH.norm())


def measure_us(work: ExpertsWork, layers: list[GpuExperts], rows: int, logits_TE: Tensor) -> float:
    """The median of replays, per layer."""
    device = logits_TE.device
    x_TH = torch.randn(rows, work.hidden, device=device).bfloat16()
    count = torch.tensor([rows], dtype=torch.int32, device=device)
    return graph_us([partial(compute, work, layer, x_TH, logits_TE, count) for layer in layers])


def measure_row_tilings(model: str) -> None:
    """Prints how long one row's kernels take in other tilings, each with copies of the weights that L2 does not hold,
    and what choosing by a list takes beside them."""
    work, device = ExpertsWork.of(model), torch.device("cuda")
    rule, hidden, inner = work.rule, work.hidden, work.inner
    copies = max(1, _LAYERS_BYTES // (3 * hidden * inner * rule.experts * 2))
    stacks = [
        [ExpertWeights(_plain(rule.experts * outputs, inputs, device, seed)) for seed in range(copies)]
        for outputs, inputs in ((2 * inner, hidden), (hidden, inner))
    ]
    x_1H, logits_1E = torch.randn(1, hidden, device=device).bfloat16(), logits_of(work, 1, "even", device)
    inner_CI = x_1H.new_empty(rule.chosen, inner)
    out_C1H = x_1H.new_empty(rule.chosen, 1, hidden, dtype=torch.float32)
    choice = gate_row(x_1H, logits_1E[None], rule, None, stacks[0][0], work.limit, inner_CI)
    count = torch.ones(1, dtype=torch.int32, device=device)

    def gated(tiling: RowTiling, stack: ExpertWeights) -> None:
        gate_row(x_1H, logits_1E[None], rule, None, stack, work.limit, inner_CI, tiling)

    def down(tiling: RowTiling, stack: ExpertWeights) -> None:
        multiply_row(inner_CI, choice, stack, None, not rule.scales_inputs, out_C1H, tiling)

    listed_us = graph_us([lambda: route(logits_1E[None], count, rule, None, 16)] * copies)
    print(f"{model}: a list of one row {listed_us:.2f} µs")
    tilings = [
        RowTiling(*numbers)
        for numbers in product((4, 8, 16, 32), (128, 256, 512, 1024), (2, 3, 4), (2, 4))
        if 8 <= numbers[0] * numbers[1] // (32 * numbers[3]) <= 64
    ]
    for name, way, each in (("gate and up", gated, stacks[0]), ("down", down, stacks[1])):
        bound_us = 1e6 * rule.chosen * each[0].weight.nbytes / rule.experts / BYTES_PER_S
        timed = sorted(
            (graph_us([partial(way, tiling, stack) for stack in each]), str(tiling)) for tiling in tilings
        )  # fmt: skip
        for us, tiling in timed[:6]:
            print(f"  {name:12} {us:7.2f} µs   bound {bound_us:6.2f}   {tiling}", flush=True)


def _plain(outputs: int, inputs: int, device: torch.device, seed: int) -> Tensor:
    weight = weight_of(outputs, inputs, "bf16", device, seed)
    assert isinstance(weight, Tensor)
    return weight


def graph_us(calls: list[Callable[[], object]]) -> float:
    """The median of replays, per call."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    took = []
    for _ in range(_REPEATS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        took.append(1e3 * first.elapsed_time(last) / len(calls))
    return statistics.median(took[1:])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.engine.experts", description=__doc__)
    parser.add_argument("--models", default="qwen3-30b,scout-rank,gpt-oss-20b,mixtral-8x7b", help=", ".join(MIXTURES))
    parser.add_argument("--rows", default="1,8,64,256,2048")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--row-tilings", action="store_true", help="how long one row's two kernels take, cut otherwise")
    parser.add_argument("--json", help="file that the rows go to")
    options = parser.parse_args(arguments)
    if options.row_tilings:
        for model in options.models.split(","):
            measure_row_tilings(model)
        return 0
    device, table = torch.device("cuda"), []
    for model, form in product(options.models.split(","), options.forms.split(",")):
        work = ExpertsWork.of(model)
        if form == "bf12" and (work.limit or work.inner % 128 or work.hidden % 128):
            continue  # gpt-oss: its sizes have no code
        if form == "mxfp4" and (work.inner % mxfp4.PAIR or work.hidden % mxfp4.PAIR):
            continue
        one = layer_of(work, form, device)
        layers = [one, *(layer_of(work, form, device, seed) for seed in range(1, max(1, _LAYERS_BYTES // one.bytes)))]
        for choice, rows in product(CHOICES, [int(rows) for rows in options.rows.split(",")]):
            off = error_of(work, form, choice, min(rows, 70), device, torch.bfloat16)
            logits_TE = logits_of(work, rows, choice, device)
            us, bound = measure_us(work, layers, rows, logits_TE), work.bound_us(logits_TE, form)
            row: dict[str, Any] = {
                "shape": f"{model}-experts-{form}-{choice}-{rows}", "value": round(us, 2), "unit": "µs",
                "bound": round(bound, 2), "error": round(off, 5), "sound": off <= _ERROR_MOST[form],
                "hardware": torch.cuda.get_device_name(),
            }  # fmt: skip
            table.append(row)
            print(
                f"{row['shape']:44} {us:9.1f} µs   bound {bound:8.1f}   x{us / bound:5.2f}   error {off:.4f}",
                flush=True,
            )
    if options.json:
        Path(options.json).write_text(json.dumps(table, indent=1))
    return 0 if all(row["sound"] for row in table) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
