"""The one process per host that owns it: starts replicas, watches them, moves them between disk, memory and devices as
the policy says, starts them again, and tells gateways.

One thread, one selector, no torch: it knows processes, files and clocks, and nothing of tokens.

    python -m engine.host.agent '<MachineSpec JSON>'

A crash is noticed by the child's signal, a hang by a pulse that stands still (hung processes are killed: SIGKILL
also ends a stopped one). Replicas die with this process, whatever ends it. SIGTERM drains them; a second one, or the
deadline, kills them.
"""

import contextlib
import itertools
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from engine.host.demand import DemandTracker
from engine.host.forkserver import ForkserverLauncher
from engine.host.paths import (
    AgentStartError,
    kernel_cache,
    lock_folder,
    open_listener,
    remove_socket,
    replica_addresses,
)
from engine.host.peers import PeerChannel, ReplicaPeer
from engine.host.reconciler import PlacementReconciler, ReplicaCondition
from engine.host.replica_handle import ReplicaHandle
from engine.host.supervisor import (
    ReplicaCommand,
    ReplicaLauncher,
    ReplicaSupervisor,
    SubprocessLauncher,
    SupervisionTimeouts,
)
from engine.hostinfo import gpus
from engine.hostinfo import memory as budgets
from engine.hostinfo.memory import HostDevice
from engine.log import log
from engine.protocol.frames import Frame, MachineState, ModelDemand, encode_frame
from engine.protocol.specs import MachineSpec, ReplicaSpec

_CONNECTIONS_MAX: Final = 256
_TURN_S: Final = 0.005  # between two decisions at the least: busy replicas say more often than that how busy they are
_STARTING_S: Final = 0.02  # between two looks at the pulse of one that is to serve any moment
_STATUS_S: Final = 0.1  # between two Fleets at the least, where no replica came, went or began to

# oneDNN compiles its kernels for each count of rows and keeps 1,024 of them, some hundred megabytes; making one anew
# takes no longer than can be measured.
_ON_CPUS: Final = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}


