"""Hosts that are killed, frozen and drained under streams: real agents and schedulers, and a gateway whose clients
notice nothing but a pause."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gateway.cluster import replica_links
from tenants.records.grants import Grant, Permission
from tests.support import network
from tests.support.redis_server import RedisServer
from tests.support.served_gateway import looped, served
from tests.support.stamp_hosts import StampHost, cluster_of, stamp_hosts
from tests.support.stream_crowd import Heard, all_serve, crowd, fleet_of
from tests.support.waiting import until

STREAMS = 12
FAULTS: dict[str, Callable[[StampHost], None]] = {"killed": StampHost.kill, "frozen": StampHost.freeze}
FAULTS_APART = {**FAULTS, "cut off": StampHost.cut}
apart = pytest.mark.skipif(not network.possible(), reason="it takes root on Linux to make network namespaces")


def texts(heard: Sequence[Heard]) -> list[tuple[str, str]]:
    return [(one.text, one.problem) for one in heard]


@pytest.mark.parametrize("fault", FAULTS)
def test_streams_of_a_host_that_is_lost_go_on_elsewhere(fault: str, tmp_path: Path) -> None:
    @looped
    async def call() -> None:
        with stamp_hosts(tmp_path, 3) as hosts:
            async with served(tmp_path, machines=[host.address for host in hosts]) as gateway:
                await all_serve(gateway, 3)
                calm = await crowd(gateway, STREAMS)
                running = asyncio.create_task(crowd(gateway, STREAMS))
                fleet = fleet_of(gateway)
                host = hosts[0]
                (entry,) = fleet._machines[host.address].replicas.values()
                await until(lambda: entry.connection is not None and entry.connection.regions)
                await asyncio.to_thread(FAULTS[fault], host)
                assert texts(await running) == texts(calm)
                await gateway.settled()
                assert {record.outcome for record in await gateway.records()} == {"done"}
                assert {record.completion_tokens for record in await gateway.records()} == {150}

    call()


@apart
@looped
async def test_streams_of_hosts_behind_porters_go_on_elsewhere_however_one_is_lost(tmp_path: Path) -> None:
    with stamp_hosts(tmp_path, 3, apart=True) as hosts:
        machines = [host.address for host in hosts]
        assert {address.partition(":")[0] for address in machines} == {"tls"}
        async with served(tmp_path, machines=machines, cluster=cluster_of(tmp_path)) as gateway:
            await all_serve(gateway, 3)
            calm = await crowd(gateway, STREAMS)
            for fault, host in zip(FAULTS_APART.values(), hosts, strict=True):
                (entry,) = fleet_of(gateway)._machines[host.address].replicas.values()
                running = asyncio.create_task(crowd(gateway, STREAMS))
                await until(lambda entry=entry: entry.connection is not None and entry.connection.regions)
                await asyncio.to_thread(fault, host)
                assert texts(await running) == texts(calm)
                await asyncio.to_thread(host.kill)
                host.start()
                await until(lambda entry=entry: entry.connection is None or entry.silent)
                await all_serve(gateway, 3)
            await gateway.settled()
            records = await gateway.records()
            assert {(record.outcome, record.completion_tokens) for record in records} == {("done", 150)}
            assert len(records) == 4 * STREAMS


@apart
@looped
async def test_a_host_behind_a_porter_is_upgraded_under_streams(tmp_path: Path) -> None:
    with stamp_hosts(tmp_path, 2, apart=True) as hosts:
        machines = [host.address for host in hosts]
        async with served(tmp_path, machines=machines, cluster=cluster_of(tmp_path)) as gateway:
            await all_serve(gateway, 2)
            calm, fleet, host = await crowd(gateway, STREAMS), fleet_of(gateway), hosts[0]
            machine = fleet._machines[host.address]
            (entry,) = machine.replicas.values()
            running = asyncio.create_task(crowd(gateway, STREAMS))
            await until(lambda: entry.connection is not None and entry.connection.regions)
            fleet.drain(host.name, drained=True)
            await until(lambda: machine.report.draining and not (entry.connection and entry.connection.regions))
            await host.end()
            assert texts(await running) == texts(calm)
            host.start()
            await until(lambda: machine.connection is not None and machine.report.draining)
            fleet.drain(host.name, drained=False)
            await all_serve(gateway, 2)
            assert texts(await crowd(gateway, STREAMS)) == texts(calm)


@pytest.mark.parametrize("thawed", [False, True])
def test_streams_of_a_frozen_host_go_on_elsewhere_before_it_is_lost(
    thawed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its silence alone loses no host here, so that whatever goes on does so by an heir, or at a host that is back."""
    monkeypatch.setattr(replica_links, "LOST_S", 600.0)

    @looped
    async def call() -> None:
        with stamp_hosts(tmp_path, 3) as hosts:
            async with served(tmp_path, machines=[host.address for host in hosts]) as gateway:
                await all_serve(gateway, 3)
                calm = await crowd(gateway, STREAMS)
                (entry,) = fleet_of(gateway)._machines[hosts[0].address].replicas.values()
                running = asyncio.create_task(crowd(gateway, STREAMS))
                await until(lambda: entry.connection is not None and entry.connection.regions)
                frozen = entry.connection
                await asyncio.to_thread(hosts[0].freeze)
                if thawed:
                    await until(lambda: entry.silent)
                    await asyncio.to_thread(hosts[0].send, signal.SIGCONT)
                assert texts(await running) == texts(calm)
                assert entry.connection is frozen, "it was not lost"
                await gateway.settled()
                records = await gateway.records()
                assert {(record.outcome, record.completion_tokens) for record in records} == {("done", 150)}
                assert len(records) == 2 * STREAMS

    call()


