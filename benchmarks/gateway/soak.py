"""A whole Hearth under a mixed load for half an hour: memory, descriptors and threads may not grow.

    python -m benchmarks.gateway.soak [--minutes 30] [--clients 6] [--seed N]

Whole and streamed answers of both dialects, answers held to schemas, clients that leave, refusals of every kind, new
accounts and tokens, lists and metrics, over a KV pool that is small enough to fill within minutes. Every ten seconds
each process is measured; growth is the slope of a line through the second half, when caches have filled. It fails where
memory grows faster than 1 % an hour, or descriptors or threads by one.
"""

import argparse
import asyncio
import contextlib
import json
import operator
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.record import record
from tests.end_to_end.conftest import EMBER, Hearth, serving

SAMPLE_S: Final = 10.0
GROWTH_MAX_PERCENT: Final = 1.0  # of a process's memory, an hour
NAMES: Final = {  # by what a process's command line has
    "engine.replica.zygote": "zygote",  # the first, for its line has the replica's module too
    "engine.replica.server": "replica",
    "engine.structured_output.sandbox": "sandboxes",
    "engine.host.agent": "agent",
    "gateway.cli gateway": "gateway",
    "gateway.cli serve": "supervisor",
}
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
        kinds = [self._whole, self._stream, self._leave, self._refused, self._look, self._held]
        while time.monotonic() < until:
            kind = self._dice.choices(kinds, [5, 4, 2, 3, 1, 1])[0]
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

    async def _held(self) -> str:
        """An answer held to a schema that nobody asked for before, so that it is compiled."""
        name, messages = f"field{self._dice.randrange(10**9)}", [{"role": "user", "content": "Say something."}]
        schema = {"type": "object", "properties": {name: {"type": "boolean"}}, "required": [name]}
        held = {"type": "json_schema", "json_schema": schema}
        body = {"messages": messages, "response_format": held, "max_tokens": 40}
        answer = await self._client.post(f"/ai/run/{EMBER}", json=body, headers=self._headers())
        return f"held {answer.status_code}"

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
            await asyncio.sleep(5)
            _, token = await asyncio.to_thread(self._hearth.account, f"a{self._dice.random()}")
            self._tokens = [*self._tokens[-4:], token]


@dataclass(frozen=True, slots=True)
class Usage:
    """What the processes of one name hold: resident memory in MB, descriptors, threads."""

    memory: float
    descriptors: int
    threads: int


def measured(hearth: Hearth) -> dict[str, Usage]:
    usage = dict.fromkeys(NAMES.values(), Usage(0, 0, 0))
    for process in hearth.processes():
        line = " ".join(process.cmdline())
        name = next((name for part, name in NAMES.items() if part in line), None)
        assert name is not None, f"a process that has no name here: {line!r}"
        more = Usage(process.memory_info().rss / 1e6, process.num_fds(), process.num_threads())
        usage[name] = Usage(*map(operator.add, astuple(usage[name]), astuple(more)))
    return usage


async def run(minutes: float, clients: int, seed: int) -> list[str]:
    with tempfile.TemporaryDirectory(dir="/tmp") as name, serving(Path(name), SETTINGS) as hearth:
        load, until = Load(hearth, seed), time.monotonic() + 60 * minutes
        (replica,) = hearth.replicas()
        samples: list[dict[str, Usage]] = []
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(load.run(until))
            group.create_task(load.change(until - 15))
            while time.monotonic() < until - SAMPLE_S:
                await asyncio.sleep(SAMPLE_S)
                samples.append(measured(hearth))
                if len(samples) % 6 == 0:
                    print(f"{len(samples) * SAMPLE_S / 60:.0f} min", samples[-1], json.dumps(load.answers), flush=True)
        assert hearth.replicas() == [replica], "a replica that was started again has forgotten what it had grown"
        failed = {answer: count for answer, count in load.answers.items() if " 5" in f" {answer}"}
        assert not failed, f"answers that are the server's fault: {failed}"
        return report(samples, minutes, sum(load.answers.values()))


def report(samples: list[dict[str, Usage]], minutes: float, requests: int) -> list[str]:
    """Records the growth in the second half; what grew too fast."""
    record("soak", f"{minutes:g} minutes: requests", requests, "requests")
    half, hours, too_fast = samples[len(samples) // 2 :], minutes / 2 / 60, []
    for name in half[0]:
        memory, descriptors, threads = zip(*(astuple(sample[name]) for sample in half), strict=True)
        percent = 100 * growth(memory) / statistics.mean(memory) / hours
        shape = f"{minutes:g} minutes: {name}'s"
        record("soak", f"{shape} memory", round(statistics.mean(memory), 1), "MB")
        record("soak", f"{shape} memory growing", round(percent, 2), "% an hour", bound=GROWTH_MAX_PERCENT)
        record("soak", f"{shape} descriptors growing", round(growth(descriptors), 2), "descriptors", bound=0)
        record("soak", f"{shape} threads growing", round(growth(threads), 2), "threads", bound=0)
        if percent > GROWTH_MAX_PERCENT or growth(descriptors) >= 1 or growth(threads) >= 1:
            too_fast.append(f"the {name}")
    return too_fast


def growth(values: Sequence[float]) -> float:
    """From the first value to the last, along a line through all."""
    return statistics.linear_regression(range(len(values)), values).slope * (len(values) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if too_fast := asyncio.run(run(options.minutes, options.clients, options.seed)):
        sys.exit(f"grows too fast: {', '.join(too_fast)}")


if __name__ == "__main__":
    main()
