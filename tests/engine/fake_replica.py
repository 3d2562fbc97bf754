"""A replica without a model, for tests of its machine: it beats, and misbehaves as the file in its folder says.

As a program it is a machine whose replicas are this file:  python fake_replica.py machine MACHINE_SPEC PATIENCE
or one such replica:                                        python fake_replica.py replica REPLICA_SPEC
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import msgspec

from engine import machine, wire
from engine.log import log
from engine.pulse import Phase, Pulse


def command(spec: wire.ReplicaSpec) -> list[str]:
    if Path(spec.model.folder, "behaviour").read_text() == "no-program":
        return [str(Path(spec.model.folder, "no-such-program"))]
    return [sys.executable, "-P", __file__, "replica", msgspec.json.encode(spec).decode()]


def replica(spec: wire.ReplicaSpec) -> None:
    """Behaviours: serve, busy, crash, slow-load, hang, stubborn, chatty, silent-load, half-loaded."""
    behaviour = Path(spec.model.folder, "behaviour").read_text()
    pulse = Pulse.open(spec.pulse)
    Path(spec.model.folder, f"pid-{spec.boot}").write_text(str(os.getpid()))
    shown = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "TRITON_CACHE_DIR")}
    Path(spec.model.folder, "environment").write_text(json.dumps({**shown, "device": spec.device}))
    wire.memory_path(spec.pulse).write_text("{}")
    pulse.enter(Phase.LOADING)
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
        time.sleep(3600)
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    target = wire.parse_address(spec.address)
    assert isinstance(target, str)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(target)
    listener.listen()
    if behaviour == "chatty":
        os.write(2, b"half a li")
        time.sleep(0.2)
        os.write(2, b"ne\nx" + b"y" * 100_000 + b"\n")
    while behaviour == "busy":
        pulse.enter(Phase.STEP)
        time.sleep(0.05)
    pulse.enter(Phase.IDLE)
    while True:
        time.sleep(0.05)
        pulse.enter(Phase.STEP)
        if Path(spec.model.folder, "behaviour").read_text() == "hang":
            time.sleep(3600)
        pulse.enter(Phase.IDLE)


if __name__ == "__main__":
    if sys.argv[1] == "replica":
        replica(msgspec.json.decode(sys.argv[2], type=wire.ReplicaSpec))
    else:
        patience = machine.Patience(**msgspec.json.decode(sys.argv[3]))
        sys.exit(machine.main(sys.argv[2:3], command, patience))
