"""The one process per host that owns it: starts replicas, watches them, starts them again, and tells gateways.

One thread, one selector, no torch: it knows processes, files and clocks, and nothing of tokens.

    python -m engine.machine '<MachineSpec JSON>'

A crash is noticed by the child's signal, a hang by a pulse that stands still (hung processes are killed: SIGKILL
also ends a stopped one). Replicas die with this process, whatever ends it. SIGTERM drains them; a second one, or the
deadline, kills them.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import selectors
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, repeat
from pathlib import Path
from typing import Final

import msgspec

from engine import gpus
from engine.log import log, write
from engine.pulse import Phase, Pulse
from engine.wire import (
    Fleet,
    FrameError,
    FrameReader,
    MachineSpec,
    ModelSpec,
    ReplicaSpec,
    ReplicaState,
    Residency,
    Telemetry,
    encode,
    memory_path,
    parse_address,
)

_LINE_BYTES_MAX: Final = 4096
_UNSENT_BYTES_MAX: Final = 4 << 20
_CONNECTIONS_MAX: Final = 256
_PR_SET_PDEATHSIG: Final = 1
_CACHE_NAME: Final = "TRITON_CACHE_DIR"
_SERVING: Final = (Phase.IDLE, Phase.STEP)

Command = Callable[[ReplicaSpec], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a replica may be silent in each phase, and how its machine waits. Seconds."""

    step_s: float = 4.0  # IDLE and STEP: a beat per layer, twice a second when idle
    starting_s: float = 300.0  # imports from a cold disk
    loading_s: float = 300.0  # LOADING and COMPILING: between two beats, not in all
    stopping_s: float = 30.0
    look_s: float = 0.2  # between two looks at the pulses
    backoff_s: float = 0.5  # before the first restart, doubled for each further one
    backoff_s_max: float = 30.0
    stable_s: float = 60.0  # a replica that served this long starts again without back-off
    drain_s: float = 30.0  # from SIGTERM to SIGKILL

    def for_phase(self, phase: Phase) -> float:
        if phase in _SERVING:
            return self.step_s
        if phase is Phase.STARTING:
            return self.starting_s
        return self.stopping_s if phase is Phase.STOPPING else self.loading_s


class MachineError(RuntimeError):
    """This machine cannot run; the message says why and what to do."""


