"""Machines whose replicas only move and take time: the policy of engine/placement/policy.py over traces of requests,
and what the best possible would have done with the same ones. After each event all that the policy promises is checked.
"""

import csv
import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Final

from benchmarks.engine import standby as standby_load
from engine.placement.capacity import HANDOVER_S, MOVES_PER_MINUTE, RESIZES_PER_MINUTE
from engine.placement.policy import decide_placement
from engine.placement.snapshot import (
    MoveAllowance,
    Placement,
    PlacementPreferences,
    PlacementSnapshot,
    ReplicaSnapshot,
    TransitionTimes,
)
from engine.protocol.types import Residency

DISK, MEMORY, DEVICE = Residency.DISK, Residency.MEMORY, Residency.DEVICE
GB: Final = 10**9
_LOOK_S: Final = 0.2
_RATE_S: Final = 30.0  # the rate of requests is an average over about so long, as the host's
_KV_SEQUENCE: Final = GB // 8  # of a device, that a sequence takes


@dataclass(frozen=True, slots=True)
class Request:
    at: float
    model: str
    tokens: int
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Costs:
    """What a device takes, in seconds, beside what its models' times say.

    turn        from an event to the orders that it leads to.
    map         from the order to wake to the first byte copied.
    first       from the last byte to the first token of a call that waited for it.
    prompt      to the first token where the model is awake.
    token       to each other one.
    """

    turn: float = 0.0
    map: float = 0.0
    first: float = 0.02
    prompt: float = 0.02
    token: float = 0.005


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    min_bytes: int = 18 * GB
    max_bytes: int = 26 * GB
    preferences: PlacementPreferences = field(default_factory=PlacementPreferences)
    start_s: float = 4.0
    asleep_bytes: int = GB * 7 // 10
    wake_s: float | None = None
    sleep_s: float = 0.1
    gpus: int = 1

    @property
    def times(self) -> TransitionTimes:
        return TransitionTimes(self.start_s, self.wake_s or self.min_bytes / 55e9, self.sleep_s)


def zipf(
    random_: random.Random, models: Sequence[str], per_second: float, seconds: float, s: float = 1.0
) -> list[Request]:
    """Poisson arrivals, the model of rank i as often as i⁻ˢ."""
    weights = [(rank + 1) ** -s for rank in range(len(models))]
    return [
        Request(at, random_.choices(models, weights)[0], random_.randint(8, 64))
        for at in _poisson(random_, per_second, seconds)
    ]


def bursts(random_: random.Random, models: Sequence[str], seconds: float) -> list[Request]:
    """One model after the other is asked for four times a second, for some seconds; now and then another one."""
    requests, at = [], 0.0
    while at < seconds:
        model, until = random_.choice(models), at + random_.uniform(5, 20)
        while at < until:
            at += random_.expovariate(4)
            requests.append(Request(at, model if random_.random() < 0.97 else random_.choice(models), 16))
    return requests


def diurnal(random_: random.Random, models: Sequence[str], per_second: float, seconds: float) -> list[Request]:
    """Each model has its hour: its rate follows a wave, and the waves one another."""
    requests = []
    for at in _poisson(random_, per_second, seconds):
        waves = [(1.0 + math.cos(2 * math.pi * (at / seconds * 2 - i / len(models)))) ** 4 for i in range(len(models))]
        requests.append(Request(at, random_.choices(models, waves)[0], 24))
    return requests


def round_robin(models: Sequence[str], every_s: float, seconds: float) -> list[Request]:
    """The worst for who must guess: always the model that was asked for the longest time ago."""
    return [Request(i * every_s, models[i % len(models)], 8) for i in range(int(seconds / every_s))]


def hog(random_: random.Random, models: Sequence[str], seconds: float) -> list[Request]:
    """The first model is flooded without end; the others are asked for now and then."""
    flood = [Request(at, models[0], 200) for at in _poisson(random_, 20, seconds)]
    others = [Request(at, random_.choice(models[1:]), 16) for at in _poisson(random_, 0.5, seconds)]
    return sorted(flood + others, key=lambda request: request.at)


