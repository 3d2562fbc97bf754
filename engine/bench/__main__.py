"""The command: opens an engine with random weights, measures the shapes that were asked for, prints and keeps rows."""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from tqdm import tqdm

from engine.bench.breakdown import break_down
from engine.bench.geometries import GEOMETRIES, MIXTURES, RooflineBound, write_folder
from engine.bench.session import BenchEngine, BenchSession
from engine.bench.shapes import SHAPES, SMALL_SIZES, START, START_PEER_S, ShapeResult, WorkloadSizes, measure_start
from engine.execution.open import inference_mode
from engine.models.config import read_decoder_config
from engine.protocol.specs import ModelSpec

_PEER_MODEL: Final = "llama-3.1-8b"
_TEACHING = """\
examples:
  python -m engine.bench --list
  python -m engine.bench --shapes decode-1,decode-64,ttft-1024
  python -m engine.bench --model qwen3-14b --json rows.json --plot decode.png
  python -m engine.bench --profile 1,64,256 --trace traces     a step's kernels, and Chrome traces
  python -m engine.bench --model tiny --small --device cpu     the machinery, in seconds
"""


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    if options.list:
        for name, shape in SHAPES.items():
            print(f"{name:24} {shape.description}")
        print(f"{START:24} a replica's process, from its start to its first frame")
        return 0
    if options.model not in GEOMETRIES and not Path(options.model).is_dir():
        sys.exit(f"no geometry {options.model}: {', '.join(GEOMETRIES)}, or a model folder")
    if options.folder:
        write_folder(options.model, Path(options.folder))
        return 0
    names = [] if options.profile and not options.shapes else _names(options.shapes)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, stream=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(options.model)
        if options.model in GEOMETRIES:
            place = write_folder(options.model, Path(folder) / options.model)
        model = ModelSpec(
            name=options.model, folder=str(place), random_weights=options.model in GEOMETRIES,
            context_tokens=options.context, kv_dtype=options.kv_dtype, sequences=options.sequences, gpus=options.gpus,
            stages=options.stages,
        )  # fmt: skip
        bound = RooflineBound.of(read_decoder_config(place))
        rows: list[dict[str, Any]] = []
        if START in names:
            names.remove(START)
            _keep(rows, measure_start(model, options.device), START_PEER_S, options)
        if names or options.profile:
            with inference_mode(), BenchEngine(model, options.device) as engine:
                engine.prepare()
                sizes = SMALL_SIZES if options.small else WorkloadSizes()
                for name in tqdm(names, desc="shapes", file=sys.stderr, disable=not sys.stderr.isatty()):
                    for figure in SHAPES[name].measure(engine, bound, sizes):
                        _keep(rows, figure, SHAPES[name].peer if figure.shape == name else None, options)
                for count in [int(count) for count in options.profile.split(",") if count]:
                    _profile(engine, bound, sizes, count, options.trace)
    if options.plot:
        _plot(rows, Path(options.plot))
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m engine.bench", description=__doc__, epilog=_TEACHING,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--model", default=_PEER_MODEL, help=f"{', '.join(GEOMETRIES)}, or a model folder")
    parser.add_argument("--shapes", default="", help="with commas, or all, which is the default")
    parser.add_argument("--list", action="store_true", help="what the shapes are")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--context", type=int, default=None, help="tokens (default: 20480, or the model's if less)")
    parser.add_argument("--kv-dtype", default="auto", choices=("auto", "fp8"))
    parser.add_argument("--gpus", type=int, default=1, help="that the model is cut for (default: 1)")
    parser.add_argument("--stages", type=int, default=1, help="that share out its layers, each of --gpus (default: 1)")
    parser.add_argument("--sequences", type=int, default=None, help="running at once (default: the engine's)")
    parser.add_argument("--small", action="store_true", help="shapes scaled down, to try the machinery")
    parser.add_argument("--json", help="file that the rows are added to, in place of older ones of the same shape")
    parser.add_argument("--plot", help="PNG of throughput against time per step, of the decode shapes")
    parser.add_argument("--profile", default="", help="batch sizes: where a decode step's time goes")
    parser.add_argument("--trace", help="folder for Chrome traces of --profile")
    parser.add_argument("--folder", help="write a model folder with the geometry's config.json there, and end")
    parser.add_argument("--verbose", action="store_true", help="the engine's log")
    options = parser.parse_args(arguments)
    if options.context is None:
        longest = GEOMETRIES.get(options.model, {}).get("max_position_embeddings", 20480)
        options.context = min(20480, longest)
    return options


def _names(shapes: str) -> list[str]:
    among_all = [START, *(name for name, shape in SHAPES.items() if shape.among_all)]
    names = among_all if shapes in ("", "all") else shapes.split(",")
    unknown = [name for name in names if name not in SHAPES and name != START]
    if unknown:
        sys.exit(f"no shape {', '.join(unknown)}; --list tells of those there are")
    return names


def _keep(rows: list[dict[str, Any]], figure: ShapeResult, peer: float | None, options: argparse.Namespace) -> None:
    joint = "-" if options.model in MIXTURES else " "
    shape = figure.shape if options.model == _PEER_MODEL else f"{options.model}{joint}{figure.shape}"
    row = {
        "shape": shape,
        "value": round(figure.value, 4),
        "unit": figure.unit,
        "bound": None if figure.bound is None else round(figure.bound, 4),
        "peer": peer if options.model == _PEER_MODEL else None,
        "hardware": _hardware(),
        "commit": _commit(),
        "command": "python -m engine.bench " + " ".join(sys.argv[1:]),
    }
    rows.append(row)
    beside = "" if figure.bound is None else f"  bound {figure.bound:9.2f}  ratio {figure.value / figure.bound:5.2f}"
    against = "" if row["peer"] is None else f"  vLLM {row['peer']:9.2f}"
    print(f"{shape:28} {figure.value:10.3f} {figure.unit:6}{beside}{against}", flush=True)
    if options.json:
        path = Path(options.json)
        rows_before = json.loads(path.read_text()) if path.exists() else []
        document = [other for other in rows_before if other["shape"] != shape] + [row]
        path.write_text(json.dumps(document, indent=1) + "\n")


def _hardware() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, {os.cpu_count()} CPU cores"
    return f"{os.cpu_count()} CPU cores"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    described = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return os.environ.get("HEARTH_COMMIT") or described.stdout.strip() or "unknown"


def _profile(engine: BenchEngine, bound: RooflineBound, sizes: WorkloadSizes, count: int, folder: str | None) -> None:
    trace = None
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        trace = Path(folder) / f"decode-{count}.json.gz"
    with BenchSession(engine, gap_ms=60_000) as session:
        for index in range(count):
            session.submit([index % 100 + 1] * sizes.prompt, 1024)
        session.run_until_all_stream()
        session.steps_ms(4)
        parts = break_down(session.turn, 8, bound, count * sizes.prompt, trace)
    print(
        f"\none decode step, batch {count}\n{'kernels':20} {'launches':>8} {'µs':>9} {'share':>6} {'GB':>7} {'TB/s':>5}"
    )
    for part in parts:
        moved = f"{part.bytes_ / 1e9:7.2f} {part.terabytes_per_s:5.2f}" if part.bytes_ else ""
        print(f"{part.kind:20} {part.launches:8.0f} {part.us:9.1f} {part.share:6.1%} {moved}")


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        sys.exit("a plot needs matplotlib: pip install 'hearth-server[bench]'")
    matplotlib.use("agg")
    from matplotlib import pyplot

    points = []
    for row in rows:
        name = row["shape"].rpartition(" ")[2]
        if name.startswith("decode-"):
            points.append((int(name.removeprefix("decode-")), row["value"], row["bound"], row["peer"]))
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for label, column in (("Hearth", 1), ("vLLM 0.24.0", 3), ("bound", 2)):
        line = [(point[column], 1e3 * point[0] / point[column], point[0]) for point in points if point[column]]
        if line:
            axes.plot([x for x, _, _ in line], [y for _, y, _ in line], marker="o", label=label)
            for x, y, count in line:
                axes.annotate(str(count), (x, y), textcoords="offset points", xytext=(4, -10), fontsize=8)
    axes.set_xlabel("time per step, ms")
    axes.set_ylabel("output tokens per second")
    axes.set_title("Decode, 512 tokens in: throughput against latency, by batch size")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
