"""Hosts as processes, to be killed, frozen and drained: real agents and schedulers, whose model is the stamp engine. On
one network stack they are reached by unix sockets; apart, each in a network namespace, by TLS through their porters.

python -m tests.support.stamp_hosts '<MachineSpec JSON>' '<Temper JSON>'     one host
"""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import psutil

from engine.host import agent
from engine.protocol.address import machine_address
from engine.protocol.specs import MachineSpec, ModelSpec, ReplicaSpec
from gateway.identity.host_identity import HostRole
from gateway.identity.settings import ClusterConfig, IdentityPaths
from gateway.porter.settings import PorterSettings
from tests.support.hosts import HostMaker, host_maker
from tests.support.network import NetworkHost, network
from tests.support.stamp_engine import Temper
from tests.support.stub_replica import MODEL
from tests.support.waiting import wait_for

STAMP: Final = Path(__file__).with_name("stamp_engine.py")
VOCABULARY: Final = 4096  # of the built-in model's tokenizer
END_S: Final = 30.0
PORTER_PORT: Final = 8791
_PARTS: Final = ("certificate", "key", "authority")
GATEWAY: Final = "gw1"


class StampHost:
    """One host, at this address for gateways. `processes` are all that run there."""

    def __init__(self, folder: Path, name: str, temper: Temper, network: NetworkHost | None, hosts: HostMaker) -> None:
        self.name = name
        self.socket = folder / name / "machine.sock"
        self.address = f"unix:{self.socket}"
        self._log = folder / f"{name}.log"
        self._temper = temper
        self._network = network
        porter = None
        if network is not None:
            hosts.host(HostRole.MACHINE, name)
            self.address = machine_address(name, f"{network.address}:{PORTER_PORT}")
            porter = porter_command(self.socket.parent, hosts.paths(name))
        model = ModelSpec(name=MODEL, folder=str(folder), pinned=True)
        self._spec = MachineSpec(
            name=name, address=f"unix:{self.socket}", folder=str(folder / name), models=[model], threads=1,
            device="cpu", porter=porter,
        )  # fmt: skip
        self._agent: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        documents = [msgspec.json.encode(each).decode() for each in (self._spec, self._temper)]
        command = [sys.executable, "-m", "tests.support.stamp_hosts", *documents]
        if self._network is not None:
            self._network.plug(plugged=True)
            command = self._network.command(command)
        with self._log.open("a") as log:
            self._agent = subprocess.Popen(command, stderr=log, stdout=log)

    @property
    def processes(self) -> list[psutil.Process]:
        assert self._agent is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self._agent.pid)
            return [parent, *parent.children(recursive=True)]
        return []

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to all of its processes at once."""
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self) -> None:
        """As a power cut."""
        family = self.processes
        self.send(signal.SIGKILL)
        psutil.wait_procs(family, timeout=END_S)
        assert self._agent is not None
        self._agent.wait(END_S)

    def freeze(self) -> None:
        """Its connections stay open, and nothing comes from it."""
        self.send(signal.SIGSTOP)

    def cut(self) -> None:
        """It goes on, and nothing comes from it or to it."""
        assert self._network is not None
        self._network.plug(plugged=False)

    async def end(self) -> None:
        """Ends it as an operator does."""
        assert self._agent is not None
        self._agent.send_signal(signal.SIGTERM)
        await asyncio.to_thread(self._agent.wait, END_S)


def porter_command(folder: Path, identity: IdentityPaths) -> list[str]:
    """The porter before the sockets in a folder."""
    settings = PorterSettings(
        folder=str(folder), listen=f"0.0.0.0:{PORTER_PORT}", address="",
        certificate=str(identity.certificate), key=str(identity.key), authority=str(identity.authority),
    )  # fmt: skip
    return [sys.executable, "-m", "gateway.porter.porter", msgspec.json.encode(settings).decode()]


def cluster_of(folder: Path) -> ClusterConfig:
    """With what a gateway reaches hosts that are apart."""
    return ClusterConfig(**{part: str(folder / "identities" / GATEWAY / f"{part}.pem") for part in _PARTS})


@contextlib.contextmanager
def stamp_hosts(
    folder: Path, count: int, step_ms: float = 10.0, *, apart: bool = False
) -> Iterator[Sequence[StampHost]]:
    """Hosts with a replica each, that are about to serve. For those that are `apart` it takes root on Linux."""
    temper = Temper(blocks=4096, context_tokens=2048, vocabulary=VOCABULARY, step_ms=step_ms, depth=2)
    identities = host_maker(folder / "identities")
    with contextlib.ExitStack() as stack:
        networks: Sequence[NetworkHost | None] = [None] * count
        if apart:
            (folder / "network").mkdir()
            identities.host(HostRole.GATEWAY, GATEWAY)
            networks = stack.enter_context(network(folder / "network", count))
        hosts = [StampHost(folder, f"host-{i}", temper, each, identities) for i, each in enumerate(networks)]
        for host in hosts:
            host.start()
            stack.callback(host.kill)
        for host in hosts:
            wait_for(host.socket.exists, END_S, f"{host.name} is there")
        yield hosts


def main(argv: list[str]) -> int:
    def command(spec: ReplicaSpec) -> list[str]:
        return [sys.executable, str(STAMP), msgspec.json.encode(spec).decode(), argv[1]]

    return agent.main(argv[:1], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
