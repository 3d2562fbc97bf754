"""Which models are where: pure decisions from demand, bytes, times and wishes. It knows no processes and no CUDA, no
clock but the `now` that it is given, and keeps nothing between two decisions but the `Allowance` that it hands back.

    decide(view, allowance) ─► Decision(moves, allowance)     the machine carries the moves out; the next view tells how
"""

import math
from dataclasses import dataclass, replace
from typing import Final

from engine.wire import Residency

MOVES_A_MINUTE: Final = 360  # of one device: 180 wakes, with one that leaves for each
RESIZES_A_MINUTE: Final = 120
HEAD_START_S: Final = 1.0
HEAD_STARTS: Final = 4
_QUANTA: Final = 64  # KV moves between models by so small a part of a device at the least
_SERVING: Final = 2.0  # a busy one stays for so many times what its moves take
_CALM_S: Final = 5.0  # one that was not asked for so long makes room for others' first start
_FULL: Final = 0.75  # of its KV: then one takes what is free


@dataclass(frozen=True, slots=True)
class Wishes:
    """A model's own, as its ModelSpec says."""

    pinned: bool = False
    priority: float = 1.0
    resident_s: float = 1.0
    wake_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Times:
    """What moves of a replica take, in seconds: as measured, or as its bytes let expect."""

    start_s: float  # from DISK to DEVICE
    wake_s: float  # from MEMORY to DEVICE
    sleep_s: float  # from DEVICE to MEMORY


@dataclass(frozen=True, slots=True)
class Resident:
    """One replica and its model's demand. Times are on the clock of View.now; `None`: never.

    A start from DISK shows as `residency` DISK until it serves, with `device` and `granted_bytes` as its Move said.
    """

    name: str  # of the replica, unique
    model: str
    device: int  # index of its device; where it is on DISK, where it was, or −1
    residency: Residency
    toward: Residency  # where it is moving, else equal to `residency`
    wishes: Wishes
    times: Times
    device_bytes: int  # of the device, that it holds now
    granted_bytes: int  # that it may hold, as the last Move toward DEVICE said; 0 once it sleeps or has ended
    asleep_bytes: int  # of the device, held in MEMORY
    least_bytes: int  # of the device, to serve
    most_bytes: int  # of the device, that it could use
    memory_bytes: int  # of host memory, that it holds now
    standby_bytes: int  # of host memory, that it holds in MEMORY
    resizing: bool = False  # a Move from DEVICE to DEVICE is not done yet
    waiting: int = 0  # requests that wait for its model in gateways, and for it in the replica itself
    weight: float = 1.0  # the largest plan's weight among them
    waited_s: float = 0.0  # the first of them
    running: int = 0  # sequences
    kv_used: float = 0.0  # share of its KV that is in use or cached
    kv_short: bool = False  # sequences wait there, or were preempted, for want of KV
    asked_at: float | None = None  # the last request for it
    rate: float = 0.0  # requests per second lately
    arrived_at: float | None = None  # on the device, last
    left_at: float | None = None  # the device, last: since then its requests wait for it to come back
    startable: bool = True  # False: quarantined, or backing off


@dataclass(frozen=True, slots=True)
class View:
    now: float
    residents: tuple[Resident, ...]  # in the order of the catalogue
    devices: tuple[int, ...]  # the budget of each, in bytes
    memory_bytes: int  # the budget of host memory


@dataclass(frozen=True, slots=True)
class Move:
    """`device_bytes` is what it may hold on `device` when it is there; `drain_s` what runs has until it is preempted.

    DISK → DEVICE        starts it.
    DISK → MEMORY        starts it, and puts it to sleep when it serves; meanwhile `device_bytes` of `device` are its.
                         While it starts, a Move to DEVICE may follow: then it stays when it serves.
    MEMORY → DEVICE      wakes it.
    DEVICE → DEVICE      lets its KV grow or shrink.
    DEVICE → MEMORY      puts it to sleep.
    any → DISK           ends its process.
    """

    name: str
    to: Residency
    device: int = -1
    device_bytes: int = 0
    drain_s: float = 0.0
    standby: bool = False  # of a start: it may have to sleep, so its weights are copied to host memory ahead
    why: str = ""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left of each device's moves, at `at`: token buckets. An empty one is full."""

    at: float = 0.0
    moves: tuple[float, ...] = ()
    resizes: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    moves: tuple[Move, ...]  # in the order in which they are to begin
    allowance: Allowance  # for the next decision


