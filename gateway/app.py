"""The only wiring: what the gateway is made of, and what runs beside its requests.

It is plain ASGI without middleware: one function sees every request begin and end (http/routes.py).
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from gateway.admin.routes import admin_routes
from gateway.api.routes import RUN_FAMILIES
from gateway.authentication import Authenticator
from gateway.background import BackgroundJobs, keep_heap_trimmed
from gateway.batch.worker import BatchWorker
from gateway.console.routes import console_routes
from gateway.http.routes import Endpoint, ExchangeServer, Handler, by_method, no_route
from gateway.observability.endpoints import MetricsEndpoint, Readiness, healthz, version
from gateway.observability.tracing import RequestTracer
from gateway.open_requests import OpenRequestChecks, OpenRequests
from gateway.routes import account_routes
from gateway.serving import Serving, open_serving
from gateway.settings.config import Config, SettingsFile
from gateway.tenancy import Tenancy, open_tenancy
from tenants.store.protocol import Clock


class App:
    """The gateway as an ASGI application. Its lifespan runs the fleet's connections, the batches, and what the tenants'
    side does in the background."""

    def __init__(self, serving: Serving, tenancy: Tenancy) -> None:
        self._serving = serving
        self._tenancy = tenancy
        context, endpoint = serving.context, serving.endpoint
        limits = context.limits
        checks = OpenRequestChecks(context.quota, endpoint.calendar, limits.region, limits.region_urls)
        self._batches = BatchWorker(
            endpoint,
            tenancy.accounts,
            checks,
            tenancy.store.batches,
            serving.batches.encryption,
            RUN_FAMILIES,
            serving.batches.arrived,
        )
        context.metrics.watch_batches(self._batches, endpoint.calendar)
        outage = context.store_health.mark_down
        authenticator = Authenticator.of(tenancy.accounts, outage, context.limits, context.clock)
        self._requests = OpenRequests(authenticator, checks, context.limits.requests, context.metrics.open_requests.set)
        self._jobs = self._background()
        server = ExchangeServer.of(context.limits, context.clock, context.metrics.count_answer, context.refusals.note)
        readiness = Readiness(context.fleet, tenancy.store, context.limits.wait_s, lambda: self.draining)
        metrics = MetricsEndpoint(context.metrics, authenticator, server.clients)

        def probe(name: str, handler: Handler) -> Route:
            return Route(f"/{name}", Endpoint(server, by_method(name, GET=handler), any_host=True))

        self._router = Router(
            [
                *account_routes(server, authenticator, self._requests, serving),  # first: they are asked the most
                probe("healthz", healthz),
                probe("health", healthz),
                probe("version", version),
                probe("readyz", readiness.serve),
                probe("metrics", metrics.serve),
                *admin_routes(
                    server, authenticator, tenancy, context, lambda: self.open_requests, self._requests.by_account
                ),
                *console_routes(server),
            ],
            redirect_slashes=False,
            default=Endpoint(server, no_route),
            lifespan=self._lifespan,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._router(scope, receive, send)

    @property
    def open_requests(self) -> int:
        """Inference requests in progress."""
        return len(self._requests)

    @property
    def failed(self) -> str:
        """The background job that ended by an error and cannot be begun again; empty as long as all go on."""
        return self._jobs.failed

    @property
    def draining(self) -> bool:
        return self._requests.draining

    def drain(self) -> None:
        """Makes readiness false and refuses new work from now on; what runs goes on."""
        self._requests.draining = True
        self._batches.stop()

    def interrupt(self) -> None:
        """Ends what still runs, each request with an error that says why."""
        self._requests.end_all()

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: object) -> AsyncIterator[None]:
        async with self._jobs.running():
            yield
        await self._tenancy.close()
        await asyncio.to_thread(self._serving.context.tracer.close)

    def _background(self) -> BackgroundJobs:
        context, hosts = self._serving.context, self._serving.hosts
        jobs = {
            "fleet": context.fleet.run,
            "members": lambda: hosts.follow(context.fleet),
            "batches": self._batches.run,
            "catalogue": self._serving.follower.run,
            "open_requests": self._requests.end_refused,
            "alerts": context.metrics.alerts.run,
            "scrubber": self._serving.endpoint.scrubber.run,
            "encodings": context.encodings.run,
            "heap": keep_heap_trimmed,
            **hosts.jobs,
            **self._tenancy.background,
        }
        return BackgroundJobs(jobs, ("fleet",), context.metrics.count_job_failures(jobs))


def build_app(
    config: Config,
    secret: bytes,
    tracer: RequestTracer | None = None,
    clock: Clock = time.time,
    source: SettingsFile | None = None,
) -> App:
    """Builds the gateway that the config describes. Opens the store and reads the models' folders; connects to nothing.

    `secret` is the server's, the same for all gateways that share a store; `clock` is its calendar; its models follow
    `source`, where there is one. Raises SettingsError and what the store does.
    """
    tenancy = open_tenancy(config, secret, clock)
    return App(open_serving(config, tenancy, tracer, source), tenancy)
