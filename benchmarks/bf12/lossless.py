"""Weights in 12 bits beside the same ones in bf16: files, decode steps, prompts and wakes, in pairs in the same run.

    python -m benchmarks.bf12.lossless --device cuda                      all parts
    python -m benchmarks.bf12.lossless --device cuda --part files|steps|prompts|wake
    python -m benchmarks.bf12.lossless --device cpu --small --folder F    the machinery, on a model of a megabyte

files    writes llama-3.1-8b's geometry with Gaussian weights, compresses it and expands it again, each with the
         program that users have; the expanded folder must have the first one's bytes.
steps    whole engine steps of both models at 1 to 256 rows behind prompts of 512 tokens. Each model has a process of
         its own on the same GPU, and they take turns; medians of the rounds, and their ratio.
prompts  the time to the first token of one prompt of 128 to 8,192 tokens, the same way.
wake     `hearth serve` with both models, requested while they sleep in host memory and room is free.

The folder is kept, and its files are not made again. Each ratio is printed beside its target, each time beside its
bound: bytes ÷ 4.3 TB/s or FLOP ÷ 790 T, whichever is more, and the reading of keys.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.engine import standby
from benchmarks.engine.turns import Clocks, Turns, first_token_ms, pairs, two_engines
from benchmarks.record import record
from engine.bench.geometries import BYTES_PER_S, FLOP_PER_S, GEOMETRIES, RooflineBound
from engine.models.config import read_decoder_config
from engine.protocol.specs import ModelSpec
from gateway.catalogue.catalogue import BUILT_IN

PARTS: Final = ("files", "steps", "prompts", "wake")
PLAIN: Final = "bf16"
STEP_BARS: Final = {1: 1.22, 8: 1.18, 16: 1.14, 32: 1.12, 64: 1.0}  # times faster
SLOWER_MOST: Final = 1.04
BYTES_MOST: Final = 12.1e9
COMPRESS_S_MOST: Final = 60.0
WAKE_MOST: Final = 0.8
_GIB: Final = 1 << 30
_ROUNDS_OF_WAKES: Final = 3
_MOVED_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured, and how often: `rounds` of each pair, of `steps` steps each, behind prompts of `prompt`."""

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    tokens: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192)
    prompt: int = 512
    steps: int = 32
    rounds: int = 7
    context: int = 16384
    kv_bytes: int = 32 * _GIB


SMALL: Final = Sizes(rows=(1, 3), tokens=(16, 48), prompt=16, steps=3, rounds=2, context=256, kv_bytes=4 << 20)
SMALL_GEOMETRY: Final = {
    **GEOMETRIES["tiny"], "hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "torch_dtype": "bfloat16",
}  # fmt: skip


# Files


def measure_files(plain: Path, coded: Path, device: str) -> None:
    """Raises RuntimeError where a program fails or other bytes come back."""
    if coded.exists():
        shutil.rmtree(coded)
    with tempfile.TemporaryDirectory(prefix="hearth-expanded-", dir=plain.parent) as name:
        back = Path(name) / "model"
        packed_s = _run("compress", plain, coded, device)
        unpacked_s = _run("expand", coded, back, device)
        for path in sorted(plain.glob("*.safetensors")):
            if not _same(path, back / path.name):
                raise RuntimeError(f"{path.name} did not come back as it was")
    before, after = _file_bytes(plain), _file_bytes(coded)
    _row("lossless-compress-s", packed_s, "s", COMPRESS_S_MOST)
    _row("lossless-expand-s", unpacked_s, "s", None)
    _row("lossless-files", after / before, "ratio", 0.755)


def _run(program: str, source: Path, target: Path, device: str) -> float:
    began = time.monotonic()
    command = [sys.executable, "-m", f"engine.compression.{program}", str(source), str(target), "--device", device]
    ended = subprocess.run([*command, "--json"], stdout=subprocess.PIPE)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {ended.returncode}")
    took_s = time.monotonic() - began
    report = json.loads(ended.stdout)
    plain = [
        f"{tensor['name']}: {tensor['reason']}" for tensor in report.get("tensors", []) if tensor["kind"] != "bf12"
    ]
    say(f"{program}: {took_s:.1f} s in all, {report['seconds']:.1f} s of work; {len(plain)} plain: {plain[:3]}")
    return took_s