def recorded(path: Path) -> list[Request]:
    """A trace that was written down: columns arrival_s, model, tokens."""
    with path.open(newline="") as file:
        return [Request(float(row["arrival_s"]), row["model"], int(row["tokens"])) for row in csv.DictReader(file)]


def _poisson(random_: random.Random, per_second: float, seconds: float) -> Iterator[float]:
    at = random_.expovariate(per_second)
    while at < seconds:
        yield at
        at += random_.expovariate(per_second)


@dataclass(slots=True)
class Job:
    """A request on its way; `held_s` is how long each thing held it before it first started."""

    request: Request
    left_s: float
    first_at: float | None = None
    held_s: Counter[str] = field(default_factory=Counter)
    runs_since: float | None = None
    done_at: float | None = None
    started_at: float | None = None


@dataclass(slots=True)
class Replica:
    model: Model
    residency: Residency = DISK
    toward: Residency = DISK
    devices: tuple[int, ...] = ()
    device_bytes: int = 0
    granted_bytes: int = 0
    memory_bytes: int = 0
    standby: bool = False
    resizing: bool = False
    placed_at: float | None = None
    evicted_at: float | None = None
    asked_at: float | None = None
    rate: float = 0.0
    rate_at: float = 0.0
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    start_at: float = 0.0  # not before
    began_at: float = 0.0  # its move
    flight: int = 0  # counts moves and ends, so that what was overtaken is known

    @property
    def moving(self) -> bool:
        return self.toward is not self.residency or self.resizing

    @property
    def held(self) -> int:
        return max(self.device_bytes, self.granted_bytes)

    @property
    def places(self) -> int:
        return 1 + (self.device_bytes - self.model.min_bytes) // _KV_SEQUENCE


