"""Calls that may be served in some regions: which machines are chosen and woken for them, and which never are."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from msgspec import structs

from engine.protocol import frames
from engine.protocol.types import RejectReason, Residency, SamplingParams, Scope, ScopeKind
from gateway.cluster.client import ReplicaClient
from gateway.cluster.fleet import NoReplicaAvailable, ReplicaFleet
from gateway.cluster.model_pool import _VIEWS_MAX
from gateway.cluster.stream import ReplicaStream, SuccessorWanted
from tenants.records.accounts import Account, Settings
from tests.support.linked_fleet import PROMPT, SCOPE
from tests.support.served_gateway import looped, served
from tests.support.stub_replica import MODEL, StubFleet
from tests.support.waiting import holds, in_fake_time, until

EU, ANY = ("eu",), ("eu", "us", "mars")


@contextlib.asynccontextmanager
async def machines(folder: Path, *regions: str) -> AsyncIterator[tuple[list[StubFleet], ReplicaFleet]]:
    """A machine with one replica in each of these regions, and a fleet that knows them all."""
    stubs = []
    async with contextlib.AsyncExitStack() as stack:
        for number, region in enumerate(regions):
            (folder / f"{number}").mkdir()
            stub = StubFleet(folder / f"{number}")
            stub.behaviour.region = region
            stubs.append(stub)
            await stack.enter_async_context(stub.serving())
        fleet = ReplicaFleet([stub.address for stub in stubs])
        task = asyncio.create_task(fleet.run())
        try:
            await until(lambda: sum(seen.ready for seen in fleet.replicas()) == len(regions))
            yield stubs, fleet
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def acquire(fleet: ReplicaFleet, number: int, regions: tuple[str, ...], wait_s: float = 0.0) -> ReplicaClient:
    deadline = asyncio.get_running_loop().time() + wait_s
    return await fleet.acquire(MODEL, b"%16d" % number, PROMPT, deadline, regions=regions)


def send(client: ReplicaClient, regions: tuple[str, ...]) -> ReplicaStream:
    order = frames.Submit(0, PROMPT, Scope(ScopeKind.TENANT, SCOPE), SamplingParams(), 500, regions=[*regions])
    return client.submit(order)


def at(stub: StubFleet) -> str:
    return f"unix:{stub.replicas[0].path}"


@in_fake_time
async def test_only_replicas_of_the_calls_regions_are_chosen_and_none_that_cannot_say_its_region(
    tmp_path: Path,
) -> None:
    async with machines(tmp_path, "us", "eu", "", "eu-2") as (stubs, fleet):
        chosen = {(await acquire(fleet, number, EU)).replica.address for number in range(40)}
        assert chosen == {at(stubs[1])}
        assert {(await acquire(fleet, n, ANY)).replica.address for n in range(40)} == {at(stubs[0]), at(stubs[1])}
        every = {(await acquire(fleet, number, ())).replica.address for number in range(200)}
        assert every == {at(stub) for stub in stubs}, "who has no regions is served anywhere"
        assert (fleet.serves(MODEL, EU), fleet.serves(MODEL, ("mars",))) == (True, False)
        with pytest.raises(NoReplicaAvailable, match="no machine in mars") as refusal:
            await acquire(fleet, 1, ("mars",), 60.0)
        assert (refusal.value.outside, refusal.value.loading) == (True, False)


@in_fake_time
async def test_one_that_knows_most_of_a_prompt_is_not_chosen_outside(tmp_path: Path) -> None:
    async with machines(tmp_path, "us", "eu") as (stubs, fleet):
        pool = fleet._pools[MODEL]
        (outside,) = [entry for entry in pool.entries if entry.region == "us"]
        pool.directory.holders = lambda shared, tokens: [(outside, 10_000.0)]  # type: ignore[method-assign]
        deadline = asyncio.get_running_loop().time()
        shared = (int(ScopeKind.TENANT), SCOPE, 0)
        for regions, address in (((), at(stubs[0])), (EU, at(stubs[1]))):
            client = await fleet.acquire(MODEL, SCOPE, PROMPT, deadline, shared=shared, regions=regions)
            assert client.replica.address == address


@in_fake_time
async def test_a_replica_whose_word_is_not_its_machines_gets_no_call_that_has_regions(tmp_path: Path) -> None:
    async with machines(tmp_path, "eu") as ((stub,), fleet):
        assert (await acquire(fleet, 1, EU)).replica.address == at(stub)
        stub.replicas[0].behaviour = dataclasses.replace(stub.behaviour, region="us")
        for connection in list(stub.replicas[0].connections):
            connection.close()
        await until(lambda: not fleet.serves(MODEL))
        await until(lambda: fleet.serves(MODEL))
        assert not fleet.serves(MODEL, EU)
        assert not fleet.serves(MODEL, ("us",))


@in_fake_time
async def test_only_machines_of_the_calls_regions_are_woken_and_calls_of_others_wait_on(tmp_path: Path) -> None:
    async with machines(tmp_path, "us", "eu", "") as (stubs, fleet):
        for stub in stubs:
            stub.move(0, Residency.MEMORY, ready_ms=300)
        await until(lambda: not fleet.serves(MODEL))
        call = asyncio.create_task(acquire(fleet, 1, EU, 20.0))
        await until(lambda: bool(stubs[1].wakes))
        assert (stubs[1].wakes[-1].requests, fleet.expected_s(MODEL, EU)) == (1, 1)
        await holds(lambda: not stubs[0].wakes and not stubs[2].wakes, 3.0)
        stubs[0].move(0, Residency.DEVICE)
        await until(lambda: fleet.serves(MODEL))
        await holds(lambda: not call.done(), 2.0)
        stubs[1].move(0, Residency.MEMORY, toward=Residency.DEVICE)
        assert (await call).replica.address == at(stubs[1])
        await until(lambda: stubs[1].wakes[-1].requests == 0)
        assert not stubs[0].wakes


@in_fake_time
async def test_streams_of_a_machine_that_is_drained_go_on_in_their_regions_or_end_there(tmp_path: Path) -> None:
    async with machines(tmp_path, "us", "eu") as (stubs, fleet):
        for stub in stubs:
            stub.behaviour.step_s = 0.05
        bound, free = send(await acquire(fleet, 1, EU), EU), send((await acquire(fleet, 1, EU)), ())
        for stream in (bound, free):
            await anext(stream)
        stubs[1].draining = True
        stubs[1].tell()
        with pytest.raises(SuccessorWanted):
            async for _ in free:
                pass
        free.cancel()
        for _ in range(20):
            await anext(bound)
        assert not stubs[0].submits
        bound.cancel()


def test_what_is_remembered_of_regions_is_limited(tmp_path: Path) -> None:
    @in_fake_time
    async def run() -> None:
        async with machines(tmp_path, "eu") as (_, fleet):
            pool = fleet._pools[MODEL]
            for number in range(3 * _VIEWS_MAX):
                assert pool.within(("eu", f"r-{number}")).serving
            assert len(pool._views) <= _VIEWS_MAX

    run()


@looped
async def test_a_call_is_refused_by_name_where_the_machines_are_elsewhere(tmp_path: Path) -> None:
    async with served(tmp_path, region="eu", machine_region="us") as gateway:
        assert (await gateway.run(prompt="hello", max_tokens=2)).status == 200
        sent = len(gateway.fleet.submits)
        await gateway.accounts.update(gateway.account_id, bound_to("eu"))
        gateway.see_changes()
        refused = await gateway.run(prompt="hello")
        assert (refused.status, refused.headers["retry-after"]) == (503, "30")
        assert "No machine in eu has" in refused.message
        assert len(gateway.fleet.submits) == sent, "not a token of it was sent there"


@looped
async def test_a_replica_that_refuses_a_region_after_all_refuses_the_call(tmp_path: Path) -> None:
    async with served(tmp_path, region="eu") as gateway:
        await gateway.accounts.update(gateway.account_id, bound_to("eu"))
        gateway.see_changes()
        assert (await gateway.run(prompt="hello", max_tokens=2)).status == 200
        assert gateway.fleet.submits[-1].regions == ["eu"]
        gateway.behaviour.reject = RejectReason.REGION
        refused = await gateway.run(prompt="hello")
        assert (refused.status, "No machine in eu has" in refused.message) == (503, True)


@pytest.mark.parametrize(
    ("urls", "allowed", "location"),
    [
        ({"eu": "https://eu.example"}, ("eu",), "https://eu.example"),
        ({"eu": "https://eu.example:8787", "us": "http://us.example"}, ("mars", "us", "eu"), "http://us.example"),
        ({"eu": "https://eu.example"}, ("us",), None),
        ({}, ("eu",), None),
    ],
)
def test_a_call_at_the_wrong_gateway_is_sent_to_one_that_the_operator_named_before_its_body_is_read(
    tmp_path: Path, urls: dict[str, str], allowed: tuple[str, ...], location: str | None
) -> None:
    @looped
    async def run() -> None:
        async with served(tmp_path, region="here", region_urls=urls) as gateway:
            await gateway.accounts.update(gateway.account_id, bound_to(*allowed))
            gateway.see_changes()
            client = await gateway.client()
            head = {**gateway.headers, "expect": "100-continue", "content-length": "1000000"}
            lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
            path = f"{gateway.run_path}?a=b%0d%0aset-cookie:x&c=//evil.example"
            client.writer.write(f"POST {path} HTTP/1.1\r\nhost: evil.example\r\n{lines}\r\n".encode())
            status = await client.head()
            assert status == (403 if location is None else 307), "before a byte of the body was asked for"
            assert client.headers.get("location") == (None if location is None else f"{location}{path}")
            assert "set-cookie" not in client.headers
            client.leave()
            assert not gateway.fleet.submits

    run()


def bound_to(*regions: str) -> Callable[[Account], Account]:
    return lambda account: structs.replace(account, settings=Settings(regions=regions))
