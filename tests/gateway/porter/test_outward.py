"""KV from a replica of one machine to one of another: out by a porter, over mutual TLS, in by the other porter."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from engine.handover.dial import dial
from engine.handover.receiver import BlockFormat, HandoverReceiver
from engine.handover.sender import HandoverPlan, HandoverState, OutgoingHandover
from engine.handover.staging import StagingArea
from engine.handover.transport import HostPiece
from engine.protocol.address import machine_address
from engine.protocol.connection import listen
from gateway.identity.files import HostFiles
from gateway.identity.host_identity import HostRole
from gateway.identity.tls_door import TlsDoor
from gateway.porter.outward import OutwardRelay
from gateway.porter.relay import Relay
from tests.support.hosts import HostMaker, host_maker
from tests.support.waiting import turns, until

pytestmark = pytest.mark.anyio

BLOCK_BYTES = 1 << 16
BLOCKS = 64
FORMAT = BlockFormat("7", "m", "r", "kv", BLOCK_BYTES)


@dataclass
class TwoHosts:
    """A machine m2 that takes in KV behind its porter, and the folder of m1, whose porter lets its replicas out."""

    hosts: HostMaker
    near: Path
    area: StagingArea
    port: int
    removed: set[str]
    distrusted: set[str]

    def address(self, machine: str = "m2", name: str = "r-kv") -> str:
        return machine_address(machine, f"127.0.0.1:{self.port}", name)

    async def push(self, address: str) -> OutgoingHandover:
        """A handover of some blocks to there, once it has ended."""
        plan = HandoverPlan(address, "7", secrets.token_bytes(32), BLOCKS)
        sender = OutgoingHandover(plan, FORMAT, partial(dial, folder=str(self.near)), lambda: None, 5.0)
        while sender.pushed < BLOCKS and not sender.ended:
            if (piece := sender.piece(min(sender.max_run, BLOCKS - sender.pushed))) is None:
                await turns()
                continue
            assert isinstance(piece, HostPiece)
            size = len(piece.view)
            piece.view[:] = bytes(range(256)) * (size // 256)
            sender.push([b"n" * 32] * (size // BLOCK_BYTES), piece)
        sender.seal()
        await until(lambda: sender.ended, 20, "it ends")
        return sender


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[TwoHosts]:
    hosts, removed, distrusted = host_maker(tmp_path / "hosts"), set[str](), set[str]()
    near, far = tmp_path / "near", tmp_path / "far"
    for folder in (near, far):
        folder.mkdir()
    one, other = hosts.host(HostRole.MACHINE, "m1"), hosts.host(HostRole.MACHINE, "m2")
    area = StagingArea(64 << 20, time.monotonic)
    receiver = HandoverReceiver(listen(f"unix:{far / 'r-kv.sock'}"), area, FORMAT, 5.0)
    door = TlsDoor(other, lambda _: Relay(far, lambda: other.credentials().identity, lambda: frozenset(removed)))
    server = await door.listen("127.0.0.1", 0)
    outward = await OutwardRelay(one, lambda: frozenset(distrusted)).listen(near)
    yield TwoHosts(hosts, near, area, server.sockets[0].getsockname()[1], removed, distrusted)
    outward.close()
    server.close()
    await asyncio.to_thread(receiver.close)


def digest(files: HostFiles) -> str:
    return files.credentials().key_digest


async def test_kv_goes_from_host_to_host_under_certificates(two: TwoHosts) -> None:
    sender = await two.push(two.address())
    assert (sender.state, sender.problem, sender.whole) == (HandoverState.SEALED, "", BLOCKS)
    assert two.area.held == 1


async def test_another_machine_opens_no_socket_but_those_that_take_in_kv(two: TwoHosts) -> None:
    sender = await two.push(two.address(name="r"))
    assert "is where no other host takes KV" in sender.problem, "its own porter lets it out to nothing else"
    context = two.hosts.host(HostRole.MACHINE, "m3").credentials().client
    for name in ("r", "machine", "x"):
        reader, writer = await asyncio.open_connection("127.0.0.1", two.port, ssl=context, server_hostname=f"{name}.m2")
        assert b"it opens to gateways alone" in await reader.read(4096)
        writer.close()


@pytest.mark.parametrize(
    "address", ["unix:/tmp/r-kv", "nonsense", "", "tls:m2@nowhere/r-kv", "tls:m2@127.0.0.1:1/r-kv", "tls:" + "m" * 9000]
)
async def test_the_way_out_leads_nowhere_else(two: TwoHosts, address: str) -> None:
    reader, writer = await asyncio.open_unix_connection(two.near / "_out.sock")
    writer.write(address.encode() + b"\n")
    answer = await reader.readline()
    assert len(answer) > 1
    assert await reader.read() == b""
    writer.close()


async def test_a_host_that_is_not_the_machine_of_the_address_gets_nothing(two: TwoHosts) -> None:
    sender = await two.push(two.address("m9"))
    assert sender.state is HandoverState.FAILED
    assert "the machine m2 answers there, and not the machine m9" in sender.problem
    assert two.area.held == 0


async def test_removed_hosts_get_nothing_either_way(two: TwoHosts) -> None:
    two.distrusted.add(digest(HostFiles(two.hosts.paths("m2"))))
    assert "was removed" in (await two.push(two.address())).problem
    two.distrusted.clear()
    two.removed.add(digest(HostFiles(two.hosts.paths("m1"))))
    assert (await two.push(two.address())).state is HandoverState.FAILED
    assert two.area.held == 0


async def test_without_a_porter_nothing_goes_to_other_hosts(two: TwoHosts, tmp_path: Path) -> None:
    two.near = tmp_path
    assert (await two.push(two.address())).state is HandoverState.FAILED
