"""The models' side of one gateway: its catalogue, its fleet, and what answers calls. It serves nothing."""

import time
from dataclasses import dataclass
from typing import Final

from gateway.api.endpoint import InferenceEndpoint
from gateway.batch.api import BatchApi
from gateway.batch.encryption import BatchEncryption
from gateway.catalogue.catalogue import open_catalogue
from gateway.cluster.fleet import ReplicaFleet
from gateway.config import Config
from gateway.http.idempotency import IdempotencyStore
from gateway.inference.context import InferenceContext
from gateway.inference.crash_breaker import CrashBreaker
from gateway.inference.replay import ReplayCache
from gateway.observability.metrics import Metrics
from gateway.observability.store_health import StoreHealth
from gateway.observability.tracing import RequestTracer, open_tracer
from gateway.privacy.interned import InternedScrubber
from gateway.tenancy import Tenancy

KEY_MARGIN_S: Final = 60  # an Idempotency-Key is taken for so much longer than the longest request lives


@dataclass(frozen=True, slots=True)
class Serving:
    """What `open_serving` built."""

    context: InferenceContext
    endpoint: InferenceEndpoint
    batches: BatchApi


def open_serving(config: Config, tenancy: Tenancy, tracer: RequestTracer | None = None) -> Serving:
    """Reads the models' folders; connects to nothing yet. Raises SettingsError."""
    metrics, store, secret = Metrics(config.telemetry.metrics_accounts), tenancy.store, tenancy.secret
    context = InferenceContext(
        limits=config.server,
        quota=tenancy.quota,
        soft_caps=tenancy.soft_caps,
        fleet=ReplicaFleet(config.machine_addresses, on_waited=metrics.observe_wake_wait),
        crash_breaker=CrashBreaker(time.monotonic),
        store_health=StoreHealth(),
        metrics=metrics,
        tracer=tracer or open_tracer(config.telemetry),
        clock=time.monotonic,
        account_bytes=tenancy.account_bytes,
    )
    keep_s, threads = int(config.server.batch_keep_s), context.account_locks
    batches = BatchApi(store.batches, BatchEncryption(secret), keep_s, tenancy.clock, threads)
    lifetime_s = int(config.server.request_s) + KEY_MARGIN_S
    endpoint = InferenceEndpoint(
        context=context,
        catalogue=open_catalogue(config),
        replays=ReplayCache(IdempotencyStore(store.claims, secret), tenancy.clock, lifetime_s),
        scrubber=InternedScrubber(),
        answer_batch=batches.answer,
        calendar=tenancy.clock,
    )
    models = [model.name for model in endpoint.catalogue]
    metrics.watch(models, context.fleet, context.store_health, tenancy.quota, tenancy.reconciler, config.outbox_folder)
    if config.server.certificate:
        metrics.watch_certificate(config.server.certificate)
    return Serving(context, endpoint, batches)
