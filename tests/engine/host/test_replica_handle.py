"""engine/host/replica_handle.py: what a machine makes of what one replica says, on a clock of its own and over a real
socket."""

import math
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.host.demand import Demand
from engine.host.peers import ReplicaPeer
from engine.host.replica_handle import ReplicaHandle
from engine.host.supervisor import ReplicaSupervisor, SubprocessLauncher, SupervisionTimeouts
from engine.placement.snapshot import Placement, ReplicaSnapshot
from engine.process.heartbeat import Heartbeat, ReplicaPhase
from engine.protocol.frames import (
    PROTOCOL_VERSION,
    Frame,
    FrameReader,
    Hello,
    PlacementStatus,
    ReplicaLoad,
    SetPlacement,
    encode_frame,
)
from engine.protocol.specs import ModelSpec, ReplicaSpec
from engine.protocol.types import Residency
from tests.support.machine import short_folder

MIB = 1 << 20
HERE = PlacementStatus(
    Residency.DEVICE, device_bytes=300, asleep_bytes=10, min_bytes=200, max_bytes=900, memory_bytes=150,
    weights_bytes=150, standby_bytes=190,
)  # fmt: skip
ASLEEP = msgspec.structs.replace(HERE, residency=Residency.MEMORY, device_bytes=10)


class Kept:
    """A replica whose process only sleeps, and this test in its place."""

    def __init__(self, folder: Path) -> None:
        self.now = 100.0
        path = folder / "r.sock"
        self.listener = socket.socket(socket.AF_UNIX)
        self.selector = selectors.DefaultSelector()
        programs = SubprocessLauncher(lambda spec: ["sleep", "60"])
        self.pulse = folder / "r.pulse"
        self.supervisor = ReplicaSupervisor(
            "m", f"unix:{path}", self.pulse, SupervisionTimeouts(), programs, self.selector
        )
        peer = ReplicaPeer(self.selector, f"unix:{path}", 2.0)
        model = ModelSpec(name="m", folder="/m", weights_bytes=800 * MIB)
        self.replica = ReplicaHandle("m-0", model, self.supervisor, peer, SupervisionTimeouts(), on_cpu=False)
        self.path = path
        self.model = model

    def start(self, to: Residency = Residency.DEVICE) -> None:
        spec = ReplicaSpec(model=self.model, address=self.supervisor.address, pulse=str(self.pulse), boot=1)
        assert self.supervisor.start(spec, {}, self.now)
        self.replica.device = 0
        self.replica.begin("start", Placement("m-0", to, 0, 500), self.now)

    def serve(self) -> None:
        self.listener.bind(str(self.path))
        self.listener.listen()
        self.listener.settimeout(5)
        Heartbeat.open(self.pulse).enter(ReplicaPhase.IDLE)
        self.replica.poll(self.now)
        self.peer, _ = self.listener.accept()
        self.peer.settimeout(5)
        self.say(Hello(PROTOCOL_VERSION, "m", "", "1", 1, 1, 1, 1, 1))

    def say(self, *frames: Frame) -> None:
        self.peer.sendall(b"".join(map(encode_frame, frames)))
        for key, _ in self.selector.select(0.2):
            key.data()
        self.replica.poll(self.now)
        for placed in self.replica.peer.take_reports():
            self.replica.take_status(placed, self.now)

    def heard(self) -> list[Frame]:
        return list(FrameReader().feed(self.peer.recv(1 << 16)))

    def resident(self, wanted: Demand | None = None, alone: bool = False) -> ReplicaSnapshot:
        return self.replica.snapshot(self.now, wanted or Demand(), alone, 8000 * MIB, ready=True)

    def close(self) -> None:
        self.replica.peer.close()
        if self.supervisor.process is not None:
            self.supervisor.process.kill()
            self.supervisor.process.wait()
            self.supervisor.reap(self.now)
        self.listener.close()


@pytest.fixture
def kept() -> Iterator[Kept]:
    with short_folder() as folder:
        kept = Kept(folder)
        yield kept
        kept.close()


LOAD = ReplicaLoad(running=0, waiting=0, waiting_tokens=0, free_blocks=50, cached_blocks=0, steps=0, blocks=100)


def load(**fields: object) -> ReplicaLoad:
    changed: ReplicaLoad = msgspec.structs.replace(LOAD, **fields)
    return changed


