"""`hearth bench`: measures a running server, one of its own with made-up weights, or the engine alone.

The engine is measured by a process of its own, `python -m engine.bench`: this package does not know what it computes.
"""

import asyncio
import json as json_codec
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from engine.protocol.reports import MEMORY_REPORT_SUFFIX
from gateway.bench.client import LoadMeasurement, Target, measure_in_processes
from gateway.bench.load import Workload
from gateway.bench.overhead import GatewayShare, ProcessCpu
from gateway.bench.server import NotServing, OwnServer, own_server
from gateway.catalogue.catalogue import BUILT_IN
from gateway.commands.terminal.options import Source, command_app
from gateway.commands.terminal.output import fail, print_either, print_json
from gateway.state_dir import Credentials, read_credentials

_TEACHING: Final = """\
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
_PEER_MODEL: Final = "llama-3.1-8b"
_REQUESTS_PER_STREAM: Final = 7.5  # 1,500 requests for 200 streams
_MIN_REQUESTS: Final = 40
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
_AT_LEAST_ONE: Final = Parameter(validator=Number(gte=1), metavar="N")
_LOAD: Final = Group("Load", sort_key=10)
_ENGINE: Final = Group("Servers and shapes", sort_key=11)
app = command_app("bench", "measure a server, or the engine", _TEACHING)


@Parameter(name="*", group=_LOAD)
@dataclass(frozen=True)
class LoadOptions:
    """The requests that a measurement sends."""

    streams: Annotated[int, _AT_LEAST_ONE, Parameter(help="requests at once (default: 8)")] = 8
    rate: Annotated[
        float | None,
        Parameter(validator=Number(gte=0.001), help="requests per second at random times, instead of streams"),
    ] = None
    requests: Annotated[int, _AT_LEAST_ONE, Parameter(help="requests in all (default: 64)")] = 64
    max_tokens: Annotated[int, _AT_LEAST_ONE, Parameter(help="of each answer (default: 64)")] = 64
    words: Annotated[int, _AT_LEAST_ONE, Parameter(help="length of each question (default: 40)")] = 40
    chats: Annotated[bool, Parameter(help="lengths as of chats: lognormal, 227 in and 188 out")] = False
    shared: Annotated[
        int, Parameter(validator=Number(gte=0), help="length of a shared system prompt in words (default: 0)")
    ] = 0
    seed: Annotated[int, Parameter(help="of words, lengths and times (default: 0)")] = 0
    processes: Annotated[int, _AT_LEAST_ONE, Parameter(help="that send the requests (default: 1)")] = 1

    @property
    def workload(self) -> Workload:
        return Workload(
            self.requests, self.streams, self.rate, self.words, self.max_tokens, self.chats, self.shared,
            seed=self.seed,
        )  # fmt: skip


@Parameter(name="*", group=_ENGINE)
@dataclass(frozen=True)
class EngineOptions:
    """What is measured without a server of somebody else."""

    serve: Annotated[
        str | None, Parameter(metavar="GEOMETRY", help="start a server with random weights for http shapes")
    ] = None
    shapes: Annotated[
        str | None, Parameter(help="with commas: those of --list, or http-N of a server: chats in N streams")
    ] = None
    list: Annotated[bool, Parameter(help="what the engine's shapes are")] = False
    device: Annotated[str | None, Parameter(help="with --serve and --shapes: auto, cpu or cuda (default: auto)")] = None
    plot: Annotated[
        str | None, Parameter(metavar="FILE", help="PNG of the decode shapes: throughput against latency")
    ] = None
    profile: Annotated[
        str | None, Parameter(metavar="SIZES", help="batch sizes whose decode step is broken down by kernel")
    ] = None
    trace: Annotated[str | None, Parameter(metavar="FOLDER", help="for Chrome traces of --profile")] = None


@app.default
def bench(
    *,
    base_url: Annotated[
        str, Parameter(help="default: the one of .hearth/credentials.json, as --account and --token")
    ] = "",
    account: Annotated[str, Parameter(help="account id")] = "",
    token: Annotated[str, Parameter(help="of the account")] = "",
    model: Annotated[str | None, Parameter(help=f"default: {BUILT_IN}; with --shapes a geometry")] = None,
    load: LoadOptions = LoadOptions(),
    engine: EngineOptions = EngineOptions(),
    json: Annotated[
        tuple[str, ...] | None,
        Parameter(consume_multiple=(0, 1), metavar="[FILE]", help="print JSON; with --shapes keep rows there"),
    ] = None,
    source: Source,
) -> int:
    """Measure a server, or the engine."""
    json_file = None if json is None else (*json, "-")[0]
    if engine.serve or (engine.shapes or "").startswith("http-"):
        return _run_own(load, engine, json_file)
    if engine.shapes or engine.profile or engine.list:
        return _run_engine(model, engine, json_file)
    credentials = read_credentials(source.load()) or Credentials("", "", "")
    target = Target(
        base_url or credentials.base_url, account or credentials.account_id, token or credentials.token,
        model or BUILT_IN,
    )  # fmt: skip
    if not all(target):
        return fail("there are no credentials here: start `hearth serve`, or say --base-url, --account and --token")
    measured, report = asyncio.run(measure_with_costs(target, load.workload, load.processes, None))
    print_either(json_file is not None, report, lambda: _print(report))
    return _report_failures(measured)


async def measure_with_costs(
    target: Target, load: Workload, processes: int, own: OwnServer | None
) -> tuple[LoadMeasurement, dict[str, Any]]:
    """Measures, and reports the cores that it took; for a server of its own also what the gateway adds."""
    cores = ProcessCpu(None if own is None else own.pid)
    share = GatewayShare(own.target.base_url) if own else None
    measured = await measure_in_processes(target, load, processes)
    report = {**measured.report(), "cores": cores.used()}
    added_ms = share.mean_ms() if share else None
    return measured, report if added_ms is None else {**report, "gateway_added_ms": round(added_ms, 2)}


def _run_engine(model: str | None, options: EngineOptions, json_file: str | None) -> int:
    values = {"model": model, "shapes": options.shapes, "device": options.device, "plot": options.plot}
    values |= {"profile": options.profile, "trace": options.trace, "json": json_file}
    words = [word for name, value in values.items() if value for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "engine.bench", *words, *(["--list"] if options.list else [])]
    return subprocess.run(command).returncode


def _run_own(load: LoadOptions, options: EngineOptions, json_file: str | None) -> int:
    """Starts a server for every load of `options.shapes`. Returns 1 where a request failed."""
    streams = [_HTTP.fullmatch(name) for name in (options.shapes or "http-200").split(",")]
    if not all(streams):
        return fail("the shapes of a server are http-N, such as http-200: chats in N streams")
    geometry, failed = options.serve or _PEER_MODEL, 0
    processes = max(load.processes, min(_PROCESSES, (os.cpu_count() or 1) // 2))
    try:
        with own_server(geometry, options.device or "auto") as own:
            asyncio.run(measure_with_costs(own.target, _chats(own, 4, _WARM_UP, -1), 1, None))
            hardware = _hardware(own)  # the replica is there now, and has said its device
            for count in [int(match[1]) for match in streams if match]:
                requests = max(_MIN_REQUESTS, round(count * _REQUESTS_PER_STREAM))
                workload = _chats(own, count, requests, load.seed)
                measured, report = asyncio.run(measure_with_costs(own.target, workload, processes, own))
                _keep(_rows(count, geometry, report, hardware), json_file)
                failed |= _report_failures(measured)
    except NotServing as error:
        return fail(str(error))
    return failed


def _chats(own: OwnServer, streams: int, requests: int, seed: int) -> Workload:
    return Workload(requests, streams, chats=True, vocabulary=own.vocabulary, seed=seed)


def _hardware(own: OwnServer) -> str:
    """The device that the replica reports."""
    cores = f"{os.cpu_count()} CPU cores"
    for path in Path(own.machine.removeprefix("unix:")).parent.rglob(f"*{MEMORY_REPORT_SUFFIX}"):
        return f"{json_codec.loads(path.read_text())['device']}, {cores}"
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
    is_peer = geometry == _PEER_MODEL
    return [
        {
            "shape": " ".join(part for part in ("" if is_peer else geometry, f"http-{streams}", figure) if part),
            "value": value,
            "unit": unit,
            "bound": _BOUNDS.get(streams) if is_peer and not figure else None,
            "peer": _PEERS.get(streams, {}).get(figure) if is_peer else None,
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
        peer = "" if row["peer"] is None else f"  vLLM {row['peer']:9.2f}"
        print(f"{row['shape']:32} {row['value']:10.2f} {row['unit']:10}{bound}{peer}", flush=True)
    if file == "-":
        print_json(rows)
    elif file:
        path, shapes = Path(file), {row["shape"] for row in rows}
        older = json_codec.loads(path.read_text()) if path.exists() else []
        rows = [row for row in older if row["shape"] not in shapes] + rows
        path.write_text(json_codec.dumps(rows, indent=1) + "\n")


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    described = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return os.environ.get("HEARTH_COMMIT") or described.stdout.strip() or "unknown"


def _report_failures(measured: LoadMeasurement) -> int:
    for failure in sorted(set(measured.failures))[:5]:
        fail(f"{measured.failures.count(failure)} requests failed: {failure}")
    return int(bool(measured.failures))


def _print(report: dict[str, Any]) -> None:
    for name, value in report.items():
        if isinstance(value, dict):
            value = "  ".join(f"{part} {number}" for part, number in value.items()) or "-"
        print(f"{name.replace('_', ' '):20} {value}")
