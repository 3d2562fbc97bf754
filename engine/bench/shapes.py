"""The shapes that are measured, each with the least it can take, and what vLLM takes for it on the same machine."""

import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from engine.bench.breakdown import break_down
from engine.bench.geometries import RooflineBound
from engine.bench.session import BenchEngine, BenchSession
from engine.protocol.frames import FrameReader, Hello
from engine.protocol.specs import ModelSpec, ReplicaSpec
from engine.protocol.types import Grammar, GrammarKind

_GROUP_PROMPT: Final = 64  # own tokens of a request behind a shared prefix
_LONG_PROMPTS: Final = 6


@dataclass(frozen=True, slots=True)
class WorkloadSizes:
    """How much a shape takes; `scaled` makes it small enough for a test."""

    prompt: int = 512
    steps: int = 128
    repeats: int = 3
    scale: int = 1

    def scaled(self, count: int) -> int:
        return max(2, count // self.scale)


_SCHEMAS: Final = 32  # different ones in a grammar shape

_GRID_GROUPS: Final = ((1, 16), (1, 32), (1, 64), (1, 128), (1, 256), (4, 16), (4, 32), (4, 64), (8, 32), (16, 16))
_GRID_PREFIXES: Final = (1024, 4096, 16384)  # tokens

SMALL_SIZES: Final = WorkloadSizes(prompt=24, steps=4, repeats=1, scale=64)


@dataclass(frozen=True, slots=True)
class ShapeResult:
    """One measured shape; `bound` in the same unit."""

    shape: str
    value: float
    unit: str
    bound: float | None = None


MeasureShape = Callable[[BenchEngine, RooflineBound, WorkloadSizes], list[ShapeResult]]


@dataclass(frozen=True, slots=True)
class BenchShape:
    """`peer` is vLLM 0.24.0 on one H200 with Llama-3.1-8B's geometry, bf16, in the figure's unit. One that is not
    `among_all` has to be asked for by its name."""

    description: str
    measure: MeasureShape
    peer: float | None = None
    among_all: bool = True


def _prompt(engine: BenchEngine, length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(engine.vocabulary), k=length)


def _decode(count: int, engine: BenchEngine, bound: RooflineBound, sizes: WorkloadSizes) -> list[ShapeResult]:
    took = []
    for repeat in range(sizes.repeats):
        with BenchSession(engine, gap_ms=60_000) as session:
            for index in range(count):
                session.submit(_prompt(engine, sizes.prompt, repeat * count + index), sizes.steps * 4 + 64)
            session.run_until_all_stream()
            took.append(session.steps_ms(sizes.steps))
    keys = count * (sizes.prompt + sizes.steps / 2)
    return [ShapeResult(f"decode-{count}", statistics.median(took), "ms", bound.step_ms(count, keys))]


def grammar_source(items: int) -> str:
    """A schema of 4 KB whose text has at least so many items, each of a dozen objects."""
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
            "kind": {"enum": ["a", "bb", "ccc"]},
        },
        "required": ["name", "age", "tags", "kind"],
        "additionalProperties": False,
    }
    fields = {f"field_{number}": person for number in range(12)}
    item = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return json.dumps({"type": "array", "items": item, "minItems": items})


def _grammar(count: int, engine: BenchEngine, bound: RooflineBound, sizes: WorkloadSizes) -> list[ShapeResult]:
    """What masks cost a token: the same sampled steps with a grammar in every row, one of 32, and without."""
    source = grammar_source(100_000)
    schemas = [
        Grammar(GrammarKind.JSON_SCHEMA, source.replace("field_", f"field_{index}_")) for index in range(_SCHEMAS)
    ]
    sequences = sizes.scaled(count)
    took_ms: dict[bool, list[float]] = {True: [], False: []}
    per_step: dict[bool, list[float]] = {True: [], False: []}  # tokens of a sequence; forced ones make it more than one
    with contextlib.closing(engine.grammars()) as grammars:
        for masked in (True, False) * sizes.repeats:
            with BenchSession(engine, gap_ms=60_000, grammars=grammars) as session:
                for index in range(sequences):
                    schema = index % _SCHEMAS
                    session.submit(
                        _prompt(engine, sizes.prompt, index), sizes.steps * 4 + 64, temperature=1.0,
                        grammar=schemas[schema] if masked else None, account=schema.to_bytes(16, "big"),
                    )  # fmt: skip
                session.run_until_all_stream()
                before = session.emitted
                took_ms[masked].append(session.steps_ms(sizes.steps))
                per_step[masked].append((session.emitted - before) / sizes.steps / sequences)
    on_ms, off_ms = statistics.median(took_ms[True]), statistics.median(took_ms[False])
    on_tokens, off_tokens = statistics.median(per_step[True]), statistics.median(per_step[False])
    name, least_ms = f"grammar-{count}", bound.step_ms(sequences, sequences * (sizes.prompt + sizes.steps / 2))
    results = [ShapeResult(name, on_ms, "ms", least_ms), ShapeResult(f"{name} off", off_ms, "ms")]
    results.append(ShapeResult(f"{name}-tokens", on_tokens, "tokens a step"))
    return [*results, ShapeResult(f"{name}-cost", 100 * (on_ms / on_tokens / (off_ms / off_tokens) - 1), "%")]


