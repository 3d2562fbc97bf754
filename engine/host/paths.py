"""The places that an agent has on its host: the lock on its folder, where it and its replicas listen, and the cache of
compiled kernels. It knows neither processes nor models' weights."""

import contextlib
import fcntl
import hashlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from engine.hostinfo.gpus import KERNEL_CACHE_VARIABLE
from engine.log import log
from engine.protocol import connection
from engine.protocol.address import parse_address
from engine.protocol.specs import MachineSpec, ModelSpec


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


def replica_addresses(spec: MachineSpec) -> Iterator[tuple[ModelSpec, str, str]]:
    """(model, file name, address) of every replica. A machine on tcp: gives its replicas the ports after its own."""
    target, count = parse_address(spec.address), 0
    for model in spec.models:
        digest = hashlib.sha256(model.name.encode()).hexdigest()[:12]
        for index in range(model.replicas):
            count += 1
            name = f"{digest}-{index}"
            if isinstance(target, str):
                yield model, name, f"unix:{Path(spec.folder) / name}.sock"
            else:
                yield model, name, f"tcp:{target[0]}:{target[1] + count}"


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
        log("kernel_cache_not_kept", folder=str(folder), error=str(error), instead=instead)
        return instead


def open_listener(address: str) -> socket.socket:
    """A listening socket, as `connection.listen` makes it. Raises AgentStartError where that is not possible."""
    try:
        return connection.listen(address)
    except OSError as error:
        raise AgentStartError(f"cannot listen on {address}: {error}") from error
