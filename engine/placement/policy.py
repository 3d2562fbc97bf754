"""Which models are where: pure decisions from demand, bytes, times and wishes. It knows no processes and no CUDA, no
clock but the `now` that it is given, and keeps nothing between two decisions but the `MoveAllowance` that it hands
back.

    decide(view, allowance) ─► Decision(moves, allowance)     the machine carries the moves out; the next view tells how
"""

import math
from dataclasses import replace
from typing import Final

from engine.placement.capacity import (
    PlacementCapacity,
    apply_eviction,
    begin_arrival,
    candidate_devices,
    max_capacity_bytes,
    plan_eviction,
)
from engine.placement.snapshot import Move, MoveAllowance, PlacementDecision, PlacementSnapshot, ReplicaSnapshot
from engine.protocol.types import Residency

HEAD_START_S: Final = 1.0
HEAD_STARTS: Final = 4
_QUANTA: Final = 64  # KV moves between models by so small a part of a device at the least
_CALM_S: Final = 5.0  # who was not asked for so long makes room for starts; a device without moves fills its rooms
_FULL: Final = 0.75  # of its KV: then one takes what is free


def decide_placement(view: PlacementSnapshot, allowance: MoveAllowance) -> PlacementDecision:
    """The moves to begin now. Call it whenever something changed, and some times a second.

    Demand   A model that requests wait for and that has no replica on a device or on its way there gets one; what is
             pinned wants to be there always. First comes whose first request came first, with a head start of
             HEAD_START_S for each doubling of its weight × priority, of at most HEAD_STARTS doublings either way: so
             nobody is passed by one who came more than 2 × HEAD_STARTS × HEAD_START_S = 8 s later, and each model
             passes once. On its device nobody takes the room that it waits for, and one wakes after the other.
    Room     KV of those awake shrinks first, down to what they need at the least. Then idle ones sleep, those first of
             which the least is expected per byte: requests a second × priority × seconds to be back ÷ bytes. Nobody
             leaves who is pinned or came less than its resident_s ago. Who is running leaves where the other has
             waited for its own wake_s, is preempted at once, and has stayed for twice what its moves take at the
             least. Memory is planned with once it is free, not before.
    Host     Where its memory is short, the least valuable of those that sleep, or the one that is to leave, goes to
             DISK; not what runs or is waited for.
    KV       What is free grows the KV of those that are short of it, or fill it; one that is short takes from those
             that are not, and from one that is short too half of what that one has more; nothing less than 1/64 of
             the device at once.
    Calm     While nobody waits, what is on DISK is started, one at a time on each device, the most wanted first: to
             stay, where another could start beside it, else to sleep; nobody goes to DISK for it. Where there is no
             such, and a device had no moves for a while, those that sleep fill its free rooms.
    Bounds   In any minute at most MOVES_A_MINUTE moves of a device's replicas to or from it or to make room there, and
             RESIZES_A_MINUTE of KV alone. Of n models that sleep and contend for k rooms of a device, each waits at
             most its wake_s, 8 s where weights differ, and ⌈n ÷ k⌉ times what the moves of one take and what it stays
             at least: its resident_s, or twice those moves, whichever is more.
    """
    rooms = PlacementCapacity(view, allowance)
    wanted = _arrivals(rooms)
    for who in wanted:
        _bring_to_device(rooms, who)
    if not wanted:
        _prefetch(rooms)
    _grant(rooms)
    _rebalance_kv(rooms)
    return rooms.decision()


def unplaceable_reason(view: PlacementSnapshot, name: str) -> str:
    """Why this replica can never be on a device, in words for callers; empty where it can."""
    who = next(resident for resident in view.residents if resident.name == name)
    largest = max((max_capacity_bytes(view, who, device) for device in range(len(view.devices))), default=0)
    if who.least_bytes <= largest:
        return ""
    beside = " beside what is pinned there" if largest < max(view.devices, default=0) else ""
    return f"{who.model} needs {who.least_bytes:,} bytes of a device, and none has more than {largest:,} for it{beside}"