def _same(one: Path, other: Path) -> bool:
    with one.open("rb") as first, other.open("rb") as second:
        while part := first.read(64 << 20):
            if part != second.read(len(part)):
                return False
        return not second.read(1)


def _file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


# Two engines that take turns


@contextmanager
def engines(plain: Path, coded: Path, device: str, sizes: Sizes) -> Iterator[tuple[Turns, Turns, Clocks]]:
    """The bf16 model's and the 12-bit one's, both loaded."""

    def spec(name: str, folder: Path) -> ModelSpec:
        return ModelSpec(
            name=f"@cf/bench/{name}", folder=str(folder), context_tokens=sizes.context, kv_bytes=sizes.kv_bytes
        )

    with two_engines(spec("bf16", plain), spec("bf12", coded), device) as both:
        yield both


# Steps and prompts


def measure_memory(first: Turns, second: Turns) -> None:
    _row("lossless-bytes", second.memory.weights_bytes / 1e9, "GB", BYTES_MOST / 1e9)
    _row("lossless-bytes", first.memory.weights_bytes / 1e9, "GB", None, PLAIN)
    say(f"{second.memory.coded_bytes / 1e9:.3f} GB of them in 12 bits; {second.memory}")


def measure_steps(sides: tuple[Turns, Turns], clocks: Clocks, bound: RooflineBound, sizes: Sizes) -> None:
    max_tokens = (sizes.steps + 1) * (sizes.rounds + 1) + 64
    for rows in sizes.rows:
        for side in sides:
            side.ask("begin", rows, sizes.prompt, max_tokens)
        clocks.take()
        plain_ms, coded_ms = pairs(sides, lambda side, _: side.ask("steps", sizes.steps), sizes.rounds)
        say(f"{rows} rows at {clocks.take()}")
        for side in sides:
            side.ask("end")
        keys = rows * (sizes.prompt + sizes.steps * sizes.rounds / 2)
        for side, ms, peer in ((sides[0], plain_ms, PLAIN), (sides[1], coded_ms, None)):
            _row(f"lossless-{rows} step", ms, "ms", step_ms(bound, _part(side), rows, keys), peer)
        _row(f"lossless-{rows}", plain_ms / coded_ms, "x", STEP_BARS.get(rows, 1 / SLOWER_MOST))


def measure_prompts(sides: tuple[Turns, Turns], clocks: Clocks, bound: RooflineBound, sizes: Sizes) -> None:
    for tokens in sizes.tokens:
        plain_ms, coded_ms = pairs(sides, partial(first_token_ms, tokens), sizes.rounds)
        say(f"{tokens} tokens at {clocks.take()}")
        for side, ms, peer in ((sides[0], plain_ms, PLAIN), (sides[1], coded_ms, None)):
            least_ms = max(bound.prompt_ms(tokens), 1e3 * bound.weights_bytes * _part(side) / BYTES_PER_S)
            _row(f"lossless-ttft-{tokens} time", ms, "ms", least_ms, peer)
        _row(f"lossless-ttft-{tokens}", coded_ms / plain_ms, "ratio", SLOWER_MOST)


def step_ms(bound: RooflineBound, part: float, rows: int, keys: float) -> float:
    """The least that a step takes whose weights are this part of bf16's bytes: a weight has a FLOP per byte of bf16 and
    row, however it is stored."""
    linear_s = max(bound.weights_bytes * part / BYTES_PER_S, rows * bound.weights_bytes / FLOP_PER_S)
    return 1e3 * (linear_s + keys * bound.kv_token_bytes / BYTES_PER_S)


def _part(side: Turns) -> float:
    memory = side.memory
    return memory.weights_bytes / (memory.bf16_bytes or memory.weights_bytes)


# Wakes


def served(plain: Path, coded: Path) -> standby.Models:
    """Both models, and one that takes the room of both: after it either wakes into free memory."""
    names = [f"@cf/bench/{name}" for name in ("bf16", "bf12", "large")]
    settings = f"[machine]\ndevice_bytes = {44 * _GIB}\nmemory_bytes = {3 * 17 * _GIB}\n"
    for name, folder, context in zip(names, (plain, coded, plain), (8192, 8192, 131072), strict=True):
        settings += f'\n[[models]]\nname = "{name}"\nfolder = "{folder}"\ncontext_tokens = {context}\n'
        settings += "price = { input = 0.0, output = 0.0 }\n"
    settings += f'\n[[models]]\nname = "{BUILT_IN}"\nserve = false\n'
    return standby.Models(names, settings, json.loads((plain / "config.json").read_text())["vocab_size"], len(names))


