"""A replica without a model, for tests of its machine: it beats, moves where it is told, and misbehaves as the files in
its folder say.

As a program it is a machine whose replicas are this file:  python fake_replica.py machine MACHINE_SPEC TIMEOUTS
or one such replica:                                        python fake_replica.py replica REPLICA_SPEC
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from engine.log import log
from engine.process.heartbeat import Heartbeat, ReplicaPhase
from engine.protocol import frames
from engine.protocol.address import parse_address
from engine.protocol.reports import MemoryReport, memory_report_path
from engine.protocol.specs import ReplicaSpec
from engine.protocol.types import Residency

MIB: Final = 1 << 20
ASLEEP_BYTES: Final = 10 * MIB  # what a driver would keep
BESIDE_BYTES: Final = 30 * MIB  # of a replica that serves, beside its weights
KV_BYTES: Final = 500 * MIB  # that it could use
KEPT_BYTES: Final = 40 * MIB  # of them it keeps on the host while it sleeps, and what holds them for the next time
GPU_BYTES: Final = 80_000 * MIB


def command(spec: ReplicaSpec) -> list[str]:
    if Path(spec.model.folder, "behaviour").read_text() == "no-program":
        return [str(Path(spec.model.folder, "no-such-program"))]
    return [sys.executable, "-P", __file__, "replica", msgspec.json.encode(spec).decode()]


class Fake:
    """Where a fake replica says that it is, and how it answers its peers.

    The file `places` of its folder gets a line for each SetPlacement; `moves` says how it takes them: ok, problem
    (wakes, and sleeps, fail), never (they are not answered), crash (in the middle); `load` is what it reports of its
    load.
    """

    def __init__(self, spec: ReplicaSpec, listener: socket.socket) -> None:
        self.spec = spec
        self.folder = Path(spec.model.folder)
        self.residency = Residency.DEVICE
        self.least = spec.model.weights_bytes + BESIDE_BYTES
        self.held = self.fitting(spec.device_bytes)
        self.kept = 0
        self.short = 0
        self.peers: dict[socket.socket, frames.FrameReader] = {}
        self.listener = listener
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)

    def fitting(self, device_bytes: int | None) -> int:
        most = self.least + KV_BYTES
        return most if device_bytes is None else max(self.least, min(most, device_bytes))

    def serve(self, seconds: float) -> None:
        """Takes what peers sent, and sends them its load."""
        for key, _ in self.selector.select(seconds):
            peer = key.fileobj
            assert isinstance(peer, socket.socket)
            if peer is self.listener:
                self.greet(peer.accept()[0])
            else:
                self.hear(peer)
        for peer in list(self.peers):
            self.tell(peer, self.load())

    def greet(self, peer: socket.socket) -> None:
        self.peers[peer] = frames.FrameReader()
        self.selector.register(peer, selectors.EVENT_READ)
        self.tell(
            peer,
            frames.Hello(
                frames.PROTOCOL_VERSION, self.spec.model.name, "", str(self.spec.boot), os.getpid(), 1, 1, 1, 1
            ),
        )
        self.tell(peer, self.load())

    def hear(self, peer: socket.socket) -> None:
        received = b""
        with contextlib.suppress(OSError):
            received = peer.recv(1 << 16)
        if not received:
            self.selector.unregister(peer)
            del self.peers[peer]
            peer.close()
            return
        for frame in self.peers[peer].feed(received):
            assert isinstance(frame, frames.SetPlacement)
            self.move(peer, frame)

    def move(self, peer: socket.socket, place: frames.SetPlacement) -> None:
        with Path(self.folder, "places").open("a") as file:
            file.write(json.dumps([place.residency.name, place.device_bytes, os.getpid()]) + "\n")
        how = Path(self.folder, "moves").read_text() if place.residency is not self.residency else "ok"
        if how == "never":
            return
        if how == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "slow":
            time.sleep(0.5)
        if how == "problem":
            self.tell(peer, self.placed("there is no memory left"))
            return
        self.residency = place.residency
        if place.residency is Residency.MEMORY:
            self.held, self.kept = ASLEEP_BYTES, KEPT_BYTES
        elif place.device_bytes is not None:
            self.held = self.fitting(place.device_bytes)
        self.tell(peer, self.placed(""))

    def placed(self, problem: str) -> frames.PlacementStatus:
        weights = self.spec.model.weights_bytes
        return frames.PlacementStatus(
            self.residency,
            device_bytes=self.held,
            asleep_bytes=ASLEEP_BYTES,
            min_bytes=self.least,
            max_bytes=self.least + KV_BYTES,
            memory_bytes=(weights if self.spec.standby or self.residency is Residency.MEMORY else 0) + self.kept,
            standby_bytes=weights + KEPT_BYTES,
            weights_bytes=weights,
            moved_bytes=weights,
            problem=problem,
        )

    def load(self) -> frames.ReplicaLoad:
        told = json.loads(Path(self.folder, "load").read_text() or "{}")
        base = {"running": 0, "waiting": 0, "waiting_tokens": 0, "free_blocks": 10, "cached_blocks": 0, "steps": 0}
        self.short += bool(told.get("waiting")) and told.get("free_blocks") == 0
        return frames.ReplicaLoad(**{**base, "blocks": 10, "counters": {"short_of_blocks": self.short}, **told})

    def tell(self, peer: socket.socket, frame: frames.Frame) -> None:
        with contextlib.suppress(OSError):
            peer.sendall(frames.encode_frame(frame))


def replica(spec: ReplicaSpec) -> None:
    """Behaviours: serve, busy, crash, slow-load, hang, stubborn, chatty, silent-load, half-loaded, deaf."""
    folder = Path(spec.model.folder)
    behaviour = Path(folder, "behaviour").read_text()
    pulse = Heartbeat.open(spec.pulse)
    Path(folder, f"pid-{spec.boot}").write_text(str(os.getpid()))
    Path(folder, f"spec-{spec.boot}").write_bytes(msgspec.json.encode(spec))
    shown = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "TRITON_CACHE_DIR")}
    Path(folder, "environment").write_text(json.dumps({**shown, "device": spec.device}))
    memory = MemoryReport(model=spec.model.name, pid=os.getpid(), device="fake", device_bytes=GPU_BYTES,
                         weights_bytes=0, kv_blocks=0, kv_block_tokens=0, kv_bytes=0, free_bytes=0)  # fmt: skip
    memory_report_path(spec.pulse).write_bytes(msgspec.json.encode(memory))
    pulse.enter(ReplicaPhase.LOADING)
    if behaviour == "crash":
        print("no such weights: shard 7", file=sys.stderr, flush=True)
        sys.exit(3)
    if behaviour == "slow-load":
        for _ in range(20):
            time.sleep(0.1)
            pulse.beat()
    if behaviour == "silent-load":
        time.sleep(1.5)
    if behaviour == "half-loaded":
        log("loading", percent=43)
        signal.pause()
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    target = parse_address(spec.address)
    assert isinstance(target, str)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(target)
    listener.listen()
    if behaviour == "chatty":
        os.write(2, b"half a li")
        time.sleep(0.2)
        os.write(2, b"ne\nx" + b"y" * 100_000 + b"\n")
    while behaviour == "busy":
        pulse.enter(ReplicaPhase.STEP)
        time.sleep(0.05)
    fake = Fake(spec, listener)
    pulse.enter(ReplicaPhase.IDLE)
    while True:
        behaviour = Path(folder, "behaviour").read_text()
        if behaviour == "deaf":
            time.sleep(0.05)
        else:
            fake.serve(0.05)
        pulse.enter(ReplicaPhase.STEP)
        if behaviour == "hang":
            signal.pause()
        pulse.enter(ReplicaPhase.IDLE)


if __name__ == "__main__":
    if sys.argv[1] == "replica":
        replica(msgspec.json.decode(sys.argv[2], type=ReplicaSpec))
    else:
        from engine.host import agent  # only here: replicas start quicker without
        from engine.host.supervisor import SupervisionTimeouts

        timeouts = SupervisionTimeouts(**msgspec.json.decode(sys.argv[3]))
        sys.exit(agent.main(sys.argv[2:3], command, timeouts))
