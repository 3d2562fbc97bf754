"""A machine over fake replicas in a folder of its own, and what a gateway sees of it."""

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil

from engine.process.files import replace_file
from engine.protocol import frames
from engine.protocol.specs import MachineSpec, ModelSpec, ReplicaSpec, SpecSource
from engine.protocol.types import Residency
from tests.support.waiting import wait_for

FAKE = Path(__file__).with_name("fake_replica.py")
QUICK = {
    "look_s": 0.05, "step_s": 2.0, "backoff_s": 0.1, "backoff_s_max": 0.4, "stable_s": 30.0, "drain_s": 1.0,
    "deaths": 20, "retry_s": 0.1,
}  # fmt: skip


class Host:
    """A machine with one fake model per behaviour."""

    def __init__(
        self,
        folder: Path,
        behaviours: dict[str, str],
        *,
        log_path: str = "log",
        device: str = "auto",
        device_bytes: int | None = None,
        memory_bytes: int | None = None,
        weights_bytes: int = 0,
        **timeouts: float,
    ) -> None:
        """`weights_bytes` are each model's."""
        self.folder = folder
        self.log_path = log_path
        self._weights_bytes = weights_bytes
        models = [self.model(name, behaviour) for name, behaviour in behaviours.items()]
        asked = str(folder / "asked")  # what `ask` wrote: the machine follows it
        self.spec = MachineSpec(
            name="host", address=f"unix:{folder}/m.sock", folder=str(folder / "run"), models=models, threads=1,
            device=device, device_bytes=device_bytes, memory_bytes=memory_bytes,
            source=SpecSource(paths=[asked], command=["cat", asked]),
        )  # fmt: skip
        self.ask(*models)
        self.timeouts = {**QUICK, **timeouts}
        self.machine = self.start()
        self._frames = frames.FrameReader()
        self._socket: socket.socket | None = None
        self.seen: list[frames.MachineState] = []

    def model(self, name: str, behaviour: str = "serve", **settings: Any) -> ModelSpec:
        """The spec of a model of this name, whose folder is made where there is none."""
        if not (self.folder / name).exists():
            (self.folder / name).mkdir()
            self.behave(name, behaviour)
            self.move(name, "ok")
            self.load(name)
        sizes = {"weights_bytes": self._weights_bytes, "resident_s": 0.1, "wake_s": 0.3}
        return ModelSpec(name=name, folder=str(self.folder / name), **{**sizes, **settings})

    def ask(self, *models: ModelSpec) -> None:
        """Asks the machine to serve these models from now on."""
        asked = self.folder / "asked"
        source = SpecSource(paths=[str(asked)], command=["cat", str(asked)])
        spec = msgspec.structs.replace(self.spec, models=list(models), source=source)
        replace_file(asked, msgspec.json.encode(spec))

    def start(self) -> "subprocess.Popen[bytes]":
        spec, timeouts = msgspec.json.encode(self.spec).decode(), json.dumps(self.timeouts)
        log = (self.folder / self.log_path).open("ab")
        return subprocess.Popen([sys.executable, str(FAKE), "machine", spec, timeouts], stderr=log)

    @property
    def log(self) -> str:
        path = self.folder / self.log_path
        return path.read_text() if path.is_file() else ""

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == name]

    def behave(self, name: str, behaviour: str) -> None:
        self._write(name, "behaviour", behaviour)

    def move(self, name: str, how: str) -> None:
        self._write(name, "moves", how)

    def load(self, name: str, **load: Any) -> None:
        """Sets the load that its replica reports, beside nothing."""
        self._write(name, "load", json.dumps(load))

    def _write(self, name: str, what: str, text: str) -> None:
        """In one piece: a replica reads it at any moment."""
        unfinished = self.folder / name / "unfinished"
        unfinished.write_text(text)
        unfinished.replace(self.folder / name / what)

    def places(self, name: str) -> list[tuple[str, int | None]]:
        """The SetPlacements that its replicas got."""
        path = self.folder / name / "places"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(residency, device_bytes) for residency, device_bytes, _ in map(json.loads, lines)]

    def pid(self, name: str, boot: int) -> int:
        path = self.folder / name / f"pid-{boot}"
        wait_for(path.exists)
        wait_for(path.read_text)
        return int(path.read_text())

    def started_spec(self, name: str, boot: int = 1) -> ReplicaSpec:
        """The spec that it was started with."""
        path = self.folder / name / f"spec-{boot}"
        wait_for(path.exists)
        return msgspec.json.decode(wait_for(path.read_bytes), type=ReplicaSpec)

    def gateway(self) -> socket.socket:
        """A new connection."""
        opened = socket.socket(socket.AF_UNIX)
        wait_for(lambda: opened.connect_ex(f"{self.folder}/m.sock") == 0)
        return opened

    def send(self, *demands: frames.ModelDemand) -> None:
        """Sends demand on the connection that `fleet` reads."""
        self.fleet()
        assert self._socket is not None
        self._socket.sendall(b"".join(map(frames.encode_frame, demands)))

    def state(self) -> frames.MachineState | None:
        """The last state that the machine reported."""
        if self._socket is None:
            self._socket = self.gateway()
            self._socket.settimeout(0.02)
        with contextlib.suppress(TimeoutError, BlockingIOError):
            for frame in self._frames.feed(self._socket.recv(1 << 16)):
                assert isinstance(frame, frames.MachineState)
                assert frame.machine == "host"
                self.seen.append(frame)
        return self.seen[-1] if self.seen else None

    def fleet(self) -> dict[str, frames.ReplicaState]:
        machine = self.state()
        return {state.model: state for state in machine.replicas} if machine is not None else {}

    def until(
        self, name: str, fits: Callable[[frames.ReplicaState], bool], within_s: float = 60.0
    ) -> frames.ReplicaState:
        def now() -> frames.ReplicaState | None:
            state = self.fleet().get(name)
            return state if state is not None and fits(state) else None

        found: frames.ReplicaState = wait_for(now, within_s)
        return found

    def until_serving(self, name: str, boot: int = 1) -> frames.ReplicaState:
        return self.until(name, lambda state: state.residency is Residency.DEVICE and state.boot >= boot)

    def until_at(self, **places: str) -> None:
        """Until each of these replicas rests where it says."""
        for name, place in places.items():
            at = Residency[place]
            self.until(name, lambda state: state.residency is state.toward is at)  # noqa: B023

    def moves(self) -> dict[str, int]:
        state = self.state()
        return state.moves if state is not None else {}

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self.machine.poll() is None:
            self.machine.kill()
        self.machine.wait()


def gone(pid: int) -> bool:
    """Ended and collected: no zombie either."""
    return not psutil.pid_exists(pid)


@contextlib.contextmanager
def hosting(folder: Path, behaviours: dict[str, str], **options: Any) -> Iterator[Host]:
    host = Host(folder, behaviours, **options)
    try:
        yield host
    except BaseException:
        print(host.log)
        raise
    finally:
        host.close()


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="hm-") as folder:
        yield Path(folder)
