"""The gateway's own cost: token events per second and core, time added to the first token; and LiteLLM's in front of
the same stub. Every part is a process of its own, on real sockets; a cost is the CPU time that the kernel counts.

    python -m benchmarks.gateway.overhead [--seconds 5] [--litellm /path/to/venv/bin/python]
"""

import argparse
import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
import uvloop

from benchmarks.record import record
from engine.protocol import frames
from engine.protocol.types import SamplingParams, Scope
from gateway.app import build_app
from gateway.http.server import HttpServer, listen
from gateway.settings.config import Config, ModelEntryConfig
from gateway.settings.machine import MachineConfig
from gateway.settings.server import ServerConfig
from tenants.auth.accounts import AccountService
from tenants.open import open_store
from tenants.records.limits import Limits
from tenants.store.settings import StoreConfig

ROOT: Final = Path(__file__).parents[2]
MODEL: Final = "@cf/test/stub"
SECRET: Final = bytes(range(32))
EVENTS_BOUND: Final = 25_000
FIRST_TOKEN_BOUND_MS: Final = 3.0
LITELLM_RATIO: Final = 12.0
LITELLM_KEY: Final = "sk-benchmark"
UNLIMITED: Final = Limits(requests_per_minute=6_000_000, neurons_per_day=1e9, concurrent_requests=1_000_000)
PROMPT: Final = "Which of the shops in the old town is open on a Sunday, and until when? " * 4


# ---- the processes ---------------------------------------------------------------------------------------------------


def config_for(folder: Path) -> Config:
    ember = ROOT / "engine" / "builtin_model"
    return Config(
        state_folder=str(folder / "state"),
        server=ServerConfig(port=0),
        store=StoreConfig(url=f"sqlite:{folder / 'hearth.db'}"),
        machine=MachineConfig(address=f"unix:{folder / 'machine.sock'}"),
        models=[ModelEntryConfig(name=MODEL, folder=str(ember))],
    )


def run_gateway(folder: Path) -> None:
    """The gateway as `hearth gateway` runs it; says its port."""
    config = config_for(folder)
    listener = listen("127.0.0.1", 0)
    print(listener.getsockname()[1], flush=True)
    HttpServer(build_app(config, SECRET), config.server).run([listener])


async def make_account(folder: Path) -> tuple[str, str]:
    """The account's id and its token."""
    store = open_store(f"sqlite:{folder / 'hearth.db'}")
    accounts = AccountService(store, SECRET)
    account = await accounts.create("benchmark", UNLIMITED)
    _, token = await accounts.mint(account.id, "benchmark")
    await store.close()
    return account.id, token


@contextlib.contextmanager
def process(
    arguments: list[str], *, ready_line: str | None = None, **options: Any
) -> Iterator[tuple[psutil.Process, str]]:
    """Starts one and waits for its first line of output. Ends it afterwards."""
    child = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True, **options)
    assert child.stdout is not None
    try:
        yield psutil.Process(child.pid), child.stdout.readline().strip() if ready_line is None else ready_line
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(15)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def stub(folder: Path, **behaviour: Any) -> contextlib.AbstractContextManager[tuple[psutil.Process, str]]:
    words = list(range(1000, 1064))
    options = json.dumps({"folder": str(folder), "model": MODEL, "words": words, **behaviour})
    path = [sys.executable, "-m", "tests.support.stub_replica", options]
    return process(path)


def gateway(folder: Path) -> contextlib.AbstractContextManager[tuple[psutil.Process, str]]:
    return process([sys.executable, "-m", "benchmarks.gateway.overhead", "--role", "gateway", "--folder", str(folder)])


def cpu_s(of: psutil.Process) -> float:
    """CPU seconds of a process and its children so far."""
    total = 0.0
    for one in [of, *of.children(recursive=True)]:
        times = one.cpu_times()
        total += times.user + times.system
    return total


# ---- the load --------------------------------------------------------------------------------------------------------


