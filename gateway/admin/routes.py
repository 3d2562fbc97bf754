"""The routes of the API beside inference, and the document that describes all routes."""

from collections.abc import Callable

import msgspec
from starlette.routing import Route

from gateway.admin.dispatch import AdminApi
from gateway.admin.openapi import openapi_document
from gateway.admin.operation import BASE, AdminContext
from gateway.admin.table import OPERATIONS, ROUTES
from gateway.authentication import Authenticator
from gateway.http.exchange import JSON_CONTENT, Exchange
from gateway.http.idempotency import IdempotencyStore
from gateway.http.routes import Endpoint, ExchangeServer, by_method
from gateway.inference.context import InferenceContext
from gateway.tenancy import Tenancy
from tenants.audit import AuditLog
from tenants.limits.soft_caps import notice_signer


def admin_routes(
    server: ExchangeServer,
    authenticator: Authenticator,
    tenancy: Tenancy,
    inference: InferenceContext,
    open_requests: Callable[[], int],
) -> list[Route]:
    """`open_requests` counts the inference requests in progress."""
    context = AdminContext(
        limits=inference.limits,
        store=tenancy.store,
        accounts=tenancy.accounts,
        quota=tenancy.quota,
        fleet=inference.fleet,
        store_health=inference.store_health,
        encodings=inference.encodings,
        audit=AuditLog(tenancy.store.audit, tenancy.secret),
        idempotency=IdempotencyStore(tenancy.store.claims, tenancy.secret),
        notice_key=notice_signer(tenancy.secret),
        open_requests=open_requests,
        calendar=tenancy.clock,
    )
    document = msgspec.json.encode(openapi_document(OPERATIONS, ROUTES))

    async def describe(exchange: Exchange) -> None:
        await exchange.answer(200, document, [JSON_CONTENT])

    described = Route(f"{BASE}/openapi.json", Endpoint(server, by_method("openapi", GET=describe)))
    return [described, *AdminApi(OPERATIONS, context, authenticator).routes(server)]
