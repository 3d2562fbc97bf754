"""The only wiring: what the gateway is made of, which path leads where, and who owns a request from first to last.

It is plain ASGI without middleware: one function sees every request begin and end.
"""

import asyncio
import contextlib
import logging
import re
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.types import Receive, Scope, Send

from gateway import errors
from gateway.admin.dispatch import ACCOUNT_ID, AdminApi
from gateway.admin.inference import ROUTES
from gateway.admin.openapi import openapi_document
from gateway.admin.operation import AdminContext
from gateway.admin.table import OPERATIONS
from gateway.api.routes import DialectRoute, dialect_routes
from gateway.batch.api import BatchApi
from gateway.batch.encryption import BatchEncryption
from gateway.batch.worker import BatchWorker
from gateway.catalogue.catalogue import open_catalogue
from gateway.cluster.fleet import ReplicaFleet
from gateway.config import Config
from gateway.errors import ApiError, ErrorFormat
from gateway.http.client_address import ClientAddressPolicy
from gateway.http.exchange import (
    JSON_CONTENT,
    ClientDisconnected,
    Exchange,
    ExchangeTimeouts,
)
from gateway.http.idempotency import IdempotencyStore
from gateway.inference.account_lock import AccountLocks
from gateway.inference.crash_breaker import CrashBreaker
from gateway.inference.generate import generate
from gateway.inference.replay import ReplayCache
from gateway.inference.request import InferenceContext
from gateway.listing import table as lists
from gateway.observability.metrics import CONTENT_TYPE, Metrics
from gateway.observability.store_health import StoreHealth
from gateway.observability.tracing import RequestTracer, open_tracer
from gateway.privacy.interned import InternedScrubber
from gateway.webhook import WebhookSender
from tenants.audit import AuditLog
from tenants.auth.accounts import AccountService, AccountSuspended, Caller, MalformedToken, Permission, Unauthenticated
from tenants.auth.issuers import IssuerUnavailable, JwtVerifier
from tenants.limits.quota import Quota
from tenants.limits.reconciler import Reconciler
from tenants.limits.soft_caps import SoftCaps, notice_signer
from tenants.open import open_store
from tenants.store.protocol import Store, StoreUnavailable

KEY_MARGIN_S: Final = 60  # beyond a request's longest life, for which its Idempotency-Key is taken
REVOKED_S: Final = 2.0  # how often running requests' tokens are asked for again
ACCOUNT_PATH: Final = re.compile(r"/client/v4/accounts/([^/]+)/ai(/.+)")

BackgroundJob = Callable[[], Coroutine[Any, Any, None]]

log = logging.getLogger(__name__)


