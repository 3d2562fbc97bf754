"""A porter between a real gateway's fleet and a machine without a model, over real TLS."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.protocol.address import machine_address
from gateway.cluster.connection import HostConnector, MachineConnection
from gateway.cluster.fleet import ReplicaFleet
from gateway.identity import tls_door
from gateway.identity.files import HostFiles
from gateway.identity.host_identity import HostRole
from gateway.identity.tls_door import TlsChannel, TlsDoor
from gateway.members.protocol import Membership
from gateway.porter.relay import Relay
from tests.support.hosts import HostMaker, host_maker
from tests.support.linked_fleet import collect, submit
from tests.support.stub_replica import MODEL, StubFleet
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@dataclass
class PorteredHost:
    """A machine's host: a stub replica, and a porter in front of it."""

    hosts: HostMaker
    files: HostFiles
    door: TlsDoor
    address: str
    port: int
    stub: StubFleet
    removed: set[str]

    @contextlib.asynccontextmanager
    async def fleet(self, files: HostFiles, address: str = "") -> AsyncIterator[ReplicaFleet]:
        fleet = ReplicaFleet([address or self.address], connector=HostConnector(lambda: files.credentials().client))
        running = asyncio.create_task(fleet.run())
        try:
            yield fleet
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

    async def problem(self, files: HostFiles, address: str = "") -> str:
        """What keeps a gateway with these files from the machine."""
        async with self.fleet(files, address) as fleet:
            await until(lambda: bool(fleet.problems()), 10, "the machine cannot be reached")
            return " ".join(fleet.problems().values())


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[PorteredHost]:
    hosts, removed = host_maker(tmp_path / "hosts"), set[str]()
    files = hosts.host(HostRole.MACHINE, "m1")
    stub = StubFleet(tmp_path)
    async with stub.serving():
        door = TlsDoor(
            files, lambda _: Relay(tmp_path, lambda: files.credentials().identity, lambda: frozenset(removed))
        )
        server = await door.listen("127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        name = stub.address.rpartition("/")[2].removesuffix(".sock")
        address = machine_address("m1", f"127.0.0.1:{port}", name)
        yield PorteredHost(hosts, files, door, address, port, stub, removed)
        server.close()


async def answered(fleet: ReplicaFleet, tokens: int) -> int:
    """How many tokens a call has got that asks for so many."""
    return sum(len(delta.tokens) for delta in await collect(await submit(fleet, tokens)))


async def test_a_gateway_s_calls_go_through(host: PorteredHost) -> None:
    async with host.fleet(host.hosts.host(HostRole.GATEWAY, "gw1")) as fleet:
        await until(lambda: fleet.serves(MODEL), 10, "the replica serves")
        (replica,) = fleet.replicas()
        assert replica.state.address.startswith("tls:m1@127.0.0.1:")
        assert await answered(fleet, 50) == 50


@pytest.mark.parametrize(
    ("role", "name", "problem"),
    [(HostRole.MACHINE, "m2", "it opens to gateways alone, and the certificate is of the machine m2")],
)
async def test_other_roles_open_nothing(host: PorteredHost, role: HostRole, name: str, problem: str) -> None:
    assert problem in await host.problem(host.hosts.host(role, name))


async def test_a_certificate_of_another_authority_or_an_expired_one_opens_nothing(
    host: PorteredHost, tmp_path: Path
) -> None:
    foreign = host_maker(tmp_path / "foreign").host(HostRole.GATEWAY, "gw1")
    assert "CERTIFICATE" in (await host.problem(foreign)).upper()
    assert "CERTIFICATE" in (await host.problem(host.hosts.expired(HostRole.GATEWAY, "gw2"))).upper()


@pytest.mark.parametrize(("certified", "word", "there"), [("eu", "eu", True), ("us", "eu", False), ("eu", "", False)])
async def test_a_machine_is_where_its_certificate_and_its_own_word_say_it_is(
    host: PorteredHost, certified: str, word: str, there: bool
) -> None:
    host.hosts.host(HostRole.MACHINE, "m1", region=certified)
    host.stub.behaviour.region = word
    async with host.fleet(host.hosts.host(HostRole.GATEWAY, "gw1")) as fleet:
        await until(lambda: fleet.serves(MODEL), 10, "the replica serves")
        assert fleet.serves(MODEL, ("eu", "mars")) is there
        assert not fleet.serves(MODEL, ("us",))


async def test_clocks_may_be_an_hour_apart(host: PorteredHost) -> None:
    for age_s in (-3600.0, 3600.0):
        async with host.fleet(host.hosts.host(HostRole.GATEWAY, "gw1", age_s=age_s)) as fleet:
            await until(lambda: fleet.serves(MODEL), 10, "the replica serves")


async def test_a_host_that_is_not_the_machine_of_the_address_is_not_believed(host: PorteredHost) -> None:
    gateway = host.hosts.host(HostRole.GATEWAY, "gw1")
    elsewhere = machine_address("m9", f"127.0.0.1:{host.port}")
    assert "the machine m1 answers there, and not the machine m9" in await host.problem(gateway, elsewhere)


@pytest.mark.parametrize("name", ["nothing", "a/b", "-", "A", "machine.sock"])
async def test_a_socket_that_is_not_there_is_refused_by_name(host: PorteredHost, name: str) -> None:
    context = host.hosts.host(HostRole.GATEWAY, "gw1").credentials().client
    reader, writer = await asyncio.open_connection("127.0.0.1", host.port, ssl=context, server_hostname=f"{name}.m1")
    assert b"the porter refused" in await reader.read(4096)
    assert await reader.read(1) == b""
    writer.close()


async def test_a_removed_gateway_is_cut_and_stays_out(host: PorteredHost) -> None:
    gateway = host.hosts.host(HostRole.GATEWAY, "gw1")
    async with host.fleet(gateway) as fleet:
        await until(lambda: fleet.serves(MODEL), 10, "the replica serves")
        host.removed.add(gateway.credentials().key_digest)
        assert host.door.cut(frozenset(host.removed)) == 2  # to the agent and to the replica
        await until(lambda: "was removed" in " ".join(fleet.problems().values()), 10, "it is told why")


async def test_a_new_certificate_breaks_no_connection_and_counts_for_the_next(host: PorteredHost) -> None:
    gateway = host.hosts.host(HostRole.GATEWAY, "gw1")
    async with host.fleet(gateway) as fleet:
        await until(lambda: fleet.serves(MODEL), 10, "the replica serves")
        host.stub.behaviour.step_s = 0.005
        calls = [asyncio.create_task(answered(fleet, 200)) for _ in range(8)]
        for _ in range(20):
            host.hosts.host(HostRole.MACHINE, "m1", region="eu", key=host.files.credentials().key)
            host.hosts.host(HostRole.GATEWAY, "gw1", region="eu", key=gateway.credentials().key)
            async with host.fleet(gateway) as other:
                await until(lambda: other.serves(MODEL), 10, "a new connection is taken")
        assert await asyncio.gather(*calls) == [200] * 8
    assert host.files.credentials().identity.region == "eu"


async def test_a_machine_that_an_operator_removed_is_cut_and_one_that_is_only_gone_stays(host: PorteredHost) -> None:
    async with host.fleet(host.hosts.host(HostRole.GATEWAY, "gw1")) as fleet:
        await until(lambda: fleet.serves(MODEL), 10, "the replica serves")
        fleet.links.follow(fleet, Membership(frozenset()))
        assert fleet.serves(MODEL)
        fleet.links.follow(fleet, Membership(frozenset(), frozenset([host.address])))
        assert not fleet.serves(MODEL)
        assert fleet.machines() == []


async def test_a_removed_machine_that_answers_still_is_not_believed(host: PorteredHost) -> None:
    gateway, machine = host.hosts.host(HostRole.GATEWAY, "gw1"), host.files.credentials().key_digest
    connector = HostConnector(lambda: gateway.credentials().client, lambda key: key == machine)
    connection = await connector(host.address, lambda: MachineConnection(lambda *_: None))
    await connection.closed
    assert "was removed" in connection.close_reason


async def test_who_shows_no_certificate_has_little_time_and_few_bytes(
    host: PorteredHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_door, "STRANGER_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
    assert await reader.read() == b""  # it said nothing
    writer.close()
    reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
    hello = b"\x16\x03\x01\x40\x00" + b"\x01\x00\x3f\xfc" + bytes(1 << 14)
    writer.write(hello)
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()
    assert not host.door.channels


@pytest.mark.parametrize("limit", ["STRANGERS_PER_ADDRESS_MAX", "STRANGERS_MAX"])
async def test_half_open_connections_do_not_keep_gateways_out(
    host: PorteredHost, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(tls_door, limit, 20)
    flood = [socket.create_connection(("127.0.0.1", host.port)) for _ in range(60)]
    await until(lambda: len(host.door.channels) == 20, 10, "no more than the bound are open")
    async with host.fleet(host.hosts.host(HostRole.GATEWAY, "gw1")) as fleet:
        await until(lambda: fleet.serves(MODEL), 10, "the replica serves beside the flood")
        flood += [socket.create_connection(("127.0.0.1", host.port)) for _ in range(60)]
        await until(lambda: len(host.door.channels) == 22, 10, "no more than the bound beside the gateway's two")
        assert await answered(fleet, 50) == 50
    for each in flood:
        each.close()
    await until(lambda: not host.door.channels, 10, "they are forgotten")


async def test_where_members_have_all_places_nobody_else_gets_one(
    host: PorteredHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with host.fleet(host.hosts.host(HostRole.GATEWAY, "gw1")) as fleet:
        await until(lambda: fleet.serves(MODEL), 10, "the replica serves")
        monkeypatch.setattr(tls_door, "CHANNELS_MAX", 2)
        reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
        assert await reader.read() == b""
        writer.close()
        assert await answered(fleet, 50) == 50


async def test_old_protocols_are_refused(host: PorteredHost) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection("127.0.0.1", host.port, ssl=context, server_hostname="machine.m1")


class _Ear:
    """Hears what a channel gives."""

    def __init__(self) -> None:
        self.heard = list[bytes]()
        self.has_lost = asyncio.Event()

    def opened(self, channel: TlsChannel) -> None:
        channel.write(b"hello")

    def received(self, plain: bytes) -> None:
        assert plain, "it is called again and again, and nothing else in this process is"
        self.heard.append(plain)

    def lost(self) -> None:
        self.has_lost.set()

    def hold(self) -> None:
        raise AssertionError("so little is written")

    resume = hold


@pytest.mark.parametrize("said", [b"", b"good"])
@pytest.mark.parametrize("is_member", [True, False])
async def test_a_peer_that_says_goodbye_ends_its_own_connection_and_stops_nothing_else(
    host: PorteredHost, said: bytes, is_member: bool
) -> None:
    ear = _Ear()
    server = await TlsDoor(host.files, lambda _: ear).listen("127.0.0.1", 0)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if is_member:
        context = host.hosts.host(HostRole.GATEWAY, "gw1").credentials().client
    port = server.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="machine.m1")
    assert await reader.readexactly(5) == b"hello"
    writer.write(said)
    writer.close()  # as TLS is closed: with a goodbye, and not only the socket
    async with asyncio.timeout(10):
        await ear.has_lost.wait()
    assert b"".join(ear.heard) == said
    server.close()
