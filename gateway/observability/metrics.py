"""Counters and histograms of one gateway, as Prometheus text, in two parts. The public part has catalogue names and the
gateway's own words as labels, and nothing of any tenant: no ids, no text, no queue depths of replicas. The operator's
part names accounts by their ids, with a series of their names, and says how full replicas are.
"""

import time
from collections import Counter as Count
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily as Counters
from prometheus_client.core import GaugeMetricFamily as Gauges
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from engine.protocol.types import Residency
from gateway.cluster.fleet import ReplicaFleet
from gateway.cluster.replica_counters import EVICTION_CAUSES, QUEUE_REJECTIONS, ReplicaCounters
from gateway.http import tls
from gateway.observability.account_usage import AccountUsage
from gateway.observability.alerts import AlertWatch
from gateway.observability.store_health import StoreHealth
from gateway.observability.store_state import StoreState, store_state
from gateway.settings.config import SettingsError
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


ServedNames = Callable[[], Sequence[str]]  # of the models that are served now


class Metrics:
    """Two registries, a public one and the operator's. `finished` costs a few microseconds a request; nothing is
    counted per token. The first `accounts` accounts have series of their own, the others are summed. Alerts are
    evaluated over both registries, and call this gateway `instance`.

    Counters of replicas' caches are the same at every gateway: take them from one gateway, do not add them up.
    """

    def __init__(self, accounts: int, instance: str = "", clock: Callable[[], float] = time.time) -> None:
        self.registry = CollectorRegistry()
        self.operator_registry = CollectorRegistry()
        self.account_usage = AccountUsage(accounts)
        self.alerts = AlertWatch(self.collect, instance, clock)
        ProcessCollector(registry=self.operator_registry)
        counter, histogram = partial(Counter, registry=self.registry), partial(Histogram, registry=self.registry)
        self._requests = counter("hearth_requests", "Inference requests by how they ended", ["model", "outcome"])
        self._tokens = counter("hearth_tokens", "Model tokens of settled requests", ["model", "kind"])
        self._answers = counter("hearth_http_answers", "HTTP answers by route and status", ["route", "status"])
        self.open_requests = Gauge("hearth_open_requests", "Inference requests in progress", registry=self.registry)
        self._first_token, self._gateway_seconds, self._total, self._wake = (
            histogram(name, title, ["model"], buckets=buckets)
            for name, title, buckets in (
                ("hearth_first_token_seconds", "Request to first token", _FIRST_TOKEN_S),
                ("hearth_gateway_seconds", "Request to first token, without what its replica took", _OWN_S),
                ("hearth_request_seconds", "Request to its end", _TOTAL_S),
                ("hearth_wake_wait_seconds", "Waiting of requests whose model was not on a device", _WAKE_S),
            )
        )
        self._outcomes: set[str] = set()

    def watch(
        self,
        models: ServedNames,
        fleet: ReplicaFleet,
        health: StoreHealth,
        quota: Quota,
        reconciler: Reconciler,
        outbox_folder: Path,
    ) -> None:
        """Reads the state of these parts whenever the text is asked for."""
        self.registry.register(_Source(partial(_caches, fleet.counters)))
        self.registry.register(_Source(partial(_replicas, models, fleet)))
        self.store_state = partial(store_state, health, quota, reconciler, outbox_folder)
        self.registry.register(_Source(partial(_store, self.store_state)))
        self.operator_registry.register(_Source(partial(_queues, models, fleet)))
        self.operator_registry.register(_Source(partial(_machines, models, fleet)))
        self.operator_registry.register(_Source(partial(_ranks, fleet)))

    def watch_batches(self, queue: "BatchQueueGauges", now: Callable[[], float]) -> None:
        self.operator_registry.register(_Source(partial(_batches, queue, now)))

    def watch_certificate(self, path: str) -> None:
        """Reads the file anew for each text, in some 20 µs."""
        self.registry.register(_Source(partial(_certificate, path)))

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

    def count_job_failures(self, jobs: Iterable[str]) -> Callable[[str], None]:
        """A function that counts a failure of one of these background jobs."""
        title = "Background jobs of the gateway that failed"
        failures = Counter("hearth_job_failures", title, ["background_job"], registry=self.registry)
        for job in jobs:
            failures.labels(job)
        return lambda job: failures.labels(job).inc()

    def observe_wake_wait(self, model: str, seconds: float) -> None:
        """Observes how long a request waited for a sleeping model, until a replica began with it or it was refused."""
        self._wake.labels(model).observe(seconds)

    def count_answer(self, route: str, status: int | None) -> None:
        """Counts an HTTP exchange that ended; None where the client left before anything was sent."""
        self._answers.labels(route, str(status or "none")).inc()

    def collect(self) -> Iterator[Metric]:
        """All families, and refusals by account, for the gateway's own alerts."""
        yield from self.registry.collect()
        yield from self.operator_registry.collect()
        refused = (
            ([account, plan, limit], count)
            for (account, plan), row in self.account_usage.rows.items()
            for limit, count in row.refused.items()
        )
        labels = ["account", "plan", "limit"]
        yield _family(Counters, "hearth_account_refusals", "Requests over a limit", labels, refused)

    def public_text(self) -> bytes:
        """The public part."""
        return generate_latest(self.registry)

    def operator_text(self) -> bytes:
        """The public part and the operator's."""
        return self.public_text() + generate_latest(self.operator_registry) + _accounts_text(self.account_usage)

    def _capped(self, outcome: str) -> str:
        if outcome not in self._outcomes and len(self._outcomes) >= OUTCOMES_MAX:
            return "other"
        self._outcomes.add(outcome)
        return outcome


