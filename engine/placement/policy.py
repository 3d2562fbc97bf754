"""Which models are where: pure decisions from demand, bytes, times and preferences. It knows no processes and no CUDA,
no clock but the `now` that it is given, and keeps nothing between two decisions but the `MoveAllowance` that it hands
back.

    decide_placement(snapshot, allowance) ─► PlacementDecision(placements, allowance)

The reconciler carries the placements out; the next snapshot shows how that went.
"""

import math
from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import Final

from engine.placement.capacity import (
    HANDOVER_S,
    PlacementCapacity,
    apply_eviction,
    begin_arrival,
    candidate_tuples,
    max_capacity_bytes,
    plan_eviction,
    roomiest,
)
from engine.placement.snapshot import MoveAllowance, Placement, PlacementDecision, PlacementSnapshot, ReplicaSnapshot
from engine.protocol.types import Residency

HEAD_START_S: Final = 1.0
HEAD_STARTS: Final = 4
_QUANTA: Final = 64  # the smallest part of a device that KV moves between models by
_CALM_S: Final = 5.0  # a replica without requests for so long makes room for starts; a device without moves is filled
_FULL: Final = 0.75  # the share of its KV in use from which a replica takes what is free


def decide_placement(snapshot: PlacementSnapshot, allowance: MoveAllowance) -> PlacementDecision:
    """The placements to begin now. Call it whenever something changed, and some times a second.

    Demand   A model that requests wait for and that has no replica on a device or on its way there gets one; what is
             pinned wants to be there always. First comes the model whose first request came first, with a head start
             of HEAD_START_S for each doubling of its weight × priority, of at most HEAD_STARTS doublings either way: so
             none is passed by one that came more than 2 × HEAD_STARTS × HEAD_START_S = 8 s later, and each model
             passes once. On its device no other takes the room that it waits for, and one wakes after the other: it is
             told HANDOVER_S before the last one is expected to be there, so that the link is never idle.
    Room     KV of those awake shrinks first, down to what they need to serve. Then idle ones sleep, first those of
             which least is expected per byte: requests a second × priority × seconds to be back ÷ bytes. No replica
             leaves that is pinned or came less than its resident_s ago. One that runs leaves where the other has
             waited for its own wake_s, is preempted at once, and has stayed for at least twice what its moves take.
             Memory is planned with once it is free, not before.
    Host     Where its memory is short, the least valuable of those that sleep, or the one that is to leave, goes to
             DISK; not what runs or is waited for.
    KV       What is free grows the KV of those that are short of it, or fill it; one that is short takes from those
             that are not, and from one that is short too half of what that one has more; nothing less than 1/64 of
             the device at once.
    Calm     While nothing waits, what is on DISK is started, one at a time on each device, the most wanted first: to
             stay, where another could start beside it, else to sleep; none goes to DISK for it. Where there is no
             such, and a device had no moves for a while, those that sleep fill its free room.
    Ranks    A model of several ranks comes to all of its devices at once or to none: it holds no room on one while it
             waits for another, and those behind it in the order leave alone what it waits for on any. So no two wait
             for each other.
    Bounds   In any minute at most MOVES_PER_MINUTE moves of a device's replicas to or from it or to make room there,
             and RESIZES_PER_MINUTE of KV alone. Where n models that sleep contend for k places on a device, each waits
             at most its wake_s, 8 s where weights differ, and ⌈n ÷ k⌉ times what the moves of one take and the
             shortest time that it stays: its resident_s, or twice those moves, whichever is more.
    """
    capacity = PlacementCapacity(snapshot, allowance)
    arrivals = _arrivals(capacity)
    for replica in arrivals:
        _bring_to_device(capacity, replica)
    if not arrivals:
        _prefetch(capacity)
    _grant(capacity)
    _rebalance_kv(capacity)
    return capacity.decision()


