"""What somebody sees who reads the packets between a gateway and a machine: over TLS nothing of a prompt, and over
plain TCP, which says that the reader could have seen it, all of it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from msgspec import structs

from engine.protocol.address import machine_address
from gateway.cluster.connection import HostConnector
from gateway.cluster.fleet import ReplicaFleet
from gateway.identity.host_identity import HostRole
from gateway.identity.tls_door import TlsDoor
from gateway.porter.relay import Relay
from tests.support import network
from tests.support.hosts import host_maker
from tests.support.linked_fleet import PROMPT, collect, submit
from tests.support.network import captured
from tests.support.stub_replica import MODEL, StubConnection, StubFleet, StubMachine
from tests.support.waiting import until

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not network.possible(), reason="it takes root on Linux to read packets"),
]


@contextlib.asynccontextmanager
async def connected(address: str, connector: HostConnector) -> AsyncIterator[ReplicaFleet]:
    fleet = ReplicaFleet([address], connector=connector)
    running = asyncio.create_task(fleet.run())
    try:
        await until(lambda: fleet.serves(MODEL), 10, "the replica serves")
        yield fleet
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def calls_on_the_wire(port: int, address: str, connector: HostConnector) -> bytes:
    """The packets of one port while calls of PROMPT run through it."""
    with captured("lo", port) as capture:
        async with connected(address, connector) as fleet:
            for _ in range(5):
                await collect(await submit(fleet, 20))
        await until(lambda: capture.packets > 10, 10, "packets were seen")
    return bytes(capture.wire)


def port_of(server: asyncio.Server) -> int:
    port: int = server.sockets[0].getsockname()[1]
    return port


async def plain_server(make: Callable[[], asyncio.Protocol]) -> asyncio.Server:
    return await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)


async def test_no_prompt_is_in_the_clear_between_hosts(tmp_path: Path) -> None:
    stub, hosts = StubFleet(tmp_path), host_maker(tmp_path / "hosts")
    machine, gateway = hosts.host(HostRole.MACHINE, "m1"), hosts.host(HostRole.GATEWAY, "gw1")
    door = TlsDoor(machine, lambda _: Relay(tmp_path, lambda: machine.credentials().identity, frozenset))
    async with stub.serving():
        server = await door.listen("127.0.0.1", 0)
        address = machine_address("m1", f"127.0.0.1:{port_of(server)}")
        connector = HostConnector(lambda: gateway.credentials().client)
        sealed = await calls_on_the_wire(port_of(server), address, connector)
        server.close()
        assert PROMPT not in sealed
        assert MODEL.encode() not in sealed


async def test_plain_tcp_shows_every_prompt_to_the_same_reader(tmp_path: Path) -> None:
    stub = StubFleet(tmp_path)
    replica = await plain_server(lambda: StubConnection(stub.replicas[0]))
    machine = await plain_server(lambda: StubMachine(stub))
    stub.replicas[0].state = structs.replace(stub.replicas[0].state, address=f"tcp:127.0.0.1:{port_of(replica)}")
    clear = await calls_on_the_wire(port_of(replica), f"tcp:127.0.0.1:{port_of(machine)}", HostConnector(None))
    replica.close()
    machine.close()
    assert PROMPT in clear
    assert MODEL.encode() in clear