class _Source(Collector):
    """Families that a function reads whenever the text is asked for."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


_Kind = type[Counters] | type[Gauges]
_Samples = Iterable[tuple[Sequence[str], float]]  # values of the labels, and the number


def _family(kind: _Kind, name: str, title: str, labels: Sequence[str], samples: _Samples) -> Metric:
    family = kind(name, title, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family


def _by_model(kind: _Kind, name: str, title: str, numbers: Mapping[str, float]) -> Metric:
    return _family(kind, name, title, ["model"], (([model], number) for model, number in numbers.items()))


_TIER_COUNTERS: Final = {
    "host": (
        ("hit_tokens", "Tokens of prompts whose KV came back from host memory"),
        ("stored_bytes", "Bytes of KV copied to host memory"),
        ("loaded_bytes", "Bytes of KV copied back from host memory"),
        ("evicted_blocks", "KV blocks in host memory that gave way to others"),
        ("refused_blocks", "KV blocks that found no place in host memory"),
        ("swept_blocks", "KV blocks erased in host memory, past their time or epoch"),
    ),
    "disk": (
        ("hit_tokens", "Those of these tokens whose KV came into host memory from disk"),
        ("stored_bytes", "Bytes of KV written to disk"),
        ("loaded_bytes", "Bytes of KV read back from disk"),
        ("evicted_blocks", "KV blocks on disk that gave way to others"),
        ("refused_blocks", "KV blocks that found no place on disk"),
        ("swept_blocks", "KV blocks erased on disk, past their time or epoch"),
        ("corrupt_blocks", "KV blocks on disk that were not what was written, and were computed again"),
        ("late_fetches", "Prompts that waited for the disk for as long as they may, and went on without it"),
        ("slower_blocks", "KV blocks on disk that were computed again, which took less time"),
        ("ended", "Replicas whose disk was full or failed: they go on without it"),
    ),
    "handover": (
        ("moved", "Sequences that went on at another replica with their KV"),
        ("failed", "Sequences that were to, and stayed"),
        ("sent_blocks", "KV blocks sent to other replicas"),
        ("window_blocks", "KV blocks of these that one GPU copied to another"),
        ("fabric_blocks", "KV blocks of these that NIXL wrote over the hosts' fabric"),
        ("off_fabric", "Sequences that went by TCP, in part or in whole, though their host has a fabric"),
        ("claimed_blocks", "KV blocks of other replicas that sequences went on with"),
        ("corrupt_blocks", "KV blocks that came otherwise than they were sent, and were computed again"),
        ("lapsed", "Sequences whose KV came, and which did not in time"),
    ),
}


def _caches(counters: ReplicaCounters) -> Iterator[Metric]:
    """The prefix caches of all replicas, summed by model."""
    sums = counters.sums()
    for name, title in (
        ("lookups", "Prompts looked up in the prefix cache"),
        ("lookup_tokens", "Tokens of the prompts looked up"),
        ("hit_tokens", "Tokens found there, those of preempted sequences again"),
        ("inserted_blocks", "KV blocks put into the prefix cache"),
        ("duplicate_blocks", "KV blocks that were computed though the cache had them by then"),
        ("spared_keys", "Keys that a sequence did not read as another one of its group did"),
    ):
        counts = {model: counted[name] for model, counted in sums.items()}
        yield _by_model(Counters, f"hearth_prefix_{name}", title, counts)
    evicted = (
        ([model, cause], counted[f"evicted_{cause}_blocks"])
        for model, counted in sums.items()
        for cause in EVICTION_CAUSES
    )
    labels = ["model", "cause"]
    yield _family(Counters, "hearth_prefix_evicted_blocks", "KV blocks evicted", labels, evicted)
    for tier, counted_names in _TIER_COUNTERS.items():
        for name, title in counted_names:
            counts = {model: counted[f"{tier}_{name}"] for model, counted in sums.items()}
            yield _by_model(Counters, f"hearth_{tier}_kv_{name}", title, counts)
    places = (([model, why], count) for model, counts in counters.prefills.items() for why, count in counts.items())
    title = "Calls whose prompt another replica could compute, by why it did, or did not"
    yield _family(Counters, "hearth_prefills", title, ["model", "why"], places)
    for tier, title in (
        ("host", "Steps' time that KV from host memory spared"),
        ("disk", "The part of it that KV from disk spared"),
    ):
        saved = {model: counted[f"{tier}_saved_ms"] / 1e3 for model, counted in sums.items()}
        yield _by_model(Counters, f"hearth_{tier}_kv_saved_seconds", title, saved)
    title = "KV blocks two sequences read now"
    yield _by_model(Gauges, "hearth_prefix_shared_blocks", title, counters.shared_blocks())


def _replicas(served: ServedNames, fleet: ReplicaFleet) -> Iterator[Metric]:
    """How many replicas there are of each model, where, and how many can serve, as this gateway sees them."""
    models, replicas, restarts = served(), fleet.replicas(), Count(fleet.counters.restarts())
    reported = Count(replica.model for replica in replicas)
    ready = Count(replica.model for replica in replicas if replica.expected_s is not None)
    unlike = Count(replica.model for replica in replicas if replica.differs)
    for kind, name, title, counts in (
        (Gauges, "hearth_replicas", "Replicas that machines tell of", reported),
        (Gauges, "hearth_replicas_ready", "Replicas that serve, or do once they are asked for", ready),
        (Gauges, "hearth_replicas_unlike", "Replicas that get no calls: most of their name compute otherwise", unlike),
        (Counters, "hearth_replica_restarts", "Replicas' processes that ended and began anew", restarts),
    ):
        yield _by_model(kind, name, title, {model: counts[model] for model in models})
    resident = Count((replica.model, replica.state.residency) for replica in replicas)
    places = (([model, place.name], resident[model, place]) for model in models for place in Residency)
    labels = ["model", "residency"]
    yield _family(Gauges, "hearth_replicas_resident", "Where their weights are", labels, places)
    title = "Machines of the configuration without connection"
    yield Gauges("hearth_machines_unreachable", title, len(fleet.problems()))


def _store(read: Callable[[], StoreState]) -> Iterator[Metric]:
    """Whether the store answers, and what waits to be written to it."""
    state = read()
    for kind, name, title, number in (
        (Counters, "store_outages", "Times that the store stopped to answer", state.outages),
        (Counters, "days_different", "Accounts' days whose counters differ from records", state.different_days),
        (Gauges, "store_available", "1, or 0 from a failed decision to the next one written", state.available),
        (Gauges, "reservations_open", "Reservations that are not settled", state.open_reservations),
        (Gauges, "settlements_waiting", "Settlements neither in store nor outbox", state.unsettled),
        (Gauges, "outbox_bytes", "Settlements on this disk that wait for the store", state.outbox_bytes),
        (Gauges, "outbox_damaged_files", "Outbox files with lines that nobody can read", state.outbox_damaged_files),
    ):
        yield kind(f"hearth_{name}", title, number)


def _queues(served: ServedNames, fleet: ReplicaFleet) -> Iterator[Metric]:
    """Sequences at replicas, by model, of all gateways together, as last reported."""
    models = served()
    loads = [(replica.model, replica.load) for replica in fleet.replicas() if replica.load is not None]
    for name, field, title in (
        ("running", "running", "Sequences that run"),
        ("waiting", "waiting", "Sequences that wait for their turn"),
        ("free_blocks", "free_blocks", "KV blocks that hold nothing"),
        ("cached_blocks", "cached_blocks", "KV blocks in the prefix cache"),
        ("mapped_blocks", "blocks", "KV blocks that have memory"),
    ):
        counts = {model: sum(getattr(load, field) for of, load in loads if of == model) for model in models}
        yield _by_model(Gauges, f"hearth_replica_{name}", title, counts)
    sums = fleet.counters.sums()
    rejected = (
        ([model, why.removesuffix("_requests")], counted[why])
        for model, counted in sums.items()
        for why in QUEUE_REJECTIONS
    )
    title = "Requests that found no place in the queue"
    yield _family(Counters, "hearth_replica_turned_away", title, ["model", "why"], rejected)
    for name, title in (
        *(("preemptions", "Sequences that gave way"), ("stale_pages", "KV pages found changed, unread")),
        ("traded_extents", "KV extents that one group of layers got of another"),
    ):
        counts = {model: counted[name] for model, counted in sums.items()}
        yield _by_model(Counters, f"hearth_replica_{name}", title, counts)


def _machines(served: ServedNames, fleet: ReplicaFleet) -> Iterator[Metric]:
    """Memory and moves of machines, by their addresses, and requests that wait for models. Memory is that of replicas,
    and its budget: of each device, by its index, and of the host. A machine that starts again counts from zero."""
    models = served()
    waiting = {model: fleet.waiting(model) for model in models}
    yield _by_model(Gauges, "hearth_model_waiting", "Requests that wait here for a model", waiting)
    dead = Count(replica.model for replica in fleet.replicas() if replica.state.quarantined)
    title, quarantined = "Replicas that died too often to be started", {model: dead[model] for model in models}
    yield _by_model(Gauges, "hearth_replicas_quarantined", title, quarantined)
    reports = [(machine.address, machine.report) for machine in fleet.machines()]
    moves = (
        ([address, kind, ending], report.moves.get(kind + suffix, 0))
        for address, report in reports
        for kind in _MOVES
        for ending, suffix in (("done", ""), ("failed", "_failed"))
    )
    labels = ["machine", "kind", "ending"]
    yield _family(Counters, "hearth_machine_moves", "Moves of replicas", labels, moves)
    hosts = [([address], report) for address, report in reports]
    devices = [([*host, str(index)], device) for host, report in hosts for index, device in enumerate(report.devices)]
    for name, title, labels, rows, field in (
        ("device_held", "Held of a device's memory", ["machine", "device"], devices, "held_bytes"),
        ("device_budget", "Of it, for replicas", ["machine", "device"], devices, "budget_bytes"),
        ("host_held", "Held of host memory by models", ["machine"], hosts, "memory_bytes"),
        ("host_budget", "Of it, for models that sleep", ["machine"], hosts, "memory_budget_bytes"),
    ):
        yield _family(Gauges, f"hearth_{name}_bytes", title, labels, ((row, getattr(of, field)) for row, of in rows))


def _ranks(fleet: ReplicaFleet) -> Iterator[Metric]:
    """The ranks of replicas that have several, by model and machine."""
    loads = [
        ((replica.model, replica.machine, str(rank)), load)
        for replica in fleet.replicas()
        if replica.load is not None
        for rank, load in enumerate(replica.load.ranks)
    ]
    for kind, name, title, numbers in (
        (Counters, "steps", "Steps of a rank", [(key, load.steps) for key, load in loads]),
        (Counters, "waited_seconds", "Waits for other ranks", [(key, load.waited_ms / 1e3) for key, load in loads]),
        (Gauges, "device_bytes", "Held by a rank of its device", [(key, load.device_bytes) for key, load in loads]),
    ):
        sums: dict[tuple[str, str, str], float] = {}  # of all replicas of a model on a machine
        for key, number in numbers:
            sums[key] = sums.get(key, 0) + number
        labels = ["model", "machine", "rank"]
        yield _family(kind, f"hearth_rank_{name}", title, labels, ((list(key), total) for key, total in sums.items()))


class BatchQueueGauges(Protocol):
    """Batch items that wait, in all, and that this gateway runs, by model."""

    waiting: Mapping[str, QueueDepth]
    running: Count[str]


def _batches(queue: BatchQueueGauges, now: Callable[[], float]) -> Iterator[Metric]:
    """Queued requests, by model. The waiting ones are the same at every gateway."""
    depths = {model: queue.waiting.get(model) for model in queue.running}
    items = {model: 0 if depth is None else depth.items for model, depth in depths.items()}
    oldest_s = {model: 0.0 if depth is None else now() - depth.oldest_at for model, depth in depths.items()}
    for name, title, numbers in (
        ("items_waiting", "Queued requests that have not ended", items),
        ("items_running", "Those of them that this gateway has given to replicas", queue.running),
        ("oldest_seconds", "Age of the oldest batch", oldest_s),
    ):
        yield _by_model(Gauges, f"hearth_batch_{name}", title, numbers)


def _certificate(path: str) -> Iterator[Metric]:
    try:
        ends_at = tls.expiry(path).timestamp()
    except SettingsError:
        ends_at = 0.0
    title = "When it ends, since 1970; 0 where its file cannot be read"
    yield Gauges("hearth_certificate_end_timestamp_seconds", title, ends_at)


def _accounts_text(shares: AccountUsage) -> bytes:
    """The series of accounts and plans, written by hand in a quarter of the library's time: a scrape of hundreds
    of accounts must not hold up streams. Ids, plans and limits have no character that needs an escape; names may have.
    """
    requests, tokens, neurons, refusals = [], [], [], []
    for (account, plan), row in shares.rows.items():
        labels = f'account="{account}",plan="{plan}"'
        requests += [f'{{{labels},ending="{ending}"}} {count}' for ending, count in row.outcomes.items()]
        tokens += [f'{{{labels},kind="{kind}"}} {count}' for kind, count in row.tokens.items()]
        neurons.append(f"{{{labels}}} {row.neurons}")
        refusals += [f'{{{labels},limit="{limit}"}} {count}' for limit, count in row.refused.items()]
    names = [f'{{account="{account}",name="{_escaped(name)}"}} 1' for account, name in shares.names.items()]
    lines = (
        *_series_lines("gauge", "hearth_account_info", "Names of the accounts that have series here", names),
        *_counter_lines("hearth_account_requests_total", "Inference requests by whose doing their end was", requests),
        *_counter_lines("hearth_account_tokens_total", "Model tokens of settled requests", tokens),
        *_counter_lines("hearth_account_neurons_total", "Neurons of settled requests", neurons),
        *_counter_lines("hearth_account_refusals_total", "Requests over a limit of account or token", refusals),
    )
    return "".join(f"{line}\n" for line in lines).encode()


def _escaped(name: str) -> str:
    """A printable text as the value of a label."""
    return name.replace("\\", "\\\\").replace('"', '\\"')


def _counter_lines(name: str, title: str, series: list[str]) -> Iterator[str]:
    yield from _series_lines("counter", name, title, series)


def _series_lines(kind: str, name: str, title: str, series: list[str]) -> Iterator[str]:
    yield from (f"# HELP {name} {title}", f"# TYPE {name} {kind}")
    yield from (name + sample for sample in series)
