"""Two real gateways, a real Redis behind a line that can be slow, and stub replicas that fail now and then: processes
all, to be killed, frozen and started again. It does not know who calls them.
"""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx

from gateway.settings.config import load_config
from gateway.state_dir import server_secret
from tenants.auth.accounts import AccountService
from tenants.limits.caps import limited_subjects
from tenants.open import open_store
from tenants.records.limits import Limits
from tenants.store.protocol import Store
from tests.support.redis_server import RedisServer, free_port
from tests.support.stub_replica import MODEL
from tests.support.waiting import until

ROOT: Final = Path(__file__).parents[2]
START_S: Final = 60.0
INPUT_PRICE: Final = 1000.0
OUTPUT_PRICE: Final = 4000.0


@dataclass(frozen=True)
class Tenant:
    """An account, its one token, and what each may use."""

    account_id: str
    token_id: str
    token: str = field(repr=False)
    limits: Limits = field(repr=False)
    token_limits: Limits = field(repr=False)

    @property
    def subjects(self) -> list[tuple[str, Limits]]:
        """Whose limits its calls are measured against."""
        return limited_subjects(self.limits, self.token_id, self.token_limits, "")


@dataclass(frozen=True)
class Death:
    """A gateway was killed, in monotonic seconds."""

    gateway: int
    at: float


@dataclass
class Cluster:
    """All that runs. `deaths` are those of gateways, killed or hurried on purpose."""

    folder: Path
    redis: RedisServer
    line: "subprocess.Popen[str]"
    ports: list[int]
    store_url: str
    program: Sequence[str] = ("-m", "gateway.cli")
    deaths: list[Death] = field(default_factory=list)
    _gateways: "dict[int, subprocess.Popen[bytes]]" = field(default_factory=dict)

    def store(self, clock: Callable[[], float] | None = None) -> Store:
        """Straight to Redis, past the slow line."""
        return open_store(self.store_url, clock)

    async def tenants(self, limits: Sequence[tuple[Limits, Limits]]) -> list[Tenant]:
        """New accounts, of such limits and such of their token."""
        store = self.store()
        accounts = AccountService(store, server_secret(load_config(self.folder / "hearth.toml")))
        made = []
        for number, (of_account, of_token) in enumerate(limits):
            account = await accounts.create(f"tenant-{number}-{secrets.token_hex(3)}", of_account)
            token, text = await accounts.mint(account.id, "chaos", limits=of_token)
            made.append(Tenant(account.id, token.id, text, account.limits, of_token))
        await store.close()
        return made

    async def start_gateway(self, gateway: int) -> None:
        """Returns once it is ready."""
        self._gateways[gateway] = process = self._launch(gateway)
        url = f"http://127.0.0.1:{self.ports[gateway]}/readyz"
        async with httpx.AsyncClient() as client:

            async def ready() -> bool:
                assert process.poll() is None, self._said(gateway)
                with contextlib.suppress(httpx.TransportError):
                    return (await client.get(url)).status_code == 200
                return False

            await until(ready, START_S, "the gateway is ready")

    def _launch(self, gateway: int) -> "subprocess.Popen[bytes]":
        command = [sys.executable, *self.program, "gateway", "--port", str(self.ports[gateway])]
        with self._log(gateway).open("a") as log:
            return subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, env=_environment())

    def _log(self, gateway: int) -> Path:
        return self.folder / f"gateway-{gateway}.log"

    def _said(self, gateway: int) -> str:
        return self._log(gateway).read_text()[-3000:]

    def kill_gateway(self, gateway: int) -> None:
        """As the kernel ends a process that has no memory left."""
        self.deaths.append(Death(gateway, time.monotonic()))
        self._gateways[gateway].kill()
        self._gateways[gateway].wait()

    async def drain_gateways(self, *chosen: int, hurried: bool = False) -> None:
        """Ends them, or those that are named, as an operator does, who may have no time for streams to end; each must
        end well."""
        ending = {gateway: self._gateways[gateway] for gateway in chosen or tuple(self._gateways)}
        for process in ending.values():
            process.send_signal(signal.SIGTERM)
        for gateway, process in ending.items() if hurried else ():
            await until(lambda gateway=gateway: self._drains(gateway), 30, "it drains")
            self.deaths.append(Death(gateway, time.monotonic()))  # a call that is on its way then is cut
            process.send_signal(signal.SIGTERM)
        for gateway, process in ending.items():
            status = await asyncio.to_thread(process.wait, 30)
            assert status == 0, (gateway, status, self._said(gateway))
            del self._gateways[gateway]

    async def _drains(self, gateway: int) -> bool:
        """Whether it takes no new calls any more."""
        try:
            async with httpx.AsyncClient() as client:
                return (await client.get(f"http://127.0.0.1:{self.ports[gateway]}/readyz")).status_code == 503
        except httpx.TransportError:
            return True

    def outbox(self) -> list[Path]:
        """Settlements that wait for the store."""
        return list((self.folder / ".hearth" / "outbox").glob("*.outbox"))

    def end(self) -> None:
        for process in self._gateways.values():
            process.kill()
            process.wait()