def unplaceable_reason(snapshot: PlacementSnapshot, replica: ReplicaSnapshot) -> str:
    """Why this replica can never be on a device, in words for callers; empty where it can."""
    count, devices = replica.device_count, range(len(snapshot.devices))
    if count > len(devices):
        needs = f"{replica.model} needs {count} GPUs, and there are {len(devices)}"
        return f"{needs}: set gpus or stages to fewer, or show it more"
    largest = roomiest([max_capacity_bytes(snapshot, replica, device) for device in devices], count)
    if replica.min_bytes <= largest:
        return ""
    beside = " beside what is pinned there" if largest < roomiest(snapshot.devices, count) else ""
    if count > 1:
        needs = f"{replica.model} needs {replica.min_bytes:,} bytes of each of {count} devices"
        return f"{needs}, and so many have no more than {largest:,} each for it{beside}"
    needs = f"{replica.model} needs {replica.min_bytes:,} bytes of a device"
    return f"{needs}, and none has more than {largest:,} for it{beside}"


def estimate_ready_ms(snapshot: PlacementSnapshot, replica: ReplicaSnapshot) -> int:
    """Expected time until this replica could serve if it were asked for now: 0 on DEVICE, −1 where `problem` says why
    it never can. Back-off and quarantine are for the agent to add."""
    if replica.serves:
        return 0
    if unplaceable_reason(snapshot, replica):
        return -1
    seconds = replica.times.start_s if replica.residency is Residency.DISK else replica.times.wake_s
    if replica.toward is not Residency.DEVICE:
        capacity = PlacementCapacity(snapshot, MoveAllowance())
        seconds += replica.times.sleep_s if replica.toward is not replica.residency else 0.0
        tuples = candidate_tuples(capacity, replica)
        if not tuples:  # others start on too many
            return math.ceil(1000 * (seconds + replica.times.start_s))
        room_s = {device: _room_s(capacity, replica, device) for device in {*chain(*tuples)}}
        seconds += min(max(room_s[device] for device in devices) for devices in tuples)
    return max(1, math.ceil(1000 * seconds))


# Demand


def _arrivals(capacity: PlacementCapacity) -> list[ReplicaSnapshot]:
    """The replicas that are to come to a device now, in order: what is pinned, then one for each model that is waited
    for."""
    snapshot = capacity.snapshot
    pinned = [replica for replica in snapshot.replicas if replica.preferences.pinned and _can_move_to_device(replica)]
    models: dict[str, list[ReplicaSnapshot]] = {}
    for replica in snapshot.replicas:
        models.setdefault(replica.model, []).append(replica)
    demanded = [_demanded_replica(replicas, snapshot.now) for replicas in models.values()]
    others = [replica for replica in demanded if replica is not None and not replica.preferences.pinned]
    ordered = pinned + sorted(others, key=_arrival_order)
    return [replica for replica in ordered if not unplaceable_reason(snapshot, replica)]


def _demanded_replica(replicas: list[ReplicaSnapshot], now: float) -> ReplicaSnapshot | None:
    """The replica of a model that requests wait for, where they do, and none is on a device or on its way; or where
    they have waited for wake_s with those that are. What sleeps comes before what must be started."""
    if any(replica.toward is Residency.DEVICE and replica.residency is not Residency.DEVICE for replica in replicas):
        return None
    awake = any(replica.serves for replica in replicas)
    waiting = [
        replica
        for replica in (_since_eviction(replica, now) for replica in replicas)
        if replica.waiting and (not awake or replica.waited_s >= replica.preferences.wake_s)
    ]
    movable = [replica for replica in replicas if _can_move_to_device(replica)]
    if not waiting or not movable:
        return None
    chosen = max(movable, key=lambda replica: replica.residency)
    first = min(waiting, key=_arrival_order)
    return replace(chosen, waiting=first.waiting, weight=first.weight, waited_s=first.waited_s)


def _since_eviction(replica: ReplicaSnapshot, now: float) -> ReplicaSnapshot:
    """The replica with the time that its requests waited for the device: none of it from before it left. Else one that
    was to make room would come back at once, for what had waited in its own queue."""
    if replica.evicted_at is None or replica.serves:
        return replica
    return replace(replica, waited_s=min(replica.waited_s, now - replica.evicted_at))


def _can_move_to_device(replica: ReplicaSnapshot) -> bool:
    """Whether a Placement on the DEVICE is possible: it rests elsewhere, or starts to sleep."""
    if replica.residency is Residency.DISK:
        return replica.startable and replica.toward is not Residency.DEVICE
    return replica.residency is Residency.MEMORY and replica.is_at_rest


