"""Where models are, as commands tell it: from a machine's own word, over a real socket."""

import contextlib
import io
import json
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from engine.protocol.frames import DeviceState, MachineState, ReplicaState, encode_frame
from engine.protocol.types import Residency
from gateway.cli import main
from gateway.commands.access import residencies
from gateway.commands.access.residencies import MachineWatcher, at_rest, machine_reports, residency_text
from gateway.commands.serve import ServeSupervisor
from gateway.commands.terminal.options import SettingsSource
from gateway.settings.config import load_config
from gateway.settings.telemetry import LogConfig
from gateway.state_dir import Credentials, open_state
from tests.support.waiting import wait_for

EMBER = "@cf/hearth/ember"
GIB = 1 << 30


def replica(residency: Residency, model: str = EMBER, **changes: Any) -> ReplicaState:
    said = ReplicaState(model, f"unix:/{model}", residency, 1, toward=residency, ready_ms=300 * (residency != 2))
    return msgspec.structs.replace(said, **changes)


class Machine:
    """The socket of one, which tells whoever connects the same, and more where `said` changes."""

    def __init__(self, address: str) -> None:
        self.said: list[ReplicaState] | None = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address.removeprefix("unix:"))
        self._listener.listen()
        self._peers: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def tell(self, *replicas: ReplicaState) -> None:
        self.said = list(replicas)
        for peer in self._peers:
            with contextlib.suppress(OSError):  # it asked once, and left
                peer.sendall(self._frame())

    def _frame(self) -> bytes:
        assert self.said is not None
        return encode_frame(
            MachineState("den", self.said, [DeviceState("NVIDIA H200", 140 * GIB, 130 * GIB, 97 * GIB)])
        )

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            self._peers.append(peer)
            if self.said is not None:
                peer.sendall(self._frame())

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for peer in self._peers:
            peer.close()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hearth.toml").write_text("[server]\nport = 0\n")  # doctor finds no port taken by others' servers
    monkeypatch.setattr(residencies, "REPORT_S", 60.0)  # nobody measures here how soon a busy host's threads run
    config = load_config()
    open_state(config)
    made = Machine(config.machine_address)
    yield made
    made.close()


def test_who_sleeps_and_would_wake_is_at_rest() -> None:
    assert at_rest(replica(Residency.MEMORY))
    assert at_rest(replica(Residency.DISK))
    assert not at_rest(replica(Residency.DEVICE))
    assert not at_rest(replica(Residency.MEMORY, toward=Residency.DEVICE))
    assert not at_rest(replica(Residency.DEVICE, toward=Residency.MEMORY))
    assert not at_rest(replica(Residency.DISK, ready_ms=-1, problem="it is larger than any device"))
    assert not at_rest(replica(Residency.DISK, problem="ended with status 1, starts again after 1 s"))
    assert not at_rest(replica(Residency.DISK, quarantined=True))


def test_replicas_are_told_in_few_words() -> None:
    two = [replica(Residency.DEVICE)] * 2
    assert residency_text(two) == "2 × device"
    moving = replica(Residency.MEMORY, toward=Residency.DEVICE)
    assert residency_text([*two, moving]) == "2 × device, memory → device"
    assert residency_text([replica(Residency.DISK, quarantined=True)]) == "disk, quarantined"
    assert residency_text([]) == "-"


def test_a_machine_that_reports_nothing_is_not_waited_for_for_long(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residencies, "REPORT_S", 0.05)
    machine.said = None
    assert machine_reports(load_config()) == []


def test_a_machine_is_looked_at_without_new_memory_for_each_look(machine: Machine) -> None:
    machine.tell(replica(Residency.DEVICE))
    watcher = MachineWatcher(load_config().machine_address)
    wait_for(lambda: watcher.look() is not None)
    tracemalloc.start()
    try:
        for _ in range(5):
            machine.tell(replica(Residency.DEVICE))
            assert watcher.look() is not None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        watcher.close()
    assert peak < 32 << 10


def test_models_and_doctor_say_where_each_is(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.tell(replica(Residency.DEVICE), replica(Residency.MEMORY, toward=Residency.DEVICE))
    assert main(["models", "list", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert [(one["residency"], one["toward"]) for one in told["replicas"]] == [
        ("DEVICE", "DEVICE"),
        ("MEMORY", "DEVICE"),
    ]
    for words in (["models", "list"], ["models", "show", EMBER], ["doctor"]):
        assert main(words) == 0
        assert "device, memory → device" in capsys.readouterr().out
    machine.tell(replica(Residency.DISK, quarantined=True, problem="ended with signal 9 five times"))
    assert main(["models", "list"]) == 0
    assert "ended with signal 9 five times" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 1
    found = [one for one in json.loads(capsys.readouterr().out) if one["subject"] == "machine"]
    assert "97.0 GiB of 130.0 GiB held" in found[0]["found"]
    assert (found[1]["verdict"], "five times" in found[1]["found"]) == ("wrong", True)


def test_serve_says_of_each_model_once_that_it_is_ready_or_on_standby(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    config = structs.replace(load_config(), log=LogConfig(format="text"))
    supervisor = ServeSupervisor(config, SettingsSource(), None, 1, Credentials("http://x", "a", "t"), out)
    monkeypatch.setattr(supervisor, "_answers", lambda path: True)
    asleep = replica(Residency.MEMORY, "@cf/a/asleep")
    resting = replica(Residency.DISK, "@cf/a/resting")
    broken = replica(Residency.DISK, "@cf/a/broken", ready_ms=-1, problem="the folder is not whole")
    dying = replica(Residency.DISK, "@cf/a/dying", problem="ended with signal 9, starts again after 0.5 s")
    starting = replica(Residency.DISK, toward=Residency.DEVICE, problem="loading 10 %")

    def told(elapsed_s: float, *replicas: ReplicaState) -> str:
        machine.tell(*replicas)
        out.truncate(0)
        out.seek(0)
        for _ in range(50):
            supervisor._report(elapsed_s)
            threading.Event().wait(0.002)
        return out.getvalue()

    try:
        first = told(0.5, starting, asleep, resting, broken, dying)
        assert "standby" not in first, "its machine may not have decided yet"
        assert first.count("@cf/a/broken: the folder is not whole") == first.count("@cf/a/dying: ended") == 1
        assert "loading" not in first, "it is told with the time that has passed"
        assert first.index("Hearth serves on http://x") < first.index("Your first call, which waits for its model")
        again = told(0.6, starting, asleep, resting, broken, dying)
        assert not again, "nothing is new"
        later = told(3.0, starting, asleep, resting, broken, dying)
        assert later.count("@cf/a/asleep is on standby") == later.count("@cf/a/resting is on standby") == 1
        assert "Your first call" not in later, "it was said as the gateway began to listen"
        ready = told(4.0, replica(Residency.DEVICE), replica(Residency.DEVICE, "@cf/a/asleep"), resting, broken)
        assert ready.count(f"{EMBER} is ready after 4.0 s") == 1
        assert "asleep" not in ready
        last = told(9.0, asleep, resting, broken, starting)
        assert "standby" not in last
        assert last == f"{EMBER}: loading 10 %, 9 s so far\n", "what is wrong with others was said"
        late = replica(Residency.DISK, "@cf/a/late", toward=Residency.DEVICE, problem="loading")
        told(600.0, late)
        assert told(612.0, late) == "@cf/a/late: loading, 12 s so far\n", "a model that was added later"
    finally:
        supervisor._watcher.close()