@contextlib.asynccontextmanager
async def cluster(
    folder: Path,
    program: Sequence[str] = ("-m", "gateway.cli"),
    store_url: str = "",
    server: str = "",
    flaky: bool = True,
) -> AsyncIterator[Cluster]:
    """Ready to answer. `program` is what python runs as `hearth`; `store_url` is of a store other than that Redis;
    `server` are more lines of [server]; unless they are `flaky`, replicas never fail."""
    redis = RedisServer(folder)
    redis.start()
    line_port = free_port()
    ports = [free_port(), free_port()]
    (folder / "hearth.toml").write_text(_settings(folder, store_url or f"redis://127.0.0.1:{line_port}/0", server))
    options = json.dumps({"folder": str(folder), "replicas": 2, "step_s": 0.03, "flaky": flaky})
    try:
        with _helper("slow_line", str(line_port), str(redis.port)) as line, _helper("flaky_fleet", options):
            running = Cluster(folder, redis, line, ports, store_url or redis.url, program)
            try:
                await asyncio.gather(*(running.start_gateway(gateway) for gateway in range(len(ports))))
                yield running
            finally:
                running.end()
    finally:
        redis.close()


@contextlib.contextmanager
def _helper(module: str, *arguments: str) -> "Iterator[subprocess.Popen[str]]":
    """One of the modules beside this one as a process that has said `ready`."""
    command = [sys.executable, "-m", f"tests.end_to_end.{module}", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=_environment())
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}


def _settings(folder: Path, store_url: str, server: str) -> str:
    return f"""
[store]
url = "{store_url}"
[machine]
address = "unix:{folder / "machine.sock"}"
[server]
drain_s = 5
{server}
[[models]]
name = "{MODEL}"
folder = "{ROOT / "engine" / "builtin_model"}"
price = {{ input = {INPUT_PRICE}, output = {OUTPUT_PRICE} }}
"""


# ---- what may happen to Redis ----------------------------------------------------------------------------------------


Fault = Callable[[Cluster], "contextlib.AbstractAsyncContextManager[None]"]


def _fault(begin: Callable[[Cluster], object], heal: Callable[[Cluster], object]) -> Fault:
    @contextlib.asynccontextmanager
    async def fault(running: Cluster) -> AsyncIterator[None]:
        await asyncio.to_thread(begin, running)
        try:
            yield
        finally:
            await asyncio.to_thread(heal, running)

    return fault


FAULTS: Final[dict[str, Fault]] = {
    "killed": _fault(lambda its: its.redis.kill(), lambda its: its.redis.start()),
    "stopped": _fault(lambda its: its.redis.freeze(), lambda its: its.redis.thaw()),
    "slow": _fault(lambda its: its.line.send_signal(signal.SIGUSR1), lambda its: its.line.send_signal(signal.SIGUSR2)),
    "flushed": _fault(lambda its: its.redis.ask("FLUSHALL"), lambda its: its.redis.take_back_flush()),
    "read-only": _fault(
        lambda its: its.redis.ask("REPLICAOF", "127.0.0.1", "1"), lambda its: its.redis.ask("REPLICAOF", "NO", "ONE")
    ),
    "full": _fault(
        lambda its: its.redis.ask("CONFIG", "SET", "maxmemory", "1"),
        lambda its: its.redis.ask("CONFIG", "SET", "maxmemory", "0"),
    ),
}