def measure_wakes(running: standby.Hearth, rounds: int) -> None:
    """The first of each kind, which may still compile, is left out."""
    plain, coded, large = running.models.names
    for name in (large, plain, coded):  # what a model takes is a guess until it has run: more of them may be awake
        _wake(running, name, None)
    took: dict[str, list[float]] = {plain: [], coded: []}
    for number in range(2 * rounds + 2):
        other, measured = (plain, coded) if number % 2 else (coded, plain)
        _wake(running, large, {large})
        _wake(running, other, {other})
        took[measured].append(_wake(running, measured, {other, measured}))
        say(f"{measured}: {took[measured][-1]:.3f} s")
    bytes_ = {name: one.weights_bytes for name, one in running.replicas().items()}
    plain_s, coded_s = (statistics.median(took[name][1:]) for name in (plain, coded))
    _row("lossless-wake time", plain_s, "s", bytes_[plain] / standby.COPY_BYTES_S, PLAIN)
    _row("lossless-wake time", coded_s, "s", bytes_[coded] / standby.COPY_BYTES_S)
    _row("lossless-wake", coded_s / plain_s, "ratio", WAKE_MOST)


def _wake(running: standby.Hearth, model: str, awake: set[str] | None) -> float:
    """The time to its first token; afterwards it is awake, and just these are if they are told."""
    answered = running.once(model, running.prompt(standby.PROMPT_TOKENS))
    expected = {model} if awake is None else awake
    running.await_places(
        lambda seen: all(
            (one.residency == "DEVICE") is (name in expected)
            for name, one in seen.items()
            if awake is not None or name in expected
        ),
        _MOVED_S,
        f"{' and '.join(sorted(expected))} are awake",
    )
    time.sleep(0.3)
    return answered.first_s


# All


def write_plain(folder: Path, small: bool) -> Path:
    if not small:
        return standby.write_model(folder)
    if not (folder / "model.safetensors.index.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(SMALL_GEOMETRY))
        standby.make_weights(folder, "cpu", 2)
    return folder


def _row(shape: str, value: float, unit: str, bound: float | None, peer: str | None = None) -> None:
    record("lossless", shape, round(value, 4), unit, bound=None if bound is None else round(bound, 4), peer=peer)


def say(words: str) -> None:
    print(words, flush=True)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.bf12.lossless", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--part", choices=PARTS, action="append", help="one part; may be given again (default: all)")
    parser.add_argument("--small", action="store_true", help="a model of a megabyte, to try the machinery")
    parser.add_argument("--folder", type=Path, help="where the weights lie (default: in the folder of temporary files)")
    options = parser.parse_args(arguments)
    parts = options.part or [part for part in PARTS if part != "wake" or options.device == "cuda"]
    if "wake" in parts and options.device == "cpu":
        parser.error("wakes are measured on a GPU: `python -m benchmarks.engine.standby --device cpu` has a CPU's")
    if options.device == "cuda":
        import torch  # noqa: F401  rows name the GPU where it is imported
    sizes = SMALL if options.small else Sizes()
    default = Path(tempfile.gettempdir()) / f"hearth-{'small' if options.small else standby.GEOMETRY}"
    plain = write_plain(options.folder or default, options.small)
    coded = plain.with_name(f"{plain.name}-bf12")
    if "files" in parts or not coded.exists():
        measure_files(plain, coded, options.device)
    bound = RooflineBound.of(read_decoder_config(plain))
    if {"steps", "prompts"} & set(parts):
        with engines(plain, coded, options.device, sizes) as (first, second, clocks):
            measure_memory(first, second)
            if "steps" in parts:
                measure_steps((first, second), clocks, bound, sizes)
            if "prompts" in parts:
                measure_prompts((first, second), clocks, bound, sizes)
    if "wake" in parts:
        with standby.hearth(served(plain, coded), options.device) as running:
            measure_wakes(running, _ROUNDS_OF_WAKES)


if __name__ == "__main__":
    main(sys.argv[1:])