def decide(view: View, allowance: Allowance) -> Decision:
    """The moves to begin now. Call it whenever something changed, and some times a second.

    Demand   A model that requests wait for and that has no replica on a device or on its way there gets one; what is
             pinned wants to be there always. First comes whose first request came first, with a head start of
             HEAD_START_S for each doubling of its weight × priority, of at most HEAD_STARTS doublings either way: so
             nobody is passed by one who came more than 2 × HEAD_STARTS × HEAD_START_S = 8 s later, and each model
             passes once. On its device nobody takes the room that it waits for.
    Room     KV of those awake shrinks first, down to what they need at the least. Then idle ones sleep, those first of
             which the least is expected per byte: requests a second × priority × seconds to be back ÷ bytes. Nobody
             leaves who is pinned or came less than its resident_s ago. Who is running leaves, at once, where the other
             has waited for its own wake_s. Memory is planned with once it is free, not before.
    Host     Where its memory is short, the least valuable of those that sleep, or the one that is to leave, goes to
             DISK; not what runs or is waited for.
    KV       What is free grows the KV of those that are short of it, or fill it; one that is short takes from those
             that are not, and from one that is short too half of what that one has more; nothing less than 1/64 of
             the device at once.
    Calm     While nobody waits, what is on DISK is started, one at a time on each device, the most wanted first: to
             stay, where another could start beside it, else to sleep; then those that sleep fill rooms that are free.
    Bounds   In any minute at most MOVES_A_MINUTE moves of a device's replicas to or from it or to make room there, and
             RESIZES_A_MINUTE of KV alone. So of n models that contend for k rooms of a device the next waits for
             wake_s + 8 s + ⌈n ÷ k⌉ × (resident_s + sleep_s + wake_s) at most, as long as the bound on moves allows.
    """
    plan = _Plan(view, allowance)
    wanted = _wanted(plan)
    for who in wanted:
        _bring(plan, who)
    if not wanted:
        _prefetch(plan)
    _grant(plan)
    _share(plan)
    return plan.decision()


def problem(view: View, name: str) -> str:
    """Why this replica can never be on a device, in words for callers; empty where it can."""
    who = next(resident for resident in view.residents if resident.name == name)
    largest = max((_most_room(view, who, device) for device in range(len(view.devices))), default=0)
    if who.least_bytes <= largest:
        return ""
    beside = " beside what is pinned there" if largest < max(view.devices, default=0) else ""
    return f"{who.model} needs {who.least_bytes:,} bytes of a device, and none has more than {largest:,} for it{beside}"


def ready_ms(view: View, name: str) -> int:
    """Expected time until this replica could serve if it were asked for now: 0 on DEVICE, −1 where `problem` says why
    it never can. What backs off or is quarantined is for the machine to say."""
    who = next(resident for resident in view.residents if resident.name == name)
    if _serves(who):
        return 0
    if problem(view, name):
        return -1
    seconds = who.times.start_s if who.residency is Residency.DISK else who.times.wake_s
    if who.toward is not Residency.DEVICE:
        plan = _Plan(view, Allowance())
        leaving_s = who.times.sleep_s if who.toward is not who.residency else 0.0
        every = range(len(view.devices))  # another one starts on each
        seconds += leaving_s + min(_room_s(plan, who, device) for device in _devices(plan, who) or every)
    return max(1, math.ceil(1000 * seconds))


# What a decision has in hand


