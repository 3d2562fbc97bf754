"""engine/replica/departures.py: where devices copy blocks, a prompt is computed to its end and no further; anything
else goes on."""

import math
from array import array
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from engine.handover.receiver import BlockFormat
from engine.handover.sender import HandoverState
from engine.memory.errors import OutOfDeviceMemory, OutOfHostMemory
from engine.protocol.cache_frames import HandOver
from engine.replica.departures import Departures
from engine.sequences.sequence import SequenceState
from prefixcache.namespace import Namespace

SPACE = Namespace("r", "", "r", "kv", 4, 2, b"t" * 16, 0)


class Outgoing:
    """An OutgoingHandover that a test moves on."""

    def __init__(self, in_window: bool) -> None:
        self.state, self.in_window, self.problem = HandoverState.ASKING, in_window, ""
        self.pushed, self.whole, self.bytes_s, self.plan = 0, 0, 0.0, SimpleNamespace(blocks=0, address="unix:x")
        self.over_fabric, self.off_fabric = 0, False

    max_run = 1

    def piece(self, count: int) -> Any:
        return SimpleNamespace(fill=self.fill)

    def fill(self, *_: Any) -> None: ...

    def push(self, names: list[bytes], piece: Any) -> None:
        self.pushed += len(names)

    def abort(self) -> None: ...

    def seal(self) -> None: ...


class Departing:
    """A sequence with a prompt of eight tokens that moves, and its clock."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, in_window: bool, address: str = "unix:x", emitted: int = 0,
        block_bytes: int = 64,
    ) -> None:  # fmt: skip
        self.seconds = 0.0
        self.outgoing = Outgoing(in_window)
        self.sequence = SimpleNamespace(
            state=SequenceState.RUNNING, tokens=array("I", range(8)), images=(), namespace=SPACE, emitted=emitted,
            stop_at=None, chunk_limit=None, computed=0, decoding=True, loading_blocks=0, table=np.arange(8),
        )  # fmt: skip
        monkeypatch.setattr(Departures, "_open", lambda *_: self.outgoing)
        self.exchange: Any = SimpleNamespace(windows=object(), busy=False)
        intake: Any = SimpleNamespace(
            waiting=SimpleNamespace(sequences={(1, 1): self.sequence}), move=lambda _: None, step_costs=None
        )
        self.departures = Departures(
            self.exchange, BlockFormat("7", "m", "r", "kv", block_bytes), intake, SPACE, "unix:own", lambda: None,
            clock=lambda: self.seconds,
        )  # fmt: skip
        self.departures.begin(1, HandOver(1, address, "7", b"k" * 32))
        self.departures.turn()

    def turn(self, state: HandoverState) -> int | None:
        self.outgoing.state = state
        self.departures.turn()
        stop_at: int | None = self.sequence.stop_at
        return stop_at


def test_a_prompt_that_devices_copy_stops_at_its_end_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    departing = Departing(monkeypatch, in_window=True)
    assert departing.turn(HandoverState.MOVING) == 8
    departing.seconds = 60.0
    assert departing.turn(HandoverState.MOVING) == 8, "the prompt takes as long as it takes"
    assert departing.departures.resumes_s == math.inf
    departing.sequence.emitted = 1
    assert departing.turn(HandoverState.MOVING) == 8
    assert departing.departures.resumes_s == pytest.approx(60.1)
    departing.seconds = 60.2
    assert departing.turn(HandoverState.MOVING) is None
    assert departing.departures.resumes_s == math.inf


@pytest.mark.parametrize("end", [HandoverState.SEALED, HandoverState.FAILED])
def test_it_goes_on_as_soon_as_its_handover_ends(monkeypatch: pytest.MonkeyPatch, end: HandoverState) -> None:
    departing = Departing(monkeypatch, in_window=True)
    assert departing.turn(HandoverState.MOVING) == 8
    assert departing.turn(end) is None
    assert departing.sequence.chunk_limit is None


def test_steps_of_a_prompt_that_devices_copy_add_one_run_each_and_are_worth_their_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = Departing(monkeypatch, in_window=True, block_bytes=(128 << 10) * SPACE.block_tokens)
    assert few.sequence.chunk_limit == 2048, "256 MiB of 128 KiB"
    many = Departing(monkeypatch, in_window=True, block_bytes=(2 << 20) * SPACE.block_tokens)
    assert many.sequence.chunk_limit == 1024


@pytest.mark.parametrize(("in_window", "turn_bytes"), [(True, 1 << 30), (False, 8 << 20)])
def test_a_turn_copies_no_more_than_the_next_step_may_wait_for(
    monkeypatch: pytest.MonkeyPatch, in_window: bool, turn_bytes: int
) -> None:
    departing = Departing(monkeypatch, in_window, block_bytes=turn_bytes)
    departing.outgoing.plan.blocks = departing.sequence.computed = 8
    pushed = []
    for _ in range(3):
        departing.turn(HandoverState.MOVING)
        pushed.append(departing.outgoing.pushed)
    assert pushed == [1, 2, 2]


def test_a_turn_ends_where_the_exchange_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    departing = Departing(monkeypatch, in_window=False)
    departing.outgoing.plan.blocks = departing.sequence.computed = 8
    pushed = []
    for busy in (True, False):
        departing.exchange.busy = busy
        departing.turn(HandoverState.MOVING)
        pushed.append(departing.outgoing.pushed)
    assert pushed == [0, 2], "all that is full"


@pytest.mark.parametrize("error", [OutOfDeviceMemory, OutOfHostMemory])
def test_a_copy_without_memory_ends_its_handover_alone(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    departing = Departing(monkeypatch, in_window=False)
    departing.outgoing.plan.blocks = departing.sequence.computed = 8
    departing.outgoing.state, departing.outgoing.fill = HandoverState.MOVING, Mock(side_effect=error("nothing left"))
    assert [(owner, failed.message) for owner, failed in departing.departures.turn()] == [(1, "nothing left")]
    assert departing.departures.held == 0


def test_what_the_host_copies_goes_on_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    departing = Departing(monkeypatch, in_window=False)
    assert departing.sequence.stop_at == 8
    assert departing.turn(HandoverState.MOVING) is None
    assert departing.sequence.chunk_limit is None


def test_what_goes_to_another_host_and_what_answers_already_never_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Departing(monkeypatch, True, address="tcp:127.0.0.1:1").sequence.stop_at is None
    assert Departing(monkeypatch, True, emitted=3).sequence.stop_at is None
