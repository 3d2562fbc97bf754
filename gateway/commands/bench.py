"""`hearth bench`: a closed loop of streaming chats against a running server; times to first token, gaps, tokens/s.

It is a client like any other: it knows the public API and nothing of the server's inside.
"""

import argparse
import asyncio
import json
import ssl
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from gateway.catalogue import BUILT_IN
from gateway.commands.words import add_command, fail, print_json, read_settings
from gateway.state import read_credentials

_TEACHING = """\
examples:
  hearth bench                                         the local server, with the credentials of its first start
  hearth bench --streams 32 --requests 200 --max-tokens 128
  hearth bench --shared 1500 --json                    behind one system prompt of about 1,500 words
  hearth bench --base-url https://hearth.example --account ACCOUNT --token TOKEN --model @hf/Qwen/Qwen3-0.6B

Each of --streams clients sends its next request when its last one ended. Reported are the time to the first token,
the gap between events, output tokens per second over all streams, and the prompt tokens that came from the cache.
Exit status 1 where a request failed.
"""
_WORDS = ("harbour", "lantern", "copper", "meadow", "winter", "violin", "granite", "orchard", "signal", "paper")


class Target(NamedTuple):
    """Where and as whom."""

    base_url: str
    account: str
    token: str
    model: str


@dataclass(slots=True)
class Measured:
    """What all requests together showed. Times in milliseconds."""

    first_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    completion_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def report(self) -> dict[str, Any]:
        return {
            "requests": len(self.first_ms) + len(self.failures),
            "failed": len(self.failures),
            "seconds": round(self.seconds, 3),
            "first_token_ms": _percentiles(self.first_ms),
            "gap_ms": _percentiles(self.gaps_ms),
            "output_tokens_per_s": round(self.completion_tokens / self.seconds, 1) if self.seconds else 0.0,
            "requests_per_s": round(len(self.first_ms) / self.seconds, 2) if self.seconds else 0.0,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
        }


def add(commands: Any) -> None:
    parser = add_command(commands, "bench", "measure a running server", _TEACHING)
    parser.add_argument("--base-url", help="default: the one of .hearth/credentials.json, as --account and --token")
    parser.add_argument("--account", help="account id")
    parser.add_argument("--token", help="ApiToken")
    parser.add_argument("--model", default=BUILT_IN, help=f"default: {BUILT_IN}")
    parser.add_argument("--streams", type=_count, default=8, help="requests at once (default: 8)")
    parser.add_argument("--requests", type=_count, default=64, help="requests in all (default: 64)")
    parser.add_argument("--max-tokens", type=_count, default=64, help="of each answer (default: 64)")
    parser.add_argument("--words", type=_count, default=40, help="length of each question (default: 40)")
    parser.add_argument("--shared", type=int, default=0, help="length of a shared system prompt in words (default: 0)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    known = read_credentials(read_settings(options))
    target = Target(
        options.base_url or (known.base_url if known else ""),
        options.account or (known.account_id if known else ""),
        options.token or (known.token if known else ""),
        options.model,
    )
    if not all(target):
        return fail("there are no credentials here: start `hearth serve`, or say --base-url, --account and --token")
    measured = asyncio.run(measure(target, options))
    report = measured.report()
    if options.json:
        print_json(report)
    else:
        _print(report)
    for failure in sorted(set(measured.failures))[:5]:
        fail(f"{measured.failures.count(failure)} requests failed: {failure}")
    return int(bool(measured.failures))


async def measure(target: Target, options: argparse.Namespace) -> Measured:
    measured = Measured()
    left = iter(range(options.requests))
    began = time.perf_counter()

    async def client() -> None:
        for number in left:
            try:
                await _request(target, _body(number, options), measured)
            except (OSError, EOFError, ValueError) as error:
                measured.failures.append(str(error) or type(error).__name__)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(options.streams, options.requests)):
            group.create_task(client())
    measured.seconds = time.perf_counter() - began
    return measured


def _body(number: int, options: argparse.Namespace) -> bytes:
    """Every question differs from its first word on; the system prompt is the same for all."""
    question = [f"Note {number}:", *(_WORDS[(number * 7 + index * 3) % len(_WORDS)] for index in range(options.words))]
    messages = [{"role": "user", "content": " ".join(question)}]
    if options.shared:
        system = " ".join(_WORDS[index * 3 % len(_WORDS)] for index in range(options.shared))
        messages.insert(0, {"role": "system", "content": system})
    return json.dumps({"messages": messages, "max_tokens": options.max_tokens, "stream": True}).encode()


async def _request(target: Target, body: bytes, measured: Measured) -> None:
    where = urlsplit(target.base_url)
    secure = ssl.create_default_context() if where.scheme == "https" else None
    port = where.port or (443 if secure else 80)
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(where.hostname, port, ssl=secure)
    try:
        path = f"{where.path.rstrip('/')}/client/v4/accounts/{target.account}/ai/run/{target.model}"
        head = (  # HTTP/1.0: the stream arrives as it is, without chunks
            f"POST {path} HTTP/1.0\r\nHost: {where.netloc}\r\nAuthorization: Bearer {target.token}\r\n"
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


async def _events(reader: asyncio.StreamReader, began: float, measured: Measured) -> None:
    last, first = began, True
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
            (measured.first_ms if first else measured.gaps_ms).append((now - last) * 1000)
            first, last = False, now
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


def _print(report: dict[str, Any]) -> None:
    for name, value in report.items():
        if isinstance(value, dict):
            value = "  ".join(f"{part} {number}" for part, number in value.items()) or "-"
        print(f"{name.replace('_', ' '):20} {value}")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)
