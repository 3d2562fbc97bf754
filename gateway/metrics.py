"""Counters and histograms of one gateway, as Prometheus text. Labels are catalogue names and our own
words. It holds nothing of any tenant: no ids, no text, and no queue depths of replicas.
"""

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.tally import CAUSES, Tally
from tenants.quota import Spent

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
OUTCOMES_MAX: Final = 64
_FIRST_TOKEN_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_OWN_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 1)
_TOTAL_S: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)


class Metrics:
    """One registry. `finished` costs a few microseconds a request; nothing is counted per token.

    What replicas' caches count is the same at every gateway: take it from one of them, do not add it up.
    """

    def __init__(self, caches: Tally | None = None) -> None:
        self.registry = CollectorRegistry()
        if caches is not None:
            self.registry.register(_Caches(caches))
        self._requests = self._counter("hearth_requests", "Inference requests by how they ended", ["model", "outcome"])
        self._tokens = self._counter("hearth_tokens", "Model tokens of settled requests", ["model", "kind"])
        self._first_token = self._histogram("hearth_first_token_seconds", "Request to first token", _FIRST_TOKEN_S)
        self._own = self._histogram(
            "hearth_gateway_seconds", "Request to first token, without what its replica took", _OWN_S
        )
        self._total = self._histogram("hearth_request_seconds", "Request to its end", _TOTAL_S)
        self._answers = self._counter("hearth_http_answers", "HTTP answers by route and status", ["route", "status"])
        self.open_requests = Gauge("hearth_open_requests", "Inference requests in progress", registry=self.registry)
        self._outcomes: set[str] = set()

    def finished(self, model: str, spent: Spent, own_s: float | None) -> None:
        """One request ended; `model` is a name of the catalogue, `own_s` the gateway's part of the first token."""
        self._requests.labels(model, self._capped(spent.outcome)).inc()
        self._tokens.labels(model, "prompt").inc(spent.prompt_tokens)
        self._tokens.labels(model, "cached").inc(spent.cached_tokens)
        self._tokens.labels(model, "completion").inc(spent.completion_tokens)
        self._total.labels(model).observe(spent.total_ms / 1000)
        if spent.first_token_ms is not None:
            self._first_token.labels(model).observe(spent.first_token_ms / 1000)
        if own_s is not None:
            self._own.labels(model).observe(own_s)

    def answered(self, route: str, status: int | None) -> None:
        """One HTTP exchange ended; None where the client left before anything was sent."""
        self._answers.labels(route, str(status or "none")).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)

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

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        sums = self._tally.sums()
        for counter, says in (
            ("lookups", "Prompts looked up in the prefix cache"),
            ("lookup_tokens", "Tokens of the prompts looked up"),
            ("hit_tokens", "Tokens found there, those of preempted sequences again"),
            ("inserted_blocks", "KV blocks put into the prefix cache"),
            ("duplicate_blocks", "KV blocks that were computed though the cache had them by then"),
            ("spared_keys", "Keys that a sequence did not read as another one of its group did"),
        ):
            family = CounterMetricFamily(f"hearth_prefix_{counter}", says, labels=["model"])
            for model, counts in sums.items():
                family.add_metric([model], counts[counter])
            yield family
        evicted = CounterMetricFamily("hearth_prefix_evicted_blocks", "KV blocks evicted", labels=["model", "cause"])
        for model, counts in sums.items():
            for cause in CAUSES:
                evicted.add_metric([model, cause], counts[f"evicted_{cause}_blocks"])
        yield evicted
        shared = GaugeMetricFamily("hearth_prefix_shared_blocks", "KV blocks two sequences read now", labels=["model"])
        for model, blocks in self._tally.shared_blocks().items():
            shared.add_metric([model], blocks)
        yield shared
