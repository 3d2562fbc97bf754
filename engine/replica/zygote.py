"""The warm parent: a process that has imported all a replica needs, and forks one for each request of its machine.

It computes nothing, starts no thread and never touches a GPU, since neither would survive a fork. What it imported is
shared by all that it forks; they get a spec, an environment and descriptors, and know nothing of it.

    python -m engine.replica.zygote DESCRIPTOR MODULE[:FUNCTION] …

The descriptor is a socket to the agent (host/forkserver.py); when that closes, it ends. The functions are called once.
"""

import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from engine.host.forkserver import GO, LENGTH_PREFIX, READY, ForkRequest
from engine.log import log
from engine.process.allocator import keep_one_arena
from engine.process.supervised import die_with_parent
from engine.replica import server

_IGNORED_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # said to the whole group: the machine decides
_TITLE: Final = "engine.replica.server\0"  # one word of a command line
_ARGUMENTS: Final = 48  # of /proc/self/stat, counted from 1: where the command line lies


class ForkedReplica(NamedTuple):
    """What a fork is to become. `output` is where it writes, `go` where it hears that its machine knows of it."""

    request: ForkRequest
    output: int
    go: int


def main(argv: list[str]) -> int:
    keep_one_arena()
    machine = socket.socket(fileno=int(argv[0]))
    signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED_SIGNALS)
    gc.disable()  # collections find next to nothing in what is imported, and are a fifth of its time
    for name in argv[1:]:
        _import(name)
    gc.freeze()  # a collection in a fork would write to the pages of all that it looks at
    gc.enable()
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        log("warm_parent_has_threads", threads=threads)
    machine.sendall(READY)
    parent = os.getppid()
    child = _serve(machine)
    machine.close()
    return 0 if child is None else _become(child, parent)


def _import(entry: str) -> None:
    """Imports a module, or does without: a replica that lacks it says so itself, with what to do."""
    name, _, function = entry.partition(":")
    try:
        module = importlib.import_module(name)
        if function:
            getattr(module, function)()
    except ImportError as error:
        log("not_imported", module=name, error=str(error))


def _serve(machine: socket.socket) -> ForkedReplica | None:
    """Forks until the machine is gone: then None. Returns in each fork with what that is to become."""
    while (child := _receive(machine)) is not None:
        try:
            pid = _fork()
        except OSError as error:
            log("replica_not_forked", level="warning", error=str(error))
            pid = None
        if pid == 0:
            return child
        os.close(child.output)
        os.close(child.go)
        machine.sendall(LENGTH_PREFIX.pack(pid or 0))
    return None


def _receive(machine: socket.socket) -> ForkedReplica | None:
    head, files, _, _ = socket.recv_fds(machine, LENGTH_PREFIX.size, 2)
    if len(head) < LENGTH_PREFIX.size:
        return None
    (count,) = LENGTH_PREFIX.unpack(head)
    body = machine.recv(count, socket.MSG_WAITALL)
    if len(body) < count:
        return None
    output, go = files
    return ForkedReplica(msgspec.msgpack.decode(body, type=ForkRequest), output, go)


def _fork() -> int:
    """0 in the fork. A process between it and us ends at once, so that it is the machine's, which adopts orphans."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            pid = os.fork()
            if pid:
                os.write(writing, LENGTH_PREFIX.pack(pid))
        except OSError:
            os._exit(1)
        if pid:
            os._exit(0)
        os.close(reading)
        os.close(writing)
        return 0
    os.close(writing)
    answer = os.read(reading, LENGTH_PREFIX.size)
    os.close(reading)
    os.waitpid(between, 0)
    if len(answer) < LENGTH_PREFIX.size:
        raise OSError("there is no memory or no process left for one more")
    pid = LENGTH_PREFIX.unpack(answer)[0]
    assert isinstance(pid, int)
    return pid


def _become(child: ForkedReplica, parent: int) -> int:
    """`parent` is the machine's process."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(child.output, sys.stdout.fileno())
    os.dup2(child.output, sys.stderr.fileno())
    os.close(child.output)
    os.environ.update(child.request.environment)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED_SIGNALS)  # what it was sent meanwhile comes now
    if os.read(child.go, len(GO)) != GO:  # it has not waited for us
        return 0
    os.close(child.go)
    die_with_parent(parent)()
    _set_process_title(_TITLE + child.request.spec.model.name)
    return server.main([msgspec.json.encode(child.request.spec).decode()])


def _set_process_title(title: str) -> None:
    """What `ps` shows: the command line is memory of our own, as long as it was at the start."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, last = (int(field) for field in fields[_ARGUMENTS - 3 : _ARGUMENTS - 1])
    shortened = title.encode()[: last - first - 1]
    ctypes.memmove(first, shortened.ljust(last - first, b"\0"), last - first)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
