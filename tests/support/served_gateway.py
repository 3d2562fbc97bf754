"""A whole gateway in this process, on a free port, with a real SQLite store and stub replicas behind real sockets."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import random
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from starlette.routing import Route

from gateway.app import App, build_app
from gateway.catalogue.catalogue import BUILT_IN
from gateway.http.exchange import NO_BODY
from gateway.http.routes import Handler
from gateway.http.server import HttpServer, listen
from gateway.http.tls import open_certificate
from gateway.identity.cell_settings import CellsConfig
from gateway.identity.settings import ClusterConfig
from gateway.observability.tracing import RequestTracer
from gateway.settings.config import Config, ModelEntryConfig, PriceConfig
from gateway.settings.machine import MachineConfig
from gateway.settings.server import ServerConfig
from tenants.auth.accounts import TRUSTED_S, AccountService
from tenants.auth.issuers import Issuer
from tenants.records.limits import Limits
from tenants.records.usage import day_of
from tenants.store.settings import StoreConfig
from tests.support.stub_replica import MODEL, Behaviour, StubFleet, StubReplica
from tests.support.waiting import WITHIN_S, OffsetClock, until

SECRET = bytes(range(32))
IDENTITY = ("certificate", "key", "authority")
PRICE = PriceConfig(input=1000.0, cached_input=100.0, output=4000.0)


def looped(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test on uvloop, as the gateway runs."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        uvloop.run(test(*arguments, **named))

    return run


@dataclass
class Served:
    """What a test sees of it."""

    app: App
    server: HttpServer
    port: int
    fleet: StubFleet
    accounts: AccountService
    account_id: str
    token: str
    clock: OffsetClock

    def see_changes(self) -> None:
        """Moves the clock on until what the gateway knows of accounts and ApiTokens is to be looked up again."""
        self.clock.offset_s += TRUSTED_S

    def serve_healthz(self, handler: Handler) -> None:
        """Lets a test's own handler answer /healthz."""
        routes = self.app._router.routes
        (healthz,) = [route for route in routes if isinstance(route, Route) and route.path == "/healthz"]
        healthz.app = dataclasses.replace(healthz.endpoint, handler=handler)

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
        return self.app._tenancy.quota

    async def records(self) -> list[Any]:
        """The usage records of today, once all settlements are written."""
        await self.quota.flush()
        today = day_of(int(self.app._serving.endpoint.calendar() * 1e6))
        return list(await self.app._tenancy.store.quotas.records(self.account_id, today))

    async def client(self, **options: Any) -> "Client":
        return await Client.connect(self.port, **options)

    async def call(self, path: str, body: Any, method: str = "POST", **headers: str) -> "Answer":
        """One whole call with the account's token; `authorization=""` sends none."""
        client = await self.client()
        try:
            given = {**self.headers, **{name.replace("_", "-"): value for name, value in headers.items()}}
            await client.send(method, path, body, {name: value for name, value in given.items() if value})
            return Answer(await client.head(), client.headers, await client.body())
        finally:
            client.leave()

    async def run(self, **body: Any) -> "Answer":
        """One native call."""
        return await self.call(self.run_path, body)

    async def chat(self, **body: Any) -> "Answer":
        """One OpenAI call; messages are given where none are."""
        messages = [{"role": "user", "content": "hello"}]
        return await self.call("/v1/chat/completions", {"model": MODEL, "messages": messages, **body})

    async def settled(self, seconds: float = WITHIN_S) -> None:
        """Waits until nothing is open: no reservation, no request, no sequence at the replicas."""
        await until(lambda: not (self.quota.open or self.app.open_requests or self.fleet.running), seconds)


@dataclass
class Answer:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def events(self) -> list[Any]:
        """The events of a stream, decoded; comments and [DONE] as they are."""
        return [decoded(block) for block in self.content.split(b"\n\n") if block]

    @property
    def code(self) -> int:
        """The first error's code."""
        return int(self.json["errors"][0]["code"])

    @property
    def message(self) -> str:
        return str(self.json["errors"][0]["message"])


def decoded(block: bytes) -> Any:
    if block.startswith(b":") or block == b"data: [DONE]":
        return block.decode().removeprefix("data: ")
    assert block.startswith(b"data: "), block
    assert b"\n" not in block
    return json.loads(block[6:])


