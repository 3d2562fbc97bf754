"""Memory and moves as they are while one placement decision is made: which replica fits where, and what makes room at
the least cost. It does not know whose turn it is.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from engine.placement.snapshot import MoveAllowance, Placement, PlacementDecision, PlacementSnapshot, ReplicaSnapshot
from engine.protocol.types import Residency

MOVES_PER_MINUTE: Final = 360  # of one device: 180 wakes, with one that leaves for each
RESIZES_PER_MINUTE: Final = 120
TUPLES_MAX: Final = 128  # sets of devices that are weighed for a start: all of them on up to eight
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
        for device in replica.devices:
            self.free_bytes[device] -= replica.held_bytes
            self.incoming_bytes[device] += replica.incoming_bytes
            if replica.residency is Residency.DISK and not replica.is_at_rest:
                self.starting[device] = True
            if replica.residency is Residency.MEMORY and replica.toward is Residency.DEVICE:
                self.link_s[device] += max(HANDOVER_S, replica.times.wake_s - replica.moved_s)

    def at_rest(self, residency: Residency, devices: Iterable[int] | None = None) -> list[ReplicaSnapshot]:
        """Replicas that stay where they are, so far; of these devices alone, where they are given."""
        among = None if devices is None else set(devices)
        return [
            replica
            for replica in self.snapshot.replicas
            if replica.residency is residency
            and replica.is_at_rest
            and replica.name not in self.placements
            and (among is None or not among.isdisjoint(replica.devices))
        ]

    def free_on(self, devices: Iterable[int]) -> int:
        """Bytes that are free on each of these devices."""
        return min(self.free_bytes[device] for device in devices)

    def free_soon_on(self, devices: Iterable[int]) -> int:
        """Bytes that are free on each of these devices when those that move have moved."""
        return min(self.free_bytes[device] + self.incoming_bytes[device] for device in devices)

    def claim(self, devices: Iterable[int], claimed_bytes: int) -> None:
        """Takes bytes of each of these devices out of what is free."""
        for device in devices:
            self.free_bytes[device] -= claimed_bytes

    def expect(self, devices: Iterable[int], coming_bytes: int) -> None:
        """Adds bytes that will be free soon on each of these devices."""
        for device in devices:
            self.incoming_bytes[device] += coming_bytes

    def keep_from_starts(self, replica: ReplicaSnapshot) -> None:
        """Lets nothing more start on the devices that this one waits for while others start on some of them."""
        devices = [
            device
            for device in range(len(self.starting))
            if max_capacity_bytes(self.snapshot, replica, device) >= replica.min_bytes
        ]
        for device in sorted(devices, key=self.starting.__getitem__)[: replica.device_count]:
            self.starting[device] = True

    def keep_from_wakes(self, devices: Iterable[int]) -> None:
        """Lets nothing more wake on these devices, since one waits for the links to all of them."""
        for device in devices:
            self.link_s[device] = math.inf

    def allows_moves(self, devices: Iterable[int], moves: int) -> bool:
        return all(self._moves_left[device] >= moves for device in devices)

    def allows_all(self, replicas: Iterable[ReplicaSnapshot]) -> bool:
        """Whether each of these replicas may move, all at once."""
        moves = Counter(device for replica in replicas for device in replica.devices)
        return all(self.allows_moves([device], count) for device, count in moves.items())

    def allows_resize(self, devices: Iterable[int], resizes: int = 1) -> bool:
        return all(self._resizes_left[device] >= resizes for device in devices)

    def place(self, placement: Placement) -> None:
        """Begins a move. Memory that it frees is not free before it ended."""
        assert placement.name not in self.placements
        assert self.allows_moves(placement.devices, 1)
        for device in placement.devices:
            self._moves_left[device] -= 1
        self.placements[placement.name] = placement

    def resize(self, replica: ReplicaSnapshot, granted_bytes: int, reason: str) -> None:
        """Begins a change of a replica's KV alone."""
        assert replica.name not in self.placements
        assert self.allows_resize(replica.devices)
        for device in replica.devices:
            self._resizes_left[device] -= 1
        self.placements[replica.name] = Placement(
            replica.name, Residency.DEVICE, replica.devices, granted_bytes, reason=reason
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
    """A replica that may leave its devices. `bytes` of each are free then that no shrinking gives."""

    replica: ReplicaSnapshot
    target: Residency
    cost: float
    bytes: int


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """The moves that make room on a set of devices."""

    cost: float
    shrinks: tuple[tuple[ReplicaSnapshot, int], ...]  # to so many bytes
    evictions: tuple[EvictionCandidate, ...]


def candidate_tuples(capacity: PlacementCapacity, replica: ReplicaSnapshot) -> list[tuple[int, ...]]:
    """The sets of devices that a replica could be on, lower indices first: a process keeps its own. Where there are
    more than TUPLES_MAX sets, those of neighbours."""
    if replica.residency is not Residency.DISK:
        return [replica.devices]
    count = replica.device_count
    devices = [
        device
        for device in range(len(capacity.snapshot.devices))
        if not capacity.starting[device] and max_capacity_bytes(capacity.snapshot, replica, device) >= replica.min_bytes
    ]
    if math.comb(len(devices), count) <= TUPLES_MAX:
        return list(combinations(devices, count))
    return [tuple(devices[first : first + count]) for first in range(len(devices) - count + 1)]


def max_capacity_bytes(snapshot: PlacementSnapshot, replica: ReplicaSnapshot, device: int) -> int:
    """Bytes of the device that the replica could have if all others left that may."""
    return snapshot.devices[device] - sum(
        other.min_bytes
        for other in snapshot.replicas
        if other.preferences.pinned and device in other.devices and other.name != replica.name
        and other.toward is Residency.DEVICE
    )  # fmt: skip


def _min_capacity_bytes(snapshot: PlacementSnapshot, replica: ReplicaSnapshot, device: int) -> int:
    """Bytes of the device that the replica could have while the processes of all others there live."""
    return snapshot.devices[device] - sum(
        other.min_bytes if other.preferences.pinned else other.asleep_bytes
        for other in snapshot.replicas
        if device in other.devices and other.name != replica.name
        and not (other.residency is other.toward is Residency.DISK)
    )  # fmt: skip


def roomiest(room: Sequence[int], count: int) -> int:
    """The bytes that each of the `count` devices with the most room has; less than any need where there are too few."""
    return sorted(room, reverse=True)[count - 1] if count <= len(room) else -1


def begin_arrival(
    capacity: PlacementCapacity, replica: ReplicaSnapshot, devices: tuple[int, ...], residency: Residency, reason: str
) -> None:
    """Begins a start or a wake, with the fewest bytes that the replica can serve with."""
    starts = replica.residency is Residency.DISK
    standby = starts and (residency is Residency.MEMORY or _fits_in_host_memory(capacity, replica))
    if starts:
        capacity.host_free_bytes -= replica.standby_bytes if standby else 0
    for device in devices:
        if starts:
            capacity.starting[device] = True
        else:
            capacity.link_s[device] = math.inf
    capacity.claim(devices, replica.lacking_bytes)
    capacity.place(Placement(replica.name, residency, devices, replica.min_bytes, standby=standby, reason=reason))
    capacity.arrivals.append(replica)


def _fits_in_host_memory(capacity: PlacementCapacity, replica: ReplicaSnapshot) -> bool:
    """Whether it will have to sleep one day, and host memory has room for that."""
    fits = capacity.host_free_bytes >= replica.standby_bytes
    return fits and not replica.preferences.pinned and _is_overcommitted(capacity.snapshot)


def _is_overcommitted(snapshot: PlacementSnapshot) -> bool:
    """Whether some replica has no room on any devices where all are awake."""
    free_bytes = list(snapshot.devices)
    for replica in sorted(snapshot.replicas, key=lambda replica: -replica.min_bytes):
        if roomiest(free_bytes, replica.device_count) < replica.min_bytes:
            return True
        ordered = sorted(range(len(free_bytes)), key=lambda device: -free_bytes[device])
        for device in ordered[: replica.device_count]:
            free_bytes[device] -= replica.min_bytes
    return False


def plan_eviction(
    capacity: PlacementCapacity, replica: ReplicaSnapshot, devices: tuple[int, ...], preempt: bool, silent_s: float
) -> EvictionPlan | None:
    """How these devices get the room that `replica` lacks there at the least cost, all of them at once; None where that
    is not possible now. Running ones leave where `preempt`, idle ones where no request came for `silent_s`."""
    room = {device: capacity.free_soon_on([device]) - replica.lacking_bytes for device in devices}
    awake = [other for other in capacity.at_rest(Residency.DEVICE, devices) if other.name != replica.name]
    freed = dict(room)  # beyond what is needed, once all gave up what they can spare and the chosen left
    for other in awake:
        _add_to(freed, other, other.excess_bytes)
    evictions: list[EvictionCandidate] = []
    for candidate in _eviction_candidates(capacity, replica, devices, preempt, silent_s):
        if any(freed[device] < 0 for device in candidate.replica.devices if device in freed):
            evictions.append(candidate)
            _add_to(freed, candidate.replica, candidate.bytes)
    for candidate in evictions[-2::-1]:
        if all(freed[device] >= candidate.bytes for device in candidate.replica.devices if device in freed):
            evictions.remove(candidate)
            _add_to(freed, candidate.replica, -candidate.bytes)
    if min(freed.values()) < 0:
        return None
    for candidate in evictions:
        excess_bytes = candidate.replica.excess_bytes if candidate.replica.serves else 0
        _add_to(room, candidate.replica, candidate.bytes + excess_bytes)
    evicted = {candidate.replica.name for candidate in evictions}
    shrinks = _plan_shrinks(capacity, [other for other in awake if other.name not in evicted], room)
    plan = EvictionPlan(sum(candidate.cost for candidate in evictions), shrinks, tuple(evictions))
    moving = [other for other, _ in shrinks] + [candidate.replica for candidate in evictions]
    return plan if capacity.allows_all(moving) else None


def _add_to(room: dict[int, int], replica: ReplicaSnapshot, more_bytes: int) -> None:
    """Adds bytes to each of the replica's devices that `room` has."""
    for device in replica.devices:
        if device in room:
            room[device] += more_bytes


def _eviction_candidates(
    capacity: PlacementCapacity, replica: ReplicaSnapshot, devices: tuple[int, ...], preempt: bool, silent_s: float
) -> list[EvictionCandidate]:
    """Replicas that may leave the devices for this one, the cheapest first: idle ones, those that run, and last those
    that sleep, whose process holds some of it. Where there would be no room if all others slept, idle ones end too."""
    now, snapshot = capacity.snapshot.now, capacity.snapshot
    overfull = {device for device in devices if _min_capacity_bytes(snapshot, replica, device) < replica.min_bytes}
    awake = [
        other
        for other in capacity.at_rest(Residency.DEVICE, devices)
        if other.name != replica.name and not other.preferences.pinned
        and (other.placed_at is None or now - other.placed_at >= other.protected_s)
        and (preempt or not other.busy)
        and (other.requested_at is None or now - other.requested_at >= silent_s)
    ]  # fmt: skip

    def cost_per_byte(candidate: EvictionCandidate) -> float:
        shared = len(set(devices).intersection(candidate.replica.devices))
        return candidate.cost / max(candidate.bytes * shared, 1)

    candidates = []
    for other in awake:
        target = _eviction_target(capacity, other, not overfull.isdisjoint(other.devices))
        if target is not None:
            kept_bytes = other.asleep_bytes if target is Residency.MEMORY else 0
            freed_bytes = other.held_bytes - other.excess_bytes - kept_bytes
            candidates.append(EvictionCandidate(other, target, _eviction_cost(capacity, other, target), freed_bytes))
    candidates.sort(key=lambda candidate: (candidate.replica.busy, cost_per_byte(candidate)))
    ends = [
        EvictionCandidate(other, Residency.DISK, _eviction_cost(capacity, other, Residency.DISK), other.held_bytes)
        for other in capacity.at_rest(Residency.MEMORY, overfull)
        if other.name != replica.name and not other.busy
    ]
    return candidates + sorted(ends, key=cost_per_byte)


def _eviction_cost(capacity: PlacementCapacity, replica: ReplicaSnapshot, target: Residency) -> float:
    """Seconds of waiting a second that are to be expected of it."""
    back_s = replica.times.wake_s if target is Residency.MEMORY else replica.times.start_s
    return replica.expected_rate(capacity.snapshot.now) * back_s


def _eviction_target(capacity: PlacementCapacity, replica: ReplicaSnapshot, overfull: bool) -> Residency | None:
    """Where a replica that leaves its devices goes: to MEMORY where there is room or those that sleep there are of less
    value; else, or where a device is `overfull`, to DISK, unless it is busy."""
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

    idle = [
        other
        for other in capacity.at_rest(Residency.MEMORY)
        if not other.busy and other.memory_bytes and (replica.busy or value(other) < value(replica))
    ]
    return sorted(idle, key=value)


def _plan_shrinks(
    capacity: PlacementCapacity, awake: list[ReplicaSnapshot], room: dict[int, int]
) -> tuple[tuple[ReplicaSnapshot, int], ...]:
    """Replicas that give up KV, and what each then may hold: idle ones first, then those with the fewest requests.
    `room` is what each device has beyond what is needed there, below 0 where something is missing."""
    shrinks = []
    for replica in sorted(awake, key=lambda replica: (replica.busy, replica.expected_rate(capacity.snapshot.now))):
        missing_bytes = max(-room[device] for device in replica.devices if device in room)
        given_bytes = min(replica.excess_bytes, missing_bytes)
        if given_bytes > 0:
            shrinks.append((replica, replica.held_bytes - given_bytes))
            _add_to(room, replica, given_bytes)
    return tuple(shrinks)


def apply_eviction(capacity: PlacementCapacity, replica: ReplicaSnapshot, plan: EvictionPlan) -> None:
    """Begins what makes room, as far as host memory is free for those that go to sleep."""
    reason = f"{replica.model} waits for its room"
    for other, granted_bytes in plan.shrinks:
        capacity.place(Placement(other.name, Residency.DEVICE, other.devices, granted_bytes, reason=reason))
        capacity.expect(other.devices, other.held_bytes - granted_bytes)
    for candidate in plan.evictions:
        other, sleeps = candidate.replica, candidate.target is Residency.MEMORY
        short_bytes = max(0, other.standby_bytes - other.memory_bytes) if sleeps else 0
        if short_bytes > capacity.host_free_bytes:
            _end_sleepers(capacity, other, short_bytes - capacity.host_free_bytes - capacity.host_incoming_bytes)
            return
        capacity.host_free_bytes -= short_bytes
        capacity.place(Placement(other.name, candidate.target, other.devices, reason=reason))
        capacity.expect(other.devices, other.held_bytes - (other.asleep_bytes if sleeps else 0))


def _end_sleepers(capacity: PlacementCapacity, replica: ReplicaSnapshot, short_bytes: int) -> None:
    """Ends replicas that sleep, whose host memory is for this one once it is free."""
    reason = f"{replica.model} needs its host memory to sleep"
    for sleeper in _sleepers(capacity, replica):
        if short_bytes > 0 and capacity.allows_moves(sleeper.devices, 1):
            capacity.place(Placement(sleeper.name, Residency.DISK, sleeper.devices, reason=reason))
            capacity.host_incoming_bytes += sleeper.memory_bytes
            short_bytes -= sleeper.memory_bytes