class Stream(asyncio.Protocol):
    """One connection that posts the same request again and again and counts the events of the answers."""

    def __init__(self, request: bytes, count: "Count") -> None:
        self._request = request
        self._count = count
        self._transport: asyncio.Transport | None = None
        self._asked_at = 0.0
        self._first = True
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._ask()

    def _ask(self) -> None:
        assert self._transport is not None
        self._asked_at, self._first = time.perf_counter(), True
        self._transport.write(self._request)

    def data_received(self, received: bytes) -> None:
        count = self._count
        count.events += received.count(b"data: ")
        if self._first and b"data: " in received:
            self._first = False
            count.first_s.append(time.perf_counter() - self._asked_at)
        end = self._tail + received
        if end.endswith(b"0\r\n\r\n") and b"[DONE]" in end[-40:]:
            count.requests += 1
            self._tail = b""
            self._ask()
        else:
            self._tail = end[-40:]

    def connection_lost(self, error: Exception | None) -> None:
        self._count.lost += 1

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


@dataclass
class Count:
    """What the streams of one load received so far."""

    events: int
    requests: int
    lost: int
    first_s: list[float]


@contextlib.asynccontextmanager
async def load(port: int, path: str, token: str, body: dict[str, Any], streams: int) -> AsyncIterator[Count]:
    """So many connections in a closed loop, until the block ends."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\ncontent-type: application/json\r\n"
    count = Count(0, 0, 0, [])
    loop = asyncio.get_running_loop()
    begun: list[Stream] = []
    for i in range(streams):
        content = msgspec.json.encode({**body, "max_tokens": spread(body["max_tokens"], i)})
        request = head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content
        _, connection = await loop.create_connection(functools.partial(Stream, request, count), "127.0.0.1", port)
        begun.append(connection)
    try:
        yield count
    finally:
        for connection in begun:
            connection.close()


def spread(max_tokens: int, i: int) -> int:
    """Lengths around `max_tokens` that differ, so that streams begin and end at all times and not all at once."""
    return max_tokens * (70 + i * 37 % 61) // 100


@dataclass(frozen=True)
class Measured:
    """Over one interval: events, requests and the gateway's CPU seconds."""

    events: int
    requests: int
    lost: int
    cpu_s: float
    wall_s: float
    first_s: list[float]

    @property
    def events_per_core(self) -> float:
        return self.events / self.cpu_s


async def measure(
    of: psutil.Process, port: int, path: str, token: str, body: dict[str, Any], streams: int, seconds: float
) -> Measured:
    async with load(port, path, token, body, streams) as count:
        await asyncio.sleep(min(2.0, seconds / 2))
        count.first_s.clear()
        events, requests, cpu, began = count.events, count.requests, cpu_s(of), time.perf_counter()
        await asyncio.sleep(seconds)
        return Measured(
            count.events - events,
            count.requests - requests,
            count.lost,
            cpu_s(of) - cpu,
            time.perf_counter() - began,
            list(count.first_s),
        )


# ---- what is measured ------------------------------------------------------------------------------------------------


def throughput(seconds: float, streams: int = 64) -> None:
    """Token events per second of the gateway's CPU time, with a replica at full speed. Both dialects."""
    for dialect in ("native", "openai"):
        for pace, behaviour in (("full speed", {}), ("50 steps/s", {"step_s": 0.02})):
            with tempfile.TemporaryDirectory(dir="/tmp") as name:
                folder = Path(name)
                account, token = asyncio.run(make_account(folder))
                with stub(folder, **behaviour), gateway(folder) as (server, port):
                    path, body = request(dialect, account, 512 if pace == "full speed" else 100)
                    ready(int(port))
                    pin(server)
                    measured = uvloop.run(measure(server, int(port), path, token, body, streams, seconds))
            assert not measured.lost, f"{measured.lost} connections were lost"
            shape = f"{dialect}, {streams} streams, {pace}: token events per CPU second"
            record("gateway", shape, measured.events_per_core, "events/s", bound=EVENTS_BOUND)
            share = measured.cpu_s / measured.wall_s
            print(
                f"    {measured.events / measured.wall_s:.0f} events/s, {measured.requests} requests, CPU {share:.2f}"
            )


