"""Endpoints as ASGI applications: whatever a handler does, the request is answered and counted once."""

import json
from typing import Any

import pytest
from starlette.routing import Route, Router

from gateway import errors
from gateway.http.error_format import ErrorFormat
from gateway.http.exchange import ClientDisconnected, Exchange
from gateway.http.routes import Endpoint, ExchangeServer, by_method, no_route
from gateway.settings.server import ServerConfig

pytestmark = pytest.mark.anyio


class World:
    """A router with one path, and what it counted and answered."""

    def __init__(self, handler: Any, **config: Any) -> None:
        self.counted: list[tuple[str, int | None]] = []
        self.sent: list[dict[str, Any]] = []
        server = ExchangeServer.of(ServerConfig(**config), lambda: 0.0, lambda *answer: self.counted.append(answer))
        routes = [
            Route("/one/{name}", Endpoint(server, by_method("one", GET=handler, DELETE=handler))),
            Route("/probe", Endpoint(server, by_method("probe", GET=handler), any_host=True)),
            Route("/v1/{name}", Endpoint(server, by_method("v1", GET=handler), ErrorFormat.OPENAI)),
        ]
        self.router = Router(routes, redirect_slashes=False, default=Endpoint(server, no_route))

    async def call(self, method: str, path: str, host: bytes = b"x") -> tuple[int, dict[bytes, bytes], Any]:
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": [(b"host", host)],
            "client": ("127.0.0.1", 1),
        }

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            self.sent.append(message)

        self.sent.clear()
        await self.router(scope, receive, send)
        head, body = self.sent
        return head["status"], dict(head["headers"]), json.loads(body["body"])


async def show(exchange: Exchange) -> None:
    await exchange.answer(200, json.dumps(exchange.path_params).encode(), [])


async def test_a_handler_gets_what_the_path_says_and_head_is_get() -> None:
    world = World(show)
    for method in ("GET", "HEAD", "DELETE"):
        assert (await world.call(method, "/one/thing"))[::2] == (200, {"name": "thing"})
    assert world.counted == [("one", 200)] * 3


async def test_other_paths_and_methods_are_refused_and_counted_without_a_route() -> None:
    world = World(show)
    status, headers, body = await world.call("POST", "/one/thing")
    assert (status, headers[b"allow"], body["errors"][0]["code"]) == (405, b"GET, HEAD, DELETE", 7001)
    for path in ("/one", "/one/", "/one/thing/", "/one/thing\n", "/"):
        status, _, body = await world.call("GET", path)
        assert (status, body["errors"][0]["code"]) == (404, 7000), path
    assert world.counted == [("none", 405), *[("none", 404)] * 5]


async def test_a_path_with_a_line_break_is_refused_in_its_routes_format() -> None:
    world = World(show)
    status, _, body = await world.call("GET", "/v1/thing\n")
    assert (status, body["error"]["code"], body["errors"][0]["code"]) == (404, "not_found", 7000)


async def test_a_host_that_is_not_served_reaches_probes_alone() -> None:
    world = World(show, hosts=["ai.example.com"])
    assert (await world.call("GET", "/one/thing", b"ai.example.com"))[0] == 200
    assert (await world.call("GET", "/one/thing", b"10.0.0.1"))[0] == 421
    assert (await world.call("GET", "/probe", b"10.0.0.1"))[0] == 200
    assert world.counted == [("one", 200), ("none", 421), ("probe", 200)]


async def test_a_refusal_and_a_fault_are_answered_and_logged_without_what_was_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def refuse(exchange: Exchange) -> None:
        raise errors.conflict("it is there")

    async def fail(exchange: Exchange) -> None:
        raise RuntimeError("secret")

    world = World(refuse)
    assert (await world.call("GET", "/probe"))[0] == 409
    assert not caplog.records
    world = World(fail)
    assert (await world.call("GET", "/probe"))[0] == 500
    assert world.counted == [("probe", 500)]
    (record,) = caplog.records
    assert record.fields["error"] == "RuntimeError"  # type: ignore[attr-defined]
    assert "secret" not in str(vars(record))


async def test_a_client_that_disconnected_is_counted_without_a_status() -> None:
    async def leave(exchange: Exchange) -> None:
        raise ClientDisconnected

    world = World(leave)
    with pytest.raises(ValueError, match="not enough values"):
        await world.call("GET", "/probe")
    assert world.counted == [("probe", None)]
