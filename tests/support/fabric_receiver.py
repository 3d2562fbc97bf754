"""A receiver of handovers in a process of its own, whose endpoint of NIXL is a real one, and what may go wrong with it.

python tests/support/fabric_receiver.py FABRIC ADDRESS LEASE_S
"""

import ctypes
import importlib
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from engine.handover.fabric import FabricEndpoint, FabricEndpoints
from engine.handover.receiver import BlockFormat, HandoverReceiver
from engine.handover.staged_memory import HostMemory
from engine.handover.staging import StagingArea
from engine.protocol.connection import listen

BLOCK_BYTES: Final = 1 << 18
FORMAT: Final = BlockFormat("7", "m", "r", "kv", BLOCK_BYTES)
LEASE_S: Final = 10.0
LOOPBACK: Final = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}  # of UCX: as if nothing but TCP linked two hosts


def require_nixl() -> None:
    """Skips the tests of a module where NIXL is not."""
    try:
        importlib.import_module("nixl")
    except ImportError as error:
        pytest.skip(f"NIXL is not here ({error}): `make .venv/.nixl` gets it", allow_module_level=True)


class FabricReceiver:
    """The process, as a test sees it."""

    def __init__(self, fabric: str, folder: Path, lease_s: float = LEASE_S) -> None:
        self.address = f"tcp:127.0.0.1:{_free_port()}"
        self.log = folder / f"receiver-{self.address.rpartition(':')[2]}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, fabric, self.address, str(lease_s)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        assert self.ask("ready") is True

    def ask(self, what: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class _Inside:
    """What a test may ask of the process."""

    def __init__(self, fabric: str, address: str, lease_s: str) -> None:
        self.endpoints = FabricEndpoints(fabric)
        self.area = StagingArea(1 << 30, time.monotonic, shares_memory=False)
        self.receiver = HandoverReceiver(listen(address), self.area, FORMAT, float(lease_s), fabric=self.endpoints)

    def ready(self) -> bool:
        return not self.endpoints.problem

    def held(self) -> int:
        return self.area.held

    def counters(self) -> dict[str, int]:
        return dict(self.area.counters)

    def blocks(self) -> list[str]:
        """All bytes of the handover that is held and whole."""
        (staged,) = self.area._held.values()
        memory = staged.memory
        assert isinstance(memory, HostMemory)
        assert memory._fabric is None, "nobody writes to what can be read"
        with memory.view(0, len(staged.names)) as view:
            return [bytes(view[at : at + 16]).hex() for at in range(0, len(view), 16 * 1024)]

    def written(self) -> int:
        """How many blocks an endpoint has begun to write of what still comes, as their first byte shows."""
        return sum(
            1
            for staged in list(self.area._held.values())
            for block in range(staged.max_blocks)
            if isinstance(staged.memory, HostMemory) and staged.memory.mapping[block * BLOCK_BYTES]
        )

    def let_go(self) -> bool:
        """Lets go of what is whole; all memory is zero then."""
        for staged in list(self.area._held.values()):
            staged.release()
        self.area.max_bytes = 1 << 30
        self.area.check()
        return not self.area.held

    def unregister(self) -> bool:
        """Endpoints from now on grant memory that they did not register."""

        def register(endpoint: FabricEndpoint, memory: Any, size: int) -> int:
            return ctypes.addressof(ctypes.c_char.from_buffer(memory))

        FabricEndpoint._register = register  # type: ignore[method-assign]
        return True

    def lose_endpoint(self) -> bool:
        """Ends the endpoint of what still comes, and nothing else."""
        for staged in list(self.area._held.values()):
            if isinstance(staged.memory, HostMemory) and staged.memory._fabric is not None:
                staged.memory._fabric[1].close()
                return True
        return False

    def refuse(self) -> bool:
        """Takes no more."""
        self.area.max_bytes = 0
        return True

    def drop(self) -> bool:
        """Drops what still comes."""
        self.receiver.close()
        return True


def main() -> None:
    inside = _Inside(*sys.argv[1:])
    for line in sys.stdin:
        print(json.dumps(getattr(inside, line.strip())()), flush=True)


if __name__ == "__main__":
    main()
