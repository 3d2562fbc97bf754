"""Files from host to host over the doors of real hosts: who may ask, what is given, and peers that lie."""

import asyncio
import socket
import struct
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from engine.protocol.address import FILES_SOCKET
from gateway.distribution import transfer
from gateway.distribution.transfer import FileAnswer, FileQuestion, FileServer, PeerFiles, TransferError
from gateway.identity.files import HostFiles
from gateway.identity.host_identity import HostRole
from gateway.identity.tls_door import TlsDoor
from gateway.joining.listener import JoinListener
from gateway.joining.messages import JoinAnswer
from gateway.porter.relay import Relay
from tests.support.hosts import HostMaker, host_maker
from tests.support.redis_server import free_port
from tests.support.waiting import until, wait_for

pytestmark = pytest.mark.anyio
SUM = "ab" * 32
CONTENT = bytes(range(256)) * 9000


@dataclass
class GivingHost:
    """A host whose door lets members through to its files."""

    hosts: HostMaker
    member_id: str
    address: str
    removed: set[str]

    def read(self, files: HostFiles, sha256: str = SUM, offset: int = 0, member_id: str = "") -> bytes:
        peer = PeerFiles(member_id or self.member_id, self.address, files.credentials().client, "test")
        return b"".join(peer.read(sha256, offset))

    async def ask(self, files: HostFiles, **question: object) -> bytes:
        return await asyncio.to_thread(self.read, files, **question)  # type: ignore[arg-type]


async def nobody_joins(*_: object) -> JoinAnswer:
    return JoinAnswer(problem="nobody joins here")


@pytest.fixture(params=HostRole)
async def host(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[GivingHost]:
    """A machine behind its porter's door, or a gateway behind the one where hosts join."""
    hosts, removed, role = host_maker(tmp_path / "hosts"), set[str](), HostRole(request.param)
    files, port = hosts.host(role, "h1"), free_port()
    (tmp_path / "file").write_bytes(CONTENT)
    server = FileServer(tmp_path, {SUM: tmp_path / "file", "gone": tmp_path / "missing"}.get)
    server.start()

    def relay() -> Relay:
        return Relay(tmp_path, lambda: files.credentials().identity, lambda: frozenset(removed))

    if role is HostRole.GATEWAY:
        listening = asyncio.create_task(JoinListener(files, nobody_joins, relay).run("127.0.0.1", port))
    else:
        listening = asyncio.create_task(serve_door(TlsDoor(files, lambda _: relay()), port))
    await until(lambda: listens(port), 10, "the door is open")
    yield GivingHost(hosts, f"{role}/h1", f"127.0.0.1:{port}", removed)
    listening.cancel()
    server.close()


async def serve_door(door: TlsDoor, port: int) -> None:
    await (await door.listen("127.0.0.1", port)).serve_forever()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_members_of_both_roles_get_a_file_from_any_place_on(host: GivingHost) -> None:
    for role in HostRole:
        files = host.hosts.host(role, "h2")
        assert await host.ask(files) == CONTENT
        assert await host.ask(files, offset=len(CONTENT) - 7) == CONTENT[-7:]
        assert await host.ask(files, offset=len(CONTENT) + 1) == b""
        assert await host.ask(files, offset=-1) == b""


@pytest.mark.parametrize("sha256", ["cd" * 32, "gone", "../file", "", "x" * 900])
async def test_what_is_no_file_here_is_said_so(host: GivingHost, sha256: str) -> None:
    with pytest.raises(TransferError, match=f"{host.member_id}: it has no such file"):
        await host.ask(host.hosts.host(HostRole.MACHINE, "h2"), sha256=sha256)


async def test_removed_members_strangers_and_other_clusters_get_nothing(host: GivingHost, tmp_path: Path) -> None:
    removed = host.hosts.host(HostRole.MACHINE, "h2")
    host.removed.add(removed.credentials().key_digest)
    foreign = host_maker(tmp_path / "foreign").host(HostRole.MACHINE, "h2")
    for files in (removed, foreign, host.hosts.expired(HostRole.MACHINE, "h3")):
        with pytest.raises(TransferError):
            await host.ask(files)


async def test_a_host_that_is_another_one_than_its_address_says_is_not_believed(host: GivingHost) -> None:
    with pytest.raises(TransferError, match="what answers at"):
        await host.ask(host.hosts.host(HostRole.MACHINE, "h2"), member_id="machine/h7")


async def test_a_machine_opens_no_other_socket_of_a_host(host: GivingHost, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "machine.sock"))
        agent.listen()
        agent.settimeout(0.2)
        context = host.hosts.host(HostRole.MACHINE, "h2").credentials().client
        where, port = host.address.split(":")
        reader, writer = await asyncio.open_connection(where, int(port), ssl=context, server_hostname="machine.h1")
        assert b"the porter refused" in await reader.read(4096)
        writer.close()
        with pytest.raises(TimeoutError):
            agent.accept()


