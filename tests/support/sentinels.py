"""A primary, its replicas and three Sentinels in network namespaces, whose links a test may cut. It knows no keys.

Each host is a namespace on one bridge and has an address of its own. Where namespaces cannot be made, as without root,
the fixture that uses this skips; loopback alone has no links to cut.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import redis

from tests.support.redis_server import DURABLE, program
from tests.support.waiting import wait_for

NAME: Final = "hearth-test"
PORT: Final = 6379
SENTINEL_PORT: Final = 26379
GUARDED: Final = ("--min-replicas-to-write", "1", "--min-replicas-max-lag", "1")


def can_make_namespaces() -> bool:
    """Whether this process may, on this kernel."""
    if os.geteuid() or shutil.which("ip") is None:
        return False
    name = f"hearth-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        _ip("netns", "del", name)
    return made


@dataclass
class Host:
    """A namespace with a Redis and a Sentinel."""

    number: int
    folder: Path
    network: "SentinelNetwork"
    redis_password: str = ""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def namespace(self) -> str:
        return f"{self.network.prefix}{self.number}"

    @property
    def address(self) -> str:
        return f"{self.network.subnet}.{self.number + 10}"

    def start(self, program_arguments: Sequence[str], log: str) -> "subprocess.Popen[bytes]":
        command = ["ip", "netns", "exec", self.namespace, *program_arguments]
        with (self.folder / log).open("ab") as file:
            process = subprocess.Popen(command, cwd=self.folder, stdout=file, stderr=file)
        self.processes.append(process)
        return process

    def ask(self, *command: str, port: int = PORT) -> Any:
        """One command, over the bridge."""
        with redis.Redis(self.address, port, socket_timeout=5) as client:
            return client.execute_command(*command)

    def answers(self, port: int = PORT) -> bool:
        with contextlib.suppress(redis.RedisError, OSError):
            return bool(self.ask("PING", port=port))
        return False

    def cut(self) -> None:
        """Takes the host off the bridge: packets vanish, and nobody is told."""
        _ip("link", "set", f"{self.namespace}b", "down")

    def heal(self) -> None:
        _ip("link", "set", f"{self.namespace}b", "up")

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


@dataclass
class SentinelNetwork:
    """`hosts[0]` has the first primary. A cut host still talks to itself: a client in its namespace reaches it."""

    folder: Path
    settings: tuple[str, ...] = GUARDED
    replicas: int = 2
    down_after_ms: int = 1000
    prefix: str = field(default_factory=lambda: f"hs{os.getpid() % 100_000:x}")
    hosts: list[Host] = field(default_factory=list)

    @property
    def subnet(self) -> str:
        return f"10.213.{os.getpid() % 200 + 20}"

    @property
    def url(self) -> str:
        places = ",".join(f"{host.address}:{SENTINEL_PORT}" for host in self.hosts)
        return f"sentinel://{places}/{NAME}"

    @contextlib.contextmanager
    def running(self) -> Iterator["SentinelNetwork"]:
        """Everything answers, replicas follow, and the Sentinels know each other."""
        try:
            self._wire()
            for host in self.hosts[: self.replicas + 1]:
                follows = () if host is self.hosts[0] else ("--replicaof", self.hosts[0].address, str(PORT))
                quick = ("--repl-ping-replica-period", "1", "--repl-timeout", "5", "--repl-diskless-sync-delay", "0")
                options = ("--port", str(PORT), "--protected-mode", "no", *DURABLE, *self.settings, *quick)
                host.start([program(), *options, *follows], "redis.log")
            for host in self.hosts[: self.replicas + 1]:
                wait_for(host.answers, what=f"the Redis of host {host.number} answers")
            wait_for(self._all_follow, what="all replicas follow")
            for host in self.hosts:
                self._watch(host)
            wait_for(self._all_known, what="the Sentinels know each other and all replicas")
            yield self
        finally:
            self._clear()

    def _wire(self) -> None:
        _ip("link", "add", f"{self.prefix}br", "type", "bridge")
        _ip("addr", "add", f"{self.subnet}.1/24", "dev", f"{self.prefix}br")
        _ip("link", "set", f"{self.prefix}br", "up")
        for number in range(3):
            host = Host(number, self.folder / f"host-{number}", self)
            host.folder.mkdir(parents=True)
            _ip("netns", "add", host.namespace)
            self.hosts.append(host)
            _ip("link", "add", f"{host.namespace}b", "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            _ip("link", "set", f"{host.namespace}b", "master", f"{self.prefix}br", "up")
            for line in (("addr", "add", f"{host.address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
                _ip("-n", host.namespace, *line)
            _ip("-n", host.namespace, "link", "set", "lo", "up")

    def _watch(self, host: Host) -> None:
        lines = [
            f"port {SENTINEL_PORT}",
            "protected-mode no",
            f"sentinel monitor {NAME} {self.hosts[0].address} {PORT} 2",
            f"sentinel down-after-milliseconds {NAME} {self.down_after_ms}",
            f"sentinel failover-timeout {NAME} 4000",
        ]
        (host.folder / "sentinel.conf").write_text("\n".join(lines) + "\n")
        host.start([program(), "sentinel.conf", "--sentinel"], "sentinel.log")
        wait_for(lambda: host.answers(SENTINEL_PORT), what=f"the Sentinel of host {host.number} answers")

    def _all_follow(self) -> bool:
        replication = self.hosts[0].ask("INFO", "replication")
        online = [
            replica for name, replica in replication.items() if name.startswith("slave") and type(replica) is dict
        ]
        return sum(replica["state"] == "online" for replica in online) == self.replicas

    def _all_known(self) -> bool:
        known = [self._master(host) for host in self.hosts]
        return all((each["num-other-sentinels"], each["num-slaves"]) == (2, self.replicas) for each in known)

    def _master(self, host: Host) -> dict[str, Any]:
        """As redis-py reads it: numbers are numbers."""
        with redis.Redis(host.address, SENTINEL_PORT, socket_timeout=5, decode_responses=True) as client:
            state: dict[str, Any] = client.sentinel_master(NAME)
        return state

    def primary(self, seen_by: int) -> Host:
        """What the Sentinel of a host says."""
        address = self._master(self.hosts[seen_by])["ip"]
        return next(host for host in self.hosts if host.address == address)

    def promoted(self, seen_by: int, within_s: float = 60.0) -> Host:
        """Another primary than the first, as soon as it takes writes; the Sentinel of host `seen_by` says which."""
        wait_for(lambda: self.primary(seen_by) is not self.hosts[0], within_s, "another is promoted")
        host = self.primary(seen_by)
        wait_for(lambda: host.ask("ROLE")[0] == b"master", within_s, "it has taken the role")
        return host

    def _clear(self) -> None:
        for host in self.hosts:
            host.kill()
            for process in host.processes:
                process.wait()
        for host in self.hosts:
            subprocess.run(["ip", "link", "del", f"{host.namespace}b"], capture_output=True)
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self.prefix}br"], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
