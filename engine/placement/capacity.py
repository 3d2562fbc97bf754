"""Memory and moves as they are while one placement decision is made: which replica fits where, and what makes room at
the least cost. It does not know whose turn it is.
"""

import math
from dataclasses import dataclass
from typing import Final

from engine.placement.snapshot import MoveAllowance, Placement, PlacementDecision, PlacementSnapshot, ReplicaSnapshot
from engine.protocol.types import Residency

MOVES_PER_MINUTE: Final = 360  # of one device: 180 wakes, with one that leaves for each
RESIZES_PER_MINUTE: Final = 120
HANDOVER_S: Final = 0.02  # from an order to wake to the first byte copied: the link would be idle for so long


class PlacementCapacity:
    """The bytes and moves that are left while a decision is made. `free_bytes` of a device may be below 0: the room
    that a replica waits for is taken out too."""

    def __init__(self, snapshot: PlacementSnapshot, allowance: MoveAllowance) -> None:
        count = len(snapshot.devices)
        self.snapshot = snapshot
        self.free_bytes = list(snapshot.devices)
        self.incoming_bytes = [0] * count  # will be free when those that move have moved
        self.host_free_bytes = snapshot.memory_bytes
        self.host_incoming_bytes = 0
        self.starting = [False] * count
        self.link_s = [0.0] * count  # until the wakes under way end, as far as they can be expected
        self.placements: dict[str, Placement] = {}
        self.arrivals: list[ReplicaSnapshot] = []
        passed_s = max(0.0, snapshot.now - allowance.at)
        self._moves_left = _refilled(allowance.moves, MOVES_PER_MINUTE, passed_s, count)
        self._resizes_left = _refilled(allowance.resizes, RESIZES_PER_MINUTE, passed_s, count)
        for replica in snapshot.replicas:
            self._count(replica)

    def _count(self, replica: ReplicaSnapshot) -> None:
        host_bytes = replica.host_bytes
        if host_bytes > self.snapshot.memory_bytes:  # more than there is: it starts without standing by
            host_bytes = replica.memory_bytes
        self.host_free_bytes -= host_bytes
        if replica.toward is Residency.DISK:
            self.host_incoming_bytes += host_bytes
        if replica.device < 0:
            return
        self.free_bytes[replica.device] -= replica.held_bytes
        self.incoming_bytes[replica.device] += replica.incoming_bytes
        if replica.residency is Residency.DISK and not replica.is_at_rest:
            self.starting[replica.device] = True
        if replica.residency is Residency.MEMORY and replica.toward is Residency.DEVICE:
            self.link_s[replica.device] += max(HANDOVER_S, replica.times.wake_s - replica.moved_s)

    def at_rest(self, device: int, residency: Residency) -> list[ReplicaSnapshot]:
        """Replicas of a device that stay where they are, so far."""
        return [
            replica
            for replica in self.snapshot.replicas
            if replica.device == device
            and replica.residency is residency
            and replica.is_at_rest
            and replica.name not in self.placements
        ]

    def allows_moves(self, device: int, moves: int) -> bool:
        return self._moves_left[device] >= moves

    def allows_resize(self, device: int) -> bool:
        return self._resizes_left[device] >= 1

    def place(self, placement: Placement) -> None:
        """Begins a move. Memory that it frees is not free before it ended."""
        assert placement.name not in self.placements
        assert self.allows_moves(placement.device, 1)
        self._moves_left[placement.device] -= 1
        self.placements[placement.name] = placement

    def resize(self, replica: ReplicaSnapshot, granted_bytes: int, reason: str) -> None:
        """Begins a change of a replica's KV alone."""
        assert replica.name not in self.placements
        assert self.allows_resize(replica.device)
        self._resizes_left[replica.device] -= 1
        self.placements[replica.name] = Placement(
            replica.name, Residency.DEVICE, replica.device, granted_bytes, reason=reason
        )

    def decision(self) -> PlacementDecision:
        allowance = MoveAllowance(self.snapshot.now, tuple(self._moves_left), tuple(self._resizes_left))
        return PlacementDecision(tuple(self.placements.values()), allowance)


def _refilled(left: tuple[float, ...], a_minute: int, passed_s: float, count: int) -> list[float]:
    """A bucket holds a quarter of what a minute may have, and gets the rest in that minute."""
    full = a_minute / 4
    return [min(full, (left[i] if i < len(left) else full) + passed_s * (a_minute - full) / 60) for i in range(count)]


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """A replica that may leave its device. `bytes` are free then that no shrinking gives."""

    replica: ReplicaSnapshot
    target: Residency
    cost: float
    bytes: int


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """The moves that make room on a device."""

    cost: float
    shrinks: tuple[tuple[ReplicaSnapshot, int], ...]  # to so many bytes
    evictions: tuple[EvictionCandidate, ...]


def candidate_devices(capacity: PlacementCapacity, replica: ReplicaSnapshot) -> list[int]:
    """The devices that a replica could be on: a process keeps its own."""
    if replica.residency is not Residency.DISK:
        return [replica.device]
    return [
        device
        for device in range(len(capacity.snapshot.devices))
        if not capacity.starting[device] and max_capacity_bytes(capacity.snapshot, replica, device) >= replica.min_bytes
    ]


