"""Times the attention kernels over 32 layers of Llama-3.1-8B's geometry, and sweeps their tile shapes.

    python -m benchmarks.engine.attention                       the shapes with the kernels' present tiles
    python -m benchmarks.engine.attention --sweep narrow,wide   the best tile shape for each

µs per layer, from CUDA graphs over different layers' KV. The bound: KV bytes (a segment's once) ÷ 4.3 TB/s, or
FLOP ÷ 790 TFLOP/s where that is more.
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from unittest.mock import patch

import numpy as np
import torch

from engine.kernels import attention
from engine.kernels.attention import TileShape
from engine.protocol.types import SamplingParams
from engine.step import attention_plan
from engine.step.key_span import FULL
from engine.step.layout import PrefixSegment, SequenceSlice, pack_step, unpack_step

HEADS, KV_HEADS, HEAD_DIM, LAYERS, BLOCK_TOKENS = 32, 8, 128, 32, 16
BYTES_PER_S, FLOP_PER_S = 4.3e12, 790e12
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Shape:
    """(rows, first position) of each slice, and the segments."""

    slices: list[tuple[int, int]]
    segments: list[PrefixSegment] = field(default_factory=list)

    @property
    def bound_us(self) -> float:
        keys = sum(rows + start for rows, start in self.slices)
        keys -= sum((len(segment.members) - 1) * (segment.last - segment.first) for segment in self.segments)
        pairs = sum(rows * start + rows * (rows + 1) // 2 for rows, start in self.slices)
        return 1e6 * max(keys * KV_HEADS * HEAD_DIM * 4 / BYTES_PER_S, pairs * HEADS * HEAD_DIM * 4 / FLOP_PER_S)


def decodes(count: int, keys: int) -> list[tuple[int, int]]:
    return [(1, keys - 1)] * count


def shared(count: int, prefix: int, own: int, groups: int = 1) -> Shape:
    each = count // groups
    segments = [PrefixSegment(list(range(each * group, each * group + each)), 0, prefix) for group in range(groups)]
    return Shape(decodes(count, prefix + own), segments)


NARROW = {
    "decode 1 x 576": Shape(decodes(1, 576)),
    "decode 8 x 576": Shape(decodes(8, 576)),
    "decode 32 x 576": Shape(decodes(32, 576)),
    "decode 64 x 576": Shape(decodes(64, 576)),
    "decode 128 x 576": Shape(decodes(128, 576)),
    "decode 256 x 576": Shape(decodes(256, 576)),
    "decode 256 mixed": Shape([(1, 100 + 7 * index) for index in range(256)]),
    "decode 1 x 16384": Shape(decodes(1, 16384)),
    "decode 8 x 16384": Shape(decodes(8, 16384)),
}
WIDE = {
    "prefix 64 x 4096": shared(64, 4096, 128),
    "prefix 256 x 4096": shared(256, 4096, 128),
    "prefix 4 x 64 x 4096": shared(256, 4096, 128, 4),
    "prefix 128 x 16384": shared(128, 16384, 128),
    "prompt 512": Shape([(512, 0)]),
    "prompt 1024": Shape([(1024, 0)]),
    "prompt 8192": Shape([(8192, 0)]),
    "prompt 2048 behind 6144": Shape([(2048, 6144)]),
    "prompt 512 behind 4096, 32 decodes": Shape([(512, 4096), *decodes(32, 576)]),
}


class Bench:
    """The layers' KV, once for all shapes."""

    def __init__(self, keys: int) -> None:
        self.blocks = keys // BLOCK_TOKENS
        self.layers = [
            torch.randn(keys, 2 * KV_HEADS * HEAD_DIM, dtype=torch.bfloat16, device=DEVICE) for _ in range(LAYERS)
        ]

    def microseconds(self, shape: Shape) -> float:
        rng = np.random.default_rng(0)
        order = rng.permutation(self.blocks)
        lengths = [-(-(rows + start) // BLOCK_TOKENS) for rows, start in shape.slices]
        begins = (np.cumsum(lengths) - lengths).tolist()
        tables = [
            np.resize(order, begin + length)[begin:].copy() for begin, length in zip(begins, lengths, strict=True)
        ]
        for segment in shape.segments:
            span = slice(segment.first // BLOCK_TOKENS, segment.last // BLOCK_TOKENS)
            for member in segment.members:
                tables[member][span] = tables[segment.members[0]][span]
        slices = [
            SequenceSlice([1] * rows, start, [table], SamplingParams())
            for (rows, start), table in zip(shape.slices, tables, strict=True)
        ]
        packed = pack_step(slices, BLOCK_TOKENS, shape.segments)
        batch = unpack_step(packed)
        layout = attention.attention_layout((FULL,), HEADS, KV_HEADS, 512, DEVICE)
        work = attention_plan.plan_attention(packed, batch, layout)
        step = torch.from_numpy(np.concatenate((packed, work.words))).to(DEVICE)
        rows = len(batch.tokens_T)
        q_THD = torch.randn(rows, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
        out_THD = torch.empty_like(q_THD)
        scratch = attention.AttentionScratch.make(layout, HEADS, HEAD_DIM, rows, DEVICE)

        def layers() -> None:
            for kv_SW in self.layers:
                attention.attend(
                    step, q_THD, kv_SW, out_THD, scratch, layout, FULL, BLOCK_TOKENS, wide=work.wide
                )  # fmt: skip

        layers()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers()
        took = []
        for _ in range(6):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            took.append(start.elapsed_time(end) * 1e3 / LAYERS)
        return statistics.median(took[1:])


def cuts(which: str) -> Iterator[TileShape]:
    if which == "narrow":
        for keys, stages, warps, programs in product((32, 64), (4, 5, 6, 8), (2, 4), (2, 3, 4, 6)):
            if 60 <= programs * (stages - 2) * keys * HEAD_DIM * 4 // 1024 <= 224:
                yield TileShape(16, keys, stages, warps, programs)
    else:
        for rows, keys, stages, warps, programs in product((64, 128), (64, 128), (2, 3, 4), (4, 8), (1, 2, 3)):
            used = ((stages - 1) * keys * 2 + rows) * HEAD_DIM * 2 // 1024
            if used * programs <= 224 and not (rows == 64 and warps == 8) and rows * programs <= 256:
                yield TileShape(rows, keys, stages, warps, programs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", default="", help="narrow, wide or both, with a comma")
    parser.add_argument("--top", type=int, default=4, help="cuts to show for each shape (default: 4)")
    options = parser.parse_args()
    bench = Bench(200_000)
    for kind, shapes in (("narrow", NARROW), ("wide", WIDE)):
        timings: dict[str, list[tuple[float, TileShape]]] = {name: [] for name in shapes}
        now: TileShape = getattr(attention, kind.upper())
        for cut in cuts(kind) if kind in options.sweep.split(",") else (now,):
            with patch.object(attention, kind.upper(), cut):
                for name, shape in shapes.items():
                    try:
                        timings[name].append((bench.microseconds(shape), cut))
                    except Exception as error:
                        print(f"{cut}: {error!r}"[:160])
                        break
        for name, shape in shapes.items():
            for took, cut in sorted(timings[name], key=lambda pair: pair[0])[: options.top]:
                print(
                    f"{name:36} {took:9.2f} µs  bound {shape.bound_us:8.2f}  ratio {took / shape.bound_us:5.2f}  {cut}"
                )


if __name__ == "__main__":
    main()
