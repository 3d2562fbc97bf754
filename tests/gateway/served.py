"""A whole gateway in this process, on a free port, with a real SQLite store and stub replicas behind real sockets."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gateway.app import App, build_app
from gateway.catalogue import BUILT_IN
from gateway.config import Config, MachineConfig, ModelConfig, PriceConfig, ServerConfig, StoreConfig
from gateway.serve import Server, listen
from gateway.traces import Traces
from tenants.accounts import Accounts
from tenants.store import Limits
from tests.gateway.stub_replica import MODEL, Behaviour, StubFleet

SECRET = bytes(range(32))
PRICE = PriceConfig(input=1000.0, cached_input=100.0, output=4000.0)


@dataclass
class Served:
    """What a test sees of it."""

    app: App
    server: Server
    port: int
    fleet: StubFleet
    accounts: Accounts
    account_id: str
    token: str

    @property
    def behaviour(self) -> Behaviour:
        return self.fleet.behaviour

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def run_path(self) -> str:
        return f"/client/v4/accounts/{self.account_id}/ai/run/{MODEL}"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"}

    @property
    def quota(self) -> Any:
        return self.app._gateway.quota

    async def records(self) -> list[Any]:
        """The usage records of today, once all settlements are written."""
        await self.quota.flush()
        store = self.app._store
        from tenants.usage import day_of

        loop_day = day_of(int(self.app._gateway.calendar() * 1e6))
        return list(await store.records(self.account_id, loop_day))

    async def settled(self, seconds: float = 5.0) -> None:
        """Waits until nothing is open: no reservation, no request, no sequence at the replicas."""
        async with asyncio.timeout(seconds):
            while self.quota.open or self.app.open_requests or self.fleet.running:
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def served(
    folder: Path, *, replicas: int = 1, limits: Limits | None = None, traces: Traces | None = None, **server: Any
) -> AsyncIterator[Served]:
    """`server` are settings of [server]."""
    fleet = StubFleet(folder, replicas)
    config = config_for(folder, fleet, server)
    app = build_app(config, SECRET, traces)
    accounts = app._gateway.accounts
    account = await accounts.create("test", limits)
    _, token = await accounts.mint(account.id, "test")
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    running = Server(app, config.server)
    async with fleet.serving():
        task = asyncio.create_task(running._serve([listener]))
        try:
            await until(lambda: app._gateway.fleet.hello(MODEL) is not None)
            yield Served(app, running, port, fleet, accounts, account.id, token)
        finally:
            running.should_exit = True
            await task


def config_for(folder: Path, fleet: StubFleet, server: dict[str, Any]) -> Config:
    ember = Path(__file__).parents[2] / "engine" / "ember" / "model"
    return Config(
        state_folder=str(folder / "state"),
        server=ServerConfig(**{"drain_s": 0.5, "port": 0, **server}),
        store=StoreConfig(url=f"sqlite:{folder / 'hearth.db'}"),
        machine=MachineConfig(address=fleet.address),
        models=[ModelConfig(name=MODEL, folder=str(ember), price=PRICE), ModelConfig(name=BUILT_IN, price=PRICE)],
    )


async def until(true: Any, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.005)


class Client:
    """One raw HTTP connection, so that a test decides when it reads, stops reading and leaves."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.status = 0
        self.headers: dict[str, str] = {}

    @classmethod
    async def connect(cls, port: int, *, receive_bytes: int | None = None) -> "Client":
        """`receive_bytes` is the kernel's receive buffer: small for a client that will not read."""
        raw = socket.socket()
        if receive_bytes is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
        return cls(*await asyncio.open_connection(sock=raw, limit=1 << 20))

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> "Client":
        """Sends a whole request."""
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        head = {"host": "test", "content-length": str(len(content)), **(headers or {})}
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        self.writer.write(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + content)
        await self.writer.drain()
        return self

    async def head(self) -> int:
        """Reads the answer's head."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        self.status = int(lines[0].split()[1])
        self.headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)
        }
        return self.status

    async def body(self) -> bytes:
        if "content-length" in self.headers:
            return await self.reader.readexactly(int(self.headers["content-length"]))
        pieces = []
        async for piece in self.chunks():
            pieces.append(piece)
        return b"".join(pieces)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The writes of a chunked answer, one by one."""
        while size := int(await self.reader.readline(), 16):
            yield await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)

    async def events(self) -> AsyncIterator[Any]:
        """The events of a stream, decoded; the strings `[DONE]` and `: ping` as they are."""
        pending = b""
        async for piece in self.chunks():
            pending += piece
            while b"\n\n" in pending:
                line, _, pending = pending.partition(b"\n\n")
                if line.startswith(b":"):
                    yield line.decode()
                    continue
                assert line.startswith(b"data: "), line
                assert b"\n" not in line
                yield "[DONE]" if line == b"data: [DONE]" else json.loads(line[6:])

    def leave(self) -> None:
        """Closes the connection at once."""
        self.writer.transport.abort()
