"""Builds what inference works with: the catalogue, the fleet, and the parts that watch over calls. It runs nothing."""

import time
from typing import Final

from gateway.batch.api import BatchApi
from gateway.batch.encryption import BatchEncryption
from gateway.catalogue.catalogue import open_catalogue
from gateway.cluster.fleet import ReplicaFleet
from gateway.config import Config
from gateway.http.idempotency import IdempotencyStore
from gateway.inference.account_lock import AccountLocks
from gateway.inference.crash_breaker import CrashBreaker
from gateway.inference.replay import ReplayCache
from gateway.inference.request import InferenceContext
from gateway.observability.metrics import Metrics
from gateway.observability.store_health import StoreHealth
from gateway.observability.tracing import RequestTracer, open_tracer
from gateway.privacy.interned import InternedScrubber
from gateway.tenancy import Tenancy

KEY_MARGIN_S: Final = 60  # an Idempotency-Key is taken for so much longer than the longest request lives


def open_inference(config: Config, tenancy: Tenancy, tracer: RequestTracer | None = None) -> InferenceContext:
    """Reads the models' folders; connects to nothing yet. Raises SettingsError."""
    metrics, store_health = Metrics(config.telemetry.metrics_accounts), StoreHealth()
    store, secret = tenancy.store, tenancy.secret
    fleet = ReplicaFleet(config.machine_addresses, waited=metrics.waited)
    idempotency = IdempotencyStore(store.claims, secret)
    context = InferenceContext(
        limits=config.server,
        accounts=tenancy.accounts,
        quota=tenancy.quota,
        thresholds=tenancy.soft_caps,
        catalogue=open_catalogue(config),
        fleet=fleet,
        suspects=CrashBreaker(time.monotonic),
        outage=store_health,
        turns=AccountLocks(),
        residue=InternedScrubber(),
        repeats=ReplayCache(idempotency, time.time, int(config.server.request_s) + KEY_MARGIN_S),
        desk=BatchApi(store.batches, BatchEncryption(secret), config.server.batch_keep_s, time.time),
        metrics=metrics,
        traces=tracer or open_tracer(config.telemetry),
        clock=time.monotonic,
        calendar=time.time,
    )
    models = [model.name for model in context.catalogue]
    metrics.watch(models, fleet, store_health, tenancy.quota, tenancy.reconciler, config.outbox_folder)
    if config.server.certificate:
        metrics.watch_certificate(config.server.certificate)
    return context