def test_it_starts_until_it_has_said_how_large_it_is(kept: Kept) -> None:
    kept.start()
    assert (kept.resident().residency, kept.resident().toward) == (Residency.DISK, Residency.DEVICE)
    kept.serve()
    assert kept.replica.residency is Residency.DEVICE
    assert kept.resident().residency is Residency.DISK
    kept.say(HERE)
    seen = kept.resident()
    assert (seen.residency, seen.is_at_rest, seen.granted_bytes) == (Residency.DEVICE, True, 500)
    assert (seen.device_bytes, seen.min_bytes, seen.max_bytes, seen.standby_bytes) == (300, 200, 900, 190)
    assert kept.heard() == [SetPlacement(Residency.DEVICE)]


def test_a_replica_that_never_reports_counts_as_placed_after_a_while_and_cannot_be_moved(kept: Kept) -> None:
    kept.start()
    kept.serve()
    kept.now += 2.1
    assert (kept.resident().residency, kept.resident().is_at_rest) == (Residency.DEVICE, False)


def test_host_memory_is_planned_with_for_all_that_it_may_keep_and_asleep_for_what_it_did(kept: Kept) -> None:
    kept.start()
    kept.serve()
    kept.say(HERE)
    assert (kept.resident().memory_bytes, kept.resident().standby_bytes) == (150, 190)
    kept.replica.begin("sleep", Placement("m-0", Residency.MEMORY), kept.now)
    assert kept.resident().host_bytes == 190
    kept.say(ASLEEP)
    assert (kept.resident().standby_bytes, kept.resident().host_bytes) == (150, 150)
    kept.replica.on_exit()
    assert kept.resident().standby_bytes == 190


def test_before_it_was_seen_its_size_is_guessed_and_the_guess_grows_where_it_died_of_it(kept: Kept) -> None:
    guessed = kept.resident()
    assert 800 * MIB < guessed.min_bytes < guessed.max_bytes == 8000 * MIB
    assert guessed.standby_bytes == 800 * MIB + kept.model.kept_kv_bytes
    for _ in range(3):
        kept.replica.raise_estimate(8000 * MIB)
    assert kept.resident().min_bytes == 8000 * MIB


def test_another_replica_of_its_model_says_its_size_too(kept: Kept) -> None:
    kept.replica.learn_sizes(HERE)
    assert (kept.resident().min_bytes, kept.resident().max_bytes) == (200, 900)


def test_what_it_was_granted_beyond_what_it_could_use_is_free_for_others(kept: Kept) -> None:
    kept.start()
    kept.serve()
    kept.say(msgspec.structs.replace(HERE, max_bytes=350))
    assert kept.resident().granted_bytes == 350


def test_arrivals_are_counted_from_what_started_and_fade(kept: Kept) -> None:
    kept.start()
    kept.serve()
    kept.say(HERE, load(counters={"started": 30}))
    soon = kept.resident()
    assert (soon.request_rate, soon.requested_at) == (1.0, 100.0)
    kept.now += 30.0
    kept.say(load(counters={"started": 30}))
    later = kept.resident()
    assert 0.3 < later.request_rate < 0.4
    assert later.requested_at == 100.0


@pytest.mark.parametrize(
    ("before", "now", "short"),
    [
        ({}, {"counters": {"short_of_blocks": 1}}, True),
        ({"counters": {"short_of_blocks": 1}}, {"counters": {"short_of_blocks": 2}}, True),
        ({"counters": {"short_of_blocks": 1}}, {"counters": {"short_of_blocks": 1}}, False),
        ({}, {"waiting": 3, "running": 2, "free_blocks": 0, "counters": {"preemptions": 1}}, False),
    ],
)
def test_kv_is_short_for_a_while_where_sequences_lacked_blocks(
    kept: Kept, before: dict[str, object], now: dict[str, object], short: bool
) -> None:
    kept.start()
    kept.serve()
    kept.say(HERE, load(**before))
    kept.now += 1.1
    kept.say(load(**now))
    assert kept.resident().kv_short is short
    kept.now += 1.1
    assert not kept.resident().kv_short


def test_the_first_request_waits_in_a_gateway_or_in_the_replica(kept: Kept) -> None:
    kept.start()
    kept.serve()
    kept.say(HERE, load(waiting=2, running=1, free_blocks=25))
    kept.now += 3.0
    seen = kept.resident(Demand(5, 2.0, since=102.0))
    assert (seen.waiting, seen.weight, seen.waited_s, seen.running, seen.kv_used) == (7, 2.0, 3.0, 1, 0.75)


