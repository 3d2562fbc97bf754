"""Counters and histograms of one gateway, as Prometheus text, in two parts. The public part has catalogue names and the
gateway's own words as labels, and nothing of any tenant: no ids, no text, no queue depths of replicas. The operator's
part names accounts by their ids and says how full replicas are.
"""

import contextlib
from collections import Counter as Count
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from engine.protocol import frames
from engine.protocol.types import Residency
from gateway.cluster.fleet import ReplicaFleet
from gateway.cluster.replica_counters import EVICTION_CAUSES, QUEUE_REJECTIONS, ReplicaCounters
from gateway.config import SettingsError
from gateway.http import tls
from gateway.observability.account_usage import AccountUsage
from gateway.observability.store_health import StoreHealth
from tenants.limits import outbox
from tenants.limits.quota import Quota
from tenants.limits.reconciler import Reconciler
from tenants.limits.reservation import CallUsage
from tenants.records.batches import QueueDepth

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
OUTCOMES_MAX: Final = 64
_FIRST_TOKEN_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_OWN_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 1)
_WAKE_S: Final = (0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1, 1.5, 2, 3, 5, 10, 20, 30, 60)
_MOVES: Final = ("wake", "sleep", "start", "end", "grow", "shrink")
_TOTAL_S: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)


class Metrics:
    """Two registries, a public one and the operator's. `finished` costs a few microseconds a request; nothing is
    counted per token. The first `accounts` accounts have series of their own, the others are summed.

    Counters of replicas' caches are the same at every gateway: take them from one gateway, do not add them up.
    """

    def __init__(self, accounts: int) -> None:
        self.registry = CollectorRegistry()
        self.operator_registry = CollectorRegistry()
        self.account_usage = AccountUsage(accounts)
        ProcessCollector(registry=self.operator_registry)
        self._requests = self._counter("hearth_requests", "Inference requests by how they ended", ["model", "outcome"])
        self._tokens = self._counter("hearth_tokens", "Model tokens of settled requests", ["model", "kind"])
        self._first_token = self._histogram("hearth_first_token_seconds", "Request to first token", _FIRST_TOKEN_S)
        self._gateway_seconds = self._histogram(
            "hearth_gateway_seconds", "Request to first token, without what its replica took", _OWN_S
        )
        self._total = self._histogram("hearth_request_seconds", "Request to its end", _TOTAL_S)
        self._wake = self._histogram(
            "hearth_wake_wait_seconds", "Waiting of requests whose model was not on a device", _WAKE_S
        )
        self._answers = self._counter("hearth_http_answers", "HTTP answers by route and status", ["route", "status"])
        self.open_requests = Gauge("hearth_open_requests", "Inference requests in progress", registry=self.registry)
        self._outcomes: set[str] = set()

    def watch(
        self,
        models: Sequence[str],
        fleet: ReplicaFleet,
        outage: StoreHealth,
        quota: Quota,
        reconciler: Reconciler,
        outbox_folder: Path,
    ) -> None:
        """Reads the state of these parts whenever the text is asked for."""
        self.registry.register(_Caches(fleet.counters))
        self.registry.register(_Replicas(models, fleet))
        self.registry.register(_Store(outage, quota, reconciler, outbox_folder))
        self.operator_registry.register(_Queues(models, fleet))
        self.operator_registry.register(_Machines(models, fleet))

    def watch_batches(self, queue: "BatchQueueGauges", now: Callable[[], float]) -> None:
        self.operator_registry.register(_Batches(queue, now))

    def watch_certificate(self, path: str) -> None:
        """Reads the file anew for each text, in some 20 µs."""
        self.registry.register(_Certificate(path))

    def finished(self, model: str, spent: CallUsage, own_s: float | None) -> None:
        """Counts a request that ended; `model` is its catalogue name, `own_s` the gateway's part of the first token."""
        self.count(model, spent)
        self._total.labels(model).observe(spent.total_ms / 1000)
        if spent.first_token_ms is not None:
            self._first_token.labels(model).observe(spent.first_token_ms / 1000)
        if own_s is not None:
            self._gateway_seconds.labels(model).observe(own_s)

    def count(self, model: str, spent: CallUsage) -> None:
        """Counts a request without its times, for nobody waited for it."""
        self._requests.labels(model, self._capped(spent.outcome)).inc()
        self._tokens.labels(model, "prompt").inc(spent.prompt_tokens)
        self._tokens.labels(model, "cached").inc(spent.cached_tokens)
        self._tokens.labels(model, "completion").inc(spent.completion_tokens)

    def observe_wake_wait(self, model: str, seconds: float) -> None:
        """Observes how long a request waited for a sleeping model, until a replica began with it or it was refused."""
        self._wake.labels(model).observe(seconds)

    def count_answer(self, route: str, status: int | None) -> None:
        """Counts an HTTP exchange that ended; None where the client left before anything was sent."""
        self._answers.labels(route, str(status or "none")).inc()

    def public_text(self) -> bytes:
        """The public part."""
        return generate_latest(self.registry)

    def operator_text(self) -> bytes:
        """The public part and the operator's."""
        return (
            generate_latest(self.registry)
            + generate_latest(self.operator_registry)
            + _accounts_text(self.account_usage)
        )

    def _capped(self, outcome: str) -> str:
        if outcome not in self._outcomes and len(self._outcomes) >= OUTCOMES_MAX:
            return "other"
        self._outcomes.add(outcome)
        return outcome

    def _counter(self, name: str, says: str, labels: list[str]) -> Counter:
        return Counter(name, says, labels, registry=self.registry)

    def _histogram(self, name: str, says: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, says, ["model"], buckets=buckets, registry=self.registry)