def max_capacity_bytes(snapshot: PlacementSnapshot, replica: ReplicaSnapshot, device: int) -> int:
    """Bytes of the device that the replica could have if all others left that may."""
    return snapshot.devices[device] - sum(
        other.min_bytes
        for other in snapshot.replicas
        if other.preferences.pinned and other.device == device and other.name != replica.name
        and other.toward is Residency.DEVICE
    )  # fmt: skip


def _min_capacity_bytes(snapshot: PlacementSnapshot, replica: ReplicaSnapshot, device: int) -> int:
    """Bytes of the device that the replica could have while the processes of all others there live."""
    return snapshot.devices[device] - sum(
        other.min_bytes if other.preferences.pinned else other.asleep_bytes
        for other in snapshot.replicas
        if other.device == device and other.name != replica.name
        and not (other.residency is other.toward is Residency.DISK)
    )  # fmt: skip


def begin_arrival(
    capacity: PlacementCapacity, replica: ReplicaSnapshot, device: int, residency: Residency, reason: str
) -> None:
    """Begins a start or a wake, with the fewest bytes that the replica can serve with."""
    starts = replica.residency is Residency.DISK
    standby = starts and (residency is Residency.MEMORY or _fits_in_host_memory(capacity, replica))
    if starts:
        capacity.starting[device] = True
        capacity.host_free_bytes -= replica.standby_bytes if standby else 0
    else:
        capacity.link_s[device] = math.inf
    capacity.free_bytes[device] -= replica.lacking_bytes
    capacity.place(Placement(replica.name, residency, device, replica.min_bytes, standby=standby, reason=reason))
    capacity.arrivals.append(replica)


def _fits_in_host_memory(capacity: PlacementCapacity, replica: ReplicaSnapshot) -> bool:
    """Whether it will have to sleep one day, and host memory has room for that."""
    fits = capacity.host_free_bytes >= replica.standby_bytes
    return fits and not replica.preferences.pinned and _is_overcommitted(capacity.snapshot)


def _is_overcommitted(snapshot: PlacementSnapshot) -> bool:
    """Whether some replica has no room on any device where all are awake."""
    free_bytes = list(snapshot.devices)
    for replica in sorted(snapshot.replicas, key=lambda replica: -replica.min_bytes):
        device = max(range(len(free_bytes)), key=lambda device: free_bytes[device])
        if free_bytes[device] < replica.min_bytes:
            return True
        free_bytes[device] -= replica.min_bytes
    return False


def plan_eviction(
    capacity: PlacementCapacity, replica: ReplicaSnapshot, device: int, preempt: bool, silent_s: float
) -> EvictionPlan | None:
    """How the device gets the room that `replica` lacks there at the least cost; None where that is not possible now.
    Running ones leave where `preempt`, idle ones where no request came for `silent_s`."""
    short_bytes = replica.lacking_bytes - capacity.free_bytes[device] - capacity.incoming_bytes[device]
    awake = [other for other in capacity.at_rest(device, Residency.DEVICE) if other.name != replica.name]
    evictions: list[EvictionCandidate] = []
    freed_bytes = sum(other.excess_bytes for other in awake)
    for candidate in _eviction_candidates(capacity, replica, device, preempt, silent_s):
        if freed_bytes >= short_bytes:
            break
        evictions.append(candidate)
        freed_bytes += candidate.bytes
    for candidate in evictions[-2::-1]:
        if freed_bytes - candidate.bytes >= short_bytes:
            evictions.remove(candidate)
            freed_bytes -= candidate.bytes
    if freed_bytes < short_bytes:
        return None
    evicted = {candidate.replica.name for candidate in evictions}
    short_bytes -= sum(
        candidate.bytes + (candidate.replica.excess_bytes if candidate.replica.serves else 0) for candidate in evictions
    )
    shrinks = _plan_shrinks(capacity, [other for other in awake if other.name not in evicted], short_bytes)
    plan = EvictionPlan(sum(candidate.cost for candidate in evictions), shrinks, tuple(evictions))
    return plan if capacity.allows_moves(device, len(shrinks) + len(evictions)) else None


