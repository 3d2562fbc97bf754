"""Many clients at once, as bad as clients are: they stay, leave, retry and come back; and what each was given.

It counts what arrives, and knows nothing of what the gateways count.
"""

import asyncio
import contextlib
import enum
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.end_to_end.cluster import Cluster, Tenant
from tests.support.served_gateway import Client
from tests.support.stub_replica import MODEL

PATIENCE_S: Final = 30.0  # longer than any request here may take
TRIES_MAX: Final = 3
PAUSE_S: Final = 0.5  # a client's between its visits, about


class End(enum.Enum):
    """How a visit ended, as its client saw it."""

    DONE = "done"
    ERROR = "error"  # stated, in an event or a status
    REFUSED = "refused"  # 429
    AWAY = "away"  # 503
    LEFT = "left"  # by the client
    CUT = "cut"  # the connection ended without a word
    NOWHERE = "nowhere"  # nobody took the connection
    HUNG = "hung"


@dataclass
class Visit:
    """One request and what came back. Times are monotonic seconds; `tokens` are those that arrived."""

    tenant: Tenant
    gateway: int
    prompt: str
    max_tokens: int
    began: float
    status: int = 0
    request_id: str = ""
    headed: float | None = None
    ended: float = 0.0
    tokens: int = 0
    told_prompt_tokens: int | None = None  # by the answer's usage
    told_tokens: int | None = None
    retry_after_s: int = 0
    end: End = End.HUNG
    said: str = ""  # of an error


class Crowd:
    """So many clients in a closed loop, spread over the tenants; `leaving` is the share of visits that the client ends.
    `visits` are all that ended."""

    def __init__(
        self,
        cluster: Cluster,
        tenants: Sequence[Tenant],
        clients: int,
        leaving: float,
        seed: int,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._cluster = cluster
        self._tenants = tenants
        self._clients = clients
        self._leaving = leaving
        self._seed = seed
        self._pause_s = pause_s
        self._over = False
        self.visits: list[Visit] = []

    @contextlib.asynccontextmanager
    async def coming(self) -> AsyncIterator[None]:
        """They come and go while the block runs; after it each has ended its last visit."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._clients):
                group.create_task(self._come(number))
            try:
                yield
            finally:
                self._over = True

    async def _come(self, number: int) -> None:
        rng = random.Random(f"{self._seed}.{number}")
        tenant = self._tenants[number % len(self._tenants)]
        await asyncio.sleep(rng.random())
        while not self._over:
            body = drawn(rng)
            for _ in range(TRIES_MAX):
                leaves_s = rng.random() if rng.random() < self._leaving else None
                visit = await call(self._cluster.ports, rng.randrange(len(self._cluster.ports)), tenant, body, leaves_s)
                self.visits.append(visit)
                await asyncio.sleep(self._pause_s * (0.1 + rng.random()))
                if visit.end not in (End.REFUSED, End.AWAY, End.NOWHERE, End.ERROR) or self._over:
                    break


def drawn(rng: random.Random) -> dict[str, Any]:
    """A request's body; `native` says which dialect it is for."""
    return {
        "native": rng.random() < 0.5,
        "stream": rng.random() < 0.8,
        "prompt": f"{rng.randrange(10**9)} times " + "over the sea " * rng.randrange(6),
        "max_tokens": rng.randrange(1, 40),
    }


async def call(
    ports: Sequence[int], gateway: int, tenant: Tenant, body: dict[str, Any], leaves_s: float | None = None
) -> Visit:
    """One request, from connecting to its end; the client goes after `leaves_s` if it has not ended by then."""
    visit = Visit(tenant, gateway, body["prompt"], body["max_tokens"], time.monotonic())
    try:
        async with asyncio.timeout(leaves_s or PATIENCE_S):
            try:
                client = await Client.connect(ports[gateway])
            except OSError:
                visit.end = End.NOWHERE
                return visit
            try:
                await _follow(client, visit, body)
            finally:
                client.leave()
    except TimeoutError:
        visit.end = End.LEFT if leaves_s else End.HUNG
    except (OSError, EOFError, ValueError):  # the last where a chunk's head is missing
        visit.end = End.CUT
    finally:
        visit.ended = time.monotonic()
    return visit


async def _follow(client: Client, visit: Visit, body: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"stream": body["stream"], "max_tokens": body["max_tokens"]}
    if body["native"]:
        path, asked["prompt"] = f"/ai/run/{MODEL}", body["prompt"]
    else:
        path = "/v1/chat/completions"
        asked |= {"model": MODEL, "messages": [{"role": "user", "content": body["prompt"]}]}
        if body["stream"]:
            asked["stream_options"] = {"include_usage": True}
    await client.post(path, asked, {"authorization": f"Bearer {visit.tenant.token}"})
    visit.status = await client.head()
    visit.headed = time.monotonic()
    visit.request_id = client.headers["x-request-id"]
    visit.retry_after_s = int(client.headers.get("retry-after", "0"))
    if client.headers["content-type"] == "text/event-stream":
        await _read_events(client, visit)
    else:
        _read_whole(await client.body(), visit)


async def _read_events(client: Client, visit: Visit) -> None:
    """A stream ends in [DONE], behind its usage or an error."""
    end: End | None = None
    async for event in client.events():
        if event == "[DONE]":
            visit.end = end or End.HUNG
        elif isinstance(event, dict):
            visit.tokens += _tells(event)
            if event.get("errors"):
                end, visit.said = End.ERROR, str(event["errors"])
            elif event.get("usage"):
                end = End.DONE
                _note(event["usage"], visit)


def _tells(event: dict[str, Any]) -> bool:
    """Whether it brings a token: the stub's replicas give one a step, and each of them is text at once."""
    if event.get("choices"):
        return bool(event["choices"][0]["delta"].get("content"))
    return bool(event.get("response"))


def _read_whole(content: bytes, visit: Visit) -> None:
    answer = json.loads(content)
    if visit.status == 200:
        visit.end = End.DONE
        _note((answer.get("result") or answer)["usage"], visit)
        assert visit.told_tokens is not None
        visit.tokens = visit.told_tokens
        return
    visit.said = str(answer["errors"])
    visit.end = {429: End.REFUSED, 503: End.AWAY}.get(visit.status, End.ERROR)


def _note(usage: dict[str, Any], visit: Visit) -> None:
    visit.told_prompt_tokens, visit.told_tokens = usage["prompt_tokens"], usage["completion_tokens"]