class App:
    """The gateway as an ASGI application. Its lifespan runs the fleet's connections, the quota's settlements and the
    `errands`, such as the fetches of issuers' keys."""

    def __init__(
        self, gateway: InferenceContext, store: Store, secret: bytes, errands: Sequence[BackgroundJob]
    ) -> None:
        self._gateway = gateway
        self._store = store
        self._errands = errands
        self._inference = dialect_routes(gateway.catalogue)
        self._drain = BatchWorker(gateway, store.batches, BatchEncryption(secret), self._inference["/run"].dialect)
        gateway.metrics.watch_batches(self._drain, gateway.calendar)
        audit, once = AuditLog(store, secret), IdempotencyStore(store, secret)
        office = AdminContext(gateway, store, audit, once, notice_signer(secret), lambda: self.open_requests)
        self._api = AdminApi(OPERATIONS, office, self._asking)
        self._document = msgspec.json.encode(openapi_document(OPERATIONS, ROUTES))
        limits = gateway.limits
        self._edge = ClientAddressPolicy(limits)
        self._patience = ExchangeTimeouts(limits.body_s, limits.first_byte_s, limits.ping_s, limits.blocked_s)
        self._open: dict[Exchange, str] = {}  # inference requests in progress, with their credentials once verified
        self.draining = False

    @property
    def open_requests(self) -> int:
        """Inference requests in progress."""
        return len(self._open)

    def drain(self) -> None:
        """From now on readiness is false and new work is refused; what runs goes on."""
        self.draining = True
        self._drain.stop()

    def interrupt(self) -> None:
        """Ends what still runs, each with an error that says why."""
        for exchange in list(self._open):
            exchange.interrupt(errors.draining())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            raise RuntimeError(f"{scope['type']} is not served")

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "lifespan.startup"
        async with asyncio.TaskGroup() as group:
            gateway = self._gateway
            parts = (gateway.fleet.run, gateway.quota.run, self._drain.run, self._end_revoked, *self._errands)
            running = [group.create_task(part()) for part in parts]
            await send({"type": "lifespan.startup.complete"})
            assert (await receive())["type"] == "lifespan.shutdown"
            for task in running:
                task.cancel()
        await self._gateway.quota.close()
        await self._store.close()
        await asyncio.to_thread(self._gateway.traces.close)
        await send({"type": "lifespan.shutdown.complete"})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Owns one request: whatever happens below, it is answered, or its client is gone, when this returns."""
        origin, request_id = self._edge.client_address(scope), str(uuid.uuid4())
        exchange = Exchange(scope, receive, send, self._patience, request_id, self._gateway.clock, origin)
        route = "none"
        try:
            route, work = self._route(exchange)
            await work(exchange)
        except ApiError as refusal:
            await exchange.refuse(refusal)
        except ClientDisconnected:
            pass
        except Exception as error:
            log.error("request_failed", extra={"fields": _failure(exchange, error)})
            await exchange.refuse(errors.internal())
        finally:
            self._gateway.metrics.answered(route, exchange.status)

    def _route(self, exchange: Exchange) -> tuple[str, Callable[[Exchange], Awaitable[None]]]:
        """The route's name for the metrics, and what serves it, decided on the path alone, which is decoded once.

        Probes and scrapers come by address: the three paths for them answer to any Host. Raises Refusal.
        """
        path = exchange.path
        match path:
            case "/healthz":
                return self._only("GET", exchange, "healthz", self._healthz)
            case "/readyz":
                return self._only("GET", exchange, "readyz", self._readyz)
            case "/metrics":
                return self._only("GET", exchange, "metrics", self._metrics)
        if not self._edge.serves_host(exchange.headers[b"host"]):
            raise errors.misdirected()
        if path == "/client/v4/openapi.json":
            return self._only("GET", exchange, "openapi", self._describe)
        account_id, resource = None, path
        if path.startswith("/client/"):
            found = ACCOUNT_PATH.fullmatch(path)
            if found is None:
                return self._api_route(path)
            account_id, resource = found.groups()
            exchange.error_format = self._shape(resource)
            if ACCOUNT_ID.fullmatch(account_id) is None:
                raise errors.bad_account_id(path)
        elif path.startswith("/ai/"):
            resource = path.removeprefix("/ai")
        elif not path.startswith("/v1/"):
            raise errors.no_route(path)
        exchange.error_format = self._shape(resource)
        return self._resource(exchange, account_id, resource)

    def _api_route(self, path: str) -> tuple[str, Callable[[Exchange], Awaitable[None]]]:
        place = self._api.find(path)
        if place is None:
            raise errors.no_route(path)
        return place.route, lambda x: self._api.serve(x, place)

    async def _asking(self, exchange: Exchange, account_id: str | None, permissions: Sequence[Permission]) -> Caller:
        return await self._authenticate(exchange, _credential(exchange), account_id, permissions)

    def _resource(
        self, exchange: Exchange, account_id: str | None, resource: str
    ) -> tuple[str, Callable[[Exchange], Awaitable[None]]]:
        """What lies below an account, whether the path names it or the token does."""
        model = resource.removeprefix("/run/") if resource.startswith("/run/") else None
        if model != "" and (route := self._inference.get("/run" if model else resource)):
            return self._only("POST", exchange, route.name, lambda x: self._generate(x, account_id, route, model))
        if resource == "/batches":
            return self._only("GET", exchange, "batches", lambda x: self._batches(x, account_id))
        if resource.startswith("/batches/"):
            return self._one_batch(exchange, account_id, resource.removeprefix("/batches/"))
        if render := lists.find_list(resource):
            return self._only("GET", exchange, "models", lambda x: self._list(x, account_id, render))
        raise errors.no_route(exchange.path)

    def _one_batch(
        self, exchange: Exchange, account_id: str | None, batch_id: str
    ) -> tuple[str, Callable[[Exchange], Awaitable[None]]]:
        if exchange.method not in ("GET", "HEAD", "DELETE"):
            raise errors.method_not_supported(exchange.method, "GET, HEAD, DELETE")
        return "batch", lambda x: self._batches(x, account_id, batch_id)

    def _only(
        self, method: str, exchange: Exchange, name: str, serve: Callable[[Exchange], Awaitable[None]]
    ) -> tuple[str, Callable[[Exchange], Awaitable[None]]]:
        """HEAD is GET without the answer's body, which the server leaves out. Raises Refusal for other methods."""
        allowed = ("GET", "HEAD") if method == "GET" else (method,)
        if exchange.method not in allowed:
            raise errors.method_not_supported(exchange.method, ", ".join(allowed))
        return name, serve

    async def _end_revoked(self) -> None:
        """Ends what runs with a token that was revoked or has expired. While the store is away everything goes on."""
        while True:
            await asyncio.sleep(REVOKED_S)
            for credential in set(self._open.values()) - {""}:
                try:
                    await self._gateway.accounts.verify(credential)
                except (Unauthenticated, AccountSuspended):
                    for exchange in [one for one, its in self._open.items() if its == credential]:
                        exchange.interrupt(errors.token_ended())
                except StoreUnavailable as problem:
                    self._gateway.outage.begin(problem)
                    break

    async def _authenticate(
        self, exchange: Exchange, credential: str, account_id: str | None, permissions: Sequence[Permission]
    ) -> Caller:
        """Who asks, with one of these permissions where there are any. A path that names another account than the
        token's is refused, whether that one exists or not."""
        try:
            caller = await self._gateway.accounts.verify(credential)
        except MalformedToken:
            raise errors.malformed_token() from None
        except Unauthenticated:
            raise errors.unauthenticated() from None
        except AccountSuspended:
            raise errors.suspended() from None
        except IssuerUnavailable:
            raise errors.issuer_unavailable() from None
        except StoreUnavailable as problem:
            self._gateway.outage.begin(problem)
            raise errors.store_unavailable() from None
        if account_id is not None and account_id != caller.account.id:
            raise errors.foreign_account()
        if not caller.grant.reaches(exchange.client.address):
            raise errors.wrong_network()
        if permissions and not any(map(caller.grant.permits, permissions)):
            raise errors.not_permitted(permissions[0])
        return caller

    def _shape(self, resource: str) -> ErrorFormat:
        """Of the errors of what lies below an account."""
        if route := self._inference.get(resource):
            return route.shape
        return ErrorFormat.OPENAI if resource.startswith("/v1/") else ErrorFormat.ENVELOPE

    async def _generate(
        self, exchange: Exchange, account_id: str | None, route: DialectRoute, model: str | None
    ) -> None:
        """`model` is what the path names, where it does."""
        if self.draining:
            raise errors.draining()
        if len(self._open) >= self._gateway.limits.requests:
            raise errors.busy()
        credential = _credential(exchange)
        self._open[exchange] = ""
        self._gateway.metrics.open_requests.inc()
        try:
            caller = await self._authenticate(exchange, credential, account_id, (Permission.INFERENCE,))
            self._open[exchange] = credential
            await generate(self._gateway, exchange, caller, route.dialect, model)
        finally:
            del self._open[exchange]
            self._gateway.metrics.open_requests.dec()

    async def _list(self, exchange: Exchange, account_id: str | None, render: lists.ListRenderer) -> None:
        """Of the models that the caller may use."""
        caller = await self._authenticate(exchange, _credential(exchange), account_id, (Permission.INFERENCE,))
        found = [model for model in self._gateway.catalogue if caller.grant.serves(model.name)]
        await exchange.answer(200, render(self._gateway, found, exchange.query), [JSON_CONTENT])

    async def _batches(self, exchange: Exchange, account_id: str | None, batch_id: str | None = None) -> None:
        """All of the account's batches, or one."""
        caller = await self._authenticate(exchange, _credential(exchange), account_id, (Permission.INFERENCE,))
        desk = self._gateway.desk
        await (desk.list(exchange, caller) if batch_id is None else desk.one(exchange, caller, batch_id))

    async def _describe(self, exchange: Exchange) -> None:
        """What is served; there is nothing of any tenant in it."""
        await exchange.answer(200, self._document, [JSON_CONTENT])

    async def _healthz(self, exchange: Exchange) -> None:
        """The process lives; nothing else is asked."""
        await exchange.answer(200, b'{"alive":true}', [JSON_CONTENT])

    async def _readyz(self, exchange: Exchange) -> None:
        problems = await self._problems()
        body = msgspec.json.encode({"ready": not problems, "problems": problems})
        if problems:
            await exchange.answer(503, body, [JSON_CONTENT, (b"retry-after", b"1")])
        else:
            await exchange.answer(200, body, [JSON_CONTENT])

    async def _problems(self) -> list[str]:
        """Why this gateway should get no calls now: a model that sleeps is no reason where calls wait long enough for
        it. Words only: no addresses, and nothing that tells of load."""
        problems = ["draining"] if self.draining else []
        replicas, wait_s = self._gateway.fleet.replicas(), self._gateway.limits.wait_s
        if not any(each.expected_s is not None and each.expected_s <= wait_s for each in replicas):
            problems.append("no replica is ready")
        try:
            await self._store.ping()
        except StoreUnavailable:
            problems.append("the store does not answer")
        return problems

    async def _metrics(self, exchange: Exchange) -> None:
        """What names accounts or tells of load is for the operator's token. Any other, or none, or one that cannot be
        checked while the store is away, reads what its network may: an outage is when the operator needs it most."""
        text, shown = self._gateway.metrics.text, self._edge.shows_metrics(exchange.client)
        if b"authorization" in exchange.headers:
            with contextlib.suppress(ApiError):
                await self._authenticate(exchange, _credential(exchange), None, (Permission.OPERATOR,))
                text, shown = self._gateway.metrics.operators_text, True
        if not shown:
            raise errors.no_route(exchange.path)
        await exchange.answer(200, text(), [(b"content-type", CONTENT_TYPE), (b"cache-control", b"no-store")])


