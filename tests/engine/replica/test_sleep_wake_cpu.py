"""A machine with the built-in model, on a CPU that has room for one of two: real replicas sleep, wake and answer."""

import array
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from engine.protocol import frames
from engine.protocol.specs import MachineSpec, ModelSpec
from engine.protocol.types import Residency, SamplingParams, Scope
from tests.support.machine import short_folder
from tests.support.waiting import wait_for

EMBER = Path(frames.__file__).parents[1] / "builtin_model"
MIB = 1 << 20
ONE_ROOM = 225 * MIB  # weights and a context take about 124 MiB
_F = TypeVar("_F", bound=frames.Frame)


class Peer:
    """A connection, and the frames of one kind that come in."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        wait_for(lambda: self.socket.connect_ex(address.removeprefix("unix:")) == 0)
        self.socket.settimeout(60)
        self._reader = frames.FrameReader()
        self._frames: list[frames.Frame] = []

    def next(self, kind: type[_F]) -> _F:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            while self._frames:
                frame = self._frames.pop(0)
                if isinstance(frame, kind):
                    return frame
            self._frames += self._reader.feed(self.socket.recv(1 << 16))
        raise AssertionError(f"no {kind.__name__}")

    def send(self, frame: frames.Frame) -> None:
        self.socket.sendall(frames.encode_frame(frame))


def answer(address: str) -> bytes:
    """Four greedy tokens to a fixed prompt."""
    peer = Peer(address)
    with peer.socket:
        peer.next(frames.Hello)
        prompt = array.array("I", [5, 6, 7, 8]).tobytes()
        peer.send(frames.Submit(1, prompt, Scope(), SamplingParams(seed=1), max_tokens=4))
        tokens = b""
        while True:
            progress = peer.next(frames.StepOutputs)
            tokens += progress.tokens
            if progress.finished:
                return tokens


@pytest.fixture
def machine() -> Iterator[Peer]:
    """Two models that are whole, and one whose file was cut off."""
    with short_folder() as folder:
        broken = folder / "broken"
        shutil.copytree(EMBER, broken, ignore=shutil.ignore_patterns(".hearth"))
        weights = broken / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-4096])
        size = weights.stat().st_size
        models = [
            ModelSpec(name=name, folder=str(where), weights_bytes=size, resident_s=0.1, sequences=2)
            for name, where in (("first", EMBER), ("second", EMBER), ("broken", broken))
        ]
        spec = MachineSpec(
            name="host", address=f"unix:{folder}/m.sock", folder=str(folder / "run"), models=models, threads=1,
            device="cpu", device_bytes=ONE_ROOM,
        )  # fmt: skip
        document = msgspec.json.encode(spec).decode()
        process = subprocess.Popen([sys.executable, "-P", "-m", "engine.host.agent", document])
        try:
            peer = Peer(spec.address)
            yield peer
            peer.socket.close()
        finally:
            process.terminate()
            assert process.wait(30) == 0


def states(machine: Peer) -> dict[str, frames.ReplicaState]:
    return {state.model: state for state in machine.next(frames.MachineState).replicas}


def test_calls_to_sleeping_models_are_answered_in_turn_and_a_broken_one_says_what_is_wrong(machine: Peer) -> None:
    seen: dict[str, frames.ReplicaState] = {}
    while {seen[name].residency for name in ("first", "second") if name in seen} != {
        Residency.MEMORY,
        Residency.DEVICE,
    }:
        seen = states(machine)
    said = [answer(seen[name].address) for name in ("first", "second", "first", "second")]
    assert said[0]
    assert said == [said[0]] * 4
    while not seen["broken"].problem or "ended with" not in seen["broken"].problem:
        seen = states(machine)
    assert "safetensors" in seen["broken"].problem or "bytes" in seen["broken"].problem
    assert [seen[name].boot for name in ("first", "second")] == [1, 1]
