"""Which models are where: pure decisions from demand, bytes, times and wishes. It knows no processes and no CUDA, no
clock but the `now` that it is given, and keeps nothing between two decisions but the `Allowance` that it hands back.

    decide(view, allowance) ─► Decision(moves, allowance)     the machine carries the moves out; the next view tells how
"""

from dataclasses import dataclass

from engine.wire import Residency


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
    """The moves to begin now."""
    return Decision((), allowance)


def problem(view: View, name: str) -> str:
    """Why this replica can never be on a device, in words for callers; empty where it can."""
    return ""


def ready_ms(view: View, name: str) -> int:
    """Expected time until this replica could serve if it were asked for now: 0 on DEVICE, −1 where `problem` says why
    it never can. What backs off or is quarantined is for the machine to say."""
    return 0
