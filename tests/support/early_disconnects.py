"""Streams many of whose clients leave early: what is left afterwards, and how soon a replica hears of each leaving.

A client is known at the replica by its seed. From the Cancel on, a replica's sequence holds no block.
"""

import asyncio
import contextlib
import ctypes
import gc
import random
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import psutil

from tests.support.served_gateway import Served, open_files
from tests.support.waiting import until

STEP_S: Final = 0.05
LEAVES_WITHIN_S: Final = 0.4


class Cancels(deque[int]):
    """A stub's `cancels` that keeps when each came."""

    def __init__(self) -> None:
        super().__init__(maxlen=100_000)
        self.at: dict[int, float] = {}

    def extend(self, ids: Iterable[int]) -> None:
        now = time.monotonic()
        for id in ids:
            assert id not in self.at, "a sequence is cancelled once"
            self.at[id] = now
            self.append(id)


@dataclass(frozen=True, slots=True)
class Held:
    """What a gateway and its replica have in hand."""

    requests: int
    holds: int
    sequences: int
    connections: int
    tasks: int
    descriptors: int
    memory_bytes: int

    @classmethod
    def now(cls, gateway: Served) -> "Held":
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        listener = gateway.server._listener
        assert listener is not None
        return cls(
            gateway.app.open_requests,
            gateway.quota.open,
            gateway.fleet.running,
            listener.connections,
            len(asyncio.all_tasks()),
            open_files(),
            psutil.Process().memory_info().rss,
        )


async def leaving(gateway: Served, seeds: range, per_second: float, share: float) -> list[float]:
    """Streams of these seeds, so many a second, `share` of which are left at a random moment. Gives, sorted, the
    milliseconds from each leaving to its Cancel at the replica; those left before they got there have none. Waits until
    all is settled."""
    (replica,) = gateway.fleet.replicas
    replica.behaviour.step_s = STEP_S
    replica.submits.clear()
    replica.cancels = cancels = Cancels()
    left_at: dict[int, float] = {}
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for index, seed in enumerate(seeds):
            await asyncio.sleep(began + index / per_second - time.monotonic())
            group.create_task(visit(gateway, seed, share, left_at))
    await gateway.settled(30)
    await until(lambda: not gateway.server.server_state.connections and not gateway.server.server_state.tasks, 30)
    sequences = {submit.sampling.seed: submit.id for submit in replica.submits}
    reached = left_at.keys() & sequences.keys()
    assert {sequences[seed] for seed in reached} == set(cancels), "all that were left, and no others, are cancelled"
    replica.submits.clear()
    return sorted(1e3 * (cancels.at[sequences[seed]] - left_at[seed]) for seed in reached)


async def visit(gateway: Served, seed: int, share: float, left_at: dict[int, float]) -> None:
    rng = random.Random(seed)
    leaves = rng.random() < share
    max_tokens = 7000 if leaves else rng.randrange(1, 9)
    body: dict[str, Any] = {"prompt": "hello", "seed": seed, "max_tokens": max_tokens, "stream": True}
    client = await gateway.client()
    try:
        await client.post(gateway.run_path, body, gateway.headers)
        if not leaves:
            assert await client.head() == 200
            assert [event async for event in client.events()][-1] == "[DONE]"
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.random() * LEAVES_WITHIN_S):
                await client.head()
                await client.body()
        left_at[seed] = time.monotonic()
    finally:
        client.leave()
