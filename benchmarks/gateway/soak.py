"""A whole Hearth under a mixed load for half an hour: memory, descriptors and threads may not grow.

    python -m benchmarks.gateway.soak [--minutes 30] [--clients 6] [--seed N]

Whole and streamed answers of both dialects, answers held to schemas, clients that leave, refusals of every kind, new
accounts and tokens, lists and metrics, over a KV pool that is small enough to fill within minutes. In the first third
caches fill, grammars faster than later; it is not counted.

Every five seconds each process is measured. What it holds at least in each minute is its floor: memory that comes and
goes within a minute is no growth, and a leak raises floors as it raises all. Growth is the median slope between any two
floors (Theil and Sen), with the interval that has it nine times in ten (after Kendall; floors that depend on the one
before make it too short). It fails where memory grows by more than 1 % an hour at the interval's lower end, or where
its upper end is over 2 %, since then it cannot tell: run it for longer. It fails too where descriptors or threads grow
by one. `--leak 2` is the control: what is measured grows by 2 % an hour more, and it must fail.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import math
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
import psutil

from benchmarks.record import record
from tests.end_to_end.conftest import EMBER, Hearth, serving

SAMPLE_S: Final = 5.0
FLOOR_SAMPLES: Final = 12  # a minute, as often as processes return what is free
WARM_UP_SHARE: Final = 1 / 3
LEAST_MAX_PERCENT: Final = 1.0  # of a process's memory, an hour: how much it surely grows,
MOST_MAX_PERCENT: Final = 2.0  # and how much it may
_QUANTILE: Final = statistics.NormalDist().inv_cdf(0.95)
NAMES: Final = {  # by what a process's command line has
    "engine.replica.zygote": "zygote",  # the first, for its line has the replica's module too
    "engine.replica.server": "replica",
    "engine.structured_output.sandbox": "sandboxes",
    "engine.host.agent": "agent",
    "gateway.cli gateway": "gateway",
    "gateway.cli serve": "supervisor",
}
WORDS: Final = ("the", "keeper", "of", "a", "lighthouse", "writes", "down", "each", "ship", "that", "passes", "by")
# A pool and a table of accounts that are full within the warm-up.
SETTINGS: Final = f'[telemetry]\nmetrics_accounts = 20\n[[models]]\nname = "{EMBER}"\nkv_bytes = 30000000\n'


class Load:
    """Clients that keep asking; `answers` counts what they were told, by status. Until `warm_at` more of them ask for
    what a grammar holds, so that as many grammars as are kept are there by then."""

    def __init__(self, hearth: Hearth, seed: int, warm_at: float) -> None:
        self._hearth = hearth
        self._dice = random.Random(seed)
        self._client = httpx.AsyncClient(base_url=hearth.base_url, timeout=60)
        self._tokens = [hearth.token]
        self._warm_at = warm_at
        self.answers: dict[str, int] = {}

    async def run(self, until: float) -> None:
        kinds = [self._whole, self._stream, self._leave, self._refused, self._look, self._held]
        while time.monotonic() < until:
            held = 4 if time.monotonic() < self._warm_at else 1
            kind = self._dice.choices(kinds, [5, 4, 2, 3, 1, held])[0]
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
    """What the processes hold that last; those that are about to end, such as what reads the settings anew, are waited
    for."""
    for _ in range(10):
        try:
            return measured_once(hearth)
        except (psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError, NamelessProcess) as error:
            problem = error
            time.sleep(0.2)
    raise problem


class NamelessProcess(Exception):
    """A process that NAMES lacks."""


def measured_once(hearth: Hearth) -> dict[str, Usage]:
    usage = dict.fromkeys(NAMES.values(), Usage(0, 0, 0))
    for process in hearth.processes():
        line = " ".join(process.cmdline())
        name = next((name for part, name in NAMES.items() if part in line), None)
        if name is None:
            raise NamelessProcess(line)
        more = Usage(resident_bytes(process.pid) / 1e6, process.num_fds(), process.num_threads())
        usage[name] = Usage(*map(operator.add, astuple(usage[name]), astuple(more)))
    return usage


def resident_bytes(pid: int) -> int:
    """Counted page by page: what /proc/PID/statm says is half a megabyte late."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("Rss:")).split()[1])


