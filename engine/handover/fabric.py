"""Endpoints, agents of NIXL, which write memory of one host into memory of another one over what links the two, RDMA
or whatever else UCX finds. Only hosts that declare the same fabric use them, since what they write is not encrypted.

NIXL is imported here alone, once an endpoint is wanted. Where it is not installed or fails, blocks go over the socket,
and the log says why once. It knows no messages, no leases and no blocks.
"""

import ctypes
import mmap
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, Final

from engine.log import log

METADATA_BYTES_MAX: Final = 48 << 10  # of an endpoint's addresses and keys
_BACKEND: Final = "UCX"
_POLL_US: Final = 100_000  # its thread waits for events, and looks without one so often; 0 has it spin
_SPARE_MAX: Final = 4  # endpoints that wait for a handover
_SAID_MAX: Final = 64


class FabricError(Exception):
    """The fabric does not carry, or no longer."""


class FabricEndpoint:
    """Opens memory of this process to writes of another one's endpoint, or writes to what that one opened. For one
    handover at a time, and one thread at a time."""

    def __init__(self) -> None:
        """Raises FabricError."""
        with _errors_of_nixl():
            self._nixl = _bindings()
            config = self._nixl.nixlAgentConfig()
            config.useProgThread, config.useListenThread, config.pthrDelay = True, False, _POLL_US
            self._agent: Any = self._nixl.nixlAgent(f"hearth-{secrets.token_hex(16)}", config)
            self._backends = [self._agent.createBackend(_BACKEND, {})]
        self._registered: list[Any] = []
        self._writes: set[int] = set()
        self._peer = ""
        self._at = 0

    def open(self, memory: mmap.mmap, size: int) -> tuple[bytes, int]:
        """Opens the first `size` bytes to whoever has what it returns: the endpoint's metadata and the memory's
        address. Raises FabricError."""
        with _errors_of_nixl():
            address = self._register(memory, size)
            metadata = self._agent.getLocalMD()
        if len(metadata) > METADATA_BYTES_MAX:
            raise FabricError(f"{len(metadata)} bytes of an endpoint's metadata are over {METADATA_BYTES_MAX}")
        return metadata, address

    def reach(self, metadata: bytes, memory: mmap.mmap) -> None:
        """Gets ready to write from this memory to what the endpoint of this metadata opened. Raises FabricError."""
        with _errors_of_nixl():
            self._at = self._register(memory, len(memory))
            self._peer = self._agent.loadRemoteMD(metadata)
            if isinstance(self._peer, bytes):
                self._peer = self._peer.decode()

    def write(self, offset: int, address: int, size: int) -> int:
        """Begins to write bytes at an offset of the own memory to an address of the other's. Returns a number for
        `written`. Raises FabricError."""
        nixl, source, target = self._nixl, (self._at + offset, size, 0), (address, size, 0)
        with _errors_of_nixl():
            write: int = self._agent.createXferReq(
                nixl.NIXL_WRITE, nixl.nixlXferDList(nixl.DRAM_SEG, [source]),
                nixl.nixlXferDList(nixl.DRAM_SEG, [target]), self._peer, b"", self._backends,
            )  # fmt: skip
            self._writes.add(write)
            self._agent.postXferReq(write, b"")
        return write

    def written(self, write: int) -> bool:
        """Whether a write is there; then it is forgotten. Raises FabricError."""
        with _errors_of_nixl():
            state = self._agent.getXferStatus(write)
            if state == self._nixl.NIXL_IN_PROG:
                return False
            if state != self._nixl.NIXL_SUCCESS:
                raise FabricError(f"a write ended with {state}")
            self._forget(write)
        return True

    def leave(self) -> None:
        """Lets go of memory and of the other endpoint, for the next handover. Raises FabricError."""
        with _errors_of_nixl():
            for write in list(self._writes):
                self._forget(write)
            if self._peer:
                self._agent.invalidateRemoteMD(self._peer)
                self._peer = ""
            while self._registered:
                self._agent.deregisterMem(self._registered.pop(), self._backends)

    def close(self) -> None:
        """Ends it, with its connections: nobody writes to its memory from then on, and it reads none."""
        with suppress(FabricError):
            self.leave()
        self._agent = None

    def _register(self, memory: mmap.mmap, size: int) -> int:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        descriptors = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address, size, 0, b"")])
        self._agent.registerMem(descriptors, self._backends)
        self._registered.append(descriptors)
        return address

    def _forget(self, write: int) -> None:
        """A second release of the same write would end the process."""
        self._writes.discard(write)
        self._agent.releaseXferReq(write)


class FabricEndpoints:
    """The endpoints of a replica whose host declares a fabric. Threads may use it.

    fabric   its name.
    problem  why no blocks go over it; empty where they do.
    """

    def __init__(self, fabric: str) -> None:
        """The first endpoint is made at once: what it wants is loaded before a handover waits for it."""
        self.fabric = fabric
        self.problem = ""
        self._lock = threading.Lock()
        self._spare: list[FabricEndpoint] = []
        self._said: set[str] = set()
        self._closed = False
        try:
            self._spare.append(FabricEndpoint())
        except FabricError as error:
            self.problem = str(error)
            self.say(self.problem)

    def take(self) -> FabricEndpoint:
        """An endpoint, to be given back or closed. Raises FabricError."""
        if self.problem:
            raise FabricError(self.problem)
        with self._lock:
            if self._spare:
                return self._spare.pop()
        return FabricEndpoint()

    def give_back(self, endpoint: FabricEndpoint) -> None:
        """Takes an endpoint that wrote all it had to, and whose memory nobody has to write to any more. Any other one
        is to be closed: what was begun may still come, wherever its memory is used by then."""
        try:
            endpoint.leave()
        except FabricError:
            endpoint.close()
            return
        with self._lock:
            if not self._closed and len(self._spare) < _SPARE_MAX:
                self._spare.append(endpoint)
                return
        endpoint.close()

    def say(self, problem: str) -> None:
        """Logs why blocks go over the socket, once for each reason."""
        with self._lock:
            if problem in self._said or len(self._said) >= _SAID_MAX:
                return
            self._said.add(problem)
        log("handover_fabric_unused", level="warning", fabric=self.fabric, problem=problem)

    def close(self) -> None:
        """Ends those that wait; one that is given back later ends then."""
        with self._lock:
            self._closed = True
            spare, self._spare = self._spare, []
        for endpoint in spare:
            endpoint.close()


def _bindings() -> ModuleType:
    """NIXL's bindings: its endpoint in Python has the thread spin, which takes a core. Raises FabricError."""
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # else it writes to stdout
    try:
        import nixl
    except ImportError as error:
        raise FabricError(f"NIXL is not here ({error}): pip install 'hearth-server[nixl]'") from error
    bindings: ModuleType = nixl._bindings
    return bindings


@contextmanager
def _errors_of_nixl() -> Iterator[None]:
    """Each of its errors has a class of its own, below Exception."""
    try:
        yield
    except FabricError:
        raise
    except Exception as error:
        raise FabricError(f"NIXL: {error}") from error