class Replica:
    """One place for a replica: at most one process at a time, and what is known of it."""

    def __init__(
        self, model: ModelSpec, address: str, pulse: Path, patience: Patience, command: Command,
        environment: dict[str, str],
    ) -> None:  # fmt: skip
        """`environment` is what its processes have beyond this one's own."""
        self.model = model
        self.address = address
        self.boot = 0
        self.problem = "not started yet"
        self.process: subprocess.Popen[bytes] | None = None
        self.start_at = 0.0
        self._pulse_path = pulse
        self._pulse: Pulse | None = None
        self._patience = patience
        self._command = command
        self._environment = environment
        self._word = (Phase.STARTING, 0)
        self._beat_at = 0.0
        self._serving_since: float | None = None
        self._failures = 0
        self._unended = b""
        self._lines: deque[str] = deque(maxlen=3)

    @property
    def state(self) -> ReplicaState:
        serving = self.process is not None and self._word[0] in _SERVING
        residency = Residency.DEVICE if serving else Residency.DISK
        return ReplicaState(self.model.name, self.address, residency, self.boot, "" if serving else self.problem)

    def start(self, device: str, threads: int | None, telemetry: Telemetry | None, now: float) -> bool:
        """Starts the process; its stdout and stderr are one pipe, `output`. False where there is none: no program, no
        memory, no room on the disk. Then it is tried again like one that ended."""
        assert self.process is None
        self.boot += 1
        self._remove_files()
        if self._pulse is not None:
            self._pulse.close()
        self._serving_since = None
        self._unended = b""
        self._lines.clear()
        self.problem = "loading"
        spec = ReplicaSpec(
            model=self.model,
            address=self.address,
            pulse=str(self._pulse_path),
            boot=self.boot,
            device=device,
            threads=threads,
            telemetry=telemetry,
        )
        try:
            self._pulse = Pulse.create(self._pulse_path)
            self._word, self._beat_at = self._pulse.read(), now
            self.process = subprocess.Popen(
                self._command(spec),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment},
                preexec_fn=_dies_with(os.getpid()),
            )
        except OSError as error:
            wait_s = self._back_off(now)
            self.problem = f"cannot be started, tried again after {wait_s:g} s: {error}"
            log("replica_not_started", model=self.model.name, error=str(error), again_after_s=wait_s)
            return False
        os.set_blocking(self.output, False)
        gpu = self._environment.get(gpus.ENVIRONMENT_NAME)
        log("replica_started", model=self.model.name, pid=self.process.pid, boot=self.boot, gpu=gpu)
        return True

    @property
    def output(self) -> int:
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def look(self, now: float) -> None:
        """Reads the pulse, and kills a process that is silent for longer than its phase allows."""
        if self.process is None or self._pulse is None:
            return
        word = self._pulse.read()
        if word != self._word:
            self._word, self._beat_at = word, now
            if word[0] in _SERVING and self._serving_since is None:
                self._serving_since = now
                log("replica_ready", model=self.model.name, pid=self.process.pid, boot=self.boot)
            return
        silent_s = now - self._beat_at
        if silent_s > self._patience.for_phase(word[0]):
            self._lines.append(f"silent for {silent_s:.1f} s in phase {word[0].name}, so it was killed")
            log("replica_hung", model=self.model.name, pid=self.process.pid, phase=word[0].name, silent_s=silent_s)
            self._beat_at = now
            self.process.kill()

    def forgive(self, now: float) -> None:
        """This machine was itself not running for a while: nobody is judged by that time."""
        self._beat_at = now

    def reap(self, now: float) -> bool:
        """Whether the process has ended; then it is collected, and `start_at` says when the next one may start."""
        if self.process is None or (status := self.process.poll()) is None:
            return False
        self.read()
        assert self.process.stdout is not None
        self.process.stdout.close()
        wait_s = self._back_off(now)
        said = self._lines[-1] if self._lines else "it said nothing"
        how = f"signal {-status}" if status < 0 else f"status {status}"
        self.problem = f"ended with {how}, starts again after {wait_s:g} s: {said}"
        self._remove_files()
        log("replica_ended", model=self.model.name, pid=self.process.pid, how=how, again_after_s=wait_s)
        self.process = None
        return True

    def _back_off(self, now: float) -> float:
        """Says when the next process may start, and how long that is from now."""
        stable = self._serving_since is not None and now - self._serving_since >= self._patience.stable_s
        self._failures = 0 if stable else self._failures + 1
        exponent = min(max(self._failures - 1, 0), 16)
        wait_s = min(self._patience.backoff_s * 2.0**exponent, self._patience.backoff_s_max)
        self.start_at = now + wait_s
        return wait_s

    def read(self) -> bool:
        """Passes on what the process wrote, each line behind the model's name. False at the end of the pipe."""
        try:
            while written := os.read(self.output, 1 << 16):
                *lines, self._unended = (self._unended + written).split(b"\n")
                for line in lines:
                    self._pass_on(line)
                if len(self._unended) > _LINE_BYTES_MAX:
                    self._pass_on(self._unended)
                    self._unended = b""
        except BlockingIOError:
            return True
        self._pass_on(self._unended)
        self._unended = b""
        return False

    def _pass_on(self, written: bytes) -> None:
        line = written[:_LINE_BYTES_MAX].decode("utf-8", "replace").rstrip()
        if line:
            percent = _percent(line)
            if percent is not None:
                self.problem = f"loading {percent} %"
            self._lines.append(line)
            write(f"[{self.model.name}] {line}")

    def close(self) -> None:
        assert self.process is None
        if self._pulse is not None:
            self._pulse.close()
            self._pulse = None
        self._remove_files()

    def _remove_files(self) -> None:
        """What an earlier process left, or this one."""
        _remove_socket(self.address)
        memory_path(self._pulse_path).unlink(missing_ok=True)