class _Plan:
    """Memory and moves as they are while a decision is made. Room that somebody waits for is taken out of `free` too,
    which is below 0 then."""

    def __init__(self, view: View, allowance: Allowance) -> None:
        count = len(view.devices)
        self.view = view
        self.free = list(view.devices)
        self.coming = [0] * count  # will be free when those that move are there
        self.host_free = view.memory_bytes
        self.host_coming = 0
        self.starting = [False] * count
        self.moves: dict[str, Move] = {}
        self.arrivals: list[Resident] = []
        passed_s = max(0.0, view.now - allowance.at)
        self._left = _refilled(allowance.moves, MOVES_A_MINUTE, passed_s, count)
        self._resizes = _refilled(allowance.resizes, RESIZES_A_MINUTE, passed_s, count)
        for resident in view.residents:
            self._count(resident)

    def _count(self, resident: Resident) -> None:
        self.host_free -= _host_bytes(resident)
        if resident.toward is Residency.DISK and not _rests(resident):
            self.host_coming += _host_bytes(resident)
        if resident.device < 0:
            return
        self.free[resident.device] -= _held(resident)
        self.coming[resident.device] += _coming(resident)
        if resident.residency is Residency.DISK and not _rests(resident):
            self.starting[resident.device] = True

    def at_rest(self, device: int, residency: Residency) -> list[Resident]:
        """Those of a device that stay where they are, so far."""
        return [
            resident
            for resident in self.view.residents
            if resident.device == device
            and resident.residency is residency
            and _rests(resident)
            and resident.name not in self.moves
        ]

    def affords(self, device: int, moves: int) -> bool:
        return self._left[device] >= moves

    def affords_resize(self, device: int) -> bool:
        return self._resizes[device] >= 1

    def move(self, who: Resident, move: Move) -> None:
        """Begins it. Memory that it frees is not free before it ended."""
        assert who.name not in self.moves
        assert self.affords(move.device, 1)
        self._left[move.device] -= 1
        self.moves[who.name] = move

    def resize(self, who: Resident, granted_bytes: int, why: str) -> None:
        assert who.name not in self.moves
        assert self.affords_resize(who.device)
        self._resizes[who.device] -= 1
        self.moves[who.name] = Move(who.name, Residency.DEVICE, who.device, granted_bytes, why=why)

    def decision(self) -> Decision:
        return Decision(tuple(self.moves.values()), Allowance(self.view.now, tuple(self._left), tuple(self._resizes)))


def _refilled(left: tuple[float, ...], a_minute: int, passed_s: float, count: int) -> list[float]:
    """A bucket holds a quarter of what a minute may have, and gets the rest in that minute."""
    full = a_minute / 4
    return [min(full, (left[i] if i < len(left) else full) + passed_s * (a_minute - full) / 60) for i in range(count)]


def _rests(resident: Resident) -> bool:
    return resident.toward is resident.residency and not resident.resizing


def _serves(resident: Resident) -> bool:
    return resident.toward is Residency.DEVICE and resident.residency is Residency.DEVICE


def _busy(resident: Resident) -> bool:
    return resident.running > 0 or resident.waiting > 0


def _held(resident: Resident) -> int:
    """Bytes of its device that nobody else can have now."""
    if resident.residency is resident.toward is Residency.DISK:
        return 0
    if resident.residency is resident.toward is Residency.MEMORY:
        return max(resident.asleep_bytes, resident.device_bytes)
    return max(resident.device_bytes, resident.granted_bytes)


def _coming(resident: Resident) -> int:
    """Bytes of its device that will be free soon: not what a start leaves, which may take long."""
    if _rests(resident) or resident.residency is Residency.DISK:
        return 0
    kept = {
        Residency.DISK: 0,
        Residency.MEMORY: resident.asleep_bytes,
        Residency.DEVICE: resident.granted_bytes,
    }[resident.toward]
    return max(0, _held(resident) - kept)


def _host_bytes(resident: Resident) -> int:
    if resident.residency is resident.toward is Residency.DISK:
        return 0
    if _serves(resident) or resident.toward is Residency.DISK:
        return resident.memory_bytes
    return max(resident.memory_bytes, resident.standby_bytes)


def _excess(resident: Resident) -> int:
    """Bytes that it would give up of its KV. One that was asked and holds more needs them while it runs."""
    if resident.running and resident.device_bytes > resident.granted_bytes:
        return 0
    return max(0, _held(resident) - resident.least_bytes)


def _expected(resident: Resident, now: float) -> float:
    """Requests a second that count for it: its rate, or less where it has been silent for longer than that lets expect;
    times its priority."""
    if resident.asked_at is None:
        return 0.0
    silent_s = max(now - resident.asked_at, 1e-3)
    return resident.wishes.priority * min(resident.rate, 1 / silent_s)


# Demand


