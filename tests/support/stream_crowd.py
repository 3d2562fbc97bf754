"""Many streams at once through a gateway, as their clients see them."""

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from gateway.cluster.fleet import ReplicaFleet
from tests.support.served_gateway import Served
from tests.support.stub_replica import MODEL
from tests.support.waiting import until

TOKENS: Final = 150
PATIENCE_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Heard:
    """A stream as its client saw it: `gap_s` is the longest time between two events."""

    text: str
    problem: str
    gap_s: float


async def stream(gateway: Served, number: int) -> Heard:
    """One stream of its own prompt and seed, read to its end."""
    body = {
        "model": MODEL, "stream": True, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": number,
        "messages": [{"role": "user", "content": f"prompt {number}"}],
    }  # fmt: skip
    client = await gateway.client()
    text, problem, gap_s, last_s = [], "", 0.0, 0.0
    try:
        await client.post("/v1/chat/completions", body, gateway.headers)
        if await client.head() != 200:
            return Heard("", f"status {client.status}", 0.0)
        async for event in client.events():
            now = time.monotonic()
            gap_s, last_s = max(gap_s, now - last_s) if last_s else 0.0, now
            if isinstance(event, dict):
                problem = problem or str(event.get("errors") or "")
                text += [piece["delta"].get("content") or "" for piece in event.get("choices", [])]
    finally:
        client.leave()
    return Heard("".join(text), problem, gap_s)


async def crowd(gateway: Served, count: int) -> list[Heard]:
    async with asyncio.timeout(PATIENCE_S):
        return await asyncio.gather(*(stream(gateway, number) for number in range(count)))


def fleet_of(gateway: Served) -> ReplicaFleet:
    fleet: ReplicaFleet = gateway.app._serving.context.fleet
    return fleet


async def all_serve(gateway: Served, hosts: int) -> None:
    fleet = fleet_of(gateway)
    await until(lambda: sum(view.ready for view in fleet.replicas()) == hosts, PATIENCE_S, "all hosts serve")