def _arrival_order(replica: ReplicaSnapshot) -> float:
    """Less is first. It falls with time for all alike, so that no order changes while two wait."""
    doublings = math.log2(max(replica.weight * replica.preferences.priority, 1e-9))
    return -replica.waited_s - HEAD_START_S * min(max(doublings, -HEAD_STARTS), HEAD_STARTS)


def _bring_to_device(capacity: PlacementCapacity, replica: ReplicaSnapshot) -> None:
    """Lets it begin where there is room; else makes room, or keeps the next that comes free for it."""
    name, own = replica.name, replica.devices
    if replica.residency is Residency.DISK and replica.toward is Residency.MEMORY:
        if capacity.allows_moves(own, 1):
            reason = "asked for as it starts"
            capacity.place(Placement(name, Residency.DEVICE, own, replica.granted_bytes, reason=reason))
        return
    if replica.residency is Residency.MEMORY:
        largest = min(max_capacity_bytes(capacity.snapshot, replica, device) for device in own)
        if largest < replica.min_bytes:
            if capacity.allows_moves(own, 1):
                capacity.place(Placement(name, Residency.DISK, own, reason="it fits another device alone"))
            return
    tuples = candidate_tuples(capacity, replica)
    if not tuples:
        capacity.keep_from_starts(replica)
        return
    devices = max(tuples, key=capacity.free_on)
    if capacity.free_on(devices) >= replica.lacking_bytes:
        if _may_begin(capacity, replica, devices):
            begin_arrival(capacity, replica, devices, Residency.DEVICE, "asked for")
            return
        if replica.residency is Residency.MEMORY:
            capacity.keep_from_wakes(devices)
    devices = max(tuples, key=capacity.free_soon_on)
    if capacity.free_soon_on(devices) < replica.lacking_bytes:
        preempt = _may_preempt(capacity, replica)
        plans = [(plan.cost, other, plan) for other in tuples
                 if (plan := plan_eviction(capacity, replica, other, preempt, 0.0))]  # fmt: skip
        if plans:
            _, devices, plan = min(plans, key=lambda candidate: candidate[:2])
            apply_eviction(capacity, replica, plan)
    capacity.claim(devices, replica.lacking_bytes)


def _may_begin(capacity: PlacementCapacity, replica: ReplicaSnapshot, devices: tuple[int, ...]) -> bool:
    """Whether a start or wake may begin. Copies to a device share its link: two at once would both end when the second
    of two in turn does. The next wake is ordered while the last one's last layers are copied."""
    wakes = replica.residency is Residency.MEMORY
    busy = any(capacity.link_s[device] > HANDOVER_S for device in devices)
    return capacity.allows_moves(devices, 1) and not (wakes and busy)


def _may_preempt(capacity: PlacementCapacity, replica: ReplicaSnapshot) -> bool:
    """Whether running replicas may leave for it: at once where it is pinned, else when it has waited for long enough;
    not for a second replica of a model."""
    if any(other.serves and other.model == replica.model for other in capacity.snapshot.replicas):
        return False
    return replica.preferences.pinned or replica.waited_s >= replica.preferences.wake_s


# Calm


def _prefetch(capacity: PlacementCapacity) -> None:
    """Starts what is on DISK; then, on devices that are calm, wakes what fits into their free room."""
    snapshot = capacity.snapshot
    by_value = sorted(
        (replica for replica in snapshot.replicas if replica.is_at_rest and not unplaceable_reason(snapshot, replica)),
        key=lambda replica: (-replica.expected_rate(snapshot.now), -replica.preferences.priority),
    )
    on_disk = [replica for replica in by_value if replica.residency is Residency.DISK and replica.startable]
    for index, replica in enumerate(on_disk):
        _prepare(capacity, replica, on_disk[index + 1 :])
    if on_disk:
        return
    for replica in by_value:
        fits = replica.residency is Residency.MEMORY and capacity.free_on(replica.devices) >= replica.lacking_bytes
        if fits and _is_settled(capacity, replica.devices) and _may_begin(capacity, replica, replica.devices):
            begin_arrival(capacity, replica, replica.devices, Residency.DEVICE, "its room is free")


