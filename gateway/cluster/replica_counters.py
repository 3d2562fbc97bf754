"""The counters of replicas, summed by model, and the recent load of one replica. It knows neither connections nor
tenants."""

from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

from engine.protocol.frames import Hello, ReplicaLoad

EVICTION_CAUSES: Final = ("space", "cap", "epoch", "age")  # why blocks were evicted
QUEUE_REJECTIONS: Final = ("refused_full", "refused_deadline", "expired_requests", "displaced_requests")
COUNTER_NAMES: Final = (
    *("lookups", "lookup_tokens", "hit_tokens", "inserted_blocks", "duplicate_blocks", "spared_keys"),
    *(f"evicted_{cause}_blocks" for cause in EVICTION_CAUSES),
    *QUEUE_REJECTIONS,
    *("preemptions", "stale_pages"),
)
RECENT_S: Final = 5.0


class RecentLoad:
    """The counters of one start of a replica over its last seconds."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int, int, int]] = deque()

    def append(self, now: float, load: ReplicaLoad) -> None:
        counted = load.counters.get
        marks = self._marks
        marks.append((now, counted("computed_tokens", 0), counted("lookup_tokens", 0), counted("hit_tokens", 0)))
        while now - marks[0][0] > RECENT_S:
            marks.popleft()

    @property
    def tokens_per_s(self) -> float:
        """Tokens of prompts and answers that its steps computed, per second."""
        seconds, tokens, _, _ = self._window_delta()
        return tokens / seconds if seconds > 0 else 0.0

    @property
    def hit_ratio(self) -> float | None:
        """The share of looked-up prompt tokens that the cache had; None without a look-up."""
        _, _, looked_up, hit = self._window_delta()
        return min(max(hit / looked_up, 0.0), 1.0) if looked_up > 0 else None

    def _window_delta(self) -> tuple[float, int, int, int]:
        if not self._marks:
            return 0.0, 0, 0, 0
        (began, *first), (ended, *last) = self._marks[0], self._marks[-1]
        computed, looked_up, hit = (after - before for before, after in zip(first, last, strict=True))
        return ended - began, computed, looked_up, hit


@dataclass(slots=True)
class _LastReport:
    """A replica's last counters, and the start of the replica that they belong to."""

    model: str
    start: tuple[str, int]
    counters: dict[str, int]
    shared_blocks: int


class ReplicaCounters:
    """Sums that never go back: a replica that starts again counts from zero, one that is gone keeps what it counted.

    Bounded by the number of reported replicas and of models they ever served.
    """

    def __init__(self) -> None:
        self._last: dict[str, _LastReport] = {}
        self._sums: dict[str, Counter[str]] = {}
        self._restarts: Counter[str] = Counter()

    def update(self, address: str, hello: Hello, load: ReplicaLoad) -> None:
        """Adds a replica's new load. Costs a few microseconds."""
        start = (hello.boot, hello.pid)
        last = self._last.get(address)
        before = last.counters if last is not None and last.start == start else {}
        self._restarts[hello.model] += last is not None and last.start != start
        counters = {name: load.counters.get(name, 0) for name in COUNTER_NAMES}
        sums = self._sums.setdefault(hello.model, Counter())
        for name, count in counters.items():
            sums[name] += max(0, count - before.get(name, 0))
        self._last[address] = _LastReport(hello.model, start, counters, load.shared_blocks)

    def disconnected(self, address: str) -> None:
        """Notes that the connection ended: counters stay, the shared blocks of now are unknown."""
        if address in self._last:
            self._last[address].shared_blocks = 0

    def remove(self, address: str) -> None:
        """Removes a replica that no machine reports any more."""
        self._last.pop(address, None)

    def sums(self) -> dict[str, dict[str, int]]:
        """By model, a number for each of COUNTER_NAMES."""
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