class _Caches(Collector):
    """The prefix caches of all replicas, summed by model."""

    def __init__(self, tally: ReplicaCounters) -> None:
        self._tally = tally

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        sums = self._tally.sums()
        for counter, help_text in (
            ("lookups", "Prompts looked up in the prefix cache"),
            ("lookup_tokens", "Tokens of the prompts looked up"),
            ("hit_tokens", "Tokens found there, those of preempted sequences again"),
            ("inserted_blocks", "KV blocks put into the prefix cache"),
            ("duplicate_blocks", "KV blocks that were computed though the cache had them by then"),
            ("spared_keys", "Keys that a sequence did not read as another one of its group did"),
        ):
            family = CounterMetricFamily(f"hearth_prefix_{counter}", help_text, labels=["model"])
            for model, counts in sums.items():
                family.add_metric([model], counts[counter])
            yield family
        evicted = CounterMetricFamily("hearth_prefix_evicted_blocks", "KV blocks evicted", labels=["model", "cause"])
        for model, counts in sums.items():
            for cause in EVICTION_CAUSES:
                evicted.add_metric([model, cause], counts[f"evicted_{cause}_blocks"])
        yield evicted
        shared = GaugeMetricFamily("hearth_prefix_shared_blocks", "KV blocks two sequences read now", labels=["model"])
        for model, blocks in self._tally.shared_blocks().items():
            shared.add_metric([model], blocks)
        yield shared


class _Replicas(Collector):
    """How many replicas there are of each model, where, and how many can serve, as this gateway sees them."""

    def __init__(self, models: Sequence[str], fleet: ReplicaFleet) -> None:
        self._models = models
        self._fleet = fleet

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        seen = self._fleet.replicas()
        known = Count(replica.model for replica in seen)
        ready = Count(replica.model for replica in seen if replica.expected_s is not None)
        resident = Count((replica.model, replica.state.residency) for replica in seen)
        restarts = self._fleet.counters.restarts()
        for name, help_text, counts in (
            ("hearth_replicas", "Replicas that machines tell of", known),
            ("hearth_replicas_ready", "Replicas that serve, or do once they are asked for", ready),
        ):
            gauge = GaugeMetricFamily(name, help_text, labels=["model"])
            for model in self._models:
                gauge.add_metric([model], counts[model])
            yield gauge
        where = GaugeMetricFamily("hearth_replicas_resident", "Where their weights are", labels=["model", "residency"])
        for model in self._models:
            for residency in Residency:
                where.add_metric([model, residency.name], resident[model, residency])
        yield where
        counter = CounterMetricFamily(
            "hearth_replica_restarts", "Replicas' processes that ended and began anew", labels=["model"]
        )
        for model in self._models:
            counter.add_metric([model], restarts.get(model, 0))
        yield counter
        machines = GaugeMetricFamily("hearth_machines_unreachable", "Machines of the configuration without connection")
        machines.add_metric([], len(self._fleet.problems()))
        yield machines