def _is_settled(capacity: PlacementCapacity, devices: tuple[int, ...]) -> bool:
    """Whether no replica came or left lately."""
    here = [replica for replica in capacity.snapshot.replicas if not set(devices).isdisjoint(replica.devices)]
    since = [at for replica in here for at in (replica.placed_at, replica.evicted_at) if at is not None]
    return all(capacity.snapshot.now - at >= _CALM_S for at in since)


def _prepare(capacity: PlacementCapacity, replica: ReplicaSnapshot, later: list[ReplicaSnapshot]) -> None:
    """Starts a replica that nothing waits for: to sleep, where host memory has room for that and one of those that come
    `later` would have none to start in; else to stay."""
    tuples = candidate_tuples(capacity, replica)
    if not tuples:
        return
    room = [
        free_bytes + sum(other.excess_bytes for other in capacity.at_rest(Residency.DEVICE, [device]))
        for device, free_bytes in enumerate(capacity.free_bytes)
    ]
    devices = max(tuples, key=lambda devices: min(room[device] for device in devices))
    for device in devices:
        room[device] -= replica.min_bytes
    may_sleep = capacity.host_free_bytes >= replica.standby_bytes
    others_fit = all(roomiest(room, other.device_count) >= other.min_bytes for other in later)
    stays = min(room[device] for device in devices) >= 0 and (others_fit or not may_sleep)
    if not stays and not may_sleep:
        return
    if capacity.free_on(devices) < replica.lacking_bytes:
        plan = plan_eviction(capacity, replica, devices, False, _CALM_S)
        # A replica that ended for this one would be prepared next, and then this one end for that.
        if plan is None or any(eviction.target is Residency.DISK for eviction in plan.evictions):
            return
        if not any(capacity.incoming_bytes[device] for device in devices):
            apply_eviction(capacity, replica, plan)
    elif capacity.allows_moves(devices, 1):
        begin_arrival(capacity, replica, devices, Residency.DEVICE if stays else Residency.MEMORY, "prepared")


# KV


