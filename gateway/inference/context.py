"""The parts of the gateway that every inference call works with, for text and for vectors alike."""

from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.cluster.fleet import ReplicaFleet
from gateway.images.decoder import ImageDecoder
from gateway.inference.account_lock import AccountLocks
from gateway.inference.crash_breaker import CrashBreaker
from gateway.observability.metrics import Metrics
from gateway.observability.refusals import RefusalLog
from gateway.observability.store_health import StoreHealth
from gateway.observability.tracing import RequestTracer
from gateway.settings.server import ServerConfig
from gateway.text.encoding_cache import EncodingCache
from tenants.limits.local_rate import LocalRate
from tenants.limits.quota import Quota
from tenants.limits.soft_caps import SoftCaps


@dataclass(frozen=True, slots=True)
class InferenceContext:
    """Built once, in app.py."""

    limits: ServerConfig
    quota: Quota
    soft_caps: SoftCaps
    fleet: ReplicaFleet
    crash_breaker: CrashBreaker
    store_health: StoreHealth
    metrics: Metrics
    tracer: RequestTracer
    clock: Callable[[], float]  # monotonic seconds
    account_bytes: LocalRate  # of the bodies that an account sends
    account_locks: AccountLocks = field(default_factory=AccountLocks)
    encodings: EncodingCache = field(default_factory=EncodingCache)
    images: ImageDecoder = field(default_factory=ImageDecoder)
    refusals: RefusalLog = field(default_factory=RefusalLog)
