"""The counters of replicas, summed by model, and the recent load of one replica. It knows neither connections nor
tenants."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from engine.protocol.frames import Hello, ReplicaLoad

EVICTION_CAUSES: Final = ("space", "cap", "epoch", "age")  # why blocks were evicted
QUEUE_REJECTIONS: Final = ("refused_full", "refused_deadline", "expired_requests", "displaced_requests")
COUNTER_NAMES: Final = (
    *("lookups", "lookup_tokens", "hit_tokens", "inserted_blocks", "duplicate_blocks", "spared_keys"),
    *(f"evicted_{cause}_blocks" for cause in EVICTION_CAUSES),
    *QUEUE_REJECTIONS,
    *("preemptions", "stale_pages", "traded_extents"),
    *("host_hit_tokens", "host_stored_bytes", "host_loaded_bytes", "host_saved_ms"),
    *("host_evicted_blocks", "host_refused_blocks", "host_swept_blocks"),
    *("disk_hit_tokens", "disk_stored_bytes", "disk_loaded_bytes", "disk_saved_ms"),
    *("disk_evicted_blocks", "disk_refused_blocks", "disk_swept_blocks"),
    *("disk_corrupt_blocks", "disk_late_fetches", "disk_slower_blocks", "disk_ended"),
    *("handover_moved", "handover_failed", "handover_sent_blocks", "handover_claimed_blocks"),
    *("handover_window_blocks", "handover_fabric_blocks", "handover_off_fabric"),
    *("handover_corrupt_blocks", "handover_lapsed"),
)
RECENT_S: Final = 5.0
_LOAD_S: Final = 0.5  # a load that changes is said so often


class RecentLoad:
    """The counters of one start of a replica over its last seconds. A replica that says nothing new counts nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, int, int, int, int, int]] = deque()

    def append(self, now: float, load: ReplicaLoad) -> None:
        counted = load.counters.get
        names = ("computed_tokens", "lookup_tokens", "hit_tokens", "host_hit_tokens", "disk_hit_tokens")
        computed, looked_up, hit, in_host, on_disk = (counted(name, 0) for name in names)
        self._marks.append((now, computed, looked_up, hit, in_host, on_disk))
        self._forget(now - RECENT_S)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of prompts and answers that its steps computed, per second."""
        seconds, tokens, *_ = self._window_delta()
        return tokens / seconds if seconds > 0 else 0.0

    @property
    def hit_ratio(self) -> float | None:
        """The share of looked-up prompt tokens that the cache had, on the device or in host memory; None without a
        look-up."""
        _, _, looked_up, hit, in_host, _ = self._window_delta()
        return min(max((hit + in_host) / looked_up, 0.0), 1.0) if looked_up > 0 else None

    @property
    def host_hit_ratio(self) -> float | None:
        """The share of them that came back from host memory."""
        _, _, looked_up, _, in_host, _ = self._window_delta()
        return min(max(in_host / looked_up, 0.0), 1.0) if looked_up > 0 else None

    @property
    def disk_hit_ratio(self) -> float | None:
        """The share of them that had come into host memory from disk."""
        _, _, looked_up, _, _, on_disk = self._window_delta()
        return min(max(on_disk / looked_up, 0.0), 1.0) if looked_up > 0 else None

    def _forget(self, until: float) -> None:
        """Leaves one mark of what was before: it holds until the next one."""
        while len(self._marks) > 1 and self._marks[1][0] <= until:
            self._marks.popleft()

    def _window_delta(self) -> tuple[float, int, int, int, int, int]:
        now, marks = self._clock(), self._marks
        self._forget(now - RECENT_S)
        if len(marks) < 2:
            return 0.0, 0, 0, 0, 0, 0
        (began, *first), (ended, *last) = marks[0], marks[-1]
        began = max(began, min(now - RECENT_S, marks[1][0] - _LOAD_S))
        deltas = (after - before for before, after in zip(first, last, strict=True))
        computed, looked_up, hit, in_host, on_disk = deltas
        return max(ended, now - _LOAD_S) - began, computed, looked_up, hit, in_host, on_disk


@dataclass(slots=True, eq=False)
class _LastReport:
    """A replica's last counters, those of them that are in the sums, and the start that both belong to."""

    model: str
    start: tuple[str, int]
    counters: dict[str, int] = field(default_factory=dict)
    summed: dict[str, int] = field(default_factory=dict)
    shared_blocks: int = 0


class ReplicaCounters:
    """Sums that never go back: a replica that starts again counts from zero, one that is gone keeps what it counted.

    A load costs the same however much it counts: what came is summed when somebody reads it. Bounded by the number of
    reported replicas and of models they ever served.
    """

    def __init__(self) -> None:
        self._last: dict[str, _LastReport] = {}
        self._unread: dict[_LastReport, None] = {}
        self._sums: dict[str, Counter[str]] = {}
        self._restarts: Counter[str] = Counter()
        self.prefills: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by model, where prompts were computed

    def update(self, address: str, hello: Hello, load: ReplicaLoad) -> None:
        """Takes a replica's new load."""
        start, last = (hello.boot, hello.pid), self._last.get(address)
        if last is None or last.start != start:
            self._restarts[hello.model] += last is not None
            self._sums.setdefault(hello.model, Counter(dict.fromkeys(COUNTER_NAMES, 0)))
            self.remove(address)
            last = self._last[address] = _LastReport(hello.model, start)
        last.counters, last.shared_blocks = load.counters, load.shared_blocks
        self._unread[last] = None

    def disconnected(self, address: str) -> None:
        """Notes that the connection ended: counters stay, the shared blocks of now are unknown."""
        if address in self._last:
            self._last[address].shared_blocks = 0

    def remove(self, address: str) -> None:
        """Removes a replica that no machine reports any more."""
        if (last := self._last.pop(address, None)) is not None:
            self._unread.pop(last, None)
            self._sum(last)

    def _sum(self, last: _LastReport) -> None:
        sums, counted, before = self._sums[last.model], last.counters.get, last.summed.get
        for name in COUNTER_NAMES:
            sums[name] += max(0, counted(name, 0) - before(name, 0))
        last.summed = last.counters

    def sums(self) -> dict[str, dict[str, int]]:
        """By model, a number for each of COUNTER_NAMES. Costs some microseconds for each replica that counted since
        the last call."""
        for last in self._unread:
            self._sum(last)
        self._unread.clear()
        return {model: dict(sums) for model, sums in self._sums.items()}

    def restarts(self) -> dict[str, int]:
        """By model, how often a known replica started again."""
        return dict(self._restarts)

    def shared_blocks(self) -> dict[str, int]:
        """By model, the blocks that two sequences or more read at this moment."""
        shared: Counter[str] = Counter(dict.fromkeys(self._sums, 0))
        for last in self._last.values():
            shared[last.model] += last.shared_blocks
        return dict(shared)