@looped
async def test_streams_go_on_where_the_store_and_a_host_are_away_at_once(tmp_path: Path) -> None:
    store = RedisServer(tmp_path)
    store.start()
    try:
        with stamp_hosts(tmp_path, 3) as hosts:
            machines = [host.address for host in hosts]
            async with served(tmp_path, machines=machines, store_url=store.url) as gateway:
                await all_serve(gateway, 3)
                calm = await crowd(gateway, STREAMS)
                running = asyncio.create_task(crowd(gateway, STREAMS))
                (entry,) = fleet_of(gateway)._machines[hosts[0].address].replicas.values()
                await until(lambda: entry.connection is not None and entry.connection.sequences > 0)
                await until(lambda: gateway.app.open_requests == STREAMS == gateway.quota.open)
                store.freeze()
                await asyncio.to_thread(hosts[0].kill)
                refused = await gateway.run(prompt="hello", max_tokens=1)
                assert (refused.status, refused.json["error"]["code"]) == (503, "store_unavailable")
                assert texts(await running) == texts(calm)
                store.thaw()
                assert texts(await crowd(gateway, STREAMS)) == texts(calm)
                await gateway.settled()
                records = await gateway.records()
                assert len({record.request_id for record in records}) == len(records) == 3 * STREAMS
                assert {(record.outcome, record.completion_tokens) for record in records} == {("done", 150)}
    finally:
        store.close()


@looped
async def test_a_drained_machine_gives_its_streams_away_and_takes_none_until_it_is_undrained(tmp_path: Path) -> None:
    with stamp_hosts(tmp_path, 2) as hosts:
        async with served(tmp_path, machines=[host.address for host in hosts]) as gateway:
            await all_serve(gateway, 2)
            _, token = await gateway.accounts.mint(gateway.account_id, "operator", grant=Grant((Permission.OPERATOR,)))
            calm = await crowd(gateway, STREAMS)
            fleet, host = fleet_of(gateway), hosts[0]
            (entry,) = fleet._machines[host.address].replicas.values()
            running = asyncio.create_task(crowd(gateway, STREAMS))
            await until(lambda: entry.connection is not None and entry.connection.regions)

            async def change(name: str, drained: bool) -> int:
                path = f"/client/v4/operator/machines/{name}"
                answer = await gateway.call(path, {"drained": drained}, "PATCH", authorization=f"Bearer {token}")
                return answer.status

            assert await change("nobody", True) == 404
            assert await change(host.name, True) == 200
            await until(lambda: entry.connection is not None and not entry.connection.regions)
            assert texts(await running) == texts(calm)
            await host.end()
            host.start()
            await until(lambda: entry.connection is None, 30)
            await until(lambda: fleet._machines[host.address].connection is not None, 60)
            assert texts(await crowd(gateway, STREAMS)) == texts(calm)
            ready = {machine.address: [view.ready for view in machine.replicas] for machine in fleet.machines()}
            assert ready == {host.address: [False], hosts[1].address: [True]}, "it is drained over its own restart"
            assert await change(host.name, False) == 200
            await all_serve(gateway, 2)