def _wanted(plan: _Plan) -> list[Resident]:
    """Who is to come to a device now, in order: what is pinned, then one replica for each model that is waited for."""
    pinned = [who for who in plan.view.residents if who.wishes.pinned and _could_come(who)]
    models: dict[str, list[Resident]] = {}
    for resident in plan.view.residents:
        models.setdefault(resident.model, []).append(resident)
    chosen = [
        who
        for replicas in models.values()
        if (who := _called(replicas, plan.view.now)) is not None and who not in pinned
    ]
    possible = [who for who in pinned + sorted(chosen, key=_turn) if not problem(plan.view, who.name)]
    return possible


def _called(replicas: list[Resident], now: float) -> Resident | None:
    """The replica of a model that requests wait for, where they do, and none is on a device or on its way; or where
    they have waited for wake_s with those that are. What sleeps comes before what must be started."""
    if any(who.toward is Residency.DEVICE and who.residency is not Residency.DEVICE for who in replicas):
        return None
    awake = any(_serves(who) for who in replicas)
    waiting = [
        who
        for who in (_asking(one, now) for one in replicas)
        if who.waiting and (not awake or who.waited_s >= who.wishes.wake_s)
    ]
    able = [who for who in replicas if _could_come(who)]
    if not waiting or not able:
        return None
    who = max(able, key=lambda one: one.residency)
    first = min(waiting, key=_turn)
    return replace(who, waiting=first.waiting, weight=first.weight, waited_s=first.waited_s)


def _asking(who: Resident, now: float) -> Resident:
    """With the time that its requests waited for the device: none of it from before it left. Else one that was to make
    room would come back at once, for what had waited in its own queue."""
    if who.left_at is None or _serves(who):
        return who
    return replace(who, waited_s=min(who.waited_s, now - who.left_at))


def _could_come(who: Resident) -> bool:
    """Whether a Move to DEVICE is possible: it rests elsewhere, or starts to sleep."""
    if who.residency is Residency.DISK:
        return who.startable and who.toward is not Residency.DEVICE
    return who.residency is Residency.MEMORY and _rests(who)


def _turn(who: Resident) -> float:
    """Less is first. It falls with time for all alike, so that no order changes while two wait."""
    doublings = math.log2(max(who.weight * who.wishes.priority, 1e-9))
    return -who.waited_s - HEAD_START_S * min(max(doublings, -HEAD_STARTS), HEAD_STARTS)


# Room


@dataclass(frozen=True, slots=True)
class _Leave:
    """One that may leave its device. `bytes` are free then that no shrinking gives."""

    who: Resident
    to: Residency
    cost: float
    bytes: int


@dataclass(frozen=True, slots=True)
class _Clearing:
    """What makes room on a device."""

    cost: float
    shrinks: tuple[tuple[Resident, int], ...]  # to so many bytes
    leaves: tuple[_Leave, ...]


def _bring(plan: _Plan, who: Resident) -> None:
    """Lets it begin where there is room; else makes room, or keeps the next that comes free for it."""
    if who.residency is Residency.DISK and who.toward is Residency.MEMORY:
        plan.move(who, Move(who.name, Residency.DEVICE, who.device, who.granted_bytes, why="asked for as it starts"))
        return
    devices = _devices(plan, who)
    if not devices:
        return
    device = max(devices, key=lambda one: plan.free[one])
    if plan.free[device] >= _need(who):
        if plan.affords(device, 1):
            _arrive(plan, who, device, Residency.DEVICE, "asked for")
        return
    device = max(devices, key=lambda one: plan.free[one] + plan.coming[one])
    if plan.free[device] + plan.coming[device] < _need(who):
        patience_s = 0.0 if who.wishes.pinned else who.wishes.wake_s
        found = [(clearing.cost, one, clearing) for one in devices
                 if (clearing := _clearing(plan, who, one, who.waited_s >= patience_s, 0.0))]  # fmt: skip
        if found:
            _, device, clearing = min(found, key=lambda one: one[:2])
            _clear(plan, who, device, clearing)
    plan.free[device] -= _need(who)


def _devices(plan: _Plan, who: Resident) -> list[int]:
    """Where it could be: a process keeps its device."""
    if who.residency is not Residency.DISK:
        return [who.device]
    return [
        device
        for device in range(len(plan.view.devices))
        if not plan.starting[device] and _most_room(plan.view, who, device) >= who.least_bytes
    ]