class Watcher:
    """A gateway's connection: it gets every Fleet and says nothing."""

    def __init__(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        self.socket = peer
        self.unsent = bytearray()
        self._frames = FrameReader()

    def send(self, encoded: bytes) -> bool:
        """False where the peer is gone, or does not read."""
        self.unsent += encoded
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            return len(self.unsent) <= _UNSENT_BYTES_MAX
        except OSError:
            return False
        return True

    def receive(self) -> bool:
        """False at the end of the connection, and for anything that is no frame."""
        try:
            received = self.socket.recv(1 << 16)
            for frame in self._frames.feed(received):
                log("frame_ignored", kind=type(frame).__name__)
        except BlockingIOError:
            return True
        except (OSError, FrameError):
            return False
        return bool(received)


class Machine:
    """The loop. `stop` may be called from a signal handler: once drains, twice kills."""

    def __init__(self, spec: MachineSpec, command: Command, patience: Patience, clock: Callable[[], float]) -> None:
        """Raises MachineError where another machine runs in this folder or there is no such GPU, AddressError for a
        wrong address."""
        self._spec = spec
        self._patience = patience
        self._clock = clock
        folder = Path(spec.folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _lock(folder / "machine.lock")
        self._scratch = contextlib.ExitStack()
        environments = _environments(spec, gpus.visible(os.environ), self._scratch)
        self._replicas = [
            Replica(model, address, folder / f"{name}.pulse", patience, command, environment)
            for (model, name, address), environment in zip(_places(spec), environments, strict=False)
        ]
        self._threads = spec.threads or max(1, _cores() // max(1, len(self._replicas)))
        self._selector = selectors.DefaultSelector()
        self._watchers: set[Watcher] = set()
        self._told = Fleet(spec.name, [])
        self._stops = 0
        self._kill_at: float | None = None
        self._looked_at = clock()
        self._listener = listen(spec.address)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._signals, self._wake = socket.socketpair()

    def stop(self) -> None:
        self._stops += 1

    def run(self) -> int:
        """Until stopped, and all replicas have ended. Call it from the main thread."""
        with self._signals_wake_us():
            try:
                while not self._stopped():
                    for key, _ in self._selector.select(self._patience.look_s):
                        key.data()
                    self._turn(self._clock())
                return 0
            finally:
                self._close()

    def _turn(self, now: float) -> None:
        if now - self._looked_at > 5 * self._patience.look_s + 1.0:
            for replica in self._replicas:
                replica.forgive(now)
        self._looked_at = now
        for replica in self._replicas:
            replica.look(now)
            if replica.process is not None and replica.process.poll() is not None:
                self._forget_output(replica.output)
                replica.reap(now)
            if replica.process is None and not self._stops and now >= replica.start_at:
                self._start(replica, now)
        if self._stops:
            self._end_replicas(now)
        self._tell()

    def _start(self, replica: Replica, now: float) -> None:
        if not replica.start(self._spec.device.partition(":")[0], self._threads, self._spec.telemetry, now):
            return
        output = replica.output

        def read() -> None:
            if not replica.read():
                self._forget_output(output)

        self._selector.register(output, selectors.EVENT_READ, read)

    def _forget_output(self, output: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(output)

    def _end_replicas(self, now: float) -> None:
        running = [replica.process for replica in self._replicas if replica.process is not None]
        if self._kill_at is None:
            self._kill_at = now + self._patience.drain_s
            log("machine_draining", replicas=len(running))
            for process in running:
                process.terminate()
        if self._stops > 1 or now >= self._kill_at:
            for process in running:
                process.kill()

    def _stopped(self) -> bool:
        return self._kill_at is not None and all(replica.process is None for replica in self._replicas)

    # Gateways

    def _tell(self) -> None:
        fleet = Fleet(self._spec.name, [replica.state for replica in self._replicas])
        if fleet != self._told:
            self._told = fleet
            for watcher in list(self._watchers):
                self._send(watcher, encode(fleet))

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError as error:
            log("accept_failed", error=str(error))
            return
        if len(self._watchers) >= _CONNECTIONS_MAX:
            peer.close()
            return
        watcher = Watcher(peer)
        self._watchers.add(watcher)
        self._selector.register(peer, selectors.EVENT_READ, lambda: self._serve(watcher))
        self._send(watcher, encode(self._told))

    def _serve(self, watcher: Watcher) -> None:
        if watcher.receive():
            self._send(watcher, b"")
        else:
            self._drop(watcher)

    def _send(self, watcher: Watcher, encoded: bytes) -> None:
        if not watcher.send(encoded):
            self._drop(watcher)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if watcher.unsent else 0)
        self._selector.modify(watcher.socket, wanted, lambda: self._serve(watcher))

    def _drop(self, watcher: Watcher) -> None:
        if watcher in self._watchers:
            self._watchers.discard(watcher)
            self._selector.unregister(watcher.socket)
            watcher.socket.close()

    # Beginning and end

    @contextlib.contextmanager
    def _signals_wake_us(self) -> Iterator[None]:
        """SIGCHLD ends a wait at once; SIGTERM, SIGINT and SIGHUP stop."""
        self._signals.setblocking(False)
        self._wake.setblocking(False)
        before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._signals, selectors.EVENT_READ, lambda: self._signals.recv(4096))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self.stop())
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)

    def _close(self) -> None:
        """Leaves no process, socket or file behind, also when `run` failed."""
        for replica in self._replicas:
            if replica.process is not None:
                replica.process.kill()
                replica.process.wait()
                replica.reap(self._clock())
            replica.close()
        for watcher in list(self._watchers):
            self._drop(watcher)
        self._selector.close()
        self._listener.close()
        _remove_socket(self._spec.address)
        self._signals.close()
        self._wake.close()
        self._scratch.close()
        os.close(self._lock)