def estimate_ready_ms(view: PlacementSnapshot, name: str) -> int:
    """Expected time until this replica could serve if it were asked for now: 0 on DEVICE, −1 where `problem` says why
    it never can. What backs off or is quarantined is for the machine to say."""
    who = next(resident for resident in view.residents if resident.name == name)
    if who.serves:
        return 0
    if unplaceable_reason(view, name):
        return -1
    seconds = who.times.start_s if who.residency is Residency.DISK else who.times.wake_s
    if who.toward is not Residency.DEVICE:
        rooms = PlacementCapacity(view, MoveAllowance())
        seconds += who.times.sleep_s if who.toward is not who.residency else 0.0
        devices = candidate_devices(rooms, who)
        if not devices:  # another one starts on each
            return math.ceil(1000 * (seconds + who.times.start_s))
        seconds += min(_room_s(rooms, who, device) for device in devices)
    return max(1, math.ceil(1000 * seconds))


# Demand


def _arrivals(rooms: PlacementCapacity) -> list[ReplicaSnapshot]:
    """Who is to come to a device now, in order: what is pinned, then one replica for each model that is waited for."""
    pinned = [who for who in rooms.view.residents if who.wishes.pinned and _can_move_to_device(who)]
    models: dict[str, list[ReplicaSnapshot]] = {}
    for resident in rooms.view.residents:
        models.setdefault(resident.model, []).append(resident)
    chosen = [
        who
        for replicas in models.values()
        if (who := _demanded_replica(replicas, rooms.view.now)) is not None and not who.wishes.pinned
    ]
    return [who for who in pinned + sorted(chosen, key=_arrival_order) if not unplaceable_reason(rooms.view, who.name)]


def _demanded_replica(replicas: list[ReplicaSnapshot], now: float) -> ReplicaSnapshot | None:
    """The replica of a model that requests wait for, where they do, and none is on a device or on its way; or where
    they have waited for wake_s with those that are. What sleeps comes before what must be started."""
    if any(who.toward is Residency.DEVICE and who.residency is not Residency.DEVICE for who in replicas):
        return None
    awake = any(who.serves for who in replicas)
    waiting = [
        who
        for who in (_has_demand(one, now) for one in replicas)
        if who.waiting and (not awake or who.waited_s >= who.wishes.wake_s)
    ]
    able = [who for who in replicas if _can_move_to_device(who)]
    if not waiting or not able:
        return None
    who = max(able, key=lambda one: one.residency)
    first = min(waiting, key=_arrival_order)
    return replace(who, waiting=first.waiting, weight=first.weight, waited_s=first.waited_s)


def _has_demand(who: ReplicaSnapshot, now: float) -> ReplicaSnapshot:
    """With the time that its requests waited for the device: none of it from before it left. Else one that was to make
    room would come back at once, for what had waited in its own queue."""
    if who.left_at is None or who.serves:
        return who
    return replace(who, waited_s=min(who.waited_s, now - who.left_at))


def _can_move_to_device(who: ReplicaSnapshot) -> bool:
    """Whether a Move to DEVICE is possible: it rests elsewhere, or starts to sleep."""
    if who.residency is Residency.DISK:
        return who.startable and who.toward is not Residency.DEVICE
    return who.residency is Residency.MEMORY and who.rests


def _arrival_order(who: ReplicaSnapshot) -> float:
    """Less is first. It falls with time for all alike, so that no order changes while two wait."""
    doublings = math.log2(max(who.weight * who.wishes.priority, 1e-9))
    return -who.waited_s - HEAD_START_S * min(max(doublings, -HEAD_STARTS), HEAD_STARTS)


def _bring_to_device(rooms: PlacementCapacity, who: ReplicaSnapshot) -> None:
    """Lets it begin where there is room; else makes room, or keeps the next that comes free for it."""
    if who.residency is Residency.DISK and who.toward is Residency.MEMORY:
        if rooms.affords(who.device, 1):
            rooms.move(
                who, Move(who.name, Residency.DEVICE, who.device, who.granted_bytes, why="asked for as it starts")
            )
        return
    if who.residency is Residency.MEMORY and max_capacity_bytes(rooms.view, who, who.device) < who.least_bytes:
        if rooms.affords(who.device, 1):
            rooms.move(who, Move(who.name, Residency.DISK, who.device, why="it fits another device alone"))
        return
    devices = candidate_devices(rooms, who)
    if not devices:
        return
    device = max(devices, key=lambda one: rooms.free[one])
    if rooms.free[device] >= who.need_bytes and _may_begin(rooms, who, device):
        begin_arrival(rooms, who, device, Residency.DEVICE, "asked for")
        return
    device = max(devices, key=lambda one: rooms.free[one] + rooms.coming[one])
    if rooms.free[device] + rooms.coming[device] < who.need_bytes:
        preempt = _may_preempt(rooms, who)
        found = [(clearing.cost, one, clearing) for one in devices
                 if (clearing := plan_eviction(rooms, who, one, preempt, 0.0))]  # fmt: skip
        if found:
            _, device, clearing = min(found, key=lambda one: one[:2])
            apply_eviction(rooms, who, device, clearing)
    rooms.free[device] -= who.need_bytes


