"""A replica as its machine keeps it: its process, the link to it, where its weights are and where they go, what it asks
for and what its moves take. It decides nothing: it shows the policy what is known, and carries out one order at a time.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from engine.host.demand import PendingDemand
from engine.host.peers import ReplicaPeer
from engine.host.supervisor import ReplicaSupervisor, SupervisionTimeouts
from engine.placement.snapshot import PlacementPreferences, ReplicaSnapshot, TransitionTimes
from engine.protocol.frames import PlacementStatus, ReplicaLoad, ReplicaState, SetPlacement
from engine.protocol.specs import ModelSpec
from engine.protocol.types import Residency

_RATE_S: Final = 30.0  # requests per second are those of about so long
_KV_SHORTAGE_S: Final = 1.0  # KV that was short counts as short for so long: two Loads
_SLOWEST: Final = 1e9  # bytes per second that any move is given time for
_GPU_OVERHEAD_BYTES: Final = (
    4 << 30
)  # a process's bytes beside its weights, before one has said it: workspace, graphs, some KV
_CPU_OVERHEAD_BYTES: Final = 256 << 20
_START_S: Final = 8.0  # of a process, beside its bytes, before one was seen to start
_START_BYTES_S: Final = 1e9
_WAKE_S: Final = 0.1
_WAKE_BYTES_S: Final = 20e9
_SLEEP_S: Final = 0.15
_UNKNOWN_BYTES: Final = 1 << 60  # more than any host has
_READY_STEP_MS: Final = 100  # the time until it could serve is told rounded up to this, from ten of it on to ten


@dataclass(frozen=True, slots=True)
class Transition:
    """A move that was begun and has not ended.

    kind      start, wake, sleep, end, grow or shrink.
    until     it is to have ended by then, or its process is killed; a start has no end before it serves.
    """

    kind: str
    place: SetPlacement
    begun_at: float
    until: float
    why: str
    running: int = 0  # when it was begun


class ReplicaHandle:
    """One place for a replica. What is public is read by whoever carries the policy's moves out.

    device         index of the device of its process, or of its last one; −1: it had none.
    granted_bytes  of it, that its process may hold there; 0 asleep, and where there is none.
    told           what its process said last of where it is, also while the link to it is lost; None: nothing yet.
    order          what it is carrying out.
    guess_bytes    of a device, that it may need, as long as nothing has said it.
    """

    def __init__(
        self,
        name: str,
        model: ModelSpec,
        child: ReplicaSupervisor,
        link: ReplicaPeer,
        patience: SupervisionTimeouts,
        on_cpu: bool,
    ) -> None:
        self.name = name
        self.model = model
        self.child = child
        self.link = link
        self.device = -1
        self.granted_bytes = 0
        self.told: PlacementStatus | None = None
        self.order: Transition | None = None
        self.problem = ""  # of its last move, until one succeeds
        self.failures = 0  # moves in a row
        self.sleepless_until = 0.0  # it found too little host memory to sleep
        self.arrived_at: float | None = None
        self.left_at: float | None = None
        self.guess_bytes = (
            model.weights_bytes + model.weights_bytes // 8 + (_CPU_OVERHEAD_BYTES if on_cpu else _GPU_OVERHEAD_BYTES)
        )
        self._patience = patience
        self._copies = not on_cpu
        self._sizes: PlacementStatus | None = None
        self._hold_until = 0.0
        self._load: ReplicaLoad | None = None
        self._asked_at: float | None = None
        self._waits_since: float | None = None
        self._short_until = 0.0
        self._started = 0
        self._rate = 0.0
        self._rate_at = 0.0
        self._times = TransitionTimes(
            _START_S + model.weights_bytes / _START_BYTES_S, _WAKE_S + model.weights_bytes / _WAKE_BYTES_S, _SLEEP_S
        )

    # Where it is

    @property
    def residency(self) -> Residency:
        if not self.child.serving:
            return Residency.DISK
        return Residency.DEVICE if self.told is None else self.told.residency

    @property
    def toward(self) -> Residency:
        if self.child.process is not None and self.child.ending:
            return Residency.DISK
        return self.residency if self.order is None else self.order.place.residency

    @property
    def claim_bytes(self) -> int:
        """Of its device, that it holds or may take at any moment."""
        if self.child.process is None:
            return 0
        return max(self.granted_bytes, self.told.device_bytes if self.told is not None else 0)

    @property
    def known(self) -> bool:
        """Whether a process of it has said what it needs."""
        return self._sizes is not None

    def obeys(self, now: float) -> bool:
        """Whether it can be told to move: its process is connected, and has not failed at it a moment ago."""
        reached = self.link.placed is not None and not self.child.ending and not self.child.killed
        return reached and self.order is None and now >= self._hold_until

    @property
    def least_bytes(self) -> int:
        """Of a device, that it needs to serve, as far as that is known."""
        return self.guess_bytes if self._sizes is None else self._sizes.least_bytes

    @property
    def said(self) -> str:
        """Why it does not serve, in words; empty where it does, and where it only rests."""
        if self.residency is Residency.DEVICE:
            return ""
        return self.problem if self.residency is Residency.MEMORY else self.child.problem

    @property
    def asleep_bytes(self) -> int:
        """Of its device, that its process holds even in MEMORY."""
        return 0 if self._sizes is None else self._sizes.asleep_bytes

    # What happens to it

    def look(self, now: float) -> None:
        """Watches the process, keeps the link to it, and takes in what it said of its load."""
        self.child.look(now)
        if not self.child.serving:
            return
        if self.arrived_at is None:
            self.arrived_at = now
            if self.order is not None and self.order.kind == "start":
                self.order = replace(self.order, until=now + self._patience.order_s)
        if not self.child.ending:
            self.link.keep(self._first_word(), now)
        if self.link.load is not None and self.link.load is not self._load:
            self._count(self.link.load, now)

    def forgive(self, lost_s: float, now: float) -> None:
        """This machine was itself not running for so long: nobody is judged by that time."""
        self.child.forgive(lost_s, now)
        if self.order is not None:
            self.order = replace(self.order, until=self.order.until + lost_s)

    def begin(self, kind: str, place: SetPlacement, why: str, now: float) -> None:
        """The order is given from here on; the process hears it where it is to do it itself."""
        moving = max(place.device_bytes or 0, self.told.device_bytes if self.told is not None else 0)
        until = now + self._patience.order_s + place.drain_ms / 1e3 + moving / _SLOWEST
        self.order = Transition(kind, place, now, until if kind != "start" else math.inf, why, self._running)
        if place.residency is Residency.DEVICE or kind == "start":
            assert place.device_bytes is not None
            self.granted_bytes = place.device_bytes
        if kind in ("sleep", "end"):
            self.left_at = now
        if kind == "end":
            self.child.end(now)
        elif kind != "start":
            self.link.send(place)

    def stay(self) -> None:
        """Of one that starts to be put to sleep: it is to stay when it serves."""
        assert self.order is not None
        self.order = replace(self.order, place=msgspec.structs.replace(self.order.place, residency=Residency.DEVICE))

    def answered(self, placed: PlacementStatus, now: float) -> Transition | None:
        """Takes in where it says it is. The order that this ends, well or badly, if it does."""
        order, arrived = self.order, placed.residency is Residency.DEVICE
        if arrived and (self.residency is not Residency.DEVICE or self.arrived_at is None):
            self.arrived_at = now
        self.told = self._sizes = placed
        self.granted_bytes = min(self.granted_bytes, max(placed.device_bytes, placed.most_bytes))
        if not arrived and (order is None or order.place.residency is not Residency.DEVICE):
            self.granted_bytes = 0
        if order is None or not _completes(order, placed):
            return None
        self.order = None
        self._learn(order, placed, now)
        return order

    def failed(self, problem: str, now: float) -> None:
        """Its move was not carried out: it is left alone for a while, and back where it was."""
        self.problem = problem
        self.failures += 1
        assert self.told is not None
        self.granted_bytes = self.told.device_bytes if self.told.residency is Residency.DEVICE else 0
        wait_s = self._patience.again_s * 2.0 ** min(self.failures - 1, 16)
        self._hold_until = now + min(wait_s, self._patience.backoff_s_max)

    def succeeded(self) -> None:
        self.problem, self.failures = "", 0

    def forget_order(self) -> None:
        """It will not be carried out any more."""
        self.order = None

    def ended(self) -> Transition | None:
        """The process is gone. The order that went with it."""
        order, self.order = self.order, None
        self.told = self._load = self._waits_since = self.arrived_at = None
        self.granted_bytes = self._started = 0
        self._hold_until = self._short_until = 0.0
        self.link.forget()
        return order

    def needs_more(self, most_bytes: int) -> None:
        """It died as it started, with what it was granted, before it could say what it needs."""
        self.guess_bytes = min(2 * self.guess_bytes, most_bytes)

    def learn_from(self, other: PlacementStatus) -> None:
        """What another replica of the same model needs, so does it."""
        if self._sizes is None:
            self._sizes = other

    # What is shown of it

    def resident(self, now: float, wanted: PendingDemand, alone: bool, most_bytes: int, ready: bool) -> ReplicaSnapshot:
        """`alone`: it has its device for itself, so nothing about its bytes is to be decided; `most_bytes` is what the
        largest device has for replicas; processes may be started where that is `ready`."""
        sizes, load, model = self._sizes, self._load, self.model
        least = min(self.guess_bytes, most_bytes) if sizes is None else sizes.least_bytes
        residency = Residency.DISK if self._silent(now) else self.residency
        deaf = residency is not Residency.DISK and not self.obeys(now)  # then others have to move
        most = most_bytes if sizes is None else sizes.most_bytes
        if alone and self.child.process is not None:
            least = most = self.claim_bytes
        since = [at for at in (wanted.since, self._waits_since) if at is not None]
        return ReplicaSnapshot(
            name=self.name,
            model=model.name,
            device=self.device,
            residency=residency,
            toward=self.toward,
            wishes=PlacementPreferences(model.pinned, model.priority, model.resident_s, model.wake_s),
            times=self._times,
            device_bytes=self.told.device_bytes if self.told is not None else 0,
            granted_bytes=self.granted_bytes,
            asleep_bytes=self.asleep_bytes,
            least_bytes=least,
            most_bytes=max(least, most),
            memory_bytes=self.told.memory_bytes if self.told is not None else 0,
            standby_bytes=_UNKNOWN_BYTES if now < self.sleepless_until else self._standby_bytes,
            resizing=deaf,
            waiting=wanted.requests + (load.waiting if load is not None else 0),
            weight=wanted.weight,
            waited_s=now - min(since) if since else 0.0,
            running=self._running,
            kv_used=1.0 - load.free_blocks / load.blocks if load is not None and load.blocks else 0.0,
            kv_short=now < self._short_until,
            asked_at=now if wanted.requests else self._asked_at,
            rate=self._rate * math.exp((self._rate_at - now) / _RATE_S),
            arrived_at=self.arrived_at if self.residency is Residency.DEVICE else None,
            left_at=self.left_at,
            startable=self.child.process is not None or (ready and self.child.startable(now)),
        )

    def state(self, now: float, never: str, ready_ms: int) -> ReplicaState:
        """`never` says why it can be on no device; `ready_ms` is what the policy expects, its own pauses apart."""
        ready = never or self.residency is Residency.DEVICE
        pause_s = max(self.child.waits_s(now), self._hold_until - now, 0.0)
        if self.order is not None and self.toward is Residency.DEVICE:
            pause_s -= now - self.order.begun_at
        expected_ms = ready_ms + int(1e3 * pause_s)
        step_ms = _READY_STEP_MS if expected_ms < 10 * _READY_STEP_MS else 10 * _READY_STEP_MS
        rounded = max(1, -(-expected_ms // step_ms)) * step_ms
        return ReplicaState(
            model=self.model.name,
            address=self.child.address,
            residency=self.residency,
            boot=self.child.boot,
            problem=never or self.said,
            toward=self.toward,
            ready_ms=(-1 if never else 0) if ready else rounded,
            device=self.device,
            memory=self.told,
            quarantined=self.child.quarantined(now),
        )

    # Inside

    def _silent(self, now: float) -> bool:
        """Whether it serves since a moment ago, and has not said yet how large it is: until then it still starts."""
        since = self.child.serving_since
        return since is not None and self.told is None and now - since < self._patience.connect_s

    @property
    def _running(self) -> int:
        return self._load.running + self._load.background if self._load is not None else 0

    @property
    def _standby_bytes(self) -> int:
        """What it holds where it sleeps now; else the most that it may, with what it keeps of its KV. On a CPU the page
        cache has its weights, which is nobody's budget."""
        if self.told is not None and self.told.residency is Residency.MEMORY:
            return self.told.memory_bytes
        if self._sizes is None:
            return self.model.kept_kv_bytes + (self.model.weights_bytes if self._copies else 0)
        return self._sizes.standby_bytes

    def _first_word(self) -> SetPlacement:
        """What a new connection is told: the order that it carries out, or to stay where it is."""
        if self.order is not None and self.order.kind in ("wake", "sleep", "grow", "shrink"):
            return self.order.place
        return SetPlacement(self.residency)

    def _count(self, load: ReplicaLoad, now: float) -> None:
        """Arrivals, and since when some wait, from what changed since its last word."""
        started = load.counters.get("started", 0)
        self._rate = self._rate * math.exp((self._rate_at - now) / _RATE_S) + max(0, started - self._started) / _RATE_S
        self._rate_at = now
        if started > self._started or load.running or load.waiting:
            self._asked_at = now
        if not load.waiting:
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = now
        if _lacks_kv(load, self._load):
            self._short_until = now + _KV_SHORTAGE_S
        self._load, self._started = load, started

    def _learn(self, order: Transition, placed: PlacementStatus, now: float) -> None:
        if placed.problem:
            return
        took_s, times = now - order.begun_at, self._times
        if order.kind == "start":
            self._times = replace(times, start_s=took_s)
        elif order.kind == "wake":
            self._times = replace(times, wake_s=(times.wake_s + took_s) / 2)
        elif order.kind == "sleep" and not order.running:
            self._times = replace(times, sleep_s=(times.sleep_s + took_s) / 2)


def _completes(order: Transition, placed: PlacementStatus) -> bool:
    """Whether this is the order's last answer. An older order's may come after it was given."""
    if order.kind in ("start", "end"):
        return order.kind == "start"
    return bool(placed.problem) or placed.residency is order.place.residency


def _lacks_kv(load: ReplicaLoad, before: ReplicaLoad | None) -> bool:
    """Whether sequences lacked blocks of the pool lately, rather than what their accounts may have."""
    counted = 0 if before is None else before.counters.get("short_of_blocks", 0)
    return load.counters.get("short_of_blocks", 0) > counted
