"""The input and the output of a placement decision: replicas as they are, placements, and what arithmetic alone makes
of them. Nothing here decides, and no clock runs but the `now` that it is given.
"""

from dataclasses import dataclass

from engine.protocol.frames import SetPlacement
from engine.protocol.types import Residency


@dataclass(frozen=True, slots=True)
class PlacementPreferences:
    """A model's own, as its ModelSpec says."""

    pinned: bool = False
    priority: float = 1.0
    resident_s: float = 0.2
    wake_s: float = 0.5


@dataclass(frozen=True, slots=True)
class TransitionTimes:
    """How long moves of a replica take, in seconds: as measured, or as its bytes let expect."""

    start_s: float  # from DISK to DEVICE
    wake_s: float  # from MEMORY to DEVICE
    sleep_s: float  # from DEVICE to MEMORY


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """One replica and its model's demand. Times are on the clock of PlacementSnapshot.now; `None`: never. A model of
    several ranks is on as many devices at once, and its bytes of a device are those of each of them.

    A start from DISK shows as `residency` DISK until it serves, with `devices` and `granted_bytes` as its Placement had
    them.
    """

    name: str  # of the replica, unique
    model: str
    devices: tuple[int, ...]  # indices of its devices, ascending; where it is on DISK, where it was, or none
    residency: Residency
    toward: Residency  # where it is moving, else equal to `residency`
    preferences: PlacementPreferences
    times: TransitionTimes
    device_bytes: int  # of the device, that it holds now
    granted_bytes: int  # that it may hold, as the last Placement on the DEVICE had it; 0 once it sleeps or has ended
    asleep_bytes: int  # of the device, held in MEMORY
    min_bytes: int  # of the device, to serve
    max_bytes: int  # of the device, that it could use
    memory_bytes: int  # of host memory, that it holds now
    standby_bytes: int  # of host memory, that it holds in MEMORY
    moved_s: float = 0.0  # since its move began
    resizing: bool = False  # a Placement from DEVICE to DEVICE is not carried out yet
    waiting: int = 0  # requests that wait for its model in gateways, and for it in the replica itself
    weight: float = 1.0  # the largest plan's weight among them
    waited_s: float = 0.0  # the first of them
    running: int = 0  # sequences
    kv_used: float = 0.0  # share of its KV that is in use or cached
    kv_short: bool = False  # sequences wait there, or were preempted, for want of KV
    requested_at: float | None = None  # the last request for it
    request_rate: float = 0.0  # requests per second lately
    placed_at: float | None = None  # on the device, last
    evicted_at: float | None = None  # from the device, last: since then its requests wait for it to come back
    startable: bool = True  # False: quarantined, or backing off
    device_count: int = 1  # it is on so many devices at once

    @property
    def is_at_rest(self) -> bool:
        return self.toward is self.residency and not self.resizing

    @property
    def serves(self) -> bool:
        return self.toward is Residency.DEVICE and self.residency is Residency.DEVICE

    @property
    def busy(self) -> bool:
        return self.running > 0 or self.waiting > 0

    @property
    def held_bytes(self) -> int:
        """Bytes of its device that no other replica can have now."""
        if self.residency is self.toward is Residency.DISK:
            return 0
        if self.residency is self.toward is Residency.MEMORY:
            return max(self.asleep_bytes, self.device_bytes)
        return max(self.device_bytes, self.granted_bytes)

    @property
    def lacking_bytes(self) -> int:
        """Bytes of its device that it needs to serve, beside those that it holds."""
        return self.min_bytes - self.held_bytes

    @property
    def incoming_bytes(self) -> int:
        """Bytes of its device that will be free soon: not what a start leaves, which may take long."""
        if self.is_at_rest or self.residency is Residency.DISK:
            return 0
        if self.toward is Residency.DEVICE:
            return max(0, self.held_bytes - self.granted_bytes)
        return max(0, self.held_bytes - (self.asleep_bytes if self.toward is Residency.MEMORY else 0))

    @property
    def excess_bytes(self) -> int:
        """Bytes of its device that it would give up of its KV. A replica that holds more than it was granted needs that
        while it runs."""
        if self.running and self.device_bytes > self.granted_bytes:
            return 0
        return max(0, self.held_bytes - self.min_bytes)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that no other replica can have now."""
        if self.residency is self.toward is Residency.DISK:
            return 0
        if self.serves or self.toward is Residency.DISK:
            return self.memory_bytes
        return max(self.memory_bytes, self.standby_bytes)

    @property
    def protected_s(self) -> float:
        """How long it stays once it came: while it is busy at least twice what its moves take, so that a device serves
        for most of its time, however many contend for it."""
        moves_s = self.times.wake_s + self.times.sleep_s
        return max(self.preferences.resident_s, 2 * moves_s if self.busy else 0.0)

    def expected_rate(self, now: float) -> float:
        """Requests a second that count for it: its rate, or less where it has been silent for longer than that lets
        expect; times its priority."""
        if self.requested_at is None:
            return 0.0
        return self.preferences.priority * min(self.request_rate, 1 / max(now - self.requested_at, 1e-3))


@dataclass(frozen=True, slots=True)
class PlacementSnapshot:
    """All that a decision sees."""

    now: float
    replicas: tuple[ReplicaSnapshot, ...]  # in the order of the catalogue
    devices: tuple[int, ...]  # the budget of each, in bytes
    memory_bytes: int  # the budget of host memory


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a replica is to be; `device_bytes` is what it may hold on each of `devices` when it is there.

    DISK → DEVICE        starts it.
    DISK → MEMORY        starts it, and puts it to sleep when it serves; meanwhile `device_bytes` of `devices` are its.
                         While it starts, a Placement on the DEVICE may follow: then it stays when it serves.
    MEMORY → DEVICE      wakes it.
    DEVICE → DEVICE      lets its KV grow or shrink.
    DEVICE → MEMORY      puts it to sleep.
    any → DISK           ends its process.
    """

    name: str
    residency: Residency
    devices: tuple[int, ...] = ()
    device_bytes: int = 0
    standby: bool = False  # of a start: it may have to sleep, so its weights are copied to host memory ahead
    reason: str = ""

    def message(self) -> SetPlacement:
        """The part of it that the replica's process carries out. What runs there is preempted at once."""
        return SetPlacement(self.residency, self.device_bytes)


@dataclass(frozen=True, slots=True)
class MoveAllowance:
    """The rest of each device's moves, at `at`: token buckets. An empty one is full."""

    at: float = 0.0
    moves: tuple[float, ...] = ()
    resizes: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    placements: tuple[Placement, ...]  # in the order in which they are to begin
    allowance: MoveAllowance  # for the next decision
