"""Starts replicas as forks of a warm parent, which has imported all that they need. It knows processes and descriptors,
no models and no torch.

The warm parent (parent.py) forks twice, so that what it forks becomes this process's own child: signals, exit statuses
and who dies with whom are as for any child, and replicas outlive a warm parent that dies. While there is none they are
started as programs.
"""

import contextlib
import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from engine.host.supervisor import ReplicaLauncher, ReplicaProcess
from engine.log import log
from engine.process.supervised import start_child
from engine.protocol.specs import ReplicaSpec

LENGTH_PREFIX: Final = struct.Struct(">I")  # before a request, its bytes; the answer to one, the process id or 0
READY: Final = b"r"  # from the warm parent, once
GO: Final = b"g"  # to a replica that was forked, when we know of it
_WARMING_S: Final = 60.0  # for its imports; with a disk that cold nobody else's are faster
_ANSWER_S: Final = 2.0  # a fork takes some 20 ms
_BACKOFF_S: Final = 1.0  # before it is started again, doubled for each further time
_BACKOFF_S_MAX: Final = 300.0
_STABLE_S: Final = 600.0  # one that lasted so long begins with the shortest pause again
_PR_SET_CHILD_SUBREAPER: Final = 36


class ForkRequest(msgspec.Struct, frozen=True, array_like=True):
    """To the warm parent, with two descriptors: where the replica writes, and where it reads that it may go on."""

    spec: ReplicaSpec
    environment: dict[str, str]


class ForkedProcess:
    """A child that somebody else forked for us."""

    def __init__(self, pid: int, output: int) -> None:
        """`output` is closed by `close`."""
        self.pid = pid
        self.output = output
        self._status: int | None = None

    def poll(self) -> int | None:
        return self._collected(os.WNOHANG)

    def wait(self) -> int:
        status = self._collected(0)
        assert status is not None
        return status

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        os.close(self.output)

    def _signal(self, number: int) -> None:
        if self.poll() is None:  # until it is collected its number is nobody else's
            os.kill(self.pid, number)

    def _collected(self, how: int) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, how)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status


class ForkserverLauncher:
    """Replicas from a warm parent, which is started again with back-off when it ends. On Linux; call it from the main
    thread, and let nobody else in this process have children that live on: orphans among our descendants become ours
    here, and are collected."""

    def __init__(self, modules: Sequence[str], otherwise: ReplicaLauncher, clock: Callable[[], float]) -> None:
        """`modules` are what the warm parent imports, and with `module:function` calls; `otherwise` starts replicas
        while there is none."""
        assert sys.platform == "linux"
        self._modules = modules
        self._otherwise = otherwise
        self._clock = clock
        self._parent: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._warm = False
        self._began_at = 0.0
        self._again_at = 0.0
        self._failures = 0
        self._started: list[ReplicaProcess] = []
        _adopt_orphans(True)

    def ready(self, now: float) -> bool:
        """As in child.Starts. A new program would have to import what the first warm parent imports; for its successors
        nobody waits."""
        self._collect_orphans()
        if self._parent is None:
            if now >= self._again_at:
                self._begin(now)
        elif self._parent.poll() is not None:
            self._give_up(f"ended with status {self._parent.returncode}", now)
        elif not self._warm:
            self._hear(now)
        return self._warm or self._failures > 0 or now - self._began_at > _WARMING_S

    @property
    def parent(self) -> int | None:
        """The process id of the warm parent, while there is one."""
        return None if self._parent is None else self._parent.pid

    def start(self, spec: ReplicaSpec, environment: Mapping[str, str]) -> ReplicaProcess:
        process: ReplicaProcess | None = None
        if self._warm:
            try:
                process = self._fork(ForkRequest(spec, dict(environment)))
            except OSError as error:
                self._give_up(str(error) or type(error).__name__, self._clock())
        process = process or self._otherwise.start(spec, environment)
        self._started.append(process)
        return process

    def close(self) -> None:
        """Once all that was started has ended."""
        self._end()
        self._collect_orphans()
        _adopt_orphans(False)

    def _begin(self, now: float) -> None:
        ours, its = socket.socketpair()
        self._began_at = now
        with its:
            try:
                self._parent = start_child(
                    [sys.executable, "-P", "-m", "engine.replica.zygote", str(its.fileno()), *self._modules],
                    # Libraries that start threads as they are loaded would leave forks without them.
                    environment={"OPENBLAS_NUM_THREADS": "1"},
                    descriptors=[its.fileno()],
                )
            except OSError as error:
                ours.close()
                self._give_up(str(error), now)
                return
        self._socket = ours

    def _hear(self, now: float) -> None:
        assert self._socket is not None
        try:
            self._warm = self._socket.recv(len(READY), socket.MSG_DONTWAIT) == READY
        except BlockingIOError:
            return
        if self._warm:
            assert self._parent is not None
            self._socket.settimeout(_ANSWER_S)
            log("warm_parent_ready", pid=self._parent.pid, seconds=round(now - self._began_at, 3))

    def _fork(self, request: ForkRequest) -> ForkedProcess:
        """Raises OSError, TimeoutError among them; then what may have been forked ends, as nobody tells it to go on."""
        with contextlib.ExitStack() as closing:
            reading, output = _pipe(closing)
            gone, go = _pipe(closing)
            pid = self._ask(msgspec.msgpack.encode(request), [output, gone])
            os.write(go, GO)
            return ForkedProcess(pid, os.dup(reading))

    def _ask(self, body: bytes, files: list[int]) -> int:
        assert self._socket is not None
        socket.send_fds(self._socket, [LENGTH_PREFIX.pack(len(body))], files)
        self._socket.sendall(body)
        answer = self._socket.recv(LENGTH_PREFIX.size, socket.MSG_WAITALL)
        pid: int = LENGTH_PREFIX.unpack(answer)[0] if len(answer) == LENGTH_PREFIX.size else 0
        if pid == 0:
            raise OSError("it cannot fork")
        return pid

    def _give_up(self, problem: str, now: float) -> None:
        stable = self._warm and now - self._began_at > _STABLE_S
        self._end()
        self._failures = 1 if stable else self._failures + 1
        wait_s = min(_BACKOFF_S * 2.0 ** min(self._failures - 1, 16), _BACKOFF_S_MAX)
        self._again_at = now + wait_s
        log("warm_parent_lost", problem=problem, again_after_s=wait_s)

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._parent is not None:
            self._parent.kill()
            self._parent.wait()
        self._parent, self._socket, self._warm = None, None, False

    def _collect_orphans(self) -> None:
        self._started = [process for process in self._started if process.poll() is None]
        ours = {process.pid for process in self._started} | ({self._parent.pid} if self._parent is not None else set())
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in ours:
                    return  # it ended just now, and is looked at before the rest the next time
                os.waitpid(ended.si_pid, 0)


def _pipe(closing: contextlib.ExitStack) -> tuple[int, int]:
    """Both ends are closed with `closing`."""
    ends = os.pipe()
    for end in ends:
        closing.callback(os.close, end)
    return ends


def _adopt_orphans(wanted: bool) -> None:
    """Whether descendants whose parents have ended become our children, rather than those of process 1."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted))