def _may_begin(rooms: PlacementCapacity, who: ReplicaSnapshot, device: int) -> bool:
    """Copies to a device share its link: two at once would both end when the second of two in turn does."""
    wakes = who.residency is Residency.MEMORY
    return rooms.affords(device, 1) and not (wakes and rooms.waking[device])


def _may_preempt(rooms: PlacementCapacity, who: ReplicaSnapshot) -> bool:
    """What is pinned may at once, others when they have waited for long enough; no second replica of a model may."""
    if any(other.serves and other.model == who.model for other in rooms.view.residents):
        return False
    return who.wishes.pinned or who.waited_s >= who.wishes.wake_s


# Calm


def _prefetch(rooms: PlacementCapacity) -> None:
    """Starts what is on DISK; then, on devices that are calm, wakes what fits into rooms that are free."""
    now = rooms.view.now
    by_value = sorted(
        (who for who in rooms.view.residents if who.rests and not unplaceable_reason(rooms.view, who.name)),
        key=lambda who: (-who.expected(now), -who.wishes.priority),
    )
    on_disk = [who for who in by_value if who.residency is Residency.DISK and who.startable]
    for index, who in enumerate(on_disk):
        _prepare(rooms, who, max((other.least_bytes for other in on_disk[index + 1 :]), default=0))
    if on_disk:
        return
    for who in by_value:
        fits = who.residency is Residency.MEMORY and rooms.free[who.device] >= who.need_bytes
        if fits and _is_settled(rooms, who.device) and _may_begin(rooms, who, who.device):
            begin_arrival(rooms, who, who.device, Residency.DEVICE, "its room is free")


def _is_settled(rooms: PlacementCapacity, device: int) -> bool:
    """Whether nobody came or left lately."""
    there = [one for one in rooms.view.residents if one.device == device]
    since = [at for one in there for at in (one.arrived_at, one.left_at) if at is not None]
    return all(rooms.view.now - at >= _CALM_S for at in since)


def _prepare(rooms: PlacementCapacity, who: ReplicaSnapshot, rest_bytes: int) -> None:
    """Starts one that nobody waits for: to sleep, where host memory has room for that and the next, of `rest_bytes`,
    would have none to start in; else to stay."""
    devices = candidate_devices(rooms, who)
    if not devices:
        return
    room = [
        free + sum(one.excess_bytes for one in rooms.at_rest(device, Residency.DEVICE))
        for device, free in enumerate(rooms.free)
    ]
    device = max(devices, key=lambda one: room[one])
    room[device] -= who.least_bytes
    may_sleep = rooms.host_free >= who.standby_bytes
    stays = room[device] >= 0 and (max(room) >= rest_bytes or not may_sleep)
    if not stays and not may_sleep:
        return
    if rooms.free[device] < who.need_bytes:
        clearing = plan_eviction(rooms, who, device, False, _CALM_S)
        # Whoever ended for it would be prepared next, and then this one end for that.
        if clearing is None or any(leave.to is Residency.DISK for leave in clearing.leaves):
            return
        if not rooms.coming[device]:
            apply_eviction(rooms, who, device, clearing)
    elif rooms.affords(device, 1):
        begin_arrival(rooms, who, device, Residency.DEVICE if stays else Residency.MEMORY, "prepared")


# KV


