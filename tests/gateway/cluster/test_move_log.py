"""Moves as they are pieced together from what machines report."""

from msgspec import structs

from engine.protocol.frames import ReplicaState
from engine.protocol.types import Residency
from gateway.cluster.move_log import MOVES_MAX, MoveLog
from tests.support.waiting import StoppedClock

DISK, MEMORY, DEVICE = Residency.DISK, Residency.MEMORY, Residency.DEVICE


class Machine:
    """One replica that reports its places."""

    def __init__(self, address: str = "unix:/r") -> None:
        self.clock = StoppedClock(1000.0)
        self.log = MoveLog(self.clock)
        self.state: ReplicaState | None = None
        self.address = address

    def report(self, residency: Residency, toward: Residency, after_s: float = 0.0, problem: str = "") -> None:
        self.clock.now_s += after_s
        state = ReplicaState("@cf/a/b", self.address, residency, 1, problem, toward=toward, device=0)
        self.log.saw("m1", "one", self.state, state)
        self.state = state

    def moves(self) -> list[tuple[str, float | None, str]]:
        return [
            (move.kind, None if move.ended_at is None else move.ended_at - move.began_at, move.problem)
            for move in self.log.latest()
        ]


def test_a_wake_and_a_sleep_have_their_lengths_the_newest_first() -> None:
    machine = Machine()
    machine.report(MEMORY, MEMORY)
    assert machine.moves() == []
    machine.report(MEMORY, DEVICE, 5)
    assert machine.moves() == [("wake", None, "")]
    machine.report(DEVICE, DEVICE, 0.25)
    machine.report(DEVICE, MEMORY, 60)
    machine.report(MEMORY, MEMORY, 0.5)
    assert machine.moves() == [("sleep", 0.5, ""), ("wake", 0.25, "")]


def test_a_start_through_memory_is_one_move() -> None:
    machine = Machine()
    machine.report(DISK, DEVICE)
    machine.report(MEMORY, DEVICE, 3)
    machine.report(DEVICE, DEVICE, 1)
    assert machine.moves() == [("start", 4.0, "")]


def test_a_move_that_does_not_arrive_says_why() -> None:
    machine = Machine()
    machine.report(MEMORY, DEVICE)
    machine.report(DISK, DISK, 2, problem="it died: out of memory")
    assert machine.moves() == [("wake", 2.0, "it died: out of memory")]
    machine.report(DISK, DEVICE, 1)
    machine.report(MEMORY, MEMORY, 1)
    assert machine.moves()[0] == ("start", 1.0, "it went toward MEMORY")


def test_a_move_that_was_over_before_it_was_seen_has_no_length() -> None:
    machine = Machine()
    machine.report(MEMORY, MEMORY)
    machine.report(DEVICE, DEVICE, 9)
    assert machine.moves() == [("wake", 0.0, "")]


def test_a_replica_that_is_removed_ends_its_move() -> None:
    machine = Machine()
    machine.report(DISK, DEVICE)
    assert machine.state is not None
    machine.log.gone("m1", machine.state)
    machine.log.gone("m1", machine.state)
    assert machine.moves() == [("start", 0.0, "the replica was removed")]


def test_so_many_moves_are_kept_and_no_more() -> None:
    machine = Machine()
    for _ in range(MOVES_MAX):
        machine.report(MEMORY, DEVICE, 1)
        machine.report(DEVICE, DEVICE, 1)
    assert len(machine.log.latest()) == MOVES_MAX
    newest = machine.log.latest()[0]
    assert newest.began_at == machine.clock.now_s - 1
    assert structs.asdict(machine.state)["toward"] is DEVICE  # type: ignore[arg-type]
