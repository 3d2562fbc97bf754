"""engine/host/replica_handle.py: what a machine makes of what one replica says, on a clock of its own and over a real
socket."""

import math
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.host.demand import Demand, DemandTracker
from engine.host.peers import ReplicaPeer
from engine.host.reconciler import PlacementReconciler
from engine.host.replica_handle import ReplicaHandle
from engine.host.supervisor import ReplicaSupervisor, SubprocessLauncher, SupervisionTimeouts
from engine.hostinfo.memory import ByteBudget
from engine.placement.capacity import HANDOVER_S
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
from engine.protocol.specs import MachineSpec, ModelSpec, ReplicaSpec
from engine.protocol.types import Residency
from tests.support.machine import short_folder

MIB = 1 << 20
HERE = PlacementStatus(
    Residency.DEVICE, device_bytes=300, asleep_bytes=10, min_bytes=200, max_bytes=900, memory_bytes=150,
    weights_bytes=150, standby_bytes=190,
)  # fmt: skip
ASLEEP = msgspec.structs.replace(HERE, residency=Residency.MEMORY, device_bytes=10)


class HandledReplica:
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
        self.replica.devices = (0,)
        self.replica.begin("start", Placement("m-0", to, (0,), 500), self.now)

    def serve(self) -> None:
        self.listener.bind(str(self.path))
        self.listener.listen()
        self.listener.settimeout(5)
        Heartbeat.open(self.pulse).enter(ReplicaPhase.IDLE)
        self.replica.poll(self.now)
        self.peer, _ = self.listener.accept()
        self.peer.settimeout(5)
        self.report(Hello(PROTOCOL_VERSION, "m", "", "1", 1, 1, 1, 1, 1))

    def report(self, *frames: Frame) -> None:
        self.peer.sendall(b"".join(map(encode_frame, frames)))
        for key, _ in self.selector.select(0.2):
            key.data()
        self.replica.poll(self.now)
        for placed in self.replica.peer.take_reports():
            self.replica.take_status(placed, self.now)

    def received(self) -> list[Frame]:
        return list(FrameReader().feed(self.peer.recv(1 << 16)))

    def snapshot(self, demand: Demand | None = None, alone: bool = False) -> ReplicaSnapshot:
        return self.replica.snapshot(self.now, demand or Demand(), alone, 8000 * MIB, ready=True)

    def close(self) -> None:
        self.replica.peer.close()
        if self.supervisor.process is not None:
            self.supervisor.process.kill()
            self.supervisor.process.wait()
            self.supervisor.reap(self.now)
        self.listener.close()


@pytest.fixture
def handled() -> Iterator[HandledReplica]:
    with short_folder() as folder:
        handled = HandledReplica(folder)
        yield handled
        handled.close()


LOAD = ReplicaLoad(running=0, waiting=0, waiting_tokens=0, free_blocks=50, cached_blocks=0, steps=0, blocks=100)


def load(**fields: object) -> ReplicaLoad:
    changed: ReplicaLoad = msgspec.structs.replace(LOAD, **fields)
    return changed


def test_it_starts_until_it_has_said_how_large_it_is(handled: HandledReplica) -> None:
    handled.start()
    assert (handled.snapshot().residency, handled.snapshot().toward) == (Residency.DISK, Residency.DEVICE)
    handled.serve()
    assert handled.replica.residency is Residency.DEVICE
    assert handled.snapshot().residency is Residency.DISK
    handled.report(HERE)
    seen = handled.snapshot()
    assert (seen.residency, seen.is_at_rest, seen.granted_bytes) == (Residency.DEVICE, True, 500)
    assert (seen.device_bytes, seen.min_bytes, seen.max_bytes, seen.standby_bytes) == (300, 200, 900, 190)
    assert handled.received() == [SetPlacement(Residency.DEVICE)]


def test_a_replica_that_never_reports_counts_as_placed_after_a_while_and_cannot_be_moved(
    handled: HandledReplica,
) -> None:
    handled.start()
    handled.serve()
    handled.now += 2.1
    assert (handled.snapshot().residency, handled.snapshot().is_at_rest) == (Residency.DEVICE, False)