async def run(minutes: float, clients: int, seed: int, leak_percent: float) -> list[str]:
    with tempfile.TemporaryDirectory(dir="/tmp") as name, serving(Path(name), SETTINGS) as hearth:
        began = time.monotonic()
        load, until = Load(hearth, seed, began + 60 * minutes * WARM_UP_SHARE), began + 60 * minutes
        (replica,) = hearth.replicas()
        samples: list[dict[str, Usage]] = []
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(load.run(until))
            group.create_task(load.change(until - 15))
            while time.monotonic() < until - SAMPLE_S:
                await asyncio.sleep(SAMPLE_S)
                samples.append(await asyncio.to_thread(measured, hearth))
                if len(samples) % FLOOR_SAMPLES == 0:
                    print(f"{len(samples) * SAMPLE_S / 60:.0f} min", samples[-1], json.dumps(load.answers), flush=True)
        assert hearth.replicas() == [replica], "a replica that was started again has forgotten what it had grown"
        failed = {answer: count for answer, count in load.answers.items() if " 5" in f" {answer}"}
        assert not failed, f"answers that are the server's fault: {failed}"
        return report(samples, minutes, sum(load.answers.values()), leak_percent)


def report(samples: list[dict[str, Usage]], minutes: float, requests: int, leak_percent: float) -> list[str]:
    """Records the growth behind the warm-up; what grew too fast, or may have."""
    record("soak", f"{minutes:g} minutes: requests", requests, "requests")
    steady, failed = samples[round(len(samples) * WARM_UP_SHARE) :], []
    for name in steady[0]:
        memory, descriptors, threads = zip(*(astuple(sample[name]) for sample in steady), strict=True)
        grown = Growth.of(floors([each * leaked(number, leak_percent) for number, each in enumerate(memory)]))
        shape = f"{minutes:g} minutes: {name}'s"
        record("soak", f"{shape} memory", round(statistics.mean(memory), 1), "MB")
        record("soak", f"{shape} memory growing", round(grown.percent, 2), "% an hour")
        record("soak", f"{shape} memory growing, at least", round(grown.least, 2), "% an hour", bound=LEAST_MAX_PERCENT)
        record("soak", f"{shape} memory growing, at most", round(grown.most, 2), "% an hour", bound=MOST_MAX_PERCENT)
        more_descriptors, more_threads = rise(descriptors), rise(threads)
        record("soak", f"{shape} descriptors growing", round(more_descriptors, 2), "descriptors", bound=0)
        record("soak", f"{shape} threads growing", round(more_threads, 2), "threads", bound=0)
        if grown.least > LEAST_MAX_PERCENT or more_descriptors >= 1 or more_threads >= 1:
            failed.append(f"the {name} grows too fast")
        elif grown.most > MOST_MAX_PERCENT:
            failed.append(f"whether the {name} grows cannot be told: run it for longer")
    return failed


def leaked(sample: int, percent: float) -> float:
    """By what memory would have grown since the warm-up, with such a leak an hour."""
    return 1 + percent / 100 * sample * SAMPLE_S / 3600


def floors(values: Sequence[float]) -> list[float]:
    """The least value of each whole minute."""
    firsts = range(0, len(values) - FLOOR_SAMPLES + 1, FLOOR_SAMPLES)
    return [min(values[first : first + FLOOR_SAMPLES]) for first in firsts]


@dataclass(frozen=True, slots=True)
class Growth:
    """How fast memory grows, in % an hour, and the ends of the interval that has it nine times in ten."""

    percent: float
    least: float
    most: float

    @classmethod
    def of(cls, floors: Sequence[float]) -> "Growth":
        """From the floors of three or more minutes."""
        count, hour = len(floors), 3600 / (SAMPLE_S * FLOOR_SAMPLES)
        pairs = itertools.combinations(enumerate(floors), 2)
        slopes = sorted((later - earlier) / (there - here) for (here, earlier), (there, later) in pairs)
        spread = _QUANTILE * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
        least = slopes[max(0, math.floor((len(slopes) - spread) / 2))]
        most = slopes[min(len(slopes) - 1, math.ceil((len(slopes) + spread) / 2))]
        percent = 100 * hour / statistics.mean(floors)
        return cls(percent * statistics.median(slopes), percent * least, percent * most)


def rise(values: Sequence[float]) -> float:
    """From the first value to the last, along a line through all."""
    return statistics.linear_regression(range(len(values)), values).slope * (len(values) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--leak", type=float, default=0.0, help="%% an hour that are added, as a control")
    options = parser.parse_args()
    if failed := asyncio.run(run(options.minutes, options.clients, options.seed, options.leak)):
        sys.exit("; ".join(failed))


if __name__ == "__main__":
    main()
