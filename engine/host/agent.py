"""The agent of a host: starts replicas, watches them, moves them between disk, memory and devices as the policy
decides, starts them again, and reports to gateways.

One thread, one selector, no torch: it knows processes, files and clocks, and nothing of tokens.

    python -m engine.host.agent '<MachineSpec JSON>'

A crash is noticed by the child's signal, a hang by a heartbeat that stands still (hung processes are killed: SIGKILL
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
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from engine.host.devices import layout_of, open_devices
from engine.host.launchers import open_launcher
from engine.host.model_source import ModelSource
from engine.host.paths import AgentStartError, lock_folder, open_listener, replica_place
from engine.host.peers import RECEIVED_BYTES_MAX, UNSENT_BYTES_MAX, ReplicaPeer
from engine.host.reconciler import PlacementReconciler
from engine.host.replica_handle import ReplicaHandle
from engine.host.rollout import ReplicaRollout
from engine.host.supervisor import (
    ReplicaCommand,
    ReplicaLauncher,
    ReplicaSupervisor,
    SubprocessLauncher,
    SupervisionTimeouts,
)
from engine.hostinfo.memory import host_memory_budget
from engine.log import log, log_uncaught
from engine.process.companion import CompanionProcess
from engine.protocol.connection import PeerChannel, remove_socket
from engine.protocol.frames import PROTOCOL_VERSION, DrainMachine, Frame, MachineState, ModelDemand, encode_frame
from engine.protocol.specs import MachineSpec, ModelSpec

_CONNECTIONS_MAX: Final = 256
_TURN_S: Final = 0.005  # the shortest time between two decisions: busy replicas report their load more often than that
_STARTING_S: Final = 0.02  # between two looks at the zygote, or at the heartbeat of one that is to serve any moment
BEAT_S: Final = 0.5  # a MachineState comes that often, changed or not: silence tells that the host is gone
_PUBLISH_S: Final = 0.1  # the shortest time between two MachineStates where no replica came, went or began to


class HostAgent:
    """The loop. `stop` may be called from a signal handler: once drains, twice kills."""

    def __init__(
        self, spec: MachineSpec, launcher: ReplicaLauncher, timeouts: SupervisionTimeouts, clock: Callable[[], float]
    ) -> None:
        """Raises AgentStartError where another machine runs in this folder or there is no such GPU, AddressError for a
        wrong address."""
        self._spec = spec
        self._timeouts = timeouts
        self._clock = clock
        folder = Path(spec.folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = lock_folder(folder / "machine.lock")
        self._scratch = contextlib.ExitStack()
        self._launcher = launcher
        self._selector = selectors.DefaultSelector()
        self._devices = devices = open_devices(spec, self._scratch)
        self._on_cpu = not devices[0].name
        self._rollout = ReplicaRollout(self._open_replica, timeouts.demand_s, spec.request_s)
        self._demand = self._rollout.demand
        self._rollout.follow(spec.models, clock())
        self._source = ModelSource(spec.source)
        self._companions = [CompanionProcess("porter", spec.porter), CompanionProcess("keeper", spec.keeper)]
        replicas, memory = self._rollout.replicas, host_memory_budget(spec)
        self._reconciler = PlacementReconciler(spec, replicas, devices, memory, self._demand, timeouts)
        self._gateways: dict[int, PeerChannel] = {}
        self._numbers = itertools.count(1)
        self._published = MachineState(spec.name, [], region=spec.region)
        self._published_at = self._sent_at = 0.0
        self._drained = folder / "drained"  # is there while an operator wants the machine to take nothing more
        self._conditions: list[tuple[object, ...]] = []
        self._stops = 0
        self._draining = False
        self._ready = False
        self._turned_at = clock()
        self._listener = open_listener(spec.address)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._signals, self._wakeup = socket.socketpair()

    def _open_replica(self, model: ModelSpec) -> ReplicaHandle:
        taken = {name: replica.supervisor.address for name, replica in self._rollout.replicas.items()}
        name, address = replica_place(self._spec, model.name, taken)
        heartbeat = Path(self._spec.folder) / f"{name}.pulse"
        supervisor = ReplicaSupervisor(model.name, address, heartbeat, self._timeouts, self._launcher, self._selector)
        peer = ReplicaPeer(self._selector, address, self._timeouts.connect_s, lambda: supervisor.ending)
        layout = layout_of(model, self._devices)
        return ReplicaHandle(name, model, supervisor, peer, self._timeouts, self._on_cpu, layout)

    @property
    def _supervisors(self) -> list[ReplicaSupervisor]:
        return [replica.supervisor for replica in self._rollout.replicas.values()]

    def stop(self) -> None:
        self._stops += 1

    def run(self) -> int:
        """Runs until stopped, and all replicas have ended. Call it from the main thread."""
        with self._signal_wakeup():
            try:
                while not self._stopped():
                    starting = not self._ready or any(supervisor.starting for supervisor in self._supervisors)
                    look_s = _STARTING_S if starting else min(self._timeouts.look_s, BEAT_S / 2)
                    for key, _ in self._selector.select(self._reconciler.pause_s(self._clock(), look_s)):
                        key.data()
                    self._turn(self._clock())
                    time.sleep(_TURN_S)
                return 0
            finally:
                self._close()

    def _turn(self, now: float) -> None:
        if now - self._turned_at > 5 * self._timeouts.look_s + 1.0:
            self._reconciler.forgive(now - self._turned_at, now)
        self._turned_at = now
        for companion in self._companions:
            companion.poll(now)
        self._reconciler.poll(now)
        self._ready = self._launcher.ready(now)
        if self._stops:
            self._end_replicas(now)
        else:
            self._follow(now)
            self._reconciler.reconcile(now, self._ready)
            self._reconciler.give_roles(now)
        self._publish(now)

    def _follow(self, now: float) -> None:
        """Takes in what models are asked for, and lets replicas come and go for it."""
        models = self._source.poll(now)
        if models is None:
            self._rollout.step(now)
        else:
            self._rollout.follow(models, now)

    def _end_replicas(self, now: float) -> None:
        running = [supervisor for supervisor in self._supervisors if supervisor.process is not None]
        if not self._draining:
            self._draining = True
            log("machine_draining", replicas=len(running))
            for supervisor in running:
                supervisor.end(now)
        if self._stops > 1:
            for supervisor in running:
                supervisor.kill("the machine was told to end at once")

    def _stopped(self) -> bool:
        return self._draining and all(supervisor.process is None for supervisor in self._supervisors)

    # Gateways

    def _publish(self, now: float) -> None:
        """Reports at once where replicas are and go; how they are there, and how long it may take, some times a
        second."""
        conditions = self._reconciler.conditions(now)
        if conditions == self._conditions and now < self._published_at + _PUBLISH_S:
            return
        self._conditions, self._published_at = conditions, now
        state = msgspec.structs.replace(
            self._reconciler.machine_state(now, self._source.problem),
            protocol=PROTOCOL_VERSION,
            draining=self._drained.exists(),
        )
        if state != self._published or now >= self._sent_at + BEAT_S:
            self._published, self._sent_at = state, now
            encoded = encode_frame(state)
            for gateway in list(self._gateways.values()):
                gateway.send_encoded(encoded)

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError as error:
            log("accept_failed", level="warning", error=str(error))
            return
        if len(self._gateways) >= _CONNECTIONS_MAX:
            peer.close()
            return
        number = next(self._numbers)
        gateway = PeerChannel(
            self._selector, peer, RECEIVED_BYTES_MAX, UNSENT_BYTES_MAX,
            partial(self._on_frame, number), partial(self._on_disconnect, number),
        )  # fmt: skip
        self._gateways[number] = gateway
        gateway.send(self._published)

    def _on_frame(self, number: int, frame: Frame) -> None:
        if isinstance(frame, ModelDemand):
            self._demand.report(number, frame, self._clock())
        elif isinstance(frame, DrainMachine):
            try:
                self._drained.touch() if frame.drained else self._drained.unlink(missing_ok=True)
            except OSError as error:  # a full disk ends no replica
                log("machine_not_drained", level="error", error=str(error))
            else:
                log("machine_drained" if frame.drained else "machine_undrained")
            self._conditions = []  # gateways learn it at once
        else:
            log("frame_ignored", kind=type(frame).__name__)

    def _on_disconnect(self, number: int, reason: str) -> None:
        log("gateway_lost", reason=reason)
        del self._gateways[number]
        self._demand.drop(number)

    # Beginning and end

    @contextlib.contextmanager
    def _signal_wakeup(self) -> Iterator[None]:
        """SIGCHLD ends a wait at once; SIGTERM, SIGINT and SIGHUP stop."""
        self._signals.setblocking(False)
        self._wakeup.setblocking(False)
        before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
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
        self._source.close()
        for companion in self._companions:
            companion.close()
        for replica in self._rollout.replicas.values():
            replica.peer.close()
        for supervisor in self._supervisors:
            if supervisor.process is not None:
                supervisor.process.kill()
                supervisor.process.wait()
                supervisor.reap(self._clock())
            supervisor.close()
        self._launcher.close()
        for gateway in self._gateways.values():
            gateway.close()
        self._selector.close()
        self._listener.close()
        remove_socket(self._spec.address)
        self._signals.close()
        self._wakeup.close()
        self._scratch.close()
        os.close(self._lock)


def main(
    argv: Sequence[str], command: ReplicaCommand | None = None, timeouts: SupervisionTimeouts | None = None
) -> int:
    """Runs the machine that the JSON in argv[0] describes."""
    log_uncaught()
    try:
        spec = msgspec.json.decode(argv[0], type=MachineSpec)
        launcher = open_launcher(spec) if command is None else SubprocessLauncher(command)
        agent = HostAgent(spec, launcher, timeouts or SupervisionTimeouts(), time.monotonic)
    except (AgentStartError, ValueError) as error:
        print(f"hearth machine: {error}", file=sys.stderr)
        return 1
    return agent.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
