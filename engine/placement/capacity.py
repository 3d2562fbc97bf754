"""Memory and moves as they are while one decision over residency is made: who fits where, and what makes room at the
least cost. It does not know whose turn it is.
"""

from dataclasses import dataclass
from typing import Final

from engine.placement.snapshot import Move, MoveAllowance, PlacementDecision, PlacementSnapshot, ReplicaSnapshot
from engine.protocol.types import Residency

MOVES_PER_MINUTE: Final = 360  # of one device: 180 wakes, with one that leaves for each
RESIZES_PER_MINUTE: Final = 120


class PlacementCapacity:
    """What is left while a decision is made. `free` bytes of a device may be below 0: the room that somebody waits for
    is taken out too."""

    def __init__(self, view: PlacementSnapshot, allowance: MoveAllowance) -> None:
        count = len(view.devices)
        self.view = view
        self.free = list(view.devices)
        self.coming = [0] * count  # will be free when those that move are there
        self.host_free = view.memory_bytes
        self.host_coming = 0
        self.starting = [False] * count
        self.waking = [False] * count
        self.moves: dict[str, Move] = {}
        self.arrivals: list[ReplicaSnapshot] = []
        passed_s = max(0.0, view.now - allowance.at)
        self._left = _refilled(allowance.moves, MOVES_PER_MINUTE, passed_s, count)
        self._resizes = _refilled(allowance.resizes, RESIZES_PER_MINUTE, passed_s, count)
        for resident in view.residents:
            self._count(resident)

    def _count(self, resident: ReplicaSnapshot) -> None:
        there = resident.host_bytes
        if there > self.view.memory_bytes:  # more than there is: it starts without standing by
            there = resident.memory_bytes
        self.host_free -= there
        if resident.toward is Residency.DISK:
            self.host_coming += there
        if resident.device < 0:
            return
        self.free[resident.device] -= resident.held_bytes
        self.coming[resident.device] += resident.coming_bytes
        if resident.residency is Residency.DISK and not resident.rests:
            self.starting[resident.device] = True
        if resident.residency is Residency.MEMORY and resident.toward is Residency.DEVICE:
            self.waking[resident.device] = True

    def at_rest(self, device: int, residency: Residency) -> list[ReplicaSnapshot]:
        """Those of a device that stay where they are, so far."""
        return [
            resident
            for resident in self.view.residents
            if resident.device == device
            and resident.residency is residency
            and resident.rests
            and resident.name not in self.moves
        ]

    def affords(self, device: int, moves: int) -> bool:
        return self._left[device] >= moves

    def affords_resize(self, device: int) -> bool:
        return self._resizes[device] >= 1

    def move(self, who: ReplicaSnapshot, move: Move) -> None:
        """Begins it. Memory that it frees is not free before it ended."""
        assert who.name not in self.moves
        assert self.affords(move.device, 1)
        self._left[move.device] -= 1
        self.moves[who.name] = move

    def resize(self, who: ReplicaSnapshot, granted_bytes: int, why: str) -> None:
        assert who.name not in self.moves
        assert self.affords_resize(who.device)
        self._resizes[who.device] -= 1
        self.moves[who.name] = Move(who.name, Residency.DEVICE, who.device, granted_bytes, why=why)

    def decision(self) -> PlacementDecision:
        return PlacementDecision(
            tuple(self.moves.values()), MoveAllowance(self.view.now, tuple(self._left), tuple(self._resizes))
        )


def _refilled(left: tuple[float, ...], a_minute: int, passed_s: float, count: int) -> list[float]:
    """A bucket holds a quarter of what a minute may have, and gets the rest in that minute."""
    full = a_minute / 4
    return [min(full, (left[i] if i < len(left) else full) + passed_s * (a_minute - full) / 60) for i in range(count)]


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """One that may leave its device. `bytes` are free then that no shrinking gives."""

    who: ReplicaSnapshot
    to: Residency
    cost: float
    bytes: int


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """What makes room on a device."""

    cost: float
    shrinks: tuple[tuple[ReplicaSnapshot, int], ...]  # to so many bytes
    leaves: tuple[EvictionCandidate, ...]


def candidate_devices(rooms: PlacementCapacity, who: ReplicaSnapshot) -> list[int]:
    """Where it could be: a process keeps its device."""
    if who.residency is not Residency.DISK:
        return [who.device]
    return [
        device
        for device in range(len(rooms.view.devices))
        if not rooms.starting[device] and max_capacity_bytes(rooms.view, who, device) >= who.least_bytes
    ]


