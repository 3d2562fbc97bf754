"""Live requests that come at the same random moments with nothing queued and beside a queue. It asserts nothing."""

import asyncio
import json
import random
import secrets
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from gateway.batch.worker import RENEW_S
from tests.end_to_end.conftest import EMBER, Hearth

FOLDER: Final = Path(__file__).parents[2] / "engine" / "builtin_model"
NO_END: Final = {str(json.loads((FOLDER / "generation_config.json").read_text())["eos_token_id"]): -100.0}
PLENTY: Final = ("--requests-per-minute", "6000000", "--neurons-per-day", "1e9", "--concurrent-requests", "1000000")
PART: Final = 0.3  # of what one request after the other could be served
PROBES: Final = 6
WORDS: Final = ("alpha", "beta", "gamma", "delta", "epsilon")
MAX_TOKENS: Final = (8, 32)
WORDS_MAX: Final = 30


@dataclass(slots=True)
class Seen:
    """Of all rounds: the latencies of live requests in seconds, and how many queued ones ended meanwhile."""

    alone_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)
    drained: int = 0
    drained_s: float = 0.0

    def ratio(self, part: float) -> float:
        """Of the latencies that so much of the requests stay below."""
        return below(self.beside_s, part) / below(self.alone_s, part)


def below(latencies_s: list[float], part: float) -> float:
    return sorted(latencies_s)[int(part * len(latencies_s))]


def item(pick: random.Random) -> dict[str, Any]:
    words = " ".join(pick.choice(WORDS) for _ in range(pick.randint(5, WORDS_MAX)))
    return {"prompt": words, "max_tokens": pick.randint(*MAX_TOKENS), "logit_bias": NO_END, "temperature": 0}


async def measure(hearth: Hearth, rounds: int, requests: int, queued: int, seed: int = 0) -> Seen:
    """Live requests and queued ones are of two accounts."""
    names = [f"{name} {secrets.token_hex(3)}" for name in ("live", "behind")]  # of this time's own
    (_, live), (_, behind) = (hearth.account(name, *PLENTY) for name in names)
    order, seen = random.Random(seed), Seen()
    async with client_of(hearth, live) as client, client_of(hearth, behind) as batches:
        per_s = PART / statistics.mean([await one(client, item(order)) for _ in range(PROBES)])
        for number in range(rounds):
            for beside in order.sample([False, True], 2):
                if not beside:
                    seen.alone_s += await half(client, number, requests, per_s)
                    continue
                request_id, began = await submit(batches, queued, number), time.perf_counter()
                seen.beside_s += await half(client, number, requests, per_s)
                seen.drained_s += time.perf_counter() - began
                seen.drained += await cancel(batches, request_id)
            print(f"after round {number}: × {seen.ratio(0.95):.3f} at p95, × {seen.ratio(0.5):.3f} at p50", flush=True)
    return seen


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


async def cancel(batches: httpx.AsyncClient, request_id: str) -> int:
    """How much of it had ended. What ran is gone when this returns."""
    answer = await batches.delete(f"/ai/batches/{request_id}")
    await asyncio.sleep(RENEW_S + 1)
    return int(answer.json()["result"]["requests"]["succeeded"])


async def half(client: httpx.AsyncClient, seed: int, requests: int, per_s: float) -> list[float]:
    """The latencies of requests that come at random moments, the same for one seed."""
    pick, began, at = random.Random(seed), time.perf_counter(), 0.0
    asked = []
    for _ in range(requests):
        at += pick.expovariate(per_s)
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        asked.append(asyncio.create_task(one(client, item(pick))))
    return await asyncio.gather(*asked)


async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> float:
    began = time.perf_counter()
    answer = await client.post(f"/ai/run/{EMBER}", json=body)
    answer.raise_for_status()
    return time.perf_counter() - began