def test_host_memory_is_planned_with_for_all_that_it_may_keep_and_asleep_for_what_it_did(
    handled: HandledReplica,
) -> None:
    handled.start()
    handled.serve()
    handled.report(HERE)
    assert (handled.snapshot().memory_bytes, handled.snapshot().standby_bytes) == (150, 190)
    handled.replica.begin("sleep", Placement("m-0", Residency.MEMORY), handled.now)
    assert handled.snapshot().host_bytes == 190
    handled.report(ASLEEP)
    assert (handled.snapshot().standby_bytes, handled.snapshot().host_bytes) == (150, 150)
    handled.replica.on_exit()
    assert handled.snapshot().standby_bytes == 190


def test_before_it_was_seen_its_size_is_guessed_and_the_guess_grows_where_it_died_of_it(
    handled: HandledReplica,
) -> None:
    guessed = handled.snapshot()
    assert 800 * MIB < guessed.min_bytes < guessed.max_bytes == 8000 * MIB
    assert guessed.standby_bytes == 800 * MIB + handled.model.kept_kv_bytes
    for _ in range(3):
        handled.replica.raise_estimate(8000 * MIB)
    assert handled.snapshot().min_bytes == 8000 * MIB


def test_another_replica_of_its_model_says_its_size_too(handled: HandledReplica) -> None:
    handled.replica.learn_sizes(HERE)
    assert (handled.snapshot().min_bytes, handled.snapshot().max_bytes) == (200, 900)


def test_what_it_was_granted_beyond_what_it_could_use_is_free_for_others(handled: HandledReplica) -> None:
    handled.start()
    handled.serve()
    handled.report(msgspec.structs.replace(HERE, max_bytes=350))
    assert handled.snapshot().granted_bytes == 350


def test_arrivals_are_counted_from_what_started_and_fade(handled: HandledReplica) -> None:
    handled.start()
    handled.serve()
    handled.report(HERE, load(counters={"started": 30}))
    soon = handled.snapshot()
    assert (soon.request_rate, soon.requested_at) == (1.0, 100.0)
    handled.now += 30.0
    handled.report(load(counters={"started": 30}))
    later = handled.snapshot()
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
    handled: HandledReplica, before: dict[str, object], now: dict[str, object], short: bool
) -> None:
    handled.start()
    handled.serve()
    handled.report(HERE, load(**before))
    handled.now += 1.1
    handled.report(load(**now))
    assert handled.snapshot().kv_short is short
    handled.now += 1.1
    assert not handled.snapshot().kv_short


def test_the_first_request_waits_in_a_gateway_or_in_the_replica(handled: HandledReplica) -> None:
    handled.start()
    handled.serve()
    handled.report(HERE, load(waiting=2, running=1, free_blocks=25))
    handled.now += 3.0
    seen = handled.snapshot(Demand(5, 2.0, since=102.0))
    assert (seen.waiting, seen.weight, seen.waited_s, seen.running, seen.kv_used) == (7, 2.0, 3.0, 1, 0.75)


def test_an_order_ends_with_the_answer_that_says_so_and_no_other(handled: HandledReplica) -> None:
    handled.start()
    handled.serve()
    handled.report(HERE)
    handled.replica.begin("sleep", Placement("m-0", Residency.MEMORY), handled.now)
    handled.report(HERE)
    assert handled.replica.transition is not None
    handled.report(ASLEEP)
    assert handled.replica.transition is None
    assert (handled.snapshot().granted_bytes, handled.snapshot().memory_bytes, handled.replica.reason) == (0, 150, "")
    handled.replica.begin("wake", Placement("m-0", Residency.DEVICE, (0,), 400), handled.now)
    handled.report(msgspec.structs.replace(ASLEEP, problem="no memory"))
    assert handled.replica.transition is None
    handled.replica.fail("wake failed: no memory", handled.now)
    assert (handled.snapshot().granted_bytes, handled.snapshot().is_at_rest, handled.replica.reason) == (
        0,
        False,
        "wake failed: no memory",
    )
    handled.now += 1.1
    assert handled.snapshot().is_at_rest


