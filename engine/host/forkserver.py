"""Starts replicas as forks of a zygote, a process that has imported all that they need. It knows processes and
descriptors, no models and no torch.

The zygote (engine.replica.zygote) forks twice, so that what it forks becomes this process's own child: signals, exit
statuses and deaths are those of any child, and replicas outlive a zygote that dies. While there is none, replicas are
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
from engine.process.supervised import Backoff, start_child
from engine.protocol.specs import ReplicaSpec

LENGTH_PREFIX: Final = struct.Struct(">I")  # before a request, its bytes; the answer to one, the process id or 0
READY: Final = b"r"  # from the zygote, once
GO: Final = b"g"  # to a replica that was forked, once this process knows of it
_WARMING_S: Final = 60.0  # for its imports; with a disk that cold no other process imports faster
_ANSWER_S: Final = 2.0  # a fork takes some 20 ms
_BACKOFF_S: Final = (1.0, 300.0)  # before it is started again: at first, and at most
_STABLE_S: Final = 600.0  # one that lasted so long begins with the shortest pause again
_PR_SET_CHILD_SUBREAPER: Final = 36


class ForkRequest(msgspec.Struct, frozen=True, array_like=True):
    """To the zygote, with two descriptors: where the replica writes, and where it reads that it may go on."""

    spec: ReplicaSpec
    environment: dict[str, str]


class ForkedProcess:
    """A child of this process that the zygote forked."""

    def __init__(self, pid: int, output: int) -> None:
        """`output` is closed by `close`."""
        self.pid = pid
        self.output = output
        self._status: int | None = None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        status = self._reap(0)
        assert status is not None
        return status

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        os.close(self.output)

    def _signal(self, number: int) -> None:
        if self.poll() is None:  # until it is collected its number belongs to nobody else
            os.kill(self.pid, number)

    def _reap(self, options: int) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status


class ForkserverLauncher:
    """Replicas as forks of a zygote, which is started again with back-off when it ends. On Linux; call it from the main
    thread, and let nothing else in this process have children that live on: orphans among its descendants become
    its children, and are collected here."""

    def __init__(
        self, modules: Sequence[str], fallback: ReplicaLauncher, clock: Callable[[], float],
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """`modules` are what the zygote imports, and with `module:function` calls; `fallback` starts replicas while
        there is none. `environment` is what libraries read as the zygote loads them: for a fork's it is too late."""
        assert sys.platform == "linux"
        self._modules = modules
        self._fallback = fallback
        self._clock = clock
        # Libraries that start threads as they are loaded would leave forks without them.
        self._environment = {**(environment or {}), "OPENBLAS_NUM_THREADS": "1"}
        self._zygote: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._warm = False
        self._started_at = 0.0
        self._start_at = 0.0
        self._backoff = Backoff(*_BACKOFF_S)
        self._replicas: list[ReplicaProcess] = []
        _adopt_orphans(True)

    def ready(self, now: float) -> bool:
        """As in ReplicaLauncher. A new program would have to import what the first zygote imports; nothing waits for
        its successors."""
        self._collect_orphans()
        if self._zygote is None:
            if now >= self._start_at:
                self._start_zygote(now)
        elif self._zygote.poll() is not None:
            self._on_lost(f"ended with status {self._zygote.returncode}", now)
        elif not self._warm:
            self._await_ready(now)
        return self._warm or self._backoff.failures > 0 or now - self._started_at > _WARMING_S

    @property
    def zygote(self) -> int | None:
        """The process id of the zygote, while there is one."""
        return None if self._zygote is None else self._zygote.pid

    def start(self, spec: ReplicaSpec, environment: Mapping[str, str]) -> ReplicaProcess:
        process: ReplicaProcess | None = None
        if self._warm:
            try:
                process = self._fork(ForkRequest(spec, dict(environment)))
            except OSError as error:
                self._on_lost(str(error) or type(error).__name__, self._clock())
        process = process or self._fallback.start(spec, environment)
        self._replicas.append(process)
        return process

    def close(self) -> None:
        self._end_zygote()
        self._collect_orphans()
        _adopt_orphans(False)

    def _start_zygote(self, now: float) -> None:
        local_socket, child_socket = socket.socketpair()
        self._started_at = now
        with child_socket:
            try:
                self._zygote = start_child(
                    [sys.executable, "-P", "-m", "engine.replica.zygote", str(child_socket.fileno()), *self._modules],
                    environment=self._environment,
                    descriptors=[child_socket.fileno()],
                )
            except OSError as error:
                local_socket.close()
                self._on_lost(str(error), now)
                return
        self._socket = local_socket

    def _await_ready(self, now: float) -> None:
        """Takes in that the zygote has imported all, where it says so."""
        assert self._socket is not None
        try:
            self._warm = self._socket.recv(len(READY), socket.MSG_DONTWAIT) == READY
        except BlockingIOError:
            return
        if self._warm:
            assert self._zygote is not None
            self._socket.settimeout(_ANSWER_S)
            log("warm_parent_ready", pid=self._zygote.pid, seconds=round(now - self._started_at, 3))

    def _fork(self, request: ForkRequest) -> ForkedProcess:
        """Raises OSError, TimeoutError among them; then what may have been forked ends, as nobody tells it to go on."""
        with contextlib.ExitStack() as closing:
            reading, output = _pipe(closing)
            gone, go = _pipe(closing)
            pid = self._request(msgspec.msgpack.encode(request), [output, gone])
            os.write(go, GO)
            return ForkedProcess(pid, os.dup(reading))

    def _request(self, body: bytes, files: list[int]) -> int:
        assert self._socket is not None
        socket.send_fds(self._socket, [LENGTH_PREFIX.pack(len(body))], files)
        self._socket.sendall(body)
        answer = self._socket.recv(LENGTH_PREFIX.size, socket.MSG_WAITALL)
        pid: int = LENGTH_PREFIX.unpack(answer)[0] if len(answer) == LENGTH_PREFIX.size else 0
        if pid == 0:
            raise OSError("it cannot fork")
        return pid

    def _on_lost(self, problem: str, now: float) -> None:
        if self._warm and now - self._started_at > _STABLE_S:
            self._backoff.reset()
        self._end_zygote()
        pause_s = self._backoff.fail()
        self._start_at = now + pause_s
        log("warm_parent_lost", level="warning", problem=problem, again_after_s=pause_s)

    def _end_zygote(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._zygote is not None:
            self._zygote.kill()
            self._zygote.wait()
        self._zygote, self._socket, self._warm = None, None, False

    def _collect_orphans(self) -> None:
        self._replicas = [process for process in self._replicas if process.poll() is None]
        known = {process.pid for process in self._replicas} | (
            {self._zygote.pid} if self._zygote is not None else set()
        )
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in known:
                    return  # it ended just now, and is looked at before the rest the next time
                os.waitpid(ended.si_pid, 0)


def _pipe(closing: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe, both ends of which are closed with `closing`."""
    ends = os.pipe()
    for end in ends:
        closing.callback(os.close, end)
    return ends


def _adopt_orphans(enabled: bool) -> None:
    """Whether descendants whose parents have ended become this process's children, rather than those of process 1."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(enabled))