def _grouped_ms(
    engine: BenchEngine, sizes: WorkloadSizes, count: int, prefix: int, groups: int, grouped: bool, repeats: int
) -> float:
    took = []
    for repeat in range(repeats):
        with BenchSession(engine, gap_ms=60_000, grouped=grouped) as session:
            prefixes = [_prompt(engine, prefix, 1000 + repeat * groups + group) for group in range(groups)]
            for group, tokens in enumerate(prefixes):
                session.submit([*tokens, 1], 1, scope=group)
            session.run()
            for index in range(count):
                own = _prompt(engine, _GROUP_PROMPT, 2000 + index)
                session.submit([*prefixes[index % groups], *own], sizes.steps * 4 + 64, scope=index % groups)
            session.run_until_all_stream()
            took.append(session.steps_ms(sizes.steps))
    return statistics.median(took)


def _prefix(
    name: str, count: int, prefix: int, engine: BenchEngine, bound: RooflineBound, sizes: WorkloadSizes,
    groups: int = 1, versus_ungrouped: bool = False,
) -> list[ShapeResult]:  # fmt: skip
    members, length = sizes.scaled(count), prefix // sizes.scale
    on_ms = _grouped_ms(engine, sizes, members, length, groups, True, sizes.repeats)
    own = members * (_GROUP_PROMPT + sizes.steps / 2)
    figures = [ShapeResult(name, on_ms, "ms", bound.step_ms(members, groups * length + own, members * length + own))]
    if versus_ungrouped:
        off_ms = _grouped_ms(engine, sizes, members, length, groups, False, 1)
        figures += [
            ShapeResult(f"{name} groups off", off_ms, "ms"),
            ShapeResult(f"{name} gain", off_ms / on_ms, "x"),
        ]
    return figures