def _most_room(view: View, who: Resident, device: int) -> int:
    """Bytes of the device that it could have if all left that may."""
    return view.devices[device] - sum(
        other.least_bytes
        for other in view.residents
        if other.wishes.pinned and other.device == device and other.name != who.name
        and other.toward is Residency.DEVICE
    )  # fmt: skip


def _need(who: Resident) -> int:
    """Bytes that it needs beside those that it holds."""
    return who.least_bytes - _held(who)


def _arrive(plan: _Plan, who: Resident, device: int, to: Residency, why: str) -> None:
    """Begins with its least; `_grant` adds to it."""
    starts = who.residency is Residency.DISK
    standby = starts and (to is Residency.MEMORY or _stands_by(plan, who))
    if starts:
        plan.starting[device] = True
        plan.host_free -= who.standby_bytes if standby else 0
    plan.free[device] -= _need(who)
    plan.move(who, Move(who.name, to, device, who.least_bytes, standby=standby, why=why))
    plan.arrivals.append(who)


def _stands_by(plan: _Plan, who: Resident) -> bool:
    """Whether it will have to sleep one day, and host memory has room for that."""
    if who.wishes.pinned or plan.host_free < who.standby_bytes:
        return False
    rooms = list(plan.view.devices)
    for resident in sorted(plan.view.residents, key=lambda one: -one.least_bytes):
        device = max(range(len(rooms)), key=lambda one: rooms[one])
        if rooms[device] < resident.least_bytes:
            return True
        rooms[device] -= resident.least_bytes
    return False


def _clearing(plan: _Plan, who: Resident, device: int, preempt: bool, silent_s: float) -> _Clearing | None:
    """How the device gets the room that `who` lacks there at the least cost; None where that is not possible now.
    Running ones leave where `preempt`, idle ones where they were not asked for `silent_s`."""
    short = _need(who) - plan.free[device] - plan.coming[device]
    awake = [one for one in plan.at_rest(device, Residency.DEVICE) if one.name != who.name]
    leaving: list[_Leave] = []
    freed = sum(_excess(one) for one in awake)
    for leave in _leaves(plan, who, device, preempt, silent_s):
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
    short -= sum(leave.bytes + (_excess(leave.who) if _serves(leave.who) else 0) for leave in leaving)
    shrinks = _shrinks(plan, [one for one in awake if one.name not in gone], short)
    clearing = _Clearing(sum(leave.cost for leave in leaving), shrinks, tuple(leaving))
    return clearing if plan.affords(device, len(shrinks) + len(leaving)) else None


def _leaves(plan: _Plan, who: Resident, device: int, preempt: bool, silent_s: float) -> list[_Leave]:
    """Who may leave the device for `who`, the cheapest first: idle ones, those that run, and last those that sleep,
    whose process holds some of it."""
    now = plan.view.now
    awake = [
        one
        for one in plan.at_rest(device, Residency.DEVICE)
        if one.name != who.name and not one.wishes.pinned
        and (one.arrived_at is None or now - one.arrived_at >= _protected_s(one))
        and (preempt or not _busy(one))
        and (one.asked_at is None or now - one.asked_at >= silent_s)
    ]  # fmt: skip
    asleep = [one for one in plan.at_rest(device, Residency.MEMORY) if one.name != who.name and not _busy(one)]
    leaves = [_Leave(one, to, _leaving_cost(plan, one, to), _held(one) - _excess(one) - left)
              for one in awake if (to := _destination(plan, one)) is not None
              for left in (one.asleep_bytes if to is Residency.MEMORY else 0,)]  # fmt: skip
    leaves.sort(key=lambda leave: (_busy(leave.who), leave.cost / max(leave.bytes, 1)))
    ends = [_Leave(one, Residency.DISK, _leaving_cost(plan, one, Residency.DISK), _held(one)) for one in asleep]
    return leaves + sorted(ends, key=lambda leave: leave.cost / max(leave.bytes, 1))


def _protected_s(who: Resident) -> float:
    """It stays for so long: while it is busy at least for what its moves took, and as long again. So devices serve for
    most of their time, however many contend for them."""
    moves_s = who.times.wake_s + who.times.sleep_s
    return max(who.wishes.resident_s, _SERVING * moves_s if _busy(who) else 0.0)


def _leaving_cost(plan: _Plan, who: Resident, to: Residency) -> float:
    """Seconds of waiting a second that are to be expected of it."""
    back_s = who.times.wake_s if to is Residency.MEMORY else who.times.start_s
    return _expected(who, plan.view.now) * back_s


