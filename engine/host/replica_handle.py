"""A replica as its agent keeps it: its process, the connection to it, where its weights are and where they go, what it
asks for and what its moves take. It decides nothing: it shows the policy what is known, and carries out one transition
at a time.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from engine.host.demand import Demand
from engine.host.peers import ReplicaPeer
from engine.host.supervisor import ReplicaSupervisor, SupervisionTimeouts
from engine.log import log
from engine.placement.capacity import HANDOVER_S
from engine.placement.snapshot import Placement, PlacementPreferences, ReplicaSnapshot, TransitionTimes
from engine.process.supervised import Backoff
from engine.protocol.frames import PlacementStatus, ReplicaLoad, ReplicaState, SetPlacement
from engine.protocol.rank_layout import RankLayout
from engine.protocol.specs import ModelSpec, estimated_rank_bytes, settings_digest
from engine.protocol.types import ReplicaRole, Residency

_RATE_S: Final = 30.0  # the rate of requests is an average over about so long
_KV_SHORTAGE_S: Final = 1.0  # KV that was short counts as short for so long: two ReplicaLoads
_SLOWEST_BYTES_S: Final = 1e9  # the speed that any move is given time for
_CPU_OVERHEAD_BYTES: Final = 256 << 20
_ALONE: Final = RankLayout(1, 1)
_START_S: Final = 8.0  # a process's start, beside its bytes, before one was seen
_START_BYTES_S: Final = 1e9
_WAKE_S: Final = 0.1
_WAKE_BYTES_S: Final = 20e9
_SLEEP_S: Final = 0.15
_FOLDER_LOOK_S: Final = 0.5  # between two looks at the folder of a replica without a process
_UNKNOWN_BYTES: Final = 1 << 60  # more than any host has
_NO_STATUS: Final = PlacementStatus(Residency.DISK)
_NO_LOAD: Final = ReplicaLoad(0, 0, 0, 0, 0, 0)
_READY_STEP_MS: Final = 100  # the time until it could serve is reported rounded up to this, from ten of it on to ten


@dataclass(frozen=True, slots=True)
class Transition:
    """A placement that was begun and has not ended.

    kind      start, wake, sleep, end, grow or shrink.
    deadline  it is to have ended by then, or its process is killed; a start has none before it serves.
    running   sequences when it was begun.
    """

    kind: str
    placement: Placement
    began_at: float
    deadline: float
    running: int = 0


class ReplicaHandle:
    """One replica of a model. What is public is read by the reconciler, which carries the policy's placements out.

    devices          indices of the devices of its process, or of its last one; none: it had none.
    layout           of its ranks and stages; device_count: it is on so many devices at once, of which what it holds of
                     one is what it holds of each.
    granted_bytes    of each, that its process may hold there; 0 asleep, and where there is none.
    status           what its process reported last of where it is, also while the connection to it is lost; None:
                     nothing yet.
    transition       what it is carrying out.
    estimated_bytes  of a device, that it may need, as long as nothing has reported it.
    settings         settings_digest of its model.
    leaving_at       from then on it is to go once it has no calls; None: it stays.
    role             which part of calls it is for.
    replaces         it takes the place of one with former settings, and comes to a device before all else.
    folder_missing   its model's folder was not there at the last look: until it is, no process is started for it.
    """

    def __init__(
        self, name: str, model: ModelSpec, supervisor: ReplicaSupervisor, peer: ReplicaPeer,
        timeouts: SupervisionTimeouts, on_cpu: bool, layout: RankLayout = _ALONE,
    ) -> None:  # fmt: skip
        self.name = name
        self.model = model
        self.settings = settings_digest(model)
        self.leaving_at: float | None = None
        self.role = ReplicaRole.BOTH
        self.replaces = False
        self.supervisor = supervisor
        self.peer = peer
        self.devices: tuple[int, ...] = ()
        self.layout = layout
        self.device_count = 1 if on_cpu else layout.devices  # ranks on a CPU share its memory
        self.granted_bytes = 0
        self.status: PlacementStatus | None = None
        self.transition: Transition | None = None
        self.problem = ""  # of its last transition, until one succeeds
        self.backoff = Backoff(timeouts.retry_s, timeouts.backoff_s_max)  # of transitions that fail in a row
        self.no_sleep_before = 0.0  # it found too little host memory to sleep
        self.placed_at: float | None = None
        self.evicted_at: float | None = None
        self.folder_missing = False
        self._folder_look_at = 0.0
        on_cpu_bytes = model.weights_bytes * 9 // 8 + _CPU_OVERHEAD_BYTES
        self.estimated_bytes = on_cpu_bytes if on_cpu else estimated_rank_bytes(model, layout.devices)
        self._timeouts = timeouts
        self._copies_weights = not on_cpu
        self._sizes: PlacementStatus | None = None  # the last report of this replica, or of another of its model
        self._retry_at = 0.0
        self._load = _NO_LOAD
        self._requested_at: float | None = None
        self._waiting_since: float | None = None
        self._kv_short_until = 0.0
        self._rate = 0.0
        self._rate_at = 0.0
        self._times = TransitionTimes(
            _START_S + model.weights_bytes / _START_BYTES_S,
            _WAKE_S + model.weights_bytes / self.device_count / _WAKE_BYTES_S,
            _SLEEP_S,
        )

    # Where it is

    @property
    def residency(self) -> Residency:
        if not self.supervisor.serving:
            return Residency.DISK
        return Residency.DEVICE if self.status is None else self.status.residency

    @property
    def toward(self) -> Residency:
        """Where it is moving; its residency where it rests."""
        if self.supervisor.process is not None and self.supervisor.ending:
            return Residency.DISK
        return self.residency if self.transition is None else self.transition.placement.residency

    @property
    def claimed_bytes(self) -> int:
        """Bytes of each of its devices that it holds or may take at any moment."""
        if self.supervisor.process is None:
            return 0
        return max(self.granted_bytes, self.usage.device_bytes)

    @property
    def usage(self) -> PlacementStatus:
        """What it holds as far as it was reported: nothing where there is no report."""
        return self.status or _NO_STATUS

    @property
    def has_reported(self) -> bool:
        """Whether a process of it has reported what it needs."""
        return self._sizes is not None

    @property
    def handover_at(self) -> float:
        """When another may be ordered to wake after it; never, where it does not wake."""
        if self.transition is None or self.transition.kind != "wake":
            return math.inf
        return self.transition.began_at + self._times.wake_s - HANDOVER_S

    @property
    def ready(self) -> bool:
        """Whether it serves, or has begun to and sleeps."""
        starts = self.transition is not None and self.transition.kind == "start"
        return self.supervisor.serving and self.status is not None and not starts

    @property
    def busy(self) -> bool:
        """Whether it has calls, as far as it reported."""
        return self.running + self._load.waiting > 0

    def leaving(self, now: float) -> bool:
        return self.leaving_at is not None and now >= self.leaving_at

    def accepts_placement(self, now: float) -> bool:
        """Whether it can be moved: its process is connected, and has not failed to move a moment ago."""
        reached = self.peer.status is not None and not self.supervisor.ending and not self.supervisor.killed
        return reached and self.transition is None and now >= self._retry_at

    @property
    def min_bytes(self) -> int:
        """Bytes of a device that it needs to serve, as far as that is known."""
        return self.estimated_bytes if self._sizes is None else self._sizes.min_bytes

    @property
    def reason(self) -> str:
        """Why it does not serve, in words; empty where it does, and where it only rests."""
        if self.residency is Residency.DEVICE:
            return ""
        if self.folder_missing:
            return f"its folder {self.model.folder} is missing: it starts once that is there"
        return self.problem if self.residency is Residency.MEMORY else self.supervisor.problem

    @property
    def asleep_bytes(self) -> int:
        """Bytes of each of its devices that its process holds even in MEMORY."""
        return 0 if self._sizes is None else self._sizes.asleep_bytes

    # What happens to it

    def poll(self, now: float) -> None:
        """Watches the process, keeps the connection to it, and takes in its load."""
        self.supervisor.poll(now)
        if self.supervisor.process is None and now >= self._folder_look_at:
            self.find_folder(now)
        if not self.supervisor.serving:
            return
        if self.placed_at is None:
            self.placed_at = now
            if self.transition is not None and self.transition.kind == "start":
                self.transition = replace(self.transition, deadline=now + self._timeouts.move_s)
        if not self.supervisor.ending:
            self.peer.keep_open(self._first_message(), now)
        if self.peer.load is not None and self.peer.load is not self._load:
            self._take_load(self.peer.load, now)

    def find_folder(self, now: float) -> bool:
        """Whether its model's folder is there now, without which a process would only die."""
        missing, self._folder_look_at = not Path(self.model.folder).is_dir(), now + _FOLDER_LOOK_S
        if missing != self.folder_missing:
            self.folder_missing = missing
            if missing:
                log("model_folder_missing", level="error", model=self.model.name, folder=self.model.folder)
            else:
                self.supervisor.pardon(now)
                log("model_folder_found", model=self.model.name, folder=self.model.folder)
        return not missing

    def forgive(self, lost_s: float, now: float) -> None:
        """Moves deadlines by a time in which this machine itself did not run: nobody is judged by that time."""
        self.supervisor.forgive(lost_s, now)
        if self.transition is not None:
            self.transition = replace(self.transition, deadline=self.transition.deadline + lost_s)

    def begin(self, kind: str, placement: Placement, now: float) -> None:
        """Begins a transition; the process is sent the placement where it is to move by itself."""
        moving_bytes = max(placement.device_bytes, self.usage.device_bytes)
        deadline = now + self._timeouts.move_s + moving_bytes / _SLOWEST_BYTES_S if kind != "start" else math.inf
        self.transition = Transition(kind, placement, now, deadline, self.running)
        if placement.residency is Residency.DEVICE or kind == "start":
            self.granted_bytes = placement.device_bytes
        if kind in ("sleep", "end"):
            self.evicted_at = now
        if kind == "end":
            self.supervisor.end(now)
        elif kind != "start":
            self.peer.send(placement.message())

    def cancel_sleep(self) -> None:
        """A replica that starts to be put to sleep stays on its device when it serves."""
        assert self.transition is not None
        staying = replace(self.transition.placement, residency=Residency.DEVICE)
        self.transition = replace(self.transition, placement=staying)

    def take_status(self, status: PlacementStatus, now: float) -> Transition | None:
        """Takes in where it reports to be. The transition that this ends, well or badly, if it does."""
        transition, on_device = self.transition, status.residency is Residency.DEVICE
        if on_device and (self.residency is not Residency.DEVICE or self.placed_at is None):
            self.placed_at = now
        self.status = self._sizes = status
        self.granted_bytes = min(self.granted_bytes, max(status.device_bytes, status.max_bytes))
        if not on_device and (transition is None or transition.placement.residency is not Residency.DEVICE):
            self.granted_bytes = 0
        if transition is None or not _completes(transition, status):
            return None
        self.transition = None
        self._learn_times(transition, status, now)
        return transition

    def fail(self, problem: str, now: float) -> None:
        """Its transition was not carried out: it is left alone for a while, and back where it was."""
        self.problem = problem
        assert self.status is not None
        self.granted_bytes = self.status.device_bytes if self.status.residency is Residency.DEVICE else 0
        self._retry_at = now + self.backoff.fail()

    def on_exit(self) -> Transition | None:
        """The process is gone. The transition that went with it."""
        transition, self.transition = self.transition, None
        self.status = self._waiting_since = self.placed_at = None
        self._load = _NO_LOAD
        self.granted_bytes = 0
        self._retry_at = self._kv_short_until = 0.0
        self.peer.reset()
        return transition

    def raise_estimate(self, max_bytes: int) -> None:
        """It died as it started, with what it was granted, before it could report what it needs."""
        self.estimated_bytes = min(2 * self.estimated_bytes, max_bytes)

    def learn_sizes(self, other: PlacementStatus) -> None:
        """Takes what another replica of the same model needs for its own need, until it reports itself."""
        if self._sizes is None:
            self._sizes = other

    # What is shown of it

    def snapshot(self, now: float, demand: Demand, alone: bool, max_bytes: int, ready: bool) -> ReplicaSnapshot:
        """The replica as the policy sees it. `alone`: it has its device for itself, so nothing about its bytes is to be
        decided; `max_bytes` is what the largest device has for replicas; processes may be started where that is
        `ready`."""
        sizes, load, model = self._sizes, self._load, self.model
        low = min(self.estimated_bytes, max_bytes) if sizes is None else sizes.min_bytes
        high = max_bytes if sizes is None else sizes.max_bytes
        if alone and self.supervisor.process is not None:
            low = high = self.claimed_bytes
        residency = Residency.DISK if self._awaits_report(now) else self.residency
        since = [at for at in (demand.since, self._waiting_since) if at is not None]
        return ReplicaSnapshot(
            name=self.name,
            model=model.name,
            devices=self.devices,
            residency=residency,
            toward=self.toward,
            preferences=PlacementPreferences(self._pinned, model.priority, model.resident_s, model.wake_s),
            times=self._times,
            device_bytes=self.usage.device_bytes,
            granted_bytes=self.granted_bytes,
            asleep_bytes=self.asleep_bytes,
            min_bytes=low,
            max_bytes=max(low, high),
            memory_bytes=self.usage.memory_bytes,
            standby_bytes=_UNKNOWN_BYTES if now < self.no_sleep_before else self._standby_bytes,
            moved_s=0.0 if self.transition is None else now - self.transition.began_at,
            # One that cannot be moved now counts as moving: then others have to.
            resizing=residency is not Residency.DISK and not self.accepts_placement(now),
            waiting=demand.requests + load.waiting,
            weight=demand.weight,
            waited_s=now - min(since) if since else 0.0,
            running=self.running,
            kv_used=1.0 - load.free_blocks / load.blocks if load.blocks else 0.0,
            kv_short=now < self._kv_short_until,
            requested_at=now if demand.requests else self._requested_at,
            request_rate=self._rate * math.exp((self._rate_at - now) / _RATE_S),
            placed_at=self.placed_at if self.residency is Residency.DEVICE else None,
            evicted_at=self.evicted_at,
            startable=self.supervisor.process is not None
            or (ready and self.leaving_at is None and not self.folder_missing and self.supervisor.startable(now)),
            device_count=self.device_count,
        )

    def condition(self, now: float) -> tuple[object, ...]:
        """The part of its state that callers wait for; it is to be compared, no more."""
        supervisor = self.supervisor
        return (
            *(self.name, self.settings, self.leaving(now)),
            *(self.residency, self.toward, self.role, supervisor.boot, supervisor.quarantined(now), self.reason),
        )

    def state(self, now: float, unplaceable: str, ready_ms: int) -> ReplicaState:
        """The replica as gateways see it. `unplaceable` says why it can be on no device; `ready_ms` is what the policy
        expects, its own pauses apart."""
        unplaceable = unplaceable or (self.reason if self.folder_missing else "")
        ready = unplaceable or self.residency is Residency.DEVICE
        pause_s = max(self.supervisor.pause_s(now), self._retry_at - now, 0.0)
        if self.transition is not None and self.toward is Residency.DEVICE:
            pause_s -= now - self.transition.began_at
        expected_ms = ready_ms + int(1e3 * pause_s)
        step_ms = _READY_STEP_MS if expected_ms < 10 * _READY_STEP_MS else 10 * _READY_STEP_MS
        rounded_ms = max(1, -(-expected_ms // step_ms)) * step_ms
        return ReplicaState(
            model=self.model.name,
            address=self.supervisor.address,
            residency=self.residency,
            boot=self.supervisor.boot,
            problem=unplaceable or self.reason,
            toward=self.toward,
            ready_ms=(-1 if unplaceable else 0) if ready else rounded_ms,
            device=self.devices[0] if self.devices else -1,
            memory=self.status,
            quarantined=self.supervisor.quarantined(now),
            settings=self.settings,
            leaving=self.leaving(now),
            devices=list(self.devices),
            role=self.role,
        )

    def counted_ms(self) -> tuple[int, int]:
        """How long its steps took since it started, prompts in them first, as far as it says so."""
        counters = self._load.counters
        return counters.get("prompts_ms", 0), counters.get("steps_ms", 0)

    # Inside

    @property
    def _pinned(self) -> bool:
        return self.leaving_at is None and (self.model.pinned or (self.replaces and not self.ready))

    def _awaits_report(self, now: float) -> bool:
        """Whether it serves since a moment ago, and has not reported yet how large it is: until then it still
        starts."""
        since = self.supervisor.serving_since
        return since is not None and self.status is None and now - since < self._timeouts.connect_s

    @property
    def running(self) -> int:
        """Sequences, as far as it reported."""
        return self._load.running + self._load.background

    @property
    def _standby_bytes(self) -> int:
        """Host memory that it holds where it sleeps now; else the most that it may, with what it keeps of its KV. On a
        CPU the page cache has its weights, which is nobody's budget."""
        if self.usage.residency is Residency.MEMORY:
            return self.usage.memory_bytes
        if self._sizes is None:
            kept_bytes = (self.model.host_kv_bytes or self.model.kept_kv_bytes) + self.model.handover_bytes
            return kept_bytes + (self.model.weights_bytes if self._copies_weights else 0)
        return self._sizes.standby_bytes

    def _first_message(self) -> SetPlacement:
        """The first message of a new connection: the placement that it carries out, or to stay where it is."""
        if self.transition is not None and self.transition.kind in ("wake", "sleep", "grow", "shrink"):
            return self.transition.placement.message()
        return SetPlacement(self.residency)

    def _take_load(self, load: ReplicaLoad, now: float) -> None:
        """Counts arrivals, and since when some wait, from what changed since the last load."""
        started, short_of_blocks = (
            load.counters.get(name, 0) - self._load.counters.get(name, 0) for name in ("started", "short_of_blocks")
        )
        self._rate = self._rate * math.exp((self._rate_at - now) / _RATE_S) + max(0, started) / _RATE_S
        self._rate_at = now
        if started > 0 or load.running or load.waiting:
            self._requested_at = now
        if not load.waiting:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        if short_of_blocks > 0:  # of the pool, rather than of what their accounts may have
            self._kv_short_until = now + _KV_SHORTAGE_S
        self._load = load

    def _learn_times(self, transition: Transition, status: PlacementStatus, now: float) -> None:
        if status.problem:
            return
        seconds, times = now - transition.began_at, self._times
        if transition.kind == "start":
            self._times = replace(times, start_s=seconds)
        elif transition.kind == "wake":
            self._times = replace(times, wake_s=(times.wake_s + seconds) / 2)
        elif transition.kind == "sleep" and not transition.running:
            self._times = replace(times, sleep_s=(times.sleep_s + seconds) / 2)


def _completes(transition: Transition, status: PlacementStatus) -> bool:
    """Whether this is the transition's last report. An older one's may come after it was begun."""
    if transition.kind in ("start", "end"):
        return transition.kind == "start"
    return bool(status.problem) or status.residency is transition.placement.residency