def test_a_decision_is_due_a_moment_before_a_wake_is_expected_to_end(handled: HandledReplica) -> None:
    spec = MachineSpec(name="here", address="", folder="", models=[handled.model])
    replicas = {"m-0": handled.replica}
    reconciler = PlacementReconciler(spec, replicas, [], ByteBudget(0), DemandTracker(3.0), SupervisionTimeouts())
    handled.start()
    handled.serve()
    handled.report(HERE)
    handled.replica.begin("sleep", Placement("m-0", Residency.MEMORY), handled.now)
    handled.report(ASLEEP)
    assert reconciler.pause_s(handled.now, 0.2) == 0.2
    wake_s = handled.snapshot().times.wake_s
    handled.replica.begin("wake", Placement("m-0", Residency.DEVICE, (0,), 400), handled.now)
    assert reconciler.pause_s(handled.now, 60.0) == pytest.approx(wake_s - HANDOVER_S)
    handled.now += wake_s - HANDOVER_S / 2
    assert handled.snapshot().moved_s == pytest.approx(wake_s - HANDOVER_S / 2)
    assert reconciler.pause_s(handled.now, 0.2) == 0.2, "it was decided then, and no decision helps before its report"
    handled.report(HERE)
    assert (handled.snapshot().moved_s, reconciler.pause_s(handled.now, 0.2)) == (0.0, 0.2)


def test_a_new_connection_is_sent_the_placement_that_was_under_way(handled: HandledReplica) -> None:
    handled.start()
    handled.serve()
    handled.report(HERE)
    handled.replica.begin("sleep", Placement("m-0", Residency.MEMORY), handled.now)
    handled.received()
    handled.peer.close()
    for key, _ in handled.selector.select(0.2):
        key.data()
    handled.now += 1.0
    handled.replica.poll(handled.now)
    handled.peer, _ = handled.listener.accept()
    handled.peer.settimeout(5)
    assert handled.received() == [SetPlacement(Residency.MEMORY, 0)]


def test_one_that_is_alone_is_left_as_large_as_it_is(handled: HandledReplica) -> None:
    handled.start()
    handled.serve()
    handled.report(HERE)
    seen = handled.snapshot(alone=True)
    assert seen.min_bytes == seen.max_bytes == seen.granted_bytes


def test_the_time_until_it_serves_is_reported_in_steps_and_counts_down(handled: HandledReplica) -> None:
    state = handled.replica.state(handled.now, "", 8140)
    assert (state.ready_ms, state.residency) == (9000, Residency.DISK)
    handled.start()
    handled.now += 7.5
    assert handled.replica.state(handled.now, "", 8140).ready_ms == 700
    handled.now += 60.0
    assert handled.replica.state(handled.now, "", 8140).ready_ms == 100
    assert handled.replica.state(handled.now, "needs too much", 8140).ready_ms == -1
    handled.serve()
    assert handled.replica.state(handled.now, "", 0).ready_ms == 0


def test_an_order_has_as_much_time_more_as_the_machine_itself_was_stopped(handled: HandledReplica) -> None:
    handled.start()
    handled.serve()
    handled.report(HERE)
    handled.replica.begin("sleep", Placement("m-0", Residency.MEMORY), handled.now)
    assert handled.replica.transition is not None
    until = handled.replica.transition.deadline
    assert until == pytest.approx(handled.now + SupervisionTimeouts().move_s)
    handled.replica.forgive(500.0, handled.now)
    assert handled.replica.transition.deadline == until + 500.0


def test_a_start_ends_with_an_answer_or_so_long_after_it_serves_however_long_it_loads(handled: HandledReplica) -> None:
    handled.start(Residency.MEMORY)
    handled.now += 1000.0
    handled.replica.poll(handled.now)
    assert handled.replica.transition is not None
    assert handled.replica.transition.deadline == math.inf
    handled.serve()
    assert handled.replica.transition.deadline == handled.now + SupervisionTimeouts().move_s
    handled.now += 5.0
    handled.replica.poll(handled.now)
    assert handled.replica.transition.deadline == handled.now - 5.0 + SupervisionTimeouts().move_s


def test_a_replica_that_is_to_end_has_that_time_more_too(
    handled: HandledReplica, capfd: pytest.CaptureFixture[str]
) -> None:
    handled.start()
    handled.supervisor.end(handled.now)
    handled.now += 500.0
    handled.replica.forgive(500.0, handled.now)
    handled.replica.poll(handled.now)
    assert "replica_not_ended" not in capfd.readouterr().err
    handled.now += SupervisionTimeouts().drain_s
    handled.replica.poll(handled.now)
    assert "replica_not_ended" in capfd.readouterr().err
