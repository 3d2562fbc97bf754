"""The porter as a process: it renews its host's certificate, hears of removals, and is started again where it dies."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from engine.process.companion import CompanionProcess
from gateway.cluster.connection import HostConnector, MachineConnection
from gateway.identity.authority import CERTIFICATE_S, key_digest
from gateway.identity.files import HostFiles
from gateway.identity.host_identity import HostRole
from gateway.joining.listener import JoinListener
from gateway.joining.service import JoinService
from gateway.porter.porter import Porter
from gateway.porter.settings import ClusterNews, PorterSettings, read_news, write_news
from tenants.open import open_store
from tenants.records.cluster import ClusterMember, JoinToken
from tests.support.hosts import SECRET, HostMaker, host_maker
from tests.support.redis_server import free_port
from tests.support.stub_replica import StubFleet
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@dataclass
class PorteredMachine:
    """A machine's host with a porter process, and the gateway that it asks."""

    hosts: HostMaker
    files: HostFiles
    settings: PorterSettings
    removed: list[str] = field(default_factory=list)

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-P", "-m", "gateway.porter.porter", msgspec.json.encode(self.settings).decode()]

    async def connection(self, files: HostFiles) -> MachineConnection | None:
        """A gateway's connection to the agent's socket, once it has a report; None where there is none yet."""
        reports: list[object] = []
        connector = HostConnector(lambda: files.credentials().client)
        try:
            made = await connector(
                f"tls:m1@{self.settings.listen}", lambda: MachineConnection(lambda _, report: reports.append(report))
            )
        except OSError:
            return None
        await until(lambda: reports or made.closed.done(), 10, "it answers, or closes")
        return made if reports else None


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[PorteredMachine]:
    """Its certificate is older than two thirds of its life."""
    store, hosts = open_store(f"sqlite:{tmp_path / 'hearth.db'}"), host_maker(tmp_path / "hosts")
    key, age_s = ec.generate_private_key(ec.SECP256R1()), CERTIFICATE_S * 0.7
    files = hosts.host(HostRole.MACHINE, "m1", region="eu", key=key, age_s=age_s)
    join, porter, now = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}", int(time.time())
    await store.cluster.add_token(JoinToken("t", b"", "machine", "", "", "", 1, now + 60))
    digest = key_digest(key.public_key())
    await store.cluster.admit("t", ClusterMember("m1", "machine", "eu", "", digest, porter, now, now + 60), now)
    paths, news = hosts.paths("m1"), tmp_path / "news.json"
    write_news(news, ClusterNews([join]))
    settings = PorterSettings(
        folder=str(tmp_path),
        listen=porter,
        address=f":{porter.rpartition(':')[2]}",
        certificate=str(paths.certificate),
        key=str(paths.key),
        authority=str(paths.authority),
        news=str(news),
    )
    made = PorteredMachine(hosts, files, settings)
    service = JoinService(store.cluster, hosts.authority, SECRET, list, lambda: made.removed)
    listener = JoinListener(hosts.host(HostRole.GATEWAY, "gw1"), service.answer)
    running = asyncio.create_task(listener.run("127.0.0.1", int(join.rpartition(":")[2])))
    async with StubFleet(tmp_path).serving():
        yield made
    running.cancel()
    await store.close()


async def test_a_porter_renews_lets_gateways_in_and_is_started_again(machine: PorteredMachine) -> None:
    process, gateway = CompanionProcess("porter", machine.command), machine.hosts.host(HostRole.GATEWAY, "gw2")
    before = machine.files.credentials().expires_s
    try:
        process.poll(0.0)
        first = await until(lambda: machine.connection(gateway), 30, "the porter lets a gateway in")
        await until(lambda: machine.files.credentials().expires_s > before, 30, "the certificate is renewed")
        assert machine.files.credentials().identity.region == "eu"
        assert not first.closed.done()
        assert process._process is not None
        process._process.kill()
        process._process.wait()
        await until(first.closed.done, 10, "its connections are gone")
        process.poll(1.0)
        assert process._process is None, "it waits a moment before it starts the next"
        process.poll(2.0)
        await until(lambda: machine.connection(gateway), 30, "the next porter lets a gateway in")
    finally:
        process.close()
    assert await machine.connection(gateway) is None


async def test_a_gateway_that_was_removed_is_cut_off(machine: PorteredMachine) -> None:
    process, gateway = CompanionProcess("porter", machine.command), machine.hosts.host(HostRole.GATEWAY, "gw2")
    other = machine.hosts.host(HostRole.GATEWAY, "gw3")
    try:
        process.poll(0.0)
        cut = await until(lambda: machine.connection(gateway), 30, "the porter lets a gateway in")
        kept = await machine.connection(other)
        assert kept is not None
        machine.removed.append(gateway.credentials().key_digest)
        await until(cut.closed.done, 15, "the removed gateway is cut off")
        assert not kept.closed.done()
        assert await machine.connection(gateway) is None
        assert read_news(machine.settings.news).removed == machine.removed
    finally:
        process.close()


async def test_a_disk_without_room_ends_no_porter_and_keeps_no_removed_host_in(
    machine: PorteredMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("gateway.porter.porter.write_news", full)
    monkeypatch.setattr("gateway.porter.porter.NEWS_S", 0.05)
    gateway = machine.hosts.host(HostRole.GATEWAY, "gw2")
    porter = Porter(machine.settings, machine.files, read_news(machine.settings.news))
    running = asyncio.create_task(porter.run())
    try:
        cut = await until(lambda: machine.connection(gateway), 30, "the porter lets a gateway in")
        machine.removed.append(gateway.credentials().key_digest)
        await until(cut.closed.done, 30, "the removed gateway is cut off")
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.wait([running])