class _Store(Collector):
    """Whether the store answers, and what waits to be written to it."""

    def __init__(self, outage: StoreHealth, quota: Quota, reconciler: Reconciler, outbox_folder: Path) -> None:
        self._outage = outage
        self._quota = quota
        self._reconciler = reconciler
        self._folder = outbox_folder

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        for name, help_text, count in (
            ("hearth_store_outages", "Times that the store stopped to answer", self._outage.outages),
            ("hearth_days_different", "Accounts' days whose counters differ from records", self._reconciler.different),
        ):
            counter = CounterMetricFamily(name, help_text)
            counter.add_metric([], count)
            yield counter
        for name, help_text, count in (
            ("hearth_store_available", "1, or 0 from a failed decision to the next one written", not self._outage.down),
            ("hearth_reservations_open", "Reservations that are not settled", self._quota.open),
            ("hearth_settlements_waiting", "Settlements neither in store nor outbox", self._quota.unwritten),
            ("hearth_outbox_bytes", "Settlements on this disk that wait for the store", self._bytes()),
            ("hearth_outbox_damaged_files", "Outbox files with lines that nobody can read", self._damaged()),
        ):
            gauge = GaugeMetricFamily(name, help_text)
            gauge.add_metric([], count)
            yield gauge

    def _bytes(self) -> int:
        """The bytes of the outbox files; another gateway may remove one at any moment."""
        total = 0
        for path in self._folder.glob(f"*{outbox.SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
        return total

    def _damaged(self) -> int:
        return sum(1 for _ in self._folder.glob(f"*{outbox.DAMAGED}"))


class _Queues(Collector):
    """Sequences at replicas, by model, of all gateways together, as last reported."""

    def __init__(self, models: Sequence[str], fleet: ReplicaFleet) -> None:
        self._models = models
        self._fleet = fleet

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        loads = [(replica.model, replica.load) for replica in self._fleet.replicas() if replica.load is not None]
        for name, help_text, counts in (
            ("running", "Sequences that run", [(model, load.running) for model, load in loads]),
            ("waiting", "Sequences that wait for their turn", [(model, load.waiting) for model, load in loads]),
            ("free_blocks", "KV blocks that hold nothing", [(model, load.free_blocks) for model, load in loads]),
            ("cached_blocks", "KV blocks in the prefix cache", [(model, load.cached_blocks) for model, load in loads]),
            ("mapped_blocks", "KV blocks that have memory", [(model, load.blocks) for model, load in loads]),
        ):
            gauge = GaugeMetricFamily(f"hearth_replica_{name}", help_text, labels=["model"])
            for model in self._models:
                gauge.add_metric([model], sum(count for of, count in counts if of == model))
            yield gauge
        sums = self._fleet.counters.sums()
        away = CounterMetricFamily(
            "hearth_replica_turned_away", "Requests that found no place in the queue", labels=["model", "why"]
        )
        preempted = CounterMetricFamily("hearth_replica_preemptions", "Sequences that gave way", labels=["model"])
        stale = CounterMetricFamily("hearth_replica_stale_pages", "KV pages found changed, unread", labels=["model"])
        for model, counted in sums.items():
            for why in QUEUE_REJECTIONS:
                away.add_metric([model, why.removesuffix("_requests")], counted[why])
            preempted.add_metric([model], counted["preemptions"])
            stale.add_metric([model], counted["stale_pages"])
        yield from (away, preempted, stale)


class _Machines(Collector):
    """Memory and moves of machines, by their addresses, and requests that wait for models."""

    def __init__(self, models: Sequence[str], fleet: ReplicaFleet) -> None:
        self._models = models
        self._fleet = fleet

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        waiting = GaugeMetricFamily("hearth_model_waiting", "Requests that wait here for a model", labels=["model"])
        quarantined = GaugeMetricFamily(
            "hearth_replicas_quarantined", "Replicas that died too often to be started", labels=["model"]
        )
        quarantined_counts = Count(replica.model for replica in self._fleet.replicas() if replica.state.quarantined)
        for model in self._models:
            waiting.add_metric([model], self._fleet.waiting(model))
            quarantined.add_metric([model], quarantined_counts[model])
        yield from (waiting, quarantined)
        reports = {machine.address: machine.report for machine in self._fleet.machines()}
        yield _moves(reports)
        yield from _memory(reports)


def _moves(reports: Mapping[str, frames.MachineState]) -> CounterMetricFamily:
    """A machine that starts again counts from zero."""
    counter = CounterMetricFamily("hearth_machine_moves", "Moves of replicas", labels=["machine", "kind", "ending"])
    for machine, fleet in reports.items():
        for kind in _MOVES:
            counter.add_metric([machine, kind, "done"], fleet.moves.get(kind, 0))
            counter.add_metric([machine, kind, "failed"], fleet.moves.get(f"{kind}_failed", 0))
    return counter


def _memory(reports: Mapping[str, frames.MachineState]) -> Iterator[GaugeMetricFamily]:
    """Memory that replicas hold, and its budget: of each device, by its index, and of the host."""
    device_held = GaugeMetricFamily(
        "hearth_device_held_bytes", "Held of a device's memory", labels=["machine", "device"]
    )
    budget = GaugeMetricFamily("hearth_device_budget_bytes", "Of it, for replicas", labels=["machine", "device"])
    host_held = GaugeMetricFamily("hearth_host_held_bytes", "Held of host memory by models", labels=["machine"])
    host_budget = GaugeMetricFamily("hearth_host_budget_bytes", "Of it, for models that sleep", labels=["machine"])
    for machine, fleet in reports.items():
        for index, device in enumerate(fleet.devices):
            device_held.add_metric([machine, str(index)], device.held_bytes)
            budget.add_metric([machine, str(index)], device.budget_bytes)
        host_held.add_metric([machine], fleet.memory_bytes)
        host_budget.add_metric([machine], fleet.memory_budget_bytes)
    yield from (device_held, budget, host_held, host_budget)


class BatchQueueGauges(Protocol):
    """Batch items that wait, in all, and that this gateway runs, by model."""

    waiting: Mapping[str, QueueDepth]
    running: Count[str]


class _Batches(Collector):
    """Queued requests, by model. The waiting ones are the same at every gateway."""

    def __init__(self, queue: BatchQueueGauges, now: Callable[[], float]) -> None:
        self._queue = queue
        self._now = now

    def collect(self) -> Iterator[GaugeMetricFamily]:
        waiting, now = self._queue.waiting, self._now()
        for name, help_text, counts in (
            ("items_waiting", "Queued requests that have not ended", {of: one.items for of, one in waiting.items()}),
            ("items_running", "Those of them that this gateway has given to replicas", dict(self._queue.running)),
            ("oldest_seconds", "Age of the oldest batch", {of: now - one.oldest_at for of, one in waiting.items()}),
        ):
            gauge = GaugeMetricFamily(f"hearth_batch_{name}", help_text, labels=["model"])
            for model in self._queue.running:
                gauge.add_metric([model], counts.get(model, 0))
            yield gauge


class _Certificate(Collector):
    """The end of the certificate in the file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def collect(self) -> Iterator[GaugeMetricFamily]:
        gauge = GaugeMetricFamily(
            "hearth_certificate_end_timestamp_seconds", "When it ends, since 1970; 0 where its file cannot be read"
        )
        try:
            gauge.add_metric([], tls.expiry(self._path).timestamp())
        except SettingsError:
            gauge.add_metric([], 0)
        yield gauge


def _accounts_text(shares: AccountUsage) -> bytes:
    """The series of accounts and plans, written by hand in a quarter of the library's time: a scrape of hundreds
    of accounts must not hold up streams. Ids, plans and limits have no character that needs an escape.
    """
    requests, tokens, neurons, refusals = [], [], [], []
    for (account, plan), row in shares.rows.items():
        labels = f'account="{account}",plan="{plan}"'
        requests += [f'{{{labels},ending="{ending}"}} {count}' for ending, count in row.outcomes.items()]
        tokens += [f'{{{labels},kind="{kind}"}} {count}' for kind, count in row.tokens.items()]
        neurons.append(f"{{{labels}}} {row.neurons}")
        refusals += [f'{{{labels},limit="{limit}"}} {count}' for limit, count in row.refused.items()]
    lines = (
        *_counter_lines("hearth_account_requests_total", "Inference requests by whose doing their end was", requests),
        *_counter_lines("hearth_account_tokens_total", "Model tokens of settled requests", tokens),
        *_counter_lines("hearth_account_neurons_total", "Neurons of settled requests", neurons),
        *_counter_lines("hearth_account_refusals_total", "Requests over a limit of account or token", refusals),
    )
    return "".join(f"{line}\n" for line in lines).encode()


def _counter_lines(name: str, says: str, series: list[str]) -> Iterator[str]:
    yield from (f"# HELP {name} {says}", f"# TYPE {name} counter")
    yield from (name + one for one in series)
