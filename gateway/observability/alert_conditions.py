"""The conditions of the shipped alert rules over this gateway's own metrics, and the short history that they need. It
knows neither Prometheus' language nor other gateways.

tests/gateway/observability/test_alert_conditions.py runs them on what promtool tests the rules with.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final

Labels = tuple[tuple[str, str], ...]  # sorted by name
Series = dict[Labels, float]
Condition = Callable[["MetricHistory"], Series]  # what the condition holds for, and its value

SAMPLES: Final = 40  # of a series within its window, at most
_CALLS: Final = frozenset(("run", "chat", "completions", "responses", "messages", "embeddings", "rerank"))
_BROKEN: Final = frozenset(("failed", "internal", "replica_lost", "timeout"))
_NONE: Final[Labels] = ()
# How many seconds back a condition looks at each series; the others are looked at as they are now.
WINDOWS_S: Final = {
    "hearth_job_failures_total": 3600,
    "hearth_replica_restarts_total": 900,
    "hearth_wake_wait_seconds_bucket": 600,
    "hearth_machine_moves_total": 900,
    "hearth_days_different_total": 2 * 86_400,
    "hearth_store_outages_total": 3600,
    "hearth_outbox_bytes": 600,
    "hearth_http_answers_total": 300,
    "hearth_requests_total": 1200,
    "hearth_account_refusals_total": 1800,
    "hearth_first_token_seconds_bucket": 300,
    "hearth_gateway_seconds_bucket": 300,
    "hearth_replica_stale_pages_total": 3600,
}
NAMES: Final = frozenset(
    (
        *WINDOWS_S,
        *("hearth_replicas", "hearth_replicas_ready", "hearth_replicas_resident", "hearth_replicas_quarantined"),
        "hearth_replicas_unlike",
        *("hearth_machines_unreachable", "hearth_model_waiting", "hearth_replica_waiting", "hearth_open_requests"),
        *("hearth_store_available", "hearth_settlements_waiting", "hearth_outbox_damaged_files"),
        *("hearth_certificate_end_timestamp_seconds", "hearth_batch_oldest_seconds"),
        *("process_open_fds", "process_max_fds"),
    )
)
UNSEEN: Final = {
    "HearthGatewayDown": "a gateway that is down evaluates nothing; Prometheus or a load balancer has to ask it",
    "HearthOperatorUnseen": "it is about the token that Prometheus has, which this gateway does not know",
}


class MetricHistory:
    """Samples of the series that conditions look at. `now` is seconds since 1970 of the last one."""

    def __init__(self) -> None:
        self.now = 0.0
        self._latest: dict[str, Series] = {}
        self._past: dict[str, deque[tuple[float, Series]]] = {name: deque() for name in WINDOWS_S}
        self._began = math.inf

    def take(self, now: float, latest: Mapping[str, Series]) -> None:
        """Adds a sample of all series."""
        self.now, self._latest = now, dict(latest)
        self._began = min(self._began, now)
        for name, past in self._past.items():
            window_s = WINDOWS_S[name]
            while len(past) > 1 and past[1][0] <= now - window_s:
                past.popleft()
            if not past or now - past[-1][0] >= window_s / SAMPLES:
                past.append((now, latest.get(name, {})))

    def latest(self, name: str, **wanted: str) -> Series:
        return _chosen(self._latest.get(name, {}), wanted)

    def increase(self, name: str, window_s: float = 0, **wanted: str) -> Series:
        """By how much each series grew within the window; one that was not there began at 0. A counter that went back
        began anew."""
        (_, before), grown = self._first(name, window_s), {}
        for labels, value in self.latest(name, **wanted).items():
            start = before.get(labels, 0.0)
            grown[labels] = value - start if value >= start else value
        return grown

    def rate(self, name: str, window_s: float = 0, **wanted: str) -> Series:
        """Growth per second."""
        seconds = self.now - self._first(name, window_s)[0]
        if seconds <= 0:
            return {}
        return {labels: value / seconds for labels, value in self.increase(name, window_s, **wanted).items()}

    def grows(self, name: str) -> Series:
        """The series that have more now than at the beginning of the window, and what they have."""
        _, before = self._first(name, 0)
        return {labels: value for labels, value in self.latest(name).items() if value > before.get(labels, 0.0)}

    def lasts(self, seconds: float) -> bool:
        """Whether the history is so long."""
        return self.now - self._began >= seconds

    def _first(self, name: str, window_s: float) -> tuple[float, Series]:
        """The first sample within the window."""
        since = self.now - (window_s or WINDOWS_S[name])
        return next(((at, series) for at, series in self._past[name] if at > since), (self.now, {}))


def _chosen(series: Series, wanted: Mapping[str, str]) -> Series:
    return {labels: value for labels, value in series.items() if wanted.items() <= dict(labels).items()}


def _by(series: Series, *names: str, how: Callable[[Iterable[float]], float] = sum) -> Series:
    """Series with these labels alone; those that become one are summed, or as `how` says."""
    groups: dict[Labels, list[float]] = {}
    for labels, value in series.items():
        groups.setdefault(tuple(pair for pair in labels if pair[0] in names), []).append(value)
    return {labels: how(values) for labels, values in groups.items()}


def _above(series: Series, bound: float) -> Series:
    return {labels: value for labels, value in series.items() if value > bound}


def _zero(series: Series) -> Series:
    return {labels: value for labels, value in series.items() if value == 0}


def _rounded(series: Series) -> Series:
    return {labels: float(round(value)) for labels, value in series.items()}


def _quantile(buckets: Series, quantile: float, *by: str) -> Series:
    """Like histogram_quantile: linear within a bucket."""
    groups: dict[Labels, list[tuple[float, float]]] = {}
    for labels, value in _by(buckets, "le", *by).items():
        bound = float(dict(labels)["le"].replace("+Inf", "inf"))
        groups.setdefault(tuple(pair for pair in labels if pair[0] != "le"), []).append((bound, value))
    found = {}
    for labels, counts in groups.items():
        counts.sort()
        total = counts[-1][1]
        if total <= 0:
            continue
        low, below = 0.0, 0.0
        for bound, count in counts:
            if count >= quantile * total:
                share = (quantile * total - below) / (count - below) if count > below else 0.0
                found[labels] = low if math.isinf(bound) else low + (bound - low) * share
                break
            low, below = bound, count
    return found


def _share(part: Series, whole: Series, above: float, rate_above: float = 0.1) -> Series:
    """Where the part is more than `above` of the whole, and the whole more than some calls a second."""
    shares = {labels: part.get(labels, 0.0) / value for labels, value in whole.items() if value > rate_above}
    return _above(shares, above)


def _missing(history: MetricHistory) -> Series:
    ready = _by(history.latest("hearth_replicas_ready"), "model")
    known = _by(history.latest("hearth_replicas"), "model")
    return {labels: value for labels, value in known.items() if value > ready.get(labels, 0.0)}


def _thrashing(history: MetricHistory) -> Series:
    moves = [history.rate("hearth_machine_moves_total", kind=kind, ending="done") for kind in ("wake", "start")]
    per_minute = {labels: 60 * value for move in moves for labels, value in move.items()}
    return _above(_by(per_minute, "machine"), 60)


def _awaited(history: MetricHistory) -> Series:
    there = _by(history.latest("hearth_replicas_resident", residency="DEVICE"), "model")
    waiting = _above(_by(history.latest("hearth_model_waiting"), "model"), 0)
    return {labels: value for labels, value in waiting.items() if there.get(labels, 0.0) == 0}


def _outbox_stays(history: MetricHistory) -> Series:
    up = history.latest("hearth_store_available").get(_NONE, 1.0)
    return _above(history.latest("hearth_outbox_bytes"), 0) if up else {}


def _outbox_grows(history: MetricHistory) -> Series:
    return _above(history.grows("hearth_outbox_bytes"), 100e6)


def _calls(history: MetricHistory, status: str) -> tuple[Series, Series]:
    """Calls of models per second that were answered with such a status, and all of them."""
    rates = {
        labels: value
        for labels, value in history.rate("hearth_http_answers_total").items()
        if dict(labels)["route"] in _CALLS
    }
    matching = {labels: value for labels, value in rates.items() if dict(labels)["status"].startswith(status)}
    return {_NONE: sum(matching.values())}, {_NONE: sum(rates.values())}


def _ended(history: MetricHistory, outcomes: Iterable[str]) -> tuple[Series, Series]:
    """Requests per second and model that ended so, and all of them."""
    rates = history.rate("hearth_requests_total", 300)
    matching = {labels: value for labels, value in rates.items() if dict(labels)["outcome"] in outcomes}
    return _by(matching, "model"), _by(rates, "model")


def _hanging(history: MetricHistory) -> Series:
    is_open = _above(history.latest("hearth_open_requests"), 0)
    return is_open if history.lasts(1200) and not sum(history.increase("hearth_requests_total").values()) else {}


def _descriptors(history: MetricHistory) -> Series:
    most = history.latest("process_max_fds").get(_NONE, 0.0)
    return (
        _above({labels: value / most for labels, value in history.latest("process_open_fds").items()}, 0.8)
        if (most)
        else {}
    )


def _certificate(history: MetricHistory) -> Series:
    ends = history.latest("hearth_certificate_end_timestamp_seconds")
    left = {labels: value - history.now for labels, value in ends.items()}
    return {labels: value for labels, value in left.items() if value < 14 * 86_400}


def _refusals(history: MetricHistory) -> Series:
    return _above(_by(history.rate("hearth_account_refusals_total"), "account", "limit"), 1)


CONDITIONS: Final[dict[str, Condition]] = {
    "HearthGatewayNotReady": lambda h: _zero(_by(h.latest("hearth_replicas_ready"))),
    "HearthJobFails": lambda h: _above(_rounded(h.increase("hearth_job_failures_total")), 0),
    "HearthNoReplicaReady": lambda h: _zero(_by(h.latest("hearth_replicas_ready"), "model")),
    "HearthReplicasMissing": _missing,
    "HearthMachineUnreachable": lambda h: _above(h.latest("hearth_machines_unreachable"), 0),
    "HearthReplicaRestarts": lambda h: _above(_rounded(_by(h.increase("hearth_replica_restarts_total"), "model")), 2),
    "HearthWakesSlow": lambda h: _above(_quantile(h.rate("hearth_wake_wait_seconds_bucket"), 0.95, "model"), 10),
    "HearthMovesFailing": lambda h: _above(
        _rounded(_by(h.increase("hearth_machine_moves_total", ending="failed"), "machine", "kind")), 2
    ),
    "HearthThrashing": _thrashing,
    "HearthReplicaQuarantined": lambda h: _above(_by(h.latest("hearth_replicas_quarantined"), "model"), 0),
    "HearthReplicasUnlike": lambda h: _above(_by(h.latest("hearth_replicas_unlike"), "model"), 0),
    "HearthModelAwaited": _awaited,
    "HearthStoreUnavailable": lambda h: _zero(h.latest("hearth_store_available")),
    "HearthLedgerDiffers": lambda h: _above(_rounded(h.increase("hearth_days_different_total")), 0),
    "HearthStoreFlapping": lambda h: _above(_rounded(h.increase("hearth_store_outages_total")), 3),
    "HearthSettlementsWaiting": lambda h: _above(h.latest("hearth_settlements_waiting"), 1000),
    "HearthOutboxStays": _outbox_stays,
    "HearthOutboxGrowing": _outbox_grows,
    "HearthOutboxDamaged": lambda h: _above(h.latest("hearth_outbox_damaged_files"), 0),
    "HearthErrors": lambda h: _share(*_calls(h, "5"), 0.02),
    "HearthBrokenStreams": lambda h: _share(*_ended(h, _BROKEN), 0.02),
    "HearthLimitedSurge": lambda h: _share(*_calls(h, "429"), 0.3),
    "HearthCapacityExceeded": lambda h: _share(*_ended(h, ("capacity_exceeded",)), 0.05),
    "HearthAccountLimited": _refusals,
    "HearthCertificateEnds": _certificate,
    "HearthFirstTokenSlow": lambda h: _above(_quantile(h.rate("hearth_first_token_seconds_bucket"), 0.95, "model"), 5),
    "HearthGatewaySlow": lambda h: _above(_quantile(h.rate("hearth_gateway_seconds_bucket"), 0.95), 0.1),
    "HearthRequestsHang": _hanging,
    "HearthQueueLong": lambda h: _above(_by(h.latest("hearth_replica_waiting"), "model", how=max), 50),
    "HearthBatchesOld": lambda h: _above(_by(h.latest("hearth_batch_oldest_seconds"), "model", how=max), 86_400),
    "HearthStalePages": lambda h: _above(_by(h.increase("hearth_replica_stale_pages_total"), "model"), 0),
    "HearthDescriptors": _descriptors,
}