def _destination(plan: _Plan, who: Resident) -> Residency | None:
    """Where one that leaves its device goes: to MEMORY where there is room or those that sleep there are of less value;
    else to DISK, unless it is busy."""
    lacks = who.standby_bytes - who.memory_bytes - plan.host_free - plan.host_coming
    if lacks <= sum(other.memory_bytes for other in _sleepers(plan, who)):
        return Residency.MEMORY
    return None if _busy(who) else Residency.DISK


def _sleepers(plan: _Plan, who: Resident) -> list[Resident]:
    """Those that give up their host memory for `who`, the least valuable first."""

    def value(one: Resident) -> float:
        return _leaving_cost(plan, one, Residency.DISK) / max(one.standby_bytes, 1)

    asleep = [one for device in range(len(plan.view.devices)) for one in plan.at_rest(device, Residency.MEMORY)]
    idle = [one for one in asleep if not _busy(one) and one.memory_bytes and (_busy(who) or value(one) < value(who))]
    return sorted(idle, key=value)


def _shrinks(plan: _Plan, awake: list[Resident], short: int) -> tuple[tuple[Resident, int], ...]:
    """Who gives up KV, and what each then may hold: the idle first, then those who are asked for least."""
    shrinks = []
    for one in sorted(awake, key=lambda one: (_busy(one), _expected(one, plan.view.now))):
        given = min(_excess(one), short)
        if given > 0:
            shrinks.append((one, _held(one) - given))
            short -= given
    return tuple(shrinks)


def _clear(plan: _Plan, who: Resident, device: int, clearing: _Clearing) -> None:
    """Begins what makes room; where host memory must be free first, that alone."""
    lacks = sum(
        max(0, leave.who.standby_bytes - leave.who.memory_bytes)
        for leave in clearing.leaves
        if leave.to is Residency.MEMORY
    )
    if lacks > plan.host_free:
        _end_sleepers(plan, clearing, lacks - plan.host_free - plan.host_coming)
        return
    plan.host_free -= lacks
    why = f"{who.model} waits for its room"
    for one, granted_bytes in clearing.shrinks:
        plan.move(one, Move(one.name, Residency.DEVICE, device, granted_bytes, why=why))
    for leave in clearing.leaves:
        plan.move(leave.who, Move(leave.who.name, leave.to, device, why=why))
        plan.coming[device] += _held(leave.who) - (leave.who.asleep_bytes if leave.to is Residency.MEMORY else 0)


def _end_sleepers(plan: _Plan, clearing: _Clearing, lacks: int) -> None:
    for one in _sleepers(plan, min((leave.who for leave in clearing.leaves), key=_busy)):
        if lacks > 0 and plan.affords(one.device, 1):
            plan.move(one, Move(one.name, Residency.DISK, one.device, why="host memory is short"))
            lacks -= one.memory_bytes


# Calm


def _prefetch(plan: _Plan) -> None:
    """Starts what is on DISK, then wakes what fits into rooms that are free."""
    now = plan.view.now
    by_value = sorted(
        (who for who in plan.view.residents if _rests(who) and not problem(plan.view, who.name)),
        key=lambda who: (-_expected(who, now), -who.wishes.priority),
    )
    on_disk = [who for who in by_value if who.residency is Residency.DISK and who.startable]
    for index, who in enumerate(on_disk):
        _prepare(plan, who, max((other.least_bytes for other in on_disk[index + 1 :]), default=0))
    if on_disk:
        return
    for who in by_value:
        if who.residency is Residency.MEMORY and plan.free[who.device] >= _need(who) and plan.affords(who.device, 1):
            _arrive(plan, who, who.device, Residency.DEVICE, "its room is free")


def _prepare(plan: _Plan, who: Resident, rest_bytes: int) -> None:
    """Starts one that nobody waits for: to stay, where that leaves room for one of `rest_bytes` to start; else to
    sleep, where host memory has room."""
    devices = _devices(plan, who)
    if not devices:
        return
    room = [
        free + sum(_excess(one) for one in plan.at_rest(device, Residency.DEVICE))
        for device, free in enumerate(plan.free)
    ]
    device = max(devices, key=lambda one: room[one])
    room[device] -= who.least_bytes
    stays = room[device] >= 0 and max(room) >= rest_bytes
    if not stays and plan.host_free < who.standby_bytes:
        return
    if plan.free[device] < _need(who):
        clearing = _clearing(plan, who, device, False, _CALM_S)
        if clearing is not None and not plan.coming[device]:
            _clear(plan, who, device, clearing)
    elif plan.affords(device, 1):
        _arrive(plan, who, device, Residency.DEVICE if stays else Residency.MEMORY, "prepared")