def max_capacity_bytes(view: PlacementSnapshot, who: ReplicaSnapshot, device: int) -> int:
    """Bytes of the device that it could have if all left that may."""
    return view.devices[device] - sum(
        other.least_bytes
        for other in view.residents
        if other.wishes.pinned and other.device == device and other.name != who.name
        and other.toward is Residency.DEVICE
    )  # fmt: skip


def _min_capacity_bytes(view: PlacementSnapshot, who: ReplicaSnapshot, device: int) -> int:
    """Bytes of the device that it could have while the processes of all that are there live."""
    return view.devices[device] - sum(
        other.least_bytes if other.wishes.pinned else other.asleep_bytes
        for other in view.residents
        if other.device == device and other.name != who.name and not (other.residency is other.toward is Residency.DISK)
    )


def begin_arrival(rooms: PlacementCapacity, who: ReplicaSnapshot, device: int, to: Residency, why: str) -> None:
    """Begins it, with the least that it needs."""
    starts = who.residency is Residency.DISK
    standby = starts and (to is Residency.MEMORY or _fits_in_host_memory(rooms, who))
    if starts:
        rooms.starting[device] = True
        rooms.host_free -= who.standby_bytes if standby else 0
    else:
        rooms.waking[device] = True
    rooms.free[device] -= who.need_bytes
    rooms.move(who, Move(who.name, to, device, who.least_bytes, standby=standby, why=why))
    rooms.arrivals.append(who)


def _fits_in_host_memory(rooms: PlacementCapacity, who: ReplicaSnapshot) -> bool:
    """Whether it will have to sleep one day, and host memory has room for that."""
    return not who.wishes.pinned and rooms.host_free >= who.standby_bytes and _is_overcommitted(rooms.view)


def _is_overcommitted(view: PlacementSnapshot) -> bool:
    """Whether some replica has no room on any device where all are awake."""
    free = list(view.devices)
    for resident in sorted(view.residents, key=lambda one: -one.least_bytes):
        device = max(range(len(free)), key=lambda one: free[one])
        if free[device] < resident.least_bytes:
            return True
        free[device] -= resident.least_bytes
    return False


def plan_eviction(
    rooms: PlacementCapacity, who: ReplicaSnapshot, device: int, preempt: bool, silent_s: float
) -> EvictionPlan | None:
    """How the device gets the room that `who` lacks there at the least cost; None where that is not possible now.
    Running ones leave where `preempt`, idle ones where they were not asked for `silent_s`."""
    short = who.need_bytes - rooms.free[device] - rooms.coming[device]
    awake = [one for one in rooms.at_rest(device, Residency.DEVICE) if one.name != who.name]
    leaving: list[EvictionCandidate] = []
    freed = sum(one.excess_bytes for one in awake)
    for leave in _eviction_candidates(rooms, who, device, preempt, silent_s):
        if freed >= short:
            break
        leaving.append(leave)
        freed += leave.bytes
    for leave in leaving[-2::-1]:
        if freed - leave.bytes >= short:
            leaving.remove(leave)
            freed -= leave.bytes
    if freed < short:
        return None
    gone = {leave.who.name for leave in leaving}
    short -= sum(leave.bytes + (leave.who.excess_bytes if leave.who.serves else 0) for leave in leaving)
    shrinks = _shrinks(rooms, [one for one in awake if one.name not in gone], short)
    clearing = EvictionPlan(sum(leave.cost for leave in leaving), shrinks, tuple(leaving))
    return clearing if rooms.affords(device, len(shrinks) + len(leaving)) else None


