"""The models' side of one gateway: its catalogue, its fleet, and what answers calls. It serves nothing."""

import hmac
import time
from dataclasses import dataclass
from typing import Final

from gateway.api.endpoint import InferenceEndpoint
from gateway.batch.api import BatchApi
from gateway.batch.encryption import BatchEncryption
from gateway.catalogue.follower import CatalogueFollower
from gateway.hosts import GatewayHosts, open_hosts
from gateway.http.idempotency import IdempotencyStore
from gateway.inference.context import InferenceContext
from gateway.inference.crash_breaker import CrashBreaker
from gateway.inference.replay import ReplayCache
from gateway.observability.metrics import Metrics
from gateway.observability.store_health import StoreHealth
from gateway.observability.tracing import RequestTracer, open_tracer
from gateway.privacy.interned import InternedScrubber
from gateway.settings.config import Config, SettingsFile
from gateway.tenancy import Tenancy

KEY_MARGIN_S: Final = 60  # an Idempotency-Key is taken for so much longer than the longest request lives


@dataclass(frozen=True, slots=True)
class Serving:
    """What `open_serving` built."""

    context: InferenceContext
    endpoint: InferenceEndpoint
    batches: BatchApi
    follower: CatalogueFollower
    hosts: GatewayHosts


def open_serving(
    config: Config, tenancy: Tenancy, tracer: RequestTracer | None = None, source: SettingsFile | None = None
) -> Serving:
    """Reads the models' folders; connects to nothing yet. Raises SettingsError. With a `source` the catalogue follows
    it."""
    instance = f"{config.server.host}:{config.server.port}"
    metrics = Metrics(config.telemetry.metrics_accounts, instance, tenancy.clock)
    store, secret = tenancy.store, tenancy.secret
    hosts = open_hosts(config, tenancy)
    limits = hosts.placed(config).server
    context = InferenceContext(
        limits=limits,
        quota=tenancy.quota,
        soft_caps=tenancy.soft_caps,
        fleet=hosts.fleet(metrics.observe_wake_wait),
        crash_breaker=CrashBreaker(time.monotonic),
        store_health=StoreHealth(),
        metrics=metrics,
        tracer=tracer or open_tracer(config.telemetry, limits.region),
        clock=time.monotonic,
        account_bytes=tenancy.account_bytes,
    )
    tenancy.accounts.epochs.on_raised = context.fleet.epochs.add
    context.fleet.route_key = hmac.digest(secret, b"hearth routes", "sha256")
    keep_s, threads = int(config.server.batch_keep_s), context.account_locks
    batches = BatchApi(store.batches, BatchEncryption(secret), keep_s, tenancy.clock, threads)
    lifetime_s = int(config.server.request_s) + KEY_MARGIN_S
    follower = CatalogueFollower(config, source)
    catalogue = follower.catalogue
    endpoint = InferenceEndpoint(
        context=context,
        catalogue=catalogue,
        replays=ReplayCache(IdempotencyStore(store.claims, secret), tenancy.clock, lifetime_s),
        scrubber=InternedScrubber(),
        answer_batch=batches.answer,
        calendar=tenancy.clock,
    )
    metrics.watch(
        lambda: catalogue.names,
        context.fleet,
        context.store_health,
        tenancy.quota,
        tenancy.reconciler,
        config.outbox_folder,
    )
    if config.server.certificate:
        metrics.watch_certificate(config.server.certificate)
    return Serving(context, endpoint, batches, follower, hosts)