def _eviction_candidates(
    capacity: PlacementCapacity, replica: ReplicaSnapshot, device: int, preempt: bool, silent_s: float
) -> list[EvictionCandidate]:
    """Replicas that may leave the device for this one, the cheapest first: idle ones, those that run, and last those
    that sleep, whose process holds some of it. Where there would be no room if all others slept, idle ones end too."""
    now, snapshot = capacity.snapshot.now, capacity.snapshot
    overfull = _min_capacity_bytes(snapshot, replica, device) < replica.min_bytes
    awake = [
        other
        for other in capacity.at_rest(device, Residency.DEVICE)
        if other.name != replica.name and not other.preferences.pinned
        and (other.placed_at is None or now - other.placed_at >= other.protected_s)
        and (preempt or not other.busy)
        and (other.requested_at is None or now - other.requested_at >= silent_s)
    ]  # fmt: skip
    candidates = []
    for other in awake:
        target = _eviction_target(capacity, other, overfull)
        if target is not None:
            kept_bytes = other.asleep_bytes if target is Residency.MEMORY else 0
            freed_bytes = other.held_bytes - other.excess_bytes - kept_bytes
            candidates.append(EvictionCandidate(other, target, _eviction_cost(capacity, other, target), freed_bytes))
    candidates.sort(key=lambda candidate: (candidate.replica.busy, candidate.cost / max(candidate.bytes, 1)))
    ends = [
        EvictionCandidate(other, Residency.DISK, _eviction_cost(capacity, other, Residency.DISK), other.held_bytes)
        for other in capacity.at_rest(device, Residency.MEMORY)
        if other.name != replica.name and not other.busy and overfull
    ]
    return candidates + sorted(ends, key=lambda candidate: candidate.cost / max(candidate.bytes, 1))


def _eviction_cost(capacity: PlacementCapacity, replica: ReplicaSnapshot, target: Residency) -> float:
    """Seconds of waiting a second that are to be expected of it."""
    back_s = replica.times.wake_s if target is Residency.MEMORY else replica.times.start_s
    return replica.expected_rate(capacity.snapshot.now) * back_s


def _eviction_target(capacity: PlacementCapacity, replica: ReplicaSnapshot, overfull: bool) -> Residency | None:
    """Where a replica that leaves its device goes: to MEMORY where there is room or those that sleep there are of less
    value; else, or where the device is `overfull`, to DISK, unless it is busy."""
    if overfull and not replica.busy:
        return Residency.DISK
    available_bytes = capacity.host_free_bytes + capacity.host_incoming_bytes
    short_bytes = replica.standby_bytes - replica.memory_bytes - available_bytes
    if short_bytes <= sum(other.memory_bytes for other in _sleepers(capacity, replica)):
        return Residency.MEMORY
    return None if replica.busy else Residency.DISK


def _sleepers(capacity: PlacementCapacity, replica: ReplicaSnapshot) -> list[ReplicaSnapshot]:
    """Replicas that give up their host memory for this one, the least valuable first."""

    def value(sleeper: ReplicaSnapshot) -> float:
        return _eviction_cost(capacity, sleeper, Residency.DISK) / max(sleeper.standby_bytes, 1)

    devices = range(len(capacity.snapshot.devices))
    asleep = [other for device in devices for other in capacity.at_rest(device, Residency.MEMORY)]
    idle = [
        other
        for other in asleep
        if not other.busy and other.memory_bytes and (replica.busy or value(other) < value(replica))
    ]
    return sorted(idle, key=value)


def _plan_shrinks(
    capacity: PlacementCapacity, awake: list[ReplicaSnapshot], short_bytes: int
) -> tuple[tuple[ReplicaSnapshot, int], ...]:
    """Replicas that give up KV, and what each then may hold: idle ones first, then those with the fewest requests."""
    shrinks = []
    for replica in sorted(awake, key=lambda replica: (replica.busy, replica.expected_rate(capacity.snapshot.now))):
        given_bytes = min(replica.excess_bytes, short_bytes)
        if given_bytes > 0:
            shrinks.append((replica, replica.held_bytes - given_bytes))
            short_bytes -= given_bytes
    return tuple(shrinks)


def apply_eviction(capacity: PlacementCapacity, replica: ReplicaSnapshot, device: int, plan: EvictionPlan) -> None:
    """Begins what makes room, as far as host memory is free for those that go to sleep."""
    reason = f"{replica.model} waits for its room"
    for other, granted_bytes in plan.shrinks:
        capacity.place(Placement(other.name, Residency.DEVICE, device, granted_bytes, reason=reason))
        capacity.incoming_bytes[device] += other.held_bytes - granted_bytes
    for candidate in plan.evictions:
        other, sleeps = candidate.replica, candidate.target is Residency.MEMORY
        short_bytes = max(0, other.standby_bytes - other.memory_bytes) if sleeps else 0
        if short_bytes > capacity.host_free_bytes:
            _end_sleepers(capacity, other, short_bytes - capacity.host_free_bytes - capacity.host_incoming_bytes)
            return
        capacity.host_free_bytes -= short_bytes
        capacity.place(Placement(other.name, candidate.target, device, reason=reason))
        capacity.incoming_bytes[device] += other.held_bytes - (other.asleep_bytes if sleeps else 0)


def _end_sleepers(capacity: PlacementCapacity, replica: ReplicaSnapshot, short_bytes: int) -> None:
    """Ends replicas that sleep, whose host memory is for this one once it is free."""
    reason = f"{replica.model} needs its host memory to sleep"
    for sleeper in _sleepers(capacity, replica):
        if short_bytes > 0 and capacity.allows_moves(sleeper.device, 1):
            capacity.place(Placement(sleeper.name, Residency.DISK, sleeper.device, reason=reason))
            capacity.host_incoming_bytes += sleeper.memory_bytes
            short_bytes -= sleeper.memory_bytes
