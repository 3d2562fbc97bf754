"""What probes and scrapers read: liveness, readiness, and the metrics. It names no tenant but to the operator."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engine.protocol.frames import PROTOCOL_VERSION
from gateway import __version__, errors
from gateway.authentication import Authenticator
from gateway.cluster.fleet import ReplicaFleet
from gateway.errors import ApiError
from gateway.http.client_address import ClientAddressPolicy
from gateway.http.exchange import JSON_CONTENT, Exchange
from gateway.observability.metrics import CONTENT_TYPE, Metrics
from tenants.records.grants import Permission
from tenants.store.protocol import Store, StoreUnavailable


async def healthz(exchange: Exchange) -> None:
    """Answers that the process lives; nothing else is looked at."""
    await exchange.answer(200, b'{"alive":true}', [JSON_CONTENT])


async def version(exchange: Exchange) -> None:
    """Answers what runs here. `protocol` is that of gateways, machines and replicas: they talk where it is the same."""
    body = {"name": "hearth", "version": __version__, "protocol": PROTOCOL_VERSION}
    await exchange.answer(200, msgspec.json.encode(body), [JSON_CONTENT])


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether this gateway should get calls. Calls wait at most `wait_s` for a replica."""

    fleet: ReplicaFleet
    store: Store
    wait_s: float
    draining: Callable[[], bool]

    async def serve(self, exchange: Exchange) -> None:
        problems = await self._problems()
        body = msgspec.json.encode({"ready": not problems, "problems": problems})
        retry = [(b"retry-after", b"1")] if problems else []
        await exchange.answer(503 if problems else 200, body, [JSON_CONTENT, *retry])

    async def _problems(self) -> list[str]:
        """Why this gateway should get no calls now: a model that sleeps is no reason if calls wait long enough for it.
        Words only: no addresses, and nothing that tells of load."""
        problems = ["draining"] if self.draining() else []
        waits_s = [replica.expected_s for replica in self.fleet.replicas()]
        if not any(wait_s is not None and wait_s <= self.wait_s for wait_s in waits_s):
            problems.append("no replica is ready")
        try:
            await self.store.ping()
        except StoreUnavailable:
            problems.append("the store does not answer")
        return problems


@dataclass(frozen=True, slots=True)
class MetricsEndpoint:
    """The metrics' text: all of it for a token that may read it, else what everybody may, for networks that may."""

    metrics: Metrics
    authenticator: Authenticator
    clients: ClientAddressPolicy

    async def serve(self, exchange: Exchange) -> None:
        """A token without such a permission, or that cannot be checked while the store is away, counts as none: an
        outage is when the operator needs the metrics most."""
        text, readable = self.metrics.public_text, self.clients.shows_metrics(exchange.client)
        if b"authorization" in exchange.headers:
            with contextlib.suppress(ApiError):
                await self.authenticator.verify(exchange, None, (Permission.OPERATOR, Permission.METRICS_READ))
                text, readable = self.metrics.operator_text, True
        if not readable:
            raise errors.no_route(exchange.path)
        await exchange.answer(200, text(), [(b"content-type", CONTENT_TYPE), (b"cache-control", b"no-store")])
