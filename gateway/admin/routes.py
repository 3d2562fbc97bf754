"""The routes of the API beside inference, and the document that describes all routes."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec
from starlette.routing import Route

from gateway.admin.dispatch import AdminApi
from gateway.admin.openapi import openapi_document
from gateway.admin.operation import BASE, AdminContext
from gateway.admin.table import OPERATIONS, ROUTES
from gateway.authentication import Authenticator
from gateway.http.exchange import JSON_CONTENT
from gateway.http.idempotency import IdempotencyStore
from gateway.http.routes import Endpoint, ExchangeServer, by_method
from gateway.http.static_files import StaticAnswer, static_files
from gateway.inference.context import InferenceContext
from gateway.tenancy import Tenancy
from tenants.audit import AuditLog
from tenants.limits.soft_caps import notice_signer

DOCS_FOLDER: Final = Path(__file__).with_name("docs")


def admin_routes(
    server: ExchangeServer,
    authenticator: Authenticator,
    tenancy: Tenancy,
    inference: InferenceContext,
    open_requests: Callable[[], int],
    running: Callable[[], Mapping[str, int]],
) -> list[Route]:
    """`open_requests` counts the inference requests in progress, `running` those of each account."""
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
        metrics=inference.metrics,
        alerts=inference.metrics.alerts,
        running=running,
        store_kind=tenancy.store_kind,
    )
    return [*_documents(server), *AdminApi(OPERATIONS, context, authenticator).routes(server)]


def _documents(server: ExchangeServer) -> list[Route]:
    """The OpenAPI document, and the page that shows it."""
    answers = _static_answers()
    return [Route(path, Endpoint(server, by_method(name, GET=file.serve))) for path, (name, file) in answers.items()]


@functools.cache
def _static_answers() -> dict[str, tuple[str, StaticAnswer]]:
    """By their paths, each with the name of its route. All gateways of a process have the same: they are made of its
    code alone, in some 60 ms."""
    document = StaticAnswer(msgspec.json.encode(openapi_document(OPERATIONS, ROUTES)), JSON_CONTENT[1])
    page = static_files(DOCS_FOLDER)
    return {
        f"{BASE}/openapi.json": ("openapi", document),
        **{path: ("docs", page["index.html"]) for path in ("/docs", "/docs/")},
        **{f"/docs/{name}": ("docs", file) for name, file in page.items()},
    }
