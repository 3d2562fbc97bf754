"""Sends a load to a server and times what comes back. A client like any other: it knows the public API alone."""

import asyncio
import json
import multiprocessing
import ssl
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import uvloop

from gateway.bench.load import Workload

_PROCESSES_START_S: Final = 1.5


class Target(NamedTuple):
    """A server, and the account and token to use there."""

    base_url: str
    account: str
    token: str
    model: str


@dataclass(slots=True)
class LoadMeasurement:
    """The measurements of all requests together. Times in milliseconds, `began_s` and `ended_s` by time.monotonic()."""

    first_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    completion_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    failures: list[str] = field(default_factory=list)
    began_s: float = 0.0
    ended_s: float = 0.0

    @classmethod
    def together(cls, parts: "Sequence[LoadMeasurement]") -> "LoadMeasurement":
        return cls(
            first_ms=[value for part in parts for value in part.first_ms],
            gaps_ms=[value for part in parts for value in part.gaps_ms],
            completion_tokens=sum(part.completion_tokens for part in parts),
            prompt_tokens=sum(part.prompt_tokens for part in parts),
            cached_tokens=sum(part.cached_tokens for part in parts),
            failures=[failure for part in parts for failure in part.failures],
            began_s=min(part.began_s for part in parts),
            ended_s=max(part.ended_s for part in parts),
        )

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s

    def report(self) -> dict[str, Any]:
        def rate(count: int) -> float:
            return round(count / self.seconds, 2) if self.seconds else 0.0

        return {
            "requests": len(self.first_ms) + len(self.failures),
            "failed": len(self.failures),
            "seconds": round(self.seconds, 3),
            "first_token_ms": _percentiles(self.first_ms),
            "gap_ms": _percentiles(self.gaps_ms),
            "output_tokens_per_s": rate(self.completion_tokens),
            "tokens_per_s": rate(self.prompt_tokens + self.completion_tokens),
            "requests_per_s": rate(len(self.first_ms)),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
        }


async def measure_in_processes(target: Target, load: Workload, processes: int) -> LoadMeasurement:
    """Measures with so many processes, so that the load's clients do not wait for each other."""
    if processes == 1:
        return await measure_load(target, load)
    loop, begin_s = asyncio.get_running_loop(), time.monotonic() + _PROCESSES_START_S
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        shares = [
            loop.run_in_executor(pool, _share, target, load, index, processes, begin_s) for index in range(processes)
        ]
        return LoadMeasurement.together(await asyncio.gather(*shares))


def _share(target: Target, load: Workload, index: int, processes: int, begin_s: float) -> LoadMeasurement:
    return uvloop.run(measure_load(target, load, index, processes, begin_s))


async def measure_load(
    target: Target, load: Workload, index: int = 0, processes: int = 1, begin_s: float = 0.0
) -> LoadMeasurement:
    """Sends every `processes`th request of a load, from `index` on."""
    await asyncio.sleep(begin_s - time.monotonic())
    measured = LoadMeasurement(began_s=time.monotonic())
    numbers = range(index, load.requests, processes)

    async def ask(number: int) -> None:
        try:
            await send_request(target, load.body(number), measured)
        except (OSError, EOFError, ValueError) as error:
            measured.failures.append(str(error) or type(error).__name__)

    async def client(remaining: Iterator[int]) -> None:
        for number in remaining:
            await ask(number)

    async with asyncio.TaskGroup() as group:
        if load.rate is None:
            remaining = iter(numbers)
            for _ in range(min(len(range(index, load.streams, processes)), len(numbers))):
                group.create_task(client(remaining))
        else:
            arrivals = load.arrivals_s()
            for number in numbers:
                await asyncio.sleep(measured.began_s + arrivals[number] - time.monotonic())
                group.create_task(ask(number))
    measured.ended_s = time.monotonic()
    return measured


async def send_request(target: Target, body: bytes, measured: LoadMeasurement) -> None:
    """One streamed request. Raises OSError, EOFError or ValueError where it fails."""
    server = urlsplit(target.base_url)
    secure = ssl.create_default_context() if server.scheme == "https" else None
    port = server.port or (443 if secure else 80)
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(server.hostname, port, ssl=secure)
    try:
        path = f"{server.path.rstrip('/')}/client/v4/accounts/{target.account}/ai/run/{target.model}"
        head = (  # HTTP/1.0: the stream arrives as it is, without chunks
            f"POST {path} HTTP/1.0\r\nHost: {server.netloc}\r\nAuthorization: Bearer {target.token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        status = (await reader.readline()).decode().split(" ")[1:2]
        while (await reader.readline()).strip():
            pass
        if status != ["200"]:
            raise ValueError(f"HTTP {''.join(status)}: {_message(await reader.read())}")
        await _events(reader, began, measured)
    finally:
        writer.close()


async def _events(reader: asyncio.StreamReader, began: float, measured: LoadMeasurement) -> None:
    last, record = began, measured.first_ms.append
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue  # comments and blank lines
        event = line[6:].strip()
        if event == b"[DONE]":
            return
        now = time.perf_counter()
        document = json.loads(event)
        if document.get("errors"):
            raise ValueError(document["errors"][0].get("message", "an error in the stream"))
        if document.get("response"):
            record((now - last) * 1000)
            last, record = now, measured.gaps_ms.append
        if usage := document.get("usage"):
            measured.completion_tokens += usage["completion_tokens"]
            measured.prompt_tokens += usage["prompt_tokens"]
            measured.cached_tokens += usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    raise EOFError("the stream ended without [DONE]")


def _message(answer: bytes) -> str:
    start = answer.find(b"{")
    try:
        return str(json.loads(answer[start : answer.rfind(b"}") + 1])["errors"][0]["message"])
    except (ValueError, KeyError, IndexError):
        return answer[:200].decode("utf-8", "replace")


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        return {name: round(value, 2) for name in ("p50", "p95", "p99") for value in values[:1]}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": round(cuts[49], 2), "p95": round(cuts[94], 2), "p99": round(cuts[98], 2)}