def _grant(capacity: PlacementCapacity) -> None:
    """Shares what is still free among those that arrive, but for the room of one that may come after them."""
    placements = capacity.placements
    arriving = Counter(device for replica in capacity.arrivals for device in placements[replica.name].devices)
    spare_bytes = {device: _unreserved_bytes(capacity, device) for device in arriving}
    for replica in capacity.arrivals:
        devices = placements[replica.name].devices
        share = min(max(0, spare_bytes[device]) // arriving[device] for device in devices)
        more = min(share, max(0, replica.max_bytes - replica.min_bytes))
        placements[replica.name] = replace(placements[replica.name], device_bytes=replica.min_bytes + more)
        capacity.claim(devices, more)
        for device in devices:
            spare_bytes[device] -= more
            arriving[device] -= 1


def _unreserved_bytes(capacity: PlacementCapacity, device: int) -> int:
    """What is free on a device, but for the room of the largest that may come there next."""
    free_bytes = capacity.free_bytes[device]
    lacking = [
        other.lacking_bytes
        for other in capacity.snapshot.replicas
        if other.toward is not Residency.DEVICE and other.name not in capacity.placements
        and (not other.devices or device in other.devices)
    ]  # fmt: skip
    return free_bytes - max([0, *(lacking_bytes for lacking_bytes in lacking if lacking_bytes <= free_bytes)])


def _rebalance_kv(capacity: PlacementCapacity) -> None:
    """Grows the KV of those that are short of it, or fill it, and takes it from those that are not."""
    awake = [other for other in capacity.at_rest(Residency.DEVICE) if other.granted_bytes < other.max_bytes]
    for replica in sorted(awake, key=lambda other: (not other.kv_short, other.granted_bytes - other.min_bytes)):
        if replica.name in capacity.placements:  # it gives up some for one that was looked at before
            continue
        quantum = max(1, min(capacity.snapshot.devices[device] for device in replica.devices) // _QUANTA)
        growth_bytes, free_bytes = replica.max_bytes - replica.granted_bytes, capacity.free_on(replica.devices)
        if (replica.kv_short or replica.kv_used >= _FULL) and free_bytes >= min(quantum, growth_bytes):
            more = min(growth_bytes, max(quantum, free_bytes // 2), free_bytes)
            if capacity.allows_resize(replica.devices):
                capacity.claim(replica.devices, more)
                capacity.resize(replica, replica.granted_bytes + more, "its KV grows")
        elif replica.kv_short:
            _take_kv(capacity, replica, quantum)


def _take_kv(capacity: PlacementCapacity, replica: ReplicaSnapshot, quantum: int) -> None:
    """Takes KV for a replica, on each of its devices that lacks some, from the one there that has the most more than
    it: what is above its need, or half of the difference where that one is short too. The replica grows by that when it
    is free."""
    donors: dict[str, tuple[ReplicaSnapshot, int]] = {}
    for device in replica.devices:
        if capacity.free_bytes[device] >= quantum:
            continue
        donor, spare_bytes = _kv_donor(capacity, replica, device)
        if donor is None or capacity.incoming_bytes[device]:
            return
        donors[donor.name] = (donor, spare_bytes)
    if not donors:
        return
    taken = min(replica.max_bytes - replica.granted_bytes, *(spare_bytes for _, spare_bytes in donors.values()))
    others = [donor for donor, _ in donors.values()]
    resizes = Counter(device for donor in others for device in donor.devices)
    if taken >= quantum and all(capacity.allows_resize([device], count) for device, count in resizes.items()):
        for donor in others:
            capacity.expect(donor.devices, taken)
            capacity.resize(donor, donor.held_bytes - taken, f"{replica.model} is short of KV")


def _kv_donor(capacity: PlacementCapacity, replica: ReplicaSnapshot, device: int) -> tuple[ReplicaSnapshot | None, int]:
    """The replica of the device that could give another one the most KV, and how much."""
    own_kv_bytes = replica.granted_bytes - replica.min_bytes
    donor, max_spare_bytes = None, 0
    for other in capacity.at_rest(Residency.DEVICE, [device]):
        spare_bytes = other.excess_bytes
        if other.kv_short:
            spare_bytes = min(spare_bytes, (other.granted_bytes - other.min_bytes - own_kv_bytes) // 2)
        if other.name != replica.name and spare_bytes > max_spare_bytes:
            donor, max_spare_bytes = other, spare_bytes
    return donor, max_spare_bytes


# Waiting


def _room_s(capacity: PlacementCapacity, replica: ReplicaSnapshot, device: int) -> float:
    """The time until `replica` would have room on the device, with what waits before it."""
    before = [
        other
        for other in _arrivals(capacity)
        if other.name != replica.name
        and _arrival_order(other) <= _arrival_order(replica)
        and any(device in devices for devices in candidate_tuples(capacity, other))
    ]
    ahead_s = capacity.link_s[device] + sum(other.times.sleep_s + other.times.wake_s for other in before)
    short_bytes = sum(other.lacking_bytes for other in [replica, *before]) - capacity.free_bytes[device]
    if short_bytes <= 0:
        return ahead_s
    awake = capacity.at_rest(Residency.DEVICE, [device])
    short_bytes -= capacity.incoming_bytes[device] + sum(other.excess_bytes for other in awake)
    until = [0.0]
    stays = ((_stays_s(capacity, replica, other), other) for other in awake)
    for stays_s, other in sorted(stays, key=lambda pair: pair[0]):
        if short_bytes > 0 and not other.preferences.pinned:
            short_bytes -= other.held_bytes - other.excess_bytes - other.asleep_bytes
            until.append(stays_s + other.times.sleep_s)
    return ahead_s + max(until)


def _stays_s(capacity: PlacementCapacity, replica: ReplicaSnapshot, other: ReplicaSnapshot) -> float:
    """How long `other` stays on its device for all that `replica` waits."""
    since_s = math.inf if other.placed_at is None else capacity.snapshot.now - other.placed_at
    patience_s = replica.preferences.wake_s - replica.waited_s if other.busy else 0.0
    return max(0.0, other.protected_s - since_s, patience_s)
