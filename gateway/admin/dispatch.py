"""Serves the table of operations: finds the one, asks who calls, reads query, conditions and body, and writes the
answer. It knows no single operation.

In this order: who asks (401, 403, 404), the query and the body (400), the key of a creation (409, 422), the operation.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from gateway import errors
from gateway.admin.operation import (
    AdminContext,
    CursorItem,
    NoFields,
    Operation,
    OperationRequest,
    OperationResult,
    ResponseInfo,
    path_pattern,
)
from gateway.errors import ApiError
from gateway.http.exchange import JSON_CONTENT, Exchange, Header
from gateway.http.json_body import decode_body, decode_query
from gateway.listing.pages import PageItem
from tenants.auth.accounts import Caller, Conflict, NotFound, Permission
from tenants.store.protocol import StoreUnavailable

BODY_BYTES_MAX: Final = 64 << 10
ACCOUNT_ID: Final = re.compile(r"[0-9a-f]{32}")
NO_STORE: Final[Header] = (b"cache-control", b"no-store")
CSV: Final[Header] = (b"content-type", b"text/csv; charset=utf-8")
NEVER: Final = -1  # a revision that nothing has
_ETAG: Final = re.compile(rb'"([0-9]{1,18})"')

# Who asks, of the account that the path names, with one of these permissions where there are any. Raises Refusal.
Authenticate = Callable[[Exchange, str | None, Sequence[Permission]], Awaitable[Caller]]


class Envelope(msgspec.Struct, frozen=True):
    result: Any
    success: bool
    errors: tuple[()]
    messages: tuple[ResponseInfo, ...]
    result_info: PageItem | CursorItem | UnsetType = UNSET


class StoredResponse(msgspec.Struct, frozen=True, array_like=True):
    """An answer as it is sent, and kept for an Idempotency-Key."""

    headers: list[Header]
    body: bytes


@dataclass(frozen=True, slots=True)
class Resource:
    """A path that is served: its operations by method, and what its placeholders stand for."""

    operations: dict[str, Operation[Any, Any, Any]]
    names: dict[str, str]

    @property
    def route(self) -> str:
        """Its name in the metrics."""
        return "operator" if any(operation.hidden for operation in self.operations.values()) else "admin"


class AdminApi:
    """`operations` are served with `office`."""

    def __init__(
        self, operations: Sequence[Operation[Any, Any, Any]], office: AdminContext, authenticate: Authenticate
    ) -> None:
        self._office = office
        self._authenticate = authenticate
        by_path: dict[str, dict[str, Operation[Any, Any, Any]]] = {}
        for operation in operations:
            by_path.setdefault(operation.path, {})[operation.method] = operation
        self._places = [(path_pattern(path), methods) for path, methods in by_path.items()]
        bodies = {operation.body for operation in operations if operation.takes_body}
        self._decoders = {body: msgspec.json.Decoder(body) for body in bodies}

    def find(self, path: str) -> Resource | None:
        for place, operations in self._places:
            if found := place.fullmatch(path):
                return Resource(operations, found.groupdict())
        return None

    async def serve(self, exchange: Exchange, place: Resource) -> None:
        """Raises Refusal."""
        caller, operation = await self._permitted(exchange, place)
        query = decode_query(exchange.query, operation.query)
        if operation.csv and b"text/csv" in exchange.headers.get(b"accept", b""):
            query = msgspec.structs.replace(query, format="csv")
        sent = await exchange.body(BODY_BYTES_MAX) if operation.takes_body else b""
        body = self._body(operation, sent)
        ask = OperationRequest(caller, place.names, query, body, _revision(exchange) if operation.conditional else None)
        key = exchange.headers.get(b"idempotency-key") if operation.creates else None
        try:
            if key is None:
                written = await self._written(operation, ask)
            else:
                written = await self._written_once(exchange, operation, ask, key, sent)
        except StoreUnavailable as problem:
            self._office.gateway.outage.begin(problem)
            raise errors.store_unavailable() from None
        await exchange.answer(200, written.body, written.headers)

    async def _permitted(self, exchange: Exchange, place: Resource) -> tuple[Caller, Operation[Any, Any, Any]]:
        """Who asks, and what. On the operator's paths others are told what they are told of a path that is not."""
        account_id, path = place.names.get("account_id"), exchange.path
        operation = place.operations.get("GET" if exchange.method == "HEAD" else exchange.method)
        if place.route != "operator":
            _check_account_id(account_id, path)
            if operation is None:
                raise errors.method_not_supported(exchange.method, _methods(place))
            return await self._authenticate(exchange, account_id, operation.permissions), operation
        try:
            caller = await self._authenticate(exchange, None, (Permission.OPERATOR,))
        except ApiError as refusal:
            raise errors.no_route(path) if refusal.status == 403 else refusal from None
        _check_account_id(account_id, path)
        if operation is None:
            raise errors.method_not_supported(exchange.method, _methods(place))
        return caller, operation

    def _body(self, operation: Operation[Any, Any, Any], sent: bytes) -> Any:
        if not operation.takes_body:
            return NoFields()
        return decode_body(sent or b"{}" if operation.optional else sent, self._decoders[operation.body])

    async def _written_once(
        self,
        exchange: Exchange,
        operation: Operation[Any, Any, Any],
        ask: OperationRequest[Any, Any],
        key: bytes,
        sent: bytes,
    ) -> StoredResponse:
        async def create() -> bytes:
            return msgspec.msgpack.encode(await self._written(operation, ask))

        named = f"{ask.caller.token_id} {operation.method} {exchange.path}"
        kept = await self._office.once.answer(ask.caller.account.id, named, key.decode("latin-1"), sent, create)
        return msgspec.msgpack.decode(kept, type=StoredResponse)

    async def _written(self, operation: Operation[Any, Any, Any], ask: OperationRequest[Any, Any]) -> StoredResponse:
        """Raises Refusal and StoreUnavailable."""
        try:
            answer = await operation.serve(self._office, ask)
        except NotFound:
            raise (errors.no_such_token if "token_id" in ask.names else errors.no_such_account)() from None
        except Conflict as problem:
            raise errors.conflict(str(problem)) if ask.revision is None else errors.changed_meanwhile() from None
        return _written(answer)


def _written(answer: OperationResult[Any]) -> StoredResponse:
    if answer.csv is not None:
        return StoredResponse([CSV, NO_STORE], answer.csv.encode())
    page = UNSET if answer.page is None else answer.page
    body = msgspec.json.encode(Envelope(answer.result, True, (), answer.messages, page))
    etag = [] if answer.revision is None else [(b"etag", b'"%d"' % answer.revision)]
    return StoredResponse([JSON_CONTENT, NO_STORE, *etag], body)


def _revision(exchange: Exchange) -> int | None:
    """What the change is based on: If-Match with an ETag, or `If-None-Match: *` for what there must not be yet.
    Raises Refusal."""
    unmatched = exchange.headers.get(b"if-none-match")
    if unmatched is not None:
        if unmatched.strip() != b"*":
            raise errors.bad_input("the header 'If-None-Match' can only be *")
        return 0
    asked = exchange.headers.get(b"if-match", b"*").strip()
    if asked == b"*":
        return None
    found = _ETAG.fullmatch(asked)
    return NEVER if found is None else int(found[1])


def _check_account_id(account_id: str | None, path: str) -> None:
    if account_id is not None and ACCOUNT_ID.fullmatch(account_id) is None:
        raise errors.bad_account_id(path)


def _methods(place: Resource) -> str:
    return ", ".join("GET, HEAD" if method == "GET" else method for method in place.operations)
