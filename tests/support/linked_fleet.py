"""A Fleet that is connected to stub replicas, without a gateway around it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from engine.protocol.frames import PROTOCOL_VERSION, Submit
from engine.protocol.types import SamplingParams, Scope, ScopeKind
from gateway.cluster.client import ReplicaClient
from gateway.cluster.fleet import ReplicaFleet
from gateway.cluster.stream import OutputDelta, ReplicaStream, pack_token_ids
from tests.support.stub_replica import MODEL, StubFleet
from tests.support.waiting import until

PROMPT = pack_token_ids(range(40))
SCOPE = b"s" * 16


@contextlib.asynccontextmanager
async def connected(
    folder: Path,
    replicas: int = 1,
    newest_protocol: int = PROTOCOL_VERSION,
    route_key: bytes = b"",
    names_prefixes: bool = True,
    polled: bool = False,
) -> AsyncIterator[tuple[StubFleet, ReplicaFleet]]:
    """A stub machine with its replicas, and a fleet that knows them."""
    stub = StubFleet(folder, replicas)
    stub.behaviour.newest_protocol, stub.behaviour.names_prefixes = newest_protocol, names_prefixes
    stub.behaviour.polled = polled
    async with stub.serving():
        fleet = ReplicaFleet([stub.address])
        fleet.route_key = route_key
        task = asyncio.create_task(fleet.run())
        try:
            await until(lambda: sum(seen.ready for seen in fleet.replicas()) == replicas)
            yield stub, fleet
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def link(fleet: ReplicaFleet, wait_s: float = 5.0, model: str = MODEL) -> ReplicaClient:
    return await fleet.acquire(model, SCOPE, PROMPT, asyncio.get_running_loop().time() + wait_s)


async def submit(fleet: ReplicaFleet, max_tokens: int = 8, n: int = 1, logprobs: int | None = None) -> ReplicaStream:
    sampling = SamplingParams(logprobs=logprobs)
    chosen = await link(fleet)
    return chosen.submit(Submit(0, PROMPT, Scope(ScopeKind.TENANT, SCOPE), sampling, max_tokens, n=n))


async def collect(stream: ReplicaStream) -> list[OutputDelta]:
    async with asyncio.timeout(30):
        return [step async for step in stream]
