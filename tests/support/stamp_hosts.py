"""Hosts as processes, to be killed, frozen and drained: real agents and schedulers, whose model is the stamp engine.

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
from engine.protocol.specs import MachineSpec, ModelSpec, ReplicaSpec
from tests.support.stamp_engine import Temper
from tests.support.stub_replica import MODEL
from tests.support.waiting import wait_for

STAMP: Final = Path(__file__).with_name("stamp_engine.py")
VOCABULARY: Final = 4096  # of the built-in model's tokenizer
END_S: Final = 30.0


class StampHost:
    """One host. `processes` are all that run there."""

    def __init__(self, folder: Path, name: str, temper: Temper) -> None:
        self.name = name
        self.address = f"unix:{folder / name}.sock"
        self._log = folder / f"{name}.log"
        self._temper = temper
        model = ModelSpec(name=MODEL, folder=str(folder), pinned=True)
        self._spec = MachineSpec(
            name=name, address=self.address, folder=str(folder / name), models=[model], threads=1, device="cpu"
        )
        self._agent: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        documents = [msgspec.json.encode(each).decode() for each in (self._spec, self._temper)]
        with self._log.open("a") as log:
            command = [sys.executable, "-m", "tests.support.stamp_hosts", *documents]
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

    async def end(self) -> None:
        """Ends it as an operator does."""
        assert self._agent is not None
        self._agent.send_signal(signal.SIGTERM)
        await asyncio.to_thread(self._agent.wait, END_S)


@contextlib.contextmanager
def stamp_hosts(folder: Path, count: int, step_ms: float = 10.0) -> Iterator[Sequence[StampHost]]:
    """Hosts with a replica each, that are about to serve."""
    temper = Temper(blocks=4096, context_tokens=2048, vocabulary=VOCABULARY, step_ms=step_ms, depth=2)
    hosts = [StampHost(folder, f"host-{index}", temper) for index in range(count)]
    try:
        for host in hosts:
            host.start()
        for host in hosts:
            wait_for(Path(host.address.removeprefix("unix:")).exists, END_S, f"{host.name} is there")
        yield hosts
    finally:
        for host in hosts:
            host.kill()


def main(argv: list[str]) -> int:
    def command(spec: ReplicaSpec) -> list[str]:
        return [sys.executable, str(STAMP), msgspec.json.encode(spec).decode(), argv[1]]

    return agent.main(argv[:1], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