def _grant(rooms: PlacementCapacity) -> None:
    """Those that arrive share what is still free, but for the room of one that may come after them."""
    for device, free in enumerate(rooms.free):
        arrivals = [who for who in rooms.arrivals if rooms.moves[who.name].device == device]
        others = [
            one.need_bytes
            for one in rooms.view.residents
            if one.toward is not Residency.DEVICE and one.name not in rooms.moves and one.device in (device, -1)
        ]
        free -= max((need for need in others if need <= free), default=0)
        for index, who in enumerate(arrivals):
            more = min(max(0, free) // (len(arrivals) - index), max(0, who.most_bytes - who.least_bytes))
            rooms.moves[who.name] = replace(rooms.moves[who.name], device_bytes=who.least_bytes + more)
            rooms.free[device] -= more
            free -= more


def _rebalance_kv(rooms: PlacementCapacity) -> None:
    """Grows the KV of those that are short of it, or fill it, and takes it from those that are not."""
    for device, budget in enumerate(rooms.view.devices):
        quantum = max(1, budget // _QUANTA)
        awake = [one for one in rooms.at_rest(device, Residency.DEVICE) if one.granted_bytes < one.most_bytes]
        for one in sorted(awake, key=lambda one: (not one.kv_short, one.granted_bytes - one.least_bytes)):
            lacks = one.most_bytes - one.granted_bytes
            if (one.kv_short or one.kv_used >= _FULL) and rooms.free[device] >= min(quantum, lacks):
                more = min(lacks, max(quantum, rooms.free[device] // 2), rooms.free[device])
                if rooms.affords_resize(device):
                    rooms.free[device] -= more
                    rooms.resize(one, one.granted_bytes + more, "its KV grows")
            elif one.kv_short and not rooms.coming[device]:
                _take_kv(rooms, one, quantum)


def _take_kv(rooms: PlacementCapacity, one: ReplicaSnapshot, quantum: int) -> None:
    """From who has the most more than it, what is above its least; from one that is short too, half of the difference.
    It grows by that when it is free."""
    mine = one.granted_bytes - one.least_bytes
    best, most = None, 0
    for other in rooms.at_rest(one.device, Residency.DEVICE):
        gives = other.excess_bytes
        if other.kv_short:
            gives = min(gives, (other.granted_bytes - other.least_bytes - mine) // 2)
        if other.name != one.name and gives > most:
            best, most = other, gives
    taken = min(most, one.most_bytes - one.granted_bytes)
    if best is not None and taken >= quantum and rooms.affords_resize(one.device):
        rooms.coming[one.device] += taken
        rooms.resize(best, best.held_bytes - taken, f"{one.model} is short of KV")


# Waiting


def _room_s(rooms: PlacementCapacity, who: ReplicaSnapshot, device: int) -> float:
    """Until `who` would have room on the device, with what waits before it."""
    before = [
        other
        for other in _arrivals(rooms)
        if other.name != who.name
        and _arrival_order(other) <= _arrival_order(who)
        and device in candidate_devices(rooms, other)
    ]
    ahead_s = sum(other.times.sleep_s + other.times.wake_s for other in before)
    ahead_s += max((other.times.wake_s for other in rooms.view.residents if _wakes(other, device)), default=0.0)
    short = sum(other.need_bytes for other in [who, *before]) - rooms.free[device]
    if short <= 0:
        return ahead_s
    awake = rooms.at_rest(device, Residency.DEVICE)
    short -= rooms.coming[device] + sum(one.excess_bytes for one in awake)
    until = [0.0]
    for stays_s, one in sorted(((_stays_s(rooms, who, one), one) for one in awake), key=lambda pair: pair[0]):
        if short > 0 and not one.wishes.pinned:
            short -= one.held_bytes - one.excess_bytes - one.asleep_bytes
            until.append(stays_s + one.times.sleep_s)
    return ahead_s + max(until)


def _wakes(other: ReplicaSnapshot, device: int) -> bool:
    moving = other.residency is Residency.MEMORY and other.toward is Residency.DEVICE
    return moving and other.device == device


def _stays_s(rooms: PlacementCapacity, who: ReplicaSnapshot, one: ReplicaSnapshot) -> float:
    """How long this one stays on its device for all that `who` waits."""
    since_s = math.inf if one.arrived_at is None else rooms.view.now - one.arrived_at
    patience_s = who.wishes.wake_s - who.waited_s if one.busy else 0.0
    return max(0.0, one.protected_s - since_s, patience_s)
