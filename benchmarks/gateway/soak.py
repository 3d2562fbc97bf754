"""A whole Hearth under a mixed load for half an hour: memory, descriptors and threads may not grow.

    python -m benchmarks.gateway.soak [--minutes 30] [--clients 6] [--seed N]

Whole and streamed answers of both dialects, clients that leave, refusals of every kind, new accounts and tokens, lists
and metrics, over a KV pool that is small enough to fill within minutes. Every ten seconds each process is measured;
growth is the slope of a line through the second half, when caches have filled, times the length of that half.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.record import record
from tests.end_to_end.conftest import EMBER, Hearth, serving

SAMPLE_S: Final = 10.0
WORDS: Final = ("the", "keeper", "of", "a", "lighthouse", "writes", "down", "each", "ship", "that", "passes", "by")
SETTINGS: Final = f'\n[[models]]\nname = "{EMBER}"\nkv_bytes = 30000000\n'


class Load:
    """Clients that keep asking; `answers` counts what they were told, by status."""

    def __init__(self, hearth: Hearth, seed: int) -> None:
        self._hearth = hearth
        self._dice = random.Random(seed)
        self._client = httpx.AsyncClient(base_url=hearth.base_url, timeout=60)
        self._tokens = [hearth.token]
        self.answers: dict[str, int] = {}

    async def run(self, until: float) -> None:
        kinds = [self._whole, self._stream, self._leave, self._refused, self._look]
        while time.monotonic() < until:
            kind = self._dice.choices(kinds, [5, 4, 2, 3, 1])[0]
            with contextlib.suppress(httpx.TransportError):
                self._count(await kind())

    def _count(self, answer: str) -> None:
        self.answers[answer] = self.answers.get(answer, 0) + 1

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._dice.choice(self._tokens)}"}

    def _body(self, **more: Any) -> dict[str, Any]:
        prompt = " ".join(self._dice.choices(WORDS, k=self._dice.randint(3, 120)))
        system = f"You are assistant number {self._dice.randint(1, 20)}. " + "Be brief. " * 10
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        return {"messages": messages, "max_tokens": self._dice.randint(1, 40), **more}

    async def _whole(self) -> str:
        if self._dice.random() < 0.5:
            answer = await self._client.post(f"/ai/run/{EMBER}", json=self._body(), headers=self._headers())
        else:
            body = self._body(model=EMBER, user=f"u{self._dice.randint(1, 1000)}")
            answer = await self._client.post("/v1/chat/completions", json=body, headers=self._headers())
        return str(answer.status_code)

    async def _stream(self, leaves_after: int | None = None) -> str:
        body, headers = self._body(stream=True), self._headers()
        async with self._client.stream("POST", f"/ai/run/{EMBER}", json=body, headers=headers) as answer:
            count = 0
            async for _ in answer.aiter_lines():
                count += 1
                if count == leaves_after:
                    return "left"
        return f"stream {answer.status_code}"

    async def _leave(self) -> str:
        return await self._stream(self._dice.randint(1, 12))

    async def _refused(self) -> str:
        path, good = f"/ai/run/{EMBER}", self._headers()
        case = self._dice.randrange(5)
        if case == 0:
            answer = await self._client.post(path, json=self._body(), headers={"Authorization": "Bearer nobody"})
        elif case == 1:
            answer = await self._client.post(path, content=b'{"prompt": ' + b"[" * 90, headers=good)
        elif case == 2:
            answer = await self._client.post("/ai/run/@cf/no/model", json=self._body(), headers=good)
        elif case == 3:
            answer = await self._client.post(path, json={"prompt": "word " * 9_000}, headers=good)
        else:
            answer = await self._client.get(f"/made/up/{self._dice.randrange(10**9)}", headers=good)
        return str(answer.status_code)

    async def _look(self) -> str:
        path = self._dice.choice(["/metrics", "/readyz", "/v1/models", "/client/v4/user/tokens/verify"])
        return str((await self._client.get(path, headers=self._headers())).status_code)

    async def change(self, until: float) -> None:
        """Now and then a new account whose token replaces another, so that none is believed for good."""
        while time.monotonic() < until:
            await asyncio.sleep(15)
            _, token = await asyncio.to_thread(self._hearth.account, f"a{self._dice.random()}")
            self._tokens = [*self._tokens[-4:], token]


def measured(hearth: Hearth) -> dict[str, tuple[float, int, int]]:
    """By process: memory of its own in MB, descriptors, threads."""
    usage = {}
    for process in hearth.processes():
        words = " ".join(process.cmdline())
        name = next((name for name in ("replica", "machine") if f"engine.{name}" in words), "gateway")
        memory = process.memory_full_info().uss / 1e6
        usage[name] = (memory, process.num_fds(), process.num_threads())
    return usage


async def run(minutes: float, clients: int, seed: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name, serving(Path(name), SETTINGS) as hearth:
        load, until = Load(hearth, seed), time.monotonic() + 60 * minutes
        samples: list[dict[str, tuple[float, int, int]]] = []
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(load.run(until))
            group.create_task(load.change(until - 15))
            while time.monotonic() < until - SAMPLE_S:
                await asyncio.sleep(SAMPLE_S)
                samples.append(measured(hearth))
                if len(samples) % 6 == 0:
                    print(f"{len(samples) * SAMPLE_S / 60:.0f} min", samples[-1], json.dumps(load.answers), flush=True)
        report(samples, minutes, sum(load.answers.values()))


def report(samples: list[dict[str, tuple[float, int, int]]], minutes: float, requests: int) -> None:
    half = samples[len(samples) // 2 :]
    record("soak", f"{minutes:g} minutes: requests", requests, "requests")
    for name in samples[0]:
        for column, (what, unit) in enumerate((("memory", "MB"), ("descriptors", ""), ("threads", ""))):
            values = [float(sample[name][column]) for sample in half if name in sample]
            slope = statistics.linear_regression(range(len(values)), values).slope
            shape = f"{minutes:g} minutes: {name}'s {what} growing in the second half"
            record("soak", shape, round(slope * len(values), 2), unit or what, bound=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    asyncio.run(run(options.minutes, options.clients, options.seed))


if __name__ == "__main__":
    main()
