"""Clients that mean ill, from a process of their own, and clients that go on as if there were none.

    python -m tests.support.hostile_clients '{"port": 8787, "source": "127.0.0.2", "connections": 300, "tls": false}'

Whoever is cut off comes back at once. It says `besieged` once all have connected, and goes on until it is killed.
"""

import asyncio
import contextlib
import itertools
import json
import random
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import uvloop

from tests.support.served_gateway import Client, Served
from tests.support.waiting import until

COME_BACK_S: Final = 0.5
REQUEST_S: Final = 10.0  # a legitimate request that takes longer has failed
HEAD: Final = b"host: x\r\nauthorization: Bearer hearth_no\r\n"
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def send(writer: asyncio.StreamWriter, piece: bytes, pause_s: float) -> None:
    if writer.transport.is_closing():
        raise ConnectionResetError
    writer.write(piece)
    await writer.drain()
    await asyncio.sleep(pause_s)


async def slow_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /v1/models HTTP/1.1\r\n")
    for letter in itertools.cycle(b"x: y\r\n"):
        await send(writer, bytes([letter]), 0.5)


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def endless_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /v1/models HTTP/1.1\r\n")
    for number in itertools.count():
        await send(writer, b"x%d: %s\r\n" % (number, b"y" * 4000), 0.02)


async def endless_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\n" + HEAD + b"content-length: 1000000000000\r\n\r\n")
    while True:
        await send(writer, bytes(16_000), 0.2)


async def endless_chunks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /healthz HTTP/1.1\r\n" + HEAD + b"transfer-encoding: chunked\r\n\r\n")
    while True:
        await send(writer, b"1\r\nx\r\n" * 100, 0.5)


async def no_reading(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers that name the path, until no buffer takes more of them."""
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    while True:
        await send(writer, (b"GET /" + b"%01" * 199 + b" HTTP/1.1\r\nhost: x\r\n\r\n") * 10, 2)


ATTACKS: Final = (slow_head, silence, endless_head, endless_body, endless_chunks, no_reading)


@dataclass(frozen=True, slots=True)
class Camp:
    """Where they come from and where they go."""

    port: int
    source: str
    connections: int
    tls: bool

    async def connect(self, secure: bool) -> Pair:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        try:
            raw.bind((self.source, 0))
            await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", self.port))
            context = ssl._create_unverified_context() if secure else None
            return await asyncio.open_connection(sock=raw, ssl=context, server_hostname="x" if secure else None)
        except BaseException:
            raw.close()
            raise

    async def attack(self, number: int, connected: set[int]) -> None:
        """One connection after the other, for ever."""
        half_open = self.tls and number % 3 == 0
        attack: Callable[..., Awaitable[None]] = silence if half_open else ATTACKS[number % len(ATTACKS)]
        while True:
            with contextlib.suppress(OSError, EOFError, RuntimeError):  # uvloop's word for a connection that is closed
                reader, writer = await self.connect(self.tls and not half_open)
                connected.add(number)
                try:
                    if half_open:
                        writer.write(b"\x16\x03\x01\x02\x00\x01")
                    await attack(reader, writer)
                finally:
                    writer.transport.abort()
            await asyncio.sleep(COME_BACK_S)

    async def besiege(self) -> None:
        connected: set[int] = set()
        async with asyncio.TaskGroup() as group:
            for number in range(self.connections):
                group.create_task(self.attack(number, connected))
            await until(lambda: len(connected) >= self.connections * 0.9)
            print("besieged", flush=True)


@contextlib.asynccontextmanager
async def besieged(port: int, *, source: str, connections: int, tls: bool) -> AsyncIterator[None]:
    """From when all attackers have connected."""
    options = json.dumps({"port": port, "source": source, "connections": connections, "tls": tls})
    command = [sys.executable, "-m", "tests.support.hostile_clients", options]
    root = Path(__file__).parents[2]
    child = await asyncio.create_subprocess_exec(*command, cwd=root, stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        async with asyncio.timeout(40):
            assert (await child.stdout.readline()).strip() == b"besieged"
        yield
    finally:
        child.kill()
        await child.wait()


@dataclass(slots=True)
class Fared:
    """How it went for the legitimate."""

    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def succeeded(self) -> float:
        return len(self.seconds) / (len(self.seconds) + len(self.failures))


async def go_on(gateway: Served, context: ssl.SSLContext | None, clients: int, seconds: float) -> Fared:
    """Streams, whole answers and lists, on new connections and on kept ones, from as many clients at once."""
    fared, ends = Fared(), time.monotonic() + seconds

    async def client(rng: random.Random) -> None:
        while time.monotonic() < ends:
            requests = rng.randrange(1, 4)  # on one connection
            began = time.monotonic()
            try:
                async with asyncio.timeout(REQUEST_S):
                    connected = await connect(gateway, context)
                try:
                    for _ in range(requests):
                        async with asyncio.timeout(REQUEST_S):
                            await request(gateway, connected, rng)
                        fared.seconds.append(time.monotonic() - began)
                        began = time.monotonic()
                finally:
                    connected.leave()
            except (OSError, EOFError, AssertionError) as error:
                fared.failures.append(repr(error))
            await asyncio.sleep(rng.random() * 0.1)

    await asyncio.gather(*(client(random.Random(seed)) for seed in range(clients)))
    return fared


async def connect(gateway: Served, context: ssl.SSLContext | None) -> Client:
    if context is None:
        return await gateway.client()
    pair = await asyncio.open_connection("127.0.0.1", gateway.port, ssl=context, limit=1 << 20)
    return Client(*pair)


async def request(gateway: Served, client: Client, rng: random.Random) -> None:
    kind = rng.randrange(3)
    if kind == 0:
        await client.send("GET", "/v1/models", b"", gateway.headers)
    else:
        body: dict[str, Any] = {"prompt": "hello", "max_tokens": 5, "stream": kind == 1}
        await client.post(gateway.run_path, body, gateway.headers)
    assert await client.head() == 200, client.status
    content = await client.body()
    assert kind != 1 or content.endswith(b"data: [DONE]\n\n"), content


if __name__ == "__main__":
    uvloop.run(Camp(**json.loads(sys.argv[1])).besiege())