def _failure(exchange: Exchange, error: Exception) -> dict[str, object]:
    """What the journal says of it: where it came from, and not its message, which may quote what a caller sent."""
    where = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    return {"request": exchange.request_id, "error": type(error).__name__, "where": where}


def _credential(exchange: Exchange) -> str:
    """The bearer token of the request; where it has no Authorization, its x-api-key, under every path. Raises Refusal
    where there is neither."""
    said = exchange.headers.get(b"authorization")
    if said is None and (key := exchange.headers.get(b"x-api-key")):
        return key.strip().decode("latin-1")
    scheme, _, credential = (said or b"").partition(b" ")
    if scheme.lower() != b"bearer":
        raise errors.unauthenticated()
    return credential.strip().decode("latin-1")


def build_app(config: Config, secret: bytes, traces: RequestTracer | None = None) -> App:
    """The gateway that the config describes. Opens the store and reads the models' folders; connects to nothing yet.

    `secret` is the server's, the same for all gateways that share a store. Raises ConfigError and what the store does.
    """
    store = open_store(config.store_url)
    issuers = JwtVerifier(config.issuers)
    metrics, residue = Metrics(config.telemetry.metrics_accounts), InternedScrubber()
    fleet = ReplicaFleet(config.machine_addresses, waited=metrics.waited)
    thresholds = SoftCaps(store, time.time)
    webhook = WebhookSender(store, notice_signer(secret), time.time, private=config.server.private_notices)
    gateway = InferenceContext(
        limits=config.server,
        accounts=AccountService(store, secret, issuers=issuers),
        quota=Quota(store, Path(config.outbox_folder)),
        thresholds=thresholds,
        catalogue=open_catalogue(config),
        fleet=fleet,
        suspects=CrashBreaker(time.monotonic),
        outage=StoreHealth(),
        turns=AccountLocks(),
        residue=residue,
        repeats=ReplayCache(IdempotencyStore(store, secret), time.time, int(config.server.request_s) + KEY_MARGIN_S),
        desk=BatchApi(store.batches, BatchEncryption(secret), config.server.batch_keep_s, time.time),
        metrics=metrics,
        traces=traces or open_tracer(config.telemetry),
        clock=time.monotonic,
        calendar=time.time,
    )
    models = [model.name for model in gateway.catalogue]
    reconciler = Reconciler(store)
    gateway.metrics.watch(models, fleet, gateway.outage, gateway.quota, reconciler, config.outbox_folder)
    if config.server.certificate:
        gateway.metrics.watch_certificate(config.server.certificate)
    return App(gateway, store, secret, (issuers.run, thresholds.run, webhook.run, reconciler.run, residue.run))
