"""The places that an agent has on its host: the lock on its folder, where it and its replicas listen, and the cache of
compiled kernels. It knows neither processes nor models' weights."""

import contextlib
import fcntl
import hashlib
import itertools
import os
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

from engine.hostinfo.gpus import KERNEL_CACHE_VARIABLE
from engine.log import log
from engine.protocol import connection
from engine.protocol.address import parse_address
from engine.protocol.specs import MachineSpec


class AgentStartError(RuntimeError):
    """This agent cannot run; the message says why and what to do."""


def lock_folder(path: Path) -> int:
    """A lock that lasts until the process ends: two machines in one folder would take each other's sockets."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise AgentStartError(f"another machine runs in {path.parent}: stop it, or use another state folder") from None
    return lock


def replica_place(spec: MachineSpec, model: str, taken: Mapping[str, str]) -> tuple[str, str]:
    """(file name, address) for one more replica of a model; `taken` has those of all there are. A machine on tcp: gives
    its replicas the ports after its own."""
    digest = hashlib.sha256(model.encode()).hexdigest()[:12]
    name = next(name for index in itertools.count() if (name := f"{digest}-{index}") not in taken)
    target, addresses = parse_address(spec.address), set(taken.values())
    if isinstance(target, str):
        return name, f"unix:{Path(spec.folder) / name}.sock"
    host, port = target
    free = (address for count in itertools.count(1) if (address := f"tcp:{host}:{port + count}") not in addresses)
    return name, next(free)


def kernel_cache(spec: MachineSpec, scratch: contextlib.ExitStack) -> str:
    """The folder of compiled kernels: what the environment says, else one of this machine; a folder in `scratch`, which
    ends with the machine, where that cannot be written."""
    if KERNEL_CACHE_VARIABLE in os.environ:
        return os.environ[KERNEL_CACHE_VARIABLE]
    folder = Path(spec.cache) if spec.cache is not None else Path(spec.folder) / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return str(folder)
    except OSError as error:
        instead = scratch.enter_context(
            tempfile.TemporaryDirectory(prefix="hearth-kernels-", ignore_cleanup_errors=True)
        )
        log("kernel_cache_not_kept", level="warning", folder=str(folder), error=str(error), instead=instead)
        return instead


def open_listener(address: str) -> socket.socket:
    """A listening socket, as `connection.listen` makes it. Raises AgentStartError where that is not possible."""
    try:
        return connection.listen(address)
    except OSError as error:
        raise AgentStartError(f"cannot listen on {address}: {error}") from error