def _prefix_grid(engine: BenchEngine, bound: RooflineBound, sizes: WorkloadSizes) -> list[ShapeResult]:
    """Steps of groups of 16 to 256 behind prefixes of several lengths, and the worst of them by its bound."""
    figures, short = [], replace(sizes, steps=max(1, sizes.steps // 4))
    for length in _GRID_PREFIXES:
        for groups, size in _GRID_GROUPS:
            name = f"prefix-grid {groups} x {size} behind {length}"
            figures += _prefix(name, groups * size, length, engine, bound, replace(short, repeats=1), groups)
    worst = max(figure.value / figure.bound for figure in figures if figure.bound)
    return [*figures, ShapeResult("prefix-grid", worst, "x")]


def _throughput(
    engine: BenchEngine, sizes: WorkloadSizes, prompts: list[list[int]], outputs: list[int], temperature: float
) -> float:
    with BenchSession(engine, gap_ms=100) as session:
        for tokens, output in zip(prompts, outputs, strict=True):
            session.submit(tokens, output, temperature=temperature)
        return sum(outputs) / session.run()


def _mixed(engine: BenchEngine, bound: RooflineBound, sizes: WorkloadSizes) -> list[ShapeResult]:
    rates = []
    for seed in (1, 2):
        draw, count = random.Random(seed), sizes.scaled(512)
        lengths = [(draw.randint(100, 1024), draw.randint(100, 1024)) for _ in range(count)]
        prompts = [_prompt(engine, length // sizes.scale + 1, index) for index, (length, _) in enumerate(lengths)]
        outputs = [output // sizes.scale + 1 for _, output in lengths]
        rates.append(_throughput(engine, sizes, prompts, outputs, 0.0))
    best = bound.throughput([(len(tokens), output) for tokens, output in zip(prompts, outputs, strict=True)])
    return [ShapeResult("mixed-512", statistics.median(rates), "tok/s", best)]


def nano_vllm_requests(count: int) -> tuple[list[list[int]], list[int]]:
    """The requests of nano-vllm's benchmark: 256 have 142,827 tokens in and 133,966 out."""
    draw = random.Random(0)
    prompts = [[draw.randint(0, 10000) for _ in range(draw.randint(100, 1024))] for _ in range(count)]
    return prompts, [draw.randint(100, 1024) for _ in range(count)]


def _nano(engine: BenchEngine, bound: RooflineBound, sizes: WorkloadSizes) -> list[ShapeResult]:
    prompts, outputs = nano_vllm_requests(sizes.scaled(256))
    vocabulary = engine.vocabulary
    prompts = [[token % vocabulary for token in tokens[: len(tokens) // sizes.scale + 1]] for tokens in prompts]
    outputs = [output // sizes.scale + 1 for output in outputs]
    best = bound.throughput([(len(tokens), output) for tokens, output in zip(prompts, outputs, strict=True)])
    return [ShapeResult("nano-256", _throughput(engine, sizes, prompts, outputs, 0.6), "tok/s", best)]


def _first_token(length: int, engine: BenchEngine, bound: RooflineBound, sizes: WorkloadSizes) -> list[ShapeResult]:
    tokens, took = length // sizes.scale, []
    for repeat in range(sizes.repeats + 1):
        with BenchSession(engine) as session:
            stream = session.submit(_prompt(engine, tokens, repeat), 1)
            session.run()
            took.append(1e3 * (stream.token_s[0] - stream.submitted_s))
    return [ShapeResult(f"ttft-{length}", statistics.median(took[1:]), "ms", bound.prompt_ms(tokens))]


def _million(engine: BenchEngine, bound: RooflineBound, sizes: WorkloadSizes) -> list[ShapeResult]:
    """One sequence of a million tokens, once: its prompt, and a step behind it."""
    tokens = sizes.scaled(1_000_000) // sizes.scale
    with BenchSession(engine, gap_ms=60_000) as session:
        stream = session.submit(_prompt(engine, tokens, 0), sizes.steps * 2 + 16)
        session.run_until_all_stream()
        first_token_s = stream.token_s[0] - stream.submitted_s
        step_ms = session.steps_ms(sizes.steps)
    return [
        ShapeResult("million", first_token_s, "s", bound.prompt_ms(tokens) / 1e3),
        ShapeResult("million-decode", step_ms, "ms", bound.step_ms(1, tokens)),
    ]


def _gaps_under_prefill(engine: BenchEngine, bound: RooflineBound, sizes: WorkloadSizes) -> list[ShapeResult]:
    """32 streams decode while long prompts come one after another."""
    count = sizes.scaled(32)
    with BenchSession(engine) as session:
        for index in range(count):
            session.submit(_prompt(engine, sizes.prompt, index), 4096 // sizes.scale)
        session.run_until_all_stream()
        streams = list(session.streams.values())
        for _ in range(20 // sizes.scale + 1):
            session.turn()
        began = time.perf_counter()
        for number in range(_LONG_PROMPTS):
            long = session.submit(_prompt(engine, 8192 // sizes.scale, 100 + number), 1)
            while not long.over:
                session.turn()
        ended = time.perf_counter()
        gaps = [
            1e3 * (after - before)
            for stream in streams
            for before, after in zip(stream.token_s, stream.token_s[1:], strict=False)
            if began <= after <= ended
        ]
    return [ShapeResult("itl-p99-under-prefill", statistics.quantiles(gaps, n=100)[98], "ms")]


def _kv(engine: BenchEngine, bound: RooflineBound, sizes: WorkloadSizes) -> list[ShapeResult]:
    """What is left for KV beside weights, workspace and graphs, of all GPUs."""
    model = engine.model
    return [ShapeResult("kv", model.report.kv_bytes * model.devices / (1 << 30), "GiB")]


def _host(engine: BenchEngine, bound: RooflineBound, sizes: WorkloadSizes) -> list[ShapeResult]:
    """What the host does in a step of 64 and what the device waits in between: all but its waits for landings."""
    count = sizes.scaled(64)
    with BenchSession(engine, gap_ms=60_000) as session:
        for index in range(count):
            session.submit(_prompt(engine, sizes.prompt, index), sizes.steps * 4 + 64)
        session.run_until_all_stream()
        session.steps_ms(8)
        waited_before = session.waited_s
        step_ms = session.steps_ms(sizes.steps)
        waited_ms = 1e3 * (session.waited_s - waited_before) / (sizes.steps + 1)
        idle = break_down(session.turn, sizes.steps, bound, 0, None)[-1]
    return [
        ShapeResult("host", 1e3 * max(0.001, step_ms - waited_ms), "µs"),
        ShapeResult("idle", 100 * idle.share, "%"),
    ]


def measure_start(model: ModelSpec, device: str) -> ShapeResult:
    """From the start of a replica's process to its first frame, with kernels compiled before. No engine may be open:
    the replica takes the device for itself."""
    with tempfile.TemporaryDirectory() as folder:
        address, pulse = f"unix:{folder}/replica", f"{folder}/pulse"
        spec = ReplicaSpec(model=model, address=address, pulse=pulse, boot=1, device=device)
        took = []
        for _ in range(2):  # the first may still compile
            began = time.perf_counter()
            command = [sys.executable, "-m", "engine.replica.server", msgspec.json.encode(spec).decode()]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                _await_hello(Path(folder) / "replica", process)
                took.append(time.perf_counter() - began)
            finally:
                process.terminate()
                process.wait(30)
    return ShapeResult("start", took[-1], "s")


def _await_hello(path: Path, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        if path.exists():
            with socket.socket(socket.AF_UNIX) as peer:
                try:
                    peer.connect(os.fspath(path))
                except ConnectionRefusedError:
                    continue
                if any(isinstance(frame, Hello) for frame in FrameReader().feed(peer.recv(1 << 16))):
                    return
        time.sleep(0.01)
    raise RuntimeError(f"the replica ended with status {process.returncode} before it served")


START: Final = "start"
START_PEER_S: Final = 21.0
SHAPES: Final[dict[str, BenchShape]] = {
    **{
        f"decode-{count}": BenchShape(
            f"{count} sequences, 512 tokens in, 128 out: a step", partial(_decode, count), peer
        )
        for count, peer in ((1, 4.98), (8, 5.17), (32, 5.87), (64, 6.73), (100, None), (128, 8.67), (256, 13.67))
    },
    "prefix-64": BenchShape(
        "64 behind one cached prefix of 4,096: a step", partial(_prefix, "prefix-64", 64, 4096), 10.41
    ),
    "prefix-256": BenchShape("256 behind one cached prefix of 4,096", partial(_prefix, "prefix-256", 256, 4096), 29.34),
    "prefix-4x64": BenchShape(
        "four groups of 64, each behind 4,096", partial(_prefix, "prefix-4x64", 256, 4096, groups=4)
    ),
    "prefix-16k-128": BenchShape(
        "128 behind 16,384, with groups and without",
        partial(_prefix, "prefix-16k-128", 128, 16384, versus_ungrouped=True),
    ),
    "prefix-grid": BenchShape("groups of 16 to 256 behind 1,024 to 16,384: the worst ratio to a bound", _prefix_grid),
    "mixed-512": BenchShape("512 sequences, 100-1024 in and out, at once: output tokens", _mixed, 11325),
    "nano-256": BenchShape("nano-vllm's 256 requests, temperature 0.6: output tokens", _nano, 9614),
    **{
        f"ttft-{length}": BenchShape(f"one prompt of {length} to its first token", partial(_first_token, length), peer)
        for length, peer in ((1024, 35.0), (4096, 101.0), (8192, 210.0), (16000, 464.0))
    },
    "million": BenchShape(
        "one sequence of 1,000,000 tokens, with --context 1048576: its prompt, and a step", _million, among_all=False
    ),
    "itl-p99-under-prefill": BenchShape("gaps of 32 streams while prompts of 8,192 come", _gaps_under_prefill),
    "grammar-32": BenchShape("32 sampled sequences kept to 4 KB schemas: a step, its cost", partial(_grammar, 32)),
    "grammar-128": BenchShape("128 of them, four to a schema", partial(_grammar, 128)),
    "kv": BenchShape("what is left for KV on all GPUs", _kv, among_all=False),
    "host": BenchShape("64 sequences: the host's work in a step, and the share in which the device is idle", _host),
}
