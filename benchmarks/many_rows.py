"""How to multiply more rows than the kernels for few take by a weight in 12 bits: expanded as a whole, expanded in
chunks that the L2 cache holds, or straight (kernels/coded_hopper.py), beside the same in bf16.

    python -m benchmarks.many_rows                       Llama-3.1-8B's layers, on the GPU at hand
    python -m benchmarks.many_rows --rows 128,2048 --ways bf16,tiles-256

Each way is measured by a process of its own, which ends when it takes too long: a kernel that hangs or goes astray
costs no other way its figures. As in benchmarks/linear.py each call runs in a CUDA graph over copies of the weight that
the L2 cache does not hold together. Float32 parts are charged with reading them. A step is all layers, without the
head. The bound is max(12-bit bytes ÷ 4.3 TB/s, FLOP ÷ 790 T).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.linear import (
    BYTES_PER_S,
    LLAMA_8B,
    Call,
    Shape,
    by_expanding,
    gated_after,
    microseconds,
    random_weights,
)
from engine.kernels.coded_hopper import Tile, multiply, multiply_gated, multiprocessors_of, tile_of
from engine.kernels.expand import expand
from engine.weights.codec import Bf12
from engine.weights.lanes import GROUP_OUTPUTS
from engine.weights.resident import Resident

WAYS: Final = ("bf16", "expanded", "tiles-128", "tiles-256")
ROWS: Final = (96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
FLOP_PER_S: Final = 790e12
LAYERS: Final = 32
_CHUNKS_MB: Final = (16, 24, 32, 64)
_PARTS: Final = (1, 2, 3, 4, 6, 8)
_OUTPUTS_TILE: Final = 128


def bound_us(shape: Shape, rows: int) -> float:
    outputs, inputs, _ = shape
    return max(outputs * inputs * 1.5 / BYTES_PER_S, 2 * rows * outputs * inputs / FLOP_PER_S) * 1e6


def as_it_is(x_TK: Tensor, weight_NK: Tensor, gated: bool) -> Tensor:
    weight = Resident(weight_NK)
    return weight.gated(x_TK) if gated else weight(x_TK)


def by_chunks(chunk: int, inputs: int) -> Call:
    """So many outputs at once, expanded to the same place."""
    scratch_NK = torch.empty(chunk, inputs, dtype=torch.bfloat16, device="cuda")

    def call(x_TK: Tensor, weight: Bf12) -> Tensor:
        out_TN = x_TK.new_empty(len(x_TK), weight.outputs)
        for first in range(0, weight.outputs, chunk):
            outputs = range(first, min(first + chunk, weight.outputs))
            expand(weight, scratch_NK[: len(outputs)], outputs)
            torch.mm(x_TK, scratch_NK[: len(outputs)].T, out=out_TN[:, outputs.start : outputs.stop])
        return out_TN

    return call


def by_tiles(tile: Tile, gated: bool) -> Call:
    call = multiply_gated if gated else multiply
    return lambda x_TK, weight: call(x_TK, weight, tile)


def calls(way: str, shape: Shape, rows: int) -> Iterator[tuple[str, Call]]:
    outputs, inputs, gated = shape
    if way == "bf16":
        yield way, lambda x_TK, weight_NK: as_it_is(x_TK, weight_NK, gated)
    elif way == "expanded":
        yield way, gated_after(by_expanding) if gated else by_expanding
        for chunk_mb in _CHUNKS_MB:
            chunk = (chunk_mb << 20) // (2 * inputs) // GROUP_OUTPUTS * GROUP_OUTPUTS
            if chunk < outputs:
                yield f"{chunk_mb} MB", gated_after(by_chunks(chunk, inputs)) if gated else by_chunks(chunk, inputs)
    else:
        size, programs = int(way.partition("-")[2]), multiprocessors_of(torch.device("cuda"))
        tiles = -(-rows // size) * -(-outputs // _OUTPUTS_TILE)
        chosen = tile_of(outputs, inputs, rows, gated, programs)
        for parts in _PARTS[:1] if gated else _PARTS:
            tile = Tile(size, parts)
            if tiles * (parts - 1) < programs or tile == chosen:
                yield f"{size}/{parts}{' chosen' if tile == chosen else ''}", by_tiles(tile, gated)


def joined(found: Tensor) -> Tensor:
    return found.float().sum(0) if found.ndim == 3 else found.float()


def measure(way: str, rows: list[int], to: Path) -> None:
    """A line of JSON and a line of text for each figure, as it comes."""
    for shape in LLAMA_8B:
        outputs, inputs, gated = shape
        weight_NK, weights = random_weights(shape, is_coded=way != "bf16")
        for count in rows:
            x_TK = torch.randn(count, inputs, dtype=torch.bfloat16, device="cuda")
            wanted = joined(as_it_is(x_TK, weight_NK, gated))
            for name, call in calls(way, shape, count):
                took_us, wrong = float("inf"), ""
                try:
                    found = call(x_TK, weights[0])
                    error = float((joined(found) - wanted).norm() / wanted.norm())
                    wrong = "" if error < 0.01 else f"WRONG by {error:.3g}"
                    took_us = microseconds(call, x_TK, weights)
                    if found.dtype == torch.float32:
                        took_us += found.nbytes / BYTES_PER_S * 1e6
                except Exception as failure:
                    wrong = repr(failure)[:200]
                figure = {"shape": list(shape), "rows": count, "way": way, "name": name, "us": took_us, "wrong": wrong}
                with to.open("a") as file:
                    file.write(json.dumps(figure) + "\n")
                key = f"{outputs}x{inputs}{' gated' if gated else ''}"
                least = bound_us(shape, count)
                print(f"{key:18} {count:5} {name:14} {took_us:9.1f} µs  bound {least:8.1f}  {wrong}", flush=True)
                if "CUDA" in wrong:
                    sys.exit(1)  # what follows would fail too
        del weights, weight_NK
        torch.cuda.empty_cache()


def best(figures: list[dict[str, Any]], rows: int, ways: Sequence[str]) -> tuple[float, str]:
    """(ms of a step's layers, how each shape is multiplied)."""
    total_us, names = 0.0, []
    for shape in LLAMA_8B:
        key = (list(shape), rows, "")
        right = [figure for figure in figures if (figure["shape"], figure["rows"], figure["wrong"]) == key]
        us, name = min(
            ((one["us"], one["name"]) for one in right if one["way"] in ways), default=(float("inf"), "none")
        )
        total_us += us
        names.append(name)
    return total_us * LAYERS / 1e3, ", ".join(names)


def report(figures: list[dict[str, Any]], rows: list[int], ways: list[str]) -> None:
    """Of each way, and of what is best for each shape."""
    columns = {**{way: [way] for way in ways}, "any": [way for way in ways if way != "bf16"]}
    print("\nms of a step's layers, and its ratio to bf16")
    print(f"{'rows':>5} {'bound':>8} " + "".join(f"{column:>18}" for column in columns))
    for count in rows:
        bf16_ms, _ = best(figures, count, ["bf16"])
        line = f"{count:5} {sum(bound_us(shape, count) for shape in LLAMA_8B) * LAYERS / 1e3:8.2f} "
        for among in columns.values():
            took_ms, names = best(figures, count, among)
            line += f"{took_ms:10.2f} ({took_ms / bf16_ms:4.2f}×)"
        print(f"{line}  {names}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--timeout-s", type=float, default=60, help="of each way (default: 60)")
    parser.add_argument("--json", type=Path, help="where all figures are put")
    parser.add_argument("--measure", action="store_true", help="in this process; it is how the others are started")
    options = parser.parse_args()
    rows, ways = [int(count) for count in options.rows.split(",")], options.ways.split(",")
    if options.measure:
        measure(ways[0], rows, options.json)
        return
    to = options.json or Path(tempfile.mkstemp(suffix=".json")[1])
    to.write_text("")
    for way in ways:
        began = time.monotonic()
        told = ["--measure", "--ways", way, "--rows", options.rows, "--json", str(to)]
        try:
            command = [sys.executable, "-m", "benchmarks.many_rows", *told]
            code = subprocess.run(command, timeout=options.timeout_s).returncode
            print(f"{way}: ended with {code} after {time.monotonic() - began:.0f} s", flush=True)
        except subprocess.TimeoutExpired:
            print(f"{way}: STUCK, or too slow: ended after {options.timeout_s:.0f} s", flush=True)
    report([json.loads(line) for line in to.read_text().splitlines()], rows, ways)


if __name__ == "__main__":
    main()