class HostAgent:
    """The loop. `stop` may be called from a signal handler: once drains, twice kills."""

    def __init__(
        self, spec: MachineSpec, starts: ReplicaLauncher, patience: SupervisionTimeouts, clock: Callable[[], float]
    ) -> None:
        """Raises MachineError where another machine runs in this folder or there is no such GPU, AddressError for a
        wrong address."""
        self._spec = spec
        self._patience = patience
        self._clock = clock
        folder = Path(spec.folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = lock_folder(folder / "machine.lock")
        self._scratch = contextlib.ExitStack()
        self._starts = starts
        self._selector = selectors.DefaultSelector()
        devices = _devices(spec, gpus.visible_gpus(os.environ), self._scratch)
        lodgers = list(self._lodgers(starts, on_cpu=not devices[0].name))
        self._children = [lodger.child for lodger in lodgers]
        self._links = [lodger.link for lodger in lodgers]
        self._demand = DemandTracker((model.name for model in spec.models), patience.demand_s)
        threads = spec.threads or max(1, _cores() // max(1, len(lodgers)))
        memory = budgets.host_memory_budget(spec)
        self._moves = PlacementReconciler(spec, lodgers, devices, memory, self._demand, patience, threads)
        self._gateways: dict[int, PeerChannel] = {}
        self._numbers = itertools.count(1)
        self._told = MachineState(spec.name, [])
        self._told_at = 0.0
        self._whereabouts: list[ReplicaCondition] = []
        self._stops = 0
        self._draining = False
        self._looked_at = clock()
        self._listener = open_listener(spec.address)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._signals, self._wake = socket.socketpair()

    def _lodgers(self, starts: ReplicaLauncher, on_cpu: bool) -> Iterator[ReplicaHandle]:
        for model, name, address in replica_addresses(self._spec):
            pulse = Path(self._spec.folder) / f"{name}.pulse"
            child = ReplicaSupervisor(model.name, address, pulse, self._patience, starts, self._selector)
            link = ReplicaPeer(self._selector, address, self._patience.connect_s)
            yield ReplicaHandle(name, model, child, link, self._patience, on_cpu)

    def stop(self) -> None:
        self._stops += 1

    def run(self) -> int:
        """Until stopped, and all replicas have ended. Call it from the main thread."""
        with self._signals_wake_us():
            try:
                while not self._stopped():
                    for key, _ in self._selector.select(self._wait_s):
                        key.data()
                    self._turn(self._clock())
                    time.sleep(_TURN_S)
                return 0
            finally:
                self._close()

    @property
    def _wait_s(self) -> float:
        return _STARTING_S if any(child.starting for child in self._children) else self._patience.look_s

    def _turn(self, now: float) -> None:
        if now - self._looked_at > 5 * self._patience.look_s + 1.0:
            self._moves.forgive(now - self._looked_at, now)
        self._looked_at = now
        self._moves.look(now)
        ready = self._starts.ready(now)
        if self._stops:
            self._end_replicas(now)
        else:
            self._moves.decide(now, ready)
        self._tell(now)

    def _end_replicas(self, now: float) -> None:
        running = [child for child in self._children if child.process is not None]
        if not self._draining:
            self._draining = True
            log("machine_draining", replicas=len(running))
            for child in running:
                child.end(now)
        if self._stops > 1:
            for child in running:
                child.kill("the machine was told to end at once")

    def _stopped(self) -> bool:
        return self._draining and all(child.process is None for child in self._children)

    # Gateways

    def _tell(self, now: float) -> None:
        """Where replicas are and go at once; how they are there, and how long it may take, some times a second."""
        whereabouts = self._moves.whereabouts(now)
        if whereabouts == self._whereabouts and now < self._told_at + _STATUS_S:
            return
        self._whereabouts, self._told_at = whereabouts, now
        fleet = self._moves.fleet(now)
        if fleet != self._told:
            self._told = fleet
            encoded = encode_frame(fleet)
            for gateway in list(self._gateways.values()):
                gateway.pass_on(encoded)

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError as error:
            log("accept_failed", error=str(error))
            return
        if len(self._gateways) >= _CONNECTIONS_MAX:
            peer.close()
            return
        number = next(self._numbers)
        gateway = PeerChannel(
            self._selector, peer, lambda frame: self._hear(number, frame), lambda _: self._forget(number)
        )  # fmt: skip
        self._gateways[number] = gateway
        gateway.send(self._told)

    def _hear(self, number: int, frame: Frame) -> None:
        if isinstance(frame, ModelDemand):
            self._demand.say(number, frame, self._clock())
        else:
            log("frame_ignored", kind=type(frame).__name__)

    def _forget(self, number: int) -> None:
        del self._gateways[number]
        self._demand.drop(number)

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
        for link in self._links:
            link.close()
        for child in self._children:
            if child.process is not None:
                child.process.kill()
                child.process.wait()
                child.reap(self._clock())
            child.close()
        self._starts.close()
        for gateway in self._gateways.values():
            gateway.close()
        self._selector.close()
        self._listener.close()
        remove_socket(self._spec.address)
        self._signals.close()
        self._wake.close()
        self._scratch.close()
        os.close(self._lock)


def _devices(spec: MachineSpec, found: list[str], scratch: contextlib.ExitStack) -> list[HostDevice]:
    """Those that replicas may be on: all GPUs of this host, the one that the spec says, or the CPU."""
    kind, _, number = spec.device.partition(":")
    if number and int(number) >= len(found):
        raise AgentStartError(f"there is no {spec.device}: this host has {len(found)} GPUs, counted from 0")
    if kind == "cpu" or not found:
        return [budgets.cpu_device(spec, {name: os.environ.get(name, count) for name, count in _ON_CPUS.items()})]
    chosen = [found[int(number)]] if number else found
    return budgets.gpu_devices(spec, chosen, {gpus.KERNEL_CACHE_VARIABLE: kernel_cache(spec, scratch)})


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def replica_command(spec: ReplicaSpec) -> Sequence[str]:
    return [sys.executable, "-P", "-m", "engine.replica.server", msgspec.json.encode(spec).decode()]


def _open_launcher(spec: MachineSpec) -> ReplicaLauncher:
    """Forks of a process that has imported what this machine's replicas need; programs where forks cannot be ours."""
    programs = SubprocessLauncher(replica_command)
    return ForkserverLauncher(zygote_modules(spec), programs, time.monotonic) if sys.platform == "linux" else programs


def zygote_modules(spec: MachineSpec) -> list[str]:
    """What a warm parent imports, and calls, so that no replica of this machine has to."""
    modules = ["engine.replica.server", "engine.execution.open"]
    if spec.telemetry is not None:
        modules.append("engine.replica.tracing")
    if spec.device != "cpu" and gpus.visible_gpus(os.environ):
        modules += ["engine.execution.gpu_runner", "engine.layers.linear_gpu", "cuda.bindings.driver"]
        modules.append("engine.kernels.compile_cache:name_kernels")
    return modules


def main(
    argv: Sequence[str],
    command: ReplicaCommand | None = None,
    patience: SupervisionTimeouts | None = None,
) -> int:
    """Runs the machine that the JSON in argv[0] describes."""
    try:
        spec = msgspec.json.decode(argv[0], type=MachineSpec)
        starts = _open_launcher(spec) if command is None else SubprocessLauncher(command)
        machine = HostAgent(spec, starts, patience or SupervisionTimeouts(), time.monotonic)
    except (AgentStartError, ValueError) as error:
        print(f"hearth machine: {error}", file=sys.stderr)
        return 1
    return machine.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