def _eviction_candidates(
    rooms: PlacementCapacity, who: ReplicaSnapshot, device: int, preempt: bool, silent_s: float
) -> list[EvictionCandidate]:
    """Who may leave the device for `who`, the cheapest first: idle ones, those that run, and last those that sleep,
    whose process holds some of it. Where it would have no room if all others slept, idle ones end too."""
    now, crammed = rooms.view.now, _min_capacity_bytes(rooms.view, who, device) < who.least_bytes
    awake = [
        one
        for one in rooms.at_rest(device, Residency.DEVICE)
        if one.name != who.name and not one.wishes.pinned
        and (one.arrived_at is None or now - one.arrived_at >= one.protected_s)
        and (preempt or not one.busy)
        and (one.asked_at is None or now - one.asked_at >= silent_s)
    ]  # fmt: skip
    asleep = [
        one for one in rooms.at_rest(device, Residency.MEMORY) if one.name != who.name and not one.busy and crammed
    ]
    leaves = [EvictionCandidate(one, to, _eviction_cost(rooms, one, to), one.held_bytes - one.excess_bytes - left)
              for one in awake if (to := _destination(rooms, one, crammed)) is not None
              for left in (one.asleep_bytes if to is Residency.MEMORY else 0,)]  # fmt: skip
    leaves.sort(key=lambda leave: (leave.who.busy, leave.cost / max(leave.bytes, 1)))
    ends = [
        EvictionCandidate(one, Residency.DISK, _eviction_cost(rooms, one, Residency.DISK), one.held_bytes)
        for one in asleep
    ]
    return leaves + sorted(ends, key=lambda leave: leave.cost / max(leave.bytes, 1))


def _eviction_cost(rooms: PlacementCapacity, who: ReplicaSnapshot, to: Residency) -> float:
    """Seconds of waiting a second that are to be expected of it."""
    back_s = who.times.wake_s if to is Residency.MEMORY else who.times.start_s
    return who.expected(rooms.view.now) * back_s


def _destination(rooms: PlacementCapacity, who: ReplicaSnapshot, crammed: bool) -> Residency | None:
    """Where one that leaves its device goes: to MEMORY where there is room or those that sleep there are of less value;
    else, or where the device is `crammed`, to DISK, unless it is busy."""
    if crammed and not who.busy:
        return Residency.DISK
    lacks = who.standby_bytes - who.memory_bytes - rooms.host_free - rooms.host_coming
    if lacks <= sum(other.memory_bytes for other in _sleepers(rooms, who)):
        return Residency.MEMORY
    return None if who.busy else Residency.DISK


def _sleepers(rooms: PlacementCapacity, who: ReplicaSnapshot) -> list[ReplicaSnapshot]:
    """Those that give up their host memory for `who`, the least valuable first."""

    def value(one: ReplicaSnapshot) -> float:
        return _eviction_cost(rooms, one, Residency.DISK) / max(one.standby_bytes, 1)

    asleep = [one for device in range(len(rooms.view.devices)) for one in rooms.at_rest(device, Residency.MEMORY)]
    idle = [one for one in asleep if not one.busy and one.memory_bytes and (who.busy or value(one) < value(who))]
    return sorted(idle, key=value)


def _shrinks(
    rooms: PlacementCapacity, awake: list[ReplicaSnapshot], short: int
) -> tuple[tuple[ReplicaSnapshot, int], ...]:
    """Who gives up KV, and what each then may hold: the idle first, then those who are asked for least."""
    shrinks = []
    for one in sorted(awake, key=lambda one: (one.busy, one.expected(rooms.view.now))):
        given = min(one.excess_bytes, short)
        if given > 0:
            shrinks.append((one, one.held_bytes - given))
            short -= given
    return tuple(shrinks)


def apply_eviction(rooms: PlacementCapacity, who: ReplicaSnapshot, device: int, clearing: EvictionPlan) -> None:
    """Begins what makes room, as far as host memory is free for those that go to sleep."""
    why = f"{who.model} waits for its room"
    for one, granted_bytes in clearing.shrinks:
        rooms.move(one, Move(one.name, Residency.DEVICE, device, granted_bytes, why=why))
        rooms.coming[device] += one.held_bytes - granted_bytes
    for leave in clearing.leaves:
        one, sleeps = leave.who, leave.to is Residency.MEMORY
        lacks = max(0, one.standby_bytes - one.memory_bytes) if sleeps else 0
        if lacks > rooms.host_free:
            _end_sleepers(rooms, one, lacks - rooms.host_free - rooms.host_coming)
            return
        rooms.host_free -= lacks
        rooms.move(one, Move(one.name, leave.to, device, why=why))
        rooms.coming[device] += one.held_bytes - (one.asleep_bytes if sleeps else 0)


def _end_sleepers(rooms: PlacementCapacity, who: ReplicaSnapshot, lacks: int) -> None:
    """Their host memory is for `who`, once it is free."""
    for one in _sleepers(rooms, who):
        if lacks > 0 and rooms.affords(one.device, 1):
            rooms.move(
                one, Move(one.name, Residency.DISK, one.device, why=f"{who.model} needs its host memory to sleep")
            )
            rooms.host_coming += one.memory_bytes
            lacks -= one.memory_bytes