def _places(spec: MachineSpec) -> Iterator[tuple[ModelSpec, str, str]]:
    """(model, file name, address) of every replica. A machine on tcp: gives its replicas the ports after its own."""
    target, count = parse_address(spec.address), 0
    for model in spec.models:
        digest = hashlib.sha256(model.name.encode()).hexdigest()[:12]
        for index in range(model.replicas):
            count += 1
            name = f"{digest}-{index}"
            yield (
                model,
                name,
                f"unix:{Path(spec.folder) / name}.sock"
                if isinstance(target, str)
                else f"tcp:{target[0]}:{target[1] + count}",
            )


# oneDNN compiles its kernels for each count of rows and keeps 1,024 of them, some hundred megabytes; making one anew
# takes no longer than can be measured.
_ON_CPUS: Final = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}


def _environments(spec: MachineSpec, found: list[str], scratch: contextlib.ExitStack) -> Iterator[dict[str, str]]:
    """What each replica's environment has beyond ours: the one GPU it sees, in turn or as the spec says, and the cache
    of kernels. Endless."""
    kind, _, number = spec.device.partition(":")
    if number and int(number) >= len(found):
        raise MachineError(f"there is no {spec.device}: this host has {len(found)} GPUs, counted from 0")
    if kind == "cpu" or not found:
        return repeat({name: os.environ.get(name, count) for name, count in _ON_CPUS.items()})
    cache = _kernel_cache(spec, scratch)
    chosen = [found[int(number)]] if number else found
    return ({gpus.ENVIRONMENT_NAME: name, _CACHE_NAME: cache} for name in cycle(chosen))


def _kernel_cache(spec: MachineSpec, scratch: contextlib.ExitStack) -> str:
    """Where kernels are kept once they are compiled: where the user says, else in the folder of this machine; a folder
    in `scratch`, which ends with the machine, where that cannot be written."""
    if _CACHE_NAME in os.environ:
        return os.environ[_CACHE_NAME]
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


def _percent(line: str) -> int | None:
    """How much of its weights a replica has read, where the line of its log says that."""
    if '"event": "loading"' not in line:
        return None
    try:
        return int(json.loads(line)["percent"])
    except (ValueError, KeyError, TypeError):
        return None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _lock(path: Path) -> int:
    """Held until the process ends: two machines in one folder would take each other's sockets."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise MachineError(f"another machine runs in {path.parent}: stop it, or use another state folder") from None
    return lock


def listen(address: str) -> socket.socket:
    """A listening socket. A unix socket left behind by an earlier process is replaced, no other file is."""
    target = parse_address(address)
    if isinstance(target, tuple):
        try:
            listener = socket.create_server(target, family=socket.AF_INET6 if ":" in target[0] else socket.AF_INET)
        except OSError as error:
            raise MachineError(f"cannot listen on {address}: {error}") from error
        listener.setblocking(False)
        return listener
    _remove_socket(address)
    listener = socket.socket(socket.AF_UNIX)
    listener.setblocking(False)
    before = os.umask(0o077)  # only this user
    try:
        listener.bind(target)
    except OSError as error:
        listener.close()
        raise MachineError(f"cannot listen on {address}: {error}") from error
    finally:
        os.umask(before)
    listener.listen()
    return listener


def _remove_socket(address: str) -> None:
    target = parse_address(address)
    if isinstance(target, str):
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(target).st_mode):
                os.unlink(target)


def _dies_with(parent: int) -> Callable[[], None] | None:
    """For a child between fork and exec: on Linux the kernel kills it when its parent ends, however that ends."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def die() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before we asked
            os._exit(1)

    return die


def replica_command(spec: ReplicaSpec) -> Sequence[str]:
    return [sys.executable, "-P", "-m", "engine.replica", msgspec.json.encode(spec).decode()]


def main(
    argv: Sequence[str],
    command: Command = replica_command,
    patience: Patience = Patience(),
) -> int:
    """Runs the machine that the JSON in argv[0] describes."""
    try:
        spec = msgspec.json.decode(argv[0], type=MachineSpec)
        return Machine(spec, command, patience, time.monotonic).run()
    except (MachineError, ValueError) as error:
        print(f"hearth machine: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