async def test_more_peers_than_the_limit_are_told_to_look_elsewhere(host: GivingHost, tmp_path: Path) -> None:
    kept = []
    for _ in range(transfer.CONNECTIONS_MAX):
        connection = socket.socket(socket.AF_UNIX)
        await asyncio.to_thread(connection.connect, str(tmp_path / "files.sock"))
        kept.append(connection)
    files = host.hosts.host(HostRole.MACHINE, "h2")
    with pytest.raises(TransferError, match=f"it serves {transfer.CONNECTIONS_MAX} hosts already"):
        await host.ask(files)
    for connection in kept:
        connection.close()

    async def served() -> bool:
        try:
            return await host.ask(files) == CONTENT
        except TransferError:
            return False

    await until(served, 10, "a place is free again")


LENGTH = struct.Struct(">I")


def message(answer: FileAnswer) -> bytes:
    body = msgspec.msgpack.encode(answer)
    return LENGTH.pack(len(body)) + body


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "the connection ended"),
        (LENGTH.pack(1 << 31), "over the limit"),
        (LENGTH.pack(3) + b"\xff\xff\xff", "m1:"),
        (message(FileAnswer(100)) + b"x" * 40, "ended half-way"),
    ],
)
async def test_a_peer_that_answers_nonsense_is_named(tmp_path: Path, answer: bytes, words: str) -> None:
    hosts = host_maker(tmp_path / "hosts")
    context = hosts.host(HostRole.MACHINE, "m1").credentials().server
    listener = socket.create_server(("127.0.0.1", 0))

    def lie() -> None:
        connection, _ = listener.accept()
        with context.wrap_socket(connection, server_side=True) as peer:
            peer.recv(4096)
            peer.sendall(answer)

    thread = threading.Thread(target=lie, daemon=True)
    thread.start()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    peer = PeerFiles("machine/m1", address, hosts.host(HostRole.MACHINE, "m2").credentials().client, "test")
    with pytest.raises(TransferError, match=words):
        await asyncio.to_thread(lambda: list(peer.read(SUM, 0)))
    thread.join(10)
    listener.close()


async def test_a_peer_that_says_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "ANSWER_S", 0.2)
    hosts = host_maker(tmp_path / "hosts")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        peer = PeerFiles("machine/m1", address, hosts.host(HostRole.MACHINE, "m2").credentials().client, "test")
        with pytest.raises(TransferError, match="machine/m1"):
            await asyncio.to_thread(lambda: list(peer.read(SUM, 0)))


async def test_a_question_over_the_limit_ends_its_connection_alone(tmp_path: Path) -> None:
    server = FileServer(tmp_path, lambda _: None)
    server.start()
    with socket.socket(socket.AF_UNIX) as flood, socket.socket(socket.AF_UNIX) as other:
        for connection in (flood, other):
            connection.connect(str(tmp_path / "files.sock"))
            connection.settimeout(10)
        flood.sendall(LENGTH.pack(transfer.QUESTION_BYTES_MAX + 1))
        assert flood.recv(1) == b""
        body = msgspec.msgpack.encode(transfer.FileQuestion(SUM, 0))
        other.sendall(LENGTH.pack(len(body)) + body)
        assert wait_for(lambda: other.recv(4096), 10)
    server.close()


class BareListener:
    """A listener that finds no descriptor for its first peer."""

    def __init__(self, inner: socket.socket) -> None:
        self._inner = inner
        self._problems = [OSError("too many open files")]

    def accept(self) -> object:
        if self._problems:
            raise self._problems.pop()
        return self._inner.accept()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def asked_once(folder: Path) -> FileAnswer:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(30.0)
        peer.connect(str(folder / f"{FILES_SOCKET}.sock"))
        transfer._send(peer, FileQuestion("none", 0))
        try:
            return msgspec.msgpack.decode(transfer._receive(peer, 1024), type=FileAnswer)
        except (EOFError, ConnectionResetError):
            return FileAnswer(problem="it broke off")


def test_a_host_that_lacked_a_descriptor_gives_files_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_ACCEPT_AGAIN_S", 0.01)
    server = FileServer(tmp_path, lambda _: None)
    server._listener = BareListener(server._listener)  # type: ignore[assignment]
    server.start()
    assert asked_once(tmp_path).problem == "it has no such file"
    server.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_one_answer_takes_no_place_from_others(tmp_path: Path) -> None:
    bugs = [KeyError("not foreseen") for _ in range(transfer.CONNECTIONS_MAX)]

    def find(_: str) -> None:
        if bugs:
            raise bugs.pop()

    server = FileServer(tmp_path, find)
    server.start()
    while bugs:
        assert asked_once(tmp_path).problem == "it broke off"
    wait_for(lambda: asked_once(tmp_path).problem == "it has no such file")
    server.close()