@contextlib.asynccontextmanager
async def served(
    folder: Path,
    *,
    replicas: int = 1,
    limits: Limits | None = None,
    traces: RequestTracer | None = None,
    issuers: Sequence[Issuer] = (),
    store_url: str | None = None,
    models: Sequence[ModelEntryConfig] = (),
    stubs: Sequence[str] = (),
    relays: Sequence[StubReplica] = (),
    machines: Sequence[str] = (),
    account_name: str = "test",
    cells: CellsConfig | None = None,
    cluster: ClusterConfig | None = None,
    machine_region: str | None = None,
    **server: Any,
) -> AsyncIterator[Served]:
    """`server` are settings of [server]; `models` are entries of the catalogue beside its own, or in place of them;
    `stubs` those beside MODEL that have a replica, `relays` replicas of MODEL in place of stubs, `machines`
    addresses of real ones in place of all of these. Without a store's url
    it is an SQLite file of its own. It makes an account of its own, which needs another name where the store has that
    one from another gateway. `cluster` has an identity for machines on other hosts. Its machine is in the gateway's own
    region unless another one is named. With other `cells` there is an identity in its state folder."""
    fleet = StubFleet(folder, replicas)
    fleet.replicas = [*relays] or fleet.replicas
    fleet.replicas += [StubReplica(folder / f"stub-{i}.sock", fleet.behaviour, name) for i, name in enumerate(stubs)]
    config = config_for(folder, fleet, server)
    entries = {entry.name: entry for entry in (*config.models, *models)}
    if machines:
        machine = msgspec.structs.replace(config.machine, addresses=[*machines])
        config = msgspec.structs.replace(config, machine=machine)
    config = msgspec.structs.replace(config, issuers=list(issuers), models=list(entries.values()))
    if store_url is not None:
        config = msgspec.structs.replace(config, store=StoreConfig(url=store_url))
    if cells is not None:
        identity = {name: str(folder / "state" / "identity" / f"{name}.pem") for name in IDENTITY}
        config = msgspec.structs.replace(config, cells=cells, cluster=ClusterConfig(**identity))
    if cluster is not None:
        config = msgspec.structs.replace(config, cluster=cluster)
    clock = OffsetClock()
    app = build_app(config, SECRET, traces, clock)
    region = app._serving.context.limits.region
    fleet.behaviour.region = region if machine_region is None else machine_region
    accounts = app._tenancy.accounts
    account = await accounts.create(account_name, limits)
    _, token = await accounts.mint(account.id, "test")
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    running = HttpServer(app, config.server, open_certificate(config.server))
    async with fleet.serving():
        task = asyncio.create_task(running._serve([listener]))
        try:
            await until(lambda: all(app._serving.context.fleet.hello(name) is not None for name in (MODEL, *stubs)))
            yield Served(app, running, port, fleet, accounts, account.id, token, clock)
        finally:
            running.should_exit = True
            await task


def config_for(folder: Path, fleet: StubFleet, server: dict[str, Any]) -> Config:
    ember = Path(__file__).parents[2] / "engine" / "builtin_model"
    return Config(
        state_folder=str(folder / "state"),
        server=ServerConfig(**{"drain_s": 0.5, "port": 0, **server}),
        store=StoreConfig(url=f"sqlite:{folder / 'hearth.db'}"),
        machine=MachineConfig(address=fleet.address),
        models=[
            ModelEntryConfig(name=MODEL, folder=str(ember), price=PRICE),
            ModelEntryConfig(name=BUILT_IN, price=PRICE),
        ],
    )


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
        return await self.send("POST", path, body, headers)

    async def send(self, method: str, path: str, body: Any, headers: dict[str, str] | None = None) -> "Client":
        """Sends a whole request."""
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        head = {"host": "test", "content-length": str(len(content)), **(headers or {})}
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        self.writer.write(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + content)
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
        if self.status in NO_BODY:
            return b""
        if "content-length" in self.headers:
            return await self.reader.readexactly(int(self.headers["content-length"]))
        return b"".join([piece async for piece in self.chunks()])

    async def chunks(self) -> AsyncIterator[bytes]:
        """The writes of a chunked answer, one by one."""
        while size := int(await self.reader.readline(), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)

    async def events(self) -> AsyncIterator[Any]:
        """The events of a stream, decoded; the strings `[DONE]` and `: ping` as they are."""
        pending = b""
        async for piece in self.chunks():
            pending += piece
            while b"\n\n" in pending:
                block, _, pending = pending.partition(b"\n\n")
                yield decoded(block)

    def leave(self) -> None:
        """Closes the connection at once."""
        self.writer.transport.abort()


async def visit(gateway: Served, rng: random.Random, *, stays: bool) -> None:
    """A stream that is read to its end, or left after a random while."""
    client = await gateway.client()
    native = rng.random() < 0.5
    body: dict[str, Any] = {"max_tokens": rng.randrange(1, 30), "stream": rng.random() < 0.8}
    if native:
        path, body = gateway.run_path, {**body, "prompt": "hello"}
    else:
        path = "/v1/chat/completions"
        body = {**body, "model": MODEL, "messages": [{"role": "user", "content": "hello"}], "n": rng.randrange(1, 4)}
    try:
        await client.post(path, body, gateway.headers)
        if stays:
            assert await client.head() == 200
            await client.body()
        else:
            with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError):
                async with asyncio.timeout(rng.random() * 0.15):
                    await client.head()
                    await client.body()
    finally:
        client.leave()


def open_files() -> int:
    """File descriptors of this process, but those of SQLite, which parks one whenever it shortens its log."""
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += "hearth.db" not in os.readlink(f"/proc/self/fd/{descriptor}")
    return count