# KV


def _grant(plan: _Plan) -> None:
    """Those that arrive share what is still free, and leave as much to one that may come after them."""
    for device in range(len(plan.view.devices)):
        arrivals = [who for who in plan.arrivals if plan.moves[who.name].device == device]
        others = any(
            not _serves(who) and who.toward is not Residency.DEVICE and who.name not in plan.moves
            for who in plan.view.residents
        )
        for index, who in enumerate(arrivals):
            parts = len(arrivals) - index + others
            more = min(max(0, plan.free[device]) // parts, max(0, who.most_bytes - who.least_bytes))
            plan.moves[who.name] = replace(plan.moves[who.name], device_bytes=who.least_bytes + more)
            plan.free[device] -= more


def _share(plan: _Plan) -> None:
    """Grows the KV of those that are short of it, or fill it, and takes it from those that are not."""
    for device, budget in enumerate(plan.view.devices):
        quantum = max(1, budget // _QUANTA)
        awake = [one for one in plan.at_rest(device, Residency.DEVICE) if one.granted_bytes < one.most_bytes]
        for one in sorted(awake, key=lambda one: (not one.kv_short, one.granted_bytes - one.least_bytes)):
            lacks = one.most_bytes - one.granted_bytes
            if (one.kv_short or one.kv_used >= _FULL) and plan.free[device] >= min(quantum, lacks):
                more = min(lacks, max(quantum, plan.free[device] // 2), plan.free[device])
                if plan.affords_resize(device):
                    plan.free[device] -= more
                    plan.resize(one, one.granted_bytes + more, "its KV grows")
            elif one.kv_short and not plan.coming[device]:
                _take(plan, one, quantum)


def _take(plan: _Plan, one: Resident, quantum: int) -> None:
    """From who has the most more than it, what is above its least; from one that is short too, half of the difference.
    It grows by that when it is free."""
    mine = one.granted_bytes - one.least_bytes
    best, most = None, 0
    for other in plan.at_rest(one.device, Residency.DEVICE):
        gives = _excess(other)
        if other.kv_short:
            gives = min(gives, (other.granted_bytes - other.least_bytes - mine) // 2)
        if other.name != one.name and gives > most:
            best, most = other, gives
    taken = min(most, one.most_bytes - one.granted_bytes)
    if best is not None and taken >= quantum and plan.affords_resize(one.device):
        plan.coming[one.device] += taken
        plan.resize(best, _held(best) - taken, f"{one.model} is short of KV")


# Waiting


def _room_s(plan: _Plan, who: Resident, device: int) -> float:
    """Until `who` would have room on the device, with what waits before it."""
    before = [
        other
        for other in _wanted(plan)
        if other.name != who.name and _turn(other) <= _turn(who) and device in _devices(plan, other)
    ]
    ahead_s = sum(other.times.sleep_s + other.times.wake_s for other in before)
    short = sum(_need(other) for other in [who, *before]) - plan.free[device]
    if short <= 0:
        return ahead_s
    awake = plan.at_rest(device, Residency.DEVICE)
    short -= plan.coming[device] + sum(_excess(one) for one in awake)
    until = [0.0]
    for stays_s, one in sorted(((_stays_s(plan, who, one), one) for one in awake), key=lambda pair: pair[0]):
        if short > 0 and not one.wishes.pinned:
            short -= _held(one) - _excess(one) - one.asleep_bytes
            until.append(stays_s + one.times.sleep_s)
    return ahead_s + max(until)


def _stays_s(plan: _Plan, who: Resident, one: Resident) -> float:
    """How long this one stays on its device for all that `who` waits."""
    since_s = math.inf if one.arrived_at is None else plan.view.now - one.arrived_at
    patience_s = who.wishes.wake_s - who.waited_s if _busy(one) else 0.0
    return max(0.0, _protected_s(one) - since_s, patience_s)
