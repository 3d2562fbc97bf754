"""What live callers notice of a long queue: `hearth serve` with the built-in model on the CPU, real sockets and store.

    python -m benchmarks.batch [--rounds 6] [--seconds 25] [--queued 10000]

A round asks the same live requests at the same random moments twice: with nothing queued, and beside a queue of this
length, in random order. They come so often that the replica is at work for about a third of the time. A round's figure
is the ratio of the two p95 latencies; what is recorded is the median over all rounds, since what else the machine does
falls on both halves of a round.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.record import record
from tests.end_to_end.conftest import EMBER, Hearth, serving

FOLDER: Final = Path(__file__).parents[1] / "engine" / "ember" / "model"
NO_END: Final = {str(json.loads((FOLDER / "generation_config.json").read_text())["eos_token_id"]): -100.0}
PLENTY: Final = ("--requests-per-minute", "6000000", "--neurons-per-day", "1e9", "--concurrent-requests", "1000000")
PART: Final = 0.3  # of what one request after the other could be served
PROBES: Final = 10
WORDS: Final = ("alpha", "beta", "gamma", "delta", "epsilon")
MAX_TOKENS: Final = (16, 64)
WARM: Final = 5  # of each half count for nothing
BOUND: Final = 1.1


@dataclass(frozen=True, slots=True)
class Half:
    """One half of a round: the latencies of live requests in seconds, and how many queued ones ended meanwhile."""

    latencies_s: list[float]
    drained: int

    @property
    def p95_ms(self) -> float:
        found = sorted(self.latencies_s)
        return 1e3 * found[len(found) * 95 // 100]


@dataclass(frozen=True, slots=True)
class Round:
    alone: Half
    beside: Half

    @property
    def ratio(self) -> float:
        return self.beside.p95_ms / self.alone.p95_ms


def item(pick: random.Random) -> dict[str, Any]:
    words = " ".join(pick.choice(WORDS) for _ in range(pick.randint(5, 60)))
    return {"prompt": words, "max_tokens": pick.randint(*MAX_TOKENS), "logit_bias": NO_END, "temperature": 0}


async def measure(hearth: Hearth, rounds: int, seconds: float, queued: int, seed: int = 0) -> list[Round]:
    """Live requests and queued ones are of two accounts."""
    (_, live), (_, behind) = hearth.account("live", *PLENTY), hearth.account("behind", *PLENTY)
    order, found = random.Random(seed), []
    async with client_of(hearth, live) as client, client_of(hearth, behind) as batches:
        per_s = PART / statistics.mean([await one(client, item(order)) for _ in range(PROBES)])
        for number in range(rounds):
            halves = {}
            for beside in order.sample([False, True], 2):
                request_id = await submit(batches, queued, number) if beside else None
                latencies = await half(client, number, seconds, per_s)
                halves[beside] = Half(latencies, await cancel(batches, request_id))
            found.append(Round(halves[False], halves[True]))
            print(f"round {number}: {halves[False].p95_ms:.0f} ms alone, {halves[True].p95_ms:.0f} ms beside a queue")
    return found


def client_of(hearth: Hearth, token: str) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.AsyncClient(base_url=hearth.base_url, headers=headers, timeout=120)


async def submit(batches: httpx.AsyncClient, queued: int, seed: int) -> str:
    pick = random.Random(seed)
    body = {"requests": [item(pick) for _ in range(queued)]}
    answer = await batches.post(f"/ai/run/{EMBER}?queueRequest=true", json=body)
    answer.raise_for_status()
    await asyncio.sleep(1.0)
    return str(answer.json()["result"]["request_id"])


async def cancel(batches: httpx.AsyncClient, request_id: str | None) -> int:
    """How much of it had ended. What ran is gone when this returns."""
    if request_id is None:
        return 0
    answer = await batches.delete(f"/ai/batches/{request_id}")
    await asyncio.sleep(3.0)
    return int(answer.json()["result"]["requests"]["succeeded"])


async def half(client: httpx.AsyncClient, seed: int, seconds: float, per_s: float) -> list[float]:
    """The latencies of requests that come at random moments, the same for one seed."""
    pick, began, at = random.Random(seed), time.perf_counter(), 0.0
    asked = []
    while (at := at + pick.expovariate(per_s)) < seconds:
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        asked.append(asyncio.create_task(one(client, item(pick))))
    return (await asyncio.gather(*asked))[WARM:]


async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> float:
    began = time.perf_counter()
    answer = await client.post(f"/ai/run/{EMBER}", json=body)
    answer.raise_for_status()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--queued", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as hearth:
        found = asyncio.run(measure(hearth, options.rounds, options.seconds, options.queued))
    shape = f"live p95 beside {options.queued:,} queued"
    record("batch", shape, round(statistics.median(each.ratio for each in found), 3), "x", bound=BOUND)
    record("batch", "live p95 alone", round(statistics.median(each.alone.p95_ms for each in found), 1), "ms")
    drained = sum(each.beside.drained for each in found) / (options.seconds * len(found))
    record("batch", "queued requests done meanwhile", round(drained, 2), "1/s")


if __name__ == "__main__":
    main()
