"""A replica that writes down when a prompt's last step landed, when its blocks were whole at the receiver, when they
were claimed, and when they could be read in its pool: lines of JSON, in CLOCK_MONOTONIC, which processes of a host
share.

python benchmarks/engine/moving/timed_replica.py '<ReplicaSpec JSON>' MARKS
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import msgspec
import torch

from engine.handover.messages import handover_id
from engine.handover.staging import StagedPrefix, StagingArea
from engine.protocol.specs import ReplicaSpec
from engine.replica import server
from engine.replica.departures import Departures
from engine.scheduling.step_loop import FailedLaunch, StepLoop
from tests.support import window_replica


class Marks:
    """Marks of handovers by their ids. `landed_s`: when the last step did."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self.landed_s = 0.0
        self.departed: set[bytes] = set()

    def write(self, id: bytes, mark: str, at_s: float) -> None:
        self._file.write(json.dumps([id.hex(), mark, at_s]) + "\n")


class _TimedStep:
    def __init__(self, marks: Marks, step: Any) -> None:
        self._marks = marks
        self._step = step

    def wait(self) -> Any:
        try:
            return self._step.wait()
        finally:
            self._marks.landed_s = time.monotonic()


def watch(marks: Marks) -> None:
    """Has every replica of this process write its marks."""
    launch, push, load = StepLoop._launch, Departures._push, StepLoop._load_staged
    seal, claim = StagingArea.seal, StagingArea.claim

    def timed_launch(self: StepLoop, plan: Any) -> Any:
        step = launch(self, plan)
        return step if isinstance(step, FailedLaunch) else _TimedStep(marks, step)

    def timed_push(self: Departures, departure: Any, outgoing: Any, budget: float) -> float:
        sequence, id = departure.sequence, handover_id(departure.order.key)
        if sequence.emitted and id not in marks.departed:
            marks.departed.add(id)
            marks.write(id, "landed", marks.landed_s)
        return push(self, departure, outgoing, budget)

    def timed_seal(self: StagingArea, staged: StagedPrefix) -> None:
        seal(self, staged)
        marks.write(staged.id, "whole", time.monotonic())

    def timed_claim(self: StagingArea, key: bytes, *more: Any) -> Any:
        marks.write(handover_id(key), "claimed", time.monotonic())
        return claim(self, key, *more)

    def timed_load(self: StepLoop) -> None:
        loads = [] if self._kv is None else [each.staged.id for each in self._kv.staged._loads]
        load(self)
        if loads and torch.cuda.is_available():
            torch.cuda.synchronize()
        for id in loads:
            marks.write(id, "readable", time.monotonic())

    vars_of: list[tuple[type, str, Any]] = [
        (StepLoop, "_launch", timed_launch), (Departures, "_push", timed_push), (StagingArea, "seal", timed_seal),
        (StagingArea, "claim", timed_claim), (StepLoop, "_load_staged", timed_load),
    ]  # fmt: skip
    for owner, name, timed in vars_of:
        setattr(owner, name, timed)


def main(argv: list[str]) -> int:
    watch(Marks(Path(argv[1])))
    on_cpu = msgspec.json.decode(argv[0], type=ReplicaSpec).device == "cpu"
    return window_replica.main(argv[:1]) if on_cpu else server.main(argv[:1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
