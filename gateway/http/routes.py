"""Starlette routes whose endpoints serve an Exchange: methods, served names, refusals and the count of answers.

It knows no single path.
"""

import logging
import traceback
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from gateway import errors
from gateway.errors import ApiError
from gateway.http.client_address import ClientAddressPolicy
from gateway.http.cross_origin import CrossOriginPolicy
from gateway.http.error_format import ErrorFormat
from gateway.http.exchange import ClientDisconnected, Exchange, ExchangeTimeouts
from gateway.settings.server import ServerConfig

# Serves one exchange; what it raises is answered. Raises ApiError and ClientDisconnected.
Handler = Callable[[Exchange], Awaitable[None]]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExchangeServer:
    """Owns each request from first to last: when `serve` returns it is answered, or its client is gone.

    `clock` is monotonic seconds. `on_answered` gets the route's name in the metrics and the status; None if the client
    left before there was one. `on_refused` gets each refusal before it is answered.
    """

    clients: ClientAddressPolicy
    origins: CrossOriginPolicy
    timeouts: ExchangeTimeouts
    clock: Callable[[], float]
    on_answered: Callable[[str, int | None], None]
    on_refused: Callable[[Exchange, ApiError], None]

    @classmethod
    def of(
        cls,
        limits: ServerConfig,
        clock: Callable[[], float],
        on_answered: Callable[[str, int | None], None],
        on_refused: Callable[[Exchange, ApiError], None] = lambda exchange, refusal: None,
    ) -> "ExchangeServer":
        timeouts = ExchangeTimeouts(limits.body_s, limits.first_byte_s, limits.ping_s, limits.blocked_s)
        origins = CrossOriginPolicy(limits.allowed_origins)
        return cls(ClientAddressPolicy(limits), origins, timeouts, clock, on_answered, on_refused)

    async def serve(self, endpoint: "Endpoint", scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request with the endpoint's handler; raises nothing."""
        client, request_id = self.clients.client_address(scope), str(uuid.uuid4())
        exchange = Exchange(scope, receive, send, self.timeouts, request_id, self.clock, client)
        exchange.origin_headers = self.origins.headers(exchange.headers.get(b"origin"))
        try:
            if not endpoint.any_host and not self.clients.serves_host(exchange.headers[b"host"]):
                raise errors.misdirected()
            exchange.error_format = endpoint.error_format
            if "\n" in exchange.path:  # a pattern's final `$` matches before a line break, too
                raise errors.no_route(exchange.path)
            if not await self.origins.answer_preflight(exchange):
                await endpoint.handler(exchange)
        except ApiError as refusal:
            self.on_refused(exchange, refusal)
            await exchange.refuse(refusal)
        except ClientDisconnected:
            pass
        except Exception as error:
            log.error("request_failed", extra={"fields": _failure(exchange, error)})
            await exchange.refuse(errors.internal())
        finally:
            self.on_answered(exchange.route, exchange.status)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What one path answers, as an ASGI application.

    `any_host`: it answers to any Host, since probes and scrapers come by address.
    """

    server: ExchangeServer
    handler: Handler
    error_format: ErrorFormat = ErrorFormat.ENVELOPE
    any_host: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.server.serve(self, scope, receive, send)


def by_method(route: str, **handlers: Handler) -> Handler:
    """Builds a path's handler from one for each method; `route` is its name in the metrics. HEAD is GET without the
    answer's body, which the server leaves out. The handler raises ApiError for other methods."""
    allowed = ", ".join("GET, HEAD" if method == "GET" else method for method in handlers)

    async def serve(exchange: Exchange) -> None:
        handler = handlers.get("GET" if exchange.method == "HEAD" else exchange.method)
        if handler is None:
            raise errors.method_not_supported(exchange.method, allowed)
        exchange.route = route
        await handler(exchange)

    return serve


async def no_route(exchange: Exchange) -> None:
    """Refuses a path that leads nowhere."""
    raise errors.no_route(exchange.path)


def _failure(exchange: Exchange, error: Exception) -> dict[str, object]:
    """The log's fields: where the error came from, without its message, which may quote what a caller sent."""
    frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    return {"request": exchange.request_id, "error": type(error).__name__, "where": frames}