@dataclass(slots=True)
class Machine:
    """`fails` says of each move whether the process dies of it, `copy_s` of each copy of a model's weights how long it
    takes alone."""

    models: Sequence[Model]
    devices: tuple[int, ...]
    memory_bytes: int
    fails: Callable[[], bool] = lambda: False
    bound_s: float = math.inf  # that any request may wait
    costs: Costs = field(default_factory=Costs)
    copy_s: Callable[[str, float], float] = lambda _, expected_s: expected_s
    now: float = 0.0
    decisions: int = 0
    arrivals: int = 0  # on a device, because somebody waited
    shared_s: float = 0.0  # in which copies shared a link
    most_copies: int = 0  # to one device at once
    missed: int = 0  # requests that found their model elsewhere
    moves: list[tuple[float, Replica, Placement]] = field(default_factory=list)
    done: list[Job] = field(default_factory=list)
    replicas: dict[str, Replica] = field(default_factory=dict)
    allowance: MoveAllowance = field(default_factory=MoveAllowance)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _count: int = 0
    _deciding: bool = False
    _copies: dict[str, float] = field(default_factory=dict)  # seconds that each would still take alone, at _copied_at
    _copied_at: float = 0.0
    _minutes: dict[tuple[int, bool], deque[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.replicas = {model.name: Replica(model) for model in self.models}

    def run(self, trace: Iterable[Request], begin_s: float = 60.0) -> None:
        """Plays the trace from `begin_s` on, when all has been prepared, until each request has ended."""
        requests = [Request(begin_s + one.at, one.model, one.tokens, one.weight) for one in trace]
        for request in requests:
            self._at(request.at, lambda request=request: self._ask(request))  # type: ignore[misc]
        self._look()
        while len(self.done) < len(requests):
            at, _, event = heapq.heappop(self._events)
            self._hold(at - self.now)
            self.now = at
            event()
            if not self.costs.turn:
                self._decide()
            elif not self._deciding:
                self._deciding = True
                self._at(self.now + self.costs.turn, self._decide)
            self.check()
            assert self.now < begin_s + requests[-1].at + 3600, "requests are never served"

    def _at(self, at: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, self._count, event))

    def _look(self) -> None:
        self._at(self.now + _LOOK_S, self._look)

    # Requests

    def _ask(self, request: Request) -> None:
        replica = self.replicas[request.model]
        self.missed += replica.residency is not DEVICE or replica.toward is not DEVICE
        replica.asked_at = self.now
        replica.waiting.append(Job(request, self.costs.prompt + request.tokens * self.costs.token))
        self._serve(replica)

    def _serve(self, replica: Replica) -> None:
        if replica.residency is not DEVICE or replica.toward is not DEVICE:
            return
        while replica.waiting and len(replica.running) < replica.places:
            job = replica.waiting.popleft()
            job.runs_since = self.now
            if job.started_at is None:
                job.started_at = self.now
                job.first_at = self.now + (self.costs.first if replica.placed_at == self.now else self.costs.prompt)
                replica.rate = self._rate(replica) + 1 / _RATE_S
                replica.rate_at = self.now
            replica.running.append(job)
            self._at(self.now + job.left_s, lambda job=job, since=self.now: self._finish(replica, job, since))  # type: ignore[misc]

    def _finish(self, replica: Replica, job: Job, since: float) -> None:
        if job in replica.running and job.runs_since == since:
            replica.running.remove(job)
            job.done_at = self.now
            self.done.append(job)
            self._serve(replica)

    def _preempt(self, replica: Replica, again_s: float) -> None:
        """Jobs go back to waiting with what they have, and read it again later."""
        for job in reversed(replica.running):
            assert job.runs_since is not None
            job.left_s = max(0.0, job.left_s - (self.now - job.runs_since)) + again_s
            job.runs_since = None
            replica.waiting.appendleft(job)
        replica.running.clear()

    # Moves

    def view(self) -> PlacementSnapshot:
        return PlacementSnapshot(
            self.now, tuple(map(self._resident, self.replicas.values())), self.devices, self.memory_bytes
        )

    def _resident(self, replica: Replica) -> ReplicaSnapshot:
        model = replica.model
        return ReplicaSnapshot(
            name=model.name, model=model.name, devices=replica.devices,
            residency=replica.residency, toward=replica.toward, preferences=model.preferences, times=model.times,
            device_bytes=replica.device_bytes, granted_bytes=replica.granted_bytes, asleep_bytes=model.asleep_bytes,
            min_bytes=model.min_bytes, max_bytes=model.max_bytes,
            memory_bytes=replica.memory_bytes, standby_bytes=model.min_bytes, resizing=replica.resizing,
            moved_s=self.now - replica.began_at if replica.moving else 0.0,
            waiting=len(replica.waiting),
            weight=max((job.request.weight for job in replica.waiting), default=1.0),
            waited_s=max((self.now - job.request.at for job in replica.waiting), default=0.0),
            running=len(replica.running),
            kv_used=len(replica.running) / max(1, replica.places),
            kv_short=bool(replica.waiting) and len(replica.running) >= replica.places,
            requested_at=self.now if replica.waiting or replica.running else replica.asked_at,
            request_rate=self._rate(replica),
            placed_at=replica.placed_at, evicted_at=replica.evicted_at,
            startable=self.now >= replica.start_at, device_count=model.gpus,
        )  # fmt: skip

    def _rate(self, replica: Replica) -> float:
        return replica.rate * math.exp((replica.rate_at - self.now) / _RATE_S)

    def _decide(self) -> None:
        self._deciding = False
        self.decisions += 1
        decision = decide_placement(self.view(), self.allowance)
        self.allowance = decision.allowance
        for move in decision.placements:
            self._begin(self.replicas[move.name], move)

    def _begin(self, replica: Replica, move: Placement) -> None:
        model, redirected = replica.model, replica.residency is DISK and replica.toward is MEMORY
        assert not replica.moving or (redirected and move.residency is DEVICE), f"{move} of one that moves"
        self.moves.append((self.now, replica, move))
        if redirected:
            replica.toward = DEVICE
            self.arrivals += 1
            return
        self._count_move(replica, move)
        replica.flight += 1
        replica.began_at = self.now
        flight, residency = replica.flight, replica.residency
        if residency is DEVICE and move.residency is not DEVICE:
            self._check_leave(replica, move)
            self._preempt(replica, 0.02)
            replica.placed_at, replica.evicted_at = None, self.now
        if residency is not DEVICE and move.residency is DEVICE:
            self.arrivals += bool(replica.waiting)
        if move.residency is not DISK and residency is not DEVICE:
            assert residency is DISK or move.devices == replica.devices, "a process changed its devices"
            replica.devices, replica.granted_bytes = move.devices, move.device_bytes
            replica.device_bytes = max(replica.device_bytes, move.device_bytes)
            replica.standby = replica.standby or move.standby
            if residency is DISK and replica.standby:
                replica.memory_bytes = model.min_bytes
        elif residency is DEVICE and move.residency is DEVICE:
            replica.resizing, replica.granted_bytes = True, move.device_bytes
            replica.device_bytes = max(replica.device_bytes, move.device_bytes)
        if move.residency is MEMORY and residency is DEVICE:
            replica.memory_bytes = model.min_bytes
        replica.toward = move.residency
        seconds = {DISK: 0.2, MEMORY: model.times.sleep_s, DEVICE: 0.01 if residency is DEVICE else model.times.wake_s}
        takes_s = model.start_s if residency is DISK else seconds[move.residency]
        if self.fails():
            self._at(self.now + takes_s, lambda: self._die(replica, flight))
        elif residency is MEMORY and move.residency is DEVICE:
            self._at(self.now + self.costs.map, lambda: self._begin_copy(replica, flight))
            self._at(self.now + model.times.wake_s - HANDOVER_S + 1e-6, lambda: None)
        else:
            self._at(self.now + takes_s, lambda: self._arrive(replica, flight))

    def _begin_copy(self, replica: Replica, flight: int) -> None:
        """Copies to a device at once share its link."""
        self._advance_copies()
        self._copies[replica.model.name] = self.copy_s(replica.model.name, replica.model.times.wake_s - self.costs.map)
        self.most_copies = max(self.most_copies, self._sharing(replica))
        self._end_copy(replica, flight)

    def _end_copy(self, replica: Replica, flight: int) -> None:
        """Ends the copy where nothing is left of it; else looks again when nothing would be, had it the link alone."""
        self._advance_copies()
        left_s = self._copies[replica.model.name]
        if left_s > 1e-9:
            self._at(self.now + left_s, lambda: self._end_copy(replica, flight))
        else:
            del self._copies[replica.model.name]
            self._arrive(replica, flight)

    def _advance_copies(self) -> None:
        passed_s, self._copied_at = self.now - self._copied_at, self.now
        shares = {name: self._sharing(self.replicas[name]) for name in self._copies}
        self.shared_s += passed_s if max(shares.values(), default=0) > 1 else 0.0
        for name, sharing in shares.items():
            self._copies[name] -= passed_s / sharing

    def _sharing(self, replica: Replica) -> int:
        return max(sum(device in self.replicas[name].devices for name in self._copies) for device in replica.devices)

    def _arrive(self, replica: Replica, flight: int) -> None:
        if replica.flight != flight:
            return
        if replica.residency is DISK and replica.toward is MEMORY:  # it has started, and goes to sleep
            replica.residency = DEVICE
            self._at(self.now + replica.model.times.sleep_s, lambda: self._arrive(replica, flight))
            return
        if replica.residency is not DEVICE and replica.toward is DEVICE:
            replica.placed_at = self.now
        replica.residency, replica.resizing = replica.toward, False
        if replica.residency is DEVICE:
            needed = replica.model.min_bytes + max(0, len(replica.running) - 1) * _KV_SEQUENCE
            replica.device_bytes = max(replica.granted_bytes, needed)
        else:
            replica.granted_bytes = 0
            replica.device_bytes = replica.model.asleep_bytes if replica.residency is MEMORY else 0
        if replica.residency is DISK:
            replica.memory_bytes, replica.standby = 0, False
        self._serve(replica)

    def _die(self, replica: Replica, flight: int) -> None:
        if replica.flight == flight:
            self._preempt(replica, 0.5)
            replica.residency = replica.toward = DISK
            replica.resizing = replica.standby = False
            replica.device_bytes = replica.granted_bytes = replica.memory_bytes = 0
            replica.placed_at, replica.start_at = None, self.now + 1.0

    # What requests wait for

    def _hold(self, seconds: float) -> None:
        """Counts what held each request that has not started, since the last event."""
        for replica in self.replicas.values():
            for job in replica.waiting:
                if job.started_at is None:
                    job.held_s[self._obstacle(replica)] += seconds

    def _obstacle(self, replica: Replica) -> str:
        """What a replica's requests wait for."""
        if replica.residency is DEVICE:
            return "its own sleep" if replica.toward is MEMORY else "its own calls"
        if replica.toward is DEVICE:
            return "its own wake"
        others = [other for other in self.replicas.values() if not set(other.devices).isdisjoint(replica.devices)]
        if any(other.residency is MEMORY and other.toward is DEVICE for other in others):
            return "another's wake"
        if any(other.residency is DEVICE and other.toward is MEMORY for other in others):
            return "another's sleep"
        return "another's calls" if any(other.running for other in others) else "orders"

    # What is promised

    def _check_leave(self, replica: Replica, move: Placement) -> None:
        assert not replica.model.preferences.pinned, "a pinned one left"
        assert replica.placed_at is not None
        assert self.now - replica.placed_at >= replica.model.preferences.resident_s - 1e-9, "it left too early"
        if replica.running:
            assert move.residency is MEMORY, "one that runs was ended"
            assert any(
                other.model.preferences.pinned or self._waited_s(other) >= other.model.preferences.wake_s - 1e-9
                for other in self.replicas.values()
                if other is not replica
            ), "one that runs was interrupted for nobody"

    def _count_move(self, replica: Replica, move: Placement) -> None:
        """Moves of one minute and device stay within the bounds, resizes that make room with the first."""
        resize = replica.residency is DEVICE and move.residency is DEVICE
        for device in move.devices:
            minute = self._minutes.setdefault((device, resize), deque())
            minute.append(self.now)
            while minute[0] <= self.now - 60:
                minute.popleft()
            bound = MOVES_PER_MINUTE + RESIZES_PER_MINUTE if resize else MOVES_PER_MINUTE
            assert len(minute) <= bound, "too many moves"

    def check(self) -> None:
        for device, budget in enumerate(self.devices):
            held = sum(replica.held for replica in self.replicas.values() if device in replica.devices)
            assert held <= budget, f"{held} bytes of {budget} are held on device {device}"
        asleep = sum(replica.memory_bytes for replica in self.replicas.values())
        assert asleep <= self.memory_bytes, f"{asleep} bytes of {self.memory_bytes} are held in host memory"
        for replica in self.replicas.values():
            assert len(replica.devices) in (replica.model.gpus, 0 if not replica.held else -1), "part of a tuple"
            assert sorted(set(replica.devices)) == list(replica.devices), "devices out of order"
            waited_s = self._waited_s(replica)
            assert waited_s <= self.bound_s, f"{replica.model.name} has waited for {waited_s:.1f} s"

    def _waited_s(self, replica: Replica) -> float:
        """How long its requests have waited for it to be on the device."""
        if not replica.waiting or replica.residency is DEVICE:
            return 0.0
        since = min(job.request.at for job in replica.waiting)
        return self.now - max(since, -math.inf if replica.evicted_at is None else replica.evicted_at)

    def waits(self) -> list[float]:
        return sorted(job.started_at - job.request.at for job in self.done if job.started_at is not None)


def least_misses(
    trace: Sequence[Request], sizes: dict[str, int], room: int, there: frozenset[str] = frozenset()
) -> int:
    """The fewest arrivals of all ways to serve the trace in its order with what fits into `room` at once: exact, over
    all sets of models. With the future known, no model comes before it is asked for."""
    costs = {there: 0}
    for request in trace:
        following: dict[frozenset[str], int] = {}
        for models, cost in costs.items():
            for after in [models] if request.model in models else _replaced(models, request.model, sizes, room):
                more = cost + (request.model not in models)
                if following.get(after, more) >= more:
                    following[after] = more
        costs = following
    return min(costs.values())


def _replaced(models: frozenset[str], model: str, sizes: dict[str, int], room: int) -> Iterator[frozenset[str]]:
    """All sets that `model` may be in after others left, none of them without need."""
    others = sorted(models)
    for mask in range(1 << len(others)):
        kept = frozenset(other for i, other in enumerate(others) if mask >> i & 1)
        free = room - sizes[model] - sum(sizes[other] for other in kept)
        if free >= 0 and all(sizes[other] > free for other in models - kept):
            yield kept | {model}


def fitting(models: Sequence[Model], count: int) -> int:
    """Bytes of a device on which so many of them are awake beside the others, who sleep."""
    least = sorted((model.min_bytes - model.asleep_bytes for model in models), reverse=True)
    return sum(model.asleep_bytes for model in models) + list(accumulate(least))[count - 1] + GB


def standby(seed: int, minutes: float, count: int, device_bytes: int) -> tuple[Machine, list[Request]]:
    """A machine with one H200, and the requests that benchmarks.engine.standby sends it for `count` models of
    llama-3.1-8b's geometry. Their weights are 16.06 GB, copied at 54 GB/s; a wake with room takes 0.325 s from call to
    token, of which 0.028 s are no copy, and a sleep that unmaps some KV too about 0.05 s."""
    costs = Costs(turn=0.008, map=0.012, first=0.007, prompt=0.018, token=0.0045)
    models = [
        Model(
            f"m{i}", 18_200_000_000, 48 * GB, PlacementPreferences(),
            asleep_bytes=810_000_000, wake_s=costs.map + 16.06 / 54, sleep_s=0.05,
        )
        for i in range(count)
    ]  # fmt: skip
    machine = Machine(models, (device_bytes,), 1000 * GB, costs=costs)
    trace = standby_load.zipf([model.name for model in models], 60 * minutes, seed)
    return machine, [Request(asked.at, asked.model, asked.tokens) for asked in trace]


def four_devices(dice: random.Random) -> tuple[Machine, list[Request]]:
    """A machine of four devices and requests to models of one, two and four ranks: of all sizes and preferences, with
    moves that fail, and host memory for some of them. Nobody waits for longer than what each may take in turn."""
    ranks = [1, 1, 1, 2, 2, 2, 4]
    models = [
        Model(
            f"m{i}-{gpus}", (least := dice.randint(5, 40) * GB), least + dice.randint(0, 30) * GB,
            PlacementPreferences(
                i == 0 and dice.random() < 0.3, dice.choice([1, 1, 8]), dice.random() * 2, dice.random() * 3
            ),
            gpus=gpus,
        )
        for i, gpus in enumerate(dice.choices(ranks, k=dice.randint(4, 8)))
    ]  # fmt: skip
    devices = tuple(dice.randint(85, 95) * GB for _ in range(4))
    host_bytes = dice.choice([100, 200, 400]) * GB
    machine = Machine(models, devices, host_bytes, fails=lambda: dice.random() < 0.03, bound_s=180.0)
    return machine, zipf(dice, [model.name for model in models], dice.uniform(0.5, 4), 60)


def first_token_waits(jobs: Iterable[Job]) -> list[float]:
    return sorted(job.first_at - job.request.at for job in jobs if job.first_at is not None)


def percentile(in_order: Sequence[float], percent: int) -> float:
    return in_order[min(len(in_order) - 1, len(in_order) * percent // 100)]
