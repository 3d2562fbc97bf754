"""Serves an App over sockets with uvicorn, and adds what uvicorn leaves out: limits on heads, and a drain that tells.

It does not know what the App answers.

On SIGTERM or SIGINT:  readiness false, new work 503 ─► what runs ends, at most drain_s ─► the rest gets an error event
─► the listener closes. A second signal skips the waiting.
"""

import asyncio
import functools
import gc
import math
import socket
from types import FrameType
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.app import App, build_app
from gateway.config import Config, ServerConfig

SEND_BUFFER_BYTES: Final = 256 << 10  # of the kernel, for each connection: what a client that does not read can hold
BACKLOG: Final = 4096
ACCEPTS: Final = 16  # connections that are accepted in one turn of the loop
KEEP_ALIVE_S: Final = 30
TOLD_S: Final = 2.0  # for the last error events to be written
_TICK_S: Final = 0.05
_HEAD_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)
_HEAD_TOO_SLOW: Final = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_MANY: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"
)


class HeadTooLarge(Exception):
    """A request's head passed header_bytes_max."""


class Protocol(HttpToolsProtocol):
    """uvicorn's httptools protocol with a bound on the head's size and time, on connections, and on a slow farewell."""

    def __init__(self, limits: ServerConfig, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._limits = limits
        self._in_head = True
        self._head_bytes = 0
        self._trailer_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._end(_TOO_MANY)
            return
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self._limits.header_bytes_max:
            self._end(_HEAD_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["hearth.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Also called for the trailers of a chunked body, which nobody reads."""
        if self._in_head:
            super().on_header(name, value)
            return
        self._trailer_bytes += len(name) + len(value) + 4
        if self._trailer_bytes > self._limits.header_bytes_max:
            raise HeadTooLarge

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_head = False
        self._head_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if self._head_bytes > self._limits.header_bytes_max:
            raise HeadTooLarge  # the parser stops, and send_400_response answers
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes, self._trailer_bytes = True, 0, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if max(self._head_bytes, self._trailer_bytes) > self._limits.header_bytes_max:
            self._end(_HEAD_TOO_LARGE)
        else:
            super().send_400_response(msg)

    def timeout_keep_alive_handler(self) -> None:
        """A client that does not read the end of its answer must not keep the connection either."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(self._limits.blocked_s, self.transport.abort)

    def _start_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.header_s, self._end, _HEAD_TOO_SLOW)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end(self, answer: bytes) -> None:
        """Refuses in one write, unless another answer is on its way: then the connection just ends."""
        self._stop_timer()
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        self.transport.write(answer)
        self.transport.close()


class Server(uvicorn.Server):
    """uvicorn's server around one App, with a drain. `serve` and `run` are uvicorn's own."""

    def __init__(self, app: App, limits: ServerConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=limits.host,
                port=limits.port,
                http=functools.partial(Protocol, limits),  # type: ignore[arg-type]
                ws="none",
                loop="uvloop",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(TOLD_S),
            )
        )
        self._app = app
        self._limits = limits
        self._hurry = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal starts the drain, the second ends the waiting."""
        self._hurry = self.should_exit
        self._captured_signals.append(sig)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Watches the listener through copies: uvloop accepts one connection for each in a turn of the loop, and behind
        turns that write to hundreds of streams new clients would queue for longer than they are served."""
        assert sockets, "the listener is open before the server starts"
        await super().startup([listener.dup() for listener in sockets for _ in range(ACCEPTS)])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.drain()
        await self._until_idle(self._limits.drain_s)
        self._app.interrupt()
        await self._until_idle(TOLD_S)
        await super().shutdown(sockets)
        self._captured_signals.clear()  # they were obeyed: the process ends by itself, with status 0

    async def _until_idle(self, seconds: float) -> None:
        """Returns once no request runs, at the latest after `seconds`, and at once after a second signal."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self._app.open_requests and loop.time() < deadline and not self._hurry:  # noqa: ASYNC110 signals set no event
            await asyncio.sleep(_TICK_S)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket whose connections have a bounded send buffer. Port 0 takes a free one. Raises OSError."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def serve(config: Config, secret: bytes) -> int:
    """Serves until a signal ends it and all that ran has ended or was told. Call it on the main thread.

    Returns 0. Raises OSError where the port cannot be taken, and what `build_app` raises.
    """
    app = build_app(config, secret)
    listener = listen(config.server.host, config.server.port)
    gc.collect()
    gc.freeze()  # what stays for good: going through it again would stop all streams for some 15 ms each time
    Server(app, config.server).run([listener])
    return 0