def test_an_order_ends_with_the_answer_that_says_so_and_no_other(kept: Kept) -> None:
    kept.start()
    kept.serve()
    kept.say(HERE)
    kept.replica.begin("sleep", Placement("m-0", Residency.MEMORY), kept.now)
    kept.say(HERE)
    assert kept.replica.transition is not None
    kept.say(ASLEEP)
    assert kept.replica.transition is None
    assert (kept.resident().granted_bytes, kept.resident().memory_bytes, kept.replica.reason) == (0, 150, "")
    kept.replica.begin("wake", Placement("m-0", Residency.DEVICE, 0, 400), kept.now)
    kept.say(msgspec.structs.replace(ASLEEP, problem="no memory"))
    assert kept.replica.transition is None
    kept.replica.fail("wake failed: no memory", kept.now)
    assert (kept.resident().granted_bytes, kept.resident().is_at_rest, kept.replica.reason) == (
        0,
        False,
        "wake failed: no memory",
    )
    kept.now += 1.1
    assert kept.resident().is_at_rest


def test_a_new_connection_is_sent_the_placement_that_was_under_way(kept: Kept) -> None:
    kept.start()
    kept.serve()
    kept.say(HERE)
    kept.replica.begin("sleep", Placement("m-0", Residency.MEMORY), kept.now)
    kept.heard()
    kept.peer.close()
    for key, _ in kept.selector.select(0.2):
        key.data()
    kept.now += 1.0
    kept.replica.poll(kept.now)
    kept.peer, _ = kept.listener.accept()
    kept.peer.settimeout(5)
    assert kept.heard() == [SetPlacement(Residency.MEMORY, 0)]


def test_one_that_is_alone_is_left_as_large_as_it_is(kept: Kept) -> None:
    kept.start()
    kept.serve()
    kept.say(HERE)
    seen = kept.resident(alone=True)
    assert seen.min_bytes == seen.max_bytes == seen.granted_bytes


def test_the_time_until_it_serves_is_reported_in_steps_and_counts_down(kept: Kept) -> None:
    state = kept.replica.state(kept.now, "", 8140)
    assert (state.ready_ms, state.residency) == (9000, Residency.DISK)
    kept.start()
    kept.now += 7.5
    assert kept.replica.state(kept.now, "", 8140).ready_ms == 700
    kept.now += 60.0
    assert kept.replica.state(kept.now, "", 8140).ready_ms == 100
    assert kept.replica.state(kept.now, "needs too much", 8140).ready_ms == -1
    kept.serve()
    assert kept.replica.state(kept.now, "", 0).ready_ms == 0


def test_an_order_has_as_much_time_more_as_the_machine_itself_was_stopped(kept: Kept) -> None:
    kept.start()
    kept.serve()
    kept.say(HERE)
    kept.replica.begin("sleep", Placement("m-0", Residency.MEMORY), kept.now)
    assert kept.replica.transition is not None
    until = kept.replica.transition.deadline
    assert until == pytest.approx(kept.now + SupervisionTimeouts().move_s)
    kept.replica.forgive(500.0, kept.now)
    assert kept.replica.transition.deadline == until + 500.0


def test_a_start_ends_with_an_answer_or_so_long_after_it_serves_however_long_it_loads(kept: Kept) -> None:
    kept.start(Residency.MEMORY)
    kept.now += 1000.0
    kept.replica.poll(kept.now)
    assert kept.replica.transition is not None
    assert kept.replica.transition.deadline == math.inf
    kept.serve()
    assert kept.replica.transition.deadline == kept.now + SupervisionTimeouts().move_s
    kept.now += 5.0
    kept.replica.poll(kept.now)
    assert kept.replica.transition.deadline == kept.now - 5.0 + SupervisionTimeouts().move_s


def test_a_replica_that_is_to_end_has_that_time_more_too(kept: Kept, capfd: pytest.CaptureFixture[str]) -> None:
    kept.start()
    kept.supervisor.end(kept.now)
    kept.now += 500.0
    kept.replica.forgive(500.0, kept.now)
    kept.replica.poll(kept.now)
    assert "replica_not_ended" not in capfd.readouterr().err
    kept.now += SupervisionTimeouts().drain_s
    kept.replica.poll(kept.now)
    assert "replica_not_ended" in capfd.readouterr().err
