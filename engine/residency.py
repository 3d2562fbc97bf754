"""Which models are where: pure decisions from demand, bytes, times and wishes. It knows no processes and no CUDA, no
clock but the `now` that it is given, and keeps nothing between two decisions but what is in `Memory` below.

    decide(view, budget) ─► moves        the machine carries them out, and tells how they ended by the next view
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
    """One replica and its model's demand. Times are on the clock of View.now; `None`: never."""

    name: str  # of the replica, unique
    model: str
    device: int  # index of its device; where it is on DISK, where it was, or −1
    residency: Residency
    toward: Residency  # where it is moving, else equal to `residency`
    wishes: Wishes
    times: Times
    device_bytes: int  # held now
    asleep_bytes: int  # of the device, held in MEMORY
    least_bytes: int  # of the device, to serve
    most_bytes: int  # of the device, that it could use
    memory_bytes: int  # of host memory, that it holds or will hold in MEMORY
    waiting: int = 0  # requests that wait for it: in gateways, and in the replica itself
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
    residents: tuple[Resident, ...]
    devices: tuple[int, ...]  # the budget of each, in bytes
    memory_bytes: int  # of the host, in all


@dataclass(frozen=True, slots=True)
class Move:
    """`device_bytes` is what it may hold on `device` when it is there; `drain_s` what runs has until it is preempted.
    A move of one that is on DEVICE to DEVICE lets its KV grow or shrink."""

    name: str
    to: Residency
    device: int = -1
    device_bytes: int = 0
    drain_s: float = 0.0
    why: str = ""