class Direct(asyncio.Protocol):
    """Speaks frames to the stub itself, so many sequences at once: the time to first token without a gateway."""

    def __init__(self, streams: int, tokens: bytes, max_tokens: int) -> None:
        self._reader = frames.FrameReader()
        self._next, self._streams = 1, streams
        self._tokens, self._max_tokens = tokens, max_tokens
        self._asked_at: dict[int, float] = {}
        self._transport: asyncio.WriteTransport | None = None
        self.first_s: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, received: bytes) -> None:
        now = time.perf_counter()
        for frame in self._reader.feed(received):
            if isinstance(frame, frames.Hello):
                for _ in range(self._streams):
                    self._ask()
            elif isinstance(frame, frames.StepOutputs):
                for started in frame.started:
                    self.first_s.append(now - self._asked_at.pop(started.id))
                for _ in frame.finished:
                    self._ask()

    def _ask(self) -> None:
        assert self._transport is not None
        self._asked_at[self._next] = time.perf_counter()
        max_tokens = spread(self._max_tokens, self._next)
        frame = frames.Submit(self._next, self._tokens, Scope(), SamplingParams(), max_tokens, [1])
        self._transport.write(frames.encode_frame(frame))
        self._next += 1


async def direct(folder: Path, streams: int, max_tokens: int, seconds: float) -> list[float]:
    """Times to first token, in seconds, straight from the stub."""
    loop = asyncio.get_running_loop()
    tokens = array("I", range(100)).tobytes()
    path = str(folder / "replica-0.sock")
    transport, client = await loop.create_unix_connection(lambda: Direct(streams, tokens, max_tokens), path)
    await asyncio.sleep(min(2.0, seconds / 2))
    client.first_s.clear()
    await asyncio.sleep(seconds)
    transport.abort()
    return client.first_s


def first_token(seconds: float, streams: int = 64, rounds: int = 3) -> None:
    """What the gateway adds to the time to first token while so many streams run at 50 steps a second."""
    added: dict[str, list[float]] = {"p50": [], "p95": []}
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        account, token = asyncio.run(make_account(folder))
        with stub(folder, step_s=0.02), gateway(folder) as (server, port):
            path, body = request("native", account, 100)
            ready(int(port))
            for _ in range(rounds):
                without = uvloop.run(direct(folder, streams, 100, seconds))
                through = uvloop.run(measure(server, int(port), path, token, body, streams, seconds)).first_s
                added["p50"].append(quantile(through, 50) - quantile(without, 50))
                added["p95"].append(quantile(through, 95) - quantile(without, 95))
    for name, values in added.items():
        shape = f"native, {streams} streams, 50 steps/s: added to first token, {name}"
        record("gateway", shape, statistics.median(values) * 1000, "ms", bound=FIRST_TOKEN_BOUND_MS)


def quantile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


# ---- LiteLLM in front of the same stub -------------------------------------------------------------------------------


class OpenAIStub(asyncio.Protocol):
    """OpenAI's stream over HTTP, one event per token, as fast as the socket takes them."""

    BATCH = 16

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._received = b""
        self._left = 0
        self._paused = False
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._write()

    def data_received(self, received: bytes) -> None:
        self._received += received
        head, split, rest = self._received.partition(b"\r\n\r\n")
        if not split or self._transport is None:
            return
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        length = int(lengths[0].split(b":")[1]) if lengths else 0
        if len(rest) < length:
            return
        self._received = rest[length:]
        self._left = json.loads(rest[:length] or b"{}").get("max_tokens", 16)
        answer = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self._transport.write(answer + self._chunk({"role": "assistant", "content": ""}, None))
        self._write()

    def _write(self) -> None:
        transport = self._transport
        if transport is None or self._paused or not self._left:
            return
        for _ in range(min(self.BATCH, self._left)):
            transport.write(self._chunk({"content": " market"}, None))
            self._left -= 1
        if self._left:
            self._loop.call_soon(self._write)
        else:
            done = b"data: [DONE]\n\n"
            transport.write(self._chunk({}, "length") + b"%x\r\n%s\r\n0\r\n\r\n" % (len(done), done))

    def _chunk(self, delta: dict[str, str], finish: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        body = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "stub", "choices": [choice]}
        event = b"data: " + msgspec.json.encode(body) + b"\n\n"
        return b"%x\r\n%s\r\n" % (len(event), event)


