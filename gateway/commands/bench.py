"""`hearth bench`: a running server, one of its own with made-up weights, or the engine without a server.

The engine is measured by a process of its own, `python -m engine.bench`: this room does not know what it computes with.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from engine.protocol.reports import MEMORY_REPORT_SUFFIX
from gateway.bench.client import LoadMeasurement, Target, measure_in_processes
from gateway.bench.load import Workload
from gateway.bench.overhead import GatewayShare, ProcessCpu
from gateway.bench.server import NotServing, OwnServer, own_server
from gateway.catalogue.catalogue import BUILT_IN
from gateway.commands.output import add_command, fail, print_json, read_settings
from gateway.state_dir import read_credentials

_TEACHING = """\
examples:
  hearth bench                                            the local server, with the credentials of its first start
  hearth bench --streams 32 --requests 200 --max-tokens 128
  hearth bench --rate 20 --chats                          requests as they come, 20 a second, as long as chats are
  hearth bench --shared 1500 --json                       behind one system prompt of about 1,500 words
  hearth bench --base-url https://hearth.example --account ACCOUNT --token TOKEN --model @hf/Qwen/Qwen3-0.6B
  hearth bench --serve llama-3.1-8b --shapes http-200     a server with random weights, started and ended for it
  hearth bench --list                                     the engine's shapes, measured without a server
  hearth bench --shapes decode-1,decode-64 --plot decode.png --json rows.json
  hearth bench --profile 1,64,256 --trace traces          where the time of a decode step goes

