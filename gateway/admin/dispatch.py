"""Serves the table of operations: finds who calls, reads query, conditions and body, and writes the answer.

It knows no single operation. Checks come in this order: the caller (401, 403, 404), the query and the body (400), the
key of a creation (409, 422), the operation.
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType
from starlette.routing import Route

from gateway import errors
from gateway.admin.operation import (
    PATH_PARAMETERS,
    AdminContext,
    AdminRequest,
    AdminResult,
    CursorItem,
    NoFields,
    Operation,
    ResponseInfo,
)
from gateway.authentication import Authenticator
from gateway.errors import ApiError
from gateway.http.exchange import JSON_CONTENT, Exchange, Header
from gateway.http.json_body import decode_body, decode_query
from gateway.http.routes import Endpoint, ExchangeServer
from gateway.listing.pages import PageItem
from tenants.auth.accounts import ACCOUNT_ID
from tenants.auth.caller import Caller
from tenants.auth.errors import AmbiguousName, Conflict, NameInUse, NotFound
from tenants.records.grants import Permission
from tenants.store.protocol import StoreUnavailable

BODY_BYTES_MAX: Final = 64 << 10
NO_STORE: Final[Header] = (b"cache-control", b"no-store")
CSV: Final[Header] = (b"content-type", b"text/csv; charset=utf-8")
NEVER: Final = -1  # a revision that nothing has
_ETAG: Final = re.compile(rb'"([0-9]{1,18})"')


class Envelope(msgspec.Struct, frozen=True):
    result: Any
    success: bool
    errors: tuple[()]
    messages: tuple[ResponseInfo, ...]
    result_info: PageItem | CursorItem | UnsetType = UNSET


class StoredResponse(msgspec.Struct, frozen=True, array_like=True):
    """An answer as it is sent, and stored for an Idempotency-Key."""

    headers: list[Header]
    body: bytes


class AdminApi:
    """Serves `operations` with `context`."""

    def __init__(self, operations: Sequence[Operation], context: AdminContext, authenticator: Authenticator) -> None:
        self._context = context
        self._authenticator = authenticator
        self._resources: dict[str, dict[str, Operation]] = {}  # by path, then by method
        for operation in operations:
            self._resources.setdefault(operation.path, {})[operation.method] = operation
        bodies = {operation.body for operation in operations if operation.takes_body}
        self._decoders = {body: msgspec.json.Decoder(body) for body in bodies}

    def routes(self, server: ExchangeServer) -> list[Route]:
        """A route for each path, in the table's order: the first of two that match a path counts."""
        return [
            Route(path, Endpoint(server, partial(self._serve, methods))) for path, methods in self._resources.items()
        ]

    async def _serve(self, methods: dict[str, Operation], exchange: Exchange) -> None:
        """Answers one request. Raises ApiError."""
        names = exchange.path_params
        if any(PATH_PARAMETERS[name].fullmatch(value) is None for name, value in names.items()):
            raise errors.no_route(exchange.path)
        caller, operation = await self._permitted(exchange, methods)
        query = decode_query(exchange.query, operation.query)
        if operation.csv and b"text/csv" in exchange.headers.get(b"accept", b""):
            query = msgspec.structs.replace(query, format="csv")
        sent, body = b"", NoFields()
        if operation.takes_body:
            sent = await exchange.body(BODY_BYTES_MAX)
            body = decode_body(sent or b"{}" if operation.optional else sent, self._decoders[operation.body])
        revision = _revision(exchange) if operation.conditional else None
        request = AdminRequest(caller, names, query, body, revision)
        key = exchange.headers.get(b"idempotency-key") if operation.creates else None
        try:
            if key is None:
                response = await self._run(operation, request)
            else:
                response = await self._run_once(exchange, operation, request, key, sent)
        except StoreUnavailable as problem:
            self._context.store_health.mark_down(problem)
            raise errors.store_unavailable() from None
        await exchange.answer(200, response.body, response.headers)

    async def _permitted(self, exchange: Exchange, methods: dict[str, Operation]) -> tuple[Caller, Operation]:
        """Returns the caller and the operation. The operator's paths look to all others like paths that do not exist.
        Raises ApiError."""
        hidden = any(operation.hidden for operation in methods.values())
        exchange.route = "operator" if hidden else "admin"
        caller = await self._operator(exchange) if hidden else None
        operation = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if operation is None:
            allowed = ", ".join("GET, HEAD" if method == "GET" else method for method in methods)
            raise errors.method_not_supported(exchange.method, allowed)
        if caller is None:
            account_id = exchange.path_params.get("account_id")
            caller = await self._authenticator.verify(exchange, account_id, operation.permissions)
        elif "account_id" in exchange.path_params:
            exchange.path_params["account_id"] = await self._account_id(exchange)
        return caller, operation

    async def _account_id(self, exchange: Exchange) -> str:
        """Returns the id of the account that the operator named in the path. Raises ApiError."""
        reference = exchange.path_params["account_id"]
        if ACCOUNT_ID.fullmatch(reference):
            return reference
        try:
            return (await self._context.accounts.find(reference)).id
        except NotFound:
            raise errors.bad_account_id(exchange.path) from None
        except AmbiguousName as problem:
            raise errors.conflict(str(problem)) from None
        except StoreUnavailable as problem:
            self._authenticator.on_outage(problem)
            raise errors.store_unavailable() from None

    async def _operator(self, exchange: Exchange) -> Caller:
        try:
            return await self._authenticator.verify(exchange, None, (Permission.OPERATOR,))
        except ApiError as refusal:
            raise errors.no_route(exchange.path) if refusal.status == 403 else refusal from None

    async def _run_once(
        self, exchange: Exchange, operation: Operation, request: AdminRequest[Any, Any], key: bytes, sent: bytes
    ) -> StoredResponse:
        async def create() -> bytes:
            return msgspec.msgpack.encode(await self._run(operation, request))

        subject, account_id = f"{request.caller.token_id} {operation.method} {exchange.path}", request.caller.account.id
        stored = await self._context.idempotency.answer(account_id, subject, key.decode("latin-1"), sent, create)
        return msgspec.msgpack.decode(stored, type=StoredResponse)

    async def _run(self, operation: Operation, request: AdminRequest[Any, Any]) -> StoredResponse:
        """Runs the operation. Raises ApiError and StoreUnavailable."""
        try:
            result = await operation.serve(self._context, request)
        except NotFound:
            raise errors.not_found("token in this account" if "token_id" in request.names else "account") from None
        except (NameInUse, AmbiguousName) as problem:
            raise errors.conflict(str(problem)) from None
        except Conflict as problem:
            raise errors.conflict(str(problem)) if request.revision is None else errors.changed_meanwhile() from None
        return _response(result)


def _response(result: AdminResult[Any]) -> StoredResponse:
    if result.csv is not None:
        return StoredResponse([CSV, NO_STORE], result.csv.encode())
    page = UNSET if result.page is None else result.page
    body = msgspec.json.encode(Envelope(result.result, True, (), result.messages, page))
    etag = [] if result.revision is None else [(b"etag", b'"%d"' % result.revision)]
    return StoredResponse([JSON_CONTENT, NO_STORE, *etag], body)


def _revision(exchange: Exchange) -> int | None:
    """The revision that a change is based on: If-Match with an ETag, or 0 for `If-None-Match: *`, which asks that there
    is nothing yet. Raises ApiError."""
    unmatched = exchange.headers.get(b"if-none-match")
    if unmatched is not None:
        if unmatched.strip() != b"*":
            raise errors.bad_input("the header 'If-None-Match' can only be *")
        return 0
    etag = exchange.headers.get(b"if-match", b"*").strip()
    if etag == b"*":
        return None
    match = _ETAG.fullmatch(etag)
    return NEVER if match is None else int(match[1])
