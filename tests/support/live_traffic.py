"""Calls that never stop while models come and go under them: streams and a closed loop of short calls, over HTTP, each
held against what it must be: whole, with usage, and never refused a connection.
"""

import asyncio
import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.waiting import holds

STREAMS = 16
STREAM_TOKENS, SHORT_TOKENS = 96, 2
PAUSE_S = 1.0  # between two calls of a client: a quick machine would come to the requests that a minute may have


@dataclass
class Traffic:
    """What clients saw. `cut` has each answer that did not end as it must, in words; `micro_neurons` is what all
    answers said that they cost. Calls of `guests` may find no such model, those of `steady` never."""

    base_url: str
    token: str
    steady: str
    guests: tuple[str, ...]
    refused: int = 0
    cut: list[str] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    micro_neurons: int = 0
    _stopping: bool = False

    async def run(self) -> None:
        """Until stopped; then what runs ends."""
        limits = httpx.Limits(max_keepalive_connections=0)  # each call opens a connection, which may be refused
        headers = {"Authorization": f"Bearer {self.token}"}
        async with (
            httpx.AsyncClient(base_url=self.base_url, headers=headers, timeout=120, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            for number in range(STREAMS):
                model = self.guests[number // 2 % len(self.guests)] if number % 2 else self.steady
                group.create_task(self._repeat(client, model, stream=True))
            group.create_task(self._repeat(client, self.steady, stream=False))

    def stop(self) -> None:
        self._stopping = True

    async def _repeat(self, client: httpx.AsyncClient, model: str, *, stream: bool) -> None:
        while not self._stopping:
            try:
                await self._call(client, model, stream)
            except httpx.ConnectError:
                self.refused += 1
            except httpx.TransportError as error:
                self.cut.append(f"{model}: {error!r}")
            await holds(lambda: True, PAUSE_S)

    async def _call(self, client: httpx.AsyncClient, model: str, stream: bool) -> None:
        body = {"prompt": "Tell me.", "stream": stream, "max_tokens": STREAM_TOKENS if stream else SHORT_TOKENS}
        async with client.stream("POST", f"/ai/run/{model}", json=body) as answer:
            text = (await answer.aread()).decode()
        if answer.status_code == 400 and model != self.steady and "No such model" in text:
            self.ended["no such model"] += 1
        elif answer.status_code != 200:
            self.cut.append(f"{model}: {answer.status_code} {text[:300]}")
        else:
            self._take_usage(model, text, stream)

    def _take_usage(self, model: str, text: str, stream: bool) -> None:
        try:
            usage = _usage_of_stream(text) if stream else json.loads(text)["result"]["usage"]
        except (ValueError, KeyError, IndexError) as error:
            self.cut.append(f"{model}: {error!r} in {text[-300:]}")
            return
        self.ended[model] += 1
        self.micro_neurons += round(usage["neurons"] * 1e6)


def _usage_of_stream(text: str) -> dict[str, Any]:
    """Raises ValueError or KeyError where the stream did not end as one ends."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if events[-1:] != ["[DONE]"]:
        raise ValueError("it has no end")
    usage: dict[str, Any] = json.loads(events[-2])["usage"]
    return usage


@contextlib.contextmanager
def traffic(base_url: str, token: str, steady: str, *guests: str) -> Iterator[Traffic]:
    """Calls from another thread until the end, where all have ended."""
    calls = Traffic(base_url, token, steady, guests)
    thread = threading.Thread(target=lambda: asyncio.run(calls.run()))
    thread.start()
    try:
        yield calls
    finally:
        calls.stop()
        thread.join()