Each of --streams clients sends its next request when its last one ended; with --rate requests come at random times
instead, whatever is still open. Reported are the time to the first token, the gap between events, tokens per second
over all streams, the prompt tokens that came from the cache, and the cores that a server on this host uses. Exit
status 1 where a request failed.
"""
_HTTP: Final = re.compile(r"http-([1-9][0-9]{0,4})")
_ENGINE_OPTIONS: Final = ("model", "shapes", "device", "plot", "profile", "trace", "json")
_PEER_MODEL: Final = "llama-3.1-8b"
_REQUESTS_PER_STREAM: Final = 7.5  # 1,500 requests for 200 streams
_REQUESTS_LEAST: Final = 40
_WARM_UP: Final = 8
_PROCESSES: Final = 4
# vLLM 0.24.0 on one H200 with the peer model's geometry, in bf16, by streams; and what arithmetic allows at best.
_PEERS: Final[dict[int, dict[str, float]]] = {
    200: {
        "": 52.4, "tokens": 21180, "first token p50": 490, "first token p95": 1090, "gap p50": 14.5,
        "gateway cores": 0.8, "replica cores": 1.03,
    },
    32: {
        "": 24.5, "tokens": 9030, "first token p50": 28, "first token p95": 47, "gap p50": 5.6, "gap p99": 17,
        "gateway cores": 0.4, "replica cores": 1.03,
    },
}  # fmt: skip
_BOUNDS: Final = {200: 107.0}


def add(commands: Any) -> None:
    parser = add_command(commands, "bench", "measure a server, or the engine", _TEACHING)
    parser.add_argument("--base-url", help="default: the one of .hearth/credentials.json, as --account and --token")
    parser.add_argument("--account", help="account id")
    parser.add_argument("--token", help="ApiToken")
    parser.add_argument("--model", help=f"default: {BUILT_IN}; with --shapes a geometry")
    parser.add_argument("--streams", type=_count, default=8, help="requests at once (default: 8)")
    parser.add_argument("--rate", type=float, help="requests per second at random times, instead of streams")
    parser.add_argument("--requests", type=_count, default=64, help="requests in all (default: 64)")
    parser.add_argument("--max-tokens", type=_count, default=64, help="of each answer (default: 64)")
    parser.add_argument("--words", type=_count, default=40, help="length of each question (default: 40)")
    parser.add_argument("--chats", action="store_true", help="lengths as of chats: lognormal, 227 in and 188 out")
    parser.add_argument("--shared", type=int, default=0, help="length of a shared system prompt in words (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="of words, lengths and times (default: 0)")
    parser.add_argument("--processes", type=_count, default=1, help="that send the requests (default: 1)")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="print JSON; with --shapes keep rows there"
    )
    parser.add_argument("--serve", metavar="GEOMETRY", help="start a server with random weights for http shapes")
    parser.add_argument("--shapes", help="with commas: those of --list, or http-N of a server: chats in N streams")
    parser.add_argument("--list", action="store_true", help="what the engine's shapes are")
    parser.add_argument("--device", help="with --serve and --shapes: auto, cpu or cuda (default: auto)")
    parser.add_argument("--plot", metavar="FILE", help="PNG of the decode shapes: throughput against latency")
    parser.add_argument("--profile", metavar="SIZES", help="batch sizes whose decode step is broken down by kernel")
    parser.add_argument("--trace", metavar="FOLDER", help="for Chrome traces of --profile")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.serve or (options.shapes or "").startswith("http-"):
        return _run_own(options)
    if options.shapes or options.profile or options.list:
        return _run_engine(options)
    known = read_credentials(read_settings(options))
    target = Target(
        options.base_url or (known.base_url if known else ""),
        options.account or (known.account_id if known else ""),
        options.token or (known.token if known else ""),
        options.model or BUILT_IN,
    )
    if not all(target):
        return fail("there are no credentials here: start `hearth serve`, or say --base-url, --account and --token")
    measured, report = asyncio.run(measure_beside(target, workload_of(options), options.processes, None))
    if options.json:
        print_json(report)
    else:
        _print(report)
    return _tell_failures(measured)


def workload_of(options: argparse.Namespace) -> Workload:
    return Workload(
        options.requests, options.streams, options.rate, options.words, options.max_tokens, options.chats,
        options.shared, seed=options.seed,
    )  # fmt: skip


async def measure_beside(
    target: Target, load: Workload, processes: int, own: OwnServer | None
) -> tuple[LoadMeasurement, dict[str, Any]]:
    """Measures, and reports the cores that it took as well; of a server of its own also what the gateway adds."""
    cores = ProcessCpu(None if own is None else own.pid)
    share = GatewayShare(own.target.base_url) if own else None
    measured = await measure_in_processes(target, load, processes)
    report = {**measured.report(), "cores": cores.used()}
    added_ms = share.mean_ms() if share else None
    return measured, report if added_ms is None else {**report, "gateway_added_ms": round(added_ms, 2)}


def _run_engine(options: argparse.Namespace) -> int:
    said = vars(options)
    words = [word for name in _ENGINE_OPTIONS if said[name] for word in (f"--{name}", said[name])]
    command = [sys.executable, "-m", "engine.bench", *words, *(["--list"] if options.list else [])]
    return subprocess.run(command).returncode


def _run_own(options: argparse.Namespace) -> int:
    streams = [_HTTP.fullmatch(name) for name in (options.shapes or "http-200").split(",")]
    if not all(streams):
        return fail("the shapes of a server are http-N, such as http-200: chats in N streams")
    geometry, failed = options.serve or _PEER_MODEL, 0
    processes = max(options.processes, min(_PROCESSES, (os.cpu_count() or 1) // 2))
    try:
        with own_server(geometry, options.device or "auto") as own:
            hardware = _hardware(own)
            asyncio.run(measure_beside(own.target, _chats(own, 4, _WARM_UP, -1), 1, None))
            for count in [int(match[1]) for match in streams if match]:
                requests = max(_REQUESTS_LEAST, round(count * _REQUESTS_PER_STREAM))
                load = _chats(own, count, requests, options.seed)
                measured, report = asyncio.run(measure_beside(own.target, load, processes, own))
                _keep(_rows(count, geometry, report, hardware), options.json)
                failed |= _tell_failures(measured)
    except NotServing as error:
        return fail(str(error))
    return failed


def _chats(own: OwnServer, streams: int, requests: int, seed: int) -> Workload:
    return Workload(requests, streams, chats=True, vocabulary=own.vocabulary, seed=seed)


def _hardware(own: OwnServer) -> str:
    """What the replica says that it runs on."""
    cores = f"{os.cpu_count()} CPU cores"
    for path in Path(own.machine.removeprefix("unix:")).parent.rglob(f"*{MEMORY_REPORT_SUFFIX}"):
        return f"{json.loads(path.read_text())['device']}, {cores}"
    return cores


def _rows(streams: int, geometry: str, report: dict[str, Any], hardware: str) -> list[dict[str, Any]]:
    first, gap, cores = report["first_token_ms"], report["gap_ms"], report["cores"]
    figures = {
        "": (report["requests_per_s"], "requests/s"),
        "tokens": (report["tokens_per_s"], "tok/s"),
        **{f"first token {part}": (value, "ms") for part, value in first.items()},
        **{f"gap {part}": (value, "ms") for part, value in gap.items() if part != "p95"},
        **{f"{kind} cores": (value, "cores") for kind, value in cores.items()},
    }
    if "gateway_added_ms" in report:
        figures["gateway added"] = (report["gateway_added_ms"], "ms")
    beside = geometry == _PEER_MODEL
    return [
        {
            "shape": " ".join(part for part in ("" if beside else geometry, f"http-{streams}", figure) if part),
            "value": value,
            "unit": unit,
            "bound": _BOUNDS.get(streams) if beside and not figure else None,
            "peer": _PEERS.get(streams, {}).get(figure) if beside else None,
            "hardware": hardware,
            "commit": _commit(),
            "command": "hearth " + " ".join(sys.argv[1:]),
        }
        for figure, (value, unit) in figures.items()
    ]


def _keep(rows: list[dict[str, Any]], file: str | None) -> None:
    """Prints rows; in a file they take the place of older ones of the same shape."""
    for row in rows:
        bound = "" if row["bound"] is None else f"  bound {row['bound']:9.2f}"
        against = "" if row["peer"] is None else f"  vLLM {row['peer']:9.2f}"
        print(f"{row['shape']:32} {row['value']:10.2f} {row['unit']:10}{bound}{against}", flush=True)
    if file == "-":
        print_json(rows)
    elif file:
        path, shapes = Path(file), {row["shape"] for row in rows}
        kept = json.loads(path.read_text()) if path.exists() else []
        kept = [other for other in kept if other["shape"] not in shapes] + rows
        path.write_text(json.dumps(kept, indent=1) + "\n")


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    asked = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return os.environ.get("HEARTH_COMMIT") or asked.stdout.strip() or "unknown"


def _tell_failures(measured: LoadMeasurement) -> int:
    for failure in sorted(set(measured.failures))[:5]:
        fail(f"{measured.failures.count(failure)} requests failed: {failure}")
    return int(bool(measured.failures))


def _print(report: dict[str, Any]) -> None:
    for name, value in report.items():
        if isinstance(value, dict):
            value = "  ".join(f"{part} {number}" for part, number in value.items()) or "-"
        print(f"{name.replace('_', ' '):20} {value}")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)