async def run_openai_stub() -> None:
    server = await asyncio.get_running_loop().create_server(OpenAIStub, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def against_litellm(python: str, seconds: float, streams: int = 32, max_tokens: int = 128) -> None:
    """Token events per second of CPU time: ours and LiteLLM's, same dialect, same load, each replica at full speed."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        account, token = asyncio.run(make_account(folder))
        path, body = request("openai", account, max_tokens)
        with stub(folder), gateway(folder) as (server, port):
            ready(int(port))
            hearth = uvloop.run(measure(server, int(port), path, token, body, streams, seconds))
        with process([sys.executable, "-m", "benchmarks.gateway.overhead", "--role", "openai-stub"]) as (_, upstream):
            proxied = uvloop.run(litellm(python, folder, int(upstream), {**body, "model": "stub"}, streams, seconds))
    record("gateway", f"openai, {streams} streams, full speed", hearth.events_per_core, "events/s", bound=EVENTS_BOUND)
    peer = f"LiteLLM proxy {version(python)}"
    record("gateway", f"openai, {streams} streams, full speed", proxied.events_per_core, "events/s", peer=peer)
    ratio = hearth.events_per_core / proxied.events_per_core
    record("gateway", f"openai, {streams} streams, events per core, ratio", ratio, "×", bound=LITELLM_RATIO, peer=peer)


async def litellm(
    python: str, folder: Path, upstream: int, body: dict[str, Any], streams: int, seconds: float
) -> Measured:
    model = {"model": "openai/stub", "api_base": f"http://127.0.0.1:{upstream}/v1", "api_key": "x"}
    settings = folder / "litellm.json"  # JSON is YAML
    settings.write_text(json.dumps({"model_list": [{"model_name": "stub", "litellm_params": model}]}))
    port = free_port()
    run = "from litellm import run_server; run_server()"
    arguments = [python, "-c", run, "--config", str(settings), "--port", str(port), "--num_workers", "1"]
    environment = {
        **os.environ,
        "LITELLM_MASTER_KEY": LITELLM_KEY,
        "LITELLM_LOG": "ERROR",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    quiet = {"env": environment, "stderr": subprocess.DEVNULL}
    with process(arguments, ready_line="", **quiet) as (proxy, _):
        await asyncio.to_thread(ready, port, "/health/liveliness")
        return await measure(proxy, port, "/v1/chat/completions", LITELLM_KEY, body, streams, seconds)


def version(python: str) -> str:
    ask = "from importlib.metadata import version; print(version('litellm'))"
    return subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout.strip()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def request(dialect: str, account: str, max_tokens: int) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": PROMPT}]
    if dialect == "native":
        path = f"/client/v4/accounts/{account}/ai/run/{MODEL}"
        return path, {"messages": messages, "stream": True, "max_tokens": max_tokens}
    body = {"model": MODEL, "messages": messages, "stream": True, "max_tokens": max_tokens}
    return "/v1/chat/completions", body


def ready(port: int, path: str = "/readyz", seconds: float = 90.0) -> None:
    """Waits until it answers 200."""
    import urllib.request

    until = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        assert time.monotonic() < until, f"port {port} was not ready after {seconds} s"
        time.sleep(0.1)


def pin(server: psutil.Process) -> None:
    """The gateway alone on one core, where there is more than one; this process on the others."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) > 1:
        with contextlib.suppress(psutil.Error):
            server.cpu_affinity(cores[:1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one measurement")
    parser.add_argument("--litellm", metavar="PYTHON", help="the python of an environment with litellm[proxy]")
    parser.add_argument("--role", choices=["gateway", "openai-stub"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "gateway":
        run_gateway(options.folder)
    elif options.role == "openai-stub":
        uvloop.run(run_openai_stub())
    else:
        throughput(options.seconds) if not os.environ.get("X") else None
        first_token(options.seconds)
        if options.litellm:
            against_litellm(options.litellm, 2 * options.seconds)
