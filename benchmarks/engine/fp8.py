"""A model in 8 bits a number beside the same one in bf16: decode steps and prompts, in pairs in the same run.

    python -m benchmarks.engine.fp8 --device cuda                     Llama-3.1-8B's geometry, Gaussian weights
    python -m benchmarks.engine.fp8 --device cpu --small --folder F   the machinery, on a model of a megabyte

The bf16 folder is written once, and `engine.compression.quantize`, which is what users have, makes the other of it.
Each model has a process of its own on the same GPU, and they take turns: medians of the rounds. Each time is printed
beside its bound: bytes ÷ 4.3 TB/s or FLOP ÷ the rate of its numbers, whichever is more, and the reading of keys.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.bf12.lossless import write_plain
from benchmarks.engine import standby
from benchmarks.engine.turns import Turns, first_token_ms, pairs, two_engines
from benchmarks.record import record
from engine.bench.geometries import BYTES_PER_S, FLOP_PER_S, RooflineBound
from engine.models.config import read_decoder_config
from engine.protocol.specs import ModelSpec

PREFILL_GAIN_LEAST: Final = 1.5
_FP8_RATE: Final = 2.0  # of bf16's, on Hopper's tensor cores
_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Sizes:
    """Steps of so many `rows` behind prompts of `prompt`, and prompts of `tokens`; `rounds` of each pair."""

    rows: tuple[int, ...] = (1, 64, 256)
    tokens: tuple[int, ...] = (1024, 8192)
    prompt: int = 512
    steps: int = 32
    rounds: int = 5
    context: int = 16384
    kv_bytes: int = 32 * _GIB


SMALL: Final = Sizes(rows=(1, 3), tokens=(16, 48), prompt=16, steps=3, rounds=2, context=256, kv_bytes=4 << 20)


@dataclass(frozen=True, slots=True)
class Side:
    """One model's engine, and the least that it can take."""

    engine: Turns
    bound: RooflineBound
    name: str
    read_bytes: int  # of weights, by every step: all but the embedding
    rate: float  # of bf16's, at which all but the head is computed

    def step_ms(self, rows: int, keys: float) -> float:
        """The least that a step takes: of weights, of FLOP, and of keys."""
        head_s = rows * self.bound.head_bytes / FLOP_PER_S  # a FLOP for each byte of bf16
        linear_s = max(self.read_bytes / BYTES_PER_S, self._linear_ms(rows, self.rate) / 1e3 + head_s)
        return 1e3 * (linear_s + keys * self.bound.kv_token_bytes / BYTES_PER_S)

    def prompt_ms(self, tokens: int) -> float:
        """The least that a prompt takes: attention is computed in bf16 by both."""
        attention_ms = self.bound.prompt_ms(tokens) - self._linear_ms(tokens, 1.0)
        return max(self._linear_ms(tokens, self.rate) + attention_ms, 1e3 * self.read_bytes / BYTES_PER_S)

    def _linear_ms(self, tokens: int, rate: float) -> float:
        return 1e3 * tokens * (self.bound.weights_bytes - self.bound.head_bytes) / FLOP_PER_S / rate


def quantize(plain: Path, packed: Path, device: str) -> None:
    """Makes the folder in 8 bits, unless it is there. Raises RuntimeError where the program fails."""
    if packed.exists():
        return
    command = [sys.executable, "-m", "engine.compression.quantize", str(plain), str(packed), "--device", device]
    ended = subprocess.run(command)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {ended.returncode}")


def measure_steps(sides: Sequence[Side], sizes: Sizes) -> None:
    max_tokens = (sizes.steps + 1) * (sizes.rounds + 1) + 64
    engines = [side.engine for side in sides]
    for rows in sizes.rows:
        for engine in engines:
            engine.ask("begin", rows, sizes.prompt, max_tokens)
        took_ms = pairs(engines, lambda engine, _: engine.ask("steps", sizes.steps), sizes.rounds)
        for engine in engines:
            engine.ask("end")
        keys = rows * (sizes.prompt + sizes.steps * sizes.rounds / 2)
        for side, ms in zip(sides, took_ms, strict=True):
            _row(f"{side.name}-decode-{rows}", ms, "ms", side.step_ms(rows, keys))
        _row(f"fp8-decode-{rows}-gain", took_ms[0] / took_ms[1], "x", None)


def measure_prompts(sides: Sequence[Side], sizes: Sizes) -> None:
    gains = []
    for tokens in sizes.tokens:
        took_ms = pairs([side.engine for side in sides], partial(first_token_ms, tokens), sizes.rounds)
        for side, ms in zip(sides, took_ms, strict=True):
            _row(f"{side.name}-ttft-{tokens}", ms, "ms", side.prompt_ms(tokens))
        gains.append(took_ms[0] / took_ms[1])
    _row("fp8-prefill-gain", gains[-1], "x", PREFILL_GAIN_LEAST)


def _row(shape: str, value: float, unit: str, bound: float | None) -> None:
    record("fp8", shape, round(value, 4), unit, bound=None if bound is None else round(bound, 4))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.engine.fp8", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a model of a megabyte, to try the machinery")
    parser.add_argument("--folder", type=Path, help="where the weights lie (default: in the folder of temporary files)")
    options = parser.parse_args(arguments)
    if options.device == "cuda":
        import torch  # noqa: F401  rows name the GPU where it is imported
    sizes = SMALL if options.small else Sizes()
    default = Path(tempfile.gettempdir()) / f"hearth-{'small' if options.small else standby.GEOMETRY}"
    plain = write_plain(options.folder or default, options.small)
    packed = plain.with_name(f"{plain.name}-fp8")
    quantize(plain, packed, options.device)
    bound = RooflineBound.of(read_decoder_config(plain))

    def spec(name: str, folder: Path) -> ModelSpec:
        return ModelSpec(
            name=f"@cf/bench/{name}", folder=str(folder), context_tokens=sizes.context, kv_bytes=sizes.kv_bytes
        )

    with two_engines(spec("bf16", plain), spec("fp8", packed), options.device) as (first, second, _):
        saved = first.memory.weights_bytes - second.memory.weights_bytes
        sides = [
            Side(first, bound, "bf16", bound.weights_bytes, 1.0),
            Side(second, bound, "fp8", bound.weights_bytes - saved, _FP8_RATE),
        ]
        _row("fp8-bytes", second.memory.weights_bytes / 1e9, "GB", first.memory.weights_bytes / 2e9)
        measure_steps(sides, sizes)
        measure_prompts(sides, sizes)


if __name__ == "__main__":
    main(sys.argv[1:])
