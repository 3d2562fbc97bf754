"""The latest moves of models between disk, memory and devices, as machines report them. It knows no tenants and asks
nobody."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from engine.protocol.frames import ReplicaState
from engine.protocol.types import Residency

MOVES_MAX: Final = 2_000  # kept; the oldest go

MoveKind = Literal["wake", "start", "sleep", "end"]


@dataclass(frozen=True, slots=True)
class Move:
    """A replica's way from one place to another. Times are seconds since 1970 at this gateway; `ended_at` is None while
    it moves, and `problem` says why it did not get there."""

    began_at: float
    machine: str
    model: str
    replica: str
    device: int
    origin: Residency
    target: Residency
    ended_at: float | None = None
    problem: str = ""

    @property
    def kind(self) -> MoveKind:
        """What operators call it: a start reads the disk, a wake the host's memory."""
        if self.target < self.origin:
            return "end" if self.target is Residency.DISK else "sleep"
        return "start" if self.origin is Residency.DISK else "wake"


class MoveLog:
    """`saw` gets each state that a machine reports. A move whose beginning was not seen has no length: reports come at
    every change, but not while the machine cannot be reached."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended: deque[Move] = deque(maxlen=MOVES_MAX)
        self._under_way: dict[tuple[str, str], Move] = {}

    def latest(self) -> Sequence[Move]:
        """The latest moves, those under way among them, the newest first."""
        moves = [*self._ended, *self._under_way.values()]
        return sorted(moves, key=lambda move: move.began_at, reverse=True)[:MOVES_MAX]

    def saw(self, address: str, machine: str, before: ReplicaState | None, state: ReplicaState) -> None:
        """Notes what has begun or ended between two reports of one replica; the first of a replica tells of no move.
        `address` is its machine's, `machine` what that calls itself."""
        key, now = (address, state.address), self._clock()
        move = self._under_way.get(key)
        if move is not None and (state.toward is not move.target or state.residency is state.toward):
            self._end(key, move, state, now)
            move = None
        elif before is not None and move is None and before.residency is not state.residency:
            self._ended.append(replace(_move(machine, before.residency, state.residency, state, now), ended_at=now))
        if move is None and state.toward is not state.residency:
            self._under_way[key] = _move(machine, state.residency, state.toward, state, now)

    def gone(self, address: str, state: ReplicaState) -> None:
        """Notes that the machine at the address has this replica no more."""
        if move := self._under_way.pop((address, state.address), None):
            self._ended.append(replace(move, ended_at=self._clock(), problem="the replica was removed"))

    def _end(self, key: tuple[str, str], move: Move, state: ReplicaState, now: float) -> None:
        del self._under_way[key]
        problem = "" if state.residency is move.target else state.problem or f"it went toward {state.toward.name}"
        self._ended.append(replace(move, ended_at=now, problem=problem, device=max(move.device, state.device)))


def _move(machine: str, origin: Residency, target: Residency, state: ReplicaState, now: float) -> Move:
    return Move(now, machine, state.model, state.address, state.device, origin, target)
